"""The machine's resources: device, memory, threads and native code, and `baton doctor`, which reports them."""
