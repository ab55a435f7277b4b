"""PatchPluginBlocks with both methods around a module, whose code may be in the graph.

`pre_forward` is traced before the module and `post_forward` behind it. A plugin is one, with its weights once: what the first
method keeps on it the second one finds, as values of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...core.errors import SpecError, TraceError, did_you_mean, shown
from ...core.spec.addresses import is_pattern
from ...core.spec.rules import COMMON, Match, Pass, Rule
from ..kept_state import Call as Kept
from ..kept_state import ReadNames
from .base_classes import PatchPluginContainer
from .calls import Call, call_of
from .patch_drivers import Fed, PatchAfter, PatchBefore, PatchPlugin, check_beside
from .plugin_factory import feed, patches

if TYPE_CHECKING:
    from ...core.rewriter.sites import Site

KEYS = ("plugin", "layers", "options", "within", "wrap", "exclude_key", "also", "inputs", "feeds", "args")


class PatchAround(PatchPlugin):
    """One side of PatchPluginBlocks around a module. The last value given, and the second one returned, is what they keep."""

    def __init__(
        self, container: PatchPluginContainer, call: Call | None = None, feeds: Fed = (), side: str = "before"
    ) -> None:
        """`side` is before or after; both sides share the container."""
        super().__init__(container, call, feeds)
        self.side = side
        self.read = ReadNames()

    @classmethod
    def at(  # type: ignore[override]
        cls, site: Site, plugin: str | type, side: str, options: Mapping[str, Any] | None = None, wrap: bool = False,
        exclude_key: str | None = None, also: Sequence[Mapping[str, Any]] = (), feeds: Fed = (),
        beside: PatchAround | None = None,
    ) -> PatchAround:  # fmt: skip
        """As for PatchPlugin; `beside` is the other side. Raises SpecError for a container with a forward of its own."""
        call = call_of(site.root, site.path)
        if beside is not None:
            block = cls(beside.container, call, feeds, side)
            block.read = beside.read
            return block
        container = patches(site, plugin, options, wrap, exclude_key, also)
        if type(container).forward is not PatchPluginContainer.forward:
            raise SpecError(f"{type(container).__name__} has a forward of its own: use the pass hcp/patch")
        check_beside(site, container)
        return cls(container, call, feeds, side)

    def forward(self, x: tuple[Any, ...], *values: Any) -> Any:
        *given, left = values
        with Kept(self.container, left) as kept:
            out = self._before(x, given) if self.side == "before" else self._after(x, given[0], given[1:])
        if kept.anew:
            raise TraceError(
                f"{type(self.container).__name__}: '{kept.anew[0]}' is assigned during the call: make it in __init__, and "
                "change it in place"
            )
        self.read.names.update(kept.read)
        return out, kept.left()

    def _before(self, x: tuple[Any, ...], values: Sequence[Any]) -> Any:
        args, named, fed = self.arguments(x, tuple(values))
        self._feed(fed)
        return PatchBefore.changed(self, x, args, named)  # type: ignore[arg-type]

    def _after(self, x: tuple[Any, ...], y: Any, values: Sequence[Any]) -> Any:
        args, named, fed = self.arguments(x, tuple(values))
        self._feed(fed)
        return PatchAfter.changed(self, y, args, named)  # type: ignore[arg-type]

    def _feed(self, fed: Sequence[Any]) -> None:
        feed([plugin for _, plugin in self.container], self.feeds, fed)

    def ended(self, left: Mapping[str, Any]) -> None:
        """The forward is over and left these attributes. Raises TraceError where the next one would go on with them."""
        for name in self.read.stale(self.container, left):
            raise TraceError(
                f"{name} is read before this call has written it: it holds what the last call left. A graph keeps no "
                "Python values between calls; what lasts is a buffer that is changed in place"
            )


def around_pass(given: Any) -> Pass:
    """A pass out of what stands below `hcp/patch_around:`: two rules a layer, which hand on what its plugin keeps.

    Raises SpecError whose path is below the entry.
    """
    if not isinstance(given, Mapping):
        raise SpecError(f"must be a mapping with 'plugin' and 'layers', not {shown(given)}")
    own = {key: value for key, value in given.items() if key not in COMMON}
    for key in own:
        if key not in KEYS:
            raise SpecError(f"unknown key '{key}'{did_you_mean(key, KEYS)}; there are {', '.join(KEYS)}", key=key)
    for key in ("plugin", "layers"):
        if key not in own:
            raise SpecError(f"missing key '{key}'")
    for key in ("layers", "args"):
        if key in own and not isinstance(own[key], (str, list, tuple)):
            raise SpecError(f"must be a list, not {shown(own[key])}", path=(key,))
    layers = [own["layers"]] if isinstance(own["layers"], str) else list(own["layers"])
    if not layers:
        raise SpecError("must be a list of layers, not an empty one", path=("layers",))
    if own.get("within") or any(not isinstance(layer, str) or is_pattern(layer) for layer in layers):
        raise SpecError("the layers are listed one by one here, as a plugin keeps what it keeps at each of them; "
                        "fxplug convert hcp --model lists them", path=("layers",))  # fmt: skip
    extra = list(own.get("args", ["x[:]", "y[:]", "x[**]"]))[2:]
    options = {key: own[key] for key in ("plugin", "options", "wrap", "exclude_key", "also", "feeds") if key in own}
    rules = []
    for layer in dict.fromkeys(layers):
        kept = f"kept at {layer}"
        common: dict[str, Any] = {"match": Match(path=layer), "use": PatchAround, "name": kept}
        rules.append(
            Rule(place="before", port="x[:]", args=["x[:]", *extra, kept], options={**options, "side": "before"}, **common)
        )
        rules.append(Rule(port="y[:]", args=["x[:]", "y[:]", *extra, kept], options={**options, "side": "after"}, **common))
    common = {key: value for key, value in given.items() if key in COMMON}
    about = "The pre_forward and post_forward of PatchPluginBlocks of HCP-Diffusion around each layer, which stays."
    return Pass(rules=rules, about=about, params=own, inputs=own.get("inputs", {}), **{"name": "patch_around", **common})
