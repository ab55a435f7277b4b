"""What a page says, gathered from a module and from the folder that it was saved in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..blocks.step_marks import Mark
from ..config.flow import load_run_record
from ..core.errors import ArtifactError, FxplugError, SpecError
from ..core.ir.traced_module import TracedModule, list_class_names
from ..core.reading import read_json
from ..core.verifier import Report, is_split
from ..lowerings.hoist.hoisted import HoistedModule
from ..lowerings.hoist.listing import make_cells
from ..lowerings.pipeline import list_layer_forms
from ..step_cache.slices import Slices
from .contents import Page, PassRow, SiteRow, TableSection
from .kinds import Kinds
from .records import GraphText, NodeText, find_changes, make_listing, undo_changes

BINS = 48  # parts of the model in the chart of what is added where
VERSIONS = ("fxplug", "torch", "python")


def gather_contents(
    base: TracedModule | None, new: TracedModule, *, checks: Report | None = None, manifest: Mapping[str, Any] | None = None
) -> Page:
    """Return the contents of the page of a module. `base` is the module before; None uses what was saved with `new`.

    `checks` is the report of verification, by default the saved one; `manifest` is that of the module's artifact.
    """
    entries = new.meta.get("passes", [])
    after = make_listing(new)
    changed = find_changes(base, new) if base is not None else (load_run_record(new) or {}).get("changes")
    earlier = [entry["name"] for entry in base.meta.get("passes", [])] if base is not None else []
    sizes, total = _sizes(new, [entry["name"] for entry in entries])
    added = _added(new, after)
    gone = changed["classes"] if changed else {}
    kinds = Kinds(after, undo_changes(after, changed), sizes, added, gone)
    page = Page(
        title=new.classes[0], model=new.classes[0], facts=_facts(new, after, manifest), parameters=total, base=sizes.get("", 0),
        kinds=kinds.kinds, root=kinds.root, known_before=changed is not None or not entries,
    )  # fmt: skip
    page.passes = [_pass(new, entry) for entry in entries]
    page.sites = [row for entry in entries for row in _sites(new, entry, after, added)]
    page.depth = _depth(after, added)
    found = checks.json()["checks"] if checks is not None else (load_run_record(new) or {}).get("checks")
    page.checks = found and [{key: str(check[key]) for key in ("name", "status", "detail")} for check in found]
    page.tables = _tables(new, after)
    page.facts |= {"measured against": ", ".join(earlier)} if earlier else {}
    page.files = _files(manifest)
    return page


def _facts(new: TracedModule, after: GraphText, manifest: Mapping[str, Any] | None) -> dict[str, str]:
    kinds = Counter(str(p.dtype).removeprefix("torch.") for p in new.parameters())
    modes = " and ".join(f"{len(graph.nodes):,}" for graph in new.graphs.values())
    said = {
        "weights": ", ".join(kind for kind, _ in kinds.most_common()) or "none",
        "graph": f"{modes} nodes" + (", one graph for each mode" if len(new.graphs) > 1 else ""),
        "inputs": ", ".join(_value(r) for r in after.records.values() if r.kind == "input"),
    }
    if new.variants:
        said["variants"] = "; ".join(new.variants)
    if manifest is not None:
        said |= {name: str(manifest[name]) for name in VERSIONS if name in manifest}
    return said


def _value(record: NodeText) -> str:
    return f"{record.path or record.name} {list(record.shape)}" if record.shape is not None else record.path or record.name


def _sizes(module: nn.Module, passes: list[str]) -> tuple[dict[str, int], int]:
    """Return the number of parameters of the model below each path, none counted twice in one, and that of all with the
    passes'."""
    sizes: Counter[str] = Counter()
    total, seen = 0, set()
    owners = set(passes)
    for name, parameter in module.named_parameters():
        total += parameter.numel()
        if id(parameter) in seen or name.partition(".")[0] in owners:
            continue
        seen.add(id(parameter))
        path = name
        while path:
            path = path.rpartition(".")[0]
            sizes[path] += parameter.numel()
    return dict(sizes), total


def _added(module: TracedModule, after: GraphText) -> dict[str, int]:
    """Return the number of parameters of each block by its node; 0 for a block that is called again."""
    seen: set[int] = set()
    found = {}
    for record in after.records.values():
        if record.owner and record.path and record.kind in ("block", "layer", "weight"):
            home, _, key = record.path.rpartition(".")
            read = getattr(module.get_submodule(home), key) if record.kind == "weight" else None
            every = list(module.get_submodule(record.path).parameters()) if read is None else [read]
            own = [p for p in every if isinstance(p, nn.Parameter) and id(p) not in seen]
            seen.update(map(id, own))
            found[record.name] = sum(p.numel() for p in own)
    return found


