"""`fxplug convert hcp`: what HCP-Diffusion's files become, and what it lets pass in silence is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import small
import torch
from hcp_guide import LoraBlock
from test_hcp import CONTROLNET, LORA, PRELU, SKIP

import fxplug
from fxplug.compat.hcp import SinglePluginBlock
from fxplug.compat.hcp.convert_file import convert, read_input
from fxplug.compat.hcp.layer_patterns import find_places, read_layer, read_layers
from fxplug.core.errors import SpecError
from fxplug.core.spec.yaml_source import parse_yaml
from fxplug.training.param_groups import make_scheduler
from fxplug.training.train_section import read_use

NET = "test_hcp:Net"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(text, top="plugin_unet:\n"):
    Path("plugin.yaml").write_text(top + text)
    return "plugin.yaml"


def entries(text, top="plugin_unet:\n", **how):
    return parse_yaml(convert(write(text, top), **how).text).data["passes"]


def one(text, **how):
    (entry,) = entries(text, **how)
    ((name, given),) = entry.items()
    return name, given


def refused(text, top="plugin_unet:\n", **how):
    with pytest.raises(SpecError) as error:
        convert(write(text, top), **how)
    assert "plugin.yaml:" in str(error.value)
    return str(error.value)


# --- layers


@pytest.mark.parametrize(
    "text, path, regex, pre_hook, kind",
    [
        ("conv_in", "conv_in", False, False, None),
        ("pre_hook:", "", False, True, None),
        ("prehook:conv_in", "conv_in", False, True, None),
        (r"prehook:re:.*\.ff$", r".*\.ff$", True, True, None),
        (r"re:pre_hook:.*\.ff$", r".*\.ff$", True, True, None),
        ("re:(?:a|b):c$", "(?:a|b):c$", True, False, None),
        ("cls(Linear):re:.*attn", ".*attn", True, False, "Linear"),
    ],
)
def test_a_layer_is_read(text, path, regex, pre_hook, kind):
    layer = read_layer(text)
    assert (layer.path, layer.regex, layer.pre_hook, layer.kind) == (path, regex, pre_hook, kind)


@pytest.mark.parametrize(
    "text, found",
    [
        ("prehok:conv_in", r"no prefix 'prehok:' \(did you mean 'prehook'\?\)"),
        ("pre-hook:re:a", r"no prefix 'pre-hook:' \(did you mean 'prehook'\?\)"),
        ("re:(a", "not a regular expression: missing"),
        (3, "a layer must be text, not 3"),
    ],
)
def test_a_layer_that_cannot_be_read(text, found):
    with pytest.raises(SpecError, match=found):
        read_layer(text)


MODULES = {"": "Net", "a": "Block", "a.x": "Linear", "a.y": "Linear", "b": "Block", "b.x": "Linear"}


def found(*texts):
    return [(p.path, p.pre_hook) for p in find_places(read_layers(list(texts), "layers"), MODULES)]


def test_places_are_those_of_hcp_diffusion():
    assert found("re:.*x$", "a") == [("a.x", False), ("b.x", False), ("a", False)]
    assert found("b.x", "re:.*x$") == [("b.x", False), ("a.x", False)]  # each once, where it is first
    assert found("re:a") == [("a", False), ("a.x", False), ("a.y", False)]  # anchored on the left alone
    assert found("cls(Linear):a", "cls(Linear):b.x") == [("a.x", False), ("a.y", False), ("b.x", False)]
    assert found("pre_hook:") == [("", True)]


@pytest.mark.parametrize(
    "texts, message",
    [
        (["re:.*z$"], r"'re:.*z\$' matches none of 6 modules"),
        (["a.xx"], r"no module 'a.xx' \(did you mean 'a.x'\?\)"),
        (["a", "pre_hook:a"], "'a' and 'pre_hook:a' both name 'a'"),
        (["a", "a"], "list each layer once"),
        (["cls(Conv2d):a"], "no Conv2d there"),
        ([], "must be a list of layers"),
    ],
)
def test_what_is_dropped_in_silence_there_is_an_error(texts, message):
    with pytest.raises(SpecError, match=message):
        found(*texts)


# --- whole files


def test_the_guides_lora_entry():
    name, given = one(LORA.format(wrap="", first=r"re:.*\.attn.?$", second=r"re:.*\.ff$"))
    assert name == "hcp/single"
    assert given == {
        "name": "lora1", "lr": 1e-4, "plugin": "hcp_guide:LoraBlock", "options": {"alpha": 0.5, "rank": 4},
        "layers": [r"re:.*\.attn.?$", r"re:.*\.ff$"],
    }  # fmt: skip


def test_defaults_that_differ_are_written_down():
    _, given = one("  a: {_target_: hcp_guide.LoraBlock, rank: 2, layers: [x], train: false}")
    assert given["lr"] == 1e-5 and given["train"] is False  # HCP-Diffusion's default; fxplug's pass has none of its own
    _, given = one("  a: {_target_: hcp_guide.LoraBlock, rank: 2, layers: ['re:.*']}")
    assert given["layers"] == ["", "re:.*"]  # the model itself is among its modules there


def test_the_guides_other_entries():
    name, given = one(SKIP.format(kind="Skip", prefix="prehook:"))
    assert name == "hcp/pair_before" and given["to"] == "re:.*proj_out$"
    assert given["args"] == ["re:.*proj_in$:in[:]", "re:.*proj_in$:out[:]", "x[:]"]
    shape = {"cond": ["n", 3, "8*h", "8*w"], "sample": ["n", "c", "h", "w"]}
    name, given = one(CONTROLNET, inputs=shape)
    assert name == "hcp/multi" and given["feeds"] == ["cond"] and list(given["inputs"]) == ["sample", "cond"]
    assert given["values"][:4] == [":in[:]", "conv_in:in[:]", "down_blocks.0:in[:]", "down_blocks.0:out[:]"]
    assert given["values"][-2:] == ["up_blocks.3.resnets.2:in[:]", "cond"]
    assert given["after_values"][-1] == "plugin:out[4][:]" and given["before_values"] == ["plugin:out[5][:]"]
    name, given = one(PRELU.format(name="prelu", wrap=".wrap_model", p=0.2, layers=""))
    assert name == "hcp/patch" and given["within"] == ["SiLU"] and given["wrap"] and given["layers"] == [""]


def test_the_guides_exclude_key_is_kept():
    _, given = one("  a: {_target_: hcp_guide.LoraBlock.wrap_model, rank: 2, layers: ['']}")
    assert given["exclude_key"] == "lora_block_" and given["within"] == ["Linear", "Conv2d"]


class Narrow(LoraBlock):
    @classmethod
    def wrap_model(cls, name, host, **kwargs):
        return super(LoraBlock, cls).wrap_model(name, host, exclude_key="body", **kwargs)


def test_layers_that_wrap_model_leaves_out():
    text = "  a: {_target_: test_hcp_convert.Narrow.wrap_model, rank: 2, layers: ['']}"
    _, given = one(text, model=NET)
    assert given["layers"] == ["conv", "twice", "head"] and "within" not in given
    _, given = one(text)
    from test_hcp import Net

    gm = fxplug.trace(Net().eval(), torch.randn(2, 3, 4, 4))
    with pytest.raises(SpecError, match=r"wrap_model excludes 'body.0.proj_in' \(exclude_key 'body'\).*--model"):
        fxplug.apply(gm, fxplug.load_pass("hcp/single", **given))


def test_with_the_model_pairs_and_lists_are_looked_up():
    text = "  s: {_target_: hcp_guide.Skip, from_layer: ['re:.*proj_in$', conv], to_layer: ['re:.*proj_out$', head]}"
    name, given = one(text, model=NET)
    assert name == "hcp/pair" and given["to"] == ["body.0.proj_out", "body.1.proj_out", "head"]
    assert given["args"][0] == ["body.0.proj_in:in[:]", "body.1.proj_in:in[:]", "conv:in[:]"]
    mixed = "  s: {_target_: hcp_guide.Skip, from_layer: [conv, twice], to_layer: [head, 'pre_hook:act']}"
    assert [list(e) for e in entries(mixed)] == [["hcp/pair"], ["hcp/pair_before"]]
    assert [g["name"] for e in entries(mixed) for g in e.values()] == ["s", "s_2"]
    multi = "  m: {_target_: fxplug.compat.hcp.sample_plugins.Mean, from_layers: ['re:.*proj_in$'], to_layers: [head]}"
    assert one(multi, model=NET)[1]["from_layers"] == ["body.0.proj_in", "body.1.proj_in"]
    assert "--model" in refused(multi)


def test_unequal_lists_show_both():
    text = "  s: {_target_: hcp_guide.Skip, from_layer: [a, b, c], to_layer: [d, e]}"
    message = refused(text)
    assert "from_layer matches 3 layers and to_layer 2" in message and "from: a, b, c" in message and "to:   d, e" in message
    text = "  s: {_target_: hcp_guide.Skip, from_layer: ['re:.*proj_in$'], to_layer: ['re:.*proj_(in|out)$']}"
    message = refused(text, model=NET)
    assert "from_layer matches 2 layers and to_layer 4" in message and "body.1.proj_out" in message
    text = "  s: {_target_: hcp_guide.Skip, from_layer: ['re:.*proj_in$'], to_layer: [a, b]}"
    assert "--model" in refused(text)


@pytest.mark.parametrize(
    "entry, message",
    [
        ("{_target_: hcp_guide.LoraBlock, rank: 1, layrs: [a]}", "missing key 'layers' (did you mean 'layrs'?)"),
        ("{_target_: hcp_guide.Skip, layers: [a]}", "missing key 'from_layer'"),
        ("{_target_: hcp_guide.LoraBlock, rank: 1, layers: [a], to_layer: [b]}", "takes no 'to_layer'"),
        ("{_target_: hcp_guide.LoraBlock, rank: 1, layers: [a], trian: false}", "takes no 'trian' (did you mean 'train'?)"),
        ("{_target_: hcp_guide.ControlNetPlugin, from_layers: [a], to_layers: [b], depth: 2}", "takes no 'depth'"),
        ("{_target_: hcp_guide.LoraBlock, rank: 1, layers: ['pre_hook:a']}", "has no pre_hook"),
        ("{_target_: hcp_guide.LoraBlock, rank: 1, layers: ['${x}']}", "no 'x' here or in a _base_ file"),
        ("{_target_: hcp_guide.LoraBlock, _partial_: false, layers: [a]}", "must be true"),
        ("{_target_: hcp_guide.Nothing, layers: [a]}", "module 'hcp_guide' has no attribute 'Nothing'"),
        ("{_target_: hcp_guide.LowRank, layers: [a]}", "is not a plugin class of fxplug.compat.hcp"),
        ("{_target_: no_such.Plugin, layers: [a]}", "no module named 'no_such'"),
        ("{_target_: hcp_guide.Skip.wrap_model, from_layer: [a], to_layer: [b]}", "Skip has no wrap_model"),
        ("{_target_: hcp_guide.ControlNetPlugin, from_layers: [a], to_layers: [b]}", "--input cond="),
        ("{_target_: hcpdiff.models.dreamartist.Other, layers: [a]}", "fxplug has no pass for it"),
        ("{_target_: hcpdiff.models.text_emb_ex.EmbeddingPTHook, layers: [a]}", "with fxplug.compat.hcp.words.word_vectors"),
        ("{_target_: hcpdiff.models.controlnet.ControlNetPlugin, from_layers: [a], to_layers: [b]}", "is supported with ["),
        ("{_target_: hcp_guide.LoraBlock, rank: 1, layers: [a], lr: fast}", "plugin_unet.a.lr: must be a number, not 'fast'"),
        ("{layers: [a]}", "must be the path of a class"),
        ("3", "must be a mapping with '_target_'"),
    ],
)
def test_what_is_wrong_in_an_entry(entry, message):
    assert message in refused(f"  a: {entry}")


def test_a_plugin_that_still_imports_hcpdiff(tmp_path, monkeypatch):
    Path("old_plugin.py").write_text("from hcpdiff.models.plugin import SinglePluginBlock\nclass A(SinglePluginBlock): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    message = refused("  a: {_target_: old_plugin.A, layers: [x]}")
    assert "`from fxplug.compat.hcp import ...`" in message
    assert "hcpdiff.models.plugin" in message


def test_what_no_layer_matches_with_the_model_is_told_now():
    assert "matches none of" in refused("  a: {_target_: hcp_guide.LoraBlock, rank: 1, layers: ['re:.*attn$']}", model=NET)
    assert "did you mean 'head'" in refused("  a: {_target_: hcp_guide.LoraBlock, rank: 1, layers: [heat]}", model=NET)


def test_other_sections_are_told():
    top = "_base_: [cfgs/train/tuning_base.yaml]\ntrain: {steps: 3}\nmodel: {unet: null}\nseed: null\nplugin_unet:\n"
    entry = "  a: {_target_: hcp_guide.LoraBlock, rank: 1, layers: [x]}\n"
    notes = convert(write(entry + "plugin_TE:\n" + entry, top)).notes
    assert [n for n in notes if "tuning_base.yaml" in n and "it is not read" in n]
    assert [n for n in notes if n.endswith("sampling, not plugins: model")]
    assert [n for n in notes if "plugin_TE" in n and "--part TE" in n]
    assert "# Note: " in convert("plugin.yaml").text
    assert convert("plugin.yaml", part="TE").text.count("hcp/single") == 1
    assert "unknown key 'plugin_unt' (did you mean 'plugin_unet'?)" in refused(entry, "plugin_unt:\n")
    assert "--part TE" in refused(entry, "plugin_TE:\n")
    with pytest.raises(SpecError, match="no part 'te'"):
        convert("plugin.yaml", part="te")


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("alpha: .nan", "alpha: must be a number, not nan"),
        ("alpha: full", "alpha: must be a number, not 'full'"),
        ("dropout: 1", "dropout: must be 0 or more and below 1, not 1"),
        ("lr: -1", "lr: must be 0 or more, not -1"),
        ("lr: true", "lr: must be a number, not true"),
    ],
)
def test_a_number_that_a_low_rank_update_cannot_have_is_told_with_its_place(wrong, message):
    assert f"lora_unet[0].{message}" in refused(f"  - {{layers: [a], rank: 2, {wrong}}}\n", "lora_unet:\n")


def test_lora_unet_is_fxplugs_lora():
    text = "  - {lr: 1e-4, rank: 8, layers: ['re:.*proj_in$', twice]}\n"
    (entry,) = entries(text, "lora_unet:\n")
    given = entry["hcp/lora"]
    assert given["alpha"] == 1.0 and given["name"] == "lora_block_0" and given["dropout"] == 0.0
    from test_hcp import Net

    net = Net().eval()
    gm = fxplug.trace(net, torch.randn(2, 3, 4, 4))
    new = fxplug.apply(gm, fxplug.load_pass("hcp/lora", **given))
    assert sorted({s.path for s in fxplug.find(gm, fxplug.load_pass("hcp/lora", **given))}) == [
        "body.0.proj_in", "body.1.proj_in", "twice", "twice@1"
    ]  # fmt: skip
    block = new.get_submodule("lora_block_0.twice.Lora")
    assert block.scale == 1 / 8 and new.meta["passes"][0]["lr"] == 1e-4
    scaled = "  - {rank: 4, alpha: 2.0, alpha_auto_scale: false, dropout: 0.1, layers: [a]}\n"
    done = convert(write(scaled, "lora_unet:\n"))
    assert parse_yaml(done.text).data["passes"][0]["hcp/lora"]["alpha_auto_scale"] is False and "dropout" in done.notes[0]
    for wrong, message in {
        "rank: 1.5": "nor a share of each layer's width", "rank: 0": "neither a whole number",
        "svd_init: true": "svd_init: must be one of false", "branch: q": "must be one of p, n, not 'q'",
        "type: loha_group": "must be one of lora, loha, dapp, p, n, not 'loha_group'", "mask: [0, 0.3]": "one half of it",
        "ranks: 3": "unknown key 'ranks' (did you mean 'rank'?)",
    }.items():  # fmt: skip
        assert message in refused(f"  - {{layers: [a], {wrong}}}\n", "lora_unet:\n")


def test_hcp_diffusions_own_plugins_are_fxplugs_passes():
    stock = CONTROLNET.replace("hcp_guide", "hcpdiff.models.controlnet")
    (entry,) = entries(stock.replace("    block_out_channels: [8, 16, 16, 16]\n", ""))
    given = entry["controlnet"]
    assert given["name"] == "controlnet1" and given["lr"] == 1e-4 and given["channels"] == 3
    assert given["options"] == {"conditioning_channels": 3, "conditioning_embedding_out_channels": [8, 8]}
    assert [n for n in convert(write(stock)).notes if "block_out_channels is ignored" in n]
    assert "supported with" in refused(stock.replace("'down_blocks.3'", "'down_blocks.2.resnets.0'"))
    (entry,) = entries("  a: {_target_: hcpdiff.models.lora_layers.LoraLayer.wrap_model, rank: 4, layers: [body.0]}\n")
    assert entry["hcp/lora"] == {"name": "a", "lr": 1e-5, "at": ["body.0"], "rank": 4, "alpha": 1.0, "dropout": 0.0}
    loha = "  - {type: loha, rank: 8, alpha: 4.0, layers: ['re:body.0$', head]}\n"
    (entry,) = entries(loha, "lora_unet:\n")
    assert entry["hcp/loha"]["at"] == ["re:body.0$", "head"]
    assert (entry["hcp/loha"]["rank"], entry["hcp/loha"]["alpha"]) == (4, 2.0)  # 4.0 / 8 there is 2.0 / 4 here
    assert "two factors" in refused(loha.replace("rank: 8", "rank: 9"), "lora_unet:\n")
    assert "matches none" in refused(loha.replace("body", "boddy"), "lora_unet:\n", model=NET)


class Asks(SinglePluginBlock):
    def feed_input_data(self, data):
        self.a, self.b = data["cond"], data.get("timesteps")


def test_what_a_plugin_asks_for():
    _, given = one("  a: {_target_: test_hcp_convert.Asks, layers: [x]}", inputs={"cond": ["n", 3]})
    assert given["args"] == ["x[:]", "y[:]", "cond", ":in.timestep"] and given["feeds"] == ["cond", "timesteps"]
    assert given["inputs"] == {"cond": {"shape": ["n", 3]}}
    with pytest.raises(SpecError, match="'other' is not used by any plugin"):
        convert("plugin.yaml", inputs={"cond": ["n", 3], "other": [1]})
    assert read_input("cond=n,3,8*h,8*w") == ("cond", ["n", 3, "8*h", "8*w"])
    with pytest.raises(SpecError, match="write NAME=SIZES"):
        read_input("cond")


TOGETHER = "train: {train_steps: 2}\nlora_unet: [{rank: 1, layers: [x]}]\nplugin_TE:\n"


@pytest.mark.parametrize("entry, message", [
    ("a: {_target_: test_hcp_convert.Asks, layers: [x]}", "a text encoder is given tokens alone in a run"),
    ("a: {_target_: hcp_guide.Skip, from_layer: ['re:a.*'], to_layer: [b, c]}", "alone .--part TE --model MODEL."),
])  # fmt: skip
def test_what_a_text_encoder_beside_the_unet_cannot_have(entry, message):
    file = write(f"  {entry}\n", TOGETHER)
    with pytest.raises(SpecError, match=rf"plugin.yaml:4(?s:.)*{message}"):
        convert(file)
    assert "plugin_TE" not in convert(file, part="unet").text.partition("passes:")[2]


# --- the command


def run(*args, code=0):
    result = small.command("convert", *args)
    assert result.exit_code == code, result.output
    return result


def test_the_command_and_a_rewrite_with_its_result():
    text = LORA.format(wrap="", first="conv", second=r"re:.*proj_in$") + PRELU.format(name="p", wrap="", p=0.3, layers="act")
    Path("model.yaml").write_text(f"model: {NET}\ninputs: {{x: [2, 3, 4, 4]}}\n")
    result = run("hcp", write(text), "-o", "out.yaml", "--model", "model.yaml")
    assert "saved in out.yaml" in result.stdout
    done = fxplug.rewrite("out.yaml", verify=False)
    assert {name: [s.path for s in sites] for name, sites in done.sites.items()} == {
        "lora1": ["conv", "body.0.proj_in", "body.1.proj_in"], "p": ["act"]
    }  # fmt: skip
    assert [entry["lr"] for entry in done.module.meta["passes"]] == [1e-4, 1e-4]


def test_without_a_model_its_place_is_marked():
    result = run("hcp", write("  a: {_target_: hcp_guide.LoraBlock, rank: 1, layers: [x]}\n"), "-o", "out.yaml")
    assert "its model is left to write" in result.stdout
    text = Path("out.yaml").read_text()
    assert "model: REPLACE_ME" in text and "# REPLACE_ME: write the model" in text
    with pytest.raises(SpecError, match="REPLACE_ME"):
        fxplug.rewrite("out.yaml")


def test_a_mistake_is_one_message_and_writes_nothing():
    write("  a: {_target_: hcp_guide.LoraBlock, layers: ['prehok:x']}\n")
    result = run("hcp", "plugin.yaml", "-o", "out.yaml", code=1)
    assert "plugin.yaml:2: plugin_unet.a.layers[0]: 'prehok:x': no prefix" in result.stderr
    assert not Path("out.yaml").exists() and "Traceback" not in result.output
    assert "did you mean 'hcp'" in run("hpc", "plugin.yaml", "-o", "out.yaml", code=1).stderr


# --- how it trains

TRAINS = """
seed: 7
mixed_precision: bf16
model: {pretrained_model_name_or_path: sd15, gradient_checkpointing: true, ema: {decay_max: 0.9997}}
target_area: 512
train:
  train_steps: 300
  gradient_accumulation_steps: 2
  workers: 3
  save_step: 50
  scale_lr: true
  cfg_scale: '1.0'
  resume: null
  loss: {type: v, criterion: {_target_: hcpdiff.loss.MinSNRLoss, gamma: 2.0}}
  optimizer: {_target_: torch.optim.AdamW, _partial_: true, weight_decay: 1e-3, betas: [0.9, 0.99]}
  scheduler: {name: constant_with_warmup, num_warmup_steps: 50, num_training_steps: 300}
