"""Adapter files of any common layout, read into low-rank updates by layer."""
