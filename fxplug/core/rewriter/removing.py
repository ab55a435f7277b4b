"""A pass taken out of a traced module again, on copied graphs: who read what it put in reads what was there before."""

from __future__ import annotations

from functools import partial

from torch import fx

from ..errors import SpecError, did_you_mean
from ..extensions import get_derivation
from ..ir.graph import Graph, erase, redirect
from ..ir.traced_module import TracedModule, check_traced, copy_graphs, strip_to_container


def remove(module: TracedModule, name: str) -> TracedModule:
    """Take a pass out again: the module without it, on the same weights; `module` stays as it was.

    Works on a loaded module, too, and on one that `lower` or `parallelize` made, which is lowered or split again. The results
    are those of the module to which the other passes were applied alone.

    What a pass with `place: param` leaves (`dora`, `loha`, `oft`, `bitfit`, ...): the layers whose parameters it changed stay
    written out as their functions on the same weights, as `diff` with the module before shows. The results are equal, and
    passes find these layers as before; hooks on them are an error, as no graph calls the layers themselves any more. Where that
    matters, trace the model again.

    Args:
        module: The rewritten module.
        name: The name of the pass.

    Returns:
        The module without the pass.

    Raises:
        SpecError: No pass has this name, it replaced something, which is no longer in the graph, or another pass reads what it
            put in and has to go first.
    """
    check_traced(module, "remove")
    if "unmerged" in module.meta:
        raise SpecError(f"'{name}' is merged into the weights: remove it from what fxplug.unmerge(module) gives")
    if (derivation := get_derivation(module)) is not None:
        return derivation.rebuild(module, lambda source: remove(source, name))
    entries = module.meta.get("passes", [])
    entry = next((entry for entry in entries if entry["name"] == name), None)
    names = [entry["name"] for entry in entries]
    if entry is None:
        raise SpecError(f"no pass '{name}' is applied here{did_you_mean(name, names)}; there are {', '.join(names) or 'none'}")
    if (replaced := next((site["path"] for site in entry["sites"] if site["place"] == "replace"), None)) is not None:
        raise SpecError(
            f"'{name}' has replaced '{replaced}', which is no longer in the graph: trace the model again, and apply "
            f"{', '.join(other for other in names if other != name) or 'the other passes'}"
        )
    tree, graphs = strip_to_container(module), copy_graphs(module)
    for graph in graphs.values():
        _take_out(graph, name)
    tree._modules.pop(name, None)
    new = module.derived(tree, graphs, passes=[other for other in entries if other is not entry])
    return new.made_by(partial(remove, name=name), module)


def _take_out(graph: Graph, name: str) -> None:
    by_name = {node.name: node for node in graph.nodes}
    mine = [node for node in graph.nodes if _owner(node) == name]
    opened = [node for node in mine if node.meta["pass"].get("region") and node.meta["pass"].get("place") == "param"]
    for node in opened:  # the code of a layer, in the place of its call
        del node.meta["pass"]
    mine = [node for node in mine if "pass" in node.meta]
    for node in reversed(mine):
        if (before := node.meta["pass"].get("instead")) is None:
            continue
        value = by_name.get(before)
        if value is None:
            raise SpecError(
                f"'{name}' cannot be removed: a later pass has opened the layer at '{node.meta['pass'].get('site')}', and the "
                "value before it is not in the graph; trace the model again"
            )
        redirect(node, value)
        for other in graph.nodes:
            made_by = other.meta.get("pass", {})
            if made_by.get("instead") == node.name:
                other.meta["pass"] = {**made_by, "instead": value.name}
            if other.meta.get("behind") == node.name:
                other.meta["behind"] = value.name
    gone = set(mine)
    for node in mine:
        if (reader := next((user for user in node.users if user not in gone), None)) is not None:
            _refuse(name, node, reader)
    for node in graph.nodes:
        if node not in gone and node.op in ("get_attr", "call_module") and str(node.target).startswith(f"{name}."):
            raise SpecError(f"'{name}' cannot be removed: '{_owner(node)}' uses its '{node.target}': remove that pass first")
    erase(mine)
    graph.lint()


def _owner(node: fx.Node) -> str:
    return str(node.meta.get("pass", {}).get("name", ""))


def _refuse(name: str, node: fx.Node, reader: fx.Node) -> None:
    if other := _owner(reader):
        raise SpecError(
            f"'{name}' cannot be removed: pass '{other}' reads '{node.name}', which it put in: remove '{other}' first"
        )
    raise SpecError(
        f"'{name}' cannot be removed: the model reads '{node.name}', and the graph does not say what stood there before, as "
        "one that an earlier version saved: trace the model again, and apply the other passes"
    )
