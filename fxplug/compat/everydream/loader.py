"""A plugin from what a configuration says: imported from the run's own folders, made, and its hooks checked.

Modules are looked for in the run's folders first; those of the run that was loaded before it go from sys.modules.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module, invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from ...core.errors import SpecError, did_you_mean
from ...core.spec.pass_file import import_target
from ...core.spec.yaml_source import quote_yaml
from ...training.import_paths import construct
from ...training.train_section import Use
from .hooks import OFFERED, BasePlugin

PREFIXES = ("on_", "transform_", "modify_")
CHAINED = PREFIXES[1:]  # hooks that are given one value and give it back, changed or not
# modules of EveryDream2trainer's that plugins import from, and what stands in for them while they are imported
STAND_INS = {
    "plugins.plugins": "fxplug.compat.everydream.hooks",
    "train": "fxplug.compat.everydream.state",
    "utils.sample_generator": "fxplug.compat.everydream.state",
    "colorama": "fxplug.compat.everydream.state",  # where it is not installed
}
SHARED = ("plugins", "utils", "train")  # names that others may have imported already


class LocalModules:
    """A run's own folders, where the modules of its plugins are looked for first, and what was imported from them.

    sys.modules has room for one `plugins.mine`: that of the run that was loaded last. A pickle imports the same modules in the
    other process; put it before the objects of their classes.
    """

    last: ClassVar[LocalModules | None] = None

    def __init__(self, folders: Sequence[str | Path]) -> None:
        self.folders = list(dict.fromkeys(str(Path(folder).resolve()) for folder in folders))
        self.names: list[str] = []

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Make imports look into the folders first, and find the stand-ins."""
        # nothing plainer: files of two runs may have one name, and so may a library's
        if LocalModules.last is not None and LocalModules.last is not self:
            for name in LocalModules.last.names:
                sys.modules.pop(name, None)
        LocalModules.last = self
        others = [n for n in sys.modules if n.partition(".")[0] in SHARED and n not in self.names]
        hidden = {name: sys.modules.pop(name) for name in others}
        before = set(sys.modules)
        stand_ins = {n: import_module(target) for n, target in STAND_INS.items() if n != "colorama" or find_spec(n) is None}
        sys.modules.update(stand_ins)
        sys.path[:0] = self.folders
        invalidate_caches()
        try:
            yield
        finally:
            for folder in self.folders:
                sys.path.remove(folder)
            for name in stand_ins:
                sys.modules.pop(name, None)
            self.names += [name for name in sys.modules if name not in before and self._is_here(name)]
            for name, module in hidden.items():
                sys.modules.setdefault(name, module)

    def _is_here(self, name: str) -> bool:
        module = sys.modules.get(name.partition(".")[0])
        places = [Path(place) for place in getattr(module, "__path__", [getattr(module, "__file__", None) or ""])]
        return any(str(place.parent) in self.folders for place in places)

    def __reduce__(self) -> tuple[object, ...]:
        return _import_anew, (self.folders, self.names)


def _import_anew(folders: list[str], names: list[str]) -> LocalModules:
    local = LocalModules(folders)
    with local.importing():
        for name in names:
            import_module(name)
    return local


def load(spec: Any, local: LocalModules) -> object:
    """Load the plugin of an import path, `{path: options}`, a `settings.Use`, a class or an object. Raises SpecError."""
    if isinstance(spec, Mapping) and len(spec) == 1:
        ((spec, options),) = spec.items()
    elif isinstance(spec, tuple) and len(spec) == 2:
        spec, options = spec
    else:
        options = {}
    if isinstance(spec, (Mapping, tuple, list)) or spec is None:
        raise SpecError(f"must be an import path, or one with its options below it, not {quote_yaml(spec)}")
    kind, name = (_import(spec, local), spec) if isinstance(spec, str) else (spec, getattr(spec, "__name__", ""))
    plugin = construct(kind, Use(name, dict(options or {}))) if isinstance(kind, type) else kind
    if not list_hook_methods(plugin) and not isinstance(plugin, BasePlugin):
        raise SpecError(f"{type(plugin).__name__} is not a plugin: it has none of the methods {', '.join(OFFERED)}")
    return plugin


def _import(path: str, local: LocalModules) -> type:
    target = path if ":" in path else ":".join(path.rpartition(".")[::2])
    with local.importing():
        try:
            found = import_target(target)
        except SpecError as error:
            if "must look like" in error.finding:
                raise SpecError(f"must look like 'package.module.Class', not {quote_yaml(path)}") from None
            looked = f"; looked in {', '.join(local.folders)}, then on the Python path" if "no module" in error.finding else ""
            raise SpecError(f"{path}: {error.finding}{looked}") from error.__cause__
    if isinstance(found, type):
        return found
    if isinstance(found, ModuleType):
        classes = [name for name, value in vars(found).items() if getattr(value, "__module__", "") == found.__name__]
        hint = f"; write '{path}.{classes[-1]}'" if classes else ""
        raise SpecError(f"{path} is a module, not a class{hint}")
    raise SpecError(f"{path} is {quote_yaml(found)}, not a class")


def list_hook_methods(plugin: object) -> dict[str, tuple[Callable[..., Any], tuple[str, ...]]]:
    """Return the hooks of a plugin, each with its method and the names of its data. Raises SpecError for an unknown hook."""
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
            raise SpecError(f"{where}: no hook is called '{hook}'{hint}; the hooks are {', '.join(OFFERED)}")
        methods[hook] = method, _wanted(method, hook, where)
    return methods


def _wanted(method: Callable[..., Any], hook: str, where: str) -> tuple[str, ...]:
    function = method if inspect.isroutine(method) else type(method).__call__
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise SpecError(f"{where} is a generator or async, and would never run: hooks are called, not awaited")
    parameters = inspect.signature(method).parameters
    if hook.startswith(CHAINED):
        return _value(method, hook, where)
    offered = OFFERED[hook]
    by_position = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]
    has_rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if by_position and not has_rest:
        raise SpecError(f"{where} takes {by_position[0]} by position, and hooks get their data by name: {', '.join(offered)}")
    for name in named:
        if name not in offered:
            raise SpecError(f"{where}: the hook gets no '{name}'{did_you_mean(name, offered)}; it gets {', '.join(offered)}")
    return offered if has_rest else tuple(named)


def _value(method: Callable[..., Any], hook: str, where: str) -> tuple[str, ...]:
    """Return the arguments of a hook that transforms one value: that value, under any name, and further data it names."""
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
