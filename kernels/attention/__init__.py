"""Attention: over pages, rotary embeddings, and the cache of latent attention."""
