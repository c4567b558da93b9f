"""The chat page: markup, styles and scripts, served as one file."""
