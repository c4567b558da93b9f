"""From a checkpoint folder to a model."""
