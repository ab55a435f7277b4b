"""The methods of adaptation: what a new block does, what a trained one computes on real models, and what each refuses."""

from __future__ import annotations

import contextlib
import copy
from functools import cache

import peft
import pytest
import small
import timm
import torch
import torch.nn.functional as F
from lycoris.functional.general import factorization as lycoris_factorization
from sweeps import sweep
from torch import nn

import fxplug
from fxplug.blocks.loha import Loha
from fxplug.blocks.lokr import Lokr
from fxplug.blocks.lora_weight import Dora, LoraWeight
from fxplug.blocks.low_rank import compute_norm, factorization
from fxplug.blocks.orthogonal import Boft, Oft
from fxplug.blocks.weight_norms import SpectralNorm, WeightNorm
from fxplug.blocks.weight_update import Delta

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
MAPS = {  # blocks that map a weight and leave it as it is when new
    "lora_weight": lambda shape: LoraWeight(shape, rank=2, alpha=5),
    "dora": lambda shape: Dora(shape, rank=2, alpha=5),
    "loha": lambda shape: Loha(shape, rank=2, alpha=5),
    "loha with cores": lambda shape: Loha(shape, rank=2, tucker=True),
    "lokr": lambda shape: Lokr(shape, rank=1, decompose_both=True),
    "lokr with a core": lambda shape: Lokr(shape, rank=1, tucker=True),
    "lokr in full": lambda shape: Lokr(shape, full_matrix=True),
    "oft": lambda shape: Oft(shape, block_size=4),
    "oft exact and shared": lambda shape: Oft(shape, blocks=2, share=True, terms=0),
    "boft": lambda shape: Boft(shape, levels=2),
    "delta": lambda shape: Delta(shape),
    "weight_norm": lambda shape: WeightNorm(shape),
}


class One(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args):
        return self.layer(*args)


def applied(layer, x, name, **params):
    """A layer alone in a model with a pass on it."""
    return fxplug.apply(fxplug.trace(One(layer), x), fxplug.load_pass(name, **{"at": "layer"} | params))


def blocks(new):
    names = {entry["name"] for entry in new.meta["passes"]}
    return {k: m for k, m in new.named_modules() if k.partition(".")[0] in names and getattr(m, "is_block", False)}


def randomised(new, std=0.05):
    torch.manual_seed(2)
    with torch.no_grad():
        for block in blocks(new).values():
            for parameter in block.parameters():
                parameter.add_(std * torch.randn_like(parameter))
    return new


# --- new blocks


@pytest.mark.parametrize("shape", [(12, 16), (16, 8, 3, 3)])
@pytest.mark.parametrize("name", MAPS)
def test_a_new_map_gives_every_bit_of_the_weight_back(name, shape):
    for dtype in DTYPES:
        block = MAPS[name](shape)
        value = torch.randn(shape).mul(torch.logspace(-3, 3, shape[0]).reshape(-1, *[1] * (len(shape) - 1))).to(dtype)
        value[3] = 0
        for parameter in block.parameters():  # as `apply` makes them
            parameter.data = parameter.data.to(dtype)
        if hasattr(block, "magnitude") and not isinstance(block, Boft):
            block.magnitude.data = compute_norm(value, 0).reshape(block.magnitude.shape)
        out = block(value)
        assert out.dtype == dtype and torch.equal(out, value), dtype


@pytest.mark.parametrize("name", MAPS)
def test_a_trained_map_keeps_the_dtype_and_shape_of_the_weight(name):
    for dtype in (torch.bfloat16, torch.float16):
        for own in (dtype, torch.float32):  # adapters may be trained in full precision on a base in half
            block = MAPS[name]((16, 8, 3, 3)).to(own)
            value = torch.randn(16, 8, 3, 3, dtype=dtype)
            with torch.no_grad():
                for parameter in block.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
            out = block(value)
            assert out.dtype == dtype and out.shape == value.shape and out.isfinite().all()
            assert not torch.equal(out, value)


