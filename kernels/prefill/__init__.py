"""How a packed prefill is cut into chunks, and the plans that its operations follow."""
