"""Clusters: the processes of one file, started, watched and scaled."""
