"""Finds the layers of a graph that an adapter file names."""
