"""Passes out of adapter files: what holds them, layer by layer; configurations that name a file; and what a file is."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
from pathlib import Path

import peft
import pytest
import small
import torch
from lycoris import LycorisNetwork, create_lycoris
from safetensors.torch import save_file
from sweeps import sweep
from torch import nn

import fxplug
from fxplug.__main__ import app
from fxplug.adapters.files import read
from fxplug.core.errors import ArtifactError, ClashError, SpecError

NEAR = {"rtol": 1e-4, "atol": 1e-5}
RANKS = {"qkv": 3, "fc1": 5, "fc2": 2}
CONFIG = {"model": {"timm": "test_vit"}, "seed": 3, "verify": False}


def lora(model, ranks=RANKS, scale=0.3, start="base_model.model."):
    """PEFT's state dict with an update of every layer that is named, its rank by its last name."""
    made = {}
    for path, layer in model.named_modules():
        rank = ranks.get(path.rpartition(".")[2])
        if rank and isinstance(layer, nn.Linear):
            out, inner = layer.weight.shape
            made[f"{start}{path}.lora_A.weight"] = torch.randn(rank, inner) * scale
            made[f"{start}{path}.lora_B.weight"] = torch.randn(out, rank) * scale
    return made


def lycoris(model, **how):
    """A LyCORIS network with random weights around a model, and its file's tensors."""
    torch.manual_seed(1)
    LycorisNetwork.apply_preset({"target_module": ["Linear", "Conv2d"], "target_name": []})
    network = create_lycoris(model, 1.0, linear_alpha=4, **how)
    network.apply_to()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return network, {key: value.clone() for key, value in network.state_dict().items()}


@pytest.fixture
def ink(tmp_path):
    save_file(lora(small.vit().model), tmp_path / "ink.safetensors")
    return tmp_path / "ink.safetensors"


def merged(state):
    """What PEFT's state dict adds to each weight."""
    names = {key.removesuffix(".lora_A.weight") for key in state if key.endswith("A.weight")}
    return {n.removeprefix("base_model.model."): state[f"{n}.lora_B.weight"] @ state[f"{n}.lora_A.weight"] for n in names}


def with_weights(model, updates, call):
    """What a model gives with some updates of its weights."""
    layers = {path: model.get_submodule(path) for path in updates}
    with torch.no_grad():
        for path, layer in layers.items():
            layer.weight += updates[path]
        try:
            return model(*call)
        finally:
            for path, layer in layers.items():
                layer.weight -= updates[path]


def held_numbers(new, name="adapter"):
    """How many numbers the slots of a pass have for its adapters."""
    return sum(p.numel() for key, p in new.named_parameters() if key.startswith(f"{name}."))


# --- pass_for


def test_each_layer_has_the_rank_of_its_update(ink):
    base = small.vit()
    p = fxplug.pass_for(ink, base.gm, slots=1)
    assert {rule.options["rank"] for rule in p.rules} == {2, 3, 5}
    new = fxplug.apply(base.gm, p)
    assert held_numbers(new) == sum(t.numel() for entry in read(ink).entries for t in entry.tensors.values())
    small.load_and_use(new, ink, "ink")
    updates = merged(lora_of(ink))
    torch.testing.assert_close(new(*base.args), with_weights(base.model, updates, base.args), **NEAR)


def lora_of(file):
    from safetensors.torch import load_file

    return load_file(file)


def test_several_files_share_a_pass_and_its_samples(ink, tmp_path):
    base = small.vit()
    film = lora(base.model, {"qkv": 6, "proj": 1})
    p = fxplug.pass_for([ink, film], base.gm, slots=3)
    ranks = {path: rule.options["rank"] for rule in p.rules for path in rule.match.patterns}
    assert ranks["blocks.0.attn.qkv"] == 6 and ranks["blocks.0.mlp.fc1"] == 5 and ranks["blocks.0.attn.proj"] == 1
    new = fxplug.apply(base.gm, p)
    new.adapters.load("ink", ink)
    new.adapters.load("film", film)
    x = torch.cat([base.args[0]] * 2)[:2]
    new.adapters.use(["ink", "film"])
    by_sample = new(x)
    for row, name in enumerate(("ink", "film")):
        new.adapters.use(name)
        torch.testing.assert_close(by_sample[row], new(x)[row], **NEAR)
    for form in ({"fuse": True}, {"merge": "live"}, {"merge": "fold"}):
        torch.testing.assert_close(fxplug.lower(new, **form)(x), new(x), **NEAR)
    fxplug.save(new, tmp_path / "out")
    assert torch.equal(fxplug.load(tmp_path / "out")(x), new(x))