def _pass(module: TracedModule, entry: Mapping[str, Any]) -> PassRow:
    own = module._modules.get(entry["name"])
    count = sum(p.numel() for p in own.parameters()) if own is not None else 0
    params = dict(entry.get("params") or {})
    inputs = [str(name) for name in entry.get("inputs", [])]
    return PassRow(str(entry["name"]), str(entry.get("about", "")), params, len(entry["sites"]), count,
                   bool(entry.get("neutral")), bool(entry.get("train")), int(entry.get("slots") or 0), inputs)  # fmt: skip


def _sites(module: TracedModule, entry: Mapping[str, Any], after: GraphText, added: Mapping[str, int]) -> list[SiteRow]:
    blocks: dict[str, NodeText] = {}
    for record in after.records.values():
        if record.owner == entry["name"]:
            blocks.setdefault(record.path or record.site, record)
    modules = dict(module.named_modules(remove_duplicate=False))
    rows = []
    for site in entry["sites"]:
        path, block = str(site["path"]), str(site.get("block") or "")
        there, own, node = modules.get(path.partition("@")[0]), modules.get(block), after.records.get(path)
        rows.append(
            SiteRow(
                owner=str(entry["name"]),
                path=path,
                label=list_class_names(there)[0] if there is not None else node.label if node is not None else "",
                place=str(site.get("place", "")),
                shapes=_shapes(blocks.get(block) or blocks.get(path), after),
                block=list_class_names(own)[0] if own is not None else block,
                parameters=sum(p.numel() for p in own.parameters()) if own is not None else 0,
                at=path if there is not None or node is None else node.level[-1],
            )
        )
    return rows


def _shapes(record: NodeText | None, after: GraphText) -> str:
    if record is None:
        return ""
    given = next((after.records[name].shape for name in record.reads if name in after.records), None)
    ends = [list(shape) for shape in (given, record.shape) if shape is not None]
    return " -> ".join(map(str, ends[:1] if len(ends) > 1 and ends[0] == ends[1] else ends))


