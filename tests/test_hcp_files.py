"""Whole configuration files of HCP-Diffusion: their other keys, their `_base_` files, their `${...}`, ranks and branches."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import small
import torch
from torch import nn

import fxplug
from fxplug.compat.hcp.convert_file import convert
from fxplug.core.errors import SpecError
from fxplug.core.spec.yaml_source import parse_yaml

LORA = "lora_unet:\n  - {rank: 2, layers: [head]}\n"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(name, text):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return name


def given(file, **how):
    """What each pass of a converted file has, by its name."""
    passes = parse_yaml(convert(file, **how).text).data["passes"]
    return {values["name"]: values for entry in passes for values in entry.values()}


def notes(text):
    return "\n".join(convert(write("a.yaml", text)).notes)


def refused(file):
    with pytest.raises(SpecError) as error:
        convert(file)
    return str(error.value)


# --- the keys of a file


@pytest.mark.parametrize("key", ["character_name: x", "unet_lr: 1e-4", "data_cfg: [1]", "text_encoder_: {rank: 4}"])
def test_keys_of_the_users_own_are_notes(key):
    assert f"has no such keys: {key.partition(':')[0]}" in notes(f"{key}\n{LORA}")


@pytest.mark.parametrize("key", ["data: {a: 1}", "prompt: a", "data_class: {a: 1}", "train: {b: 2}", "previewer: {c: 3}"])
def test_what_is_the_trainers_is_told(key):
    assert "because they are for training or sampling, not plugins: " + key.partition(":")[0] in notes(f"{key}\n{LORA}")


def test_layers_that_train_themselves_are_told():
    assert "here a run's train.trainable names those" in notes("unet: [{lr: 1e-5, layers: ['']}]\n" + LORA)


@pytest.mark.parametrize(
    "key, message",
    [
        ("plugin_unt: {a: 1}", "did you mean 'plugin_unet'?"),
        ("lora_unets: null", "did you mean 'lora_unet'?"),
        ("lora_textencoder: [{rank: 2}]", "did you mean 'lora_text_encoder'?"),
        ("adapters: [{layers: [a]}]", "it names layers, as plugin_unet"),
        ("extra: {one: {from_layer: [a], to_layer: [b]}}", "it names layers, as plugin_unet"),
    ],
)
def test_a_section_with_a_mistake_in_its_name_is_an_error(key, message):
    assert message in refused(write("a.yaml", f"{LORA}{key}\n"))


# --- _base_


def test_a_base_is_found_in_the_folders_around_the_file():
    write("repo/cfgs/train/base.yaml", "lora_unet: null\nlora_text_encoder:\n  - {rank: 4, layers: [mlp]}\n")
    file = write("repo/cfgs/train/examples/lora.yaml", "_base_: [cfgs/train/base.yaml]\n" + LORA)
    assert given(file)["lora_block_0"]["rank"] == 2
    assert given(file, part="TE")["lora_block_0"]["rank"] == 4
    assert not [note for note in convert(file).notes if "_base_" in note]


def test_the_first_base_is_over_the_next_and_the_file_over_all():
    plugin = "plugin_unet:\n  a: {{_target_: hcp_guide.LoraBlock, layers: [{}], rank: {}, lr: {}}}\n"
    write("one.yaml", plugin.format("one", 1, 1))
    write("two.yaml", plugin.format("two", 2, 2) + "  b: {_target_: hcp_guide.LoraBlock, layers: [two], rank: 2}\n")
    file = write("top.yaml", "_base_: [one.yaml, two.yaml]\nplugin_unet:\n  a: {lr: 3}\n  b: ---\n")
    assert given(file) == {
        "a": {"name": "a", "lr": 3, "plugin": "hcp_guide:LoraBlock", "layers": ["one"], "options": {"rank": 1}}
    }  # fmt: skip


def test_bases_have_bases_and_lines_of_their_own():
    write("low.yaml", "\nplugin_unet:\n  a: {_target_: hcp_guide.LoraBlock, layers: ['prehok:x']}\n")
    write("middle.yaml", "_base_: low.yaml\n")
    assert "low.yaml:3: plugin_unet.a.layers[0]: 'prehok:x'" in refused(write("top.yaml", "_base_: [middle.yaml]\nseed: 1\n"))


@pytest.mark.parametrize(
    "files, message",
    [
        ({"a.yaml": "_base_: [a.yaml]\n"}, "a.yaml:1: _base_[0]: 'a.yaml' includes this file itself: a.yaml -> a.yaml"),
        ({"a.yaml": "_base_: [b.yaml]\n", "b.yaml": "_base_: [a.yaml]\n"}, "b.yaml:1: _base_[0]: .*a.yaml -> b.yaml -> a.yaml"),
        ({"a.yaml": "_base_: {b: 1}\n"}, "_base_: must be a list of files, not a mapping"),
        ({"a.yaml": "_base_: [b.yaml]\n", "b.yaml": "[1]\n"}, "b.yaml: must be a mapping, not a list"),
    ],
)
def test_bases_that_cannot_be_read(files, message):
    for name, text in files.items():
        write(name, text + (LORA if name == "a.yaml" else ""))
    assert re.search(message.replace("[0]", r"\[0\]"), refused("a.yaml"))


def test_files_that_name_each_other_twice_are_read_once():
    for number in range(40):
        write(f"{number}.yaml", f"_base_: [{number + 1}.yaml, {number + 1}.yaml]\n")
    write("40.yaml", LORA)
    assert given("0.yaml")["lora_block_0"]["rank"] == 2


# --- ${...}


@pytest.mark.parametrize(
    "rank, rest",
    [
        ("${r}", "r: 4"),
        ("${model.rank}", "model: {rank: 4}"),
        ("${model.ranks[1]}", "model: {ranks: [1, 4]}"),
        ("${model.ranks.1}", "model: {ranks: [1, 4]}"),
        ("${a}", "a: ${b.c}\nb: {c: '${.d}', d: 4}"),
        ("${..0.alpha}", "b: 1"),
        ("${model.${which}}", "which: rank\nmodel: {rank: 4}"),
    ],
)
def test_references_are_what_they_stand_for(rank, rest):
    file = write("a.yaml", f"lora_unet:\n  - {{rank: '{rank}', alpha: 4, layers: [head]}}\n{rest}\n")
    assert given(file)["lora_block_0"]["rank"] == 4


def test_a_reference_in_a_base_is_to_the_merged_file():
    write("base.yaml", "lora_unet:\n  - {rank: '${rank}', layers: ['${where}.q', 're:${where}.k$']}\nrank: 1\n")
    file = write("a.yaml", "_base_: [base.yaml]\nrank: 6\nwhere: attn\ndata: {x: '${no.such}', y: '${hcp.eval:1+1}'}\n")
    found = given(file)["lora_block_0"]
    assert found["rank"] == 6 and found["at"] == ["attn.q", "re:attn.k$"]


@pytest.mark.parametrize(
    "rank, rest, message",
    [
        ("${rnak}", "rank: 1", r"a.yaml:2: lora_unet\[0\].rank: .*no 'rnak' here or in a _base_ file \(did you mean 'rank'"),
        ("${unet.rank}", "unet: null", "no 'unet.rank' here"),
        ("${a[3]}", "a: [1]", r"no 'a\[3\]' here"),
        ("${a}", "a: ${b}\nb: ${a}", "b: '\\${a}' refers to itself: a -> b -> a|refers to itself"),
        ("${..rank}", "a: 1", "no 'lora_unet.rank'|no '"),
        ("${.rank}", "a: 1", r"refers to itself: lora_unet\[0\].rank -> lora_unet\[0\].rank"),
        ("${......x}", "a: 1", "is not a path of the configuration"),
        ("${hcp.eval:\"2*2\"}", "a: 1", "uses the resolver 'hcp.eval', which is not supported: write its value"),
        ("${oc.env:HOME}", "a: 1", "uses the resolver 'oc.env'"),
        ("${a", "a: 1", "without its '}'"),
        ("x${a}", "a: [1]", "'a' is a list, which cannot be part of a text"),
        ("${a}", "a: ['${b}', '${b}']\nb: ['${c}', '${c}']\n" + "".join(
            f"{x}: ['${{{y}}}', '${{{y}}}']\n" for x, y in zip("cdefghijklmnop", "defghijklmnopq", strict=True)) + "q: 1",
         "references expand to more than"),
    ],
)  # fmt: skip
def test_references_to_nothing_or_to_themselves(rank, rest, message):
    assert re.search(message, refused(write("a.yaml", f"lora_unet:\n  - {{rank: '{rank}', layers: [head]}}\n{rest}\n")))


# --- ranks and branches


def test_a_rank_is_a_share_of_each_layers_width():
    text = "lora_unet:\n  - {rank: 0.3, layers: ['']}\n"
    gm, args, _ = small.traced(Layers().eval(), torch.randn(4, 3, 4, 4))
    new = fxplug.apply(gm, fxplug.load_pass("hcp/lora", **given(write("a.yaml", text))["lora_block_0"]))
    found = {name.removeprefix("lora_block_0."): block for name, block in new.named_modules() if name.endswith(".Lora")}
    # in hcpdiff: max(round(out_features * rank), 1), and alpha / that
    assert {name: b.rank for name, b in found.items()} == {"conv.Lora": 2, "body.0.Lora": 2, "body.1.Lora": 1, "head.Lora": 3}
    assert all(block.scale == torch.tensor(1 / block.rank) for block in found.values())
    with pytest.raises(SpecError, match="rank must be a whole number"):
        fxplug.apply(gm, fxplug.load_pass("hcp/lora", at="head", rank=2.5))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.ModuleList([nn.Linear(8, 6), nn.Linear(6, 2)])
        self.head = nn.Linear(2, 10)

    def forward(self, x):
        x = self.conv(x).flatten(2).transpose(1, 2)
        for layer in self.body:
            x = layer(x).relu()
        return self.head(x)


ENTRIES = {
    "branch: p": "second", "branch: n": "first", "type: p": "second", "type: n": "first", "type: dapp": "second",
    "{type: dapp, branch: n}": "first", "mask: [0, 0.5]": "first", "mask: [0.5, 1]": "second",
}  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_branch_is_half_of_the_batch(entry):
    text = f"lora_unet:\n  - {{rank: 2, layers: [conv, body], {entry.strip('{}')}}}\n"
    values = given(write("a.yaml", text))["lora_block_0"]
    assert values["half"] == ENTRIES[entry]
    assert any("0.7 and earlier" in note for note in convert("a.yaml").notes) is entry.startswith("branch")
    assert "half" not in given(write("a.yaml", text.replace(entry.strip("{}"), "mask: [0, 1]")))["lora_block_0"]


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("half", ["first", "second"])
def test_an_update_of_one_half_leaves_the_other(batch, half):
    gm, args, _ = small.traced(Layers().eval(), torch.randn(4, 3, 4, 4))
    how = {"at": ["conv", "body"], "rank": 2}
    one = fxplug.apply(gm, fxplug.load_pass("hcp/half_lora", half=half, **how))
    whole = fxplug.apply(gm, fxplug.load_pass("hcp/lora", **how))
    for block, like in zip(blocks(one), blocks(whole), strict=True):
        nn.init.normal_(like.up.weight)
        block.load_state_dict(like.state_dict())
    x = torch.randn(batch, 3, 4, 4)
    found, base, changed = one(x), gm(x), whole(x)
    middle = batch // 2
    mine, others = (slice(0, middle), slice(middle, None)) if half == "first" else (slice(middle, None), slice(0, middle))
    torch.testing.assert_close(found[mine], changed[mine])
    torch.testing.assert_close(found[others], base[others])
    found.sum().backward()
    assert all(bool(block.up.weight.grad.any()) == bool(x[mine].numel()) for block in blocks(one))


def blocks(module):
    return [block for _, block in module.named_modules() if type(block).__name__ == "Lora"]


# --- which layers


PATTERNS = [
    [r"re:.*\.attn.?$", r"re:.*\.ff$"],
    [r"re:.*\.attn.?$", r"re:.*\.ff\.net\.0$"],
    [r"re:.*\.resnets$", r"re:.*\.proj_in$", r"re:.*\.proj_out$", r"re:.*\.conv$"],
    [r"re:.*\.to_k$", r"re:.*\.to_v$", r"re:.*\.ff$"],
    [r"re:down.*\.to_k$"],
    [r"re:up_blocks$", "mid_block"],
    [""],
]


@pytest.mark.parametrize("layers", PATTERNS, ids=lambda layers: layers[0])
def test_the_layers_are_those_that_hooks_would_be_on(layers):
    unet = small.unet()
    file = write("a.yaml", f"lora_unet:\n  - {{rank: 2, layers: {json.dumps(layers)}}}\n")
    found = fxplug.find(unet.gm, fxplug.load_pass("hcp/lora", **given(file)["lora_block_0"]))
    assert sorted(site.path for site in found) == sorted(hooked(unet.model, layers))


def hooked(model, layers):
    """HCP-Diffusion's rule: every Linear and Conv2d among and below the modules whose paths match from their start."""
    modules = dict(model.named_modules())
    found = {}
    for layer in layers:
        pattern = layer.removeprefix("re:")
        for path in [p for p in modules if re.match(pattern, p)] if layer.startswith("re:") else [layer]:
            inside = modules[path].named_modules(prefix=path)
            found.update(dict.fromkeys(p for p, m in inside if isinstance(m, (nn.Linear, nn.Conv2d))))
    return list(found)
