"""Passes out of adapter files: which shipped pass, of which rank, holds each layer's update; and what is put into them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..core.errors import DEFAULT, ArtifactError, ClashError, Limits, SpecError, did_you_mean, quote
from ..core.hub_names import is_hub_name
from ..core.ir.regions import find_regions
from ..core.ir.traced_module import TracedModule
from ..core.rewriter.opening import find_unopened
from ..core.spec.pass_file import import_target, load_pass, open_pass
from ..core.spec.rules import COMMON, Match, Pass, Rule, is_target
from .banks import is_finite
from .contents import ModelLayer, list_layers
from .files import AdapterFile, Fit, Source, fit, read
from .loading import find_tied, load_adapter
from .own_files import check_no_own, make_pass
from .saved_heads import STATISTICS, without_heads
from .slots import Adapters
from .updates import Entry

WHOLE = "whole"  # the form of a parameter that a file has whole, which is no shipped pass's
LAYERS = ("Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding")
PATTERN = frozenset("*?{}[]:@")  # of a path with one of these a pattern has to be made that means it alone
FILE_KEYS = ("file", "strength", "adapter", "part", "partial", "guess")
KEYS = ("files", "slots", "samples", *FILE_KEYS)


@dataclass(frozen=True)
class Form:
    """A shipped pass that holds an update of one layer: its name, its rank, and its further parameters."""

    name: str
    rank: int
    rest: tuple[tuple[str, Any], ...] = ()


def forms_of(
    entry: Entry, layer: ModelLayer | None, called: bool | None, slots: bool, beside: bool = False
) -> list[Form] | str:
    """Return the passes that represent an update as it is, or the reason why there are none.

    `called` is True if the update's layer is called, False if only its weight is read, None if neither.

    An update that is no low-rank product of a layer's weight is a change of the whole parameter, as the bias beside a LoRA is
    in slots. A parameter that the file stores whole is kept as it is if there are no slots and no update of its layer is
    `beside` it.
    """
    if called is None:
        return "is never called, and nothing reads its weight, so no pass can change it"
    kind, *more = entry.kind.split("+")
    if entry.method == "whole" and not slots and not beside:
        return [Form(WHOLE, 0, (("param", entry.param),))]
    if kind == "lora" and not more and not entry.method and (entry.param != "weight" or not called):
        return [Form("lora_weight", entry.rank, (("param", entry.param),))]
    if entry.param != "weight" or layer is None or layer.kind not in LAYERS or any("dora" in one for one in more):
        return [Form("delta", 0, (("param", entry.param),))]
    if kind == "lora":
        of_all = layer.groups > 1 and len(entry.tensors["down"]) == entry.rank  # one product, of any rank, for all groups
        plain, bias = Form("lora_weight" if of_all else "lora", entry.rank), Form("delta", 0, (("param", "bias"),))
        if "bias" not in more:
            return [plain]
        return [plain, bias] if slots or of_all else [Form("lora", entry.rank, (("bias", True),))]
    if kind in ("dora", "dora by input"):
        return [Form("dora", entry.rank, (("by", kind.rpartition(" ")[2] if " " in kind else "output"),))]
    of = entry.update_kind
    options = of.options(entry.tensors, entry.rank, layer.shape) if of.options and not entry.method else None
    if options is None:
        return [Form("delta", 0, (("param", entry.param),))]
    return [Form(of.name, of.rank(entry.tensors), tuple(options.items()))]


@dataclass(frozen=True)
class FormPlan:
    """Which layers of a module get which forms for some adapters; `unheld` says by layer why it gets none.

    Those `apart` are tied to another layer that gets an update of its own, and need a rule of their own, for a block.
    """

    forms: Mapping[Form, Sequence[str]]
    fits: Sequence[Fit]
    unheld: Mapping[str, str]
    apart: Collection[str] = ()

    def as_pass(self, slots: int, name: str = "adapter", samples: str | None = None) -> Pass:
        """Return the pass with this number of slots. Raises ArtifactError or SpecError if the files have nothing for it."""
        if not self.forms:
            for found in self.fits:
                found.check()
            raise SpecError("these files have nothing that a pass with slots can take")
        rules: list[Rule] = []
        groups = [(form, [path for path in paths if path not in self.apart]) for form, paths in self.forms.items()]
        groups += [(form, [path]) for form, paths in self.forms.items() for path in paths if path in self.apart]
        for form, paths in groups:
            if not paths:
                continue
            at = [f"re:{_escaped(path)}" if PATTERN & {*path} else path for path in paths]
            rest: Any = {key: list(value) if isinstance(value, tuple) else value for key, value in form.rest}
            if form.rank:
                rest["rank"] = form.rank
            if form.name == WHOLE:
                rules.append(make_replacement_rule(at, rest["param"]))
                continue
            made = load_pass(form.name, at=at, slots=slots, **rest)
            rules += made.rules
        about = f"Slots for the adapters of {', '.join(Path(found.file.source).name for found in self.fits)}."
        return Pass(name, rules, about, slots=slots, samples=samples, expect=">=1")  # what is left has no update in the files


def make_replacement_rule(at: Sequence[str], param: str) -> Rule:
    """Return the rule that replaces a parameter of these layers."""
    return Rule(Match(tuple(at)), "fxplug.blocks:Head", place="param", port=param, options={"same": True})


def _escaped(path: str) -> str:
    return "".join(f"\\{c}" if not (c.isalnum() or c == "_") else c for c in path)


def parameters_of(module: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a module's parameters by name, without those that passes inserted."""
    added = {entry["name"] for entry in getattr(module, "meta", {}).get("passes", [])}
    return {name: tuple(p.shape) for name, p in module.named_parameters() if name.partition(".")[0] not in added}


