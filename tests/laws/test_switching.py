"""Adapters in slots: loaded, switched, combined, mixed in a batch, and never a new graph."""

from __future__ import annotations

import copy
import threading

import peft
import pytest
import timm
import torch
import zoo
from diffusers import UNet2DConditionModel
from safetensors.torch import save_file
from torch import nn
from torch.overrides import TorchFunctionMode

import fxplug
from fxplug.core.errors import ArtifactError, SpecError

LAYERS = ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"]
# three adapters of other ranks on other layers
KINDS = {"ink": (4, LAYERS), "film": (2, ["attn.qkv"]), "clay": (6, ["blocks.1.mlp.fc1", "attn.proj"])}


def vit():
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=5).eval()


def adapter(model, rank, targets, seed, **options):
    """A PEFT adapter with weights: the wrapped model, and its state dict with the configuration."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, **options)
    wrapped = peft.get_peft_model(copy.deepcopy(model), config).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name or "lora_embedding_B" in name:
                parameter.normal_(std=0.2)
    return wrapped


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Folders that PEFT saved, and what its models give."""
    model, x = vit(), inputs()
    made = {}
    for seed, (name, (rank, targets)) in enumerate(KINDS.items()):
        wrapped = adapter(model, rank, targets, seed)
        folder = tmp_path_factory.mktemp(name)
        wrapped.save_pretrained(folder)
        with torch.no_grad():
            made[name] = folder, wrapped(x)
    return made


def inputs(batch=4):
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def traced():
    model = vit()
    return model, fxplug.trace(model, (inputs(2),))


def slotted(gm, slots=3, rank=8, **options):
    return fxplug.apply(gm, fxplug.load_pass("lora", at="blocks.**", within=["Linear"], rank=rank, slots=slots, **options))


@pytest.fixture
def loaded(traced, files):
    new = slotted(traced[1])
    for name, (folder, _) in files.items():
        new.adapters.load(name, folder)
    return new


