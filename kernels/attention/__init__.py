"""Attention over pages of keys and values, rotary embeddings, and the cache entries of latent attention (MLA)."""