@pytest.mark.parametrize("kind", [Dora, WeightNorm])
def test_a_row_of_zeros_gives_no_nan_and_can_be_trained(kind):
    base = nn.Linear(6, 4)
    with torch.no_grad():
        base.weight[1] = 0
    name = {Dora: "dora", WeightNorm: "weight_norm"}[kind]
    x = torch.randn(3, 6)
    new = applied(base, x, name)
    assert torch.equal(new(x), base(x))
    optimizer = torch.optim.SGD([p for b in blocks(new).values() for p in b.parameters()], 0.5)
    for _ in range(4):
        optimizer.zero_grad()
        loss = (new(x) - 1).square().mean()
        loss.backward()
        assert all(p.grad.isfinite().all() for b in blocks(new).values() for p in b.parameters())
        optimizer.step()
    assert new(x).isfinite().all()


def test_the_norm_of_dora_gets_no_gradient():
    value = torch.randn(5, 6)
    block = Dora(value.shape, rank=2)
    block.magnitude.data = torch.rand(5) + 0.5
    nn.init.normal_(block.up)
    norm = compute_norm(value + block.up @ block.down, 0).detach()
    expected = torch.autograd.grad(((value + block.up @ block.down) * block.magnitude[:, None] / norm).pow(2).sum(), [block.up])
    torch.testing.assert_close(torch.autograd.grad(block(value).pow(2).sum(), [block.up]), expected)


# --- options


def test_the_scale_of_a_low_rank_update():
    for name, own in [("lora", {}), ("lora_weight", {}), ("dora", {}), ("loha", {}), ("lokr", {"factor": 4})]:
        for options, scale in [
            ({}, 1.0),
            ({"alpha": 8}, 4.0),
            ({"alpha": 8, "rslora": True}, 8 / 2**0.5),
            ({"alpha": 0.25, "alpha_auto_scale": False}, 0.25),  # HCP-Diffusion's reading
        ]:
            new = applied(nn.Linear(16, 12), torch.randn(2, 16), name, rank=2, **own, **options)
            (block,) = blocks(new).values()
            if block.scale.item() != pytest.approx(scale):
                assert name == "lokr" and not (block.split_1 or block.split_2)
            assert block.scale.dtype == torch.float32


def test_two_full_matrices_of_lokr_are_not_scaled():
    block = Lokr([12, 16], rank=2, alpha=9, full_matrix=True)
    assert block.scale.item() == 1 and {k for k, _ in block.named_parameters()} == {"lokr_w1", "lokr_w2"}


def test_widths_are_split_as_in_lycoris():
    for size in range(1, 400):
        for factor in [-1, *range(1, 40)]:
            assert factorization(size, factor) == lycoris_factorization(size, factor), (size, factor)


# --- trained blocks on real models


WEIGHTS = {
    "lora_weight": {"rank": 2, "alpha": 3},
    "dora": {"rank": 2, "alpha": 3},
    "loha": {"rank": 2, "alpha": 3, "tucker": True},
    "lokr": {"rank": 2, "alpha": 3, "factor": 4},
    "oft": {"block_size": 4},
    "boft": {"block_size": 4},
    "weight_norm": {},
    "spectral_norm": {},
}
PLACES = {
    "vit": ["patch_embed.proj", "blocks.*.attn.qkv", "blocks.*.mlp.*", "head"],
    "unet": ["conv_in", "re:mid_block.*attn1.to_[qk]$", "down_blocks.0.resnets.0.*", "conv_out"],
}


@sweep("model", PLACES, "vit")
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_mapped_weight_is_the_weight_in_its_place(name, model):
    base = getattr(small, model)()
    new = randomised(fxplug.apply(base.gm, fxplug.load_pass(name, at=PLACES[model], **WEIGHTS[name])))
    weights = {k.removeprefix(f"{name}.").rpartition(".")[0] + ".weight": block for k, block in blocks(new).items()}
    assert len(weights) >= 7
    with torch.no_grad():
        merged = {k: block(base.model.get_parameter(k)) for k, block in weights.items()}
        expected = torch.func.functional_call(base.model, merged, base.args, base.kwargs)
        found = new(*base.args, **base.kwargs)
        plain = base.model(*base.args, **base.kwargs)
    found, expected, plain = (value if isinstance(value, torch.Tensor) else value[0] for value in (found, expected, plain))
    assert torch.equal(found, expected) and not torch.allclose(found, plain, rtol=1e-3)


