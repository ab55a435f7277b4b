"""The numbers of each method: those of PEFT, LyCORIS or torch with the same weights, else of the layer with a merged weight."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import peft
import peft.tuners.boft.layer
import pytest
import small
import torch
import torch.nn.functional as F
from lycoris.modules.locon import LoConModule
from lycoris.modules.loha import LohaModule
from lycoris.modules.lokr import LokrModule
from sweeps import sweep
from torch import nn

import fxplug
from fxplug.blocks.orthogonal import Boft

OUTPUT, GRADIENT = 1e-5, 1e-4  # how far off the largest value may be, relative to the largest there is


class One(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


LAYERS = {
    "linear": (lambda: nn.Linear(16, 12), (3, 5, 16)),
    "linear without bias": (lambda: nn.Linear(16, 12, bias=False), (2, 16)),
    "conv1d": (lambda: nn.Conv1d(8, 12, 3, stride=2, padding=1), (2, 8, 9)),
    "conv2d": (lambda: nn.Conv2d(8, 12, 3), (2, 8, 9, 7)),
    "conv2d of size 1": (lambda: nn.Conv2d(8, 12, 1), (2, 8, 4, 5)),
    "conv2d with stride": (lambda: nn.Conv2d(8, 12, (3, 2), stride=(2, 1), padding=(1, 0)), (2, 8, 9, 7)),
    "conv2d with dilation": (lambda: nn.Conv2d(8, 12, 3, padding=2, dilation=2), (2, 8, 9, 7)),
    "conv2d with groups": (lambda: nn.Conv2d(8, 12, 3, padding=1, groups=4), (2, 8, 6, 7)),
    "conv3d": (lambda: nn.Conv3d(4, 6, 2, padding=1), (2, 4, 4, 3, 5)),
    "embedding": (lambda: nn.Embedding(11, 8), None),
}
PLAIN = ["linear", "linear without bias", "conv1d", "conv2d", "conv2d with stride"]
CONVOLUTIONS = [name for name in LAYERS if "conv" in name]


def inputs(shape):
    return torch.randint(0, 11, (2, 7)) if shape is None else torch.randn(shape, requires_grad=True)


def ours(name, base, x, **params):
    """The layer with a pass on it, and the pass's block with random weights."""
    new = fxplug.apply(fxplug.trace(One(base), x), fxplug.load_pass(name, **{"at": "layer"} | params))
    (block,) = (m for k, m in new.named_modules() if k.startswith(f"{name}.layer.") and getattr(m, "is_block", False))
    randomised(block)
    return new, block


def randomised(block):
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return block


def error(found, expected):
    """The largest difference over the largest value."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    return ((found - expected).abs().max() / expected.abs().max()).item()


@dataclass
class Peer:
    """The reference: the layer, and which of its parameters are ours, as they are or turned to our shape by the function."""

    layer: nn.Module
    weights: dict[str, nn.Parameter]
    turn: dict[str, Callable[[Any], Any]] = field(default_factory=dict)  # its own inverse

    def take(self, block):
        with torch.no_grad():
            assert {k for k, _ in block.named_parameters()} == set(self.weights)
            for key, parameter in block.named_parameters():
                theirs = self.weights[key]
                theirs.copy_(self.turn.get(key, lambda t: t)(parameter).reshape(theirs.shape))
        return self


def errors(new, block, peer, x):
    """How far off the output is, and each gradient: those of the block's parameters and of the input."""
    a, b = new(x), peer.layer(x)
    given = [x] if x.is_floating_point() else []
    names = [key for key, _ in block.named_parameters()]
    weights = torch.randn_like(b)
    left = torch.autograd.grad((a * weights).sum(), [*block.parameters(), *given])
    right = torch.autograd.grad((b * weights).sum(), [*(peer.weights[key] for key in names), *given])
    found = {"output": error(a, b)}
    for key, p, q in zip([*names, "input"], left, right, strict=False):
        found[key] = error(p, peer.turn.get(key, lambda t: t)(q).reshape(p.shape))
    return found


