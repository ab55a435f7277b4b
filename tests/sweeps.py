"""Parameters of which a few are quick; the others, which hold the same for more models, run with the slow tests."""

from __future__ import annotations

from typing import Any

import pytest


def sweep(names: str | tuple[str, ...], values: Any, *quick: Any, **options: Any) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` whose `values` are slow but for the `quick` ones: given as they are, or by their positions."""
    rows = list(values)
    chosen = [rows[row] if type(row) is int else row for row in quick]
    if missing := [row for row in chosen if row not in rows]:
        raise ValueError(f"no such values: {missing}")
    many = not isinstance(names, str) or "," in names
    marked = [row if row in chosen else pytest.param(*(row if many else [row]), marks=pytest.mark.slow) for row in rows]
    return pytest.mark.parametrize(names, marked, **options)
