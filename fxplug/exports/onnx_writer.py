"""ONNX files, written: a translated program whose slots stay live, sealed, with its weights beside it where they are large."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from .. import __version__
from ..blocks.base import NAME
from ..core.errors import FxplugError, quote
from ..core.ir.containers import map_leaves
from ..core.ir.graph import change
from ..core.torch_internals.exporting import DEFAULT, OPSETS, find_untranslated, translate
from ..core.torch_internals.tensors import OpOverload, assert_later
from ..core.writing import lock_folder, open_new
from .aoti_writer import _state, silence_library, silence_torch
from .blockers import CompileRefused, Unfit, report_refusals
from .call_signature import Json, Placeholder, describe, encode_value
from .onnx_file import FORMAT, INSTALL, METADATA, is_data_of, make_data_name, seal
from .onnx_forms import WRONG, decompose

INLINE = 1 << 30  # bytes of weights that a model holds itself: protobuf ends at 2 GB, and what it holds is read at once
SMALL = 1024  # bytes of a tensor that stays in the model wherever the weights are: shapes and the like
SHOWN = 5
SQUEEZES = (torch.ops.aten.squeeze.dim, torch.ops.aten.squeeze.dims)
NUMBERS: dict[type, torch.dtype] = {torch.SymInt: torch.int64, torch.SymFloat: torch.float64, torch.SymBool: torch.bool}


def check_exporter(options: Mapping[str, Any] | None) -> int:
    """Return the opset to write. Raises FxplugError if a library is missing, and for unknown options."""
    for name in ("onnx", "onnxscript"):
        if importlib.util.find_spec(name) is None:
            raise FxplugError(f"export to onnx needs {name}, which is not installed: {INSTALL}")
    unknown = sorted((options or {}).keys() - {"opset"})
    if unknown:
        raise FxplugError(f"export to onnx has no option {unknown[0]!r}; it has opset")
    opset = (options or {}).get("opset", DEFAULT)
    if type(opset) is not int or opset not in OPSETS:
        raise FxplugError(f"opset must be {OPSETS[0]} to {OPSETS[-1]}, not {opset!r}")
    return opset


class _Assertions(TorchFunctionMode):
    """What is asserted of values while this is entered is not, but kept."""

    def __init__(self) -> None:
        super().__init__()
        self.conditions: list[torch.Tensor] = []
        self.said: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not assert_later:
            return function(*args, **(kwargs or {}))
        condition, *text = args
        self.conditions.append(condition)
        self.said.append(str(text[0]) if text else "an assertion of the model fails")
        return None


class TensorResults:
    """What a module gives, made a list of tensors: torch.onnx takes no other results, and leaves out what is asserted.

    After a call `tree` is the result with marks for its tensors and numbers, and `said` says what is wrong where one of the
    conditions, which come last in the list, is false.
    """

    def __init__(self, module: nn.Module) -> None:
        """Replace the module's `forward` by one with such results."""
        self.tree: Any = None
        self.said: list[str] = []
        kind = type(module)
        inner: Any = kind.forward

        @functools.wraps(inner)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
            flat: list[torch.Tensor] = []
            with _Assertions() as found:
                self.tree = _marked(inner(module, *args, **kwargs), flat)
            self.said = found.said
            return [*flat, *found.conditions]

        # nothing plainer: torch.onnx calls the class's forward, and a module around it would rename the weights
        module.__class__ = type(kind.__name__, (kind,), {"forward": forward})


def _marked(value: Any, flat: list[torch.Tensor]) -> Any:
    """Replace the tensors and sizes of a nested value by placeholders, and append them to a list."""

    def mark(leaf: Any, _: Any) -> Placeholder:
        dtype = NUMBERS.get(type(leaf))
        flat.append(leaf if dtype is None else torch.scalar_tensor(leaf, dtype=dtype))
        return Placeholder("tensor" if dtype is None else "number", len(flat) - 1)

    return map_leaves(value, mark, kind=(torch.Tensor, *NUMBERS))


def write(
    program: ExportedProgram,
    parameters: Mapping[str, inspect.Parameter],
    file: str,
    tensors: Mapping[str, torch.Tensor],
    facts: Mapping[str, Any],
    opset: int,
    results: TensorResults,
    place: Callable[[str], str],
) -> list[str]:
    """Write an exported program as the ONNX model `file`, with large weights in a second file; return notes.

    `parameters` are those of the exported `forward`, `tensors` what stays live, by name, `facts` more for the metadata,
    `results` those of the module that was exported; `place` returns the place in the model of a line of the exported code.
    Raises Unfit for what no ONNX model can do.
    """
    signature, notes = describe(program, parameters)
    _check_edges(program)
    _settle_squeezes(program)
    model = _model(program, opset, place)
    inputs, count = len(signature["tensors"]), len(program.graph_signature.output_specs)
    if (len(model.graph.inputs), len(model.graph.outputs)) != (inputs, count):
        raise Unfit("the inputs or results of the program from torch.onnx differ from those of torch.export")
    _rename_outputs(model)
    live = _make_live(model, tensors, _state(program))
    _forget_sources(model)
    data, digest = _spill(model, file)
    manifest = {
        "format": FORMAT,
        "fxplug": __version__,
        "torch": torch.__version__,
        "opset": opset,
        "inputs": [value.name for value in model.graph.inputs[:inputs]],
        "outputs": [value.name for value in model.graph.outputs],
        "checks": results.said,
        "signature": {**signature, "result": encode_value(results.tree)},
        "data": {"name": data, "sha256": digest} if data else None,
        **live,
        **facts,
    }
    model.metadata_props[METADATA] = json.dumps(manifest, sort_keys=True)
    with open_new(file) as sink:
        sink.write(seal(_bytes(model)))
    return notes