def check(found, wrong=()):
    """`wrong` are the parameters whose gradient is wrong in the peer."""
    assert found["output"] < OUTPUT
    assert {k: e for k, e in found.items() if e >= GRADIENT and k not in wrong} == {}
    assert all(found[k] > 0.1 for k in wrong)


# --- PEFT


def in_peft(base, config, names, turn=None):
    """PEFT's layer around `base`, in evaluation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of groups, and of a CUDA extension that is not built
        model = peft.get_peft_model(One(base), config).eval()
    layer = model.base_model.model.layer
    known = {key.replace(".default", ""): p for key, p in layer.named_parameters()}
    return Peer(layer, {k: known[name] for k, name in names.items()}, turn or {})


def config(kind, **options):
    return getattr(peft, f"{kind}Config")(target_modules=["layer"], **options)


def peft_lora(base, embedding, names=(), **options):
    weights = ["lora_embedding_B", "lora_embedding_A"] if embedding else ["lora_B.weight", "lora_A.weight"]
    turn = {"down.weight": lambda t: t.T} if embedding else {}
    keys = {
        "up.weight": weights[0],
        "down.weight": weights[1],
        **({"up.bias": "lora_B.bias"} if options.get("lora_bias") else {}),
    }
    return in_peft(base, config("Lora", **options), keys, turn)


@pytest.mark.parametrize("layer", [*PLAIN, "conv3d", "embedding"])
@pytest.mark.parametrize("rank, alpha, rslora, bias", [(3, 3, 0, 0), (2, 8, 0, 0), (4, 8, 1, 0), (2, 3, 0, 1)])
def test_lora_as_in_peft(layer, rank, alpha, rslora, bias):
    make, shape = LAYERS[layer]
    if bias and layer in ("embedding", "linear without bias"):
        layer, (make, shape) = "linear", LAYERS["linear"]  # PEFT has no bias there
    base, x = make(), inputs(shape)
    new, block = ours("lora", base, x, rank=rank, alpha=alpha, rslora=bool(rslora), bias=bool(bias))
    assert block.scale.item() == pytest.approx(alpha / (rank**0.5 if rslora else rank))
    options = {"r": rank, "lora_alpha": alpha, "use_rslora": bool(rslora), "lora_bias": bool(bias)}
    check(errors(new, block, peft_lora(base, layer == "embedding", **options).take(block), x))


def test_lora_of_a_packed_attention_as_in_peft():
    class Attention(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x, x, x, need_weights=False)[0]

    model, x = Attention(nn.MultiheadAttention(16, 4, batch_first=True)).eval(), torch.randn(2, 5, 16, requires_grad=True)
    made = fxplug.load_pass("lora_weight", at="layer", param="in_proj_weight", rank=3, alpha=6)
    new = fxplug.apply(fxplug.trace(model, x), made)
    block = randomised(new.get_submodule("lora_weight.layer.LoraWeight"))
    peer = peft.get_peft_model(copy.deepcopy(model), config("Lora", r=3, lora_alpha=6)).eval()
    inner = peer.base_model.model.layer
    weights = {"down": inner.lora_A["default"].weight, "up": inner.lora_B["default"].weight}
    check(errors(new, block, Peer(peer, weights).take(block), x))


def peft_dora(base, embedding, **options):
    transposed = {"up": lambda t: t.T, "down": lambda t: t.T} if embedding else {}
    names = ["lora_embedding_A", "lora_embedding_B"] if embedding else ["lora_B.weight", "lora_A.weight"]
    names = dict(zip(["up", "down", "magnitude"], [*names, "lora_magnitude_vector.weight"], strict=True))
    return in_peft(base, config("Lora", use_dora=True, **options), names, transposed)


@pytest.mark.parametrize("layer", [*PLAIN, "conv3d", "embedding"])
@pytest.mark.parametrize("rank, alpha", [(3, 3), (2, 8)])
def test_dora_as_in_peft(layer, rank, alpha):
    make, shape = LAYERS[layer]
    base, x = make(), inputs(shape)
    new, block = ours("dora", base, x, rank=rank, alpha=alpha)
    check(errors(new, block, peft_dora(base, shape is None, r=rank, lora_alpha=alpha).take(block), x))


def test_a_new_dora_has_the_magnitude_of_peft():
    for make, shape in (LAYERS[name] for name in ("linear", "conv2d", "embedding")):
        base = make()
        new = fxplug.apply(fxplug.trace(One(base), inputs(shape)), fxplug.load_pass("dora", at="layer", rank=2))
        theirs = peft_dora(base, shape is None, r=2).weights["magnitude"]
        magnitude = new.get_submodule("dora.layer.Dora").magnitude
        assert magnitude.shape == theirs.shape
        torch.testing.assert_close(magnitude, theirs, rtol=1e-6, atol=0)


def peft_same(base, kind, block, prefix="", **options):
    """PEFT's layer whose parameters have the names of ours."""
    return in_peft(base, config(kind, **options), {key: prefix + key for key, _ in block.named_parameters()})


