"""Forward: the device and its stream, and the slots of running requests."""
