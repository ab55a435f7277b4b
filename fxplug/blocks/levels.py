"""The levels of a model at which its layers have places of a picture, each with a height and a width of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx, nn

from ..core.errors import SpecError
from ..core.spec.rules import GATES
from .places import LOST, NONE, Grid, find_places

if TYPE_CHECKING:
    from ..core.rewriter.sites import Site


def list_grids(graph: fx.Graph, root: nn.Module, latents: str) -> list[Grid]:
    """List the grids of the layers of a model that have places of a picture.

    Args:
        graph: Of a traced module.
        root: That module.
        latents: The name of the node with the latents.

    Returns:
        Each grid once.
    """
    found = find_places(graph, root, latents)
    known = [found.get(node.name, NONE) for node in graph.find_nodes(op="call_module")]
    return list(dict.fromkeys(one.grid for one in known if one not in (NONE, LOST)))


def check_latents(gm: nn.Module, latents: str) -> bool:
    """Check that an input of a traced module has the latents of a picture.

    Args:
        gm: The module.
        latents: The name of the node.

    Returns:
        Whether there are places at all: not in a model of words, (batch, tokens).

    Raises:
        SpecError: For an input that has none, such as a video, or words among its tokens.
    """
    graph: Any = gm.graph
    shape = next(node.meta["shape"] for node in graph.nodes if node.name == latents)
    if len(shape) == 2:
        return False
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    video = len(shape) == 5 or (len(shape) == 3 and any("frame" in name or "video" in name for name in names))
    mixed = len(shape) == 3 and any("indicator" in name for name in names)  # which tokens are words and which the picture's
    if len(shape) == 3 and not video and not mixed:
        found = find_places(graph, gm, latents)
        results = [found.get(node.name, NONE) for node in graph.output_node().all_input_nodes]
        if any(len(one.dims) == 1 and not one.text for one in results):
            return True
    if len(shape) != 4:
        name = latents.removeprefix("in_")
        of = " as of a video" if video else " with words among the tokens" if mixed else ""
        raise SpecError(
            f"regions are places of a picture, and the input with the samples, '{name}', is {list(shape)}{of}: name the "
            "latents, (batch, channels, height, width), or tokens (batch, tokens, channels) that the model gives back, with "
            "'samples', or leave regions out"
        )
    return True


def find_level(site: Site, batch_dim: int) -> tuple[int, str]:
    """Find which places the result of a layer has.

    Args:
        site: That of the layer, in a pass with regions.
        batch_dim: The dimension of its samples.

    Returns:
        The position of its grid in the levels of the pass, from 1 on, 0 for a layer without places; and where tokens without
        places are beside those.

    Raises:
        SpecError: For a layer whose places are not known, and for one that is called for several kinds of values.
    """
    table: Any = site.root.get_submodule(f"{site.pass_name}.{GATES}.table")
    levels, latents = table.levels, table.latents
    if not latents:
        return 0, ""
    if site.y is None or (node := site.y.node) is None:
        raise SpecError("with regions a layer has one result, whose places are known: leave it out of `at`, or regions out")
    shared = node.op == "call_module" and not any("@" in pattern for pattern in site.rule.match.patterns)
    calls = list(node.graph.find_nodes(op="call_module", target=node.target)) if shared else [node]
    found = find_places(node.graph, site.root, latents)
    known = list(dict.fromkeys((one.grid, one.text) if (one := found.get(call.name, NONE)) != NONE else NONE for call in calls))
    if len(known) > 1:
        raise SpecError(
            "with regions each call of a layer has to be at the same places of the picture, and this one is called "
            f"{len(calls)} times at others: leave it out of `at`, or regions out"
        )
    for call in calls:
        own, shape = found.get(call.name, NONE), call.meta["shape"]
        picture = own.dims == (2, 3) if len(shape) == 4 and "_ConvNd" in site.classes else own.dims == (2,)
        rows = own.dims in ((1,), (1, 2)) if batch_dim == 0 else own.dims == (0,)
        fits = (picture and batch_dim == 0) if "_ConvNd" in site.classes else rows and len(shape) == len(own.dims) + 2
        batch = site.args[3].shape[0]  # of the slots that samples take
        if own != NONE and not (fits and batch_dim in (0, 1) and shape[batch_dim] == batch):
            raise SpecError(
                f"where its result {list(shape)} has the places of the picture is not known, as it is not computed from the "
                "latents by layers, attention and changes of shape alone: leave it out of `at`, or regions out"
            )
    own = found.get(node.name, NONE)
    return (0, "") if own == NONE else (1 + levels.index(make_plain(own.grid)), own.text)


def make_plain(grid: Grid) -> list[Any]:
    """Return a grid in lists, as a saved module has it."""
    return [[list(step) for step in steps] for steps in grid]