class Looking(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_each_adapter_gives_what_peft_gives(traced, loaded, files):
    model, x = traced[0], inputs()
    assert torch.equal(loaded(x), model(x))
    for name, (_, expected) in files.items():
        loaded.adapters.use(name)
        assert not torch.allclose(expected, model(x), atol=1e-2)
        close(loaded(x), expected)
    loaded.adapters.use(None)
    assert torch.equal(loaded(x), model(x))


@torch.no_grad()
def test_combined_adapters_are_the_sum_of_their_updates(traced, loaded, files):
    """As PEFT's `add_weighted_adapter` with `cat`, which is the sum of the weighted updates."""
    model, x = copy.deepcopy(traced[0]), inputs()
    weights = {"ink": 0.8, "film": -0.3}
    for name, weight in weights.items():
        wrapped = adapter(traced[0], *KINDS[name], list(KINDS).index(name))
        wrapped.merge_adapter()
        for key, module in wrapped.base_model.model.named_modules():
            if hasattr(module, "base_layer"):
                model.get_submodule(key).weight += weight * (module.base_layer.weight - traced[0].get_submodule(key).weight)
    loaded.adapters.use(weights)
    assert loaded.adapters.active == pytest.approx(weights)
    close(loaded(x), model(x))


@torch.no_grad()
def test_every_sample_has_an_adapter_of_its_own(traced, loaded, files):
    x = inputs()
    loaded.adapters.use(["ink", None, "film", {"ink": 1.0}])
    out = loaded(x)
    expected = [files["ink"][1][0], traced[0](x)[1], files["film"][1][2], files["ink"][1][3]]
    close(out, torch.stack(expected))
    loaded.adapters.use(torch.tensor([0, -1, 1, 0]))
    assert torch.equal(loaded(x), out)
    with pytest.raises(SpecError, match=r"use\(\) got . entries but the batch has \d+ samples: give one entry per sample"):
        loaded(x[:3])
    loaded.adapters.use("ink")
    close(loaded(x[:3]), files["ink"][1][:3])


@pytest.mark.slow
@torch.no_grad()
def test_nothing_recompiles(traced, loaded, files):
    """Calls, scales, switches, combinations, none, another load, a mixed batch, and other batch sizes: one graph."""
    compiles = []

    def backend(graph, _):
        compiles.append(graph)
        return graph

    torch._dynamo.reset()
    call = torch.compile(loaded, fullgraph=True, dynamic=True, backend=backend)
    uses = (None, "ink", {"ink": 0.5}, "film", "clay", {"ink": 0.8, "film": 0.3}, ["ink", None, "film", "clay"], None)
    x, expected = inputs(), []
    for what in uses:
        loaded.adapters.use(what)
        with Looking():  # where something looks on all slots are multiplied, as in compiled code
            expected.append(loaded(x))
    for what, wanted in zip(uses, expected, strict=True):
        loaded.adapters.use(what)
        assert torch.equal(call(x), wanted)
        close(loaded(x), wanted)
    loaded.adapters.unload("film")
    loaded.adapters.load("other", files["film"][0])
    loaded.adapters.use("other")
    close(call(x), files["film"][1])
    close(call(x[:3]), files["film"][1][:3])
    assert len(compiles) == 1


@pytest.mark.slow  # inductor's minute; that one graph serves all of it is tried above
@torch.no_grad()
def test_compiled_code_switches(loaded, files):
    torch._dynamo.reset()
    call, x = torch.compile(loaded, fullgraph=True, dynamic=True), inputs()
    for name in ("ink", "clay"):
        loaded.adapters.use(name)
        close(call(x), files[name][1])
    loaded.adapters.use(["ink", "clay"])
    with pytest.raises(SpecError, match=r"use\(\) got . entries but the batch has \d+ samples: give one entry per sample"):
        call(x)


def test_names_and_slots(loaded, files):
    adapters = loaded.adapters
    assert adapters.names == ["ink", "film", "clay"] and adapters.slots == 3
    assert loaded.adapters is adapters
    with pytest.raises(SpecError, match=r"all 3 slots of pass 'lora' are taken, by ink, film, clay.*slots=4"):
        adapters.load("more", files["ink"][0])
    adapters.use("film")
    adapters.unload("film")
    assert adapters.names == ["ink", "clay"] and adapters.active == {}
    banks = [p for name, p in loaded.named_parameters() if name.startswith("lora.") and "up" in name]
    assert all((bank[:, 8:16] == 0).all() for bank in banks)
    adapters.load("Tusche 墨", files["ink"][0])
    assert adapters.names == ["ink", "Tusche 墨", "clay"]


@torch.no_grad()
def test_an_adapter_is_replaced_in_its_slot(loaded, files):
    x = inputs()
    loaded.adapters.use("film")
    with pytest.raises(SpecError, match="loaded already.*replace=True"):
        loaded.adapters.load("film", files["ink"][0])
    loaded.adapters.load("film", files["ink"][0], replace=True)
    close(loaded(x), files["ink"][1])
    assert loaded.adapters.names == ["ink", "film", "clay"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("inc", "no adapter 'inc' .did you mean 'ink'"),
        ({"ink": float("nan")}, "weight of 'ink' must be a finite number"),
        ({"ink": True}, "must be a finite number"),
        ({"ink": 1e39}, "a weight is out of range for torch.float32"),
        (["ink", "flim"], "sample 1: no adapter 'flim' .did you mean 'film'"),
        ([0, 3], "sample 1: no adapter at position 3; there are 3: ink, film, clay"),
        (torch.tensor([0.5]), "whole numbers"),
        ([], "use takes a name"),
        (["ink"] * 1025, "at most 1024 samples, not 1025"),
        (7, "use takes a name"),
    ],
)
def test_what_cannot_be_used_changes_nothing(loaded, what, message):
    loaded.adapters.use("clay")
    with pytest.raises(SpecError, match=message):
        loaded.adapters.use(what)
    assert loaded.adapters.active == {"clay": 1.0}


