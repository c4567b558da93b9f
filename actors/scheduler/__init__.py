"""The scheduler: the queue, the running rows, and what the next step does."""
