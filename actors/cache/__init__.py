"""The cache actor: free slots, the radix tree of states, KV pages, and the two seams that policies and tiers plug into.

The files of this folder import nothing from its subfolders. `worth/` holds the eviction policy of the server,
`below/` the copies of states in host memory and on disk, and `below/assembly.py` puts the three together.
"""
