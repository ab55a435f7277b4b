"""Passes to edits: where a pass acts (matcher), what it brings (networks), the edit, and whether it changed what it may."""
