"""Between the pools and host memory."""