@pytest.mark.parametrize("layer", [*PLAIN, "conv2d of size 1", "conv2d with dilation", "conv2d with groups"])
@pytest.mark.parametrize("tucker", [False, True])
def test_loha_as_in_peft(layer, tucker):
    make, shape = LAYERS[layer]
    base, x = make(), inputs(shape)
    new, block = ours("loha", base, x, rank=3, alpha=6, tucker=tucker)
    peer = peft_same(base, "LoHa", block, r=3, alpha=6, use_effective_conv2d=tucker)
    # PEFT's own backward of the Tucker form takes the core of the other side for these two; LyCORIS' is right, see below
    check(errors(new, block, peer.take(block), x), ["hada_w1_a", "hada_w2_a"] if hasattr(block, "hada_t1") else [])


LOKR = [
    {"rank": 1, "alpha": 6},
    {"rank": 1, "alpha": 2, "tucker": True},
    {"rank": 1, "alpha": 3, "decompose_both": True},
    {"rank": 1, "alpha": 3, "decompose_both": True, "factor": 2, "tucker": True},
    {"rank": 32, "alpha": 32},
]


@sweep("layer", [*PLAIN, "conv2d of size 1", "conv2d with dilation", "conv2d with groups"], "linear", "conv2d with groups")
@pytest.mark.parametrize("options", LOKR)
def test_lokr_as_in_peft(layer, options):
    if layer == "conv1d" and options != LOKR[0]:
        layer = "conv2d"  # PEFT multiplies a full second matrix of a Conv1d along the wrong dimensions, and fails with a core
    if layer == "conv2d with groups" and "factor" in options:
        layer = "conv2d"  # 2 inputs by a factor of 2 are (2, 1) in PEFT and (1, 2) in LyCORIS
    make, shape = LAYERS[layer]
    base, x = make(), inputs(shape)
    new, block = ours("lokr", base, x, **options)
    theirs = {"r": options["rank"], "alpha": options["alpha"], "decompose_factor": options.get("factor", -1)}
    theirs.update(use_effective_conv2d=options.get("tucker", False), decompose_both=options.get("decompose_both", False))
    check(errors(new, block, peft_same(base, "LoKr", block, **theirs).take(block), x))


@pytest.mark.parametrize("layer", ["linear", "conv2d", "conv2d with stride", "conv2d with groups", "conv3d"])
@pytest.mark.parametrize("feedforward", [False, True])
def test_ia3_as_in_peft(layer, feedforward):
    make, shape = LAYERS[layer]
    base, x = make(), inputs(shape)
    rules = fxplug.load_pass("ia3", at="layer", feedforward="layer").rules
    one = fxplug.Pass("ia3", rules=[rules[feedforward]])
    new = fxplug.apply(fxplug.trace(One(base), x), one)
    block = randomised(new.get_submodule("ia3.layer.Scale"))
    peer = in_peft(base, config("IA3", feedforward_modules=["layer"] * feedforward), {"weight": "ia3_l"})
    check(errors(new, block, peer.take(block), x))


