"""What was trained and what is served are the same numbers: a saved and loaded module gives the bits of the trained one."""

from __future__ import annotations

import pytest
import small
import torch

import fxplug

AT = {"at": "blocks.*.mlp.*"}
PASSES = {
    "lora": {**AT, "rank": 2}, "dora": {**AT, "rank": 2}, "loha": {**AT, "rank": 2}, "lokr": {**AT, "rank": 2}, "vera": AT,
    "oft": {**AT, "block_size": 8}, "boft": AT, "delta": AT, "bitfit": AT, "ssf": AT, "weight_norm": AT,
    "adapter": {"bottleneck": 4}, "vpt": {"tokens": 3}, "head": {"classes": 3},
}  # fmt: skip
FORMS = {
    "as rewritten": lambda module: module,
    "fused": lambda module: fxplug.lower(module, fuse="fused"),
    "outlined": lambda module: fxplug.lower(module, fuse=None, outline="auto"),
    "compiled": lambda module: torch.compile(module, backend="aot_eager", fullgraph=True),
}


def trained(new, run, x):
    added = {entry["name"] for entry in new.meta["passes"]}
    optimizer = torch.optim.AdamW([p for k, p in new.named_parameters() if k.partition(".")[0] in added], lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        run(x).square().mean().backward()
        optimizer.step()


COMPILED = ("lora", "dora", "delta")  # one of each way to attach: parameters, weights, a value in a weight's place
CASES = [(name, form) for name in PASSES for form in FORMS if form != "compiled" or name in COMPILED]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), CASES)
def test_the_saved_module_gives_the_bits_of_the_trained_one(name, form, tmp_path):
    base = small.plain_vit()
    (x,) = base.args
    new = fxplug.apply(base.gm, fxplug.load_pass(name, **PASSES[name]))
    before = new(x)
    run = FORMS[form](new)
    trained(new, run, x)
    now = new(x)
    assert not torch.equal(now, before)
    fxplug.save(new, tmp_path / "saved")
    served = fxplug.load(tmp_path / "saved")
    assert torch.equal(served(x), now)
    with torch.no_grad():
        assert torch.equal(FORMS[form](served)(x), run(x))
