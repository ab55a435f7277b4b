"""The tensors of an adapter's file, and which of them are numbers like others."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core import weight_files
from ..core.errors import ArtifactError, Limits
from ..core.weight_files import PICKLED, SAFE

_SAM = re.compile(r"^w_(?P<half>[ab])_(?P<number>\d+)$")
PACKED = tuple(d for name in ("float4_e2m1fn_x2",) if (d := getattr(torch, name, None)) is not None)
SMALL = 8192  # bytes: numbers, such as alphas, are no larger
NUMBERS = ("alpha", "scale", "on_input", "reshape_weight", "scaled_oft")


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
