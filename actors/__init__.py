"""The ring: scheduler, cache, forward and result-processor, and the messages that they exchange."""
