"""Updates of parameters that are no layer's weight, in PEFT's forms: of a MultiheadAttention, and by `target_parameters`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from .contents import ModelLayer
from .file_keys import INNER
from .updates import Entry

OUT_PROJ = "NonDynamicallyQuantizableLinear"  # the class of a MultiheadAttention's out_proj, and of no other layer


def convert_to_peft(
    entries: Sequence[Entry], parameters: Mapping[str, Sequence[int]], layers: Mapping[str, ModelLayer]
) -> tuple[list[Entry], dict[str, str]]:
    """Return the updates with those of such parameters in PEFT's form, and those without such a form, with the reason.

    `parameters` are the shapes of all that the model has, each module's in its order. For an update in one of these forms
    `options` has as "key" the prefix of its tensors' names, and as "target" that of its parameter in `target_parameters`.
    """
    attentions = {path.rpartition(".")[0] for path, layer in layers.items() if layer.kind == OUT_PROJ}
    groups: dict[str, list[Entry]] = {}  # those of an attention, or of a module's parameters
    made: list[Entry] = []
    for entry in entries:
        owner = entry.path.rpartition(".")[0]
        layer = layers.get(entry.path)
        of_attention = owner in attentions and layer is not None and layer.kind == OUT_PROJ
        bare = entry.param != "weight" or (layer is not None and layer.kind in ("", "Module"))
        if entry.method or not (of_attention or bare):
            made.append(entry)
        else:
            groups.setdefault(owner if of_attention else entry.path, []).append(entry)
    left: dict[str, str] = {}
    biased = any("bias" in entry.kind for entry in made if not entry.method)
    updated = {entry.path for entry in made}
    for path, found in groups.items():
        odd = next((entry.kind for entry in found if entry.kind != "lora"), "")
        inside = {path, f"{path}.out_proj"} if path in attentions else {path}
        if odd:
            why = f"is {odd} of a parameter that no called layer has, for which PEFT supports only LoRA"
        elif not path:
            why = "is a parameter of the model itself, and PEFT wraps only what is in a module"
        elif biased:
            why = "is an update of a parameter, and others have a bias, which PEFT has for all or none and not for this one"
        elif not inside.isdisjoint(updated):
            why = "is an update of a parameter of a module that has another change, and PEFT wraps it once"
        elif path in attentions:
            why = _of_attention(path, found, parameters, made)
        else:
            why = _of_module(path, found, parameters, made)
        if why:
            left |= {entry.key(entry.path): why for entry in found}
    wrapped = Counter(entry.path for entry in made if "target" in entry.options)
    for n, entry in enumerate(made):
        owners = [(path, number) for path, number in wrapped.items() if entry.path.startswith(f"{path}.")]
        if owners and not entry.method:  # its key has the wrappers around what it is in
            key = entry.options.get("key", entry.path)
            for path, number in sorted(owners, key=lambda owner: -len(owner[0])):
                key = path + ".base_layer" * number + key.removeprefix(path)
            made[n] = replace(entry, options={**entry.options, "key": key})
    targets = {entry.options["target"] for entry in made if "target" in entry.options}
    for target in targets:
        if other := next((key for key in parameters if key.endswith(f".{target}") and key not in targets), ""):
            left[target] = f"has a name that ends '{other}', which PEFT would change as well"
    return [entry for entry in made if entry.options.get("target") not in left], left


def _of_attention(path: str, found: list[Entry], parameters: Mapping[str, Sequence[int]], made: list[Entry]) -> str:
    """Add the updates of an attention, in_proj_weight and out_proj, of one rank and scale; or return why PEFT cannot hold them.

    PEFT adds the update of out_proj twice, so that it is written with half its size.
    """
    joint = parameters.get(f"{path}.in_proj_weight")
    first = next((entry for entry in found if entry.param == "in_proj_weight"), None)
    last = next((entry for entry in found if entry.path != path), None)
    if joint is None and last is None:
        return _of_module(path, found, parameters, made)
    if joint is None:
        return "is in a MultiheadAttention with kdim or vdim, of whose out_proj PEFT reads no update"
    if len(found) > (first is not None) + (last is not None):
        return "is in a MultiheadAttention, where PEFT changes only in_proj_weight and out_proj.weight"
    given = [entry for entry in (first, last) if entry is not None]
    if len({entry.scale for entry in given}) > 1 or not given[0].scale:
        given = [entry.with_scale_in_factor() for entry in given]
    rank = max(entry.rank for entry in given)
    pair = {entry.param: _padded(entry, rank) for entry in given}
    for param, name, out in (("in_proj_weight", path, joint[0]), ("weight", f"{path}.out_proj", joint[1])):
        if param not in pair:  # PEFT always has both: this one changes nothing, and can be trained
            other = next(iter(pair.values()))
            up = torch.zeros(out, rank, dtype=other.tensors["up"].dtype)
            pair[param] = replace(other, name=name, path=name, param=param, tensors={**other.tensors, "up": up})
    up = pair["weight"].tensors["up"] / 2
    pair["weight"] = replace(pair["weight"], tensors={**pair["weight"].tensors, "up": up})
    made.append(replace(pair["in_proj_weight"], options={"key": path}))
    made.append(replace(pair["weight"], options={"key": path + INNER}))
    return ""


def _padded(entry: Entry, rank: int) -> Entry:
    """Pad an update with zeros up to a rank."""
    more = rank - entry.rank
    tensors = {"down": F.pad(entry.tensors["down"], (0, 0, 0, more)), "up": F.pad(entry.tensors["up"], (0, more))}
    return replace(entry, tensors=tensors, rank=rank)


def _of_module(path: str, found: list[Entry], parameters: Mapping[str, Sequence[int]], made: list[Entry]) -> str:
    """Add the updates of a module's parameters, one wrapper around the other; or return why PEFT cannot hold them."""
    order = [key for key in parameters if key.rpartition(".")[0] == path]
    by_key = {f"{path}.{entry.param}": entry for entry in found}
    if odd := next((key for key in by_key if key not in order), ""):
        return f"is an update of '{odd}', which the model does not have"
    if odd := next((key for key in by_key if len(parameters[key]) == 3 and not by_key[key].experts), ""):
        return f"is an update of '{odd}' of {list(parameters[odd])}, which has not an update for each of several experts"
    if f"{path}.weight" in by_key and (len(by_key) > 1 or by_key[f"{path}.weight"].experts):
        return "is an update of a parameter 'weight' of three dimensions or beside others, which fxplug does not write for PEFT"
    inside = sorted(by_key, key=order.index)  # a module's first parameter has the innermost wrapper
    for depth, key in enumerate(reversed(inside)):
        entry = by_key[key]
        tensors = _of_experts(entry) if entry.experts else entry.tensors
        options = {"key": path + ".base_layer" * depth, "target": key, "experts": entry.experts}
        made.append(replace(entry, tensors=tensors, options=options))
    return ""


def _of_experts(entry: Entry) -> dict[str, Tensor]:
    """Return the tensors in PEFT's form, those of all experts in one: the inverse of `Entry.by_expert`."""
    down, up = entry.tensors["down"], entry.tensors["up"]  # (rank, experts, m), (n, rank, experts)
    if entry.options.get("transposed"):
        down, up = up.permute(2, 1, 0), down.permute(2, 0, 1)
    else:
        down = down.transpose(0, 1)
    return {"down": down.flatten(0, 1).contiguous(), "up": up.flatten(1).contiguous()}