@pytest.mark.slow
def test_ranks_of_slots_compile_as_one_graph(ink):
    base = small.vit()
    new = fxplug.apply(base.gm, fxplug.pass_for(ink, base.gm, slots=2))
    new.adapters.load("ink", ink)
    torch._dynamo.reset()
    with torch.no_grad():
        run = torch.compile(new, fullgraph=True, backend="eager")
        run(*base.args)
        with torch.compiler.set_stance("fail_on_recompile"):
            for use in ("ink", None, {"ink": 0.3}):
                new.adapters.use(use)
                torch.testing.assert_close(run(*base.args), new(*base.args), **NEAR)


@pytest.mark.slow
@sweep(
    "how",
    [
        {"algo": "loha", "linear_dim": 3},
        {"algo": "lokr", "linear_dim": 2, "factor": 4},
        {"algo": "lokr", "linear_dim": 3, "factor": -1, "decompose_both": True},
        {"algo": "lokr", "linear_dim": 10000, "factor": 8},
        {"algo": "lokr", "linear_dim": 2, "conv_dim": 2, "conv_alpha": 1, "use_tucker": True},
        {"algo": "loha", "linear_dim": 2, "conv_dim": 2, "conv_alpha": 1, "use_tucker": True},
        {"algo": "lora", "linear_dim": 2, "conv_dim": 3, "conv_alpha": 1},
    ], 0, 2,
    ids=str,
)
def test_factors_of_lycoris_stay_factors(how):
    base = small.unet()
    model = copy.deepcopy(base.model)
    _, state = lycoris(model, **how)
    p = fxplug.pass_for(state, base.gm)
    wanted = {"lora": "Lora"}.get(how["algo"], how["algo"].capitalize())
    assert {str(rule.use).rpartition(":")[2] for rule in p.rules} == {wanted}
    new = fxplug.apply(base.gm, p)
    assert held_numbers(new) <= 1.001 * sum(t.numel() for key, t in state.items() if not key.endswith(".alpha"))
    small.load_and_use(new, state, "ink")
    with torch.no_grad():
        torch.testing.assert_close(new(*base.args, **base.kwargs)[0], model(*base.args, **base.kwargs)[0], **NEAR)


def odd_lokr(first, rank, split, kernel=False):
    """A LoKr of a layer (24, 8) or of a convolution (24, 8, 3, 3) as older tools split it."""
    a, c = first
    b, d = 24 // a, (72 if kernel else 8) // c
    sizes = {"w1": (a, c), "w2": (b, d)}
    made = {}
    for (name, (rows, columns)), cut in zip(sizes.items(), split, strict=True):
        if cut:
            made[f"lokr_{name}_a"], made[f"lokr_{name}_b"] = torch.randn(rows, rank), torch.randn(rank, columns)
        else:
            made[f"lokr_{name}"] = torch.randn(rows, columns)
    return made


