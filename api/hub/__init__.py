"""Models by their name on the Hugging Face hub: which files are needed, and how they get into the hub's cache."""
