"""(IA)3 in slots: files of PEFT loaded, switched, mixed, chosen by sample, merged and written again."""

import peft
import pytest
import torch
from many_adapters import base, build

import fxplug
from fxplug.core.errors import ArtifactError, SpecError

OPTIONS = {"at": ["qkv", "stem"], "feedforward": ["out"]}
X = torch.randn(4, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def trained(seed):
    """The model with gates of its own, drawn."""
    one = fxplug.apply(base(), fxplug.load_pass("ia3", **OPTIONS))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, gate in one.named_parameters():
            if name.startswith("ia3."):
                gate += torch.randn(gate.shape, generator=generator, dtype=gate.dtype)
    return one


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A module with three slots, two of them filled from PEFT's files, what has the gates of each alone, and the files."""
    folder = tmp_path_factory.mktemp("ia3")
    module, alone = fxplug.apply(base(), fxplug.load_pass("ia3", slots=3, **OPTIONS)), [trained(seed) for seed in range(2)]
    for number, one in enumerate(alone):
        fxplug.save_adapter(one, folder / f"a{number}")
        module.adapters.load(f"a{number}", folder / f"a{number}")
    return module, alone, folder


def far(one, two):
    return float((one - two).detach().abs().max())


@pytest.mark.slow
def test_slots_are_switched_mixed_and_chosen_by_sample(loaded, tmp_path):
    module, alone, _ = loaded
    module.adapters.use(None)
    plain = base()(X)
    assert torch.equal(module(X), plain)
    fxplug.verify(base(), module, X, compile=False)
    for number in range(2):
        module.adapters.use(f"a{number}")
        assert far(module(X), alone[number](X)) < 1e-12 and far(module(X), plain) > 0.01
    module.adapters.use(["a0", None, "a1", "a0"])
    chosen = torch.stack([alone[0](X)[0], plain[1], alone[1](X)[2], alone[0](X)[3]])
    assert far(module(X), chosen) < 1e-12
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert far(compiled(X), chosen) < 1e-12
    module.adapters.use({"a0": 0.5, "a1": 2.0})
    assert far(compiled(X), module(X)) < 1e-12
    gates = [dict(one.named_parameters())["ia3.qkv.Scale.weight"] for one in alone]
    block = module.get_submodule("ia3.qkv.Scale")
    assert far(block.combine(torch.tensor([0.5, 2.0, 0.0])), 1 + 0.5 * (gates[0] - 1) + 2 * (gates[1] - 1)) < 1e-12
    for merge in ("fold", "live"):
        assert far(fxplug.lower(module, merge=merge)(X), module(X)) < 1e-12
    live = fxplug.lower(module, merge="live")
    live.adapters.use("a1")
    assert far(live(X), alone[1](X)) < 1e-12
    fxplug.save(module, tmp_path / "saved")
    assert torch.equal(fxplug.load(tmp_path / "saved")(X), module(X))


def test_files_are_those_of_peft(loaded, tmp_path):
    module, alone, folder = loaded
    assert far(peft.PeftModel.from_pretrained(build(), folder / "a1")(X), alone[1](X)) < 1e-12
    module.adapters.save("a0", tmp_path / "again")
    assert far(peft.PeftModel.from_pretrained(build(), tmp_path / "again")(X), alone[0](X)) < 1e-12
    module.adapters.load("again", tmp_path / "again")
    with pytest.raises(SpecError, match="all 3 slots of pass 'ia3' are taken"):
        module.adapters.load("one more", tmp_path / "again")
    module.adapters.unload("again")
    with pytest.raises(ArtifactError, match=r"is \(IA\)3, which kohya cannot represent here: peft can"):
        fxplug.save_adapter(alone[0], tmp_path / "a.safetensors", as_="kohya")
    block = module.get_submodule("ia3.qkv.Scale")
    assert not block.weight[2].any()  # an empty slot


def test_a_file_of_passes_by_name_goes_into_slots(tmp_path):
    """A file in fxplug's own format, too, with the side of each gate, and what has no slot is named."""
    path, one = tmp_path / "own.safetensors", trained(3)
    fxplug.save_adapter(one, path, as_="fxplug")
    module = fxplug.apply(base(), fxplug.load_pass("ia3", slots=2, **OPTIONS))
    module.adapters.load("own", path)
    module.adapters.use("own")
    assert far(module(X), one(X)) < 1e-12
    with pytest.raises(SpecError, match="side='input', and the block at 'out' has side='output'"):
        fxplug.apply(base(), fxplug.load_pass("ia3", slots=1, at=["**"])).adapters.load("own", path)
    with pytest.raises(ArtifactError, match="1 layers have no slots here: 'out'"):
        fxplug.apply(base(), fxplug.load_pass("ia3", slots=1, at=["qkv", "stem"])).adapters.load("own", path)


class Twice(torch.nn.Module):
    """A layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.head = torch.nn.Linear(6, 6), torch.nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.first(torch.relu(self.first(x))))


def test_a_layer_that_is_called_twice_has_one_gate_in_a_slot(tmp_path):
    torch.manual_seed(0)
    gm, x = fxplug.trace(Twice().eval(), torch.randn(2, 6)), torch.randn(4, 6)
    paths = {}
    for name, at in (("both", "first"), ("second", "first@1")):
        one = fxplug.apply(gm, fxplug.load_pass("ia3", at=[at, "head"]))
        torch.nn.init.uniform_(one.get_parameter(next(n for n, _ in one.named_parameters() if "first" in n and "ia3" in n)))
        paths[name] = one, fxplug.save_adapter(one, tmp_path / f"{name}.safetensors", as_="fxplug")
    module = fxplug.apply(gm, fxplug.load_pass("ia3", at=["first", "head"], slots=2))
    one, _ = paths["both"]
    module.adapters.load("both", tmp_path / "both.safetensors")
    module.adapters.use("both")
    assert far(module(x), one(x)) < 1e-6 and far(module(x), gm(x)) > 1e-3
    match = "a gate for the calls first@1 of 'first', and the slots here have one for first, first@1: load it with load_adapter"
    with pytest.raises(ArtifactError, match=match):
        module.adapters.load("second", tmp_path / "second.safetensors")


def test_values_without_samples_have_one_choice():
    """Positions are one for all samples: a choice by sample that would change them is refused."""
    module = fxplug.apply(base(), fxplug.load_pass("ia3", at=["placed", "qkv"], slots=2))
    assert module.get_submodule("ia3.placed.Scale").batch_dim == -1
    gate = torch.full((12, 1), 2.0, dtype=torch.float64)
    module.adapters.load("a", {"base_model.model.placed.ia3_l": gate}, config={"peft_type": "IA3"})
    module.adapters.use("a")
    assert far(module(X), base()(X)) > 1e-3
    with pytest.raises(SpecError, match="'placed', whose input has no samples"):
        module.adapters.use(["a", None, "a", None])
