"""Copies between the pools and host memory."""
