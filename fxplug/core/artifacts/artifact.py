"""A rewritten model as a folder that loads without the code it came from, and never runs what it brings."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from ... import __version__
from ...blocks.base import LowRank
from ..errors import DEFAULT, ArtifactError, Limits, SpecError, quote
from ..extensions import Derivation, get_derivation
from ..hub_names import find_local, name_repository
from ..ir.containers import Container
from ..ir.graph import note_tied
from ..ir.traced_module import TracedModule, drop_forward
from ..locks import with_read_lock
from ..reading import Raises, report_errors
from ..weight_files import save_file
from ..writing import replace_folder
from .document import (
    FIXED,
    FORMAT,
    MANIFEST,
    PASS_NAME,
    AppliedPass,
    Document,
    Variant,
    check_counts,
    check_record,
    convert_errors,
    list_files,
    open_snapshot,
    parse,
)
from .graph_json import GraphReader, resolve_path, write_graph
from .modules import ModuleReader, fill, write_modules
from .tensor_records import list_state, make_records, read_tensors
from .value_json import Unportable, decode, encode, encode_portable


def check_passes(passes: Any, modules: Collection[str]) -> None:
    """Raises ArtifactError unless this is a list of passes as `apply` writes them down; `modules` are the paths there are."""
    if type(passes) is not list:
        raise ArtifactError(f"graph.json: the passes must be a list, not {quote(passes)}")
    for number, entry in enumerate(passes):
        where = f"graph.json: pass {number + 1}"
        applied = check_record(AppliedPass, entry, where)
        gates = "gates" in applied.networks
        if gates and f"{applied.name}.gates.table" not in modules:
            raise ArtifactError(f"{where} has slots, but the module '{quote(applied.name)}.gates.table' is missing")
        for index, site in enumerate(applied.sites):
            if site.bank is None:  # where the block may be the kind of operation that a pass made
                continue
            if not gates:
                raise ArtifactError(f"{where} has slots, but the network 'gates', which has their strengths, is missing")
            if site.block not in modules:
                raise ArtifactError(f"{where}, site {index + 1}: its block, the module {quote(site.block)}, is missing")


MODES = {"eval": False, "train": True}
DIGEST = re.compile(r"sha256:[0-9a-fA-F]{64}\Z")
DROPPED = ("said", "lost")  # of a bank of slots in artifacts of version 0.1: what it kept of the files of its adapters


@with_read_lock
def save(
    module: TracedModule,
    folder: str | os.PathLike[str],
    *,
    config: Mapping[str, Any] | None = None,
    overwrite: bool = True,
) -> Path:
    """Write a traced or rewritten module into a folder, which `load` reads back without the model's own code.

    The folder gets `model.safetensors`, one `<pass>.safetensors` for each applied pass, `graph.json`, `graph.txt` for reading,
    `config.yaml` if `config` is given, and `manifest.json` with a hash of each. Saving the same module twice gives the same
    bytes. Of a lowered module what it was made from is saved, `meta["source"]`, with the weights and adapters that it has now:
    load it and lower it again. A folder that is replaced is swapped whole, so that a crash leaves the old or the new one; what
    else lay in it stays. Weights on the meta device are saved as shapes.

    Args:
        module: The traced module.
        folder: The folder to write.
        config: A configuration in plain values, to be kept with it.
        overwrite: Whether an artifact that is there is replaced.

    Returns:
        The folder.

    Raises:
        ArtifactError: Something of the module cannot be saved, or the folder holds something else.
    """
    module = getattr(type(module), "as_saved", lambda given: given)(module)  # of what stands for a traced module
    if not isinstance(module, TracedModule):
        raise ArtifactError(
            f"fxplug.save takes a traced module, not a {type(module).__name__}: fxplug.trace(model, inputs) makes one"
        )
    module = _saved_form(module)
    target = Path(folder).absolute()
    raises = _unwritten(folder)
    with report_errors(raises, "cannot be written"):
        _check_target(target, overwrite)
    modules = module.modules_by_form
    document, files = _document(modules)
    data = _dump(document)
    _check_readable(data, files)
    with report_errors(raises, "cannot be written"), replace_folder(target, own=list_files) as work:
        _write_files(work, modules, data, files, config)
    return Path(folder)


def load(
    folder: str | os.PathLike[str],
    revision: str | None = None,
    *,
    allow: Sequence[str] = (),
    device: torch.device | str | None = None,
    limits: Limits = DEFAULT,
    digest: str | None = None,
) -> TracedModule:
    """Read a folder that `save` wrote. Nothing is unpickled, and only torch, fxplug and what `allow` names is imported.

    Where there is no such folder, `user/name` is a repository on the Hugging Face Hub, as `push` makes it: its manifest and the
    files that this lists are fetched into the hub's cache, and nothing else. Offline it is read from there.

    A folder that another process replaces meanwhile is read as it was before or as it is after.

    A call of what was loaded calculates with tensors, as any model does, and takes the memory and the time that they need:
    whoever does not know where a graph comes from gives its process a limit of its own. What else it can do is bounded: it
    calls functions of a closed list, reads nothing but its tensors, and its whole numbers have an end.

    Args:
        folder: The folder, or the name of a repository on the hub; `user/name@revision` has the revision in it.
        revision: A branch, a tag or a commit of the repository; None is the newest of its main branch.
        allow: Modules or packages whose classes may be imported: of result classes, which `ops.Record` stands in for otherwise,
            and of modules that were kept whole or put in by a pass.
        device: Where the weights go; None is the CPU.
        limits: Bounds of what the folder may ask of the reader.
        digest: What `fxplug.digest` gave of the folder: any other one is refused, and one of which a byte was changed.

    Returns:
        The module, in the mode in which it was saved.

    Raises:
        ArtifactError: The folder is damaged, incomplete, newer than this version, has another digest, or asks for more than is
            allowed; or the repository cannot be fetched.
        SpecError: `digest` is none, or `revision` is given for a folder.
    """
    if isinstance(allow, str):
        allow = [allow]
    if digest is not None and not (isinstance(digest, str) and DIGEST.match(digest)):
        raise SpecError(f"digest must be 'sha256:' and 64 hexadecimal digits, as fxplug.digest gives it, not {quote(digest)}")
    path = find_local(folder, "artifact", revision, limits)
    with name_repository(folder, path), open_snapshot(path, limits) as files, convert_errors(f"{folder} cannot be read"):
        if digest is not None and digest.lower() != files.digest:
            raise ArtifactError(
                f"{folder} has the digest {files.digest}, not {digest}: it was changed or is another folder. If you trust "
                "this one, take its digest (fxplug.digest)"
            )
        document = files.json("graph.json")
        for name in files.files:
            if name != "graph.json" and name not in files.weights:
                files.check(name)
        with convert_errors("graph.json cannot be used"):
            return _build(document, files.tensors(), allow, device, files.limits)


def digest(folder: str | os.PathLike[str]) -> str:
    """Give the digest of a saved folder for `load(folder, digest=...)`: `sha256:` and that of its manifest.

    The manifest has the SHA-256 of each of the other files, and `load` compares these with what it reads.

    Args:
        folder: The folder.

    Returns:
        `sha256:` and 64 hexadecimal digits.

    Raises:
        ArtifactError: The folder is no artifact, or incomplete.
    """
    with open_snapshot(Path(folder)) as files:
        return files.digest


# --- the document


def check_savable(module: TracedModule) -> list[str]:
    """The classes that `load` would have to be allowed. No values are read, and nothing is written.

    Raises ArtifactError for what `save` would refuse to write.
    """
    document, _ = _document(_saved_form(module).modules_by_form, values=False)
    return [name for name in _named_classes(document) if not name.startswith("fxplug.")]


def _named_classes(document: dict[str, Any]) -> list[str]:
    """The import paths of modules and tensors that graph.json names."""
    records = [*document["modules"].values(), *document["tensors"].values()]
    return sorted({record["class"] for record in records if ":" in record.get("class", "")})


def _saved_form(module: TracedModule) -> TracedModule:
    """What a file has of a module: what a lowered one was made from. Raises ArtifactError for one with parts of weights."""
    derivation = get_derivation(module)
    if derivation is None:
        return module
    for part in module.modules():  # a module that was lowered and then split over processes is derived twice
        if isinstance(part, Derivation) and part is not derivation:
            part.saved_form(module)
    return derivation.saved_form(module)


def _document(
    all_modules: list[TracedModule], values: bool = True
) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    """graph.json of a module and its variants, and the tensors of each weight file; none of them without `values`."""
    module, *variants = all_modules
    for part in module.modules():
        if part is not module:  # whose hooks, as those of a pipeline's offloading, are not the module's
            drop_forward(part)
    tensors, files = make_records(module, _pass_names(module), values)
    stacks: list[Any] = []
    try:
        modules = write_modules(module)
        graphs, *others = [_graphs(each, stacks) for each in all_modules]
        meta = {}
        for key, value in module.meta.items():
            with contextlib.suppress(*(() if key == "passes" else (Unportable,))):  # what else is no data is left out
                meta.update({key: encode(value)} if isinstance(key, str) else {})
    except Unportable as error:
        raise ArtifactError(f"the module cannot be saved: {error}") from None
    document = {
        "format": FORMAT,
        "classes": list(module.classes),
        "training": module.training,
        "modes": [name for name, m in module.named_modules() if m.training != module.training],
        "twin_error": module.twin_error,
        "meta": meta,
        "extras": encode_portable(module._extras),
        "tensors": tensors,
        "modules": modules,
        "stacks": stacks,
        "graphs": graphs,
    }
    if others:
        document["variants"] = [
            {"twin_error": variant.twin_error, "graphs": graphs} for variant, graphs in zip(variants, others, strict=True)
        ]
    return document, files


def _graphs(module: TracedModule, stacks: list[Any]) -> dict[str, Any]:
    return {name: write_graph(module.graphs[mode], stacks) for name, mode in MODES.items() if mode in module.graphs}


def _pass_names(module: TracedModule) -> list[str]:
    names = [entry["name"] for entry in module.meta.get("passes", [])]
    for name in names:
        if not PASS_NAME.match(name) or f"{name}.safetensors" in FIXED:
            raise ArtifactError(
                f"the name of the pass '{name}' cannot be a file name: use letters, digits and _, and not 'model'"
            )
    return names


def _check_readable(data: bytes, files: dict[str, dict[str, torch.Tensor]]) -> None:
    """Build a module of what is about to be written: better to fail while the saved one is there."""
    with convert_errors("this module cannot be saved"):
        document = parse(data)
        allow = [name.partition(":")[0] for name in _named_classes(document)]
        _build(document, ((file, name, value) for file, kept in files.items() for name, value in kept.items()), allow)


# --- writing


def _write_files(
    work: Path,
    modules: list[TracedModule],
    document: bytes,
    files: dict[str, dict[str, torch.Tensor]],
    config: Mapping[str, Any] | None,
) -> None:
    for name, tensors in files.items():
        save_file(tensors, work / name)
    (work / "graph.json").write_bytes(document)
    (work / "graph.txt").write_text(_readable(modules), encoding="utf-8")
    if config is not None:
        (work / "config.yaml").write_text(_yaml(config), encoding="utf-8")
    manifest = {
        "format": FORMAT,
        "fxplug": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "files": {path.name: {"sha256": _sha256(path), "size": path.stat().st_size} for path in sorted(work.iterdir())},
    }
    (work / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _yaml(config: Mapping[str, Any]) -> str:
    try:
        return str(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise ArtifactError(f"the configuration has a value that is not plain data: {error}") from None


def _dump(document: dict[str, Any]) -> bytes:
    """JSON with one line for each node, module and tensor, so that two artifacts can be compared by line."""
    parts = []
    for key, value in document.items():
        rows: list[str] = []
        if key in ("modules", "tensors"):
            rows = [f"{_json(k)}: {_json(v)}" for k, v in value.items()]
        elif key == "graphs":
            rows = [f"{_json(k)}: [\n" + ",\n".join(map(_json, v)) + "\n]" for k, v in value.items()]
        text = "{\n" + ",\n".join(rows) + "\n}" if rows else _json(value)
        parts.append(f"{_json(key)}: {text}")
    return ("{\n" + ",\n".join(parts) + "\n}\n").encode()


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _readable(modules: list[TracedModule]) -> str:
    parts = []
    for module, label in zip(modules, ["", *modules[0].variants], strict=True):
        for name, mode in MODES.items():
            if mode in module.graphs:
                title = {"eval": "evaluation", "train": "training"}[name] if len(module.graphs) == 2 else "both modes"
                parts.append(f"# {title}{label and f', {label}'}\n{module.graphs[mode].python_code('self').src.strip()}\n")
    return "\n".join(parts)


def _unwritten(folder: str | os.PathLike[str]) -> Raises:
    return lambda finding: ArtifactError(f"{folder} {finding}; nothing in it was changed")


def _check_target(target: Path, overwrite: bool) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ArtifactError(f"{target} is not a folder: save needs a folder of its own")
    if not target.exists() or not any(target.iterdir()):
        return
    if not overwrite:
        raise ArtifactError(f"{target} exists: save(..., overwrite=True) replaces it")
    if not (target / MANIFEST).is_file():
        raise ArtifactError(
            f"{target} has files and is not an artifact (it has no {MANIFEST}): save to another folder"
        )


# --- reading


def _build(
    data: dict[str, Any],
    stored: Iterable[tuple[str, str, torch.Tensor]],
    allow: Sequence[str],
    device: torch.device | str | None = None,
    limits: Limits = DEFAULT,
) -> TracedModule:
    """The module of a graph.json and the tensors that are stored with it, by file and name. Raises ArtifactError."""
    check_counts(data, {"tensors": limits.tensors, "modules": limits.modules, "variants": limits.variants})
    for graphs in data["graphs"].values() if isinstance(data.get("graphs"), dict) else ():
        check_counts({"nodes of a graph": graphs}, {"nodes of a graph": limits.nodes})
    document = check_record(Document, data, "graph.json")
    if document.format != FORMAT:
        raise ArtifactError(
            f"graph.json has format {document.format}, and the manifest {FORMAT}: they are from different artifacts"
        )
    records = document.tensors
    modules = ModuleReader(allow, records, limits).read(document.modules)
    tree = modules[""]
    assert isinstance(tree, Container)
    vars(tree)["classes"] = tuple(document.classes)  # a child may have that name
    banks = [path for path, m in tree.named_modules() if isinstance(m, LowRank)]
    dropped = {f"{path}.{key}" for path in banks for key in DROPPED} & records.keys()
    records = {name: record for name, record in records.items() if name not in dropped}
    names = [name for name, _, _ in list_state(tree)]
    if names != list(records):
        odd = sorted(set(names) ^ set(records)) or names
        raise ArtifactError(f"graph.json: the modules and the tensors do not match: {', '.join(map(quote, odd[:3]))}")
    called = {n for n, m in modules.items() if not isinstance(m, Container)}
    tensors = {
        f"{path}.{key}" if path else key
        for path, m in modules.items()
        for table in (m._parameters, m._buffers)
        for key in table
    }
    reader = GraphReader(called, tensors, document.stacks, allow, limits)
    graphs = _read_graphs(document, reader)
    values = read_tensors((row for row in stored if row[1] not in dropped), records, device, allow)
    fill(tree, values.__getitem__, lambda name: records[name].persistent)
    extras = {k: decode(v, None, limits) for k, v in document.extras.items()}
    kind: type[TracedModule] = TracedModule
    if document.variants:
        from ..ir.variants import Variants as kind  # few artifacts have any
    note_tied(tree, graphs.values())
    module = kind(tree, graphs, None, extras)
    _check_paths(module, graphs)
    module.twin_error = document.twin_error
    module.meta.update({k: decode(v, None, limits) for k, v in document.meta.items()})
    check_passes(module.meta.get("passes", []), modules)
    if document.variants:
        _add_variants(module, document.variants, reader)
    _set_modes(module, document, modules)
    return module


def _add_variants(module: Any, entries: Sequence[Variant], reader: GraphReader) -> None:
    """Give a `Variants` its graphs for other forms of call. Raises ArtifactError."""
    from ..ir.variants import get_inputs

    found = []
    for entry in entries:
        graphs = _read_graphs(entry, reader)
        _check_paths(module, graphs)
        found.append((graphs, entry.twin_error))
        if get_inputs(next(iter(graphs.values()))) != get_inputs(module.graph):
            raise ArtifactError("graph.json: a variant has other inputs than the model")
    module.keep_only(found)


def _check_paths(module: TracedModule, graphs: dict[bool, Any]) -> None:
    """Refuse a graph of which the code would reach anything but the modules and tensors that it names."""
    for graph in graphs.values():
        for node in graph.nodes:
            if node.op in ("get_attr", "call_module"):
                found = resolve_path(module, node.target)
                if isinstance(found, torch.Tensor) is not (node.op == "get_attr") or isinstance(found, Container):
                    raise ArtifactError(f"graph.json: node '{node.name}' uses {quote(node.target)} as something that it is not")


def _set_modes(module: TracedModule, document: Document, modules: dict[str, nn.Module]) -> None:
    twin_error, module.twin_error = module.twin_error, None  # the mode it was saved in is one it can be in
    module.train(document.training)
    module.twin_error = twin_error
    for name in document.modes:
        if name not in modules or not name:
            raise ArtifactError(f"graph.json: a mode is given for {quote(name)}, which is not a module")
        modules[name].training = not document.training


def _read_graphs(document: Variant, reader: GraphReader) -> dict[bool, Any]:
    graphs = {mode: reader.read(nodes) for name, mode in MODES.items() if (nodes := getattr(document.graphs, name))}
    if not graphs:
        raise ArtifactError("graph.json has no graph")
    return graphs
