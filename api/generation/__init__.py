"""Generation for all APIs: from the fields of a body to a request in the ring, and from its outputs to one reader."""
