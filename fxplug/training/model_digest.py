"""A digest of the models and settings that encode something: equal only where what they give is."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import importlib
import json
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from ..core.errors import TrainError
from ..core.quantised import get_plain_tensors
from .data.image_sources import compute_file_digest

THREADS = 8  # which hash weights side by side: hashing takes no lock of Python's
# what models and tokenizers say of where they come from, and not of what they do
PLACES = ("name_or_path", "_name_or_path", "_diffusers_version", "transformers_version", "_use_default_values")


def digest_models(*makers: Any) -> str:
    """Return a digest of everything that encodes: two calls give the same only for what gives the same.

    Weights and buffers count by their bytes, wherever they were loaded from; with them count their dtypes and kinds of device,
    classes, the versions of the packages that these are from (of a file that is in no package its bytes), configurations,
    public attributes that are plain values, the code of traced modules, files of tokenizers, and the version of torch. Hooks
    and changed methods of classes do not.

    Args:
        makers: Modules, tokenizers, processors and schedulers, functions and classes, and plain values such as a dtype or the
            arguments of a call.

    Returns:
        64 hexadecimal digits.

    Raises:
        TrainError: Something of which it cannot be said what it does.
    """
    described = [str(torch.__version__), *map(_described, makers)]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _described(maker: Any) -> Any:
    """Return plain values that describe a maker."""
    if isinstance(maker, nn.Module):
        return _of_module(maker)
    if isinstance(config := getattr(maker, "config", None), Mapping):
        return [_class(type(maker)), _plain(config)]
    if callable(getattr(maker, "save_pretrained", None)) and not isinstance(maker, type):
        return _of_files(maker)
    if isinstance(maker, Mapping):
        return [[_plain(key), _described(value)] for key, value in maker.items()]
    if isinstance(maker, (list, tuple)):
        return [_described(value) for value in maker]
    found = _plain(maker)
    if found == _class(type(maker)):
        raise TrainError(f"the cache cannot identify a {type(maker).__name__}: give modules, tokenizers or plain values")
    return found


def _of_module(module: nn.Module) -> list[Any]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    parts = [(name, part) for name, tensor in sorted(tensors.items()) for part in get_plain_tensors(tensor)]
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(lambda pair: _of_tensor(pair[1]), parts))
    modules = [[name, _class(type(part)), _attributes(part)] for name, part in module.named_modules()]
    config: Any = getattr(module, "config", None)
    config = config.to_dict() if hasattr(config, "to_dict") else config
    return [_plain(config), modules, [[name, found] for (name, _), found in zip(parts, digests, strict=True)]]


def _of_tensor(tensor: Tensor) -> list[Any]:
    if tensor.is_meta:
        raise TrainError("the cache cannot identify weights on the meta device: load them first")
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().data if flat.numel() else b""
    return [str(tensor.dtype), list(tensor.shape), tensor.device.type, hashlib.sha256(data).hexdigest()]


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return what else a module computes with: public attributes, and private ones that are a switch or a name."""
    code = {"code": module.code} if isinstance(module, fx.GraphModule) else {}
    found = {}
    for name, value in vars(module).items():
        switch = isinstance(value, (bool, str)) or (isinstance(value, list) and all(isinstance(v, str) for v in value))
        if name not in (*PLACES, "config") and (switch or not name.startswith("_")):
            found[name] = _plain(value)
    return {**found, **code}


def _class(kind: Any) -> list[Any]:
    """Return the name of a class or function, and what says which code it has: a version, or the digest of its file."""
    name = f"{kind.__module__}.{getattr(kind, '__qualname__', type(kind).__name__)}"
    version = file = None
    with contextlib.suppress(ImportError, ValueError):  # they are imported already, where they are modules
        version = getattr(importlib.import_module(kind.__module__.partition(".")[0]), "__version__", None)
        file = getattr(importlib.import_module(kind.__module__), "__file__", None)
    if version is None and file is not None and os.path.isfile(file):
        version = compute_file_digest(Path(file))
    return [name, str(version)]


def _plain(value: Any) -> Any:
    """Return a value in JSON's terms; of an object that has none the name of its class."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return [type(value).__name__, repr(value)] if isinstance(value, (enum.Enum, float)) else value
    if isinstance(value, Mapping):
        return [[_plain(key), _plain(item)] for key, item in value.items() if key not in PLACES]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(_plain, value)]
    if isinstance(value, (set, frozenset)):
        return ["set", *sorted(json.dumps(_plain(item)) for item in value)]
    if isinstance(value, (torch.dtype, torch.device, Path, enum.Enum)):
        return str(value)
    if isinstance(value, (Tensor, np.ndarray)):
        return _of_tensor(torch.as_tensor(value))
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return _class(value)
    return _class(type(value))


def _of_files(maker: Any) -> list[Any]:
    """Describe a tokenizer or processor by the files that it would be saved as."""
    with tempfile.TemporaryDirectory() as folder:
        maker.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return [_class(type(maker)), [[str(path.relative_to(folder)), _of_saved(path)] for path in files]]


def _of_saved(path: Path) -> Any:
    data = path.read_bytes()
    if path.suffix == ".json":
        found = json.loads(data)
        return _plain(found) if isinstance(found, dict) else _plain([found])
    return hashlib.sha256(data).hexdigest()
