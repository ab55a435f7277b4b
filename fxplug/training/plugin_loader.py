"""A plugin from what a configuration says: imported from the run's own folders, made, and its hooks checked.

Modules are looked for in the run's folders first, and are kept apart from those of another run in the same process.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module, invalidate_caches
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ..core.errors import SpecError, did_you_mean
from ..core.spec.pass_file import check_options, import_target
from ..core.spec.yaml_source import shown
from .plugin_hooks import OFFERED, BasePlugin

PREFIXES = ("on_", "transform_", "modify_")
CHAINED = PREFIXES[1:]  # hooks that are given one value and give it back, changed or not
_active: Local | None = None  # whose modules bear their names in sys.modules


class StandIn(NamedTuple):
    """A module `target` that is there under another name while plugins are imported.

    It is, where no file has the name, or where one has all of the texts `marks`: the trainer's own, whose plugins these are.
    """

    target: str
    marks: tuple[str, ...] = ()


class Local:
    """What was imported from a run's own folders.

    `stand_ins` names modules that are there even if no folder has them: `{"plugins.plugins": StandIn("package.module")}`.
    Two runs may both have a module `plugins.mine`, and sys.modules has room for one: it has those of the run that was loaded
    last. A pickle of a Local imports the same modules in the other process; put it before the objects of their classes.
    """

    def __init__(self, folders: Sequence[str], stand_ins: Mapping[str, StandIn]) -> None:
        self.folders = list(folders)
        self.stand_ins = dict(stand_ins)
        self.modules: dict[str, ModuleType] = {}

    @staticmethod
    def of(folders: Sequence[str | Path], stand_ins: Mapping[str, StandIn]) -> Local:
        """A Local for the folders, first come first; that of the last run if its folders were the same."""
        found = list(dict.fromkeys(str(Path(folder).resolve()) for folder in folders))
        same = _active is not None and _active.folders == found
        return _active if _active is not None and same else Local(found, stand_ins)

    def activate(self) -> None:
        """Gives these modules their names in sys.modules."""
        # nothing plainer: files of two runs may have one name, pickle looks classes up by it, and imports of theirs do
        global _active
        if _active is self:
            return
        for name, module in _active.modules.items() if _active else ():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        sys.modules.update(self.modules)
        _active = self

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Within it, an import looks into the folders first."""
        self.activate()
        before = dict(sys.modules)
        sys.path[:0] = self.folders
        invalidate_caches()
        put: dict[str, ModuleType] = {}
        try:
            for name, stand_in in self.stand_ins.items():
                if not self._is_theirs(name, stand_in):
                    put[name] = self._put(name, stand_in)
            yield
        finally:
            for folder in self.folders:
                sys.path.remove(folder)
            for name, module in put.items():
                self._taken_back(name, module, before)
            new = {name: module for name, module in sys.modules.items() if before.get(name) is not module}
            self.modules.update({name: module for name, module in new.items() if self._is_here(name)})

    def _is_here(self, name: str) -> bool:
        module = sys.modules.get(name.partition(".")[0])
        file = getattr(module, "__file__", None)
        if file is None:  # a folder without __init__.py, or the package of a stand-in
            places = [str(Path(place).parent) for place in getattr(module, "__path__", ())]
            return any(place in self.folders for place in places) or (module is not None and module.__spec__ is None)
        return str(Path(file).parent.parent if hasattr(module, "__path__") else Path(file).parent) in self.folders

    def _is_theirs(self, name: str, stand_in: StandIn) -> bool:
        """Whether a file of the user's has the name, and not that of the trainer which the stand-in stands for."""
        package = name.rpartition(".")[0]
        spec = PathFinder.find_spec(package or name, sys.path)
        places = None if spec is None else spec.submodule_search_locations
        if package and spec is not None and places is None:
            return True  # a file plugins.py, which is no package
        if package:
            spec = None if places is None else PathFinder.find_spec(name, list(places))
        if spec is None or not spec.origin:
            return False
        text = Path(spec.origin).read_text("utf-8", "replace") if stand_in.marks and spec.origin.endswith(".py") else ""
        return not (stand_in.marks and all(mark in text for mark in stand_in.marks))

    def _put(self, name: str, stand_in: StandIn) -> ModuleType:
        package, _, leaf = name.rpartition(".")
        module = sys.modules[name] = import_module(stand_in.target)
        if package:
            setattr(self._package(package), leaf, module)
        return module

    @staticmethod
    def _package(package: str) -> ModuleType:
        """The package of a stand-in: that of the folders, or an empty one."""
        spec = PathFinder.find_spec(package, sys.path)
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        loaded = sys.modules.get(package)
        if loaded is not None and spec is not None and list(getattr(loaded, "__path__", ())) != places:
            for other in [other for other in sys.modules if other != package and other.startswith(f"{package}.")]:
                if sys.modules[other].__name__ == other:  # no stand-in
                    del sys.modules[other]
            del sys.modules[package]
            loaded = None
        if loaded is None and spec is not None and spec.origin:
            return import_module(package)
        if loaded is None:  # an own one: the path of Python's follows sys.path, which is as it was before long
            loaded = sys.modules[package] = ModuleType(package)
            loaded.__path__ = places
        return loaded

    @staticmethod
    def _taken_back(name: str, module: ModuleType, before: Mapping[str, ModuleType]) -> None:
        package, _, leaf = name.rpartition(".")
        if sys.modules.get(name) is module:
            del sys.modules[name]
        holder = sys.modules.get(package)
        if getattr(holder, leaf, None) is module:
            delattr(holder, leaf)
        if name in before:
            sys.modules[name] = before[name]
        if holder is not None and holder.__spec__ is None and not any(n.startswith(f"{package}.") for n in sys.modules):
            del sys.modules[package]

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (self.folders, self.stand_ins, list(self.modules))


def _again(folders: list[str], stand_ins: dict[str, StandIn], names: list[str]) -> Local:
    local = Local.of(folders, stand_ins)
    with local.importing():
        for name in names:
            import_module(name)
    return local


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
