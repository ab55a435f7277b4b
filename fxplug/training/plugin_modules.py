"""Modules in a run's own folders: found there first, and kept apart from those of another run in the same process."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module, invalidate_caches
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

_active: Local | None = None  # whose modules bear their names in sys.modules


class Local:
    """What was imported from a run's own folders.

    `stand_ins` names modules that are there even if no folder has them: `{"plugins.plugins": "fxplug.training.plugin_base"}`.
    Two runs may both have a module `plugins.mine`, and sys.modules has room for one: it has those of the run that was loaded
    last. A pickle of a Local imports the same modules in the other process; put it before the objects of their classes.
    """

    def __init__(self, folders: Sequence[str], stand_ins: Mapping[str, str]) -> None:
        self.folders = list(folders)
        self.stand_ins = dict(stand_ins)
        self.modules: dict[str, ModuleType] = {}

    @staticmethod
    def of(folders: Sequence[str | Path], stand_ins: Mapping[str, str]) -> Local:
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
        try:
            for name, target in self.stand_ins.items():
                self._stand_in(name, target)
            yield
        finally:
            for folder in self.folders:
                sys.path.remove(folder)
            new = {name: module for name, module in sys.modules.items() if before.get(name) is not module}
            self.modules.update({name: module for name, module in new.items() if self._is_here(name)})

    def _is_here(self, name: str) -> bool:
        root = name.partition(".")[0]
        if any(root == stand_in.partition(".")[0] for stand_in in self.stand_ins):
            return True
        module = sys.modules.get(root)
        file = getattr(module, "__file__", None)
        if file is None:  # a folder without __init__.py
            return any(str(Path(place).parent) in self.folders for place in getattr(module, "__path__", ()))
        return str(Path(file).parent.parent if hasattr(module, "__path__") else Path(file).parent) in self.folders

    def _stand_in(self, name: str, target: str) -> None:
        package, _, leaf = name.rpartition(".")
        spec = PathFinder.find_spec(package, sys.path)
        places = None if spec is None else spec.submodule_search_locations
        if spec is not None and places is None:
            return  # a file plugins.py, which is no package
        loaded = sys.modules.get(package)
        if loaded is not None and places is not None and list(getattr(loaded, "__path__", ())) != list(places):
            for other in [other for other in sys.modules if f"{other}.".startswith(f"{package}.")]:
                del sys.modules[other]
            loaded = None
        if loaded is None and spec is not None and spec.origin:
            loaded = import_module(package)
        elif loaded is None:  # an own one: the path of Python's follows sys.path, which is as it was before long
            loaded = sys.modules[package] = ModuleType(package)
            loaded.__path__ = list(places or ())
        if name not in sys.modules and PathFinder.find_spec(name, list(loaded.__path__)) is None:
            sys.modules[name] = import_module(target)
            setattr(loaded, leaf, sys.modules[name])

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (self.folders, self.stand_ins, list(self.modules))


def _again(folders: list[str], stand_ins: dict[str, str], names: list[str]) -> Local:
    local = Local.of(folders, stand_ins)
    with local.importing():
        for name in names:
            import_module(name)
    return local
