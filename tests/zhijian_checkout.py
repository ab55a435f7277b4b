"""ZhiJian's own code, run from a checkout: its add-ins, its compiler of lines and its hooks beside a model."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import torch
import yaml
from torch.overrides import TorchFunctionMode

# these three do nothing but import all the rest, and with it data sets and language models
EMPTY = ("zhijian", "zhijian.models", "zhijian.models.backbone", "zhijian.data", "zhijian.trainers")


def checkout():
    """The folder of ZhiJian below SEEDS, or None."""
    seeds = os.environ.get("SEEDS")
    found = Path(seeds).glob("*/zhijian/models/addin/module/vpt.py") if seeds else ()
    return next((file.parents[4] for file in found), None)


@contextlib.contextmanager
def zhijian(root):
    """ZhiJian's modules for the time of a `with`: `addin` (models/addin/base.py) and `backbone` (models/backbone/base.py)."""
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "zhijian"}
    for name in EMPTY:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(root.joinpath(*name.split(".")))]
    try:
        yield SimpleNamespace(
            addin=importlib.import_module("zhijian.models.addin.base"),
            backbone=importlib.import_module("zhijian.models.backbone.base"),
        )
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "zhijian"]:
            del sys.modules[name]
        sys.modules.update(before)


def arguments(root, addins, **own):
    """What ZhiJian's trainer makes of a configuration: the defaults of its add-ins' parsers, and what the file says."""
    parser = argparse.ArgumentParser()
    with zhijian(root):
        for name in dict.fromkeys(entry["name"] for entry in addins):
            module = importlib.import_module(f"zhijian.models.addin.module.{name.lower()}")
            module.prepare_specific_addin_parser(parser)
    args = parser.parse_args([])
    vars(args).update(own, addins=addins)
    return args


def configuration(root, name):
    """A file of zhijian/models/configs, read."""
    return yaml.safe_load((root / "zhijian/models/configs" / f"{name}.yaml").read_text())


class OnCPU(TorchFunctionMode):
    """What ZhiJian moves to CUDA stays where it is."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and args[1:] == (torch.device("cuda"),):
            return args[0]
        return func(*args, **(kwargs or {}))
