"""Marks where a graph is cut into a full and a shallow one."""
