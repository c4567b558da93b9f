"""Storage for copies of states: host memory, files, and the seam between the cache and the disk."""
