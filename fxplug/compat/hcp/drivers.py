"""HCP-Diffusion plugins as blocks: each driver makes a plugin for its site and calls the plugin's own methods.

A driver is `inline`: what the plugin does is traced into the graph, and neither driver nor plugin is called afterwards. So a
plugin may keep values on itself from one of its methods to the next (kept_state.py), and its class is not needed to load what
is saved. The passes in passes/hcp use these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from ...core.errors import SpecError, TraceError
from ...core.ir.regions import Regions
from ...core.spec.addresses import is_pattern, parse_port, select
from ..structures import check_structure, describe, forbid_writes
from .base_classes import BasePluginBlock, MultiPluginBlock, PluginBlock, Ref
from .calls import POSITIONAL, CallArguments, find_call
from .layer_patterns import find_places, read_layers
from .patch_drivers import Fed
from .patch_drivers import PatchAfter as PatchAfter
from .patch_drivers import PatchBefore as PatchBefore
from .patch_drivers import PatchPlugin as PatchPlugin
from .plugin_factory import make, make_single, run_plugin

if TYPE_CHECKING:
    from ...core.rewriter.sites import Site


class Driver(nn.Module):
    """What the drivers of one plugin share."""

    inline: ClassVar[bool] = True
    neutral: ClassVar[bool] = False
    at: Any

    def __init__(self, plugin: BasePluginBlock, host: nn.Module, call: CallArguments = POSITIONAL, feeds: Fed = ()) -> None:
        """Store the plugin, and how the model calls the host (`call`)."""
        super().__init__()
        self.plugin, self.host, self.call, self.feeds = plugin, Ref(host), call, tuple(feeds)


class SinglePlugin(Driver):
    """A SinglePluginBlock behind a layer: gets the tuple of the layer's inputs and its result, gives the new result."""

    @classmethod
    def at(
        cls, site: Site, plugin: str | type, options: Mapping[str, Any] | None = None, wrap: bool = False,
        exclude_key: str | None = None, feeds: Fed = (),
    ) -> SinglePlugin:  # fmt: skip
        """Make the driver of a plugin: `plugin` is "module:Class", `options` its arguments. `wrap` uses `wrap_layer`, as
        `wrap_model` does."""
        made = make_single(site, plugin, options, wrap, exclude_key)
        cls.check(made, site)
        return cls(made, site.module, find_call(site.root, site.path), feeds)

    @classmethod
    def check(cls, made: Any, site: Site) -> None:
        """Raise SpecError for a plugin that changes a parameter instead of the result."""
        if made.target is not None:
            raise SpecError(
                f"{type(made).__name__} changes the parameter '{made.target}' of its layer (hook_param), not its result: "
                f"use the pass hcp/param with param: {made.target}"
            )

    def forward(self, x: tuple[Any, ...], y: Any, *fed: Any) -> Any:
        with run_plugin(self.plugin, self.feeds, fed), forbid_writes(self.plugin.name, x):
            out = self.plugin.layer_hook(self.host(), self.call.visible_arguments(x), y)  # type: ignore[operator]
            return y if out is None else check_structure(out, y, f"{self.plugin.name}: the plugin", "its layer's result")


class ParamPlugin(SinglePlugin):
    """A SinglePluginBlock with `hook_param`: gets a parameter of its layer, gives what the layer uses instead."""

    @classmethod
    def check(cls, made: Any, site: Site) -> None:
        name = str(site.port.keys[0]) if site.port.keys else "weight"
        if made.target != name:
            found = "its layer's result" if made.target is None else f"the parameter '{made.target}'"
            use = "the pass hcp/single" if made.target is None else f"param: {made.target}"
            raise SpecError(f"{type(made).__name__} changes {found}, not the parameter '{name}': use {use}")

    def forward(self, value: Any, *fed: Any) -> Any:
        with run_plugin(self.plugin, self.feeds, fed):
            return check_structure(self.plugin(value), value, f"{self.plugin.name}: the plugin", "the parameter")


