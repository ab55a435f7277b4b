"""Pipelines: their models traced with what one real call gives them, and saved with what was made of these."""
