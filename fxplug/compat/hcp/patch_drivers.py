"""PatchPluginBlocks of HCP-Diffusion as blocks: in the place of a module, behind it, before it, or on both sides of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from torch import nn

from ...core.errors import SpecError, TraceError, quote
from ...core.spec.addresses import is_pattern
from ...core.spec.rules import COMMON, Match, Pass, Rule
from ...core.spec.yaml_source import Section, validate
from ...core.spec.yaml_source import make_validator as read_by
from ..kept_state import ReadNames
from ..structures import check_structure
from .base_classes import PatchPluginBlock, PatchPluginContainer
from .calls import POSITIONAL, CallArguments, find_call
from .plugin_factory import TRAINED, make_patches, run_plugin

if TYPE_CHECKING:
    from ...core.rewriter.sites import Site

Fed = Sequence[str]


class PatchPlugin(nn.Module):
    """PatchPluginBlocks in the place of a module, run by the container that their class names.

    With `also` further plugins stand at the same place, in order, as HCP-Diffusion adds them to one container.
    """

    inline: ClassVar[bool] = True
    neutral: ClassVar[bool] = False
    rates: Mapping[str, Mapping[str, Any]]

    def __init__(
        self,
        container: PatchPluginContainer,
        call: CallArguments = POSITIONAL,
        feeds: Fed = (),
        keywords: Sequence[str] = (),
    ) -> None:
        """Store the container, and how the model calls the module (`call`)."""
        super().__init__()
        self.container = container
        self.call, self.feeds, self.keywords, self.rates = call, tuple(feeds), tuple(keywords), {}

    @classmethod
    def at(
        cls, site: Site, plugin: str | type, options: Mapping[str, Any] | None = None, wrap: bool = False,
        exclude_key: str | None = None, also: Sequence[Mapping[str, Any]] = (), feeds: Fed = (), keywords: Sequence[str] = (),
    ) -> Any:  # fmt: skip
        """Make the block; `also` has a mapping of `name`, `plugin` and `options`, and perhaps `lr` and `train`, for each
        further plugin.

        The values after x and y are `x[**]` and the fed inputs; in files of earlier versions those that `keywords` names, and
        the fed inputs.
        """
        check_alone(site)
        container = make_patches(site, plugin, options, wrap, exclude_key, also)
        cls.check(container, site)
        made = cls(container, find_call(site.root, site.path), feeds, keywords)
        made.rates = rates_of(also)
        return made

    @classmethod
    def check(cls, container: Any, site: Site) -> None:
        """Raise SpecError for a container that cannot run in this form at a site."""
        if _keeps_host(container) and getattr(site.module, "attributes", None) is not None:
            raise SpecError(
                f"{type(container).__name__} runs the module that it patches, and the code of this {site.classes[0]} is in the "
                f"graph: keep it whole (leaf: [{site.path}]), or use the pass hcp/patch_after (post_forward) or "
                "hcp/patch_before (pre_forward), or hcp/patch_around for one with both"
            )

    def forward(self, x: tuple[Any, ...], y: Any, *values: Any) -> Any:
        args, kwargs, fed = self.arguments(x, values)
        with run_plugin(self.container, self.feeds, fed):
            out = self.container(*args, **kwargs)
            return check_structure(out, y, f"{type(self.container).__name__}.forward", "the module's result")

    def arguments(
        self, x: tuple[Any, ...], values: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """Return the module's arguments by position and by name, and the fed inputs."""
        by_name = not self.call.count and self.call.names
        if values and isinstance(values[0], Mapping):
            named, fed = dict(values[0]), values[1:]
        else:
            named, fed = dict(zip(self.keywords, values, strict=False)), values[len(self.keywords) :]
        return () if by_name else x, named, fed

    def before(self, x: tuple[Any, ...], args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Return the module's arguments after the plugins' `pre_forward`, one after the other."""
        inputs = () if args else self.call.names  # of those by name, what x[:] has
        kwargs = given
        for name, plugin in self.container:
            args, kwargs = plugin.pre_forward(*args, **kwargs)
            kept = [key for key in {**given, **kwargs} if key not in inputs]
            if any(key not in kwargs or key not in given or kwargs[key] is not given[key] for key in kept):
                finding = f"changes arguments that the model passes by name ({', '.join(kept)})"
            elif inputs and args:
                finding = f"returns by position what the model passes by name ({', '.join(inputs)})"
            else:
                continue
            raise TraceError(
                f"{name}: pre_forward {finding}, and this pass changes arguments as the model passes them, by name only where "
                "all are: keep the module whole when the model is traced (leaf: [its path]) and use the pass hcp/patch, which "
                "calls it with what pre_forward returns, or write a rule with port x.name"
            )
        return check_structure(tuple(args) or tuple(kwargs[key] for key in inputs), x, "pre_forward", "the module's input")

    def after(self, y: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the module's result after the plugins' `post_forward`, one after the other."""
        out = y
        for name, plugin in self.container:
            out = plugin.post_forward(out, *args, **kwargs)
            check_structure(out, y, f"{name}: post_forward", "the module's result")
        return out


class HalfPatch(PatchPlugin):
    """One of the two methods of PatchPluginBlocks, beside a module that stays; they must not have the `other`."""

    other: ClassVar[str]

    @classmethod
    def check(cls, container: Any, site: Site) -> None:
        if not _keeps_host(container):
            raise SpecError(f"{type(container).__name__} has its own forward: use the pass hcp/patch")
        for name, plugin in container:
            if cls.other and getattr(type(plugin), cls.other) is not getattr(PatchPluginBlock, cls.other):
                raise SpecError(
                    f"{name} ({type(plugin).__name__}) has a {cls.other} too, and this pass does not run it: use the pass "
                    "hcp/patch_around"
                )


class PatchAfter(HalfPatch):
    """`post_forward(output, *args)` of PatchPluginBlocks behind a module, which stays."""

    other = "pre_forward"

    def forward(self, x: tuple[Any, ...], y: Any, *values: Any) -> Any:
        args, kwargs, fed = self.arguments(x, values)
        with run_plugin(self.container, self.feeds, fed):
            return self.after(y, args, kwargs)


class PatchBefore(HalfPatch):
    """`pre_forward(*args)` of PatchPluginBlocks before a module, which stays."""

    other = "post_forward"

    def forward(self, x: tuple[Any, ...], *values: Any) -> Any:
        args, given, fed = self.arguments(x, values)
        with run_plugin(self.container, self.feeds, fed):
            return self.before(x, args, given)


class PatchAround(HalfPatch):
    """One side of PatchPluginBlocks around a module. The last value given, and the second one returned, is what they keep."""

    other = ""
    side: str
    read: ReadNames

    @classmethod
    def at(cls, site: Site, side: str, beside: PatchAround | None = None, **given: Any) -> Any:  # type: ignore[override]
        """Make one side of PatchPlugin; `side` is before or after, `beside` the block of the other side, which shares the
        container."""
        if beside is None:
            block = super().at(site, **given)
        else:
            block = cls(beside.container, find_call(site.root, site.path), given.get("feeds", ()))
            block.rates = beside.rates
        block.side, block.read = side, ReadNames() if beside is None else beside.read
        return block

    def forward(self, x: tuple[Any, ...], *values: Any) -> Any:
        *given, left = values
        y = None if self.side == "before" else given.pop(0)
        args, named, fed = self.arguments(x, tuple(given))
        with run_plugin(self.container, self.feeds, fed, left or {}) as kept:
            out = self.before(x, args, named) if self.side == "before" else self.after(y, args, named)
        self.read.names.update(kept.read)
        return out, kept.next_call_state()

    def ended(self, left: Mapping[str, Any]) -> None:
        """Raise TraceError if a plugin reads an attribute that the forward before changed; `left` has the final attributes."""
        for name in self.read.stale(self.container, left):
            raise TraceError(
                f"{name} is read before this call has written it: it has the value from the last call. A graph stores no "
                "Python values between calls: use a buffer that is changed in place"
            )


def _keeps_host(container: PatchPluginContainer) -> bool:
    return type(container).forward is PatchPluginContainer.forward


def rates_of(also: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the training settings that plugins of `also` set themselves, by their place in a driver."""
    own = {f"container.{more['name']}": {key: more[key] for key in TRAINED if key in more} for more in also}
    return {part: given for part, given in own.items() if given}


def check_alone(site: Site) -> None:
    """Raise SpecError for plugins at a place where an earlier pass has some: HCP-Diffusion has them in one container, which is
    one pass."""
    for record in getattr(site.root, "meta", {}).get("passes", []):
        for block in [at["block"] for at in record["sites"] if at["path"] == site.path]:
            if block.rpartition(".")[2].startswith(("PatchPlugin", "PatchAfter", "PatchBefore", "PatchAround")):
                raise SpecError(
                    f"'{site.path}' has a patch of '{record['name']}' already, and HCP-Diffusion puts both into one container: "
                    "write one pass with both (also: [...], each with its lr), as fxplug convert hcp --model does"
                )


# --- the pass of both sides


def _listed(value: Any) -> list[Any]:
    """Return a list, also for one text. Raises SpecError."""
    if not isinstance(value, (str, list, tuple)):
        raise SpecError(f"must be a list, not {quote(value)}")
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
    """Make a pass of the mapping below `hcp/patch_around:`: two rules per layer, which pass on the plugin's attributes. two
    rules a layer, which hand on what its plugin keeps.

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