class Two(nn.Module):
    """A linear layer and a convolution."""

    def __init__(self):
        super().__init__()
        self.linear, self.conv = nn.Linear(8, 24), nn.Conv2d(8, 24, 3, padding=1)

    def forward(self, x):
        return self.conv(x) + self.linear(x.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize("first", [(6, 4), (12, 2), (2, 8), (24, 1)])
@pytest.mark.parametrize("split", [(True, True), (False, True), (True, False), (False, False)])
def test_a_lokr_that_no_rank_and_factor_give_is_held_too(first, split):
    """LyCORIS of 2023 had the larger factors first, decomposed at every rank, and a convolution's as those of a matrix."""
    torch.manual_seed(0)
    model, x = Two().eval(), torch.randn(1, 8, 5, 5)
    gm = fxplug.trace(model, (x,))
    linear, conv = odd_lokr(first, 3, split), odd_lokr((first[0], 3 * first[1]), 3, split, kernel=True)
    state = {f"linear.{key}": value for key, value in linear.items()}
    if split[1]:  # a matrix that is not decomposed has the kernel in its shape
        state |= {f"conv.{key}": value for key, value in conv.items()}
    new = fxplug.apply(gm, fxplug.pass_for(state, gm))
    assert held_numbers(new) == sum(t.numel() for t in state.values())
    small.load_and_use(new, state, "ink")
    updates = {path: entry.update(model.get_submodule(path).weight.shape) for path, entry in new_entries(state)}
    torch.testing.assert_close(new(x), with_weights(model, updates, (x,)), rtol=1e-3, atol=1e-3)


def new_entries(state):
    for entry in read(state).entries:
        yield entry.path, entry


class Projected(nn.Module):
    """An attention whose last layer is read, and not called."""

    def __init__(self):
        super().__init__()
        self.attend, self.last = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.attend(x, x, x, need_weights=False)[0])


def test_a_layer_that_is_read_and_not_called_is_changed_by_its_weight():
    model, x = Projected().train(), torch.randn(2, 3, 8)
    gm = fxplug.trace(model, (x,))
    state = lora(model, {"out_proj": 2, "last": 2}, start="")
    p = fxplug.pass_for(state, gm)
    assert [(rule.match.patterns, rule.place) for rule in p.rules] == [(("last",), "after"), (("attend.out_proj",), "param")]
    new = fxplug.apply(gm, p).eval()
    new.adapters.load("a", state)
    before = new(x)
    new.adapters.use("a")
    assert not torch.allclose(new(x), before)


def test_no_weights_are_needed(ink):
    with torch.device("meta"):
        model = small.vit().model.__class__(img_size=16, patch_size=8, embed_dim=8, depth=1, num_heads=2, num_classes=3)
        gm = fxplug.trace(model, (torch.randn(1, 3, 16, 16),))
        state = {key: value.to("meta") for key, value in lora(model).items()}
    p = fxplug.pass_for(state, gm)
    assert held_numbers(fxplug.apply(gm, p)) == sum(value.numel() for value in state.values())


def test_names_that_look_like_patterns_are_names():
    model = nn.Sequential()
    model.add_module("a[0]*", nn.Linear(4, 4))
    model.add_module("b", nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="cannot be in an artifact"):
        gm = fxplug.trace(model, (torch.randn(1, 4),))
    p = fxplug.pass_for(lora(model, {"a[0]*": 2}, start=""), gm)
    assert [site.path for site in fxplug.find(gm, p)] == ["a[0]*"]


@pytest.mark.parametrize("slots", [1, 0])
def test_what_is_more_than_a_product_has_its_form_beside_the_others(slots):
    """DoRA, a bias beside a LoRA, a norm and a whole bias in one file."""
    base = small.vit()
    state = lora(base.model, {"qkv": 2, "fc1": 3})
    start, width = "base_model.model.blocks.0", base.model.blocks[0].attn.qkv.out_features
    state[f"{start}.attn.qkv.lora_magnitude_vector"] = 1 + torch.rand(width)
    state[f"{start}.mlp.fc1.lora_B.bias"] = torch.randn(base.model.blocks[0].mlp.fc1.out_features)
    state[f"{start}.norm1.diff"] = torch.randn(base.model.blocks[0].norm1.weight.shape)
    state[f"{start}.mlp.fc2.diff_b"] = torch.randn(base.model.blocks[0].mlp.fc2.bias.shape)
    p = fxplug.pass_for(state, base.gm, slots=slots)
    used = {str(rule.use).rpartition(":")[2] for rule in p.rules}
    assert used == {"Lora", "Dora", "Delta"}
    new = fxplug.apply(base.gm, p)
    if slots:
        small.load_and_use(new, state, "ink")
    else:
        fxplug.load_adapter(new, state)
    model = copy.deepcopy(base.model)
    with torch.no_grad():
        for path, update in merged(state).items():
            model.get_submodule(path).weight += update
        weight = model.blocks[0].attn.qkv.weight
        weight *= (state[f"{start}.attn.qkv.lora_magnitude_vector"] / weight.norm(dim=1))[:, None]
        model.blocks[0].mlp.fc1.bias += state[f"{start}.mlp.fc1.lora_B.bias"]
        model.blocks[0].norm1.weight += state[f"{start}.norm1.diff"]
        model.blocks[0].mlp.fc2.bias += state[f"{start}.mlp.fc2.diff_b"]
        torch.testing.assert_close(new.eval()(*base.args), model(*base.args), **NEAR)


