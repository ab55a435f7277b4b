"""The same seed, data and settings give the loss curve that PEFT's LoRA gives, as rewritten and fused."""

from __future__ import annotations

import copy
import warnings

import peft
import pytest
import small
import timm
import torch
import torch.nn.functional as F
import unets
from torch import nn

import fxplug
from fxplug.lowerings.linear import operators

STEPS, CLOSE = 50, 1e-4
VIT = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 4}


@pytest.fixture(scope="module")
def photos():
    """Pieces of 32x32 of four photographs, and which photograph each is from."""
    from skimage import data

    rows, labels = [], []
    for label, photo in enumerate((data.astronaut(), data.coffee(), data.chelsea(), data.rocket())):
        whole = torch.tensor(photo, dtype=torch.float32).permute(2, 0, 1) / 127.5 - 1
        rows.append(whole.unfold(1, 32, 32).unfold(2, 32, 32).permute(1, 2, 0, 3, 4).flatten(0, 1)[:64])
        labels += [label] * 64
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.cat(rows)[order], torch.tensor(labels)[order]


class Vit:
    pattern, targets = r"re:.*\.attn\.(qkv|proj)$", ["attn.qkv", "attn.proj"]

    def __init__(self, photos):
        self.images, self.labels = photos
        self.model = small.seeded(lambda: timm.create_model("vit_tiny_patch16_224", **VIT))
        self.example = {"x": self.images[:2]}

    def loss(self, module, step):
        rows = torch.arange(16 * step, 16 * step + 16) % len(self.images)
        return F.cross_entropy(module(self.images[rows]), self.labels[rows])


class Unet:
    pattern, targets = r"re:.*\.attn\d\.(to_q|to_k|to_v|to_out\.0)$", ["to_q", "to_k", "to_v", "to_out.0"]

    def __init__(self, photos):
        from diffusers import DDPMScheduler

        # of one level: its middle has attention, and there are layers before and after it
        self.model = small.seeded(lambda: unets.sd15_model(levels=1, block_out_channels=(16,)))
        call = small.seeded(lambda: unets.inputs(self.model))
        names = "sample", "encoder_hidden_states"
        self.example = {**{name: call[name] for name in names}, "timestep": torch.tensor([500, 3])}
        self.scheduler, self.words = DDPMScheduler(), call["encoder_hidden_states"].shape[1:]
        image = F.interpolate(photos[0], size=(16, 16), mode="area")
        self.images = torch.cat([image, image.mean(1, keepdim=True)], 1)

    def loss(self, module, step):
        step %= 4  # batches
        draw = torch.Generator().manual_seed(step)
        image = self.images[4 * step : 4 * step + 4]
        noise, words = torch.randn(image.shape, generator=draw), torch.randn(4, *self.words, generator=draw)
        times = torch.randint(0, 1000, (4,), generator=draw)
        return F.mse_loss(module(self.scheduler.add_noise(image, noise, times), times, words)[0], noise)


CASES = {"vit": Vit, "unet": Unet}


def in_peft(case):
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a CUDA extension that is not built
        config = peft.LoraConfig(r=8, lora_alpha=12, target_modules=case.targets)
        return peft.get_peft_model(copy.deepcopy(case.model), config).train()


def ours(case):
    gm = fxplug.trace(copy.deepcopy(case.model).train(), kwargs=case.example)
    torch.manual_seed(7)
    new = fxplug.apply(gm, fxplug.load_pass("lora", at=case.pattern, rank=8, alpha=12))
    for key, parameter in new.named_parameters():
        parameter.requires_grad_(key.startswith("lora."))
    return new.train()


def curve(case, module, call=None, steps=STEPS):
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, 3e-3), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = case.loss(module if call is None else call, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


@pytest.fixture(scope="module", params=CASES)
def case(request, photos):
    made = CASES[request.param](photos)
    made.expected = curve(made, in_peft(made))
    assert made.expected[-10:].mean() < 0.97 * made.expected[:10].mean()  # it learns: the updates are in the curve
    return made


def check(found, expected):
    torch.testing.assert_close(found, expected, rtol=CLOSE, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["as rewritten", "fused", "blas"])
def test_fifty_steps_have_the_losses_of_peft(case, how):
    new = ours(case)
    module = new if how == "as rewritten" else fxplug.fuse(new, how)
    check(curve(case, module), case.expected)
    if module is not new:  # what the fused one trained is in the module it was made of
        with torch.no_grad():
            here, there = case.loss(new, 0), case.loss(module, 0)
        torch.testing.assert_close(here, there, rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "fused"), [("vit", False), ("vit", True), ("unet", True)], indirect=["case"])
