"""Matrix products in C++: tiles of results in vector registers, and in the tile registers of AMX."""