OFT = [
    ({"block_size": 4}, {"oft_block_size": 4}),
    ({"blocks": 2, "terms": 6}, {"r": 2, "oft_block_size": 0, "num_cayley_neumann_terms": 6}),
    ({"block_size": 8, "terms": 0}, {"oft_block_size": 8, "use_cayley_neumann": False}),
    ({"block_size": 2, "share": True}, {"oft_block_size": 2, "block_share": True}),
]


@pytest.mark.parametrize("layer", ["linear", "linear without bias"])
@pytest.mark.parametrize("options, theirs", OFT)
def test_oft_as_in_peft(layer, options, theirs):
    make, shape = LAYERS[layer]
    base, x = make(), inputs(shape)
    new, block = ours("oft", base, x, **options)
    peer = in_peft(base, config("OFT", **theirs), {"rotation": "oft_R.weight"})
    check(errors(new, block, peer.take(block), x))


@pytest.mark.parametrize("options, theirs", OFT)
def test_oft_of_a_convolution_as_peft_merges_it(options, theirs):
    # PEFT's forward folds overlapping patches into a sum, so a new one of it changes the output; its merge is right
    base, x = nn.Conv2d(8, 12, 3, stride=2, padding=1), torch.randn(2, 8, 9, 7)
    new, block = ours("oft", base, x, **options)
    found = new(x)
    peer = in_peft(copy.deepcopy(base), config("OFT", **theirs), {"rotation": "oft_R.weight"}).take(block)
    peer.layer.merge()
    assert error(found, peer.layer.get_base_layer()(x)) < OUTPUT


@pytest.mark.parametrize("layer", ["linear", "linear without bias", "conv2d", "conv2d of size 1"])
def test_boft_as_in_peft(layer, monkeypatch):
    monkeypatch.setattr(peft.tuners.boft.layer, "get_fbd_cuda", lambda: None)  # it would be compiled
    make, shape = LAYERS[layer]
    base, x = make(), inputs(shape)
    new, block = ours("boft", base, x, block_size=4)
    names = {"rotation": "boft_R", "magnitude": "boft_s"}
    check(errors(new, block, in_peft(base, config("BOFT", boft_block_size=4), names).take(block), x))


