"""What torch.export knows of a program, and AOTInductor, which compiles one. Inductor is imported when it is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram

from ..errors import FxplugError

__all__ = ["LOADER", "compile_package", "find_compiler", "guards_of", "processor"]

# a compiled program from a folder or an archive (path, name, one thread, runners, device index); we need its constants by name,
# `load_constants`, which takes tensors as they lie, `get_metadata`, and `boxed_run` or `run`
LOADER: Any = torch._C._aoti.AOTIModelPackageLoader


def guards_of(program: ExportedProgram) -> list[str]:
    """The conditions on an exported program's inputs, as text over their names. Raises FxplugError where torch has none to say.

    We need them in Python's syntax, of sizes as `x.size()[0]` or `x.shape[0]`; those it does not know are not in it.
    """
    try:
        return list(program._guards_code)
    except AttributeError:
        raise FxplugError(
            f"torch {torch.__version__} does not say which sizes an exported program holds for, and a package without these "
            "conditions would compute wrong results: use a torch that fxplug was tested with"
        ) from None


def find_compiler() -> str:
    """The C++ compiler that inductor takes; we need an error where there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return str(get_cpp_compiler())


def compile_package(program: ExportedProgram, sink: Any, options: Mapping[str, Any]) -> None:
    """Write an exported program, compiled, into a file that is open for bytes; we need an archive with all of its code."""
    from torch._inductor import aoti_compile_and_package

    aoti_compile_and_package(program, package_path=sink, inductor_configs=dict(options))


def processor() -> str | None:
    """For which processor inductor compiles, where nothing else is said: None or "native" for the one here."""
    from torch._inductor import config

    found: str | None = getattr(config.cpp, "march", None)  # before torch 2.15 there was no choice
    return found