class PairPlugin(Driver):
    """A PluginBlock: gets what went into and came out of one layer, and changes the result or the input of another.

    Called with the from-layer's inputs and result, then the to-layer's; a result is left out where that layer has a
    `pre_hook`, as it is not there yet.
    """

    def __init__(
        self, plugin: PluginBlock, host: nn.Module, source: nn.Module, from_pre: bool = False, to_pre: bool = False,
        call: CallArguments = POSITIONAL, from_call: CallArguments = POSITIONAL, feeds: Fed = (),
    ) -> None:  # fmt: skip
        super().__init__(plugin, host, call, feeds)
        self.source = Ref(source)
        self.from_pre, self.to_pre, self.from_call = from_pre, to_pre, from_call

    @classmethod
    def at(
        cls, site: Site, plugin: str | type, options: Mapping[str, Any] | None = None, from_pre: bool = False,
        to_pre: bool = False, feeds: Fed = (),
    ) -> PairPlugin:  # fmt: skip
        """Make the driver; `from_pre` and `to_pre` say which of the two layers had the prefix `pre_hook:`."""
        key = site.args[0].path
        _check_pairing(site, key.partition("@")[0])
        source = site.root.get_submodule(key.partition("@")[0])
        given = {
            "name": site.pass_name,
            "host_model": site.root,
            "from_layer": {"layer": source, "pre_hook": from_pre},
            "to_layer": {"layer": site.module, "pre_hook": to_pre},
        }
        made = make(plugin, PluginBlock, given, options)
        call, from_call = (find_call(site.root, path) for path in (site.path, key))
        return cls(made, site.module, source, from_pre, to_pre, call, from_call, feeds)

    def forward(self, *values: Any) -> Any:
        plugin: Any = self.plugin
        rest = list(values)
        from_in, from_out = rest.pop(0), None if self.from_pre else rest.pop(0)
        x, y = rest.pop(0), None if self.to_pre else rest.pop(0)
        with run_plugin(plugin, self.feeds, rest):
            with forbid_writes(f"{plugin.name}: from_layer_hook", from_in, from_out):
                seen = self.from_call.visible_arguments(from_in)
                unchanged(plugin.from_layer_hook(self.source(), seen, from_out), plugin.name)
            with without_result(self.to_pre, plugin.name), forbid_writes(plugin.name, () if self.to_pre else x):
                out = plugin.to_layer_hook(self.host(), self.call.visible_arguments(x), y)
            return hooked(out, x, y, self.to_pre, plugin.name, self.call)


def _check_pairing(site: Site, source: str) -> None:
    """Raise SpecError for two expressions, which HCP-Diffusion pairs by the order in which modules are registered."""
    given, target = site.rule.args[0], site.rule.match.path
    if not isinstance(given, str) or not isinstance(target, str):
        return
    pattern = parse_port(given).path
    if not is_pattern(pattern) or not is_pattern(target):
        return
    added = {entry["name"] for entry in getattr(site.root, "meta", {}).get("passes", [])}
    paths = [path for path, _ in site.root.named_modules() if path.partition(".")[0] not in added]
    there = dict(zip(select(target, paths), select(pattern, paths), strict=False)).get(site.path.partition("@")[0])
    if there != source:
        raise SpecError(
            f"'{source}' is paired with '{site.path}' in the order in which they run; HCP-Diffusion uses the order in which "
            f"modules are registered, and pairs '{there}' with it: list the layers, or convert with --model"
        )


class MultiPlugin(nn.Module):
    """A MultiPluginBlock as a network of its pass: gets the values of all its layers, gives a tuple, one for each to-layer.

    For each from-layer and then each to-layer it is called with the tuple of its inputs and, without `pre_hook`, its
    result. The hooks run in the order in which the model reaches the layers.
    """

    inline: ClassVar[bool] = True

    def __init__(
        self, plugin: MultiPluginBlock, layers: Sequence[tuple[str, bool]], hosts: Sequence[nn.Module], sources: int,
        order: Sequence[int], calls: Sequence[CallArguments] = (), feeds: Fed = (),
    ) -> None:  # fmt: skip
        """Store the plugin; `layers` are (path, pre_hook), the first `sources` of them from-layers, run in `order`."""
        super().__init__()
        self.plugin = plugin
        self.layers, self.sources, self.order = tuple(layers), sources, tuple(order)
        self.hosts = [Ref(host) for host in hosts]
        self.calls = tuple(calls or [POSITIONAL] * len(self.layers))
        self.feeds = tuple(feeds)

    def forward(self, *values: Any) -> tuple[Any, ...]:
        plugin, rest = self.plugin, list(values)
        given = [(rest.pop(0), None if pre_hook else rest.pop(0)) for _, pre_hook in self.layers]
        results: list[Any] = [None] * len(given)
        with run_plugin(plugin, self.feeds, rest):
            for number in self.order:
                (path, pre_hook), (x, y), host = self.layers[number], given[number], self.hosts[number]()
                call = self.calls[number]
                seen = call.visible_arguments(x)
                if number < self.sources:
                    with forbid_writes(f"{plugin.name}: from_layer_hook", x, y):
                        unchanged(plugin.from_layer_hook(host, seen, y, number), plugin.name)
                else:
                    where = f"{plugin.name} at '{path}' (idx {number - self.sources})"
                    with without_result(pre_hook, where), forbid_writes(where, () if pre_hook else x):
                        out = plugin.to_layer_hook(host, seen, y, number - self.sources)
                    results[number] = hooked(out, x, y, pre_hook, where, call)
        return tuple(results[self.sources :])


