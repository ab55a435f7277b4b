"""The blocks of a pass: one is made for each site and put into the module tree; and the record that is kept of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .. import quantised
from ..errors import FxplugError, SpecError
from ..ir.containers import Container
from ..ir.traced_module import TracedModule
from ..spec.import_path import import_target
from ..spec.options import check_known, check_options, taken
from ..spec.rules import Pass, Rule, is_target
from .sites import Site, input_name, own_inputs


def make_block(
    tree: nn.Module, site: Site, p: Pass, owners: dict[Any, Any], weight: torch.Tensor | None
) -> tuple[str, nn.Module]:
    """The block of a site, put into the module tree; calls of one module share one, other rules and ports do not.

    Sites of one tied parameter share one as well. `weight` says device and dtype where the site has no weights of its own.
    """
    rule = site.rule
    kind = block_class(rule)
    if rule.place == "param":
        _check_numbers(site, p)
        tied = (id(rule), id(site.parameter))
        if tied in owners:
            return owners[tied], tree.get_submodule(owners[tied])
    first = name = ".".join(filter(None, [p.name, site.name, kind.__name__]))
    owner_key = (id(rule), site.port.side, site.port.keys if not site.node else ())
    number = 2
    while owners.setdefault(name, owner_key) != owner_key:
        name, number = f"{first}_{number}", number + 1
    try:
        return name, tree.get_submodule(name)
    except AttributeError:
        pass
    try:
        _check_options(kind, rule.options)
        shares = rule.carries and rule.name in owners and "beside" in taken(kind.at, 1).names  # type: ignore[attr-defined]
        beside = {"beside": owners[rule.name]} if shares else {}
        block = _make(kind, site, weight, beside).train(tree.training)
    except FxplugError as error:
        text = getattr(error, "finding", str(error))
        raise SpecError(f"{p.name}: {site.node or site.path or 'the model'}: {text}", where=rule.where) from error.__cause__
    except Exception as error:  # the block's, which may be the user's
        made = f"{kind.__name__}.at made no block: {type(error).__name__}: {error}"
        raise SpecError(f"{p.name}: {site.node or site.path or 'the model'}: {made}", where=rule.where) from error
    owner = tree
    *parents, last = name.split(".")
    for part in parents:
        if part not in owner._modules:
            owner._modules[part] = Container(("Added",))
        owner = owner._modules[part]  # type: ignore[assignment]
    owner._modules[last] = block
    if rule.place == "param":
        owners[tied] = name
    if rule.carries:
        owners[rule.name] = block
    return name, block


def _check_numbers(site: Site, p: Pass) -> None:
    """Raises SpecError for a site whose parameter is packed, or whose layer cannot be opened for another one of it."""
    if quantised.is_packed(site.parameter) or quantised.is_own_layer(site.module):
        raise SpecError(
            f"{p.name}: '{site.path}' is quantised ({quantised.described(site.module)}), and a pass that changes a parameter "
            f"cannot change its '{site.port.keys[0]}': leave the layer out, or put something beside it, such as lora, ia3, ssf "
            "or an adapter",
            where=site.rule.where,
        )


def block_class(rule: Rule) -> type[nn.Module]:
    """The class that a rule puts in. Raises SpecError for what is no class of blocks."""
    assert rule.use is not None
    kind = rule.use if isinstance(rule.use, type) else import_target(rule.use, rule.where)
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        raise SpecError(f"'{rule.use}' is no module class: a block is an nn.Module", where=rule.where)
    if not callable(getattr(kind, "at", None)):
        raise SpecError(
            f"block class '{kind.__name__}' has no classmethod 'at(site, **options)', which makes a block for a site",
            where=rule.where,
        )
    return kind


def _check_options(kind: Any, options: Mapping[str, Any]) -> None:
    check_options(kind.at, options, kind.__name__, given=1, says="takes no option")
    if getattr(kind, "hands_on", False):  # to its constructor, whose other parameters the site gives
        own, at = taken(kind), taken(kind.at, 1)
        known = dict.fromkeys([*(name for name in own.names if name not in own.required), *at.names])
        check_known(options, known, f"{kind.__name__} takes no option")


def _make(kind: type[nn.Module], site: Site, weight: torch.Tensor | None, beside: Mapping[str, Any]) -> nn.Module:
    """A block on the device and, for floating-point weights, in the dtype of the weights around it."""
    near = next((t for t in site.module.parameters() if t.is_floating_point()), weight)
    device = torch.device("cpu") if near is None else near.device
    with torch.device(device), torch.random.fork_rng(enabled=False):
        block: nn.Module = kind.at(site, **site.rule.options, **beside)  # type: ignore[attr-defined]
    if near is not None:
        block.to(device)
        # a layer of bitsandbytes calculates in a dtype of its own, and gives that of its input
        given = site.x.dtype if quantised.is_own_layer(site.module) and site.x is not None else near.dtype
        dtype = given if given.is_floating_point else near.dtype
        for parameter in block.parameters():
            if parameter.is_floating_point() and parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
    return block


def record(
    gm: TracedModule, p: Pass, sites: list[Site], blocks: Mapping[int, tuple[str, nn.Module]]
) -> dict[str, Any]:
    """What a module remembers of a pass: plain values, saved with it."""
    named = [(s, blocks.get(id(s), ("", None))) for s in sites]
    made_new = all(spec.get("neutral") and is_target(spec["use"]) for spec in p.networks.values())
    return {
        "name": p.name,
        "about": p.about,
        "params": _plain(dict(p.params)),
        "lr": p.lr,
        "weight_decay": p.weight_decay,
        "train": p.train,
        "neutral": made_new and not p.loads and all(getattr(block, "neutral", False) for _, (_, block) in named),
        "sites": [
            {"path": s.node or s.path, "place": s.rule.place, "block": name, **_apart(s), **_param(s), **_bank(s, block)}
            for s, (name, block) in named
        ],
        "slots": p.slots,
        "inputs": [input_name(gm, p, name) for name in own_inputs(gm, p)],
        "networks": list(p.networks),
    }


def _apart(site: Site) -> dict[str, Any]:
    """Whether a block is beside one call of several only, or reads something else than its region does: no adapter file says
    so."""
    one = any("@" in pattern for pattern in site.rule.match.patterns)
    other = site.rule.place == "after" and tuple(site.rule.args[:2]) not in (("x", "y"), ("y",))
    return {"apart": True} if one or other else {}


def _param(site: Site) -> dict[str, Any]:
    """Which parameter a block maps, where that is not the weight."""
    name = str(site.port.keys[0]) if site.port.side == "param" else "weight"
    return {} if name == "weight" else {"param": name}


def _bank(site: Site, block: nn.Module | None) -> dict[str, Any]:
    found: Any = block
    turned = {"transposed": True} if quantised.is_transposed(site.module) else {}
    return {"bank": {**found.bank(), **turned, **_param(site)}} if getattr(block, "slots", 0) else {}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, torch.Tensor):
        return f"Tensor {list(value.shape)}"
    if isinstance(value, (nn.Module, type)):
        return (value if isinstance(value, type) else type(value)).__name__
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