def test_a_file_of_another_model_is_told():
    base = small.vit()
    with pytest.raises(ArtifactError, match=r"2 of 2 layers are not in the graph: 'layer\.one'"):
        fxplug.pass_for(lora(nn.ModuleDict({"layer": nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)})}),
                             {"one": 2, "two": 2}, start=""), base.gm, partial=True)  # fmt: skip
    with pytest.raises(SpecError, match="needs at least one file"):
        fxplug.pass_for([], base.gm)


# --- a line in a configuration


def rewritten(passes, base, **more):
    return fxplug.rewrite(fxplug.load_config({**CONFIG, "passes": passes, **more}, base=base))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    model = rewritten([], folder).base
    save_file(lora(model), folder / "ink.safetensors")
    save_file(lora(model, {"qkv": 4}), folder / "film.safetensors")
    return folder


@pytest.fixture
def own(files, tmp_path):
    """An adapter for the model of the configurations, beside them."""
    return Path(shutil.copytree(files, tmp_path, dirs_exist_ok=True))


@pytest.mark.slow
def test_one_line_does_all_of_it(own):
    one = rewritten([{"adapter": {"file": "ink.safetensors", "strength": 0.5}}], own, verify=True)
    assert one.module.adapters.active == {"ink": 0.5} and one.report.ok
    updates = {path: 0.5 * value for path, value in merged(lora_of(own / "ink.safetensors")).items()}
    x = one.inputs[1]["x"]
    torch.testing.assert_close(one.module(x), with_weights(one.base, updates, (x,)), **NEAR)
    assert rewritten([{"adapter": "ink.safetensors"}], own).module.adapters.active == {"ink": 1.0}


@pytest.mark.slow
def test_several_files_and_room_for_more(own):
    files = {"ink": "ink.safetensors", "film": {"file": "film.safetensors", "strength": 0.25}}
    new = rewritten([{"adapter": {"files": files, "slots": 3}}], own).module
    assert new.adapters.names == ["ink", "film"] and new.adapters.slots == 3
    assert new.adapters.active == {"ink": 1.0, "film": 0.25}
    new.adapters.load("again", own / "film.safetensors")
    passes = [{"adapter": "ink.safetensors"}, {"adapter": {"file": "film.safetensors", "name": "second"}}]
    both = rewritten(passes, own).module
    assert both.adapters.active == {"ink": 1.0, "film": 1.0}
    x = rewritten([], own).inputs[1]["x"]
    new.adapters.use({"ink": 1.0, "film": 1.0})
    torch.testing.assert_close(both(x), new(x), **NEAR)


@pytest.mark.slow
def test_it_is_saved_with_what_was_in_the_file(own, tmp_path):
    config = fxplug.load_config({**CONFIG, "passes": [{"adapter": "ink.safetensors"}]}, base=own)
    saved = fxplug.rewrite(config, out=own / "out")
    (own / "ink.safetensors").unlink()
    again = fxplug.load(own / "out")
    x = saved.inputs[1]["x"]
    assert torch.equal(again(x), saved.module(x)) and again.adapters.active == {"ink": 1.0}


