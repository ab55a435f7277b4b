"""A written ONNX model, run once beside the module that it was made of: torch.onnx makes mistakes."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from ..core.errors import FxplugError, quote
from ..core.ir.comparison import COMPILED, is_equal, measure_difference
from ..core.ir.containers import list_leaves, map_leaves
from .blockers import CompileRefused, Unfit
from .onnx_file import INSTALL
from .onnx_model import load_onnx
from .size_trial import SizeTrial, call_alone
from .value_trial import try_values


def try_model(file: str, program: ExportedProgram, module: nn.Module, said: list[str]) -> list[str]:
    """Run a written model with the example inputs in onnxruntime, if installed, and return notes.

    `module` is what was exported; it returns its results as a list, followed by its conditions, whose meaning is in `said`: see
    `TensorResults`. Raises CompileRefused for a model that does not run, Unfit for one that computes something else.
    """
    try:
        with torch.random.fork_rng():
            wanted, again = call_alone(module, program.example_inputs), call_alone(module, program.example_inputs)
    except Unfit as error:
        raise Unfit(f"{error}, and an ONNX model cannot: export to aoti or pt2") from None
    if importlib.util.find_spec("onnxruntime") is None:
        return [f"it was not checked, because onnxruntime is not installed: {INSTALL}"]
    for holds, text in zip(wanted[len(wanted) - len(said) :], said, strict=True):
        if not bool(holds):
            return [f"it was not checked, because the module fails on the example inputs: {text}"]
    import onnxruntime

    args, kwargs = map_leaves(program.example_inputs, lambda t, _: t.cpu())
    try:
        model = load_onnx(file)
        out = model(*args, **kwargs)
    except FxplugError as error:
        what = str(error).replace(file, "it")
        if "NOT_IMPLEMENTED" in what:  # another of its providers may have what the CPU's lacks
            return [f"it was not checked, because onnxruntime cannot run it on a CPU: {quote(what, 300)[1:-1]}"]
        raise CompileRefused(what) from error
    found = [value for value in list_leaves(out) if isinstance(value, torch.Tensor)]
    pairs = list(zip(found, wanted, strict=False))  # the conditions come last, and are no part of the result
    apart = [measure_difference(b, a, COMPILED) for a, b in pairs]
    drawn = not is_equal(wanted, again)
    wrong = [i for i, gap in enumerate(apart) if gap.times > 1]
    most = f"{max((gap.distance for gap in apart), default=0.0):.1e}"
    if wrong and not drawn:
        raise Unfit(
            f"the ONNX model differs from the module by {most}, in result {wrong[0]} for the example inputs; this is a bug of "
            "torch.onnx: export to aoti or pt2"
        )
    random = ", which draws random numbers" if drawn else ""
    notes = [f"onnxruntime {onnxruntime.__version__} differs from the module{random} by {most} at most, on the example inputs"]
    if drawn:
        return notes

    def called(args: Any, kwargs: Any) -> list[torch.Tensor]:
        results: list[torch.Tensor] = call_alone(module, (args, kwargs))
        count = len(results) - len(said)
        if not all(bool(holds) for holds in results[count:]):
            raise FxplugError("a condition of the module does not hold")
        return results[:count]

    def run(args: Any, kwargs: Any) -> Any:
        args, kwargs = map_leaves((args, kwargs), lambda t, _: t.cpu())
        return model(*args, **kwargs)

    SizeTrial(program).check(model, called)
    return notes + try_values(run, called, program, dict(enumerate(model.manifest["inputs"])))
