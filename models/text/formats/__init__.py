"""What models write, taken apart: reasoning, and calls of tools; one file a format."""