def multi_plugin(
    gm: Any,
    plugin: str | type,
    from_layers: Sequence[str],
    to_layers: Sequence[str],
    options: Mapping[str, Any] | None = None,
    name: str = "plugin",
    feeds: Fed = (),
) -> MultiPlugin:
    """Make a MultiPluginBlock for a traced module, as the network of the pass hcp/multi. what the pass hcp/multi names as its
    network.

    Layers are paths, with `pre_hook:` before them where the input is meant. Raises SpecError.
    """
    classes = {path: type(m).__name__ for path, m in gm.named_modules()}
    sources = find_places(read_layers(from_layers, "from_layers"), classes)
    targets = find_places(read_layers(to_layers, "to_layers"), classes)
    layers = [(place.path, place.pre_hook) for place in (*sources, *targets)]
    hosts = [gm.get_submodule(path) for path, _ in layers]
    dicts = [{"layer": host, "pre_hook": pre} for host, (_, pre) in zip(hosts, layers, strict=True)]
    given = {"name": name, "host_model": gm, "from_layers": dicts[: len(sources)], "to_layers": dicts[len(sources) :]}
    first = next(gm.parameters(), None)
    with torch.device("cpu" if first is None else first.device):
        made = make(plugin, MultiPluginBlock, given, options)
    calls = [find_call(gm, path) for path, _ in layers]
    return MultiPlugin(made, layers, hosts, len(sources), _run_order(gm, layers), calls, feeds)


def _run_order(gm: Any, layers: Sequence[tuple[str, bool]]) -> list[int]:
    """Return the numbers of the layers in the order in which the model computes their inputs or results."""
    graph = gm.graphs.get(gm.training, gm.graph)
    at = {node: index for index, node in enumerate(graph.nodes)}
    regions = Regions(graph, gm)

    def moment(number: int) -> tuple[int, int, int]:
        path, pre_hook = layers[number]
        side = 0 if pre_hook else 1
        if not path:
            return (-1 if pre_hook else len(at), side, number)
        region = regions.by_key.get(path)
        if region is None:
            raise SpecError(f"'{path}' is never called by the model, so a plugin there would never run")
        if f"{path}@1" in regions.by_key:
            raise SpecError(
                f"'{path}' is called more than once, and a MultiPluginBlock supports only layers that are called once"
            )
        if region.leaf is not None:
            nodes = [region.leaf]
        else:
            nodes = [edge[-1] for edge in (region.inputs if pre_hook else region.outputs)] or region.nodes
        positions = [at[node] for node in nodes]
        return ((min if pre_hook else max)(positions), side, number)

    return sorted(range(len(layers)), key=moment)


def hooked(out: Any, x: tuple[Any, ...], y: Any, pre_hook: bool, who: str, call: CallArguments) -> Any:
    """Return a hook's effect as in torch: None changes nothing, and a single value before a layer is its one input."""
    if out is None:
        return x if pre_hook else y
    if pre_hook:
        given = out if isinstance(out, tuple) else (out,)
        return call.joined(check_structure(given, call.visible_arguments(x), f"{who}: to_layer_hook", "its layer's input"), x)
    return check_structure(out, y, f"{who}: to_layer_hook", "its layer's result")


@contextmanager
def without_result(pre_hook: bool, who: str) -> Iterator[None]:
    """Explain why a hook before its layer fails on the missing result, as the guide's Skip does."""
    try:
        yield
    except TypeError as error:
        if not pre_hook or "NoneType" not in str(error):
            raise
        raise TraceError(
            f"{who}: to_layer_hook fails ({error}). With pre_hook it runs before its layer, so fea_out is None: compute the "
            "new input from fea_in, or drop the prefix to change the result. (HCP-Diffusion ignores the spelling prehook: and "
            "changes the result.)"
        ) from error


def unchanged(out: Any, who: str) -> None:
    """Raise TraceError if a from_layer_hook returns a value: torch would change the from-layer with it."""
    if out is not None:
        raise TraceError(
            f"{who}: from_layer_hook returns {describe(out)}, which would change its from-layer: name that layer among the "
            "to-layers, and return nothing here"
        )