PEERS = {
    "lora": (
        "Lora",
        {"rank": 4, "alpha": 8},
        {"r": 4, "lora_alpha": 8},
        {"down.weight": "lora_A.default.weight", "up.weight": "lora_B.default.weight"},
    ),
    "dora": (
        "Lora",
        {"rank": 4, "alpha": 8},
        {"r": 4, "lora_alpha": 8, "use_dora": True},
        {"down": "lora_A.default.weight", "up": "lora_B.default.weight", "magnitude": "lora_magnitude_vector.default.weight"},
    ),
    "loha": ("LoHa", {"rank": 4, "alpha": 8}, {"r": 4, "alpha": 8}, None),
    "lokr": ("LoKr", {"rank": 2, "alpha": 2}, {"r": 2, "alpha": 2}, None),
    "oft": ("OFT", {"block_size": 8}, {"oft_block_size": 8}, {"rotation": "oft_R.default.weight"}),
    "ia3": ("IA3", {}, {"feedforward_modules": []}, {"weight": "ia3_l.default"}),
}  # fmt: skip


@pytest.mark.parametrize("name", PEERS)
@sweep("model", ["vit", "unet"], "vit")
def test_a_whole_model_as_in_peft(name, model):
    base = getattr(small, model)()
    targets = {"vit": r"blocks\.\d+\.attn\.(qkv|proj)", "unet": r".*attn1\.to_[qv]"}[model]
    kind, options, theirs, keys = PEERS[name]
    if name == "ia3":
        made = fxplug.load_pass("ia3", at=f"re:{targets}$", feedforward=f"re:{targets}$")
        made = fxplug.Pass("ia3", rules=made.rules[:1])
    else:
        made = fxplug.load_pass(name, at=f"re:{targets}$", **options)
    new = randomised(fxplug.apply(base.gm, made))
    peer = peft.get_peft_model(
        copy.deepcopy(base.model), getattr(peft, f"{kind}Config")(target_modules=targets, **theirs)
    ).eval()
    known = dict(peer.named_parameters())
    with torch.no_grad():
        for path, block in blocks(new).items():
            layer = path.removeprefix(f"{name}.").rpartition(".")[0]
            for key, parameter in block.named_parameters():
                target = known[f"base_model.model.{layer}.{(keys or {}).get(key, f'{key}.default')}"]
                target.copy_(parameter.reshape(target.shape))
        found, expected = new(*base.args, **base.kwargs), peer(*base.args, **base.kwargs)
        plain = base.model(*base.args, **base.kwargs)
    found, expected, plain = (value if isinstance(value, torch.Tensor) else value[0] for value in (found, expected, plain))
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max() < (found - plain).abs().max()


@pytest.mark.parametrize("name", ["lora_weight", "dora", "loha", "lokr", "oft", "boft", "weight_norm", "spectral_norm"])
def test_the_packed_weight_of_multihead_attention(name):
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(16, 4, batch_first=True).eval(), torch.randn(2, 5, 16)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x, x, x, need_weights=False)[0]

    gm = fxplug.trace(Model().eval(), x)
    options = {"block_size": 4} if name == "oft" else {}
    new = randomised(fxplug.apply(gm, fxplug.load_pass(name, at="layer", param="in_proj_weight", **options)))
    ((path, block),) = blocks(new).items()
    with torch.no_grad():
        weights = {"in_proj_weight": block(layer.in_proj_weight)}
        expected = torch.func.functional_call(layer, weights, (x, x, x), {"need_weights": False})[0]
        torch.testing.assert_close(new(x), expected, rtol=1e-6, atol=1e-6)
        assert not torch.allclose(expected, layer(x, x, x)[0], rtol=1e-3)


