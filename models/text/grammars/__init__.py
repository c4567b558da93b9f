"""Grammars that constrain outputs, and the matchers that say which tokens may come next."""
