"""Opening of torch.nn's own composite modules, which are one call each, where a pass names what is in them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx, nn

from ..ir.graph import Graph, copy_graph
from ..ir.regions import Regions, find_regions
from ..ir.traced_module import TracedModule, strip_to_container
from ..spec.rules import Pass, Rule
from .graft import DiffersBetweenModes, OpenedGraph, Traces
from .matches import find_composites, find_hits, is_catch_all, select_parameters, without_classes


def open_for(gm: TracedModule, p: Pass) -> TracedModule:
    """Return the traced module with those composites opened in which a rule of the pass names a module; or itself.

    A pattern that names no place (`**`, `all-linear`) opens nothing. Raises TraceError or SpecError for one whose code cannot
    be recorded.
    """
    while paths := [path for regions in find_regions(gm) for path in _named(regions, p)]:
        gm = open_composites(gm, set(paths), p)
    return gm


def open_composites(gm: TracedModule, paths: Collection[str], p: Pass) -> TracedModule:
    """Return the traced module with the calls of these modules replaced by their code, as part of a pass."""
    tree, traces = strip_to_container(gm), Traces()

    def edited(modes: Mapping[bool, fx.Graph]) -> dict[bool, Graph]:
        graphs = {mode: copy_graph(graph) for mode, graph in modes.items()}
        for mode, graph in graphs.items():
            editor = OpenedGraph(graph, mode, len(graphs), tree, gm, p, traces)
            for region in [r for r in editor.regions.by_key.values() if r.leaf is not None and r.path in paths]:
                editor.open(region, "what is in it")
            graph.lint()
        return graphs

    modes = dict(gm.graphs)
    try:
        graphs = edited(modes)
    except DiffersBetweenModes:  # it tells training from evaluation, which the rest of the model does not
        one = next(iter(modes.values()))
        graphs = edited({True: one, False: one})
    return gm.derived(tree, graphs)


def find_unopened(regions: Regions) -> dict[str, list[str]]:
    """Return the composites that a graph calls, each with the paths of the modules in it."""
    leaves = {region.path for region in regions.by_key.values() if region.leaf is not None and region.path}
    known = {path: module for path, module in find_composites(regions.root).items() if path in leaves}
    return {path: [f"{path}.{name}" for name, _ in module.named_modules() if name] for path, module in known.items()}


def reads_weights_directly(root: nn.Module, path: str) -> bool:
    """Return whether the module around another reads its weights without calling it: `out_proj` of an attention."""
    return isinstance(root.get_submodule(path.rpartition(".")[0]), nn.MultiheadAttention)


def _named(regions: Regions, p: Pass) -> list[str]:
    """Return the composites of a graph in which a rule names a module that it can act on."""
    inside = {inner: path for path, names in find_unopened(regions).items() for inner in names}
    known = regions.with_modules(inside)
    return [
        inside[hit.key]
        for rule in p.rules
        if inside and not rule.match.op
        for hit in find_hits(known, without_classes(rule.match))
        if hit.key in inside and not is_catch_all(rule.match.patterns[hit.pattern]) and _acts(known, rule, hit.key)
    ]


def _acts(regions: Regions, rule: Rule, path: str) -> bool:
    """Return whether a rule can act on a module in a composite, once that is open."""
    if rule.place == "param":
        return bool(select_parameters(regions, path, rule.match, rule.port or "weight"))
    return not reads_weights_directly(regions.root, path)