def test_bitfit_trains_every_bias_and_writes_none():
    base = small.vit()
    new = randomised(fxplug.apply(base.gm, fxplug.load_pass("bitfit")))
    biases = {k for k, _ in base.model.named_parameters() if k.endswith("bias")}
    deltas = {k.removeprefix("bitfit.").rpartition(".")[0] + ".bias": block.delta for k, block in blocks(new).items()}
    assert set(deltas) == biases
    with torch.no_grad():
        changed = {k: base.model.get_parameter(k) + delta for k, delta in deltas.items()}
        assert torch.equal(new(*base.args), torch.func.functional_call(base.model, changed, base.args))


def test_the_vectors_of_spectral_norm_find_the_largest_singular_value():
    torch.manual_seed(0)
    base, x = nn.Conv2d(6, 8, 3), torch.randn(2, 6, 5, 5)
    new = applied(base, x, "spectral_norm")
    (block,) = blocks(new).values()
    new.train()
    for _ in range(60):
        new(x)
    largest = torch.linalg.matrix_norm(base.weight.flatten(1), 2)
    torch.testing.assert_close(block.eval()(base.weight), base.weight / largest, rtol=1e-4, atol=1e-6)
    assert list(block.parameters()) == []


# --- activations


def test_ssf_is_the_layer_with_the_scale_and_shift_in_its_weights():
    images, words = (2, 4, 5, 6), (2, 3, 6)
    layers = [(nn.Linear(6, 5), words), (nn.LayerNorm(6), words), (nn.Conv2d(4, 6, 3), images), (nn.GroupNorm(2, 4), images)]
    for layer, shape in [*layers, (nn.BatchNorm2d(4).eval(), images), (nn.Conv1d(4, 8, 3, groups=2), (2, 4, 9))]:
        x = torch.randn(shape)
        new = randomised(applied(layer, x, "ssf"), 0.5)
        (block,) = blocks(new).values()
        by = block.scale.reshape(-1, *[1] * (layer.weight.dim() - 1))
        weights = {"weight": layer.weight * by, "bias": layer.bias * block.scale + block.shift}
        torch.testing.assert_close(new.eval()(x), torch.func.functional_call(layer, weights, (x,)), rtol=1e-5, atol=1e-6)


@contextlib.contextmanager
def hooked(model, paths, hook):
    handles = [model.get_submodule(path).register_forward_hook(hook(path)) for path in paths]
    yield
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("name, act, scale", [("adapter", "GELU", 1.0), ("parallel_adapter", "ReLU", 4.0)])
@pytest.mark.parametrize("model", ["vit", "unet"])
def test_adapters_behind_and_beside_a_sublayer(name, act, scale, model):
    base = getattr(small, model)()
    paths = {"vit": ["blocks.0.attn", "blocks.0.mlp", "blocks.1.mlp"], "unet": ["mid_block.resnets.0.conv1", "conv_in"]}[model]
    new = randomised(fxplug.apply(base.gm, fxplug.load_pass(name, at=paths, bottleneck=5)))

    def hook(path):
        block = new.get_submodule(f"{name}.{path}.Adapter")

        def change(module, args, y):
            x = y if name == "adapter" else args[0]
            first = model == "unet"  # channels come second there, and the linear maps are convolutions of size 1
            to = (lambda v, w, b: F.conv2d(v, w[:, :, None, None], b)) if first else F.linear
            inner = getattr(nn, act)()(to(x, block.down.weight, block.down.bias))
            return y + scale * to(inner, block.up.weight, block.up.bias)

        return change

    with torch.no_grad(), hooked(base.model, paths, hook):
        expected = base.model(*base.args, **base.kwargs)
    with torch.no_grad():
        found, plain = new(*base.args, **base.kwargs), base.model(*base.args, **base.kwargs)
    found, expected, plain = (value if isinstance(value, torch.Tensor) else value[0] for value in (found, expected, plain))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, plain, rtol=1e-3)


