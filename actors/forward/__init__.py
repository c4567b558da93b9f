"""Forward: the device, its streams, and the slots of running requests."""
