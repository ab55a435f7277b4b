"""Measures the forms of layers at the shapes of a module, and keeps what was found."""
