"""A sample of the model zoo: the traced module is the model, bit for bit. `make zoo` runs all of it."""

import sys
from pathlib import Path

import pytest
from exact import check
from zoo import cases

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import exactness  # noqa: E402

# inputs that the model takes and the graph turns away with a GuardError, because the model's own Python decides on them
REFUSED = {
    "diffusers/PixArtTransformer2DModel": (5, "self.height != height"),  # its own resolution takes another way
    "diffusers/Lumina2Transformer2DModel": (8, "tolist"),  # a loop over the batch
}

# the modules that are no graph, and are kept whole: none of these models needs any
WHOLE: dict[str, list[str]] = {}
KEPT = [f"visual_transformer_blocks.{i}.self_attention" for i in (0, 1)]


# the largest graphs of these; other UNets, transformers and convolutions are among them
SLOW = {
    "diffusers/UNetSpatioTemporalConditionModel", "diffusers/UNet2DConditionModel-sd2", "diffusers/UNet2DConditionModel-sdxl",
    "diffusers/UNet2DModel", "diffusers/Lumina2Transformer2DModel", "timm/eva", "timm/levit", "timm/mlp_mixer",
    "timm/mobilenetv3", "timm/nfnet", "timm/regnet", "timm/swin_transformer", "timm/test_maxvit", "timm/tf_efficientnet_lite0",
}  # fmt: skip

@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=pytest.mark.slow if c.name in SLOW else []) for c in cases() if c.fast]
)
def test_the_traced_module_is_the_model(case):
    row = check(case)
    count, why = REFUSED.get(case.name, (0, ""))
    assert row["problems"] == [] and len(row["refused"]) == count
    assert not count or any(why in text for text in row["refused"])
    assert row["leaves"] == WHOLE.get(case.name, [])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # flex attention's, as it is not compiled
def test_what_is_kept_whole_is_listed_and_counted(capsys, monkeypatch):
    """Of the whole zoo two models need it; this is one of them."""
    name = "diffusers/Kandinsky6SRTransformer3DModel"
    monkeypatch.setattr("sys.argv", ["exactness", name])
    assert exactness.main() == 0
    told = capsys.readouterr().out
    assert "\n1 of the exact ones have modules that are kept whole:\n    " + f"{name}: {', '.join(KEPT)}\n" in told


def test_every_case_has_one_name():
    names = [c.name for c in cases()]
    assert len(names) == len(set(names))
