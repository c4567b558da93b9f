"""Loading of models from checkpoint folders."""
