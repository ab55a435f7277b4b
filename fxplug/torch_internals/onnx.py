"""torch's translation of programs to ONNX, and which operations it has no form for. torch.onnx is imported when called."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from typing import Any

from torch.export import ExportedProgram

__all__ = ["DEFAULT", "OPSETS", "translated", "untranslated"]

# the opsets that torch writes by itself; what it converts to others may fail, and stays what it was then
OPSETS = range(18, 24)
DEFAULT = 20


def translated(program: ExportedProgram, opset: int) -> Any:
    """An exported program as an `onnx_ir.Model`, with nothing folded, as weights that stay live would be.

    We need the model's inputs and results in the order of the program, and initializers by the names of its state.
    """
    from torch.onnx import export

    _forget_guards(program)
    return export(program, dynamo=True, optimize=False, verbose=False, opset_version=opset).model  # type: ignore[union-attr]


def _forget_guards(program: ExportedProgram) -> None:
    """Take the conditions on inputs out of a program: torch tries them on the way, with code that fails for **keywords."""
    if hasattr(program, "_guards_code"):
        program._guards_code = []


def untranslated(program: ExportedProgram, opset: int, error: BaseException) -> tuple[list[tuple[Any, str]], str]:
    """Which operations torch has no ONNX form for, each with the stack of its line of code, and what torch says.

    `error` is what `translated` raised. We need the stacks that torch.export wrote down, and all operations at once.
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
