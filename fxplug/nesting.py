"""Repeated regions as nested compile regions: each kind is compiled once."""
