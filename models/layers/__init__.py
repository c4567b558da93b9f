"""Layers that the families share, and the settings that they read from config.json."""
