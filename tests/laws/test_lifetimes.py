"""What is made of a model goes when the last who holds it lets go: no cache keeps weights alive."""

from __future__ import annotations

import gc
import weakref

import small
from sweeps import sweep

import fxplug

WAYS = {
    "trace": lambda gm, args: gm,
    "apply": lambda gm, args: fxplug.apply(gm, fxplug.load_pass("lora", at="blocks.*.mlp.fc1", rank=2)),
    "slots": lambda gm, args: fxplug.apply(gm, fxplug.load_pass("lora", at="blocks.*.mlp.fc1", rank=2, slots=2)),
    "find": lambda gm, args: fxplug.find(gm, fxplug.load_pass("loha", at="blocks.*.mlp.*")),
    "lower": lambda gm, args: fxplug.lower(WAYS["apply"](gm, args), fuse=True),
    "merge": lambda gm, args: fxplug.merge(WAYS["apply"](gm, args)),
    "live merge": lambda gm, args: fxplug.lower(WAYS["slots"](gm, args), merge="live"),
    "verify": lambda gm, args: fxplug.verify(gm, WAYS["apply"](gm, args), args, compile=False),
    "plan": lambda gm, args: fxplug.parallelize(gm, fxplug.parallel_plan(gm, args, ulysses=2, check=False)),
    "tensor": lambda gm, args: fxplug.parallel_plan(gm, args, tensor=2, check=False),
}


@sweep("way", WAYS, "slots", "lower", "verify")
def test_nothing_keeps_weights_alive(way):
    base = small.vit.__wrapped__()  # one of its own
    gm, args = base.gm, base.args
    del base
    held = [weakref.ref(p) for p in gm.parameters()]
    made = WAYS[way](gm, args)
    assert made is not None and all(ref() is not None for ref in held)
    del gm, args, made
    gc.collect()
    assert [ref() for ref in held if ref() is not None] == []


def test_a_checkpoint_is_read_once_for_all_layers_and_goes_with_the_model(tmp_path, monkeypatch):
    from torch import nn, save

    from fxplug.blocks import image_attention
    from fxplug.blocks.image_attention import _checkpoint, _files

    reads, real = [], image_attention._read
    monkeypatch.setattr(image_attention, "_read", lambda file: reads.append(file) or real(file))
    save({"ip_adapter": {"1.to_k_ip.weight": nn.Linear(2, 2).weight.detach()}}, tmp_path / "ip.bin")
    root, other = nn.Linear(1, 1), nn.Linear(1, 1)
    for model in (root, root, other):
        assert list(_checkpoint(str(tmp_path / "ip.bin"), model)) == ["1.to_k_ip.weight"]
    assert len(reads) == 2 and root in _files
    del root, other, model
    gc.collect()
    assert len(_files) == 0
