"""The events by which routers know this engine."""
