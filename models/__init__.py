"""Model families: config, layer wiring and weight map, one file each over shared layers."""
