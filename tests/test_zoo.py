"""A sample of the model zoo: the traced module is the model, bit for bit. `make zoo` runs all of it."""

import pytest
from exact import check
from zoo import cases

# inputs that the model takes and the graph turns away with a GuardError, because the model's own Python decides on them
REFUSED = {
    "diffusers/PixArtTransformer2DModel": (5, "self.height != height"),  # its own resolution takes another way
    "diffusers/Lumina2Transformer2DModel": (9, "tolist"),  # a loop over the batch
    "timm/eva": (5, "float(s)"),  # positions are Python numbers
}


SLOW = {"diffusers/UNetSpatioTemporalConditionModel"}  # the largest graph of these; other UNets and videos are among them


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=pytest.mark.slow if c.name in SLOW else []) for c in cases() if c.fast]
)
def test_the_traced_module_is_the_model(case):
    row = check(case)
    count, why = REFUSED.get(case.name, (0, ""))
    assert row["problems"] == [] and len(row["refused"]) == count
    assert not count or any(why in text for text in row["refused"])


def test_every_case_has_one_name():
    names = [c.name for c in cases()]
    assert len(names) == len(set(names))
