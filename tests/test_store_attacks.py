"""A small form of the random attack on folders of adapters that change."""

from __future__ import annotations

import pytest
from fuzz_store import fuzz_store


@pytest.mark.slow
def test_files_that_change_under_leases():
    assert fuzz_store(2, 11) == []
