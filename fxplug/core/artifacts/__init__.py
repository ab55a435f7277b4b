"""A rewritten model as a folder: written whole, read as data."""
