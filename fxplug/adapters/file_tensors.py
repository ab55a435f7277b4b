"""Where the tensors of an adapter are: the file itself, or the one that a folder of PEFT, diffusers or fxplug has.

The folder may be a repository on the hub.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core import reading, weight_files
from ..core.errors import ArtifactError, Limits, did_you_mean
from ..core.hub_names import find_local

SAFE, PICKLED = (".safetensors",), (".bin", ".pt", ".pth", ".ckpt")
_SAM = re.compile(r"^w_(?P<half>[ab])_(?P<number>\d+)$")
PACKED = tuple(d for name in ("float4_e2m1fn_x2",) if (d := getattr(torch, name, None)) is not None)
SMALL = 8192  # bytes: numbers, such as alphas, are no larger
NUMBERS = ("alpha", "scale", "on_input", "reshape_weight", "scaled_oft")


def find_kind(path: Path) -> str:
    """Return what is at a path: `folder`, `file` (or something else that can be opened), or "". Raises ArtifactError."""
    with reading.report_errors(reading.make_reporter(path)):
        return "folder" if path.is_dir() else "file" if os.path.lexists(path) else ""


def find(source: str | os.PathLike[str]) -> Path:
    """Return the file that holds the tensors of a file, a folder, or a repository on the hub. Raises ArtifactError."""
    path = find_local(source, "adapter")
    what = find_kind(path)
    if what != "folder":
        if not what:
            with reading.report_errors(reading.make_reporter(path.parent)):
                near = os.listdir(path.parent) if path.parent.is_dir() else []
            raise ArtifactError(f"no adapter file or folder '{path}'{did_you_mean(path.name, near)}")
        return path
    with reading.report_errors(reading.make_reporter(path)):
        found = {entry.name: entry.is_dir() for entry in os.scandir(path)}
    chosen, files = choose_file([name for name, is_folder in found.items() if not is_folder])
    if chosen:
        return path / chosen
    inner = sorted(name for name, is_folder in found.items() if is_folder and find_kind(path / name / "adapter_config.json"))
    if inner and not files:
        raise ArtifactError(f"'{path}' has the adapters {', '.join(inner)}: give the folder of one of them")
    names = f": give one of {', '.join(files[:6])}" if files else ""
    raise ArtifactError(f"the folder '{path}' has {len(files) or 'no'} files of weights{names}")


def choose_file(names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the one among the files of a folder that holds an adapter, "" if none does for certain, and those that may."""
    for stem in ("adapter_model", "pytorch_lora_weights"):
        for suffix in (*SAFE, *PICKLED):
            if f"{stem}{suffix}" in names:
                return f"{stem}{suffix}", []
    files = sorted(name for name in names if name.endswith(SAFE))
    if "manifest.json" in names:  # what `fxplug.save` wrote: the model's own weights are no adapter
        files = [name for name in files if name != "model.safetensors"]
    return files[0] if len(files) == 1 else "", files


def load(file: Path, limits: Limits, meta: bool = False) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Load the tensors of a file on the CPU, with `meta` only its numbers, and its metadata."""
    if file.suffix not in (*SAFE, *PICKLED):
        raise ArtifactError(f"{file}: an adapter must be a file that ends in {', '.join((*SAFE, *PICKLED))}, or a folder")
    found, about = weight_files.read(file, most=SMALL if meta else math.inf, limits=limits)
    for _ in range(limits.depth):
        if not (isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping)):
            break
        found = found["state_dict"]
    if isinstance(found, list) and found and all(isinstance(one, Tensor) and one.dim() > 1 for one in found):
        found = {f":{n // 2}:{('up', 'down')[n % 2]}": one for n, one in enumerate(found)}  # cloneofsimo's, 2022
    if not isinstance(found, Mapping):
        raise ArtifactError(
            f"{file} contains a {type(found).__name__}, not a dict of tensors: save one with the keys of layers"
        )
    return {key: _without_values(key, value) for key, value in found.items()} if meta else dict(found), about


def _without_values(key: Any, value: Any) -> Any:
    """Move a tensor to the meta device, except numbers (alphas); so no two of a layer are apart."""
    kept = not isinstance(value, Tensor) or str(key).rpartition(".")[2] in NUMBERS
    return value if kept else value.to("meta")


def parse_object(value: Any, where: str) -> dict[str, Any]:
    """Return a JSON object. Raises ArtifactError for another value; `where` names its source."""
    if not isinstance(value, dict):
        raise ArtifactError(f"{where} is not JSON object")
    return value


def join_sam(state: dict[str, Any], where: str) -> dict[str, Any]:
    """Join Sam_LoRA's numbered pairs to one update for each layer: its outputs begin with the query (even numbers), end with
    value.

    https://github.com/JamesQFreeman/Sam_LoRA. Another state is returned unchanged. Raises ArtifactError for half pairs.
    """
    found = {key: m for key in state if (m := _SAM.match(key))}
    if not found or not all(isinstance(state[key], Tensor) and state[key].dim() == 2 for key in found):
        return state
    pairs = {(m["half"], int(m["number"])): state[key] for key, m in found.items()}
    made = {key: value for key, value in state.items() if key not in found}
    for n in range(0, max(n for _, n in pairs) + 1, 2):
        try:
            (down_q, up_q), (down_v, up_v) = ((pairs["a", n + i], pairs["b", n + i]) for i in (0, 1))
        except KeyError as error:
            raise ArtifactError(f"{where}: 'w_{error.args[0][0]}_{error.args[0][1]:03}' is missing") from None
        if up_q.shape != up_v.shape or len(down_q) != up_q.shape[1] or down_q.shape != down_v.shape:
            raise ArtifactError(f"{where}: 'w_a_{n:03}' and its other tensors do not fit each other")
        width, rank = up_q.shape
        up = up_q.new_zeros(3 * width, 2 * rank)
        up[:width, :rank], up[-width:, rank:] = up_q, up_v
        made |= {f":{n // 2}:down": torch.cat([down_q, down_v]), f":{n // 2}:up": up}
    return made


def explain_unreadable(value: Tensor) -> str:
    """Return why a tensor's numbers cannot be read like those of any other, and what to do; "" if they can."""
    kind = type(value)
    if kind not in (Tensor, nn.Parameter, nn.Buffer):
        plain: Any = Tensor
        own = [getattr(kind.__torch_function__, "__func__", None), kind.__torch_dispatch__]
        if own != [plain.__torch_function__.__func__, plain.__torch_dispatch__]:
            return (
                f"is a {kind.__name__}, which is not a plain tensor: convert it with dequantize() or full_tensor()"
            )
    if value.is_nested:
        return "is a nested tensor, which has no single shape: convert it with to_padded_tensor()"
    if value.layout != torch.strided:
        return f"is sparse ({value.layout}): convert it with to_dense()"
    if value.dtype in PACKED:
        return f"is {value.dtype}, which packs several numbers into one: convert it to another dtype"
    return ""
