"""Plugins of HCP-Diffusion, made and fed as HCP-Diffusion does it, with what it lets pass in silence as an error."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...core.errors import FxplugError, SpecError, TraceError, did_you_mean, format_path, quote
from ...core.ir.containers import CodeInGraph, Container
from ...core.ir.regions import Regions
from ...core.spec.addresses import compile_expression
from ...core.spec.pass_file import check_options, get_arguments, import_target
from ...core.spec.rules import check_common
from ..kept_state import MethodCall
from .base_classes import (
    MAKING,
    BasePluginBlock,
    MultiPluginBlock,
    PatchPluginBlock,
    PluginBlock,
    PluginContext,
    SinglePluginBlock,
)

if TYPE_CHECKING:
    from ...core.rewriter.sites import Site


TRAINED = ("lr", "train")  # what one of several plugins in a container may have of its own


def make_single(site: Site, plugin: str | type, options: Mapping[str, Any] | None, wrap: bool, exclude_key: str | None) -> Any:
    """Make a SinglePluginBlock for a site. Raises SpecError."""
    _refuse_excluded(site, exclude_key)
    given = {"name": site.pass_name, "host": site.module, "host_model": site.root}
    return make(plugin, SinglePluginBlock, given, options, wrap)


def make_patches(
    site: Site, plugin: str | type, options: Mapping[str, Any] | None, wrap: bool, exclude_key: str | None,
    also: Sequence[Mapping[str, Any]],
) -> Any:  # fmt: skip
    """Make the container of the PatchPluginBlocks of a site. Raises SpecError."""
    _refuse_excluded(site, exclude_key)
    parent, _, own = site.path.partition("@")[0].rpartition(".")
    given = {"host_model": site.root, "parent_block": site.root.get_submodule(parent), "host_name": own}
    host, container = site.module, None
    first = {"name": site.pass_name, "plugin": plugin, "options": options, "wrap": wrap}
    for entry in [first, *also]:
        unknown = [key for key in entry if key not in (*first, *TRAINED)]
        if unknown:
            raise SpecError(f"also: unknown key '{unknown[0]}'{did_you_mean(unknown[0], (*first, *TRAINED))}")
        try:
            check_common({key: entry[key] for key in TRAINED if key in entry})
        except SpecError as error:
            raise SpecError(f"also: {format_path(error.path)} of {entry['name']} {error.finding}") from None
        here = {**given, "name": entry["name"], "host": host}
        made = make(entry["plugin"], PatchPluginBlock, here, entry.get("options"), entry.get("wrap", wrap))
        if container is not None and made.container() is not container:
            wanted, there = type(made).container_cls.__name__, type(container).__name__
            raise SpecError(
                f"{type(made).__name__} needs the container {wanted}, and a {there} is at '{site.path}' already: plugins can "
                "share a place only with the same container"
            )
        container = host = made.container()
    return container


def make(
    plugin: str | type, base: type[nn.Module], given: Mapping[str, Any], options: Mapping[str, Any] | None, wrap: bool = False,
    ask: bool = False,
) -> Any:  # fmt: skip
    """Make a plugin from HCP-Diffusion's arguments (`given`) and its own `options`; for `ask` see Making.

    Raises SpecError, whose cause is the exception of the plugin's constructor, if it raised one.
    """
    kind = import_plugin_class(plugin)
    if not issubclass(kind, base):
        raise SpecError(f"{kind.__name__} is a {kind_of(kind)}, and this pass is for a {base.__name__}")
    options = dict(options or {})
    for key in options:
        if key in given and key != "hook_param":
            raise SpecError(f"'{key}' is set by the place of a plugin and cannot be an option")
    known = get_arguments(kind)
    host_given = {k: v for k, v in given.items() if k in known.names or known.free}
    if "lora_id" in known.names and "name" not in known.names:
        host_given.pop("name", None)
        host_given["lora_id"] = given["name"]
    function: Callable[..., Any] = kind
    if wrap:
        host_given = {k: v for k, v in host_given.items() if k not in ("name", "lora_id", "host")}
        function = functools.partial(kind.wrap_layer, given["name"], given["host"])  # type: ignore[attr-defined]
    else:
        check_options(get_arguments(kind, leave=host_given), options, kind.__name__, says="takes no")
    making = PluginContext(ask)
    token = MAKING.set(making)
    try:
        made = function(**host_given, **options)
    except FxplugError:
        raise
    except Exception as error:  # the plugin's constructor
        raise SpecError(f"{kind.__name__} cannot be built: {type(error).__name__}: {error}") from error
    finally:
        MAKING.reset(token)
    if not isinstance(made, base):
        raise SpecError(f"{kind.__name__} returned a {type(made).__name__}, not a {base.__name__}")
    lost = next((name for name, value in (*made.named_parameters(), *made.named_buffers()) if value.is_meta), None)
    if lost is not None and not torch.empty(0).is_meta:
        raise SpecError(
            f"{kind.__name__}: '{lost}' is on the meta device and has no values, because plugins share a module that was made "
            "for a model on that device: import the plugin's file again, or create the module in each __init__"
        )
    if (other := next((plugin for plugin in making.plugins if plugin is not made), None)) is not None:
        raise SpecError(
            f"{kind.__name__} makes another plugin, {type(other).__name__} '{other.name}', which would not run: give that one "
            "its own entry with its layers, or make it a plain module that is called in forward"
        )
    if (parts := _copied_parts(made, given.get("host_model"))):
        _copies[made] = parts
    if kind.get_trainable_parameters is not BasePluginBlock.get_trainable_parameters:
        _freeze_untrained(made)
    return made


_copies: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()  # by plugin: parts of the model that it copied


def _copied_parts(made: nn.Module, host: Any) -> list[str]:
    """Return the paths of a traced model's parts with code of their own of which a plugin has a copy."""
    copies = {path: part for path, part in made.named_modules() if isinstance(part, Container)}
    if not copies or not hasattr(host, "graphs"):
        return []
    called = Regions(host.graphs.get(host.training, host.graph), host).by_key
    theirs = {path: part for path, part in host.named_modules() if path in called and isinstance(part, Container)}
    found: dict[str, None] = {}
    inside: list[str] = []
    for path, part in copies.items():
        if any(path.startswith(f"{outer}.") for outer in inside):
            continue
        alike = [name for name, own in theirs.items() if own is not part and _alike(own, part)]
        if alike:
            inside.append(path)
            found[next((name for name in alike if path == name or path.endswith(f".{name}")), alike[0])] = None
    return list(found)


