"""The call of a compiled program, as JSON."""
