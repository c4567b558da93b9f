"""Workloads run through the real actors in virtual time, to compare how much of the prompts cache policies save."""
