"""The scheduler: the queue, the running rows, and the plan of the next step."""