@pytest.mark.slow
def test_without_slots_it_is_trained_on(own):
    new = rewritten([{"adapter": {"file": "ink.safetensors", "slots": 0}}], own).module
    one = rewritten([{"adapter": "ink.safetensors"}], own)
    x = one.inputs[1]["x"]
    torch.testing.assert_close(new(x), one.module(x), **NEAR)
    assert any(p.requires_grad and p.any() for name, p in new.named_parameters() if name.startswith("adapter."))


def test_a_dry_run_fits_it_without_weights(own):
    result = fxplug.rewrite(fxplug.load_config({**CONFIG, "passes": [{"adapter": "ink.safetensors"}]}, base=own), dry_run=True)
    assert len(result.sites["adapter"]) == len(merged(lora_of(own / "ink.safetensors")))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"file": "ink.safetensors", "files": {}}, "give either 'file', or 'files'"),
        ({"files": {"ink": "ink.safetensors"}, "strength": 2}, "give either 'file', or 'files'"),
        ({"file": "ink.safetensors", "strenght": 1}, r"no parameter 'strenght' \(did you mean 'strength'\?\)"),
        ({"file": "ink.safetensors", "strength": math.nan}, "strength: must be a finite number, not nan"),
        ({"file": "ink.safetensors", "strength": "much"}, "must be a finite number, not 'much'"),
        ({"file": "ink.safetensors", "slots": -1}, "slots: must be 0, or a whole number of 1 or more, not -1"),
        ({"file": "ink.safetensors", "slots": 0, "strength": 0.5}, "slots: without slots there must be one file at full "
                                                                   "strength"),
        ({"files": {"a": "ink.safetensors", "b": "film.safetensors"}, "slots": 1}, "must be 0, or a whole number of 2 or more"),
        ({"file": 3}, "file: must be a file or folder, not 3"),
        ({"files": {"ink": {"file": "ink.safetensors", "part_": 1}}}, r"files\.ink.*no key 'part_' \(did you mean 'part'"),
        ({"files": {}}, "files: must be a mapping of adapter names to files"),
        ({"file": "inc.safetensors"}, r"no adapter file or folder '.*inc\.safetensors' \(did you mean 'ink\.safetensors'\?\)"),
        ({"file": "ink.safetensors", "part": "unet"}, "has nothing for 'unet'"),
        ({"file": "ink.safetensors", "partial": "yes"}, "partial: must be true or false, not 'yes'"),
    ],
    ids=str,
)
def test_mistakes_are_told(own, given, said):
    with pytest.raises(fxplug.FxplugError, match=said):
        rewritten([{"adapter": given}], own)


@pytest.mark.slow
def test_two_adapters_of_one_name_are_told(own):
    with pytest.raises(ClashError, match="second: an adapter 'ink' is loaded already"):
        rewritten([{"adapter": "ink.safetensors"}, {"adapter": {"file": "ink.safetensors", "name": "second"}}], own)
    with pytest.raises(ClashError, match="give the pass another name"):
        rewritten([{"adapter": {"file": "ink.safetensors", "name": "adapters"}}], own)


def test_a_bottleneck_may_go_on_to_be_called_adapter():
    base = small.vit()
    old, new = fxplug.load_pass("adapter", at="blocks.0.mlp", bottleneck=2), fxplug.load_pass("bottleneck", bottleneck=2)
    assert old.name == "adapter" and {rule.use for rule in old.rules} == {rule.use for rule in new.rules}
    assert len(fxplug.find(base.gm, old)) == 1


# --- inspect


