"""The call of a compiled program as plain data: what it takes, of which sizes, and what it gives back.

A compiled program takes a flat list of tensors and checks none of them. A `Signature` is what stands before it: Python's own
binding of arguments, the structure, types, devices and sizes of the inputs, the guards of the trace, and the structure of the
result. It is made from an exported program, and kept as JSON.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt
from torch.export import ExportedProgram

from ..core.artifacts.value_json import TORCH_NAMES, decode, encode
from ..core.errors import DEFAULT, ArtifactError, FxplugError, GuardError, Limits, quote
from ..core.ir.containers import list_members, rebuild
from ..core.torch_internals import modules as pytree
from ..core.torch_internals.exporting import list_guards
from ..core.torch_internals.tensors import get_size_name
from .expressions import evaluate, format_condition, parse

Json = dict[str, Any]
PLAIN = (bool, int, float, str, type(None))
DTYPES = TORCH_NAMES[torch.dtype]
KINDS = {kind.name: kind for kind in inspect._ParameterKind}
SEEN = 256  # how many kinds of calls are remembered as right
LONGEST = 1 << 20  # of the list of what a program gives


class Placeholder:
    """Stands among values for a tensor or a number by its place in the flat list, or for one that is `like` a text."""

    def __init__(self, kind: str, content: Any) -> None:
        self.kind, self.content = kind, content


# --- making one


def describe(program: ExportedProgram, parameters: Mapping[str, inspect.Parameter]) -> tuple[Json, list[str]]:
    """Return the signature of an exported program as JSON, and notes about guards that it cannot express.

    `parameters` are those of the exported module's `forward`.
    """
    args, kwargs = program.example_inputs
    flat, spec = pytree.tree_flatten((args, kwargs))
    names = list(program.graph_signature.user_inputs)
    if len(names) != len(flat):
        raise FxplugError("torch.export made a program whose inputs differ from the example inputs")
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    marks: list[Any] = list(flat)
    tensors: list[Json] = []
    for i, (value, name) in enumerate(zip(flat, names, strict=True)):
        if isinstance(value, torch.Tensor):
            marks[i] = Placeholder("tensor", len(tensors))
            sizes = [size if isinstance(size, int) else get_size_name(size) for size in nodes[str(name)].meta["val"].shape]
            tensors.append({"dtype": str(value.dtype).removeprefix("torch."), "shape": sizes})
    some_args, some_kwargs = pytree.tree_unflatten(marks, spec)
    given = inspect.Signature(list(parameters.values())).bind(*some_args, **some_kwargs).arguments
    described = []
    for parameter in parameters.values():
        required = parameter.default is inspect.Parameter.empty
        entry: Json = {"name": parameter.name, "kind": parameter.kind.name}
        if not required:
            entry["default"] = encode_value(parameter.default)
        if not required or parameter.name in given:
            entry["value"] = encode_value(given.get(parameter.name, parameter.default))
        described.append(entry)
    where = dict(place for name, value in given.items() for place in _places(value, name))
    guards, notes = _guards(program, dict(inspect.Signature(list(parameters.values())).bind(*args, **kwargs).arguments))
    guards += [text for text in _squeezed(program, tensors, where) if text not in guards]
    ranges = {str(s): [_bound(r.lower), _bound(r.upper)] for s, r in program.range_constraints.items()}
    result = encode_value(_result(program))
    return {"parameters": described, "tensors": tensors, "ranges": ranges, "guards": guards, "result": result}, notes


def _bound(number: Any) -> int | None:
    return int(number) if getattr(number, "is_Integer", isinstance(number, int)) else None


def _result(program: ExportedProgram) -> Any:
    flat: list[Any] = []
    for i, spec in enumerate(program.graph_signature.output_specs):
        if spec.kind.name == "USER_OUTPUT":
            # a constant has a place in the list of results too, with nothing of use in it
            number = type(spec.arg).__name__ in ("SymIntArgument", "SymFloatArgument", "SymBoolArgument")
            kind = "number" if number else "tensor"
            flat.append(spec.arg.value if hasattr(spec.arg, "value") else Placeholder(kind, len(flat)))
        elif spec.kind.name not in ("BUFFER_MUTATION", "TOKEN"):
            raise FxplugError(f"result {i} of the program is of kind {spec.kind.name}, which a package does not support")
    return pytree.tree_unflatten(flat, program.call_spec.out_spec)


def _guards(program: ExportedProgram, arguments: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the guards that can be parsed again, tried on the example; and a note on each of the others."""
    guards, notes = [], []
    for text in list_guards(program):
        try:
            holds = bool(evaluate(parse(text), arguments))
        except (FxplugError, ArithmeticError) as error:
            notes.append(f"the package does not check a condition on sizes: {text} ({error})")
            continue
        if not holds:
            raise FxplugError(f"the example inputs do not satisfy the condition {text}")
        guards.append(text)
    return guards, notes


