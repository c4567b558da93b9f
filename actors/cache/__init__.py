"""The cache actor: free slots, the radix tree of states, KV pages, and the interfaces to eviction policy and tiers.

The files of this folder import nothing from its subfolders. `worth/` holds the eviction policy of the server,
`below/` the copies of states in host memory and on disk. `below/assembly.py` puts actor, policy and tiers together.
"""