VITS = {  # class token; class token and registers; neither; a token that joins later
    "vit_tiny_patch16_224": 1,
    "vit_small_patch14_reg4_dinov2": 5,
    "vit_base_patch16_gap_224": 0,
    "deit_tiny_distilled_patch16_224": 2,
}


@sweep("name", VITS, 0)
@pytest.mark.parametrize("deep", [False, True])
def test_prompts_behind_the_prefix_of_a_vit(name, deep):
    prefix = VITS[name]
    torch.manual_seed(0)
    size = 28 if "patch14" in name else 32
    options = {"img_size": size, "depth": 3, "embed_dim": 24, "num_heads": 2, "num_classes": 7, "dynamic_img_size": True}
    model = timm.create_model(name, **options).eval()
    images = torch.randn(2, 3, 2 * size, size)  # of another size than the table of positions, so that others may follow
    gm = fxplug.trace(model, images)
    where = {"from": "blocks.*", "until": "blocks.*"} if deep else {}
    new = fxplug.apply(gm, fxplug.load_pass("vpt", tokens=4, **where))
    prompts = [block.prompt for block in blocks(new).values() if hasattr(block, "prompt")]
    assert len(prompts) == (3 if deep else 1) and prompts[0].shape == (4, 24)
    assert all(block.prefix == prefix for block in blocks(new).values())

    def expected(images):
        x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
        for index, block in enumerate(model.blocks):
            if deep or index == 0:
                x = torch.cat([x[:, :prefix], prompts[index].expand(len(x), -1, -1), x[:, prefix:]], 1)
            x = block(x)
            if deep or index == 2:
                x = torch.cat([x[:, :prefix], x[:, prefix + 4 :]], 1)
        return model.forward_head(model.norm(x))

    for other in (images, torch.randn(3, 3, 2 * size, 2 * size), torch.randn(1, 3, size, 3 * size)):
        with torch.no_grad():
            assert torch.equal(new(other), expected(other))
            assert not torch.allclose(new(other), model(other), rtol=1e-3)


# --- what is refused


