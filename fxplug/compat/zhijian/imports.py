"""Modules of add-ins are imported beside a stand-in for what they import of ZhiJian, which is then gone again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ...core.spec.pass_file import import_target
from .base_class import AddinBase

PACKAGES = ("zhijian", "zhijian.models", "zhijian.models.addin", "zhijian.models.addin.module")
BASE = "zhijian.models.addin.module.base"
_imported: dict[str, ModuleType] = {}  # what came in below the stand-in, so that a class is one class


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Make `zhijian.models.addin.module.base` importable inside the context, with fxplug's AddinBase.

    Add-ins are imported inside it unchanged, also ZhiJian's own if its folder is on PYTHONPATH, and nothing else of ZhiJian is.
    If ZhiJian is imported already it is used. Modules below `zhijian.models` are removed from `sys.modules` at the end.
    """
    # nothing plainer: their files import that module by name, and ZhiJian need not be installed
    if BASE in sys.modules:
        yield
        return
    before = {name for name in sys.modules if name.partition(".")[0] == "zhijian"}
    for name, module in {**_packages(), **_imported}.items():
        sys.modules.setdefault(name, module)
    try:
        yield
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "zhijian" and n not in before]:
            module = sys.modules.pop(name)
            if name not in (*PACKAGES, BASE):
                _imported[name] = module


def _packages() -> dict[str, ModuleType]:
    """Return the packages down to the base class, with their folders on the path."""
    found = {}
    for name in PACKAGES:
        found[name] = ModuleType(name)
        parts = name.split(".")
        folders = (Path(entry or ".").joinpath(*parts) for entry in sys.path)
        found[name].__path__ = [str(folder) for folder in folders if folder.is_dir()]
    found[BASE] = ModuleType(BASE)
    found[BASE].__dict__["AddinBase"] = AddinBase
    return found


def import_class(target: str) -> Any:
    """Import `package.module:Class` beside the stand-in. Raises SpecError."""
    name = target.partition(":")[0]
    if name.partition(".")[0] == "zhijian" and not name.startswith("zhijian.models."):
        return import_target(target)
    with stand_in():
        return import_target(target)
