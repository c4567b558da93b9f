"""The result-processor: token histories, text, stop conditions, and what a finished state is worth."""
