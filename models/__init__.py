"""Models: one file per family, which wires shared layers by config.json and maps the checkpoint's weights to them."""
