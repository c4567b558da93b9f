"""The formats of quantized safetensors: from the stored tensors of a weight to its values, or to its integers."""
