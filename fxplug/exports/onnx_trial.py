"""A written ONNX model, run once beside the module that it was made of: torch.onnx makes mistakes."""

from __future__ import annotations

import importlib.util
import math

import torch
from torch import nn
from torch.export import ExportedProgram

from ..errors import FxplugError
from ..ir.pytree import leaves, map_leaves
from .aoti_writer import Refused, Unfit, refusing
from .onnx_file import INSTALL
from .onnx_model import load_onnx

# how far a result may be from the module's, in parts of its largest number: more than rounding, less than another weight
CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}


def tried(file: str, program: ExportedProgram, module: nn.Module) -> list[str]:
    """Notes on what onnxruntime, where it is installed, makes of a written model with the example inputs.

    `module` is what was exported; it gives its results as a list, see `Results`. Raises Refused for a model that does not run,
    Unfit for one that computes something else.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        return [f"it was not run, as onnxruntime is not installed: {INSTALL}"]
    import onnxruntime

    args, kwargs = map_leaves(program.example_inputs, lambda t, _: t.detach())
    with torch.no_grad(), torch.random.fork_rng(), refusing():
        wanted, again = module(*args, **kwargs), module(*args, **kwargs)
    args, kwargs = map_leaves((args, kwargs), lambda t, _: t.cpu())
    try:
        out = load_onnx(file)(*args, **kwargs)
    except FxplugError as error:
        raise Refused(str(error).replace(file, "it")) from error
    found = [value for value in leaves(out) if isinstance(value, torch.Tensor)]
    pairs = list(zip(found, wanted, strict=False))  # the conditions come last, and are no part of the result
    apart = [_apart(a, b) for a, b in pairs]
    drawn = any(_apart(a, b) for a, b in zip(wanted, again, strict=True))
    allowed = [CLOSE.get(b.dtype, 0.0) * max(1.0, _apart(b, torch.zeros_like(b))) for _, b in pairs]
    wrong = [i for i, gap in enumerate(apart) if gap > allowed[i]]
    most = f"{max(apart, default=0.0):.1e}"
    if wrong and not drawn:
        raise Unfit(
            f"the ONNX model differs from the module by {most}, in result {wrong[0]} for the example inputs, which is a "
            "mistake of torch.onnx: export to aoti or pt2"
        )
    random = ", which draws random numbers" if drawn else ""
    return [f"onnxruntime {onnxruntime.__version__} differs from the module{random} by {most} at most, on the example inputs"]


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference between two tensors, infinite where they are of other kinds."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    a, b = a.cpu().double(), b.cpu().double()
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(math.inf)
    return float(gap.amax()) if gap.numel() else 0.0
