"""Modules in a run's own folders: found there first, and kept apart from those of another run in the same process."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module, invalidate_caches
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

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
