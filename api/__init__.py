"""HTTP: everything between a client's connection and the ring."""
