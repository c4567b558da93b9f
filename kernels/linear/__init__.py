"""Projections: by packed weights, by integer weights, and by a weight for each head."""
