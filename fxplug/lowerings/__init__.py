"""Lowerings: rewrites that change how fast a module runs, never what it computes."""
