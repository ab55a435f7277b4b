"""A sample of the model zoo: the traced module is the model, bit for bit. `make zoo` runs all of it."""

import pytest
from exact import check
from zoo import cases


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in cases() if c.fast])
def test_the_traced_module_is_the_model(case):
    row = check(case)
    assert row["problems"] == [] and row["refused"] == []


def test_every_case_has_one_name():
    names = [c.name for c in cases()]
    assert len(names) == len(set(names))