def test_a_file_says_what_it_is(tmp_path):
    about = {"ss_network_module": "networks.lora", "ss_sd_model_name": "sd15.safetensors", "ss_output_name": "ink\x1b[31m"}
    state = {}
    for key, value in lora(small.unet().model, {"to_q": 4, "to_k": 2}, start="").items():
        path, _, half = key.partition(".lora_")
        name = "lora_unet_" + path.replace(".", "_")
        state[f"{name}.lora_{'down' if half[0] == 'A' else 'up'}.weight"] = value.half()
        state[f"{name}.alpha"] = torch.tensor(2.0)
    state["lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight"] = torch.ones(4, 8).half()
    state["lora_te_text_model_encoder_layers_0_mlp_fc1.lora_up.weight"] = torch.ones(8, 4).half()
    save_file(state, tmp_path / "ink.safetensors", about)
    found = fxplug.inspect_adapter(tmp_path / "ink.safetensors", small.unet().gm)
    assert found.tool == "kohya's sd-scripts" and {*found.ranks} == {2, 4} and {*found.alphas} == {2.0}
    assert found.dtypes.keys() == {"float16"}
    text = str(found)
    assert "\x1b" not in text and "'sd15.safetensors' (ss_sd_model_name)" in text and "100%" in text
    assert "1 layers are for text_encoder" in text and "- adapter: {file:" in text
    assert len(found.plan.fits[0].placed) == sum(entry.part == "unet" for entry in found.file.entries)
    assert "assumed" not in text  # all that goes into this model says its scale


def test_what_a_rewrite_saved_says_its_scale_and_what_wrote_it(tmp_path):
    gm = small.vit().gm
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="blocks.*.attn.*", rank=2, alpha=4))
    fxplug.save(new, tmp_path / "saved")
    found = fxplug.inspect_adapter(tmp_path / "saved", gm)
    assert found.tool == "fxplug" and not found.plan.fits[0].assumed and not found.family
    assert not any(entry.assumed for entry in found.file.entries)


@pytest.mark.parametrize(
    ("about", "tool"),
    [
        ({"software": json.dumps({"name": "ai-toolkit", "version": "0.1"})}, "ai-toolkit 0.1"),
        ({"software": "thing"}, "thing"),
        ({"ot_branch": "main"}, "OneTrainer"),
        ({"ss_network_module": "lycoris.kohya"}, "LyCORIS in kohya's sd-scripts"),
        ({"ss_network_module": "networks.lora_wan"}, "kohya's scripts or musubi-tuner"),
        ({"peft_type": "LORA"}, "PEFT"),
        ({}, "unknown, with names like those of PEFT"),
    ],
)
def test_the_tool_is_told_by_its_marks(about, tool):
    file = read(lora(small.vit().model, {"qkv": 1}))
    assert fxplug.inspect_adapter(type(file)(file.source, file.entries, file.rest, about)).tool == tool


def test_what_does_not_fit_is_listed(ink):
    found = fxplug.inspect_adapter(ink, Two())
    text = str(found)
    assert "0 of 6 layers" in text.replace(f"{len(found.file.entries)} layers", "6 layers") and "not here" in text
    broken = lora(small.vit().model, {"qkv": 2})
    first = next(key for key in broken if key.endswith("B.weight"))
    broken[first] = broken[first][:-1]
    assert "and 'base_model.model.blocks" in str(fxplug.inspect_adapter(broken, small.vit().gm))
    assert "as part=" not in str(fxplug.inspect_adapter(ink, small.vit().gm))


def test_a_rewrite_says_what_of_a_file_has_slots(ink):
    base = small.vit()
    new = fxplug.apply(base.gm, fxplug.load_pass("lora", at="blocks.*.attn.qkv", rank=3, slots=1))
    text = str(fxplug.inspect_adapter(ink, new))
    depth = len(base.model.blocks)
    assert f"{depth} updates have slots here, {2 * depth} layers have none" in text


def test_a_large_file_is_read_by_its_header_alone(tmp_path):
    rank, width = 512, 40_000
    rows, at = {}, 0
    for n in range(5):
        for half, shape in (("A", [rank, width]), ("B", [width, rank])):
            size = 2 * math.prod(shape)
            row = {"dtype": "F16", "shape": shape, "data_offsets": [at, at + size]}
            rows[f"transformer.blocks.{n}.lora_{half}.weight"] = row
            at += size
    raw = json.dumps(rows).encode()
    file = tmp_path / "large.safetensors"
    with file.open("wb") as out:
        out.write(len(raw).to_bytes(8, "little") + raw)
        out.truncate(8 + len(raw) + at)  # its 400 MB are a hole
    assert file.stat().st_size > 400_000_000
    before = bytes_read()
    found = fxplug.inspect_adapter(file)
    assert bytes_read() - before < 1_000_000
    assert found.size == at and found.tool == "unknown, with names like those of diffusers"