@pytest.mark.parametrize("size, levels", [(2, 4), (4, 3), (8, 2)])
def test_the_butterflies_of_boft_are_those_of_peft(size, levels):
    # without its CUDA extension PEFT has one level; its permutations and their product can be had all the same
    peer = peft.tuners.boft.layer.BOFTLayer
    block = randomised(Boft([6, 16], block_size=size, levels=levels))
    turn = torch.eye(16)
    for level, data in enumerate(block.rotation):
        orders = peer.block_butterfly_perm(None, 16, 16 // size // 2**level, size // 2, levels - 1)
        permutation = torch.eye(16)[orders]
        blocks = torch.block_diag(*peer.cayley_batch(None, data))
        turn = permutation @ blocks @ permutation.T @ turn
    weight = torch.randn(6, 16)
    assert error(block(weight), (turn @ weight.T).T * block.magnitude) < OUTPUT
    torch.testing.assert_close(turn @ turn.T, torch.eye(16), rtol=0, atol=1e-5)


# --- LyCORIS


def in_lycoris(base, kind, rename=None, **options):
    layer = kind("layer", base, 1.0, **options).eval()
    weights = {rename.get(k, k) if rename else k: p for k, p in layer.named_parameters() if not k.startswith("org_")}
    return Peer(layer, weights)


@pytest.mark.parametrize("layer", [*CONVOLUTIONS[:5], "conv3d", "linear"])
def test_lora_as_in_lycoris(layer):
    make, shape = LAYERS[layer]
    base, x = make(), inputs(shape)
    new, block = ours("lora", base, x, rank=3, alpha=6)
    rename = {"lora_down.weight": "down.weight", "lora_up.weight": "up.weight"}
    check(errors(new, block, in_lycoris(base, LoConModule, rename, lora_dim=3, alpha=6).take(block), x))


@sweep("layer", [*CONVOLUTIONS, "linear"], "linear", "conv2d", "conv1d")
@pytest.mark.parametrize("tucker", [False, True])
@pytest.mark.parametrize("rslora", [False, True])
def test_loha_as_in_lycoris(layer, tucker, rslora):
    make, shape = LAYERS[layer]
    base, x = make(), inputs(shape)
    new, block = ours("loha", base, x, rank=3, alpha=6, tucker=tucker, rslora=rslora)
    options = {"lora_dim": 3, "alpha": 6, "use_tucker": tucker, "rs_lora": rslora}
    check(errors(new, block, in_lycoris(base, LohaModule, **options).take(block), x))


@sweep("layer", [*CONVOLUTIONS, "linear"], "linear", "conv2d", "conv1d")
@pytest.mark.parametrize("options", [*LOKR, {"rank": 2, "alpha": 9, "full_matrix": True}, {"rank": 1, "alpha": 2, "factor": 8}])
def test_lokr_as_in_lycoris(layer, options):
    make, shape = LAYERS[layer]
    base, x = make(), inputs(shape)
    if options.get("factor") == 8 and base.weight.shape[0] % 8 and base.weight.shape[1] % 8:
        base, x = nn.Conv2d(16, 24, 3), torch.randn(1, 16, 5, 5, requires_grad=True)
    new, block = ours("lokr", base, x, **options)
    theirs = {k: v for k, v in options.items() if k not in ("rank", "tucker")}
    peer = in_lycoris(base, LokrModule, lora_dim=options["rank"], use_tucker=options.get("tucker", False), **theirs)
    check(errors(new, block, peer.take(block), x))


# --- torch


@pytest.mark.parametrize("layer", ["linear", "conv1d", "conv2d with groups", "conv3d"])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_weight_norm_as_in_torch(layer, dim):
    make, shape = LAYERS[layer]
    base, x = make(), inputs(shape)
    new, block = ours("weight_norm", base, x, dim=dim)
    theirs = nn.utils.parametrizations.weight_norm(copy.deepcopy(base), dim=dim)
    weights = theirs.parametrizations.weight
    peer = Peer(theirs, {"magnitude": weights.original0}).take(block)
    check(errors(new, block, peer, x))
    goal = torch.randn_like(new(x))
    (a,) = torch.autograd.grad((new(x) * goal).sum(), [base.weight])
    (b,) = torch.autograd.grad((theirs(x) * goal).sum(), [weights.original1])
    assert error(a, b) < GRADIENT  # the base weight is the direction


@pytest.mark.parametrize(
    "make, shape",
    [
        *(LAYERS[name] for name in ("linear", "conv1d", "conv2d with groups")),
        (lambda: nn.ConvTranspose2d(4, 6, 3), (2, 4, 5, 5)),
    ],
)
def test_spectral_norm_as_in_torch(make, shape):
    base, x = make(), inputs(shape)
    new, block = ours("spectral_norm", base, x, steps=2)
    theirs = nn.utils.parametrizations.spectral_norm(copy.deepcopy(base), n_power_iterations=2)
    there = theirs.parametrizations.weight[0]
    there._u.copy_(block.u)
    there._v.copy_(block.v)
    for training in (True, True, False, True):
        before = block.u.clone()
        a, b = new.train(training)(x), theirs.train(training)(x)
        assert error(a, b) < OUTPUT
        assert error(block.u, there._u) < OUTPUT and error(block.v, there._v) < OUTPUT
        assert training or torch.equal(before, block.u)
        goal = torch.randn_like(a)
        (p, q), (r, s) = (
            torch.autograd.grad((value * goal).sum(), [weight, x])
            for value, weight in ((a, base.weight), (b, theirs.parametrizations.weight.original))
        )
        assert error(p, r) < GRADIENT and error(q, s) < GRADIENT


# --- a merged weight


def update(block, groups):
    """What a LoRA of a convolution adds to the weight, group by group."""
    down, up = block.down.weight.chunk(groups), block.up.weight.flatten(1).chunk(groups)
    return torch.cat([torch.einsum("or,r...->o...", u, d) for u, d in zip(up, down, strict=True)]) * block.scale


@pytest.mark.parametrize(
    "make, shape",
    [
        (lambda: nn.Conv2d(8, 12, 3, padding=1, groups=4), (2, 8, 7, 7)),
        (lambda: nn.Conv2d(8, 8, 5, stride=2, padding=2, groups=8), (2, 8, 9, 9)),
        (lambda: nn.Conv2d(4, 6, 3, padding=2, dilation=2), (2, 4, 9, 7)),  # PEFT forgets the dilation
        (lambda: nn.Conv2d(4, 6, 3, padding="same", dilation=2), (2, 4, 7, 7)),
        (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (2, 4, 7, 7)),
        (lambda: nn.Conv1d(6, 9, 3, groups=3), (2, 6, 8)),
        (lambda: nn.Conv3d(4, 4, 2, groups=2), (1, 4, 3, 4, 5)),
        (lambda: nn.Conv2d(4, 6, 3, padding=1), (4, 7, 7)),
    ],
)
def test_a_convolution_is_the_one_with_the_update_in_its_weight(make, shape):
    base, x = make(), torch.randn(shape)
    new, block = ours("lora", base, x, rank=2, alpha=3)
    found = new(x)
    with torch.no_grad():
        base.weight += update(block, base.groups)
    torch.testing.assert_close(found, base(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", [32, 33, 40])
@pytest.mark.parametrize("groups", [1, 4])
def test_a_convolution_that_pads_by_itself(side, groups):
    from timm.layers import Conv2dSame

    base = Conv2dSame(4, 8, 3, stride=2, groups=groups)
    traced = fxplug.trace(One(base), torch.randn(1, 4, 31, 31))
    new = fxplug.apply(traced, fxplug.load_pass("lora", at="layer", rank=2))
    block = new.get_submodule("lora.layer.Lora")
    nn.init.normal_(block.up.weight)
    x = torch.randn(2, 4, side, side)
    with torch.no_grad():
        found = new(x)
        base.weight += update(block, groups)
        torch.testing.assert_close(found, base(x), rtol=1e-5, atol=1e-5)


def test_lora_on_the_stem_of_a_real_backbone():
    base = small.lite()
    new = fxplug.apply(base.gm, fxplug.load_pass("lora", at="conv_stem", rank=4))
    block = new.get_submodule("lora.conv_stem.Lora")
    nn.init.normal_(block.up.weight, std=0.1)
    weight = base.model.conv_stem.weight.detach()
    with torch.no_grad():
        found = new(*base.args)
        merged = torch.func.functional_call(base.model, {"conv_stem.weight": weight + update(block, 1)}, base.args)
    torch.testing.assert_close(found, merged, rtol=1e-4, atol=1e-4)


def test_the_default_alpha_is_the_rank():
    x = torch.randn(2, 6)
    new, block = ours("lora", nn.Linear(6, 5), x, rank=4)
    assert block.alpha == 4 and block.scale.item() == 1 and "lora.layer.Lora.scale" in new.state_dict()
    expected = new.layer(x) + F.linear(F.linear(x, block.down.weight), block.up.weight)
    torch.testing.assert_close(new(x), expected, rtol=1e-6, atol=1e-6)


def test_the_scale_is_read_when_the_weights_are_loaded():
    x = torch.randn(2, 6)
    layer = nn.Linear(6, 5)
    strong, _ = ours("lora", layer, x, rank=2, alpha=20)
    weak, _ = ours("lora", layer, x, rank=2)
    weak.load_state_dict({k: v for k, v in strong.state_dict().items() if k.startswith("lora.")}, strict=False)
    assert torch.equal(weak(x), strong(x))
