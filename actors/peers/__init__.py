"""Links to other engines, and the movers that carry states over them."""