def bytes_read():
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def test_inspect_on_the_command_line(own, capsys):
    (own / "run.yaml").write_text("model: {timm: test_vit}\n")
    for model in ([], [str(own / "run.yaml")]):
        with pytest.raises(SystemExit) as ended:
            app(["adapters", "inspect", str(own / "ink.safetensors"), *model])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert "written by" in text and ("covers" in text) == bool(model)


KINDS = [
    ("LoraConfig", {"r": 4, "use_dora": True}),
    ("LoraConfig", {"r": 4, "lora_bias": True}),
    ("VBLoRAConfig", {"num_vectors": 8, "vector_length": 4}),
    ("VeraConfig", {"r": 4}),
    ("ShiraConfig", {"r": 2}),
    ("OFTConfig", {"oft_block_size": 4}),
    ("IA3Config", {"feedforward_modules": []}),
    ("FourierFTConfig", {"n_frequency": 20}),
]


@pytest.mark.filterwarnings("ignore:Adapter 'default'")  # PEFT's, about biases of its own
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_the_pass_of_a_file_on_the_disk_is_that_of_its_tensors(kind, options, tmp_path):
    """Nothing but shapes is looked at, whatever the method."""
    base = small.plain_vit()
    wrapped = peft.get_peft_model(copy.deepcopy(base.model), getattr(peft, kind)(target_modules=["qkv", "fc1"], **options))
    wrapped.save_pretrained(tmp_path / "it")
    p = fxplug.pass_for(tmp_path / "it", base.gm)
    assert p.rules == fxplug.pass_for(read(tmp_path / "it"), base.gm).rules
    assert "100%" in str(fxplug.inspect_adapter(tmp_path / "it", base.gm))


def test_a_core_of_a_few_numbers_goes_with_large_halves(tmp_path):
    state = {
        "conv.lora_down.weight": torch.randn(2, 4000, 1, 1), "conv.lora_mid.weight": torch.randn(2, 2, 3, 3),
        "conv.lora_up.weight": torch.randn(4, 2, 1, 1),
    }  # fmt: skip
    save_file(state, tmp_path / "a.safetensors")
    model = nn.ModuleDict({"conv": nn.Conv2d(4000, 4, 3)})
    assert [e.rank for e in fxplug.inspect_adapter(tmp_path / "a.safetensors", model).plan.fits[0].placed.values()] == [2]


def test_halves_of_other_dimensions_than_their_layer_are_shaped():
    """DyLoRA's of a convolution: `up` is a matrix."""
    base = small.plain_vit()
    width = base.model.patch_embed.proj.out_channels
    state = {"patch_embed.proj.lora_down.weight": torch.randn(2, *base.model.patch_embed.proj.weight.shape[1:]),
             "patch_embed.proj.lora_up.weight": torch.randn(width, 2)}  # fmt: skip
    new = fxplug.apply(base.gm, fxplug.pass_for(state, base.gm))
    small.load_and_use(new, state, "ink")
    down, up = state.values()
    update = {"patch_embed.proj": (up @ down.flatten(1)).reshape(base.model.patch_embed.proj.weight.shape)}
    torch.testing.assert_close(new(*base.args), with_weights(base.model, update, base.args), **NEAR)


def test_a_bias_where_the_layer_has_none_is_held_without_slots():
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    gm = fxplug.trace(model, (torch.randn(2, 4),))
    state = lora(nn.ModuleDict({"0": nn.Linear(4, 4)}), {"0": 2}, start="") | {"0.lora_B.bias": torch.randn(4)}
    with pytest.raises(ArtifactError, match="'0' has a bias beside its LoRA and the layer has none"):
        fxplug.pass_for(state, gm)
    new = fxplug.apply(gm, fxplug.pass_for(state, gm, slots=0))
    fxplug.load_adapter(new, state)
    x = torch.randn(3, 4)
    torch.testing.assert_close(new(x), model(x) + x @ merged(state)["0"].T + state["0.lora_B.bias"], **NEAR)
