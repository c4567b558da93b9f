"""The parts of a step on the torch device: its upload, the work it enqueues, and its results."""
