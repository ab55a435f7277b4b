"""AOTInductor packages, written: a module compiled ahead of time, with what its adapters need to stay live."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import nn
from torch.export import ExportedProgram

from .. import __version__
from ..core.errors import FxplugError
from ..core.reading import open_archive, open_regular_file
from ..core.torch_internals.exporting import compile_package, find_compiler, get_processor, list_conditions
from ..core.torch_internals.tensors import OpOverload, get_qualified_name
from ..core.writing import open_new, open_temporary_folder
from .blockers import Unfit, report_refusals
from .call_signature import Json, describe
from .machines import list_capabilities, list_needed_features
from .package import TEMPORARY, _loader
from .package_file import FORMAT, MANIFEST, TENSORS, unpack
from .package_trial import try_package

# what inductor does to constants otherwise: those of one value are worked out at compile time and whatever they feed with
# them (a new adapter's zeros, and all that is multiplied by them), those of few numbers are written into the code, and weights
# are laid out anew. An adapter that is loaded later would have no effect, or on some layers only.
LIVE = {
    "joint_graph_constant_folding": False,
    "always_keep_tensor_constants": True,
    "freezing": False,
    "aot_inductor.use_runtime_constant_folding": False,
}


def check_compiler(device: torch.device) -> None:
    """Raise FxplugError if no package can be compiled for a device."""
    if device.type not in ("cpu", "cuda"):
        raise FxplugError(f"a package runs on cpu or cuda, and the module is on {device.type}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise FxplugError("a package for cuda must be compiled on a machine with a CUDA device, and this one has none")
    try:
        find_compiler()
    except Exception as error:  # inductor's
        raise FxplugError(
            "AOTInductor needs a C++ compiler to make a package, and none was found: install g++, or name one in the "
            f"environment variable CXX ({str(error).strip().splitlines()[0]})"
        ) from error


def write(
    program: ExportedProgram,
    parameters: Mapping[str, inspect.Parameter],
    file: str,
    tensors: Mapping[str, torch.Tensor],
    facts: Mapping[str, Any],
    options: Mapping[str, Any] | None,
    module: nn.Module,
) -> list[str]:
    """Compile an exported program into a package `file`, and return notes about what it does not check.

    `parameters` are those of the exported `forward`, `tensors` what stays live, by name, `facts` more for the manifest,
    `options` inductor's own, and `module` what was exported, against which the package is tried. Raises Unfit when a tensor
    that has to be live is not, and the errors of the trial.
    """
    before = len(list_conditions(program))
    with silence_torch(), torch.no_grad(), open_new(file) as sink, report_refusals():
        compile_package(program, sink, {**(options or {}), **LIVE})
    signature, notes = describe(program, parameters)  # of the sizes that are free still: the compiler fixes some
    decided = list_conditions(program)[before:]
    with _compiled(file) as loader:
        constants, metadata = set(loader.get_constant_fqns()), dict(loader.get_metadata())
        state = _state(program)
        read = _names_read(program) & set(tensors) | set(facts.get("where", {}).values())
        lost = sorted(name for name in read if name not in constants)
        if lost:
            raise Unfit(
                f"the compiled program does not read {', '.join(lost[:3])}{' ...' if lost[3:] else ''}, so changing the "
                "adapter would have no effect there: export the module that this one was lowered from, module.meta['source']"
            )
        # names of adapters and the like are part of the state, and no part of the program
        march = (options or {}).get("cpp.march") or get_processor()  # for which processors, None or "native" for the one here
        live = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        manifest = {
            "format": FORMAT,
            "fxplug": __version__,
            "torch": torch.__version__,
            "platform": sys.platform,
            "machine": metadata.get("AOTI_MACHINE", ""),
            "device": metadata["AOTI_DEVICE_KEY"],
            "features": list_needed_features(
                metadata.get("AOTI_CPU_ISA", "").split(), list_capabilities(), march in (None, "native")
            ),
            "capability": list(torch.cuda.get_device_capability()) if metadata["AOTI_DEVICE_KEY"] == "cuda" else None,
            "constants": {name: _facts(tensor) for name, tensor in state.items() if name in constants},
            "operators": _operators(program),
            "signature": signature,
            **facts,
        }
        kept, more = try_package(loader, manifest, live, program, module, decided)
    signature["guards"] += kept
    with open(file, "r+b") as out:
        with zipfile.ZipFile(out, "a", zipfile.ZIP_STORED) as archive:
            start = archive.namelist()[0].partition("/")[0]
            archive.writestr(f"{start}/{MANIFEST}", json.dumps(manifest, sort_keys=True))
            archive.writestr(f"{start}/{TENSORS}", save_tensors(live))
        out.flush()
        os.fsync(out.fileno())
    return notes + more


@contextlib.contextmanager
def _compiled(file: str) -> Iterator[Any]:
    """Yield the loader of a compiled program."""

    def unfit(finding: str) -> Unfit:
        return Unfit(f"AOTInductor did not write a package: {finding}; leave out the options that cause this")

    with open_regular_file(file, raises=unfit) as handle, open_temporary_folder(TEMPORARY) as work:
        archive = open_archive(handle, unfit)
        unpack(archive, work, unfit)
        yield _loader(work, 1, -1)


@contextlib.contextmanager
def silence_torch() -> Iterator[None]:
    """Suppress warnings, and the log line that torch found no CUDA, which a package for a CPU does not need."""
    with silence_library("torch.utils.cpp_extension"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def silence_library(name: str) -> Iterator[None]:
    """Suppress the log lines of a library below ERROR."""
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _operators(program: ExportedProgram) -> list[str]:
    """Return the operators of libraries other than torch that the program may call; Triton's kernels are in the package."""
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    targets = {node.target for graph in graphs for node in graph.nodes if isinstance(node.target, OpOverload)}
    called = {get_qualified_name(t) for t in targets if t.namespace not in ("aten", "prim", "prims")}
    return sorted(name for name in called if not name.startswith("fxplug::triton_"))


def _state(program: ExportedProgram) -> dict[str, torch.Tensor]:
    constants = {name: value for name, value in program.constants.items() if isinstance(value, torch.Tensor)}
    return {**program.state_dict, **constants}


def _facts(tensor: torch.Tensor) -> Json:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _names_read(program: ExportedProgram) -> set[str]:
    """Return the names of the parameters and buffers that a node of the program reads."""
    signature = program.graph_signature
    places = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    return {places[n.name] for n in program.graph.nodes if n.op == "placeholder" and n.name in places and n.users}