def _alike(one: Container, other: Container) -> bool:
    states = [{name: value.shape for name, value in part.state_dict().items()} for part in (one, other)]
    return one.classes == other.classes and states[0] == states[1]


def _freeze_untrained(plugin: Any) -> None:
    """Turn the parameters that a plugin does not train into buffers. Raises SpecError if it trains those of others."""
    trained, own = {id(p) for p in plugin.get_trainable_parameters()}, {id(p) for p in plugin.parameters()}
    if not trained <= own:
        raise SpecError(
            f"{type(plugin).__name__}.get_trainable_parameters returns parameters that are not the plugin's: to train "
            "parameters of the model, name them in train.trainable of a run"
        )
    for part in plugin.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None and id(parameter) not in trained:
                del part._parameters[name]
                part.register_buffer(name, parameter.detach())


def import_plugin_class(plugin: str | type) -> type[BasePluginBlock]:
    """Return the class that `"module:Class"` names. Raises SpecError, also for a class with hcpdiff's own bases."""
    try:
        kind = plugin if isinstance(plugin, type) else import_target(plugin)
    except SpecError as error:
        if "no module named 'hcpdiff'" in error.finding or "No module named 'hcpdiff" in error.finding:
            raise SpecError(
                f"'{plugin}' imports hcpdiff, which is not installed: replace `from hcpdiff.models.plugin import ...` by `from "
                "fxplug.compat.hcp import ...`; the rest of the file can stay"
            ) from None
        raise
    if not isinstance(kind, type) or not issubclass(kind, BasePluginBlock):
        bases = [c.__module__ for c in getattr(kind, "__mro__", ())]
        hint = ""
        if any(name.startswith("hcpdiff") for name in bases):
            hint = ": import its base class from fxplug.compat.hcp instead of hcpdiff.models.plugin"
        raise SpecError(f"'{plugin}' is not a plugin class of fxplug.compat.hcp{hint}")
    return kind


