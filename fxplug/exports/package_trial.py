"""A compiled program, run beside the module that it was made of: at other sizes and with other values than the example's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from ..core.errors import ArtifactError, FxplugError, get_first_line
from ..core.ir.comparison import COMPILED, is_equal, measure_difference
from ..core.ir.containers import list_leaves
from ..core.torch_internals.exporting import Condition
from .blockers import CompileRefused, Unfit
from .call_signature import Json, Signature
from .expressions import parse
from .machines import find_missing_features, list_capabilities
from .package import Package
from .package_file import PackageManifest, check_manifest
from .size_trial import SizeTrial, call_alone, list_tensors
from .value_trial import try_values


def try_package(
    loader: Any, manifest: Json, live: dict[str, Tensor], program: ExportedProgram, module: nn.Module, decided: list[Condition]
) -> tuple[list[str], list[str]]:
    """Compare a compiled program with the module; return the compiler's conditions on which they agree, and notes.

    Raises Unfit for a program that computes something else on the example inputs, NotFree for one that does at other sizes.
    """
    trial = SizeTrial(program)
    devices = (t.device for t in list_leaves(program.example_inputs) if isinstance(t, Tensor))
    device = next(devices, torch.device(manifest["device"]))
    where = Signature(manifest["signature"], device).where
    if why := _untried(manifest, program, module):
        kept, notes = _checkable(trial.readable(decided, where))
        return kept, [f"it was not tried beside the module{why}", *notes]
    tensors = {name: tensor.to(device) for name, tensor in live.items()}
    said = json.loads(json.dumps(manifest))  # as it is read from the file
    package = Package(loader, check_manifest(said, PackageManifest, ArtifactError), tensors, device)
    args, kwargs = program.example_inputs
    gap = measure_difference(list_tensors(call_alone(module, (args, kwargs))), list_tensors(package(*args, **kwargs)), COMPILED)
    if gap.times > 1:
        raise Unfit(
            f"the package differs from the module by {gap.distance:.1e} on the example inputs; this is a bug of AOTInductor: "
            "export to pt2 or onnx"
        )

    def called(*call: Any) -> Any:
        return call_alone(module, call)

    kept, notes = _checkable(trial.readable(trial.check(package, called, decided), where))
    return kept, notes + try_values(lambda args, kwargs: package(*args, **kwargs), called, program, where)


def _checkable(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the conditions that a package can check, and a note on each of the others."""
    found: list[str] = []
    notes = []
    for text in texts:
        try:
            parse(text)
        except FxplugError as error:
            notes.append(f"the package does not check a condition on sizes: {text} ({error})")
        else:
            found.append(text)
    return found, notes


def _untried(manifest: Json, program: ExportedProgram, module: nn.Module) -> str:
    """Return why a package cannot be called here; "" if it can."""
    if missing := find_missing_features(manifest["features"], list_capabilities()):
        return f", as this processor has no {', '.join(missing)}"
    try:
        with torch.random.fork_rng():
            first, again = call_alone(module, program.example_inputs), call_alone(module, program.example_inputs)
    except Unfit as error:  # it stores something between calls
        return f": {error}"
    except CompileRefused as error:
        return f", which fails on the example inputs: {get_first_line(error)}"
    return ", which draws random numbers" if not is_equal(first, again) else ""
