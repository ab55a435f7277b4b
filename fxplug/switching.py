"""Adapters that come and go in the slots of a module: load, use, unload."""
