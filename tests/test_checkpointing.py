"""Gradient checkpointing of traced modules by the methods of other libraries, and of models that are traced with it on."""

from __future__ import annotations

import pytest
import small
import timm
import torch
import unets
from sweeps import sweep

import fxplug


def of_timm(name, **options):
    model = small.seeded(lambda: timm.create_model(name, num_classes=5, **options))
    return model.train(), (small.seeded(lambda: torch.randn(2, 3, 64, 64)),), {}


def unet():
    model = small.seeded(unets.sd15_model)
    return model.train(), (), small.seeded(lambda: unets.inputs(model))


def bert():
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 20}
    config = transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return small.seeded(lambda: transformers.BertModel(config)).train(), (torch.randint(20, (2, 9)),), {}


CASES = {
    "unet": (unet, "enable_gradient_checkpointing", "disable_gradient_checkpointing"),
    "bert": (bert, "gradient_checkpointing_enable", "gradient_checkpointing_disable"),
    "vit": (lambda: of_timm("vit_tiny_patch16_224", img_size=64, depth=4), "set_grad_checkpointing", None),
    "drops": (
        lambda: of_timm("vit_tiny_patch16_224", img_size=64, depth=4, drop_path_rate=0.3),
        "set_grad_checkpointing",
        None,
    ),
    "resnet": (lambda: of_timm("resnet18"), "set_grad_checkpointing", None),
    "mixer": (lambda: of_timm("mixer_s32_224", img_size=64), "set_grad_checkpointing", None),
}


def step(module, args, kwargs):
    """Bytes kept for the backward pass beside weights, and the gradients."""
    seen: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    module.zero_grad()
    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(*args, **kwargs)
    fxplug.core.ir.containers.list_leaves(out)[0].square().sum().backward()
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return sum(size for key, size in seen.items() if key not in own), grads


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.slow
@sweep("name", list(CASES), "unet", "drops")
def test_it_is_switched_on_and_off_with_the_same_gradients(name, tmp_path):
    make, on, off = CASES[name]
    model, args, kwargs = make()
    gm = fxplug.trace(model, args, kwargs)
    before = {key: value.clone() for key, value in gm.state_dict().items()}
    plain, wanted = step(gm, args, kwargs)
    after = {key: value.clone() for key, value in gm.state_dict().items()}
    gm.load_state_dict(before)
    getattr(gm, on)()
    kept, found = step(gm, args, kwargs)
    assert kept < 0.7 * plain and same(found, wanted) and list(gm.state_dict()) == list(before)
    assert all(torch.equal(value, after[key]) for key, value in gm.state_dict().items())
    with torch.no_grad():
        gm.eval()(*args, **kwargs)
    layer = next(path for path, m in gm.named_modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d)))
    new = fxplug.apply(gm.train(), fxplug.load_pass("scale", at=layer))
    assert step(new, args, kwargs)[0] < 0.7 * plain
    again = fxplug.load(fxplug.save(new, tmp_path / "it"))
    assert step(again.train(), args, kwargs)[0] < 0.7 * plain
    gm.double()
    gm.float()
    assert step(gm, args, kwargs)[0] < 0.7 * plain
    getattr(gm, off or on)(*([] if off else [False]))
    assert step(gm, args, kwargs)[0] > 0.9 * plain


@pytest.mark.slow
@sweep("name", ["unet", "bert", "vit", "drops", "mixer"], "unet", "vit")
@pytest.mark.filterwarnings("ignore:.*use_reentrant", "ignore:.*is deprecated")
def test_a_model_that_is_traced_with_it_keeps_it(name):
    make, on, _ = CASES[name]
    model, args, kwargs = make()
    plain, _ = step(fxplug.trace(model, args, kwargs), args, kwargs)
    getattr(model, on)()
    theirs, wanted = step(model, args, kwargs)
    gm = fxplug.trace(model, args, kwargs)
    ours, found = step(gm, args, kwargs)
    assert ours < 0.7 * plain and ours < 1.5 * theirs and same(found, wanted)


def test_a_model_without_repeated_regions_says_so():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    gm = fxplug.trace(model, torch.randn(2, 4))
    with pytest.raises(fxplug.SpecError, match="computes repeated regions again, and the model has none"):
        gm.enable_gradient_checkpointing()
    assert "checkpointing" not in gm.meta and gm(torch.randn(2, 4)).shape == (2, 4)


def test_a_part_in_another_mode_is_refused():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=10, drop_path_rate=0.2)
    x = torch.randn(2, 3, 32, 32)
    gm = fxplug.trace(model, x).train()
    gm.set_grad_checkpointing()
    gm(x)
    gm.blocks[1].eval()
    with pytest.raises(fxplug.GuardError, match="a part of this module is in another mode"):
        gm(x)
    gm.set_grad_checkpointing(False)
    gm(x)
