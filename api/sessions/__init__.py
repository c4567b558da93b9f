"""Sessions: their token logs, turns, names, owners and files."""