def make_plan(
    files: Iterable[tuple[AdapterFile, Mapping[str, Any]]],
    module: Any,
    called: Mapping[str, bool] | None = None,
    slots: bool = True,
) -> FormPlan:
    """Return the plan for the adapters of some files in a module; beside each file are its `part`, `partial` and `guess`.

    `called` maps the layers that a pass can change to whether they are called, rather than read by another; None means all,
    called. `slots` is whether the passes will have slots.

    Raises ArtifactError for layers that the module lacks and for updates that no pass with slots can take, unless `partial`.
    """
    layers = list_layers(module)
    named = parameters_of(module)
    weights = {name.removesuffix(".weight"): shape for name, shape in named.items() if name.endswith(".weight")}
    weights |= {path: layer.shape for path, layer in layers.items()}
    others = {name: shape for name, shape in named.items() if not name.endswith(".weight")}
    ranks: dict[tuple[str, str, tuple[tuple[str, Any], ...]], int] = {}
    fits: list[Fit] = []
    unheld: dict[str, str] = {}
    same = find_tied(module)
    apart: set[str] = set()
    for whole, ways in files:
        file, _ = without_heads(whole, module)
        for norm in (entry for entry in file.entries if entry.method == "whole" and entry.param in STATISTICS):
            raise ArtifactError(
                f"{file.source}: '{norm.key(norm.path)}' is a statistic of a norm, which no pass holds: apply the passes, call "
                f"fxplug.trainable(new, '{norm.path}'), and load the file with load_adapter"
            )
        found = fit(file, weights, ways.get("part"), None, bool(ways.get("guess")), others, named)
        if not ways.get("partial"):
            found.check()
        fits.append(found)
        updated = {key for key, entry in found.placed.items() if entry.method != "whole" and entry.param == "weight"}
        for key, entry in found.placed.items():
            path = key if entry.param == "weight" else key.removesuffix(entry.param).removesuffix(".")
            is_called = True if called is None else called.get(path)
            made = forms_of(entry, layers.get(path), is_called, slots, path in updated)
            if slots and entry.kind == "lora+bias" and f"{path}.bias" not in named:
                made = "has a bias beside its LoRA and the layer has none, which slots do not support; use lora without slots"
            if isinstance(made, str):
                unheld[key] = made
                if not ways.get("partial"):
                    raise ArtifactError(f"{file.source}: '{key}' {made} (partial leaves it out)")
                continue
            others_of = [name for name in same.get(path, ()) if entry.param == "weight"]
            for form in made:
                for one in (path, *(others_of if entry.method == "tokens" else ())):
                    ranks[form.name, one, form.rest] = max(form.rank, ranks.get((form.name, one, form.rest), 0))
            if entry.method != "tokens" and any(name in found.placed and name not in apart for name in others_of):
                apart.add(path)
    forms: dict[Form, list[str]] = {}
    for (name, path, rest), rank in ranks.items():
        forms.setdefault(Form(name, rank, rest), []).append(path)
    return FormPlan(dict(sorted(forms.items(), key=lambda item: (item[0].name, -item[0].rank))), fits, unheld, apart)


def _called(module: TracedModule) -> dict[str, bool]:
    """Return the layers that a pass can change, with whether they are called, rather than read by another or within one
    call."""
    views = find_regions(module)
    within = {inner for regions in views for names in find_unopened(regions).values() for inner in names}
    read = {name.rpartition(".")[0] for regions in views for name in regions.readers}
    called = {region.path for regions in views for region in regions.by_key.values()}
    return {**dict.fromkeys(read | within, False), **dict.fromkeys(called, True)}