def _check_edges(program: ExportedProgram) -> None:
    """Raise Unfit for a program with complex numbers as inputs or results, or without results."""
    if not program.graph_signature.output_specs:
        raise Unfit("this module returns no tensors, and an ONNX model must return some")
    for node in program.graph.nodes:
        edges = [node] if node.op == "placeholder" else node.all_input_nodes if node.op == "output" else []
        for edge in edges:
            value = edge.meta.get("val")
            if isinstance(value, torch.Tensor) and value.is_complex():
                raise Unfit(f"'{edge.name}' is {value.dtype}, and ONNX has no complex numbers: use torch.view_as_real")


def _settle_squeezes(program: ExportedProgram) -> None:
    """Remove from each squeeze the dimensions that it keeps, as they are not 1: ONNX would raise an error for them."""
    for node in program.graph.nodes:
        if node.target in SQUEEZES:
            shape, dims = node.args[0].meta["val"].shape, node.args[1]
            dims = dims if isinstance(dims, (tuple, list)) else [dims]
            ones = [dim for dim in dims if isinstance(shape[dim], int) and shape[dim] == 1]
            target = torch.ops.aten.squeeze.dims if ones else torch.ops.aten.clone.default
            change(node, target=target, args=(node.args[0], ones) if ones else node.args[:1])


# --- the translation


def _model(program: ExportedProgram, opset: int, place: Callable[[str], str]) -> Any:
    """Translate the program to ONNX. Raises Unfit if an operation has no ONNX form, with its places; CompileRefused for other
    reasons."""
    from torch.onnx import OnnxExporterError

    wrong = [node for node in program.graph.nodes if node.target in WRONG]
    if wrong:
        raise Unfit(_lost(_places([(node.target, str(node.meta.get("stack_trace") or "")) for node in wrong], place), opset))
    with silence_torch(), torch.no_grad(), report_refusals():
        program = decompose(program)
    try:
        with silence_torch(), torch.no_grad(), silence_library("onnx_ir"):
            model = translate(program, opset)
    except OnnxExporterError as error:
        with report_refusals(), silence_torch():
            lost, reason = find_untranslated(program, opset, error)
        places = _places(lost, place)
        if lost and all(isinstance(target, OpOverload) for target, _ in lost):
            raise Unfit(_lost(places, opset)) from error
        what = "; ".join(f"{name} at {', '.join(where[:SHOWN])}" for name, where in list(places.items())[:SHOWN])
        raise CompileRefused(f"torch.onnx does not support {what or 'this program'} ({quote(reason, 200)[1:-1]})") from error
    written_as = model.graph.opset_imports.get("")
    if written_as != opset:
        raise Unfit(f"torch.onnx wrote opset {written_as} instead of {opset}: give another opset")
    return model


def _places(lost: Sequence[tuple[Any, str]], place: Callable[[str], str]) -> dict[str, list[str]]:
    """Return the places of each of some operations, which come with their stack traces."""
    places: dict[str, list[str]] = {}
    for target, stack in lost:
        found = places.setdefault(str(target), [])
        if (where := place(stack)) not in found:
            found.append(where)
    return places


def _lost(places: Mapping[str, list[str]], opset: int) -> str:
    lines = []
    for name, where in places.items():
        more = f" and {len(where) - SHOWN} more places" if len(where) > SHOWN else ""
        lines.append(f"{name} at {', '.join(where[:SHOWN])}{more}")
    own = any(name.startswith("fxplug.") for name in places)
    if any(name.startswith("aten.conv") for name in places):  # as beside convolutions of a pass with per_sample
        lines[-1] += " (a convolution of as many groups as there are samples is written for one size: free='none')"
    out = "what this module was lowered from, module.meta['source']" if own else "to aoti or pt2, which have every operation"
    return (
        f"ONNX (opset {opset}) does not support {'; '.join(lines)}: replace it by other operations (a pass with place: "
        f"replace), or export {out}"
    )