def _squeezed(program: ExportedProgram, tensors: list[Json], where: Mapping[int, str]) -> Iterator[str]:
    """Yield the conditions that a squeezed dynamic dimension is not 1: the program keeps it then, unlike the traced module."""
    for node in program.graph.nodes:
        if not str(node.target).startswith("aten.squeeze."):
            continue
        shape = node.args[0].meta["val"].shape
        dims = node.args[1] if len(node.args) > 1 else range(len(shape))
        for dim in [dims] if isinstance(dims, int) else dims:
            name = None if isinstance(shape[dim], int) else get_size_name(shape[dim])
            same = [(i, d) for i, tensor in enumerate(tensors) for d, size in enumerate(tensor["shape"]) if size == name]
            if name is not None and same:
                head, bracket, rest = where[same[0][0]].partition("[")
                yield f"L['{head}']{bracket}{rest}.size()[{same[0][1]}] != 1"


def encode_value(value: Any) -> Json:
    """Encode a nested value with placeholders for its tensors as JSON: an object with one key, its kind. What is no plain data
    is stored as its text."""
    if isinstance(value, Placeholder):
        return {value.kind: value.content}
    if isinstance(value, PLAIN):
        return {"float": repr(value)} if isinstance(value, float) and not math.isfinite(value) else {"is": encode(value)}
    if (members := list_members(value)) is None:
        return {"like": repr(value)}
    made = {key: encode_value(member) for key, member in members}
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": list(made.values())}
    return {"dict": [[encode(key), member] for key, member in made.items()]}


# --- using one


class TensorFacts(BaseModel):
    """A tensor that a program takes, as a file says: its sizes are numbers, or names of those that are free."""

    model_config = ConfigDict(strict=True)
    dtype: Annotated[Any, BeforeValidator(lambda name: DTYPES[name])]
    shape: list[NonNegativeInt | str | None]


class SignatureFacts(BaseModel):
    """A signature, as a file says."""

    model_config = ConfigDict(strict=True)
    parameters: list[Json]
    tensors: list[TensorFacts]
    ranges: dict[str, Annotated[list[int | None], Field(min_length=2, max_length=2)]]
    guards: list[str]
    result: Any


