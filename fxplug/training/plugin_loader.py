"""A plugin from what a configuration says: imported from the run's own folders, made, and its hooks checked.

Modules are looked for in the run's folders first, and are kept apart from those of another run in the same process.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module, invalidate_caches
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from ..core.errors import SpecError, did_you_mean
from ..core.spec.pass_file import import_target
from ..core.spec.train_section import Use
from ..core.spec.yaml_source import shown
from .plugin_hooks import OFFERED, BasePlugin
from .tasks.task import construct

PREFIXES = ("on_", "transform_", "modify_")
CHAINED = PREFIXES[1:]  # hooks that are given one value and give it back, changed or not
# a module that is there while plugins are imported: its target, and what the text of the trainer's own file has
STAND_INS: dict[str, tuple[str, tuple[str, ...]]] = {
    "plugins.plugins": ("fxplug.training.plugin_hooks", ("class BasePlugin", "class PluginRunner")),
    "train": ("fxplug.training.plugin_state", ("TrainingState:", "def save_model(")),
    "utils.sample_generator": ("fxplug.training.plugin_state", ("def clean_filename(", "class SampleGenerator")),
    "colorama": ("fxplug.training.plugin_state", ()),
}
PACKAGES, SINGLE = ("plugins", "utils"), ("train",)  # names that others may have imported already
_active: LocalModules | None = None  # whose modules bear their names in sys.modules


class StandIns(MetaPathFinder, Loader):
    """Finds modules of EveryDream2trainer's where the run's folders have no file of that name, or its own.

    Such a module has what `target` has. The package around one is that of the folders, or an empty one.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The stand-in of a name; None for a name that has none, and for one that a file of the user's has."""
        found = PathFinder.find_spec(name, path)
        if name in STAND_INS:
            marks = STAND_INS[name][1]
            text = Path(found.origin).read_text("utf-8", "replace") if found and found.origin and marks else ""
            theirs = found is not None and found.origin and not (text and all(mark in text for mark in marks))
            return None if theirs else ModuleSpec(name, self)
        if name not in PACKAGES or (found is not None and found.loader is not None):
            return None
        package = ModuleSpec(name, None, is_package=True)  # Python's own follows sys.path, which is as it was before long
        package.submodule_search_locations = list(found.submodule_search_locations or ()) if found is not None else []
        return package

    def exec_module(self, module: ModuleType) -> None:
        """Give a stand-in all that its target has."""
        found = vars(import_module(STAND_INS[module.__name__][0]))
        vars(module).update({name: value for name, value in found.items() if name == "__getattr__" or name[:2] != "__"})


class LocalModules:
    """What was imported from a run's own folders.

    Two runs may both have a module `plugins.mine`, and sys.modules has room for one: it has those of the run that was loaded
    last. A pickle of a Local imports the same modules in the other process; put it before the objects of their classes.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders = list(folders)
        self.modules: dict[str, ModuleType] = {}

    @staticmethod
    def of(folders: Sequence[str | Path]) -> LocalModules:
        """A Local for the folders, first come first; that of the last run if its folders were the same."""
        found = list(dict.fromkeys(str(Path(folder).resolve()) for folder in folders))
        return _active if _active is not None and _active.folders == found else LocalModules(found)

    def activate(self) -> None:
        """Give these modules their names in sys.modules."""
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
        """Within it, an import looks into the folders first, and finds stand-ins."""
        self.activate()
        shadowing = [n for n in sys.modules if n.partition(".")[0] in PACKAGES + SINGLE and n not in self.modules]
        hidden = {name: sys.modules.pop(name) for name in shadowing}
        before, finder = dict(sys.modules), StandIns()
        sys.path[:0] = self.folders
        sys.meta_path.insert(0, finder)
        invalidate_caches()
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            for folder in self.folders:
                sys.path.remove(folder)
            for name, module in [pair for pair in sys.modules.items() if before.get(pair[0]) is not pair[1]]:
                if getattr(module, "__loader__", None) is finder or getattr(module, "__path__", None) == []:
                    del sys.modules[name]
                    package, _, leaf = name.rpartition(".")
                    vars(sys.modules.get(package, module)).pop(leaf, None)
                elif self._is_here(name):
                    self.modules[name] = module
            for name, module in hidden.items():
                sys.modules.setdefault(name, module)

    def _is_here(self, name: str) -> bool:
        module = sys.modules.get(name.partition(".")[0])
        places = [Path(place) for place in getattr(module, "__path__", [getattr(module, "__file__", None) or ""])]
        return any(str(place.parent) in self.folders for place in places)

    def __reduce__(self) -> tuple[object, ...]:
        return _import_anew, (self.folders, list(self.modules))


def _import_anew(folders: list[str], names: list[str]) -> LocalModules:
    local = LocalModules.of(folders)
    with local.importing():
        for name in names:
            import_module(name)
    return local


def load(spec: Any, local: LocalModules) -> object:
    """The plugin of an import path, `{path: options}`, a `settings.Use`, a class or an object. Raises SpecError."""
    if isinstance(spec, Mapping) and len(spec) == 1:
        ((spec, options),) = spec.items()
    elif isinstance(spec, tuple) and len(spec) == 2:
        spec, options = spec
    else:
        options = {}
    if isinstance(spec, (Mapping, tuple, list)) or spec is None:
        raise SpecError(f"must be an import path, or one with its options below it, not {shown(spec)}")
    kind, name = (_import(spec, local), spec) if isinstance(spec, str) else (spec, getattr(spec, "__name__", ""))
    plugin = construct(kind, Use(name, dict(options or {}))) if isinstance(kind, type) else kind
    if not hook_methods(plugin) and not isinstance(plugin, BasePlugin):
        raise SpecError(f"{type(plugin).__name__} is not a plugin: it has none of the methods {', '.join(OFFERED)}")
    return plugin


def _import(path: str, local: LocalModules) -> type:
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
