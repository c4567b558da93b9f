"""The tiers below the pool: copies of states in host memory and in files, and the names of sessions."""
