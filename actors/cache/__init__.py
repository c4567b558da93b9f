"""The cache: free slots, the radix tree of states, KV pages, session names, and the way of a state out of the pool."""