class Odd(nn.Module):
    """A model that says nothing of prefix tokens, with layers of odd widths."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.up = nn.ConvTranspose1d(5, 5, 1)
        self.table = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(5)

    def forward(self, x, ids):
        return self.norm(self.up(self.layer(x + self.table(ids)).mT).mT)


REFUSED = [
    ("lora", {"rank": 0}, "rank must be a whole number, 1 or more, not 0"),
    ("lora", {"alpha_auto_scale": False}, "alpha_auto_scale: false uses alpha itself as the scale: set alpha"),
    ("lora", {"alpha": 0}, "alpha is 0, which scales the update to zero, so nothing trains: leave alpha out"),
    ("lora", {"alpha": 1, "alpha_auto_scale": False, "rslora": True}, "give one of the two"),
    ("lora_weight", {"rank": 0}, "rank must be a whole number, 1 or more, not 0"),
    ("dora", {"rank": -1}, "rank must be a whole number"),
    ("loha", {"rank": -2}, "rank must be a whole number, 1 or more, not -2"),
    ("loha", {"at": "norm", "param": "weight"}, "matched 0 places"),
    ("lokr", {"factor": 0}, "factor must be -1 .* or a whole number above 0, not 0"),
    ("lokr", {"factor": 4}, r"factor 4 divides neither the 5 outputs nor the 6 inputs; 5 has the divisors \[1, 5\]"),
    ("oft", {}, r"block_size 32 does not divide 6, the inputs of this weight; one of \[1, 2, 3, 6\] does"),
    ("oft", {"blocks": 4}, "blocks 4 does not divide 6"),
    ("oft", {"block_size": 1}, "the block size must be 2 or more"),
    ("oft", {"block_size": 2, "terms": 2}, "terms must be a whole number, 3 or more, or 0 for the exact inverse, not 2"),
    ("boft", {}, "block_size 4 does not divide 6"),
    ("boft", {"block_size": 2, "levels": 2}, "levels must be 1 to 1 with 3 blocks of size 2, not 2"),
    ("weight_norm", {"dim": 2}, r"dim 2 is not a dimension of a parameter of shape \[5, 6\]; it has 0 to 1"),
    ("spectral_norm", {"steps": 0}, "steps must be a whole number, 1 or more, not 0"),
    ("ssf", {"dim": 3}, "has no dimension 3"),
    ("bottleneck", {"bottleneck": 0}, "bottleneck must be a whole number, 1 or more, not 0"),
    ("bottleneck", {"act": "Gelu"}, "torch.nn has no module class 'Gelu'.*GELU"),
    ("bottleneck", {"dropout": 1}, "dropout must be at least 0 and below 1, not 1"),
    ("parallel_adapter", {"at": "table"}, "only the widths .* may differ"),
    ("vpt", {"from": "layer", "until": "norm"}, "has no 'num_prefix_tokens': set prefix: 1"),
    ("vpt", {"from": "layer", "until": "norm", "prefix": -1}, "prefix must be a whole number, 0 or more, not -1"),
    ("vpt", {"from": "layer", "until": "norm", "prefix": 0, "tokens": 0}, "tokens must be a whole number, 1 or more, not 0"),
]


@cache
def odd():
    return fxplug.trace(Odd(), (torch.randn(2, 3, 6), torch.arange(6).reshape(2, 3)))


@pytest.mark.parametrize("name, params, message", REFUSED)
def test_a_wrong_option_says_what_is_possible(name, params, message):
    given = params if name == "vpt" else {"at": "layer"} | params
    with pytest.raises(fxplug.FxplugError, match=message) as caught:
        fxplug.apply(odd(), fxplug.load_pass(name, **given))
    assert f"passes/{name}.yaml" in str(caught.value)


@pytest.mark.parametrize("kind", ["Oft", "Boft"])
def test_rotations_refuse_tables_and_transposed_convolutions(kind):
    for path in ("table", "up"):
        rule = fxplug.Rule(fxplug.Match(path), use=f"fxplug.blocks:{kind}", place="param")
        with pytest.raises(fxplug.SpecError, match="a rotation of the inputs fits Linear, Conv1d, Conv2d and Conv3d"):
            fxplug.apply(odd(), fxplug.Pass("turn", rules=[rule]))


def test_a_map_of_a_vector_or_without_place_param_is_refused():
    rule = fxplug.Rule(fxplug.Match("norm"), use=Loha, place="param")
    with pytest.raises(fxplug.SpecError, match=r"needs 2 dimensions, and .*norm.* is \[5\]: exclude it from the match"):
        fxplug.apply(odd(), fxplug.Pass("loha", rules=[rule]))
    with pytest.raises(fxplug.SpecError, match="does not act on a parameter: set 'place: param' in its rule"):
        fxplug.apply(odd(), fxplug.Pass("loha", rules=[fxplug.Rule(fxplug.Match("layer"), use=Loha, args=["y"])]))


def test_spectral_norm_takes_the_rows_of_a_transposed_convolution_from_its_outputs():
    new = fxplug.apply(odd(), fxplug.Pass("s", rules=[fxplug.Rule(fxplug.Match("up"), use=SpectralNorm, place="param")]))
    assert new.get_submodule("s.up.SpectralNorm").dim == 1


# --- where it is used


LAW = {**WEIGHTS, "bitfit": {}}


@pytest.mark.parametrize("name", LAW)
def test_maps_of_a_model_in_half_precision(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(32, 8)).to(torch.bfloat16)
    x = torch.randn(2, 4, 4, 4, dtype=torch.bfloat16)
    new = fxplug.apply(fxplug.trace(model, x), fxplug.load_pass(name, **LAW[name]))
    assert {p.dtype for p in new.parameters()} == {torch.bfloat16} and new(x).dtype == torch.bfloat16
    assert torch.equal(new(x), model(x)) == (name != "spectral_norm")
    randomised(new, 0.3)(x).sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for block in blocks(new).values() for p in block.parameters())


@sweep("name", [*LAW, "ssf", "adapter", "parallel_adapter", "vpt", "ia3"], "dora", "vpt")
def test_a_model_without_values_can_be_given_it(name):
    options = {"img_size": 32, "depth": 2, "num_classes": 10}
    with torch.device("meta"):
        model, x = timm.create_model("vit_tiny_patch16_224", **options).eval(), torch.randn(2, 3, 32, 32)
    new = fxplug.apply(fxplug.trace(model, x), fxplug.load_pass(name))
    assert new(x).shape == (2, 10) and {p.device.type for p in new.parameters()} == {"meta"}


@sweep("name", [*LAW, "lora", "ssf", "adapter", "parallel_adapter", "vpt", "ia3"], "dora", "vpt")
def test_a_saved_rewrite_loads_to_the_same_numbers(name, tmp_path):
    base = small.vit()
    new = randomised(fxplug.apply(base.gm, fxplug.load_pass(name, **LAW.get(name, {}))))
    fxplug.save(new, tmp_path)
    again = fxplug.load(tmp_path)
    assert {k: type(m) for k, m in blocks(again).items()} == {k: type(m) for k, m in blocks(new).items()}
    for training in (True, False):  # spectral norm moves its vectors in training
        torch.manual_seed(1)
        found = again.train(training)(*base.args)
        torch.manual_seed(1)
        assert torch.equal(found, new.train(training)(*base.args))


def test_one_parameter_may_be_mapped_by_several_passes():
    torch.manual_seed(0)
    base, x = nn.Linear(8, 6), torch.randn(3, 8)
    passes = [fxplug.load_pass(name, rank=2, at="layer") for name in ("loha", "dora")]
    new = randomised(fxplug.apply(fxplug.trace(One(base), x), *passes, fxplug.load_pass("weight_norm", at="layer")), 0.3)
    loha, dora, norm = blocks(new).values()
    torch.testing.assert_close(new(x), F.linear(x, norm(dora(loha(base.weight))), base.bias))


@pytest.mark.filterwarnings("ignore")
def test_vera_is_that_of_peft_with_one_pair_of_matrices_for_layers_of_all_widths(tmp_path):
    gm, (x,), _ = small.plain_vit()
    at = ["attn.qkv", "mlp.fc1", "mlp.fc2"]
    theirs = peft.get_peft_model(
        copy.deepcopy(small.plain_vit().model), peft.VeraConfig(r=4, target_modules=at, projection_prng_key=3, d_initial=0.2)
    ).eval()
    new = fxplug.apply(gm, fxplug.load_pass("vera", at=at, rank=4, key=3, d_initial=0.2))
    for half, key in (("first", "A"), ("second", "B")):
        assert torch.equal(new.get_buffer(f"vera.shared.{half}"), theirs.state_dict()[f"base_model.vera_{key}.default"])
    torch.manual_seed(0)
    pairs = []
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if name.startswith("vera."):
                path, _, half = name.removeprefix("vera.").rpartition(".Vera.")
                other = theirs.get_parameter(f"base_model.model.{path}.vera_lambda_{half}.default")
                assert torch.equal(parameter, other), "they begin alike"
                parameter.copy_(torch.randn_like(parameter))
                other.copy_(parameter)
                pairs.append((parameter, other))
    assert len(pairs) == 12
    torch.testing.assert_close(new(x), theirs(x), rtol=1e-6, atol=1e-6)
    for module in (new, theirs):
        module(x).square().mean().backward()
    for ours, other in pairs:
        torch.testing.assert_close(ours.grad, other.grad, rtol=1e-5, atol=1e-6)
    fxplug.save_adapter(new, tmp_path / "ink")
    lora = fxplug.apply(gm, fxplug.load_pass("lora", at=at, rank=4))
    fxplug.load_adapter(lora, tmp_path / "ink")
    torch.testing.assert_close(lora(x), new(x), rtol=1e-5, atol=1e-5)
