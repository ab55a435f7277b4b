"""Which layers of a graph an adapter file is for."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..core.errors import ArtifactError, did_you_mean, quote
from .layer_finder import Home, LayerFinder, NameMatches, match_by_order
from .layer_names import SWAPPED, guess_family
from .own_files import check_no_own
from .tables import PARTS, read_table
from .updates import AdapterFile, Entry, add_projections, join

_COMFYS_TEXT = re.compile(r"text_encoders\.((\w+)\.)transformer\.")
DENOISERS = ("unet", "transformer", "diffusion_model")  # what tools call the one denoiser of a pipeline
WRAPPED = "(by target_parameters)"  # stands for the parameter of an entry that only the model tells
EMBEDDED = ("<", "emb_params", "bundle_emb.", "string_to_param")  # learned words lie beside the layers in some files


def split_part(name: str) -> tuple[str, str, str]:
    """Split a layer's name into the prefix that names the part of a pipeline, the part, and the path in it."""
    start = "base_model.model." if name.startswith("base_model.model.") else ""
    inner = name.removeprefix(start)
    if m := _COMFYS_TEXT.match(inner):
        return start + m[0], read_table("formats")["starts"].get(m[1], f"text_encoder_{m[2]}"), inner.removeprefix(m[0])
    for prefix, part in read_table("formats")["starts"].items():
        if inner.startswith(prefix):
            return start + prefix, part, inner.removeprefix(prefix)
    if ":" in inner:  # a layer by its number
        head, _, tail = inner.partition(":")
        return head, head, f":{tail}"
    head, dot, tail = inner.partition(".")
    return (f"{start}{head}.", head, tail) if head in PARTS and dot else (start, "", inner)


@dataclass(frozen=True)
class Fit:
    """Where the entries of a file go in a graph: `placed` by layer path, shaped as the layer's weight is.

    `missing` are entries without a layer, `mismatched` says by layer path what does not agree, `others` are the entries for
    other parts of a pipeline (text encoders), `layers` all that could have been met, and `outside` says by entry's name which
    layers of the model could not. `guessed` has, where no name fits, the layer of each entry's name by shape and order, if
    these tell: `guess=True` takes them. `homeless` has by its name in the model each parameter other than a weight that the
    file changes, and that has no home, with the name of the entry.
    """

    file: AdapterFile
    layers: Mapping[str, tuple[int, ...]]
    placed: Mapping[str, Entry]
    missing: tuple[Entry, ...] = ()
    mismatched: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, tuple[Entry, ...]] = field(default_factory=dict)
    outside: Mapping[str, str] = field(default_factory=dict)
    guessed: Mapping[str, str] = field(default_factory=dict)
    homeless: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        counts = {
            "of them zero": len(self.zero), "missing": len(self.missing), "of other shapes": len(self.mismatched),
            "without a slot": len(self.outside), "of other parts": sum(map(len, self.others.values())),
            "parameters without a pass": len(self.homeless),
        }  # fmt: skip
        more = "".join(f", {count} {name}" for name, count in counts.items() if count)
        return f"Fit({quote(str(self.file.source))}: {len(self.placed)} placed{more})"

    @property
    def assumed(self) -> list[str]:
        """Layers whose scale neither the file nor a configuration has, so that it is taken to be 1."""
        return [path for path, entry in self.placed.items() if entry.assumed]

    @property
    def zero(self) -> list[str]:
        """Layers whose update changes nothing, since a factor is zero, as in an adapter that was never trained."""
        return [path for path, entry in self.placed.items() if entry.is_zero]

    @property
    def rest(self) -> list[str]:
        """Keys of the file that are no low-rank update and may belong to this graph."""
        return [key for key in self.file.rest if not key.startswith(EMBEDDED) and split_part(key)[1] not in self.others]

    def check(self) -> Fit:
        """Return this if every entry has its layer. Raises ArtifactError with the number of others, and the nearest layers."""
        if found := self.findings():
            raise ArtifactError(f"{self.file.source}: {'; '.join(found)}")
        return self

    def findings(self) -> list[str]:
        """Describe the entries without a layer: how many of each kind, some of them, and the nearest layers or what to do."""
        found = []
        if self.missing:
            some = [f"'{e.name}'{did_you_mean(e.path, self._alike(e))}" for e in self.missing[:3]]
            of = len(self.file.entries) - sum(len(entries) for entries in self.others.values())
            like = guess_family(e.path for e in self.missing)
            like = f"; names like these are used by {like}" if like and not self.placed else ""
            text = f"{len(self.missing)} of {of} layers are not in the graph: {_listed(some, len(self.missing))}{like}"
            if self.guessed:
                some = [f"'{name}' for '{path}'" for name, path in self.guessed.items()]
                text += f" (guess=True matches them by shape and order: {_listed(some)})"
            found.append(text)
        if self.outside:
            text = f"{len(self.outside)} layers have no slots here: {_quoted(self.outside)}"
            found.append(f"{text} (apply the pass with at: {_quoted(map(_star_numbers, self.outside))} too)")
        if self.homeless:
            owners, _, params = zip(*(key.rpartition(".") for key in self.homeless), strict=True)
            way = f"at: {_quoted(map(_star_numbers, owners))} and param: {' or '.join(sorted(set(params)))}"
            text = f"{len(self.homeless)} changes of parameters fit no pass here: {_quoted(self.homeless)}"
            found.append(f"{text} (apply the pass delta with {way})")
        if self.mismatched:
            some = [f"'{path}' {text}" for path, text in self.mismatched.items()]
            found.append(f"{len(self.mismatched)} layers have other shapes: {_listed(some)}")
        if self.rest:
            found.append(f"{len(self.rest)} tensors are not part of a low-rank update: {_quoted(self.rest)}")
        return found

    def _alike(self, entry: Entry) -> Iterable[str]:
        return (path.replace(".", "_") for path in self.layers) if entry.flat else self.layers


