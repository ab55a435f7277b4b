"""Passes put into a traced module, one after the other: each on a copied graph over shared weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx, nn

from .. import extensions
from ..capture.fake_tensors import no_collection, writable
from ..errors import ClashError, SpecError, shown
from ..ir.containers import CodeInGraph, Container
from ..ir.graph import Graph, copy_graph
from ..ir.traced_module import TracedModule, class_names, shell
from ..spec.rules import Pass
from .block_factory import block_class, make_block, record
from .editor import Editor
from .graft import Traces
from .matcher import find
from .opened_graph import BothModes
from .sites import Site, Sites
from .unchanged import Unchanged


def check_traced(gm: Any) -> None:
    """Raises SpecError for what passes cannot be applied to: a lowered module would be saved without them."""
    if not isinstance(gm, TracedModule):
        raise SpecError(f"apply takes a traced module, not {type(gm).__name__}: fxplug.trace(model, inputs) makes one")
    if "source" in gm.meta:
        raise SpecError("this module is lowered already: apply passes to what it was made from, meta['source'], and lower that")


def apply(gm: TracedModule, *passes: Pass | Sites) -> TracedModule:
    """The module that the passes make of `gm`, which stays as it was.

    Graph and module tree are copied, weights are shared. The passes run in the order given and each sees what the former
    left; all sites of a pass are found before any edit, or are given as `find` found them. New parameters live under
    `<pass>.<path of the site>.<BlockClass>`.

    Raises MatchError, ClashError or SpecError, with the pass's file and line; nothing is changed then.
    """
    check_traced(gm)
    with no_collection(), writable():
        for p in passes:
            gm = _apply(gm, p)
    return gm


def _apply(gm: TracedModule, given: Pass | Sites) -> TracedModule:
    if isinstance(given, Sites):
        given.check(gm)
    elif not isinstance(given, Pass):
        raise SpecError(
            f"apply takes passes, or sites as find gave them, not {shown(given)}: fxplug.load_pass reads a pass; to leave "
            "sites out, take them out of the list itself: sites[:] = [...]"
        )
    p = given.p if isinstance(given, Sites) else given
    applied = gm.meta.get("passes", [])
    if p.name in {entry["name"] for entry in applied}:
        raise ClashError(
            f"pass '{p.name}' is already applied here; give the second one a name of its own (name: {p.name}_2) "
            "if both are wanted"
        )
    if p.name in dict(gm.named_children()) or hasattr(TracedModule, p.name) or (p.slots and p.name == "adapters"):
        raise ClashError(f"the model has a module or method '{p.name}' of its own; give the pass another name (name: ...)")
    sites = given if isinstance(given, Sites) else find(gm, given)
    host, gm, p = gm, sites.joined, sites.p
    tree = shell(gm)
    owners: dict[Any, Any] = {}
    first = next((t for t in gm.parameters() if t.is_floating_point()), None)
    # in the order of the model's modules, as other libraries make theirs: one seed draws the same weights
    order = {name: index for index, (name, _) in enumerate(gm.named_modules(remove_duplicate=False))}
    made = sorted(sites, key=lambda site: order.get(site.path.partition("@")[0], len(order)))
    with _looked_at(gm, p, sites):
        blocks = {id(site): make_block(tree, site, p, owners, first) for site in made if site.rule.use is not None}
        modes, traces = dict(gm.graphs), Traces()
        try:
            graphs = _edited(modes, tree, gm, p, traces, sites, blocks)
        except BothModes:  # what is put in tells training from evaluation, which the model itself does not
            one = next(iter(modes.values()))
            graphs = _edited({True: one, False: one}, tree, gm, p, traces, sites, blocks)
    new = gm.derived(tree, graphs, passes=[*applied, record(gm, p, sites, blocks)])
    left = {(str(site.port), site.node) for site in sites} if isinstance(given, Sites) else None
    new.made_by(partial(_again, replace(p, loads=()), left), host)
    if p.loads:
        extensions.need_hook("fill_slots", "adapters")(new, p)
    return new


def _again(p: Pass, left: set[tuple[str, str]] | None, gm: TracedModule) -> TracedModule:
    """The same pass on another graph of the model, at the same places. Raises MatchError."""
    sites = find(gm, p)
    if left is not None:
        sites[:] = [site for site in sites if (str(site.port), site.node) in left]
    return _apply(gm, sites)


@contextmanager
def _looked_at(gm: TracedModule, p: Pass, sites: list[Site]) -> Iterator[None]:
    """Let blocks look at the model while they are made. Raises SpecError for what they do to it, which is taken back."""
    kinds = {site.rule.use: block_class(site.rule).__module__ for site in sites if site.rule.use is not None}
    if all(module.startswith("fxplug.blocks.") for module in kinds.values()):
        yield
        return
    before = Unchanged(gm)
    changed: dict[str, list[str]] = {}
    try:
        with before:
            yield
    except Exception as error:  # a block's, which may be the user's
        if (called := _called(error)) is None:
            raise
        path = next((k for k, m in gm.named_modules() if m is called), None)
        paths = [path] if path is not None else [k for k, m in gm.named_modules() if class_names(m) == called.classes][:3]
        raise SpecError(
            f"{p.name}: a block calls {called.classes[0]}{' (' + paths[0] + ')' if paths else ''}, a part of the model whose "
            f"code is in the graph by now: keep that part whole when the model is traced, leaf: {paths or '[its path]'}",
            where=sites[0].rule.where,
        ) from error
    finally:
        changed = before.undo()
    if changed:
        path, names = next(iter(changed.items()))
        at = next((site for site in sites if site.path.partition("@")[0] == path), sites[0])
        kind = block_class(at.rule).__name__ if at.rule.use is not None else "a block"
        more = f" and {len(changed) - 1} modules more" if len(changed) > 1 else ""
        raise SpecError(
            f"{p.name}: {kind} at '{at.node or at.path}' changes the model that it is made for: {', '.join(names)} of "
            f"'{path}'{more}; a block changes values, in its forward: put it before or after the module, or in its place, or "
            "change the model before it is traced",
            where=at.rule.where,
        )


def _called(error: BaseException | None) -> Container | None:
    """The part of a traced model whose call an error came of."""
    while error is not None and not isinstance(error, CodeInGraph):
        error = error.__cause__ or error.__context__
    return error.module if error is not None else None


def _edited(
    modes: Mapping[bool, fx.Graph],
    tree: nn.Module,
    gm: TracedModule,
    p: Pass,
    traces: Traces,
    sites: list[Site],
    blocks: Mapping[int, tuple[str, nn.Module]],
) -> dict[bool, Graph]:
    graphs = {mode: copy_graph(graph) for mode, graph in modes.items()}
    for mode, graph in graphs.items():
        Editor(graph, mode, len(graphs), tree, gm, p, traces).run(sites, blocks)
    return graphs