def pass_for(
    files: Source | Sequence[Source],
    gm: TracedModule,
    /,
    *,
    slots: int | None = None,
    name: str = "adapter",
    adapter: str | None = None,
    part: str | None = None,
    partial: bool = False,
    guess: bool = False,
    samples: str | None = None,
    passes: Sequence[str] | None = None,
    limits: Limits = DEFAULT,
) -> Pass:
    """Make the pass that an adapter file, or several, need: their layers, each in its form and of its rank.

    Of a file on the disk no weights are read, and `gm` may be on the meta device. LoRA becomes `lora`, DoRA, LoHa and LoKr keep
    their factors, what is none of these becomes `delta`. Nothing is loaded yet: `new = apply(gm, p)`, then
    `new.adapters.load("ink", file)`, or without slots `load_adapter(new, file)`.

    A file of fxplug's own that has passes of other kinds gives these, without slots, as one.

    Args:
        files: One file or several, as `adapters.load` takes them.
        gm: The traced module.
        slots: How many adapters there is room for; None is as many as files; with 0 the pass is one that can be trained.
        name: The name of the pass.
        adapter: Which of several adapters in a file, as in `adapters.load`.
        part: Which part of a pipeline `gm` is, as in `adapters.load`.
        partial: Whether layers that are not here are left out.
        guess: Whether layers may be taken by shape and order.
        samples: The input of the model in whose first dimension the samples are.
        passes: Which passes of a file of fxplug's own; None is all.
        limits: Bounds of what is read.

    Returns:
        The pass, for `apply`.

    Raises:
        ArtifactError: A file cannot be read, does not fit, or has updates without a place.
    """
    own = read(files, adapter=adapter, meta=True, limits=limits) if isinstance(files, (str, os.PathLike, AdapterFile)) else None
    if own is not None and own.own:
        if slots:
            check_no_own(own, "a pass with slots")
        return make_pass(own, name, passes, limits)
    if passes is not None:
        raise SpecError("passes= chooses among the passes of a file that save_adapter(as_='fxplug') wrote with several kinds")
    many: list[Source] = list(files) if isinstance(files, (list, tuple)) else [files]  # type: ignore[list-item]
    if not many:
        raise SpecError("pass_for needs at least one file")
    ways = {"part": part, "partial": partial, "guess": guess}
    slots = len(many) if slots is None else slots
    given = [(read(one, adapter=adapter, meta=True, limits=limits), ways) for one in many]
    return make_plan(given, gm, _called(gm), slots=slots != 0).as_pass(slots, name, samples)


# --- a pass that says which files it is for


@dataclass(frozen=True, repr=False)
class AdapterPass(Pass):
    """A pass of adapter files, `loads`: in a model it has the rules that they need there, and is applied with them in use."""

    loads: Sequence[Mapping[str, Any]] = field(default=(), hash=False)

    made_for_model: ClassVar[bool] = True

    def for_model(self, module: Any) -> Pass:
        """Return the pass with the rules that its files need in a model. Raises ArtifactError, or SpecError."""
        if self.rules:
            return self
        files = [(read(_source(load["file"]), adapter=load["adapter"], meta=True), load) for load in self.loads]
        made = make_plan(files, module, _called(module), slots=self.slots > 0).as_pass(self.slots, self.name)
        return replace(self, rules=made.rules, expect=made.expect if self.expect is None else self.expect)

    def fill(self, module: Any) -> None:
        """Load the adapters into the slots of the pass, and use them, or into its blocks where it has none.

        Nothing is put anywhere on the meta device, which holds no values. Raises ClashError for the name of an adapter that
        another pass has, and as `adapters.load` does.
        """
        ways = [{key: load[key] for key in ("adapter", "part", "partial", "guess")} for load in self.loads]
        if not self.slots:
            if not any(parameter.is_meta for parameter in module.parameters()):
                load_adapter(module, _source(self.loads[0]["file"]), passes=[self.name], **ways[0])
            return
        held = Adapters(module)
        if any(held.tensor(f"{owner}.gates.table.names").is_meta for owner in held.banks):
            return
        taken = [load["name"] for load in self.loads if load["name"] in held.names]
        if taken:
            raise ClashError(f"{self.name}: an adapter '{taken[0]}' is loaded already: give this one another name in 'files'")
        held.banks = {self.name: held.banks[self.name]}
        for load, way in zip(self.loads, ways, strict=True):
            held.load(load["name"], _source(load["file"]), **way)
        held.use({load["name"]: load["strength"] for load in self.loads})


