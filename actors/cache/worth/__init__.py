"""The server's eviction policy: what kind each state is, how likely it is to be used, and what it is worth."""
