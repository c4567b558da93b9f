"""Connections: how many there are, how many bytes they hold, and how long they may make no progress."""
