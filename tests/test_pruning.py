"""What no graph uses goes from the module and from what is saved of it; all else stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import small
import torch

import fxplug
from fxplug import Match, Pass, Rule
from fxplug.core.errors import GuardError, SpecError


def cut(path, name="cut"):
    """A pass that takes the regions out: their users get what the regions read."""
    return Pass(name, [Rule(Match(path=path), place="replace", args=["x"])])


def size(folder):
    return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())


def test_blocks_that_were_cut_leave_the_module_and_the_file(tmp_path):
    gm, args, _ = small.plain_vit()
    kept = dict(gm.state_dict())
    new = fxplug.apply(gm, cut("blocks.1.mlp"), fxplug.load_pass("lora", at="blocks.*.attn.qkv", rank=2, slots=1))
    less = fxplug.prune(new)
    assert torch.equal(less(*args), new(*args))
    assert kept.keys() == gm.state_dict().keys() and "blocks.1.mlp.fc1.weight" in new.state_dict(), "gm and new stay"
    gone = new.state_dict().keys() - less.state_dict().keys()
    assert gone == {key for key in kept if key.startswith("blocks.1.mlp.")}
    assert all(less.state_dict()[key].data_ptr() == new.state_dict()[key].data_ptr() for key in less.state_dict())
    assert not less.get_submodule("blocks.1.mlp")._modules
    fxplug.save(new, tmp_path / "all")
    fxplug.save(less, tmp_path / "less")
    bytes_gone = sum(kept[key].nbytes for key in gone)
    assert size(tmp_path / "all") - size(tmp_path / "less") >= bytes_gone
    again = fxplug.load(tmp_path / "less")
    assert torch.equal(again(*args), new(*args))
    ink = {f"base_model.model.blocks.0.attn.qkv.lora_{h}.weight": torch.ones(s) for h, s in (("A", (2, 96)), ("B", (288, 2)))}
    again.adapters.load("ink", ink)
    again.adapters.use("ink")
    assert not torch.equal(again(*args), new(*args))


def test_a_pruned_module_is_rewritten_merged_trained_and_copied_as_any():
    gm, args, _ = small.plain_vit()
    less = fxplug.prune(fxplug.apply(gm, cut("blocks.0.attn")))
    new = fxplug.apply(less, fxplug.load_pass("lora", at="blocks.*.mlp.*", rank=2))
    assert torch.equal(new(*args), less(*args))
    new.train()(*args).sum().backward()
    torch.testing.assert_close(fxplug.merge(new.eval())(*args), new(*args))
    assert torch.equal(fxplug.prune(less)(*args), less(*args)), "nothing more goes"
    assert fxplug.prune(less).state_dict().keys() == less.state_dict().keys()
    assert fxplug.prune(gm).state_dict().keys() == gm.state_dict().keys()
    with pytest.raises(SpecError, match="prune takes a traced module"):
        fxplug.prune(torch.nn.Linear(2, 2))
    with pytest.raises(SpecError, match="lowered already: prune takes the one"):
        fxplug.prune(fxplug.lower(new, fuse="fused"))


@pytest.mark.slow
def test_a_real_model_with_both_modes_and_its_variants():
    lite = small.lite()
    gm, args = lite.gm, lite.args
    new = fxplug.apply(gm, cut("blocks.2.1"))
    less = fxplug.prune(new)
    gone = new.state_dict().keys() - less.state_dict().keys()
    assert gone and all(key.startswith("blocks.2.1.") for key in gone)
    assert torch.equal(less(*args), new(*args))
    results = []
    state = {key: value.clone() for key, value in new.state_dict().items()}
    for module in (new, less):  # on the same statistics, which training moves
        new.load_state_dict(state)
        torch.manual_seed(0)
        results.append(module.train()(*args))
    assert torch.equal(*results) and not torch.equal(results[0], less.eval()(*args))


def test_tied_weights_keep_their_names_and_other_ways_of_calling_are_refused():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(7, 4)
            self.head = torch.nn.Linear(4, 7, bias=False)
            self.never = torch.nn.Linear(3, 3)
            self.head.weight = self.words.weight

        def forward(self, x, scale=1):
            return self.head(self.words(x)) * scale

    x = torch.arange(6).reshape(2, 3)
    model = Net().eval()
    gm = fxplug.variants(fxplug.trace(model, (x,)), model)
    less = fxplug.prune(gm)
    assert set(less.state_dict()) == {"words.weight", "head.weight"} and less.words.weight is less.head.weight
    assert torch.equal(less(x), gm(x))
    gm(x, scale=2)
    assert torch.equal(fxplug.prune(gm)(x, scale=2), gm(x, scale=2)), "a variant that is there stays"
    with pytest.raises(GuardError, match="loaded from an artifact"):
        less(x, scale=3)