def _make_live(model: Any, tensors: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> Json:
    """Make the slots' tensors inputs with a default value, then simplify the graph around them.

    An initializer that is also an input can be overridden at each run and costs nothing otherwise; a session neither folds it
    nor changes its layout.
    """
    initializers = model.graph.initializers
    names = {name: tensor for name, tensor in tensors.items() if name.endswith(".gates.table.names")}
    whole = sorted(tensors.keys() - names.keys())
    lost = [name for name in whole if name not in state or name not in initializers or not initializers[name].uses()]
    if lost:
        raise Unfit(
            f"the program does not read {', '.join(lost[:3])}{' ...' if lost[3:] else ''}, so changing the adapter would have "
            "no effect there: export the module that this one was lowered from, module.meta['source']"
        )
    values = {name: (initializers[name], initializers[name].const_value) for name in whole}
    for name, (value, _) in values.items():
        del initializers[name]
        value.const_value = None
        model.graph.inputs.append(value)
    with silence_library("onnx_ir"):
        _shorten(model)
    for name, (value, const) in values.items():
        value.const_value = const
        initializers[name] = value
    loaded = {name.removesuffix(".gates.table.names"): _texts(tensor) for name, tensor in names.items()}
    return {"live": list(values), "names": loaded}


def _shorten(model: Any) -> None:
    """Fold constants, and remove unused values.

    No rules rewrite patterns, as in onnxscript's `optimize`: they take a constant near 0 or 1 for that, and drop `+ 1e-8`.
    onnxruntime has its own, which are exact.
    """
    from onnx_ir.passes import common
    from onnxscript import optimizer

    optimizer.inline(model)
    for _ in range(2):
        with contextlib.suppress(RuntimeError):  # it fails at a split into parts of a free size, which stays as it is
            optimizer.fold_constants(model, onnx_shape_inference=True)
        for clear in (common.RemoveUnusedNodesPass, common.RemoveUnusedFunctionsPass, common.RemoveUnusedOpsetsPass):
            clear()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    common.DeduplicateInitializersPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.OutputFixPass()(model)
    common.NameFixPass()(model)


def _texts(names: torch.Tensor) -> list[str]:
    assert names.shape[1] == NAME
    return [bytes(row).rstrip(b"\0").decode("utf-8", "replace") for row in names.tolist()]


def _rename_outputs(model: Any) -> None:
    """Give each result its own name: one that is an input, a weight or another result is copied."""
    import onnx_ir

    seen: set[str] = set()
    taken = {value.name for value in (*model.graph.inputs, *model.graph.initializers.values())}
    for i, value in enumerate(model.graph.outputs):
        if value.name in seen or value.name in taken:
            name = next(f"{value.name}_{n}" for n in range(1, 1 << 30) if f"{value.name}_{n}" not in seen | taken)
            copy = onnx_ir.Value(name=name, shape=value.shape, type=value.type)
            model.graph.append(onnx_ir.Node("", "Identity", [value], outputs=[copy]))
            model.graph.outputs[i] = copy
        seen.add(model.graph.outputs[i].name)


def _forget_sources(model: Any) -> None:
    """Remove torch's metadata of each node: names of files and lines of the exporting machine."""
    graphs = [model.graph, *model.functions.values()]
    for graph in graphs:
        for node in graph.all_nodes():
            node.metadata_props.clear()
            node.doc_string = None
            for value in node.outputs:
                value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    for holder in (model, *graphs):
        holder.metadata_props.clear()


# --- the files


def _spill(model: Any, file: str) -> tuple[str, str]:
    """Write large weights into a second file, to which every tensor refers; return its name and SHA-256, empty if there are
    none."""
    from onnx_ir.external_data import unload_from_model

    tensors = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    if sum(tensor.nbytes for tensor in tensors) <= INLINE:
        return "", ""
    contents = hashlib.sha256()
    for tensor in tensors:
        contents.update(tensor.tobytes())
    beside = Path(file).with_name(make_data_name(Path(file).name, contents.hexdigest()))
    unload_from_model(model, beside.parent, beside.name, size_threshold_bytes=SMALL)
    with beside.open("rb") as written:
        os.fsync(written.fileno())
        return beside.name, hashlib.file_digest(written, "sha256").hexdigest()


def _bytes(model: Any) -> bytes:
    import onnx_ir

    data: bytes = onnx_ir.serde.serialize_model(model).SerializeToString()
    return data


def put(work: Path, target: Path) -> None:
    """Move a written model to its target, its data first: there is never a model without its data."""
    with lock_folder(target.parent):
        kept = [path.name for path in work.parent.iterdir() if path != work]
        for each in kept:
            os.replace(work.with_name(each), target.with_name(each))
        os.replace(work, target)
        for path in list(target.parent.iterdir()):
            if is_data_of(path.name, target.name) and path.name not in kept and path.is_file() and not path.is_symlink():
                with contextlib.suppress(OSError):
                    path.unlink()
