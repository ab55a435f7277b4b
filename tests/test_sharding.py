"""FSDP2 of outlined regions: two processes learn what one learns, and give the weights back under their names."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import processes
import pytest
import small
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fxplug
from fxplug.lowerings.regions.fsdp import full_state, shard
from fxplug.lowerings.regions.submodules import outline
from fxplug.training.distributed import prepare
from fxplug.training.train_section import Train

STEPS, BATCH = 4, 8
NAMES = ("vit", "tied")


class Tied(nn.Module):
    """Blocks of which two share a weight, and one whose weight the model uses itself."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 12)) for _ in range(4)])
        self.blocks[1][0].weight = self.blocks[0][0].weight

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return F.linear(x, self.blocks[3][0].weight)


def learner(name):
    if name == "tied":
        base = small.traced(small.seeded(Tied).eval(), torch.randn(2, 12))
        x = small.seeded(lambda: torch.randn(BATCH, 12))
    else:
        import timm

        make = lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)  # noqa: E731
        base = small.traced(small.seeded(make).eval(), torch.randn(2, 3, 32, 32))
        x = small.seeded(lambda: torch.randn(BATCH, 3, 32, 32))
    gm = small.seeded(lambda: fxplug.apply(base.gm, fxplug.load_pass("lora", rank=4)))
    for key, parameter in gm.named_parameters():
        parameter.requires_grad_(key.startswith("lora.") or name == "tied")
    return gm, x


def learn(name, rank, world, file):
    """A few steps of one process on its part of the batch; the first one writes losses and weights."""
    torch.set_num_threads(1)
    gm, x = learner(name)
    module = outline(gm, ["blocks.*"], checkpoint=True).train()
    whole = {key: value.detach().clone() for key, value in full_state(module, trainable=False).items()}
    if world > 1:
        shard(module)
        units = {k for k, path in module.meta["regions"].items() if "FSDP" in type(module.get_submodule(path)).__name__}
        assert units == ({"blocks.2"} if name == "tied" else set(module.meta["regions"]))
        held = sum(p.to_local().numel() for p in module.parameters())
        assert held < 0.6 * sum(p.numel() for p in gm.parameters())  # frozen weights as well
        assert all(torch.equal(value, whole[key]) for key, value in full_state(module, trainable=False).items())
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], 1e-2)
    part, losses = slice(rank * BATCH // world, (rank + 1) * BATCH // world), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = module(x[part]).square().mean(-1).sub(torch.arange(BATCH)[part] / BATCH).square().mean()
        loss.backward()
        optimizer.step()
        loss = loss.detach().clone()
        if world > 1:
            dist.all_reduce(loss)
        losses.append(loss.item() / world)
    state = full_state(module)
    assert set(state) == {key for key, p in gm.named_parameters() if p.requires_grad}
    if rank == 0:
        with open(file, "w") as out:
            json.dump([losses, {key: value.flatten().tolist() for key, value in state.items()}], out)


def process(rank, folder):
    for name in NAMES:
        learn(name, rank, 2, folder / f"{name} two")


@pytest.mark.slow
def test_two_processes_learn_what_one_does(tmp_path):
    processes.group(process, tmp_path)
    for name in NAMES:
        learn(name, 0, 1, tmp_path / f"{name} one")
        (one, weights), (two, again) = (json.loads((tmp_path / f"{name} {n}").read_text()) for n in ("one", "two"))
        assert two == pytest.approx(one, rel=1e-5) and one[-1] != pytest.approx(one[0], rel=1e-2)
        assert weights.keys() == again.keys()
        for key, value in weights.items():
            torch.testing.assert_close(torch.tensor(again[key]), torch.tensor(value), rtol=1e-3, atol=1e-4)


@pytest.fixture
def alone():
    with processes.alone():
        yield


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # asked by dynamo
def test_what_is_sharded_is_compiled_in_parts(alone, monkeypatch):
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, **options: compiler(module, backend="eager", **options))
    new = copy.deepcopy(fxplug.apply(small.plain_vit().gm, fxplug.load_pass("lora", at="blocks.**", rank=2)))
    want = new(*small.plain_vit().args)
    settings = Train(task="classify", steps=1, fuse=False, compile=True, shard=True)
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=1)
    runner, sharded = prepare(new, settings, set(), accelerator)
    assert sharded is not None
    got = runner(*small.plain_vit().args)
    torch.testing.assert_close(got, want)
    got.square().mean().backward()


def test_quantised_weights_that_no_shards_can_be_made_of(alone):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = copy.deepcopy(small.plain_vit().model)
    quantize_(model, Int8WeightOnlyConfig())
    outlined = outline(fxplug.trace(model, small.plain_vit().args))
    with pytest.raises(fxplug.SpecError, match="quantised .Int8Tensor of torchao., and the library cannot cut"):
        shard(outlined)


def test_what_cannot_be_sharded():
    gm = small.vit().gm
    with pytest.raises(fxplug.SpecError, match="takes an outlined module"):
        shard(gm)
    with pytest.raises(fxplug.SpecError, match="needs several processes"):
        shard(outline(gm, ["blocks.*"]))
    with pytest.raises(fxplug.SpecError, match="takes an outlined module"):
        full_state(gm)


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
@torch.no_grad()  # with gradients dynamo warns of .grad of its own tensors
def test_what_is_sharded_compiles_before_it_was_called(training):
    """fully_shard gives a module another class: code that dynamo's first analysis writes is another forward to its next."""
    import diffusers

    options = {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "num_layers": 3, "sample_size": 8}
    make = lambda: diffusers.DiTTransformer2DModel(**options, num_embeds_ada_norm=1000)  # noqa: E731
    call = {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 7]), "class_labels": torch.tensor([1, 2])}
    gm = fxplug.trace(small.seeded(make).eval(), kwargs=call)
    wanted = small.seeded(lambda: gm.train(training)(**call).sample)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        module = shard(outline(gm.eval())).train(training)
        found = small.seeded(lambda: torch.compile(module, backend="aot_eager")(**call).sample)
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(found, wanted)
