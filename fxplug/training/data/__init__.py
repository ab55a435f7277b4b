"""Samples from folders, data sets and import paths, in batches of a fixed order."""