def test_an_adapter_that_does_not_fit_changes_nothing(traced, files, tmp_path):
    new = slotted(traced[1], rank=4, slots=2)
    before = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    def half(layer, value=1.0, dtype=torch.float32):
        down = torch.full((2, 192), value).to(dtype)
        return {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": torch.ones(576, 2)}

    refused = [
        (files["clay"][0], SpecError, r"3 layers of the adapter have a rank above rank_max=4, the highest of them 6"),
        (half("blocks.7.attn.qkv"), ArtifactError, "1 of 1 layers are not in the graph: 'blocks.7.attn.qkv'"),
        (half("blocks.0.attn.qkv", torch.nan), ArtifactError, "not finite"),
        (half("blocks.0.attn.qkv", dtype=torch.int32), ArtifactError, "floating point"),
        (tmp_path / "nothing.safetensors", ArtifactError, "no adapter file"),
    ]
    for source, error, message in refused:
        with pytest.raises(error, match=message):
            new.adapters.load("bad", source)
    assert new.adapters.names == []
    assert all(torch.equal(tensor, before[name]) for name, tensor in new.state_dict().items())
    for name in ("", "a" * 129, "a\0b", 5):
        with pytest.raises(SpecError, match="at most 128 bytes"):
            new.adapters.load(name, files["ink"][0])


def test_a_module_without_slots_says_so(traced):
    with pytest.raises(SpecError, match="no pass here has slots"):
        fxplug.Adapters(traced[1])
    with pytest.raises(AttributeError, match="no pass here has slots"):
        _ = traced[1].adapters
    with pytest.raises(SpecError, match="dropout and slots cannot be used together"):
        slotted(traced[1], dropout=0.1)


@torch.no_grad()
def test_slots_are_saved_with_what_they_hold(loaded, files, tmp_path):
    loaded.adapters.use({"ink": 1.0})
    fxplug.save(loaded, tmp_path / "out")
    again = fxplug.load(tmp_path / "out")
    assert again.adapters.names == ["ink", "film", "clay"] and again.adapters.active == {"ink": 1.0}
    close(again(inputs()), files["ink"][1])
    other = copy.deepcopy(again)
    other.adapters.use("film")
    assert again.adapters.active == {"ink": 1.0}
    close(other(inputs()), files["film"][1])


@torch.no_grad()
def test_bf16_is_as_near_as_peft(traced, files):
    """Within one unit of what PEFT itself is off by, against float32."""
    x = inputs()
    new = slotted(fxplug.trace(copy.deepcopy(traced[0]).bfloat16(), (x.bfloat16(),)))
    for name, (folder, expected) in files.items():
        wrapped = adapter(traced[0], *KINDS[name], list(KINDS).index(name)).bfloat16()
        new.adapters.load(name, folder)
        new.adapters.use(name)
        theirs = (wrapped(x.bfloat16()).float() - expected).abs().max()
        ours = (new(x.bfloat16()).float() - expected).abs().max()
        assert ours <= theirs + torch.finfo(torch.bfloat16).eps * expected.abs().max()


@torch.no_grad()
def test_memory_of_a_slot_is_the_adapter_padded(traced):
    def size(slots):
        named = slotted(traced[1], slots=slots).named_parameters()
        return sum(p.numel() * p.itemsize for name, p in named if name.startswith("lora."))

    widths = [(192, 576), (192, 192), (192, 768), (768, 192)]
    assert size(4) - size(3) == 2 * 4 * 8 * sum(a + b for a, b in widths)


class Odd(nn.Module):
    """Layers of every kind, one of which sees no samples, and one whose samples come second."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.conv = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.group = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.line = nn.Conv1d(16, 16, 3, padding=1)
        self.positions = nn.Linear(2, 16)
        self.second = nn.Linear(16, 16)
        self.windows = nn.Linear(16, 16)
        self.register_buffer("grid", torch.randn(5, 2))

    def forward(self, x, words):
        y = self.group(self.conv(x)).flatten(2)
        y = self.line(y).transpose(1, 2) + self.embed(words)[:, None].mean(2)
        y = y + self.positions(self.grid).mean(0)
        y = self.second(y.transpose(0, 1)).transpose(0, 1)
        b, n, c = y.shape
        return self.windows(y.reshape(b * 4, n // 4, c)).reshape(b, n, c)


@torch.no_grad()
def test_layers_of_every_kind(tmp_path):
    torch.manual_seed(0)
    model, x, words = Odd().eval(), torch.randn(2, 3, 8, 8), torch.randint(0, 20, (2, 3))
    gm = fxplug.trace(model, (x, words))
    plain = fxplug.apply(gm, fxplug.load_pass("lora", at="*", rank=4, alpha=6))
    for name, parameter in plain.named_parameters():
        if name.startswith("lora."):
            parameter.normal_(std=0.3)
    fxplug.save(plain, tmp_path / "out")
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="*", rank=6, slots=2))
    assert torch.equal(new(x, words), model(x, words))
    new.adapters.load("a", tmp_path / "out")
    new.adapters.use("a")
    close(new(x, words), plain(x, words))
    x, words = torch.randn(4, 3, 8, 8), torch.randint(0, 20, (4, 3))
    close(new(x, words), plain(x, words))
    new.adapters.use(["a", None, "a", "a"])
    assert new(x, words).isnan().all()  # positions are the same for all samples, so they cannot take an adapter for one
    kept = {k: v for k, v in plain.state_dict().items() if k.startswith("lora.") and "positions" not in k}
    new.adapters.load("b", kept)
    new.adapters.unload("a")
    for name, parameter in plain.named_parameters():
        if "positions" in name and name.startswith("lora."):
            parameter.zero_()
    new.adapters.use(["b", None, "b", "b"])
    gates = torch.tensor([1, 0, 1, 1]).bool()[:, None, None]
    expected = torch.where(gates, plain(x, words), model(x, words))
    assert not torch.allclose(expected, model(x, words), atol=1e-2)
    close(new(x, words), expected)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["loha", "lokr", "lora_weight"])
def test_updates_of_the_weight_in_slots(traced, kind, tmp_path):
    model, gm = traced
    x, at = inputs(), {"at": "blocks.**", "within": ["Linear"]}
    plain = fxplug.apply(gm, fxplug.load_pass(kind, **at, rank=2, alpha=4))
    for name, parameter in plain.named_parameters():
        if name.startswith(f"{kind}."):
            parameter.normal_(std=0.3)
    fxplug.save(plain, tmp_path / "out")
    new = fxplug.apply(gm, fxplug.load_pass(kind, **at, rank=2, rank_max=4, slots=2))
    assert torch.equal(new(x), model(x))
    new.adapters.load("a", tmp_path / "out")
    assert torch.equal(new(x), model(x))
    new.adapters.use("a")
    close(new(x), plain(x))
    new.adapters.load("b", tmp_path / "out")
    new.adapters.use({"a": 0.25, "b": 0.75})
    close(new(x), plain(x))
    new.adapters.use(["a"] * 4)
    close(new(x), plain(x))
    with pytest.raises(SpecError, match="change weights .* which all samples of a batch share"):
        new.adapters.use(["a", "b", "a", "b"])
    close(new(x), plain(x))


@torch.no_grad()
def test_a_loha_goes_into_slots_of_low_rank(traced):
    from lycoris import LycorisNetwork, create_lycoris

    model, x = copy.deepcopy(traced[0]), inputs()
    torch.manual_seed(3)
    LycorisNetwork.apply_preset({"enable_conv": False, "target_module": ["Attention"], "target_name": []})
    network = create_lycoris(model, 1.0, linear_dim=2, linear_alpha=1.0, algo="loha")
    network.apply_to()
    for parameter in network.parameters():
        parameter.normal_(std=0.4)
    new = slotted(traced[1])
    new.adapters.load("loha", network.state_dict())
    new.adapters.use("loha")
    assert not torch.allclose(model(x), traced[0](x), atol=1e-2)
    close(new(x), model(x))


@pytest.mark.slow
@torch.no_grad()
def test_a_unet_and_a_file_for_a_whole_pipeline(tmp_path):
    """Diffusers' file has a text encoder's layers beside the UNet's."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64), norm_num_groups=8, cross_attention_dim=16, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()  # fmt: skip
    kwargs = {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 3])}
    kwargs["encoder_hidden_states"] = torch.randn(2, 7, 16)
    gm = fxplug.trace(unet, kwargs={**kwargs, "return_dict": False})
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="re:.*(to_[qkv]|to_out\\.0|conv1)$", rank=4, slots=2))
    wrapped = adapter(unet, 4, ["to_q", "to_k", "to_v", "to_out.0", "conv1"], 0)
    state = {f"unet.{k}": v for k, v in peft.get_peft_model_state_dict(wrapped).items()}
    state = {k.replace("base_model.model.", ""): v.contiguous() for k, v in state.items()}
    state |= {f"text_encoder.layers.0.q_proj.lora_{h}.weight": torch.ones(4, 4) for h in "AB"}
    state |= {k.replace(".lora_A.weight", ".alpha"): torch.tensor(8.0) for k in state if "lora_A" in k}
    save_file(state, tmp_path / "ink.safetensors")
    found = new.adapters.load("ink", tmp_path / "ink.safetensors")
    assert len(found.placed) == len(state) // 3 - 1 and list(found.others) == ["text_encoder"]
    new.adapters.use("ink")
    out = wrapped(**kwargs).sample
    assert not torch.allclose(out, unet(**kwargs).sample, atol=1e-3)
    close(new(**kwargs, return_dict=False)[0], out)
    new.adapters.use(["ink", None])
    close(new(**kwargs, return_dict=False)[0], torch.stack([out[0], unet(**kwargs).sample[1]]))