def _depth(after: GraphText, added: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the parameters that passes add along the model, in parts of as many layers each, with the first and last layer."""
    layers = [r for r in after.records.values() if r.kind in ("layer", "block") or r.name in added]
    if not any(added.values()):
        return []
    parts = min(BINS, len(layers))
    found: list[dict[str, Any]] = [{"from": "", "to": "", "added": {}} for _ in range(parts)]
    for index, record in enumerate(layers):
        part = found[index * parts // len(layers)]
        place = record.site or record.path
        part["from"] = part["from"] or place
        part["to"] = place
        if count := added.get(record.name):
            part["added"][record.owner] = part["added"].get(record.owner, 0) + count
    return found


# --- further sections


def _tables(module: TracedModule, after: GraphText) -> list[TableSection]:
    found = [_forms(module), _slots(module), *_collectives(module, after), _cached(module, after), _inputs(module, after)]
    return [table for table in found if table is not None and table.rows]


def _forms(module: TracedModule) -> TableSection | None:
    if not module.meta.get("forms"):
        return None
    rows = [[path, form] for path, form in list_layer_forms(module).items()]
    return TableSection("Forms", "How each layer with a block is computed in this lowered module.", ["layer", "form"], rows)


def _slots(module: TracedModule) -> TableSection | None:
    if not any(entry.get("slots") for entry in module.meta.get("passes", [])):
        return None
    adapters = module.adapters
    title, about = "Adapters", "The adapters in the slots, and the strength of each."
    try:
        active = adapters.active
        said = active if isinstance(active, dict) else {}
        mixed = "" if isinstance(active, dict) else "by sample"
        rows = [
            [name, owner, str(index), mixed or f"{said.get(name, 0):g}", _ranks(module, owner)]
            for owner in adapters.banks
            for index, name in enumerate(adapters.names_of(owner))
            if name
        ]
    except SpecError as error:
        rows, about = [["", name, "", "", _ranks(module, name)] for name in adapters.banks], str(error)
    if not rows:
        about = f"{adapters.slots} slots, none of them taken."
        rows = [["", name, "", "", _ranks(module, name)] for name in adapters.banks]
    return TableSection(title, about, ["adapter", "pass", "slot", "strength", "rank up to"], rows)


def _ranks(module: TracedModule, owner: str) -> str:
    found = {getattr(m, "rank", None) for m in module.get_submodule(owner).modules()}
    ranks = sorted(rank for rank in found if isinstance(rank, int))
    return f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}" if ranks else ""


def _collectives(module: TracedModule, after: GraphText) -> list[TableSection]:
    tables = []
    for entry in module.meta.get("passes", []):
        if not is_split(module, entry["name"]):
            continue
        ways = " x ".join(f"{key} {n}" for key, n in (entry.get("params") or {}).items())
        records = [r for r in after.records.values() if r.owner == entry["name"]]
        options = {r.name: module.get_submodule(r.path).extra_repr() for r in records if r.path}
        rows = [[r.label, r.site or r.name, options[r.name], _shapes(r, after)] for r in records if r.path]
        about = f"One graph for every process ({ways}): where it is split, where values travel. Shapes are of the whole."
        tables.append(TableSection(f"Parallel: {entry['name']}", about, ["what", "at", "options", "shape"], rows))
    if plan := module.meta.get("plan"):
        rows = [[text] for text in plan.listing.splitlines()]
        tables.append(TableSection("Plan", "What the plan found.", [""], rows))
    return tables


def _cached(module: TracedModule, after: GraphText) -> TableSection | None:
    """Return the table of the values that a step cache keeps from step to step."""
    if not any(isinstance(m, Mark) for m in module.modules()):
        return None
    try:
        slices = Slices(module.graph, module)
    except SpecError as error:
        return TableSection("Step cache", str(error), ["kept", "pass", "shape", "how"], [])
    rows = [
        [cut.name or cut.node.name, cut.owner, str(list(cut.node.meta.get("shape", ()))),
         "the difference from what enters" if cut.base is not None else "as it is"]
        for cut in slices.cuts.values()
    ]  # fmt: skip
    rows += [[node.name, "", str(list(node.meta.get("shape", ()))), "gauge: decides whether a step is taken"]
             for node, _ in slices.gauges]  # fmt: skip
    later, every = slices.operations(slices.later), slices.operations(slices.flow.nodes)
    about = f"What a StepCache keeps. A step that takes it from an earlier one runs {later:,} of {every:,} operations."
    return TableSection("Step cache", about, ["value", "pass", "shape", "how"], rows)


def make_stage_table(hoisted: HoistedModule) -> TableSection:
    """Make the table of the stages of a hoisted module."""
    head, *rows = make_cells(hoisted.stages)
    groups = hoisted.groups
    named = f"Conditions: {', '.join(groups.conditions) or 'none'}; time: {', '.join(groups.time) or 'none'}"
    about = f"What `lower(hoist=...)` computes once. {named}. A parameter is of the last stage that reads it."
    if hoisted.obstacle:
        about += f" Nothing is kept of the last call: {hoisted.obstacle}."
    return TableSection("Stages", about, list(head), [list(row) for row in rows])


def _inputs(module: TracedModule, after: GraphText) -> TableSection | None:
    rows = [[r.path, r.owner, r.line.partition(" = ")[2]] for r in after.records.values() if r.kind == "input" and r.owner]
    return TableSection("New inputs", "Inputs of the model that passes added.", ["input", "pass", "default"], rows)


# --- folders


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest in a folder, unchecked; None if there is none. Raises ArtifactError for one that is no JSON."""
    file = folder / "manifest.json"
    if not file.is_file():
        return None
    found = read_json(file)
    if not isinstance(found, dict):
        raise ArtifactError(f"{file} is not a JSON object")
    return found


def make_error_page(folder: Path, manifest: Mapping[str, Any], error: FxplugError | Exception) -> Page:
    """Return the page of an artifact that does not load: the error, and the facts of its manifest."""
    facts = {name: str(manifest[name]) for name in VERSIONS if name in manifest}
    why = str(error) if isinstance(error, FxplugError) else f"{type(error).__name__}: {error}"
    return Page(title=folder.name, facts=facts, files=_files(manifest), trouble=why)


def _files(manifest: Mapping[str, Any] | None) -> dict[str, dict[str, str]]:
    """Return the files that a manifest, which may be anything, lists."""
    files = (manifest or {}).get("files")
    rows = files.items() if isinstance(files, dict) else ()
    plain = {str(name): row for name, row in rows if isinstance(row, dict)}
    return {name: {key: str(row.get(key, "")) for key in ("size", "sha256")} for name, row in plain.items()}
