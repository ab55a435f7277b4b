"""Import paths `package.module:Name`, and what they name."""

from __future__ import annotations

import pkgutil
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import SpecError, did_you_mean
from .rules import check_target
from .yaml_source import NOWHERE, Where

# where files that were written by earlier versions have classes of the package, and where these are now
_OLD_BLOCKS = ["adapters", "attending", "conditions", "frequencies", "gates", "merging", "norms", "rotations", "slicing"]
MOVED = {
    **{f"fxplug.{name}": "fxplug.blocks" for name in (*_OLD_BLOCKS, "weights")},
    **{f"fxplug.parallel.{name}": "fxplug.parallel.runtime" for name in ("attention", "collectives", "shares")},
    **{f"fxplug.parallel.{name}": "fxplug.parallel.runtime" for name in ("moments", "neighbours")},
    "fxplug.rewriter.adapter_passes": "fxplug.adapters.file_passes",
    "fxplug.compat.zhijian_pass": "fxplug.compat.zhijian.blitz",
    "fxplug.compat.drivers": "fxplug.compat.hcp.drivers",
    "fxplug.compat.samples": "fxplug.compat.hcp.sample_plugins",
}


def present(path: str) -> str:
    """The import path that a class of the package has now, for one that a file of an earlier version may have."""
    module, colon, name = path.partition(":")
    return MOVED.get(module, module) + colon + name


def import_target(text: str, where: Where = NOWHERE) -> object:
    """What `"package.module:Name"` names. Imports the module; SpecError says which part does not exist."""
    try:
        check_target(text)
    except SpecError as error:
        raise SpecError(error.finding, where=where) from None
    module_name, _, attributes = present(text).partition(":")
    try:
        value: Any = import_module(module_name)
    except Exception as error:  # the imported module's
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and f"{module_name}.".startswith(f"{absent}."):
            raise SpecError(f"no module named '{absent}'{_near(absent, where)}", where=where) from None
        finding = f"importing '{module_name}' failed: {type(error).__name__}: {error}"
        raise SpecError(finding, where=where) from error
    for name in attributes.split("."):
        if not hasattr(value, name):
            kind = "module" if isinstance(value, ModuleType) else "class"
            owner = getattr(value, "__name__", value)
            names = (n for n in dir(value) if not n.startswith("_") and f"{owner}.{n}" not in sys.modules)
            hint = did_you_mean(name, names)
            raise SpecError(f"{kind} '{owner}' has no attribute '{name}'{hint}", where=where)
        value = getattr(value, name)
    return value


def _near(module: str, where: Where) -> str:
    """A hint about a module that does not exist: the file that would be it, or the nearest name."""
    package, _, leaf = module.rpartition(".")
    beside = Path(where.file).parent / f"{module}.py"
    if where.file and beside.is_file():
        return f"; {beside.name} lies beside {Path(where.file).name}: put that folder on PYTHONPATH"
    search = getattr(import_module(package), "__path__", []) if package else None
    prefix = f"{package}." if package else ""
    return did_you_mean(module, (prefix + found.name for found in pkgutil.iter_modules(search)))
