"""A plugin from what a configuration says: imported, made, and its hooks checked against the specification."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ..errors import SpecError, did_you_mean
from ..spec.import_path import import_target
from ..spec.options import check_options
from ..spec.yaml_source import shown
from .plugin_base import BasePlugin
from .plugin_hooks import Hooks
from .plugin_modules import Local

PREFIXES = ("on_", "transform_", "modify_")
CHAINED = PREFIXES[1:]  # hooks that are given one value and give it back, changed or not
SPECIFIED = {name: spec for name, spec in vars(Hooks).items() if name.startswith(PREFIXES)}
OFFERED = {name: tuple(inspect.signature(spec).parameters)[1:] for name, spec in SPECIFIED.items()}  # without self


def load(spec: Any, local: Local) -> object:
    """The plugin of an import path, `{path: options}`, a `settings.Use`, a class or an object. Raises SpecError."""
    if isinstance(spec, Mapping) and len(spec) == 1:
        ((spec, options),) = spec.items()
    elif isinstance(spec, tuple) and len(spec) == 2:
        spec, options = spec
    else:
        options = {}
    if isinstance(spec, (Mapping, tuple, list)) or spec is None:
        raise SpecError(f"must be an import path, or one with its options below it, not {shown(spec)}")
    kind = _import(spec, local) if isinstance(spec, str) else spec
    plugin = _make(kind, dict(options or {})) if isinstance(kind, type) else kind
    if not hook_methods(plugin) and not isinstance(plugin, BasePlugin):
        raise SpecError(f"{type(plugin).__name__} is no plugin: it has none of the methods {', '.join(OFFERED)}")
    return plugin


def _import(path: str, local: Local) -> type:
    target = path if ":" in path else ":".join(path.rpartition(".")[::2])
    with local.importing():
        try:
            found = import_target(target)
        except SpecError as error:
            if "must look like" in error.finding:
                raise SpecError(f"must look like 'package.module.Class', not {shown(path)}") from None
            looked = f"; looked in {', '.join(local.folders)}, then on the Python path" if "no module" in error.finding else ""
            raise SpecError(f"{path}: {error.finding}{looked}") from error.__cause__
    if isinstance(found, type):
        return found
    if isinstance(found, ModuleType):
        classes = [name for name, value in vars(found).items() if getattr(value, "__module__", "") == found.__name__]
        hint = f"; write '{path}.{classes[-1]}'" if classes else ""
        raise SpecError(f"{path} is a module, not a class{hint}")
    raise SpecError(f"{path} is {shown(found)}, not a class")


def _make(kind: type, options: dict[str, Any]) -> object:
    name = kind.__name__
    check_options(kind, options, name, says="takes no option")
    try:
        return kind(**options)
    except Exception as error:  # the plugin's constructor
        raise SpecError(f"making {name} failed: {type(error).__name__}: {error}") from error


def hook_methods(plugin: object) -> dict[str, tuple[Callable[..., Any], tuple[str, ...]]]:
    """The hooks that a plugin has, each with its method and the names of the data that it takes; SpecError for a wrong one."""
    methods = {}
    for hook in dir(plugin):
        if not hook.startswith(PREFIXES) or isinstance(inspect.getattr_static(plugin, hook), property):
            continue
        method = getattr(plugin, hook)
        if not callable(method) or getattr(type(plugin), hook, None) is getattr(BasePlugin, hook, method):
            continue  # a plain value, or a method of BasePlugin that is not overridden
        where = f"{type(plugin).__name__}.{hook}"
        if hook not in OFFERED:
            hint = did_you_mean(hook, OFFERED)
            raise SpecError(f"{where}: there is no hook '{hook}'{hint}; the hooks are {', '.join(OFFERED)}")
        methods[hook] = method, _wanted(method, hook, where)
    return methods


def _wanted(method: Callable[..., Any], hook: str, where: str) -> tuple[str, ...]:
    function = method if inspect.isroutine(method) else type(method).__call__
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise SpecError(f"{where} is a generator or async: nothing of it would run, since hooks are called and not awaited")
    parameters = inspect.signature(method).parameters
    if hook.startswith(CHAINED):
        return _value(method, hook, where)
    offered = OFFERED[hook]
    by_position = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]
    has_rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if by_position and not has_rest:
        raise SpecError(f"{where} takes {by_position[0]} by position; hooks get their data by name: {', '.join(offered)}")
    for name in named:
        if name not in offered:
            raise SpecError(f"{where}: the hook has no '{name}'{did_you_mean(name, offered)}; it offers {', '.join(offered)}")
    return offered if has_rest else tuple(named)


def _value(method: Callable[..., Any], hook: str, where: str) -> tuple[str, ...]:
    """What a hook that is given one value takes: that value, whatever its name there, and what is offered beside it."""
    first, *more = OFFERED[hook]
    signature = inspect.signature(method)
    beside = tuple(name for name in more if name in signature.parameters)
    rest = signature.replace(parameters=[p for p in signature.parameters.values() if p.name not in beside])
    for given in ((first,), ())[: 1 + bool(beside)]:
        try:
            rest.bind(*given)
        except TypeError:
            continue
        return given + beside
    found = ", ".join(signature.parameters)
    raise SpecError(f"{where} must take one argument, the value that it changes, not ({found})")
