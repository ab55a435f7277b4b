"""Adapters at run time: files read, placed on a graph's layers, and switched in its slots."""
