"""Workloads run through the real ring in virtual time: what a cache policy keeps, and what that saves."""
