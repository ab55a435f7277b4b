"""Adapter files put into what passes without slots train: the same reading, placing and fitting as for slots."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.base import get_kind
from ..blocks.scale import Scale
from ..core.errors import DEFAULT, ArtifactError, Limits, SpecError, did_you_mean
from ..core.ir.comparison import REWRITTEN, is_close
from ..core.locks import get_locks, write_lock
from ..core.quantised import get_weight_shape, is_transposed
from .banks import Bank, make_rows
from .base_weights import warn_on_other_base
from .files import AdapterFile, Fit, Source, fit, read
from .own_files import NUMBER, match_tensors, read_description, read_pass_file
from .saved_heads import find_resized_layers, get_trained_layers, without_heads
from .updates import Entry


@torch.no_grad()
def load_adapter(
    module: nn.Module,
    source: Source,
    *,
    passes: Sequence[str] | None = None,
    adapter: str | None = None,
    part: str | None = None,
    config: Mapping[str, Any] | None = None,
    partial: bool = False,
    guess: bool = False,
    limits: Limits = DEFAULT,
) -> Fit:
    """Write an adapter into the blocks of passes without slots, in the place of what these hold; to be trained on, or merged.

    Each layer goes into a block of its kind, a product of a rank below the block's too, and what has no block of its own into
    one of `delta`; a layer that the file has whole (PEFT's `modules_to_save`) goes into the new head that stands for it here,
    or into the layer itself where `fxplug.trainable` named it. Blocks that the adapter has nothing for are as new ones: they
    change nothing. A file of fxplug's own of passes of other kinds goes into passes of the same kinds at the same places. All
    of it is written, or nothing.

    Args:
        module: The rewritten module.
        source: The adapter, as `adapters.load` takes it.
        passes: Some of the module's passes of lora, lora_weight, loha, lokr, dora, oft, boft, ia3, delta and bitfit; None is
            all without slots.
        adapter: Which of several adapters in the file.
        part: Which part of a pipeline the module is.
        config: PEFT's adapter configuration, where none is beside the file.
        partial: Whether layers that are not here are left out.
        guess: Whether layers may be taken by shape and order.
        limits: Bounds of what is read.

    Returns:
        What went where, and what was left out.

    Raises:
        ArtifactError: The file cannot be read, or has layers that are not here.
        SpecError: There is no such pass, or no block here holds an update; the error names the pass that would.
    """
    file = _read(source, module, adapter, config, limits)
    if file.own:
        homes = {**get_trained_layers(module), **find_resized_layers(module)}
        _write(module, match_tensors(module, get_slotless_passes(module, passes), homes, file))
        return Fit(file, {key: tuple(value.shape) for key, value in file.own.items()}, {})
    file, heads = without_heads(file, module)
    banks = blocks_of(module, passes) if file.entries else {}
    found = fit_to(file, banks, module, lambda: list_weights(module), part, guess)
    if not (partial and found.placed):
        found.check()

    there = functools.partial(find_tensor, module)
    warn_on_other_base(file.source, file.about, there)
    ready = [row for rows in make_rows(banks, found.placed, there).values() for row in rows]
    scales = {row[0].block: found.placed[row[0].key].scale for row in ready if row[0].key in found.placed}
    writes: list[tuple[Tensor, Tensor]] = []
    for rows in banks.values():
        for bank in rows:
            writes += _new(bank, there)
    for bank, key, name, value in ready:
        target = there(name)
        assert target is not None
        values = torch.zeros_like(target)
        bank.views(key, values, 0)[tuple(slice(n) for n in value.shape)] = value
        writes.append((target, values))
        if (scale := there(f"{bank.block}.scale")) is not None:
            writes.append((scale, torch.full_like(scale, scales[bank.block])))
    _write(module, writes + heads)
    return found


def _read(source: Source, module: Any, adapter: str | None, config: Mapping[str, Any] | None, limits: Limits) -> AdapterFile:
    """Read an adapter file, or a file that `fxplug.save` wrote for any pass, for a pass of the same name here."""
    try:
        file = read(source, adapter=adapter, config=config, limits=limits)
        if not file.rest:
            return file
    except ArtifactError:
        if (own := read_pass_file(source, get_slotless_passes(module, None), limits)) is None:
            raise
        return own
    return read_pass_file(source, get_slotless_passes(module, None), limits) or file


@torch.no_grad()
def _write(module: nn.Module, writes: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write values into a module's tensors, all or none, while no call runs."""
    before = [(target, target.clone()) for target, _ in writes]
    locks = get_locks(module)
    with write_lock(locks):
        try:
            for one in locks:
                if one.written is not None:  # a change around this, which puts it back when it fails
                    one.written.extend(before)
            for target, value in writes:
                target.copy_(value)
        except BaseException:  # an interrupt, too: all is put back
            for target, old in reversed(before):
                target.copy_(old)
            raise


def get_slotless_passes(module: Any, passes: Sequence[str] | None) -> dict[str, Any]:
    """Return the records of a module's passes without slots by name, of those in `passes` or of all.

    Raises SpecError for a name that is no pass here, and for a pass with slots.
    """
    if isinstance(passes, str):
        raise SpecError(f"passes must be a list of names, not text: write ['{passes}']")
    applied = {entry["name"]: entry for entry in getattr(module, "meta", {}).get("passes", [])}
    for name in passes or ():
        if name not in applied:
            listed = f"there are {', '.join(applied)}" if applied else "none is applied"
            raise SpecError(f"no pass '{name}' is applied here{did_you_mean(name, applied)}; {listed}")
        if applied[name].get("slots"):
            raise SpecError(f"the pass '{name}' has slots: load and save adapters in them by their names, with module.adapters")
    return {name: entry for name, entry in applied.items() if not entry.get("slots") and (passes is None or name in passes)}


def blocks_of(module: Any, passes: Sequence[str] | None) -> dict[str, list[Bank]]:
    """Return the blocks of passes without slots as banks, by pass. Raises SpecError for another name, and if there are none."""
    made: dict[str, list[Bank]] = {}
    for name, entry in get_slotless_passes(module, passes).items():
        sites = {site["block"]: site for site in reversed(entry["sites"]) if site["block"] and not site.get("apart")}
        banks = [bank for site in reversed(sites.values()) if (bank := make_bank(module, site)) is not None]
        if banks:
            made[name] = banks
    if not made:
        slots = "; for passes with slots use module.adapters.load" if getattr(module, "meta", {}).get("passes") else ""
        raise SpecError(f"no pass here has blocks that an adapter file can be loaded into{slots}")
    return made


def make_bank(module: nn.Module, site: Mapping[str, Any]) -> Bank | None:
    """Return the block of a site as a bank of one; None for a block that adapter files cannot represent."""
    block: Any = module.get_submodule(site["block"])
    kind, path = get_kind(block), site["path"].partition("@")[0]
    if kind is None or not kind.neutral:
        return None
    names = {state: name for name, state in kind.state.items()}
    facts: dict[str, Any] = {**block.bank(), "slots": 0, "param": site.get("param", "weight")}
    facts["parameters"] = tuple(names.get(name, name) for name, _ in block.named_parameters())
    layer = module_at(module, path)
    facts["transposed"] = layer is not None and (
        is_transposed(layer) or bool(facts.get("experts") and getattr(layer, "is_transposed", False))
    )
    if site["place"] != "param" and kind.method:
        facts["options"] = {"side": "output" if site["place"] == "after" else "input"}
        weight = getattr(layer, "weight", None)
        facts["shape"] = get_weight_shape(layer, weight) if isinstance(weight, Tensor) else facts["shape"]
    return Bank(path, site["block"], **{**facts, "shape": tuple(facts["shape"])})


def _new(bank: Bank, there: Callable[[str], Tensor | None]) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors that make a block neutral, each with its new value."""
    made: list[tuple[Tensor, Tensor]] = []
    base = there(f"{bank.path}.{bank.param}")
    for key, value in bank.update_kind.neutral.items():
        target = there(bank.names[key]) if key in bank.names else None
        if target is not None and not callable(value):
            made.append((target, torch.full_like(target, value)))
        elif target is not None and callable(value) and base is not None:
            weight = base.detach().T if bank.transposed else base.detach()
            made.append((target, value(weight, bank.dim).reshape(target.shape).to(target)))
    return made


def check_samples(p: str, banks: Sequence[Bank], slots: Sequence[int], tensor: Callable[[str], Tensor], module: Any) -> None:
    """Raises SpecError where some slots of a pass, of which samples take different ones, change a layer without samples."""
    for bank in banks if slots else ():
        if getattr(module_at(module, bank.block), "batch_dim", 0) < 0:
            keys = [key for key in ("up", "gain") if key in bank.names] or list(bank.names)[:1]
            if any(bank.views(key, tensor(bank.names[key]), slot).any() for key in keys for slot in slots):
                raise SpecError(
                    f"the adapters of '{p}' change '{bank.path}', whose input has no samples, as positions have none, so all "
                    "of a batch share it: use the same adapters for all samples, or load some that leave it alone"
                )


# --- what a module has


def module_at(module: Any, path: str) -> Any:
    """Return a module by its path; None if there is none."""
    for name in path.split(".") if path else ():  # get_submodule asks hasattr at each level, most of the time of a load
        module = None if module is None else module._modules.get(name)
    return module


def is_table(module: Any, path: str) -> bool:
    """Return whether a layer is an Embedding, whose DoRA only fxplug's own layout can represent."""
    return isinstance(module_at(module, path), nn.Embedding)


def find_tensor(module: Any, name: str) -> Tensor | None:
    """Return a parameter or buffer by its name in the state dict; None if there is none of that name."""
    path, _, last = name.rpartition(".")
    home = module_at(module, path)
    return None if home is None else home._parameters.get(last, home._buffers.get(last))


def list_weights(module: nn.Module) -> dict[str, Sequence[int]]:
    """Return the weight shapes of a module's layers, by path."""
    rows = [(path, m, m._parameters.get("weight")) for path, m in module.named_modules()]
    return {path: get_weight_shape(layer, weight) for path, layer, weight in rows if weight is not None}


def find_tied(module: nn.Module) -> dict[str, list[str]]:
    """Return the layers that share their weight with other layers, by path, with these."""
    rows: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name.endswith(".weight"):
            rows.setdefault(id(parameter), []).append(name.removesuffix(".weight"))
    return {path: [one for one in paths if one != path] for paths in rows.values() for path in paths if len(paths) > 1}


def fit_to(
    file: AdapterFile,
    banks: Mapping[str, Sequence[Bank]],
    module: nn.Module | None,
    weights: Callable[[], Mapping[str, Sequence[int]]],
    part: str | None,
    guess: bool,
) -> Fit:
    """Match the entries of a file to a module's banks: those of weights by layer, of other parameters by their names."""
    homes = [bank for rows in banks.values() for bank in rows]
    applied = getattr(module, "meta", {}).get("passes", [])
    file = _by_layer(file, homes, applied) if file.own else file
    at = {(site["block"], site["path"].partition("@")[0]) for entry in applied for site in entry["sites"]}
    tokens = [entry for entry in file.entries if entry.method == "tokens"]
    same = find_tied(module) if module is not None and tokens else {}
    for bank in homes:
        lacks = [name for name in same.get(bank.path, ()) if (bank.block, name) not in at]
        if bank.param == "weight" and bank.update_kind.whole and lacks:
            raise SpecError(
                f"{file.source} has trained tokens, and '{bank.path}' shares its weight with '{lacks[0]}': apply one rule to "
                f"both, delta with at=['{bank.path}', '{lacks[0]}'], as pass_for does"
            )
    homes.sort(key=lambda bank: not bank.update_kind.whole)  # whose shape may be another
    shapes = {bank.key: bank.shape for bank in homes if bank.key == bank.path}
    homes_of_tied = {path: bank.path for bank in homes if bank.key == bank.path for block, path in at if block == bank.block}
    shared = {path: home for path, home in homes_of_tied.items() if path not in shapes}
    shapes |= {path: shapes[home] for path, home in shared.items()}
    beside = {bank.key: bank.shape for bank in homes if bank.key != bank.path}
    beside |= {f"{bank.path}.bias": bank.shape[:1] for bank in homes if bank.gates or bank.has_gain}
    here: dict[str, Sequence[int]] = {}
    if any(e.param != "weight" or "+bias" in e.kind or e.method in ("diff", "whole") for e in file.entries):
        here = {name: tuple(p.shape) for name, p in module.named_parameters()} if module is not None else {}
    return _with_shared(fit(file, shapes, part, weights, guess, beside, here), shared)


def _by_layer(file: AdapterFile, homes: Sequence[Bank], applied: Sequence[Mapping[str, Any]]) -> AdapterFile:
    """Return a file of passes by name as the updates of its layers, if all of it is DoRA or gates in blocks with banks; else
    itself.

    The DoRA of an Embedding is stored in such a file, as no other tool supports it. A layer that is called several times has
    one gate: raises ArtifactError where that is for other calls than the slots in these passes are.
    """
    here = {bank.block for bank in homes if bank.gates}
    calls = {site["path"] for entry in applied for site in entry["sites"] if site["block"] in here}
    banks = {bank.block.partition(".")[2]: bank for bank in homes if bank.update_kind.is_decomposed}
    banks |= {bank.block.partition(".")[2].rpartition(".")[0] + ".Dora": bank for bank in homes if bank.has_gain}
    gates = {bank.kind: bank.update_kind for bank in homes if bank.gates}
    if any(bank.has_gain for bank in homes):
        gates["Scale"] = Scale.update_kind
    entries: dict[str, Entry] = {}
    left = set(file.own)
    rows = read_description(file)["passes"]
    for path, place, block in (site for row in rows for site in row["sites"]):
        own = {key.removeprefix(f"{block}."): value for key, value in file.own.items() if key.startswith(f"{block}.")}
        bank = banks.get(block.partition(".")[2])
        gate = gates.get(NUMBER.sub("", block.rpartition(".")[2]))
        if gate is not None and own.keys() == {"weight"}:
            left -= {f"{block}.weight"}
            side = {"side": "output" if place == "after" else "input"}
            tensors, layer = {"gate": own["weight"]}, path.partition("@")[0]
            those = {path for row in rows for path, _, one in row["sites"] if one == block}
            if (known := {one for one in calls if one.partition("@")[0] == layer}) and known != those:
                raise ArtifactError(
                    f"{file.source} has a gate for the calls {', '.join(sorted(those))} of '{layer}', and the slots here have "
                    f"one for {', '.join(sorted(known))}: load it with load_adapter into the pass that pass_for makes of it"
                )
            entries[block] = Entry(layer, layer, "", gate.name, tensors, 1.0, 0, method=gate.method, options=side)
            continue
        parameters = {"down", "up", "magnitude"} if bank is not None and bank.has_gain else set(bank.parameters if bank else ())
        if bank is None or own.keys() != {*parameters, "scale"} or own["scale"].numel() != 1:
            return file
        left -= {f"{block}.{key}" for key in own}
        own["magnitude"], scale = own["magnitude"].flatten(), float(own.pop("scale"))
        kind = "dora" if bank.has_gain else f"{bank.update_kind.name}{' by input' if bank.dim else ''}"
        entries.setdefault(block, Entry(path, path, "", kind, own, scale, len(own["down"]), param=bank.param))
    return file if left else replace(file, entries=tuple(entries.values()), own={})


def _with_shared(found: Fit, shared: Mapping[str, str]) -> Fit:
    """Return the fit with layers that share a weight, and so a block, with another layer assigned to that one.

    Raises ArtifactError for an update of its own. One without the other's is an update of something else.
    """
    placed, outside = dict(found.placed), dict(found.outside)
    for path, home in shared.items():
        if (entry := placed.pop(path, None)) is None:
            continue
        other = placed.get(home)
        if other is None:
            outside[path] = entry.name
        elif not _are_equal(entry, other, found.layers[home]):
            raise ArtifactError(
                f"{found.file.source}: '{other.name}' and '{entry.name}' have updates of their own, and '{home}' and '{path}' "
                "share a weight that has one here: apply the pass lora, which has one for each"
            )
    layers = {path: shape for path, shape in found.layers.items() if path not in shared}
    return replace(found, layers=layers, placed=placed, outside=outside)


def _are_equal(one: Entry, other: Entry, shape: Sequence[int]) -> bool:
    """Return whether two updates of a weight are equal, which a file may store as those of an Embedding and of a linear
    layer."""
    a, b = dict(one.tensors), dict(other.tensors)
    if one.kind == other.kind == "lora":
        a, b = {"update": one.update(shape)}, {"update": other.update(shape)}
    alike = (one.kind, one.method, one.scale, a.keys()) == (other.kind, other.method, other.scale, b.keys())
    return alike and all(is_close(value, b[key], REWRITTEN) for key, value in a.items())
