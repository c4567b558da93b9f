"""What a step uploads, enqueues and brings back, on the way of torch."""
