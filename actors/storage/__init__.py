"""Below the pool: copies of states in host memory and in files, and the seam through which the cache asks for them."""
