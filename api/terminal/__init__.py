"""`baton chat`, and what else is drawn on a terminal."""
