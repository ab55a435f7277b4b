"""PatchPluginBlocks of HCP-Diffusion as blocks: in the place of a module, behind it, before it, or on both sides of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from torch import nn

from ...core.errors import SpecError, TraceError, shown
from ...core.spec.addresses import is_pattern
from ...core.spec.rules import COMMON, Match, Pass, Rule
from ...core.spec.yaml_source import Section, validate
from ...core.spec.yaml_source import checked as read_by
from ..kept_state import MethodCall, ReadNames
from ..structures import checked
from .base_classes import PatchPluginBlock, PatchPluginContainer
from .calls import CallArguments, call_of
from .plugin_factory import feed, patches, running

if TYPE_CHECKING:
    from ...core.rewriter.sites import Site

Fed = Sequence[str]


class PatchPlugin(nn.Module):
    """PatchPluginBlocks in the place of a module, run by the container that their class names.

    With `also` further plugins stand at the same place, in order, as HCP-Diffusion adds them to one container.
    """

    inline: ClassVar[bool] = True
    neutral: ClassVar[bool] = False

    def __init__(
        self,
        container: PatchPluginContainer,
        call: CallArguments | None = None,
        feeds: Fed = (),
        keywords: Sequence[str] = (),
    ) -> None:
        """`call` says how the model calls the module; None that all arguments are by position."""
        super().__init__()
        self.container = container
        self.call, self.feeds, self.keywords = call, tuple(feeds), tuple(keywords)

    @classmethod
    def at(
        cls, site: Site, plugin: str | type, options: Mapping[str, Any] | None = None, wrap: bool = False,
        exclude_key: str | None = None, also: Sequence[Mapping[str, Any]] = (), feeds: Fed = (), keywords: Sequence[str] = (),
    ) -> PatchPlugin:  # fmt: skip
        """`also` has a mapping of `name`, `plugin` and `options` for each further plugin.

        The values behind x and y are `x[**]` and what is fed; in files of earlier versions those that `keywords` names, and
        what is fed.
        """
        container = patches(site, plugin, options, wrap, exclude_key, also)
        check_alone(site)
        own_code = getattr(site.module, "attributes", None) is None
        if _keeps_host(type(container)) and not own_code:
            raise SpecError(
                f"{type(container).__name__} runs the module that it patches, and the code of this {site.classes[0]} is in the "
                f"graph: keep it whole (leaf: [{site.path}]), or use the pass hcp/patch_after (post_forward) or "
                "hcp/patch_before (pre_forward), or hcp/patch_around for one with both"
            )
        return cls(container, call_of(site.root, site.path), feeds, keywords)

    def forward(self, x: tuple[Any, ...], y: Any, *values: Any) -> Any:
        args, kwargs, fed = self.arguments(x, values)
        with self.running(fed):
            out = self.container(*args, **kwargs)
            return checked(out, y, f"{type(self.container).__name__}.forward", "the module's result")

    def arguments(
        self, x: tuple[Any, ...], values: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """What the module is called with by position and by name, and what is fed."""
        by_name = self.call is not None and not self.call.count and self.call.names
        if values and isinstance(values[0], Mapping):
            named, fed = dict(values[0]), values[1:]
        else:
            named, fed = dict(zip(self.keywords, values, strict=False)), values[len(self.keywords) :]
        return () if by_name else x, named, fed

    def running(self, fed: Sequence[Any]) -> AbstractContextManager[None]:
        """One call of the plugins, see `plugin_factory.running`."""
        plugins = [plugin for _, plugin in self.container]
        return running(self.container, type(self.container).__name__, plugins, self.feeds, fed)

    def before(self, x: tuple[Any, ...], args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """What the plugins make of the module's arguments, one after the other."""
        inputs = () if args or self.call is None else self.call.names  # of those by name, what x[:] has
        kwargs = given
        for name, plugin in self.container:
            args, kwargs = plugin.pre_forward(*args, **kwargs)
            kept = [key for key in {**given, **kwargs} if key not in inputs]
            if any(key not in kwargs or key not in given or kwargs[key] is not given[key] for key in kept):
                raise TraceError(
                    f"{name}: pre_forward changes arguments that the model passes by name ({', '.join(kept)}), and this pass "
                    "changes positional ones only: for one by name write a rule with port x.name"
                )
        return checked(tuple(args) or tuple(kwargs[key] for key in inputs), x, "pre_forward", "the module's input")

    def after(self, y: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the plugins make of the module's result, one after the other."""
        out = y
        for name, plugin in self.container:
            out = plugin.post_forward(out, *args, **kwargs)
            checked(out, y, f"{name}: post_forward", "the module's result")
        return out


class HalfPatch(PatchPlugin):
    """One of the two methods of PatchPluginBlocks, beside a module that stays."""

    method: ClassVar[str]

    @classmethod
    def at(
        cls, site: Site, plugin: str | type, options: Mapping[str, Any] | None = None, wrap: bool = False,
        exclude_key: str | None = None, also: Sequence[Mapping[str, Any]] = (), feeds: Fed = (), keywords: Sequence[str] = (),
    ) -> HalfPatch:  # fmt: skip
        """As for PatchPlugin."""
        container = _half(patches(site, plugin, options, wrap, exclude_key, also), cls.method)
        check_alone(site)
        return cls(container, call_of(site.root, site.path), feeds, keywords)


class PatchAfter(HalfPatch):
    """`post_forward(output, *args)` of PatchPluginBlocks behind a module, which stays."""

    method = "post_forward"

    def forward(self, x: tuple[Any, ...], y: Any, *values: Any) -> Any:
        args, kwargs, fed = self.arguments(x, values)
        with self.running(fed):
            return self.after(y, args, kwargs)


class PatchBefore(HalfPatch):
    """`pre_forward(*args)` of PatchPluginBlocks before a module, which stays."""

    method = "pre_forward"

    def forward(self, x: tuple[Any, ...], *values: Any) -> Any:
        args, given, fed = self.arguments(x, values)
        with self.running(fed):
            return self.before(x, args, given)


class PatchAround(PatchPlugin):
    """One side of PatchPluginBlocks around a module. The last value given, and the second one returned, is what they keep."""

    def __init__(
        self, container: PatchPluginContainer, call: CallArguments | None = None, feeds: Fed = (), side: str = "before"
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
        if not _keeps_host(type(container)):
            raise SpecError(f"{type(container).__name__} has its own forward: use the pass hcp/patch")
        check_alone(site)
        return cls(container, call, feeds, side)

    def forward(self, x: tuple[Any, ...], *values: Any) -> Any:
        *given, left = values
        y = None if self.side == "before" else given.pop(0)
        args, named, fed = self.arguments(x, tuple(given))
        plugins = [plugin for _, plugin in self.container]
        with MethodCall(self.container, left) as kept:
            feed(plugins, self.feeds, fed)
            out = self.before(x, args, named) if self.side == "before" else self.after(y, args, named)
        if kept.anew:
            raise TraceError(
                f"{type(self.container).__name__}: '{kept.anew[0]}' is assigned during the call: create it in __init__, and "
                "change it in place"
            )
        self.read.names.update(kept.read)
        return out, kept.next_call_state()

    def ended(self, left: Mapping[str, Any]) -> None:
        """The forward is over and left these attributes. Raises TraceError where the next one would go on with them."""
        for name in self.read.stale(self.container, left):
            raise TraceError(
                f"{name} is read before this call has written it: it has the value from the last call. A graph stores no "
                "Python values between calls: use a buffer that is changed in place"
            )


def _keeps_host(kind: type[PatchPluginContainer]) -> bool:
    return kind.forward is PatchPluginContainer.forward


def check_alone(site: Site) -> None:
    """Refuse plugins at the place of an earlier pass's: HCP-Diffusion has them in one container, which is one pass."""
    for record in getattr(site.root, "meta", {}).get("passes", []):
        for block in [at["block"] for at in record["sites"] if at["path"] == site.path]:
            if block.rpartition(".")[2].startswith(("PatchPlugin", "PatchAfter", "PatchBefore", "PatchAround")):
                raise SpecError(
                    f"'{site.path}' has a patch of '{record['name']}' already, and HCP-Diffusion puts both into one container: "
                    "write one pass with both (also: [...]), as fxplug convert hcp --model does for the same layers and lr"
                )


def _half(container: Any, method: str) -> Any:
    """The container, if running one method of its plugins beside the module is all that it does."""
    other = "pre_forward" if method == "post_forward" else "post_forward"
    if not _keeps_host(type(container)):
        raise SpecError(f"{type(container).__name__} has its own forward: use the pass hcp/patch")
    for name, plugin in container:
        if getattr(type(plugin), other) is not getattr(PatchPluginBlock, other):
            raise SpecError(
                f"{name} ({type(plugin).__name__}) has a {other} too, and this pass runs only {method}: use the pass "
                "hcp/patch_around"
            )
    return container


# --- the pass of both sides


def _listed(value: Any) -> list[Any]:
    """A list, also of one text. Raises SpecError."""
    if not isinstance(value, (str, list, tuple)):
        raise SpecError(f"must be a list, not {shown(value)}")
    return [value] if isinstance(value, str) else list(value)


class Around(Section):
    """What stands below `hcp/patch_around:` beside the keys of all passes."""

    plugin: Any
    layers: Annotated[list[Any], read_by(_listed)]
    options: Any = None
    within: Any = None
    wrap: Any = False
    exclude_key: Any = None
    also: Any = ()
    inputs: Any = None
    feeds: Any = ()
    args: Annotated[Sequence[Any], read_by(_listed)] = ("x[:]", "y[:]", "x[**]")


def around_pass(given: Any) -> Pass:
    """A pass out of what stands below `hcp/patch_around:`: two rules a layer, which hand on what its plugin keeps.

    Raises SpecError whose path is below the entry.
    """
    params = {key: value for key, value in given.items() if key not in COMMON} if isinstance(given, Mapping) else given
    own = validate(Around, params)
    if not own.layers:
        raise SpecError("must be a list of layers, not an empty one", path=("layers",))
    if own.within or any(not isinstance(layer, str) or is_pattern(layer) for layer in own.layers):
        raise SpecError("list the layers one by one, because a plugin has its own state at each of them; fxplug convert hcp "
                        "--model does that", path=("layers",))  # fmt: skip
    options = {key: params[key] for key in ("plugin", "options", "wrap", "exclude_key", "also", "feeds") if key in params}
    rules = []
    for layer in dict.fromkeys(own.layers):
        kept = f"kept at {layer}"
        common: dict[str, Any] = {"match": Match(path=layer), "use": PatchAround, "name": kept}
        before, after = ({**options, "side": side} for side in ("before", "after"))
        extra = [*own.args[2:], kept]
        rules.append(Rule(place="before", port="x[:]", args=["x[:]", *extra], options=before, **common))
        rules.append(Rule(port="y[:]", args=["x[:]", "y[:]", *extra], options=after, **common))
    common = {key: value for key, value in given.items() if key in COMMON}
    about = "The pre_forward and post_forward of PatchPluginBlocks of HCP-Diffusion around each layer, which stays."
    return Pass(rules=rules, about=about, params=params, inputs=own.inputs or {}, **{"name": "patch_around", **common})