def kind_of(kind: type) -> str:
    """Return the name of the base class that determines the kind of a plugin."""
    bases = (SinglePluginBlock, PluginBlock, MultiPluginBlock, PatchPluginBlock)
    return next((base.__name__ for base in bases if issubclass(kind, base)), "BasePluginBlock")


@contextmanager
def _naming_copies(module: nn.Module) -> Iterator[None]:
    """Name all copies at once if a plugin calls one of a part whose code is in the graph."""
    try:
        yield
    except CodeInGraph as error:
        parts = [path for plugin in module.modules() for path in _copies.get(plugin, ())]
        if not parts:
            raise
        raise TraceError(
            f"{type(module).__name__} calls its copy of a {error.module.classes[0]}, whose code is in the graph, so that a "
            f"copy has none to run: keep the parts that it copies whole when the model is traced, leaf: {parts}"
        ) from None


@contextmanager
def run_plugin(
    module: Any, feeds: Sequence[str], fed: Sequence[Any], left: Mapping[str, Any] | None = None
) -> Iterator[MethodCall]:
    """Run one call of a plugin, or of those of a container: feed their inputs first, and restore their attributes afterwards.

    Raises TraceError, naming the attribute, if the call reads the value of an earlier call and writes another: a counter, a
    cache, a list that grows, a buffer that is assigned. Attributes in `left`, of an earlier call, may be read.
    """
    single = isinstance(module, BasePluginBlock)
    name = module.name if single else type(module).__name__
    with _naming_copies(module), MethodCall(module, left) as call:
        feed([module] if single else [plugin for _, plugin in module], feeds, fed)
        yield call
    found = [
        (key, "is created or assigned during the call: create it in __init__, and change a buffer in place (copy_)")
        for key in call.anew
    ]
    found += [
        (key, "is read before this call has written it, so it has the value from the last call")
        for attribute, key in call.read.items()
        if attribute in call.set and left is None
    ]
    for key, finding in found:
        path, _, own = key.rpartition(".")
        raise TraceError(
            f"{'.'.join(filter(None, [name, path]))}: the attribute 'self.{own}' {finding}. A graph stores no Python values "
            "between calls: pass values from outside as inputs of the pass (feed_input_data gets them), and store others in a "
            "buffer (register_buffer in __init__, changed in place)"
        )


def feed(plugins: Sequence[BasePluginBlock], names: Sequence[str], values: Sequence[Any]) -> None:
    """Pass the inputs of their pass to plugins, as HCP-Diffusion does before each call of the model.

    Plugins with their own `feed_input_data`, or that requested the call, receive them.
    """
    unchanged = BasePluginBlock.feed_input_data
    taking = [p for p in plugins if type(p).feed_input_data is not unchanged or getattr(p, "takes_inputs", False)]
    if names and not taking:
        who = ", ".join(plugin.name for plugin in plugins)
        raise TraceError(f"{who}: takes no inputs (but gets {', '.join(names)}): it does not call register_input_feeder_to")
    if len(names) != len(values):
        listed = ", ".join(names) or "none"
        raise TraceError(
            f"'feeds' names {len(names)} inputs ({listed}), and 'args' has {len(values)} after those of the plugin's driver"
        )
    for plugin in taking:
        data = _Inputs(zip(names, values, strict=True))
        data.plugin = plugin.name
        plugin.feed_input_data(data)


class _Inputs(dict[str, Any]):
    """The inputs of a pass by name; asking for another says how to declare it."""

    plugin: str

    def __missing__(self, key: str) -> Any:
        raise TraceError(
            f"{self.plugin}: feed_input_data asks for '{key}', which is not an input of the pass{did_you_mean(key, self)}; it "
            f"has {', '.join(self) or 'none'}: declare it in 'inputs' and 'feeds'"
        )


def _refuse_excluded(site: Site, exclude_key: str | None) -> None:
    if exclude_key is None:
        return
    key = compile_expression(exclude_key, lambda finding: SpecError(f"exclude_key {quote(exclude_key)} {finding}"))
    if key.search(site.path):
        raise SpecError(
            f"wrap_model excludes '{site.path}' (exclude_key '{exclude_key}'), and a pass cannot: list the layers, or convert "
            "with --model"
        )
