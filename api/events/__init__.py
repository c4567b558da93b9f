"""The events from which routers learn what this engine does and has."""
