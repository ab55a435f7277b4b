"""Denoisers that take part of a step from earlier steps."""
