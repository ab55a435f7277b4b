"""A traced module as a file that runs without Python code of anybody's: torch.export's, compiled by AOTInductor, or ONNX."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram

from ..adapters.slots import Adapters
from ..core.artifacts.value_json import encode_portable
from ..core.errors import FxplugError, did_you_mean, format_fields, get_first_line, quote
from ..core.ir.calls import call_code
from ..core.ir.containers import Container, list_leaves, list_members, make_call, map_leaves
from ..core.ir.graph import copy_graph, insert, replace
from ..core.ir.traced_module import TracedModule, check_traced, strip_to_container
from ..core.ir.variants import choose_module
from ..core.locks import with_read_lock
from ..core.reading import make_reporter, report_errors
from ..core.torch_internals import modules as pytree
from ..core.writing import open_new, replace_file
from ..lowerings.linear.operators import keep_kernels
from . import onnx_trial, onnx_writer
from .aoti_writer import check_compiler, silence_torch, write
from .blockers import CompileRefused, Unfit, describe_packed_layer, report_refusals
from .size_trial import NotFree

FORMATS = {"pt2": ".pt2", "aoti": ".aoti.pt2", "onnx": ".onnx"}
FREE: dict[str, Callable[[torch.Tensor], Any]] = {
    "all": lambda t: dict.fromkeys(range(t.dim()), Dim.AUTO),
    "batch": lambda t: {0: Dim.AUTO} if t.dim() else {},
    "none": lambda t: {},
}


class Unwritten(FxplugError):
    """A file that cannot be written, however many sizes are free."""


@dataclass(frozen=True)
class Exported:
    """What `export` wrote. `dynamic` names the dimensions of each input that stayed free, `kept` how they were asked for."""

    path: Path
    dynamic: dict[str, list[int]]
    kept: str
    seconds: float
    notes: tuple[str, ...] = ()

    __repr__ = format_fields


@with_read_lock
def export(
    module: TracedModule,
    path: str | os.PathLike[str],
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    to: str = "pt2",
    free: str = "all",
    options: Mapping[str, Any] | None = None,
) -> Exported:
    """Write the graph of the mode in force into a file: a program (`to="pt2"`), compiled code ("aoti"), or a model ("onnx").

    Of a module with variants it is the graph for the example call, and only that one is in the file. What was there stays until
    the new file is whole.

    A program is for `torch.export.load`, which unpickles: fxplug itself never reads such a file, and you should read none that
    you do not trust. Compiled code is for `fxplug.load_package`, is compiled by AOTInductor for the device that the module is
    on, and keeps what passes added apart from its code, so that adapters can be changed in it; it is for processors like this
    one unless `options` say otherwise. An ONNX model is for `fxplug.load_onnx`, and for onnxruntime without fxplug: what is in
    the slots are inputs with values of their own. Above 1 GiB of weights they are beside it, in `NAME.onnx.HASH.data`. It needs
    onnxscript, in the extra `fxplug[onnx]`.

    Every dimension of the example tensors is free if the program allows it; otherwise the first ones are, and at last none: the
    result says which. Parameters and buffers keep their names in the program's `state_dict`. A result class becomes a dict of
    its fields that are not None, a NamedTuple a tuple, so that the file needs no library of the model's.

    Args:
        module: The traced module.
        path: A file, or a folder, which gets `model.pt2`, `model.aoti.pt2` or `model.onnx`.
        args: Example inputs by position, as for `trace`.
        kwargs: Example inputs by name.
        to: "pt2", "aoti" or "onnx".
        free: Which dimensions to try as free first: "all", "batch" or "none"; proving that many are free can take torch
            minutes.
        options: Of "aoti" inductor's, such as `{"cpp.march": "x86-64-v3", "cpp.simdlen": 256}`; of "onnx" its `opset`, 18 to
            23.

    Returns:
        The path, the dimensions that are free, and notes.

    Raises:
        FxplugError: The program cannot be exported at all, with the reason of each try; ONNX has no form for an operation, with
            its places; the file cannot be written; or a compiler or library is missing.
    """
    if to not in FORMATS:
        raise FxplugError(f"no export format '{to}'{did_you_mean(to, FORMATS)}; there are {', '.join(FORMATS)}")
    if free not in FREE:
        raise FxplugError(f"free must be one of {', '.join(FREE)}, not {quote(free)}{did_you_mean(free, FREE)}")
    if options and to == "pt2":
        raise FxplugError(f"options are for inductor, and {to} is not compiled: leave them out, or export to aoti")
    if isinstance(getattr(module, "module", None), TracedModule):  # which decides on the host what is computed
        check_traced(module, "export")
    if found := describe_packed_layer(module):
        raise FxplugError(f"{found}: quantise the model with torchao, or export it un-quantised")
    start = time.perf_counter()
    target = _target(Path(path), to)
    args, named = make_call(args, kwargs)
    facts: dict[str, Any] = {}
    opset = onnx_writer.check_exporter(options) if to == "onnx" else 0
    if to != "pt2":
        device = _device(module, (args, named))
        facts = _facts(module)
    if to == "onnx" and device.type == "meta":
        raise FxplugError("the module is on the meta device and has no values: export one with its weights")
    if to == "onnx" and module.training:
        raise FxplugError(
            "the module is in training mode, and an ONNX model cannot store anything between calls: export module.eval()"
        )
    if to == "aoti":
        check_compiler(device)
        facts["attributes"] = encode_portable({"dtype": module.dtype, **module._extras})
        # compiled code reads an input's memory in the order in which the example's lay
        args, named = map_leaves((args, named), lambda t, _: t.contiguous())
    plain, notes = _program(choose_module(module, args, named))
    parameters = inspect.signature(plain.forward).parameters
    if to == "onnx":
        results = onnx_writer.TensorResults(plain)

    with replace_file(target, make_reporter(target, Unwritten), onnx_writer.put if to == "onnx" else None) as file:
        name = str(file)

        def finish(program: ExportedProgram) -> list[str]:
            with report_errors(make_reporter(target, Unwritten), "cannot be written"):
                if to == "aoti":
                    return write(program, parameters, name, _live(module), facts, options, plain)
                if to == "onnx":
                    slots = _slots(module, facts)
                    place = functools.partial(_place, module)
                    said = onnx_writer.write(program, parameters, name, slots, facts, opset, results, place)
                    return [*said, *onnx_trial.try_model(name, program, plain, results.said)]
                _write_out_rounding(program.graph)
                program.graph_module.recompile()
                with silence_torch(), open_new(name) as opened, report_refusals():
                    torch.export.save(program, opened)
            return []

        with keep_kernels() if to == "aoti" else contextlib.nullcontext():
            program, kept, failures, more = _export(plain, args, named, free, finish)
    seconds = time.perf_counter() - start
    return Exported(target, dynamic_dims(program), kept, seconds, (*notes, *failures, *more))


def _target(path: Path, to: str) -> Path:
    with report_errors(make_reporter(path, Unwritten), "cannot be written"):
        if path.is_dir():
            return path / f"model{FORMATS[to]}"
        ending = f".{FORMATS[to].rpartition('.')[2]}"
        return path if path.suffix == ending else path.with_name(f"{path.name.removesuffix(f'.{to}')}{FORMATS[to]}")


# what the gates of a pass are made of, from the third on by sample, by group, and by region
TABLE = ("names", "weights", "entries", "which", "factors", "regions", "masks", "rests", "ratios")


# --- for a package


def _device(module: nn.Module, inputs: Any) -> torch.device:
    """Return the one device of a module and its inputs. Raises FxplugError for several."""
    tensors = [*module.parameters(), *module.buffers(), *(t for t in list_leaves(inputs) if isinstance(t, torch.Tensor))]
    devices = sorted({str(t.device) for t in tensors})
    if len(devices) > 1:
        raise FxplugError(f"a package is for one device, and the module and the example inputs are on {' and '.join(devices)}")
    return torch.device(devices[0] if devices else "cpu")


def _live(module: TracedModule) -> dict[str, torch.Tensor]:
    """Return the tensors of the passes, by their names in this module."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    prefixes = tuple(f"{entry['name']}." for entry in module.meta.get("passes", []))
    moved = {now for name, now in module.meta.get("originals", {}).items() if name.startswith(prefixes)}
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes) or name in moved}


