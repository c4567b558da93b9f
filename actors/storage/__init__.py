"""Storage for copies of states: host memory, files, and the interface between the cache and the disk."""