class Signature:
    """A signature read from JSON. Raises ArtifactError for data that is none, or that says another number of tensors.

    `made` is what errors of calls say of the program.
    """

    def __init__(
        self, data: Json, device: torch.device, limits: Limits = DEFAULT, made: str = "package was compiled"
    ) -> None:
        self.device, self.made = device, made
        try:
            said = SignatureFacts.model_validate(data)
            self.tensors = said.tensors
            self.parameters = {entry["name"]: entry for entry in said.parameters}
            self.python = inspect.Signature([_parameter(entry) for entry in said.parameters])
            self.ranges = said.ranges
            if (total := sum(map(len, said.guards))) > limits.conditions:
                raise ValueError(
                    f"its conditions have {total} characters; the limit is {limits.conditions}; fxplug.Limits can raise it"
                )
            self.guards = [(text, parse(text)) for text in said.guards]
            self.result = _decoded(data["result"], ("tensor", "number"))
            self.values = {entry["name"]: _decoded(entry["value"], ("tensor",)) for entry in said.parameters}
            places = [place for name, value in self.values.items() for place in _places(value, name)]
            if sorted(index for index, _ in places) != list(range(len(self.tensors))):
                raise ValueError(f"its parameters have {len(places)} tensors, and it describes {len(self.tensors)}")
            self.where = dict(places)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, FxplugError) as error:
            what = f"{type(error).__name__}: {quote(str(error), 200)}"
            raise ArtifactError(f"the signature in the package cannot be read: {what}") from None
        self._seen: set[tuple[Any, ...]] = set()

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors of a call in the order of the program, each contiguous.

        Raises TypeError as Python does for a wrong call, FxplugError for a value, type, device or structure that the program
        was not compiled for, GuardError for sizes that do not satisfy its conditions.
        """
        bound = self.python.bind(*args, **kwargs).arguments
        flat: list[Any] = [None] * len(self.tensors)
        for name, entry in self.parameters.items():
            if name in bound:
                _fill(self.values[name], bound[name], name, flat, self.made)
            elif "default" in entry and entry["default"] != entry["value"]:
                raise FxplugError(
                    f"{name} is missing; this {self.made} with {_text(self.values[name])} for it: pass it, or export again "
                    "with example inputs without it"
                )
        self._check(flat, bound)
        # the program reads memory as its example lay there, and looks at no stride
        return [tensor.detach().contiguous() for tensor in flat]

    def unflatten(self, flat: list[Any]) -> Any:
        """Return the result of the program from its flat list. Raises FxplugError for a list that does not match the
        signature."""
        try:
            return _rebuild(self.result, flat)
        except (IndexError, RuntimeError) as error:
            raise FxplugError(f"the program's {len(flat)} results do not fit its signature ({error})") from None

    def _check(self, flat: list[torch.Tensor], arguments: dict[str, Any]) -> None:
        key = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in flat)
        if key in self._seen:
            return
        sizes: dict[str, tuple[int, str]] = {}
        for i, (tensor, expected) in enumerate(zip(flat, self.tensors, strict=True)):
            self._check_tensor(tensor, expected, self.where[i], sizes)
        for text, tree in self.guards:
            try:
                holds = evaluate(tree, arguments)
            except (FxplugError, ArithmeticError):
                holds = False
            if not holds:
                raise GuardError(
                    f"the {self.made} for inputs with {quote(format_condition(text), 400)[1:-1]}; "
                    f"these are {', '.join(f'{self.where[i]} {tuple(t.shape)}' for i, t in enumerate(flat))}"
                )
        if len(self._seen) < SEEN:
            self._seen.add(key)

    def _check_tensor(
        self, tensor: torch.Tensor, expected: TensorFacts, where: str, sizes: dict[str, tuple[int, str]]
    ) -> None:
        if tensor.dtype != expected.dtype:
            raise FxplugError(f"{where} is {tensor.dtype}; this {self.made} for {expected.dtype}")
        if tensor.device != self.device:
            it = self.made.split()[0]
            raise FxplugError(f"{where} is on {tensor.device}; this {it} runs on {self.device}: move it there")
        if tensor.dim() != len(expected.shape):
            raise GuardError(f"{where} has {tensor.dim()} dimensions, not {len(expected.shape)}: {tuple(tensor.shape)}")
        for d, (size, name) in enumerate(zip(tensor.shape, expected.shape, strict=True)):
            place = f"{where}, dimension {d}"
            if isinstance(name, int) and size != name:
                raise GuardError(f"{place}: the size is {size}, and the {self.made} for {name} only")
            if not isinstance(name, str):
                continue
            known, first = sizes.setdefault(name, (size, place))
            if size != known:
                raise GuardError(f"{place}: the size is {size}, and {first} has {known}; the two must be equal")
            low, high = self.ranges.get(name, (None, None))
            # torch.export gives every free size 2 as its least, and means none by that
            if (low is not None and low > 2 and size < low) or (high is not None and size > high) or size == 0:
                limits = f"{low if low is not None and low > 2 else 1} or more"
                limits += "" if high is None else f" and {high} or less"
                raise GuardError(f"{place}: the size is {size}, and the {self.made} for {limits}")


def _parameter(entry: Json) -> inspect.Parameter:
    kind = KINDS[entry["kind"]]
    if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        entry.setdefault("value", {"tuple" if kind is inspect.Parameter.VAR_POSITIONAL else "dict": []})
    if "default" in entry:
        _decoded(entry["default"], ())
    # the value does not matter: what is left out is compared by its entry
    return inspect.Parameter(entry["name"], kind, default=None if "default" in entry else inspect.Parameter.empty)


def _decoded(data: Any, marks: tuple[str, ...]) -> Any:
    """Decode a value from `encode_value`. Raises ValueError for anything else, as placeholders of other kinds than `marks`."""
    ((kind, body),) = data.items()
    if kind == "is" and isinstance(body, PLAIN):
        return decode(body)
    if kind == "float":
        return decode(data)
    if kind in ("list", "tuple") and type(body) is list:
        return (list if kind == "list" else tuple)(_decoded(member, marks) for member in body)
    if kind == "dict" and len(made := {decode(key): _decoded(member, marks) for key, member in body}) == len(body):
        return made
    if kind == "like" and type(body) is str or kind in marks and type(body) is int and 0 <= body < LONGEST:
        return Placeholder(kind, body)
    raise ValueError(f"{quote(data)} is not an encoded value")


def _places(value: Any, where: str) -> list[tuple[int, str]]:
    """Return the indices of a value's tensors, with the name of each: `more['scale']`."""
    if isinstance(value, Placeholder):
        return [(value.content, where)] if value.kind == "tensor" else []
    return [place for key, member in list_members(value) or () for place in _places(member, f"{where}[{key!r}]")]