def _facts(module: TracedModule) -> dict[str, Any]:
    """Return a package manifest's facts about a module, in particular the banks of its slots."""
    passes = module.meta.get("passes", [])
    facts: dict[str, Any] = {"module": module.classes[0], "mode": "train" if module.training else "eval"}
    facts["passes"] = [entry["name"] for entry in passes]
    if any(entry.get("slots") for entry in passes):
        adapters = Adapters(module)
        if adapters.watchers:
            raise FxplugError(
                "this module has its adapters merged into its weights, and a package cannot merge them again when they change: "
                "export what it was lowered from, module.meta['source']"
            )
        found = {name: [bank.without_magnitude() for bank in banks] for name, banks in adapters.banks.items()}
        facts["banks"] = {name: [bank.plainly() for bank in banks] for name, banks in found.items()}
        names = [name for banks in found.values() for bank in banks for name in bank.names.values()]
        facts["where"] = {name: adapters.where.get(name, name) for name in names}
    return facts


def _slots(module: TracedModule, facts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a module's slots, by their names in it."""
    if "banks" not in facts:
        return {}
    adapters = Adapters(module)
    names = [*facts["where"], *(f"{name}.gates.table.{row}" for name in adapters.banks for row in TABLE)]
    return {adapters.where.get(name, name): tensor for name in names if (tensor := adapters.there(name)) is not None}


# --- the program


def _program(module: TracedModule) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the active graph as a plain module on the same weights, whose result consists of tuples, lists and dicts, and
    notes."""
    graph = copy_graph(module.graph_in_force)
    notes: list[str] = []
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.Size:
            replace(node, tuple(node.args[0]))
        elif node.op == "call_function" and isinstance(node.target, type):
            notes.append(_plain_result(node))
    tree = strip_to_container(module)
    traced = TracedModule(tree, {module.training: graph})
    # torch.export interprets a GraphModule, and takes keyword arguments by position then; it calls other modules. Nothing
    # plainer: a module around this one would put its name before every weight's
    kind = type(module.classes[0], (Container,), {"forward": type(traced).forward, "_call_code": call_code})
    tree.__class__ = kind
    return tree, tuple(notes)


def _plain_result(node: fx.Node) -> str:
    name = node.target.__name__  # type: ignore[union-attr]
    value: Any = tuple(node.args)
    if node.kwargs:
        value = {k: v for k, v in node.kwargs.items() if v is not None}
    replace(node, value)
    return f"the result is a {type(value).__name__} instead of a {name}"


def _export(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    free: str,
    finish: Callable[[ExportedProgram], list[str]],
) -> tuple[ExportedProgram, str, list[str], list[str]]:
    """Export with as many dynamic sizes as `finish` accepts. Returns the program, their level, the failures before, and its
    result."""
    levels = list(FREE)[list(FREE).index(free) :]
    doubled: Any = None
    tries: list[tuple[str, Any]] = [(level, (args, kwargs)) for level in levels]
    if any(t.dim() and t.shape[0] == 1 for t in list_leaves((args, kwargs)) if isinstance(t, torch.Tensor)):
        # torch.export fixes a size of 1 wherever an example has it
        doubled = map_leaves((args, kwargs), lambda t, _: torch.cat([t, t]) if t.dim() and t.shape[0] == 1 else t)
        tries = [(level, doubled) for level in levels if level != "none"] + tries
    failures: list[str] = []
    error: Exception | None = None
    fixed: set[tuple[int, int]] = set()  # dimensions of the inputs, by number, that are not free in what was written
    while tries:
        kept, call = tries[0]
        try:
            program = _free_program(module, call, FREE[kept], fixed)
            return program, kept, failures, finish(program)
        except (Unfit, Unwritten):
            raise
        except NotFree as caught:
            failures.append(f"{caught}: they stay as in the example")
            fixed |= caught.places
            tries = [one for one in tries if one[1] is not doubled]  # a size that stays is the example's own
        except (CompileRefused, FxplugError) as caught:
            error = caught
            failures.append(f"with {kept} dimensions free it fails: {get_first_line(caught)}")
            tries.pop(0)
    raise FxplugError("torch.export fails for this module: " + "; ".join(failures)) from error


def _free_program(
    module: nn.Module, call: Any, free: Callable[[torch.Tensor], Any], fixed: set[tuple[int, int]]
) -> ExportedProgram:
    """Export a program for a call with these dynamic dimensions of its tensors, except the fixed ones."""
    flat = pytree.tree_flatten(call)[0]

    def dims(tensor: torch.Tensor) -> Any:  # which may be given twice
        held = {d for number, d in fixed if flat[number] is tensor}
        return {d: dim for d, dim in free(tensor).items() if d not in held}

    args, kwargs = call
    bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    shapes = {name: _shapes(value, dims) for name, value in bound.items()}
    with silence_torch(), report_refusals():
        return torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False)


def _write_out_rounding(graph: fx.Graph) -> None:
    """Replace math.ceil and math.floor of a size by operations that torch.export.save can store."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (math.ceil, math.floor):
            continue
        up = node.target is math.ceil
        whole = _call(node, math.trunc, node.args[0])
        beyond = _call(node, operator.gt, *((node.args[0], whole) if up else (whole, node.args[0])))
        next_one = _call(node, operator.add, whole, 1 if up else -1)
        rounded = _call(node, torch.sym_ite, beyond, next_one, whole)
        rounded.meta["val"] = node.meta["val"]
        replace(node, rounded)


def _place(module: TracedModule, stack: str) -> str:
    """Return the region of an operation of the exported program, found by the line of our code in its stack trace."""
    nodes = {node.name: node for graph in module.graphs.values() for node in graph.nodes}
    for name in re.findall(r"^\s+(\w+) = ", stack, re.MULTILINE):
        stack_of = nodes[name].meta.get("nn_module_stack") if name in nodes else None
        if stack_of and (path := next(reversed(stack_of))):
            return f"'{path}'"
    return "the model itself"


def _call(before: fx.Node, function: Callable[..., Any], *args: Any) -> fx.Node:
    value = function(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))
    return insert(before.graph, "call_function", function, args, before=before, meta={"val": value})


def _shapes(value: Any, dims: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return dims(value)
    members = list_members(value)
    if members is None:
        return None
    found = {key: _shapes(member, dims) for key, member in members}
    return found if isinstance(value, dict) else type(value)(found.values())


def dynamic_dims(program: ExportedProgram) -> dict[str, list[int]]:
    """Return the dynamic dimensions of each input of an exported program."""
    inputs = set(program.graph_signature.user_inputs)
    found = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in inputs and isinstance(node.meta.get("val"), torch.Tensor):
            found[node.name] = [d for d, size in enumerate(node.meta["val"].shape) if not _fixed(size)]
    return found


def _fixed(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) or size.node.maybe_as_int() is not None
