"""The architectures of GGUF files: their metadata as a config.json, and their names of tensors."""
