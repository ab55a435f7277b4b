"""A few of the stories over processes that `make fuzz` draws at random."""

from __future__ import annotations

from collections import Counter

import fuzz_processes
import processes
import pytest

OF_FOUR, CASES = 3010, range(3001, 3010)


def found(seed):
    """In a process that runs no backward pass, as it is forked."""
    counts = Counter()
    for _, text, miss in fuzz_processes.cases_of(1, seed, counts):
        assert miss is None, f"{text}: {miss}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", CASES)
def test_processes_give_what_one_gives_or_refuse_alike(seed, tmp_path):
    ended = processes.ended(found, seed, folder=tmp_path)
    assert ended.codes == [0], ended.stdout + ended.stderr


@pytest.mark.slow
def test_a_story_of_four_processes(tmp_path):
    ended = processes.ended(found, OF_FOUR, folder=tmp_path)
    assert ended.codes == [0], ended.stdout + ended.stderr