def _fill(wanted: Any, value: Any, where: str, flat: list[Any], made: str) -> None:
    """Put the tensors of a value into the program's list; raise FxplugError if anything else differs from the compiled
    value."""
    if isinstance(wanted, Placeholder) and wanted.kind == "tensor":
        if not isinstance(value, torch.Tensor):
            raise FxplugError(f"{where} must be a tensor, not {_short(value)}")
        flat[wanted.content] = value
        return
    found = None if isinstance(value, torch.Tensor) else list_members(value)
    inside, given = list_members(wanted), None if found is None else dict(found)
    if inside is None:
        like = isinstance(wanted, Placeholder)
        if not (repr(value) == wanted.content if like else type(value) is type(wanted) and value == wanted):
            raise FxplugError(
                f"{where} is {_short(value)}; this {made} with {_text(wanted)} for it: export it again with this value"
            )
        return
    members = dict(inside)
    if given is None or given.keys() != members.keys():
        keyed = isinstance(wanted, dict)
        what = f"with {', '.join(map(str, members))}" if keyed else f"of {len(members)}"
        raise FxplugError(f"{where} must be a {type(wanted).__name__} {what}, not {_short(value)}")
    for key, member in members.items():
        _fill(member, given[key], f"{where}[{key!r}]", flat, made)


def _rebuild(tree: Any, flat: list[Any]) -> Any:
    if isinstance(tree, Placeholder):
        found = tree.content if tree.kind == "like" else flat[tree.content]
        return found.item() if tree.kind == "number" else found
    members = list_members(tree)
    return tree if members is None else rebuild(tree, {key: _rebuild(member, flat) for key, member in members})


def _text(value: Any) -> str:
    if isinstance(value, Placeholder):
        return str(value.content) if value.kind == "like" else f"a {value.kind}"
    return repr(value) if list_members(value) is None else f"a {type(value).__name__}"


def _short(value: Any) -> str:
    text = f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) < 60 else f"a {type(value).__name__}"
