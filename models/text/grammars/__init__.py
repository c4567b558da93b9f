"""Grammars that an output has to follow, and what says which token may come next."""