def make_adapter_pass(given: Any, base: str | os.PathLike[str] | None = None) -> Pass:
    """Return the pass for the value of `adapter:`, whose rules are made once its model is known.

    `file` (with `strength`, `adapter`, `part`, `partial`, `guess`) or `files`, these by name; `slots`, `samples` and the common
    settings. Raises SpecError with a path or key below the entry.
    """
    if not isinstance(given, Mapping):
        given = {"file": given}
    if not {"file", "files"} & given.keys() and {*given} - {"name"} <= {*COMMON, *open_pass("bottleneck").params}:
        return load_pass("bottleneck", **given)  # which had this name
    common = {key: value for key, value in given.items() if key in COMMON}
    for key in given:
        if key not in (*KEYS, *COMMON):
            near = did_you_mean(str(key), (*KEYS, *COMMON))
            raise SpecError(f"no parameter '{key}'{near}; it has {', '.join(KEYS)}", key=key)
    single = {key: given[key] for key in FILE_KEYS if key in given}
    if ("files" in given) == ("file" in given) or (single and "files" in given):
        raise SpecError("give either 'file', or 'files' with a name for each")
    files = given.get("files", {})
    if "file" in given:
        files = {_stem(given["file"]): single}
    if not isinstance(files, Mapping) or not files:
        raise SpecError(f"must be a mapping of adapter names to files, not {quote(files)}", path=("files",))
    loads = [_load(name, one, base, "file" in given) for name, one in files.items()]
    slots = given.get("slots", len(loads))
    if not isinstance(slots, int) or isinstance(slots, bool) or (slots < len(loads) and slots != 0):
        raise SpecError(f"must be 0, or a whole number of {len(loads)} or more, not {quote(slots)}", path=("slots",))
    if not slots and (len(loads) > 1 or loads[0]["strength"] != 1 or given.get("samples")):
        raise SpecError("without slots there must be one file at full strength, and no 'samples'", path=("slots",))
    params = {key: value for key, value in given.items() if key not in COMMON}
    about = f"The adapters {', '.join(load['name'] for load in loads)}."
    settings: dict[str, Any] = {"name": "adapter", "about": about, "params": params, "samples": given.get("samples"), **common}
    return AdapterPass(rules=(), loads=loads, slots=slots, **settings)


def _stem(file: Any) -> str:
    return (str(file).rpartition(":")[2] if is_target(file) else Path(str(file)).stem) or "adapter"


def _load(name: Any, given: Any, base: Any, single: bool) -> dict[str, Any]:
    """Return one file's entry after checking it."""
    path: tuple[str, ...] = () if single else ("files", str(name))
    made = dict(given) if isinstance(given, Mapping) else {"file": given}
    for key in made:
        if key not in FILE_KEYS:
            raise SpecError(f"no key '{key}'{did_you_mean(str(key), FILE_KEYS)}; there are {', '.join(FILE_KEYS)}", path=path)
    file, strength = made.get("file"), made.get("strength", 1.0)
    if not isinstance(file, (str, os.PathLike)) or not str(file):
        raise SpecError(f"must be a file or folder, not {quote(file)}", path=(*path, "file"))
    if not is_finite(strength):
        raise SpecError(f"must be a finite number, not {quote(strength)}", path=(*path, "strength"))
    for key in ("partial", "guess"):
        if not isinstance(made.get(key, False), bool):
            raise SpecError(f"must be true or false, not {quote(made[key])}", path=(*path, key))
    for key in ("adapter", "part"):
        if not isinstance(made.get(key), (str, type(None))):
            raise SpecError(f"must be text, not {quote(made[key])}", path=(*path, key))
    where = str(file) if is_target(file) or is_hub_name(file, base or "") else str(Path(base or "") / file)
    return {"partial": False, "guess": False, "adapter": None, "part": None, **made, "name": str(name), "file": where,
            "strength": float(strength)}  # fmt: skip


def _source(file: str) -> Source:
    """Return the file, or the result of the function of that name."""
    if not is_target(file):
        return file
    made: Any = import_target(file)
    return made() if callable(made) else made  # type: ignore[no-any-return]


def sample() -> dict[str, torch.Tensor]:
    """Return the file for the pass's page: a LoRA of rank 4 for two layers of timm's ViT-Ti."""
    sizes = {"attn.qkv": (576, 192), "mlp.fc1": (768, 192)}
    return {
        f"base_model.model.blocks.0.{path}.lora_{half}.weight": torch.full(shape, 0.01)
        for path, (out, inner) in sizes.items()
        for half, shape in (("A", (4, inner)), ("B", (out, 4)))
    }