data:
  dataset1:
    batch_size: 4
    source: {one: {img_root: imgs/, prompt_template: a.txt}, two: {img_root: more/}}
    bucket: {_target_: hcpdiff.data.bucket.RatioBucket.from_files, target_area: '${hcp.eval:"512*512"}', num_bucket: 5}
  dataset2: {batch_size: 1, source: {one: {img_root: class/}}}
lora_unet: [{lr: 1e-4, rank: 8, layers: ['re:.*attn.?$']}]
"""


def test_how_it_trains_is_translated():
    done = convert(write(TRAINS, ""))
    read = fxplug.load_config(parse_yaml(done.text).data)
    train, data = read.train, read.data
    assert (read.seed, train.steps, train.accumulate, train.batch, train.precision) == (7, 300, 2, 4, "bf16")
    assert (train.save.every, train.weight_decay, train.ema, train.checkpointing) == (50, 1e-3, 0.9997, True)
    assert train.optimizer.name == "AdamW" and train.optimizer.options == {"betas": [0.9, 0.99]}
    assert train.scheduler.name == "constant" and train.scheduler.options == {"warmup": 50}
    wanted = {"vae": "sd15/vae", "text": "sd15", "scheduler": "sd15/scheduler", "prediction": "v_prediction", "snr_gamma": 2.0}
    assert train.task.options == wanted
    assert (data.images, data.size, data.buckets.step, data.workers) == (["imgs/", "more/"], 512, 64, 3)
    told = " ".join(done.notes)
    for text in ("scale_lr multiplies", "left out dataset2", "prompt templates"):
        assert text in told


@pytest.mark.parametrize(
    "changed, note",
    [
        (("hcpdiff.loss.MinSNRLoss", "hcpdiff.loss.SoftMinSNRLoss"), "criterion: SoftMinSNRLoss is not supported; the loss is"),
        (("type: v", "type: sample"), "train.loss: type: 'sample' is not supported"),
        (("prompt_template: a.txt", "att_mask: masks/, repeat: 3"), "data.dataset1: att_mask, repeat"),
        (("batch_size: 4", "batch_size: 4\n    loss_weight: 0.5"), "data.dataset1: loss_weight"),
        (("'${hcp.eval:\"512*512\"}'", "'${hcp.eval:\"2**18\"}'"), "data.dataset1.bucket is not converted: write the size of "
                                                                   "the images"),
        (("decay_max: 0.9997", "decay_max: 0.9997, power: 0.8"), "ema: the decay is constant here"),
    ],
    ids=str,
)
def test_what_of_its_training_is_nothing_here_is_named(changed, note):
    assert any(note in told for told in convert(write(TRAINS.replace(*changed), "")).notes)


@pytest.mark.parametrize("computed", ['${hcp.eval:"${target_area}*${target_area}"}', '${times:512,512}'], ids=str)
def test_sizes_computed_of_other_keys_and_folders_of_conditions_are_translated(tmp_path, computed):
    text = TRAINS.replace('${hcp.eval:"512*512"}', computed).replace("imgs/,", "imgs/, cond_root: conds/,")
    file = write(text.replace("more/}", "more/, cond_root: conds/}"), "")
    data = parse_yaml(convert(file, out=tmp_path / "a.yaml").text).data["data"]
    assert data["size"] == 512 and Path(data["conditions"]).resolve() == Path("conds").resolve() != Path(data["conditions"])


FINE_TUNING = """
_base_: [cfgs/train/dataset/base_dataset.yaml, cfgs/train/train_base.yaml, cfgs/train/tuning_base.yaml]
unet:
- {lr: 1e-6, layers: %s}
tokenizer_pt: {train: null}
train: {gradient_accumulation_steps: 1, save_step: 100, scheduler: {name: constant_with_warmup, num_warmup_steps: 50}}
model: {pretrained_model_name_or_path: runwayml/stable-diffusion-v1-5}
data: {dataset1: {batch_size: 4, source: {one: {img_root: imgs/}}}}
"""


@pytest.mark.parametrize(
    "layers, wanted", [("['']", ["**"]), ("['re:.*attn2$', mid_block]", ["re:.*attn2$", "mid_block"])], ids=str
)
def test_layers_of_the_model_itself_are_trained(layers, wanted):
    done = convert(write(FINE_TUNING % layers, ""))
    read = fxplug.load_config(parse_yaml(done.text).data)
    assert (read.passes, read.train.trainable, read.train.lr, read.train.batch) == ([], wanted, 1e-6, 4)
    told = [note for note in done.notes if "it is not read, so the keys that it sets are missing" in note]
    assert ["sets data" in told[0], "sets train (train_steps" in told[1], "sets tokenizer_pt" in told[2]] == [True] * 3


@pytest.mark.parametrize(
    "changed, message",
    [
        (("unet:\n- {lr: 1e-6, layers: ['']}", "a: {b: 1}"), "nothing to convert; it has _base_, a, .*train_base.yaml' is in"),
        (("save_step: 100", "cfg_scale: 1.0-3.0"), "no plugins, and its section 'unet' cannot be translated:.*train_base.y"),
        (("- {lr: 1e-6", "- {lr: 2, layers: [a]}\n- {lr: 1e-6"), "cannot be translated:.*several lr, 1e-06, 2.0, and train.lr"),
        (("lr: 1e-6", "lr: much"), r"unet\[0\].lr: must be a number, not 'much'"),
        (("layers:", "layer:"), r"unet\[0\]: missing key 'layers' .did you mean 'layer'"),
        (("['']", "['pre_hook:a']"), r"unet\[0\].layers: 'pre_hook:a': only the prefix re: is allowed here"),
        (("- {", "- a # {"), r"unet\[0\]: must be a mapping with 'layers', not 'a'"),
    ],
    ids=lambda value: value[1][:12] if isinstance(value, tuple) else "",
)
def test_layers_of_the_model_itself_that_cannot_be_trained_so(changed, message):
    with pytest.raises(SpecError, match=f"(?s){message}"):
        convert(write((FINE_TUNING % "['']").replace(*changed, 1), ""))


ONE_CYCLE = "{name: one_cycle, num_warmup_steps: 2, num_training_steps: 10, scheduler_kwargs: {div_factor: 5.0}}"


@pytest.mark.parametrize(
    "scheduler, wanted, note",
    [
        (ONE_CYCLE, {"OneCycleLR": {"div_factor": 5.0, "total_steps": 10, "pct_start": 0.2}}, ""),
        ("{name: one_cycle}", "OneCycleLR", ""),
        ("{name: constant, num_warmup_steps: 3}", "constant", ""),
        ("{name: polynomial, num_warmup_steps: 3}", None, "the scheduler 'polynomial' is not supported"),
        ("{name: cosine, num_training_steps: 7}", "cosine", "the scheduler cosine ends with the run"),
        ("{name: linear, num_warmup_steps: 0.1}", "linear", "the scheduler linear: num_warmup_steps: 0.1"),
        ("{name: cosine, scheduler_kwargs: {num_cycles: 2}}", "cosine", "the scheduler cosine: num_cycles"),
        ("{_target_: my.Scheduler}", None, "the scheduler 'my.Scheduler' is not supported"),
        ("{_target_: torch.optim.lr_scheduler.StepLR, _partial_: true, step_size: 4}", {"StepLR": {"step_size": 4}}, ""),
    ],
)
def test_the_course_of_the_learning_rate(scheduler, wanted, note):
    before = "{name: constant_with_warmup, num_warmup_steps: 50, num_training_steps: 300}"
    done = convert(write(TRAINS.replace(before, scheduler), ""))
    assert parse_yaml(done.text).data["train"].get("scheduler") == wanted
    assert any(note in told for told in done.notes)


def test_one_cycle_has_the_rates_of_hcp_diffusion():
    """Its get_scheduler: OneCycleLR of each group's own rate over the steps, the warm-up its rising part."""
    use = read_use({"OneCycleLR": {"div_factor": 5.0, "total_steps": 10, "pct_start": 0.2}})
    found = []
    for make in (
        lambda o: make_scheduler(use, o, 10, 5)[0],
        lambda o: torch.optim.lr_scheduler.OneCycleLR(
            o, max_lr=[g["lr"] for g in o.param_groups], steps_per_epoch=10, epochs=1, pct_start=2 / 10, div_factor=5.0
        ),
    ):
        optimizer = torch.optim.AdamW([{"params": [torch.zeros(1)], "lr": lr} for lr in (1e-4, 4e-5)])
        scheduler = make(optimizer)
        rates = []
        for _ in range(9):
            optimizer.step(), scheduler.step()
            rates.append([group["lr"] for group in optimizer.param_groups])
        found.append(rates)
    assert found[0] == found[1]


