"""Every weight can be reached: those within torch.nn's composite modules, and bare parameters, those of experts among them."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import fxplug

WIDTH = 16


def images(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """One attention, with q, k and v of these widths."""

    def __init__(self, **options):
        super().__init__()
        self.attn, self.fc = nn.MultiheadAttention(WIDTH, 2, batch_first=True, **options), nn.Linear(WIDTH, WIDTH)
        self.kdim, self.vdim = options.get("kdim", WIDTH), options.get("vdim", WIDTH)

    def forward(self, x):
        return self.fc(self.attn(x, x[..., : self.kdim], x[..., : self.vdim], need_weights=False)[0])


class Encoder(nn.Module):
    def __init__(self, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True, **options)
        self.enc, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.enc(x).mean(1))


class Whole(nn.Module):
    """A composite of torch.nn that is called with the tokens twice."""

    def __init__(self, composite):
        super().__init__()
        self.inner = composite

    def forward(self, x):
        return self.inner(x, x)


def decoder():
    return Whole(nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 32, batch_first=True), 1))


class Shared(nn.Module):
    """One layer of an encoder that is called twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(self.layer(x))


class Bare(nn.Module):
    """Parameters that no layer has: a matrix, one behind views, the weights of experts, and a layer's that is not called."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.proj = nn.Parameter(torch.randn(WIDTH, 8, generator=draw))
        self.qkv = nn.Parameter(torch.randn(24, 8, generator=draw))
        self.experts = nn.Parameter(torch.randn(3, 8, 6, generator=draw))
        self.scale = nn.Parameter(torch.ones(6))
        self.unread = nn.Linear(6, 6)

    def forward(self, x):
        q, k, v = (x @ self.proj @ one.t() for one in self.qkv.chunk(3))
        x = torch.einsum("bti,eio->beto", q * k + v, self.experts).mean(1) * self.scale
        return F.linear(x, self.unread.weight, self.unread.bias)


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Bare()

    def forward(self, x):
        return self.part(x)


OUT = ["**.self_attn", "**.out_proj", "**.linear1", "**.linear2"]
REACHED = {  # model, pass, options, the parameters that it changes
    "attention": (Attention, "lora_weight", {"at": ["attn", "attn.out_proj"], "param": "*weight"}, 2),
    "widths": (lambda: Attention(kdim=8, vdim=12), "lora_weight", {"at": ["attn", "attn.out_proj"], "param": "*weight"}, 4),
    "dora": (Attention, "dora", {"at": "attn.out_proj"}, 1),
    "encoder": (Encoder, "lora_weight", {"at": OUT, "param": "*weight"}, 8),
    "norm first": (lambda: Encoder(norm_first=True, activation="gelu"), "loha", {"at": OUT, "param": "*weight"}, 8),
    "lora": (Encoder, "lora", {"at": ["enc.layers.*.linear1", "**.linear2"]}, 4),
    "ia3": (Encoder, "ia3", {"at": "enc.layers.{i}.linear1"}, 2),
    "within": (Encoder, "lora", {"at": "enc", "within": ["Linear"]}, 4),
    "decoder": (
        decoder,
        "lokr", {"at": ["**.multihead_attn", "**.out_proj", "**.linear2"], "param": "*weight"}, 4,
    ),
    "transformer": (lambda: Whole(nn.Transformer(WIDTH, 2, 1, 1, 32, batch_first=True)), "delta", {"at": "inner.**"}, 34),
    "shared": (Shared, "lora_weight", {"at": ["layer.linear1", "layer.self_attn.out_proj"]}, 2),
    "experts": (Holder, "lora_weight", {"at": "part", "param": "experts"}, 1),
    "bare": (Holder, "lora_weight", {"at": "**", "param": "p*"}, 1),
    "uncalled": (Holder, "lora_weight", {"at": "part.unread"}, 1),
}  # fmt: skip


def rewritten(name):
    make, kind, options, count = REACHED[name]
    torch.manual_seed(0)
    model, x = make().eval(), images(2, 5, WIDTH)
    rank = {} if kind in ("delta", "ia3") else {"rank": 2}
    gm = fxplug.trace(model, x)
    return model, gm, fxplug.load_pass(kind, **options, **rank), count, x


@pytest.mark.slow
@pytest.mark.parametrize("name", REACHED)
def test_a_weight_within_is_changed(name, tmp_path):
    model, gm, p, count, x = rewritten(name)
    sites = fxplug.find(gm, p)
    new = fxplug.apply(gm, sites)
    assert len({str(site.port) for site in sites}) == len({site.path.partition("@")[0] + str(site.port.keys) for site in sites})
    assert len(dict.fromkeys(site["block"] for site in new.meta["passes"][0]["sites"])) == count
    fxplug.verify(gm, new, (x,), compile=False)
    torch.testing.assert_close(new(x), model(x), rtol=1e-5, atol=1e-6)
    own = {key: value for key, value in new.named_parameters() if key.startswith(f"{p.name}.")}
    with torch.no_grad():
        for value in own.values():
            value.add_(0.1 * torch.randn_like(value))
    merged = fxplug.merge(new)
    assert merged.state_dict().keys() == model.state_dict().keys()
    plain = copy.deepcopy(model)
    plain.load_state_dict(merged.state_dict())
    assert (plain(x) - model(x)).abs().max() > 1e-3
    for training in (False, True):
        outs = []
        for module in (plain, new, merged):
            torch.manual_seed(1)
            outs.append(module.train(training)(x))
        for out in outs[1:]:
            torch.testing.assert_close(out, outs[0], rtol=1e-4, atol=1e-5)
    new.eval()(x).square().sum().backward()
    assert all(value.grad is not None and value.grad.any() for key, value in own.items()), "gradients reach all that is new"
    fxplug.save(new, tmp_path / "a")
    assert torch.equal(fxplug.load(tmp_path / "a")(x), new(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "encoder", "experts"])
def test_one_compile_and_slots(name):
    model, gm, p, _, x = rewritten(name)
    options = REACHED[name][2]
    new = fxplug.apply(gm, fxplug.load_pass("lora_weight", **options, rank=2, slots=2)).eval()
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(new, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)
        for key, value in new.named_parameters():
            if key.startswith("lora_weight.") and value.dim() > 2:
                value.normal_(std=0.1)
        torch.testing.assert_close(compiled(x), new(x), rtol=1e-5, atol=1e-6)


def test_each_expert_has_its_own_update():
    _, gm, p, _, x = rewritten("experts")
    new = fxplug.apply(gm, p)
    block = new.get_submodule("lora_weight.part.LoraWeight")
    with torch.no_grad():
        block.up.normal_()
        found = block(new.part.experts)
    for e in range(3):
        update = block.up[:, :, e] @ block.down[:, e]
        torch.testing.assert_close(found[e], new.part.experts[e] + block.scale * update)
        assert torch.linalg.matrix_rank(update) == 2


@pytest.mark.parametrize(("make", "at", "finding"), [
    (Encoder, "all-linear", r"not reached: 4 Linear in 'enc' \(TransformerEncoder, which is one call\): enc.layers.\*.linear1, "
     r"enc.layers.\*.linear2 \(name them, .*; 4 weights that MultiheadAttention reads itself: enc.layers.\*.self_attn, "
     r"enc.layers.\*.self_attn.out_proj \(use lora_weight with at: .*, param: '\*weight'\)"),
    (Encoder, "**", "not reached: 4 Linear"),
    (Attention, "**", r"2 weights that MultiheadAttention reads itself: attn, attn.out_proj"),
    (decoder, "**", "4 weights that"),
    (Shared, "**", "2 Linear in 'layer'"),
    (Holder, "**", r"4 parameters that are no layer's weight: part, part.unread .*param: experts or proj or qkv or weight"),
])  # fmt: skip
def test_find_names_what_a_pattern_for_everything_leaves_out(make, at, finding):
    gm = fxplug.trace(make().eval(), images(2, 5, WIDTH))
    p = fxplug.load_pass("lora", at=at, expect=">=0")
    assert re.search(finding, str(fxplug.find(gm, p))), str(fxplug.find(gm, p))


def test_what_is_advised_reaches_it_and_is_then_named_no_more():
    gm = fxplug.trace(Encoder().eval(), images(2, 5, WIDTH))
    weights = fxplug.load_pass("lora_weight", at=["enc.layers.*.self_attn", "enc.layers.*.self_attn.out_proj"], param="*weight")
    layers = fxplug.load_pass("lora", at=["enc.layers.*.linear1", "enc.layers.*.linear2"])
    new = fxplug.apply(gm, weights, layers)
    assert "not reached" not in str(fxplug.find(new, fxplug.load_pass("lora", at="**", name="more")))


@pytest.mark.parametrize(("kind", "options", "finding"), [
    ("lora", {"at": "attn.out_proj"}, "never called by the model, as MultiheadAttention reads its weight itself.*lora_weight"),
    ("loha", {"at": "part", "param": "experts"}, r"the weights of 3 experts: use lora_weight, which has an update for each"),
    ("dora", {"at": "part", "param": "experts"}, r"the weights of 3 experts: use lora_weight"),
    ("lora_weight", {"at": "part"}, r"'part' \(Bare\) has no parameter 'weight'; it has proj, qkv, experts, scale"),
    ("lora_weight", {"at": "part", "param": "scale"}, r"needs 2 dimensions, and 'part:param.scale' is \[6\]"),
])  # fmt: skip
def test_what_has_no_form_is_refused(kind, options, finding):
    make = Attention if options["at"].startswith("attn") else Holder
    gm = fxplug.trace(make().eval(), images(2, 5, WIDTH))
    with pytest.raises(fxplug.FxplugError, match=finding):
        fxplug.apply(gm, fxplug.load_pass(kind, **options))


def test_a_nested_tensor_is_refused():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True), 1)

        def forward(self, x, pad):
            return self.enc(x, src_key_padding_mask=pad)

    gm = fxplug.trace(Padded().train(), (images(2, 5, WIDTH), torch.zeros(2, 5, dtype=torch.bool)))
    with pytest.raises(fxplug.SpecError, match="make it with enable_nested_tensor=False and trace again"):
        fxplug.apply(gm, fxplug.load_pass("lora", at="enc.layers.0.linear1"))


def test_a_vision_transformer_trains_its_attention():
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(16, 8, 2, 2, 16, 32, num_classes=4)
    nn.init.normal_(model.heads.head.weight, std=0.3)
    x, y = images(8, 3, 16, 16), torch.arange(8) % 4
    gm = fxplug.trace(model, x)
    at = ["encoder.layers.*.self_attention", "encoder.layers.*.self_attention.out_proj"]
    new = fxplug.apply(gm, fxplug.load_pass("lora_weight", at=at, param="*weight", rank=4))
    optimizer = torch.optim.AdamW(fxplug.trainable(new), lr=3e-2, weight_decay=0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    free = {key for key, value in new.named_parameters() if value.requires_grad}
    assert len(free) == 8 and all(key.startswith("lora_weight.") for key in free), "two halves of two weights in two layers"
    losses = []
    for _ in range(15):
        loss = F.cross_entropy(new.train()(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(value, before[key]) for key, value in new.state_dict().items() if key in before)
    merged = fxplug.merge(new.eval())
    torch.testing.assert_close(merged(x), new(x), rtol=1e-4, atol=1e-5)
