"""Limits of client connections: their number, their bytes in flight, and how long each may make no progress."""