def _star_numbers(path: str) -> str:
    """Replace each number in a path by a star."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def _listed(some: Sequence[str], number: int | None = None) -> str:
    """List the first three, with dots if there are more, of `number` in all."""
    return ", ".join(some[:3]) + (", ..." if (len(some) if number is None else number) > 3 else "")


def _quoted(names: Iterable[str]) -> str:
    return _listed([f"'{name}'" for name in dict.fromkeys(names)])


def fit(
    file: AdapterFile,
    layers: Mapping[str, Sequence[int]],
    part: str | None = None,
    model: Callable[[], Mapping[str, Sequence[int]]] | None = None,
    guess: bool = False,
    beside: Mapping[str, Sequence[int]] | None = None,
    here: Container[str] = (),
) -> Fit:
    """Find the layer of each entry among `layers`, which has the weight's shape by path.

    Tried in this order, for each entry by itself: the path as it is; without the prefix that names the part of a pipeline,
    kohya's with underscores; the names that the model's own code has (see families); then for all together the path without
    further components at its beginning, or with more. Parts of which nothing fits belong to other models, if another part
    fits. `part` names the one to use. `model` returns all weights of the model by path, if `layers` are only some: they
    identify families, and an entry for a layer that is not among `layers` is reported as such. `guess` matches the layers by
    shape and order if the file numbers them and has no names (`match_by_order`). `beside` has the shapes of parameters beside
    weights that can be stored, such as `blocks.0.norm1.bias`, and `here` the names of all parameters of the model, or their
    shapes: whole changes may name those that are no layer's as layers. None accepts them unchecked.

    Raises ArtifactError for a part that the file does not have, and if more than one layer or entry could be meant.
    """
    check_no_own(file, "this")
    shapes = {path: tuple(int(n) for n in shape) for path, shape in layers.items()}
    file, wrapped = take_parameters(file, shapes, beside or {}, here)
    bare = bare_parameters(file, {**(here if isinstance(here, Mapping) else {}), **(beside or {})})
    if part is not None and part not in file.parts:
        known = ", ".join(name or "(no name)" for name in file.parts)
        raise ArtifactError(f"{file.source} has nothing for '{part}'{did_you_mean(part, file.parts)}; it has {known}")
    groups: dict[str, list[Entry]] = {}
    for entry in file.entries:
        groups.setdefault(entry.part, []).append(entry)
    wanted = [p for p in groups if part in (None, p)]
    finder = LayerFinder(file, bare | shapes)
    found = {p: finder.match_by_name(groups[p]) for p in wanted}
    if not all(hits.is_complete for hits in found.values()):
        whole = {path: tuple(int(n) for n in shape) for path, shape in (model() if model else {}).items()}
        finder = LayerFinder(file, bare | whole | shapes, old=True)
        found = {p: max(found[p], finder.match_by_name(groups[p]), key=NameMatches.rank) for p in wanted}
    if not any(hits.good for hits in found.values()):
        found = {p: max(found[p], finder.deep(groups[p], shapes), key=NameMatches.rank) for p in wanted}
    some = any(hits.good for hits in found.values())
    taken = [p for p in wanted if found[p].good or not some]
    if some and part is None:
        taken += [p for p in wanted if p not in taken and not _is_of_another_model(p, groups[p], taken, shapes)]
    placing = [p for p in taken if p in PARTS and found[p].good]
    models = [p for p in placing if any(home and f".{p}." not in f".{home[0]}" for home in found[p].homes)]
    if models == ["transformer_2"] and "" in taken:  # names without a part are those of the first
        models = ["", *models]
    if some and len(models) > 1:  # as the two transformers of Wan 2.2
        number = [f"'{p}' ({'without such a name, ' * (not p)}{found[p].good} layers)" for p in models]
        raise ArtifactError(f"{file.source} has layers of several models: give one of {', '.join(number)} as part=")
    if not some and any(found[p].named for p in taken):
        taken = [p for p in taken if found[p].named]  # right names, wrong sizes: say that
    elif not some and len(taken) > 1:
        taken = [p for p in taken if not p.startswith("text_encoder")] or taken
    guessed: dict[str, str] = {}
    if not some and not any(found[p].named for p in taken):
        ordered = {path: shapes[path] for path in finder.shapes if path in shapes}
        for p in taken:
            if not all(":" in e.name for e in groups[p]):
                continue  # what has a name is not another layer by its shape
            try:
                hits = match_by_order(groups[p], ordered, file.source)
            except ArtifactError:
                if guess:
                    raise
                continue
            found |= {p: hits} if guess else {}
            guessed |= {e.name: home[0] for e, home in zip(groups[p], hits.homes, strict=True) if home}
    for p in taken:
        groups[p] = add_projections(groups[p], [finder.joint_shape(home) if home else None for home in found[p].homes])
    placed: dict[str, Entry] = dict(wrapped)
    missing: list[Entry] = []
    mismatched: dict[str, str] = {}
    outside: dict[str, str] = {}
    owner: dict[str, Entry] = {}
    fused: dict[tuple[str, Home], dict[str, Entry]] = {}
    more: dict[str, Entry] = {}
    homeless: dict[str, str] = {}
    for p in taken:
        for entry, home in zip(groups[p], found[p].homes, strict=True):
            if not home:
                missing.append(entry)
            elif entry.param != "weight" or home[0] in bare:
                for path, piece in finder.pieces(entry, home):
                    piece = replace(piece, param=path.rpartition(".")[2]) if path in bare else piece
                    key = path if path in bare else piece.key(path)
                    if (other := more.setdefault(key, piece)) is not piece:
                        raise ArtifactError(f"{file.source}: '{other.name}' and '{piece.name}' are both for '{key}'")
            elif not entry.fits(shape := finder.joint_shape(home)):
                path = home[0].removesuffix(SWAPPED)
                mismatched[path] = f"is {list(shape)}, and '{entry.name}' is for {_for(entry)}{_describe_remedy(entry, shape)}"
            else:
                for path, piece in finder.pieces(entry, home):
                    if path in finder.fused:
                        fused.setdefault(finder.fused[path], {})[path] = piece
                        continue
                    if path not in shapes:
                        outside[path] = entry.name
                        continue
                    if path in owner:
                        both = f"'{owner[path].name}' and '{entry.name}' are both for '{path}'"
                        choose = "" if entry.part == owner[path].part else f"; give one of {', '.join(taken)} as part="
                        raise ArtifactError(f"{file.source}: {both}{choose}")
                    owner[path] = entry
                    placed[path] = piece.shaped(shapes[path])
    for (path, parts), some_of in fused.items():
        first = next(iter(some_of.values()))
        if (why := _unfusable(some_of.values())) or path in owner:
            why = why or f"is beside '{owner[path].name}' for all of them"
            way = "trace the model after unfuse_qkv_projections()"
            mismatched[path] = f"is {', '.join(parts)} in one, and '{first.name}' {why}: {way}"
        elif path not in shapes:
            outside[path] = first.name
        else:
            whole_of = {p: entry.as_lora(finder.shapes[p]) for p, entry in some_of.items()}
            made = join(whole_of, {p: finder.shapes[p][0] for p in parts})
            placed[path] = replace(made, path=path).shaped(shapes[path])
    for key, entry in more.items():
        if beside is None:
            placed |= {} if entry.optional else {key: entry}
        elif key not in beside:
            if key in here or not entry.optional:
                homeless[key] = entry.name
        elif not entry.fits(beside[key]):
            mismatched[key] = f"is {list(beside[key])}, and '{entry.name}' is for {_for(entry)}"
        else:
            placed[key] = entry
    others = {p: tuple(entries) for p, entries in groups.items() if p not in taken}
    return Fit(file, bare | shapes, placed, tuple(missing), mismatched, others, outside, guessed, homeless)


def _unfusable(entries: Iterable[Entry]) -> str:
    """Return why the updates of layers that are one layer cannot be joined; "" if they can."""
    return next((f"is {e.method or e.kind}" for e in entries if not e.is_low_rank), "")


def _is_of_another_model(part: str, entries: Sequence[Entry], taken: Sequence[str], layers: Iterable[str]) -> bool:
    """Return whether layers of which none is here may be those of another model of the pipeline than that of the parts `taken`.

    The name of their part decides. A denoiser has one of several such names, and none in old files, where text encoders have
    theirs: layers without a part beside those of a denoiser, or that end like layers that are here, belong to no other
    model.
    """
    text = all(p.startswith("text_encoder") for p in taken)
    if part in DENOISERS:
        return not any(p in ("", *DENOISERS) for p in taken)
    if part in PARTS:
        return True
    ends = {"_" + path.replace(".", "_") for path in layers}
    return text and not any(f"_{e.path}".replace(".", "_").endswith(tuple(ends)) for e in entries)


def take_parameters(
    file: AdapterFile, shapes: Container[str], beside: Mapping[str, Sequence[int]], here: Container[str]
) -> tuple[AdapterFile, dict[str, Entry]]:
    """Return PEFT's updates of parameters that are no layer's weight, by the parameter's name; and the file without them.

    These are `in_proj_weight` of a MultiheadAttention, whose update PEFT names by the module, and with `target_parameters`
    those that they name, of which a module's first is the innermost. Raises ArtifactError if more of a module are named than
    the file has, or other ones.
    """
    found: dict[str, Entry] = {}
    groups: dict[str, list[Entry]] = {}
    for entry in file.entries:
        path = entry.path.removeprefix("base_model.model.")
        if entry.param == "weight" and path not in shapes and f"{path}.in_proj_weight" in beside and not entry.method:
            found[f"{path}.in_proj_weight"] = replace(entry, param="in_proj_weight")
        elif entry.param == WRAPPED:
            groups.setdefault(path, []).append(entry)
        else:
            continue
        file = replace(file, entries=tuple(one for one in file.entries if one is not entry))
    for path, entries in groups.items():
        known = here if isinstance(here, Mapping) and here else beside
        own = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == path]
        targets = entries[0].options["targets"]
        named = [name for name in own if any(f".{path}.{name}".endswith(f".{one}") for one in targets)]
        if len(named) != len(entries):
            names = ", ".join(own) or "no parameter"
            raise ArtifactError(
                f"{file.source}: '{path}' has {len(entries)} updates by target_parameters, which name {len(named)} of its "
                f"parameters here; it has {names}"
            )
        entries.sort(key=lambda entry: -entry.options["depth"])  # the innermost wrapper is that of the first parameter
        for name, entry in zip(named, entries, strict=True):
            found[f"{path}.{name}"] = entry.options["of"](f"{path}.{name}")
    for key, entry in found.items():
        if key in beside and not entry.fits(beside[key]):
            raise ArtifactError(f"{file.source}: '{key}' is {list(beside[key])}, and '{entry.name}' is for another shape")
    return file, found


def bare_parameters(file: AdapterFile, known: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters, no layer's weight or bias, that whole changes in a file may name as layers."""
    if not any(entry.method in ("diff", "whole") for entry in file.entries):
        return {}
    own = {name: shape for name, shape in known.items() if name.rpartition(".")[2] not in ("weight", "bias")}
    return {name: tuple(int(n) for n in shape) for name, shape in own.items()}


def _describe_remedy(entry: Entry, shape: Sequence[int]) -> str:
    """Describe what to do about PEFT's grouped convolution, or a whole layer in the file with other classes."""
    down, up = entry.tensors.get("down"), entry.tensors.get("up")
    groups = len(down) // up.shape[1] if down is not None and up is not None else 1
    if groups > 1 and down is not None and [shape[0], down.shape[1]] == [entry.sizes()[0], groups * shape[1]]:
        return (
            f" (the layer has {groups} groups, and PEFT's LoRA of it reads all channels: it is not a change of the weight, and "
            "PEFT cannot merge it either. partial=True leaves it out; LoKr or fxplug's lora can train the layer)"
        )
    value = entry.tensors.get("whole")
    if value is None or list(value.shape[1:]) != list(shape[1:]):
        return ""
    return " (it is a new layer: apply the pass head with {weights: the file} before other passes)"


def _for(entry: Entry) -> str:
    if entry.method:
        name, tensor = next(iter(entry.tensors.items()))
        return f"another, by its {name} of {list(tensor.shape)}"
    out, inner = entry.sizes()
    return str([*inner, out] if entry.embedding else [out, *inner])
