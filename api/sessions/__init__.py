"""Sessions: a log with a name and an owner, its turns, and its file."""