@torch.no_grad()
def test_threads_may_switch_between_calls(loaded, files):
    """A loop that serves while others load and switch: every answer is that of one adapter whole."""
    x, answers, errors = inputs(1), [], []
    known = [expected[:1] for _, expected in files.values()]
    stop = threading.Event()

    def switch():
        try:
            for turn in range(12):
                loaded.adapters.use(list(files)[turn % 2])
                loaded.adapters.unload("clay")
                loaded.adapters.load("clay", files["clay"][0])
        except Exception as error:
            errors.append(error)
        finally:
            stop.set()

    loaded.adapters.use("ink")
    thread = threading.Thread(target=switch)
    thread.start()
    while not stop.is_set():
        answers.append(loaded(x))
    thread.join()
    assert not errors and len(answers) > 1
    for answer in answers:
        assert any(torch.allclose(answer, one, atol=1e-4) for one in known[:2])


class Words(nn.Module):
    """Words and positions, which no sample has for itself, though there are a multiple of the batch of them."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.query = nn.Embedding(20, 8), nn.Embedding(16, 8), nn.Linear(8, 8)
        self.latent = nn.Parameter(torch.randn(1, 1, 8))

    def forward(self, words):
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        return x * self.query(self.latent.expand(words.shape[0], -1, -1))


def halves(layers, seed=0, rank=2):
    """An adapter for these Linear layers, (out, in) by path, as PEFT names it."""
    gen = torch.Generator().manual_seed(seed)
    made = {}
    for path, (out, inner) in layers.items():
        made[f"{path}.lora_A.weight"] = torch.randn(rank, inner, generator=gen)
        made[f"{path}.lora_B.weight"] = torch.randn(out, rank, generator=gen)
    return made


@torch.no_grad()
@pytest.mark.parametrize("fuse", [None, "fused"])
def test_positions_are_no_samples_though_their_number_would_fit(fuse):
    torch.manual_seed(0)
    words = torch.randint(0, 20, (2, 4))
    new = fxplug.apply(fxplug.trace(Words().eval(), (words,)), fxplug.load_pass("lora", at="**", rank=2, slots=2))
    new.adapters.load("a", halves({"query": (8, 8)}))
    new.adapters.load("b", {"places.lora_embedding_A": torch.randn(2, 16), "places.lora_embedding_B": torch.randn(8, 2)})
    new = fxplug.lower(new, fuse=fuse)
    plain = new(words)
    new.adapters.use("a")
    expected = new(words)
    new.adapters.use([None, "a"])
    close(new(words), torch.stack([plain[0], expected[1]]))
    new.adapters.use("b")
    assert new(words).isfinite().all()
    with pytest.raises(fxplug.SpecError, match="change 'places', whose input has no samples"):
        new.adapters.use([None, "b"])


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.q(x) * self.k(x)


@torch.no_grad()
def test_a_replaced_adapter_is_used_as_before_in_every_pass():
    x = torch.randn(2, 3, 8)
    passes = [fxplug.load_pass("lora", name=f"on_{at}", at=at, rank=4, slots=2) for at in "qk"]
    new = fxplug.apply(fxplug.trace(Half().eval(), (x,)), *passes)
    both = halves({"q": (8, 8), "k": (8, 8)})
    new.adapters.load("a", both)
    new.adapters.use({"a": 0.5})
    expected = new(x)
    new.adapters.load("a", halves({"q": (8, 8)}, 1), replace=True)
    alone = new(x)
    new.adapters.load("b", halves({"k": (8, 8)}, 2))  # into the slot that a has left
    assert torch.equal(new(x), alone)
    assert new.adapters.active == {"a": 0.5}
    new.adapters.load("a", both, replace=True)
    close(new(x), expected)


@torch.no_grad()
def test_odd_places_to_switch_in():
    x = torch.randn(2, 3, 8)
    gm = fxplug.trace(Half().eval().bfloat16(), (x.bfloat16(),))
    with torch.inference_mode():
        new = fxplug.apply(gm, fxplug.load_pass("lora", at="*", rank=4, slots=2))
        new.adapters.load("a", halves({"q": (8, 8)}))
    new.adapters.use({"a": 0.3})
    assert new.adapters.active == {"a": pytest.approx(0.3, rel=1e-6)}  # not rounded to the model's dtype
    with pytest.raises(SpecError, match="text of at most 128 bytes"):
        new.adapters.load("\ud800", halves({"q": (8, 8)}))
    for how in ({"fuse": None}, {"fuse": "fused"}, {"merge": "live"}):
        assert fxplug.lower(new, **how)(x[:0].bfloat16()).shape == (0, 3, 8)
    with pytest.raises(SpecError, match="meta device and have no values"):
        new.to("meta").adapters.use("a")


class Turned(nn.Module):
    """Samples second, in as many tokens as samples; and rows that alternate between samples."""

    def __init__(self):
        super().__init__()
        self.second, self.rows, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        y = self.second(x.permute(1, 0, 2)) + x.transpose(0, 1)
        tokens, batch, width = y.shape
        y = y + self.rows(y.reshape(tokens * batch, width)).view(tokens, batch, width)
        return self.last(y.transpose(0, 1).reshape(batch * tokens, width)).view(batch, tokens, width)


@torch.no_grad()
def test_samples_are_where_the_graph_says():
    torch.manual_seed(0)
    model = Turned().eval()
    new = fxplug.apply(fxplug.trace(model, (torch.randn(2, 2, 8),)), fxplug.load_pass("lora", at="*", rank=2, slots=2))
    halves = {layer: (torch.randn(2, 8), torch.randn(8, 2)) for layer in ("second", "rows", "last")}
    for name, layers in {"all": ["second", "rows", "last"], "some": ["second", "last"]}.items():
        state = {f"{layer}.lora_{h}.weight": half for layer in layers for h, half in zip("AB", halves[layer], strict=True)}
        new.adapters.load(name, state)
    for tokens, batch in ((2, 2), (5, 2), (3, 4)):
        x = torch.randn(batch, tokens, 8)
        ways = {}
        for use in (None, "all", "some"):
            new.adapters.use(use)
            ways[use] = new(x)
        assert torch.equal(ways[None], model(x))
        for module in (new, fxplug.fuse(new)):
            new.adapters.use(["some", *[None] * (batch - 1)])
            close(module(x), torch.cat([ways["some"][:1], ways[None][1:]]))
            with pytest.raises(fxplug.SpecError, match="change 'rows', whose input has no samples"):
                module.adapters.use(["all", *[None] * (batch - 1)])  # which row of `rows` is whose cannot be told


def test_a_rank_that_a_convolution_in_groups_cannot_share_out_is_refused():
    gm = fxplug.trace(torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3, groups=2)), torch.randn(1, 4, 8, 8))
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="0", rank=2, slots=1))
    halves = {"A": torch.randn(3, 2, 3, 3), "B": torch.randn(6, 1, 1, 1)}
    wrong = {f"base_model.model.0.lora_{half}.weight": value for half, value in halves.items()}
    with pytest.raises(fxplug.SpecError, match="is for a convolution of 3 groups, and '0' has 2"):
        new.adapters.load("odd", wrong)


@pytest.fixture(scope="module")
def listed():
    """A model whose first input is a list with a latent for each sample: the batch is in `t` alone. And its inputs."""
    case = next(c for c in zoo.cases() if c.name == "diffusers/ZImageTransformer2DModel")
    model, (args, kwargs) = case.build().eval(), case.inputs(3)
    return fxplug.trace(model, args, kwargs), kwargs


def wired(gm, name, **options):
    """Slots on the layers of the model of `listed`, with two adapters."""
    new = fxplug.apply(gm, fxplug.load_pass(name, at="layers.*.attention.to_*", rank=4, slots=2, **options))
    for adapter_name in ("ink", "film"):
        layers = [(n, m) for n, m in gm.named_modules() if n.startswith("layers.0.attention.to_") and hasattr(m, "in_features")]
        state = {f"{n}.lora_A.weight": torch.randn(2, m.in_features) for n, m in layers}
        state |= {f"{n}.lora_B.weight": torch.randn(m.out_features, 2) for n, m in layers}
        new.adapters.load(adapter_name, state)
    return new


@pytest.mark.slow
def test_an_option_names_the_input_that_carries_the_samples(listed, tmp_path):
    gm, inputs = listed
    new = wired(gm, "lora", samples="t")
    fxplug.save(new, tmp_path / "out")
    with torch.no_grad():
        for module in (new, fxplug.load(tmp_path / "out")):
            alone = {}
            for name in (None, "ink", "film"):
                module.adapters.use(name)
                alone[name] = module(**inputs)[0]
            assert not torch.equal(alone["ink"][0], alone[None][0])
            module.adapters.use(["ink", None, "film"])
            for mine, name, i in zip(module(**inputs)[0], ["ink", None, "film"], range(3), strict=True):
                close(mine, alone[name][i])
    entry = fxplug.load(tmp_path / "out").meta["passes"][0]
    assert entry["params"]["samples"] == "t"


def test_the_first_tensor_carries_the_samples_where_no_option_names_another(listed):
    gm, inputs = listed
    new = wired(gm, "lora")
    new.adapters.use(["ink", None, "film"])
    with pytest.raises(SpecError, match=r"use\(\) got . entries but the batch has \d+ samples: give one entry per sample"):
        new(**inputs)


@pytest.mark.parametrize("name, text", [
    ("tt", r"samples: ':in.tt' is not an input.*':in.x\[0\]'.*did you mean ':in.t'"),
    ("x", r"':in.x' is not an input .*':in.x\[0\]'"),
    ("return_dict", r"':in.return_dict' was False when the model was traced"),
    ("x[*]", r"must be the name of an input of the model, such as 'timestep' or 'x\[0\]', not 'x\[\*\]'"),
    (3, r"must be the name of an input .* not 3"),
])  # fmt: skip
def test_samples_that_no_input_carries_are_told(listed, name, text):
    with pytest.raises(SpecError, match=text):
        fxplug.apply(listed[0], fxplug.load_pass("lora", at="layers.**", slots=2, samples=name))


def test_samples_go_with_slots_and_have_a_dimension(traced):
    with pytest.raises(SpecError, match="requires 'slots'"):
        fxplug.load_pass("lora", samples="x")
    case = next(c for c in zoo.cases() if c.name == "diffusers/UNet2DModel")
    args, kwargs = case.inputs(2)
    gm = fxplug.trace(case.build().eval(), args, {**kwargs, "timestep": torch.tensor(7)})
    with pytest.raises(SpecError, match="samples: ':in.timestep' was one number when traced and has no dimension of samples"):
        fxplug.apply(gm, fxplug.load_pass("lora", at="mid_block.**", slots=2, samples="timestep"))


@pytest.mark.parametrize("fuse", [None, "fused", "blas"])
def test_no_tensor_moves_while_adapters_are_switched(files, fuse):
    """What a captured CUDA graph reads stays where it is, and another call of the same code gives the new choice's result."""
    new = fxplug.apply(fxplug.trace(vit(), inputs()), fxplug.load_pass("lora", at="blocks.**", rank=6, slots=2))
    low = fxplug.lower(new, fuse=fuse, outline=None)

    def places():
        return {name: (t.data_ptr(), tuple(t.shape)) for name, t in low.state_dict(keep_vars=True).items()} | {
            name: (t.data_ptr(), tuple(t.shape)) for name, t in low.named_buffers()
        }

    before, adapters = places(), low.adapters
    steps = [
        lambda: adapters.load("ink", str(files["ink"][0])), lambda: adapters.use("ink"), lambda: adapters.use(None),
        lambda: adapters.load("film", str(files["film"][0])), lambda: adapters.use({"ink": 0.5, "film": -2.0}),
        lambda: adapters.use(["ink", None, "film", {"ink": 0.3}]), lambda: adapters.use("ink"),
        lambda: adapters.unload("ink"), lambda: adapters.load("ink", str(files["clay"][0])),
        lambda: adapters.use([{"ink": 1.0, "film": 1.0}, "film", None, "ink"]), lambda: adapters.use("film"),
    ]  # fmt: skip
    with torch.no_grad():
        for step in steps:
            step()
            assert places() == before
            torch.testing.assert_close(low(inputs()), new(inputs()), rtol=1e-4, atol=1e-5)
