"""What torch.export, AOTInductor and torch.onnx know of a program. Inductor and torch.onnx are imported when called."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram

from ..errors import FxplugError

__all__ = [
    "Condition", "DEFAULT", "LOADER", "OPSETS", "compile_package", "compute_size", "find_compiler", "find_untranslated",
    "get_processor", "list_conditions", "list_guards", "translate",
]

# a compiled program from a folder or an archive (path, name, one thread, runners, device index); we need its constants by name,
# `load_constants`, which takes tensors as they lie, `get_metadata`, and `boxed_run` or `run`
LOADER: Any = torch._C._aoti.AOTIModelPackageLoader


def list_guards(program: ExportedProgram) -> list[str]:
    """Return the conditions on an exported program's inputs, as text over their names. Raises FxplugError if torch reports
    none.

    We need them in Python's syntax, of sizes as `x.size()[0]` or `x.shape[0]`; those torch does not know are missing.
    """
    try:
        return list(program._guards_code)
    except AttributeError:
        raise FxplugError(
            f"torch {torch.__version__} does not report for which sizes an exported program is valid, and a package without "
            "these conditions would compute wrong results: use a version of torch that fxplug is tested with"
        ) from None


@dataclass(frozen=True)
class Condition:
    """Something that was found to hold while a program was compiled: `text` in Python over the names of its free sizes."""

    text: str
    names: frozenset[str]
    numbers: frozenset[int]  # that stand in it
    expression: Any

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Return whether it holds for these free sizes."""
        try:
            return bool(self.expression.subs({symbol: sizes[str(symbol)] for symbol in self.expression.free_symbols}))
        except (ArithmeticError, TypeError, AssertionError):  # divided by 0; of no truth; torch's own, of a size below 0
            return False


def list_conditions(program: ExportedProgram) -> list[Condition]:
    """Return what was decided about the sizes of a program so far; we need the guards of its sizes, to which a compiler adds
    its own."""
    from torch.utils._sympy.printers import PythonPrinter

    values = (node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder")
    sizes: Iterator[Any] = (size for value in values if isinstance(value, torch.Tensor) for size in value.shape)
    known = next((size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)), None)
    found = [guard.expr for guard in known.guards] if known is not None else []
    made = []
    for e in found:
        numbers = frozenset(int(number) for number in e.atoms() if number.is_Integer)
        try:
            text = PythonPrinter().doprint(e)
        except NotImplementedError:  # torch prints no Python of it
            text = str(e)
        made.append(Condition(text, frozenset(map(str, e.free_symbols)), numbers, e))
    return made


def compute_size(size: torch.SymInt, sizes: Mapping[str, int]) -> int:
    """Return a size of an exported program for these free sizes, by name; we need its expression."""
    expression = size.node.expr
    return int(expression.subs({symbol: sizes[str(symbol)] for symbol in expression.free_symbols}))


def find_compiler() -> str:
    """Return the C++ compiler that inductor uses; we need an error if there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return str(get_cpp_compiler())


def compile_package(program: ExportedProgram, sink: Any, options: Mapping[str, Any]) -> None:
    """Write an exported program, compiled, into a file that is open for bytes; we need an archive with all of its code."""
    from torch._inductor import aoti_compile_and_package

    aoti_compile_and_package(program, package_path=sink, inductor_configs=dict(options))


def get_processor() -> str | None:
    """Return for which processor inductor compiles by default: None or "native" for the one here."""
    from torch._inductor import config

    found: str | None = getattr(config.cpp, "march", None)  # before torch 2.15 there was no choice
    return found


# the opsets that torch writes by itself; what it converts to others may fail, and stays what it was then
OPSETS = range(18, 24)
DEFAULT = 20


def translate(program: ExportedProgram, opset: int) -> Any:
    """Translate an exported program to an `onnx_ir.Model`, with nothing folded, as weights that stay live would be.

    We need the model's inputs and results in the order of the program, and initializers by the names of its state.
    """
    from torch.onnx import export

    if hasattr(program, "_guards_code"):  # which torch tries on the way, with code that fails for **keywords
        program._guards_code = []
    return export(program, dynamo=True, optimize=False, verbose=False, opset_version=opset).model  # type: ignore[union-attr]


def find_untranslated(program: ExportedProgram, opset: int, error: BaseException) -> tuple[list[tuple[Any, str]], str]:
    """Return the operations that torch has no ONNX form for, each with the stack of its line of code, and torch's message.

    `error` is the exception of `translate`. We need the stacks that torch.export recorded, and all operations at once.
    """
    from torch.onnx._internal.exporter import _core, _dispatching, _registration

    registry = _registration.ONNXRegistry.from_torchlib(opset_version=opset)
    graphs = _core._prepare_exported_program_for_export(program, registry=registry).graph_module.modules()
    calls = {node.name: node for m in graphs for node in m.graph.nodes if node.op == "call_function"}
    lost = [n for n in calls.values() if n.target is not operator.getitem and _dispatching.dispatch(n, registry)[0] is None]
    reasons = list(_causes(error))
    if not lost:
        named = (re.search(r"translating node %(\w+)", text) for text in reasons)
        lost = [calls[found[1]] for found in named if found and found[1] in calls]
    return [(node.target, str(node.meta.get("stack_trace") or "")) for node in lost], reasons[-1]


def _causes(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield str(error).strip()
        error = error.__cause__