def test_fifty_compiled_steps_have_the_losses_of_peft(case, fused):
    new = ours(case)
    module = fxplug.fuse(new) if fused else new
    check(curve(case, module, torch.compile(module, fullgraph=True)), case.expected)


# --- fuse


class Layers(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.first, self.second = nn.Linear(12, 20, bias=bias), nn.Linear(20, 9, bias=bias)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


def lora_of(model, x, **params):
    new = fxplug.apply(fxplug.trace(model, x), fxplug.load_pass("lora", **{"at": "**", "rank": 3, "alpha": 5} | params))
    with torch.no_grad():
        for key, parameter in new.named_parameters():
            if key.startswith("lora."):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return new


def gradients(module, x, names):
    given = dict(module.named_parameters())
    out = module(x)
    out.backward(torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape))
    found = {"out": out.detach(), "x": x.grad, **{name: given[name].grad for name in names}}
    x.grad = None
    for parameter in module.parameters():
        parameter.grad = None
    return found


SHAPES = [(12,), (7, 12), (2, 5, 12), (2, 3, 4, 12), (0, 12)]
DTYPES = [(torch.float32, 1e-6, SHAPES), (torch.float64, 1e-14, SHAPES[2:3]), (torch.bfloat16, 2e-2, SHAPES[2:3])]


@pytest.mark.parametrize(
    "shape, dtype, close",
    [
        pytest.param(shape, dtype, close, marks=() if shape in quick else pytest.mark.slow, id=f"{shape}-{dtype}")
        for dtype, close, quick in DTYPES
        for shape in SHAPES
    ],
)
@pytest.mark.parametrize("options", [{}, {"dropout": 0.1}, {"bias": True}, {"at": "second"}], ids=str)
def test_a_fused_module_has_the_results_and_gradients_of_its_own(shape, dtype, close, options):
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    new = lora_of(Layers(bias="at" not in options).to(dtype).eval(), x.detach(), **options)
    names = [name for name, _ in new.named_parameters()]  # the base trains as well
    fused = fxplug.fuse(new)
    assert [k for k, _ in fused.named_parameters()] == names
    assert all(p is q for p, q in zip(fused.parameters(), new.parameters(), strict=True))
    expected, found = gradients(new, x, names), gradients(fused, x, names)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        assert (found[name] - value).abs().sum() <= close * value.abs().sum(), name


def test_a_fused_module_computes_only_the_gradients_that_are_asked_for():
    x = torch.randn(4, 12)
    new = lora_of(Layers(), x)
    for key, parameter in new.named_parameters():
        parameter.requires_grad_(key.startswith("lora."))
    fused = fxplug.fuse(new)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fused(x).sum().backward()
    assert all((p.grad is None) != p.requires_grad for p in fused.parameters())
    assert len({t.untyped_storage().data_ptr() for t in kept}) <= 14


def test_fused_layers_follow_autocast():
    x = torch.randn(3, 5, 12)
    new = lora_of(Layers(), x)
    fused = fxplug.fuse(new)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = new(x), fused(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)
    found.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in fused.parameters())


def test_what_is_changed_is_each_layer_with_its_update_and_nothing_else():
    x = torch.randn(3, 12)
    new = lora_of(Layers(), x, at="first")
    targets = [n.target for n in fxplug.fuse(new).graph.nodes if n.op in ("call_function", "call_module")]
    own = (operators.run_lora_linear, operators.run_linear)
    assert [t for t in targets if t in own] == list(own)
    new.second.register_forward_hook(lambda module, args, out: 2 * out)
    fused = fxplug.fuse(new)
    assert [n.target for n in fused.graph.nodes if n.op == "call_module"] == ["second"]
    torch.testing.assert_close(fused(x), new(x), rtol=1e-5, atol=1e-5)
    twice = fxplug.apply(new, fxplug.load_pass("lora", name="more", at="first", rank=2))
    assert [n.target for n in fxplug.fuse(twice).graph.nodes if n.op == "call_module"] == ["more.first.Lora", "second"]
    assert any(n.op == "call_module" for n in new.graph.nodes if n.target == "first")


def test_a_fused_module_exports_without_its_own_operators():
    x = torch.randn(3, 12)
    new = lora_of(Layers().eval(), x)
    exported = torch.export.export(fxplug.fuse(new), (x,))
    assert {str(n.target).partition(".")[0] for n in exported.graph.nodes if n.op == "call_function"} == {"aten"}
    torch.testing.assert_close(exported.module()(x), new(x))