BRANCHES = "lora_unet: [{rank: 2, branch: p, layers: [to_q]}, {rank: 2, branch: n, layers: [to_q]}]\n"


@pytest.mark.parametrize("scale, wanted", [("'3.0'", 3.0), ("2", 2.0), ("'1.5-1.5:cos'", 1.5), ("'1.0'", None), ("null", None)])
def test_the_branches_of_dreamartist_see_every_sample(scale, wanted):
    done = convert(write(TRAINS.replace("cfg_scale: '1.0'", f"cfg_scale: {scale}").partition("lora_unet")[0] + BRANCHES, ""))
    options = fxplug.load_config(parse_yaml(done.text).data).train.task.options
    assert options.get("train_guidance") == wanted
    assert any("a branch is for half of a batch" in note for note in done.notes) == (wanted is None)


def test_a_scale_that_changes_with_the_time_is_refused_with_its_training():
    done = convert(write(TRAINS.replace("cfg_scale: '1.0'", "cfg_scale: '1.0-3.0:cos'"), ""))
    read = parse_yaml(done.text).data
    assert "train" not in read and "data" not in read and read["passes"]
    assert any("cfg_scale '1.0-3.0:cos' changes with the time" in note for note in done.notes)


@pytest.mark.parametrize(
    "text",
    [
        "train: {}\n", "data: {}\n", "train: {train_epochs: 3}\n", "train: {train_steps: '${hcp.time:}'}\n",
        "data: {a: 1}\n",
        "train: {optimizer: {type: adamw}, scheduler: {name: polynomial}, loss: x, max_grad_norm: -1}\n",
        "data: {a: {source: {b: {img_root: imgs/}}, bucket: {target_size: [512, 640]}}}\n",
        "model: null\nseed: x\ntrain: null\n",
        "train: {optimizer: {_target_: lion_pytorch.Lion, lr: 1e-4}}\n",
    ],
)  # fmt: skip
def test_whatever_it_says_of_training_the_result_is_a_configuration(text):
    done = convert(write(text + "lora_unet: [{lr: 1e-4, rank: 8, layers: [to_q]}]\n", ""))
    fxplug.load_config(parse_yaml(done.text).data)


def test_a_section_of_training_that_is_none_is_told():
    assert "plugin.yaml:1: train: must be a mapping, not [1]" in refused(
        "train: [1]\nlora_unet: [{lr: 1e-4, rank: 8, layers: [to_q]}]\n", top=""
    )
