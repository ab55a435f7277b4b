"""The call of a compiled program as plain data: what it takes, of which sizes, and what it gives back.

A compiled program takes a flat list of tensors and checks none of them. A `Signature` is what stands before it: Python's own
binding of arguments, the structure, types, devices and sizes of the inputs, the guards of the trace, and the structure of the
result. It is made from an exported program, and kept as JSON.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram

from ..errors import ArtifactError, FxplugError, GuardError, shown
from ..ir.pytree import children
from ..limits import DEFAULT, Limits
from ..torch_internals import pytree
from ..torch_internals.packaging import guards_of
from ..torch_internals.symbols import size_name
from .expressions import evaluate, parsed, readable

Json = dict[str, Any]
PLAIN = (bool, int, float, str, type(None))
DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
KINDS = {kind.name: kind for kind in inspect._ParameterKind}
SEEN = 256  # how many kinds of calls are remembered as right
LONGEST = 1 << 20  # of the list of what a program gives


class _Slot:
    """Stands for the tensor of a position in the flat list, or for the number in it."""

    def __init__(self, index: int, kind: str = "tensor") -> None:
        self.index, self.kind = index, kind


# --- making one


def describe(program: ExportedProgram, parameters: Mapping[str, inspect.Parameter]) -> tuple[Json, list[str]]:
    """The signature of an exported program as JSON, and notes about guards that it cannot say.

    `parameters` are those of the exported module's `forward`.
    """
    args, kwargs = program.example_inputs
    flat, spec = pytree.tree_flatten((args, kwargs))
    names = list(program.graph_signature.user_inputs)
    if len(names) != len(flat):
        raise FxplugError("torch.export gave this program other inputs than the example has")
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    marks: list[Any] = list(flat)
    tensors: list[Json] = []
    for i, (value, name) in enumerate(zip(flat, names, strict=True)):
        if isinstance(value, torch.Tensor):
            marks[i] = _Slot(len(tensors))
            sizes = [size if isinstance(size, int) else size_name(size) for size in nodes[str(name)].meta["val"].shape]
            tensors.append({"dtype": str(value.dtype).removeprefix("torch."), "shape": sizes})
    some_args, some_kwargs = pytree.tree_unflatten(marks, spec)
    given = inspect.Signature(list(parameters.values())).bind(*some_args, **some_kwargs).arguments
    described = []
    for parameter in parameters.values():
        required = parameter.default is inspect.Parameter.empty
        entry: Json = {"name": parameter.name, "kind": parameter.kind.name}
        if not required:
            entry["default"] = encode(parameter.default)
        if not required or parameter.name in given:
            entry["value"] = encode(given.get(parameter.name, parameter.default))
        described.append(entry)
    guards, notes = _guards(program, dict(inspect.Signature(list(parameters.values())).bind(*args, **kwargs).arguments))
    ranges = {str(s): [_bound(r.lower), _bound(r.upper)] for s, r in program.range_constraints.items()}
    result = encode(_result(program))
    return {"parameters": described, "tensors": tensors, "ranges": ranges, "guards": guards, "result": result}, notes


def _bound(number: Any) -> int | None:
    return int(number) if getattr(number, "is_Integer", isinstance(number, int)) else None


def _result(program: ExportedProgram) -> Any:
    flat: list[Any] = []
    for i, spec in enumerate(program.graph_signature.output_specs):
        if spec.kind.name == "USER_OUTPUT":
            # a constant has a place in the list of results too, with nothing of use in it
            number = type(spec.arg).__name__ in ("SymIntArgument", "SymFloatArgument", "SymBoolArgument")
            flat.append(spec.arg.value if hasattr(spec.arg, "value") else _Slot(len(flat), "number" if number else "tensor"))
        elif spec.kind.name not in ("BUFFER_MUTATION", "TOKEN"):
            raise FxplugError(f"a program with the result {i} of kind {spec.kind.name} cannot be packed")
    return pytree.tree_unflatten(flat, program.call_spec.out_spec)


def _guards(program: ExportedProgram, arguments: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The guards that can be read again, tried on the example; and a note on each of the others."""
    guards, notes = [], []
    for text in guards_of(program):
        try:
            holds = bool(evaluate(parsed(text), arguments))
        except (FxplugError, ArithmeticError) as error:
            notes.append(f"a condition on sizes is not checked by the package: {text} ({error})")
            continue
        if not holds:
            raise FxplugError(f"the example inputs do not keep the condition {text}")
        guards.append(text)
    return guards, notes


def encode(value: Any) -> Json:
    """A nested value with slots for its tensors, as JSON; what is no plain data is kept by its text."""
    if isinstance(value, _Slot):
        return {value.kind: value.index}
    if isinstance(value, PLAIN):
        return {"is": value}
    members = children(value)
    if members is None:
        return {"like": repr(value)}
    entries = [[key, encode(member)] for key, member in members]
    kind = "list" if isinstance(value, list) else "tuple" if isinstance(value, tuple) else "dict"
    return {kind: entries if kind == "dict" else [entry for _, entry in entries]}


# --- using one


@dataclass
class _Tensor:
    dtype: torch.dtype
    shape: list[int | str | None]


class Signature:
    """A signature read from JSON. Raises ArtifactError for data that is none, or that says another number of tensors."""

    def __init__(self, data: Json, device: torch.device, limits: Limits = DEFAULT) -> None:
        self.device = device
        try:
            self.tensors = [_tensor(entry) for entry in _list(data["tensors"])]
            self.parameters = {entry["name"]: entry for entry in _list(data["parameters"])}
            self.python = inspect.Signature([_parameter(entry) for entry in data["parameters"]])
            self.ranges = {name: _checked_range(*bounds) for name, bounds in data["ranges"].items()}
            self.guards = [(text, parsed(text)) for text in _conditions(data["guards"], limits)]
            self.result = data["result"]
            _check_tree(self.result, ("tensor", "number"))
            indices = [i for entry in data["parameters"] for i in _check_tree(entry["value"], ("tensor",)) if i is not None]
            if sorted(indices) != list(range(len(self.tensors))):
                raise ValueError(f"its parameters take {len(indices)} tensors, and it describes {len(self.tensors)}")
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, FxplugError) as error:
            what = f"{type(error).__name__}: {shown(str(error), 200)}"
            raise ArtifactError(f"the signature in the package cannot be read: {what}") from None
        self._seen: set[tuple[Any, ...]] = set()

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call in the order of the program, each contiguous.

        Raises TypeError as Python does for a wrong call, FxplugError for a value, type, device or structure that the program
        was not compiled for, GuardError for sizes that it does not hold for.
        """
        bound = self.python.bind(*args, **kwargs).arguments
        flat: list[Any] = [None] * len(self.tensors)
        for name, entry in self.parameters.items():
            if name in bound:
                _fill(entry["value"], bound[name], name, flat)
            elif "default" in entry and entry["default"] != entry["value"]:
                raise FxplugError(
                    f"{name} is not given; this package was compiled with {_text(entry['value'])} for it: give it, or export "
                    "it again with example inputs that leave it out"
                )
        self._check(flat, bound)
        # the program reads memory as its example lay there, and looks at no stride
        return [tensor.detach().contiguous() for tensor in flat]

    def unflatten(self, flat: list[Any]) -> Any:
        """The result of the program from its flat list. Raises FxplugError for a list that is not as the signature says."""
        try:
            return _rebuild(self.result, flat)
        except (IndexError, RuntimeError) as error:
            raise FxplugError(f"the program's {len(flat)} results are not those that its signature has ({error})") from None

    def _check(self, flat: list[torch.Tensor], arguments: dict[str, Any]) -> None:
        key = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in flat)
        if key in self._seen:
            return
        sizes: dict[str, tuple[int, str]] = {}
        for i, (tensor, expected) in enumerate(zip(flat, self.tensors, strict=True)):
            self._check_tensor(tensor, expected, self._where(i), sizes)
        for text, tree in self.guards:
            try:
                holds = evaluate(tree, arguments)
            except (FxplugError, ArithmeticError):
                holds = False
            if not holds:
                raise GuardError(
                    f"the package was compiled for inputs with {shown(readable(text), 400)[1:-1]}; "
                    f"these are {', '.join(f'{self._where(i)} {tuple(t.shape)}' for i, t in enumerate(flat))}"
                )
        if len(self._seen) < SEEN:
            self._seen.add(key)

    def _check_tensor(self, tensor: torch.Tensor, expected: _Tensor, where: str, sizes: dict[str, tuple[int, str]]) -> None:
        if tensor.dtype != expected.dtype:
            raise FxplugError(f"{where} is {tensor.dtype}; this package was compiled for {expected.dtype}")
        if tensor.device != self.device:
            raise FxplugError(f"{where} is on {tensor.device}; this package runs on {self.device}: move it there")
        if tensor.dim() != len(expected.shape):
            raise GuardError(f"{where} has {tensor.dim()} dimensions, not {len(expected.shape)}: {tuple(tensor.shape)}")
        for d, (size, name) in enumerate(zip(tensor.shape, expected.shape, strict=True)):
            place = f"{where}, dimension {d}"
            if isinstance(name, int) and size != name:
                raise GuardError(f"{place}: the size is {size}, and the package was compiled for {name} only")
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
                raise GuardError(f"{place}: the size is {size}, and the package was compiled for {limits}")

    def _where(self, index: int) -> str:
        for name, entry in self.parameters.items():
            found = _path(entry.get("value", {}), index)
            if found is not None:
                return f"{name}{found}"
        return f"input {index}"


def _parameter(entry: Json) -> inspect.Parameter:
    kind = KINDS[entry["kind"]]
    if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        entry.setdefault("value", {"tuple" if kind is inspect.Parameter.VAR_POSITIONAL else "dict": []})
    if "default" in entry:
        _check_tree(entry["default"], ())
    # the value does not matter: what is left out is compared by its entry
    return inspect.Parameter(entry["name"], kind, default=None if "default" in entry else inspect.Parameter.empty)


def _check_tree(tree: Any, slots: tuple[str, ...]) -> list[int]:
    """The indices of the tensors in an encoded value. Raises ValueError for what `encode` does not make."""
    if type(tree) is not dict or len(tree) != 1:
        raise ValueError(f"{shown(tree)} is no value")
    ((kind, content),) = tree.items()
    if kind in slots:
        if type(content) is not int or not 0 <= content < LONGEST:
            raise ValueError(f"{shown(content)} is no position of a tensor")
        return [content]
    if kind == "is" and isinstance(content, PLAIN) or kind == "like" and type(content) is str:
        return []
    members = _list(content) if kind in ("list", "tuple", "dict") else None
    if members is None:
        raise ValueError(f"{shown(tree)} is no value")
    if kind == "dict":
        keys = [key for key, _ in members]
        if not all(isinstance(key, PLAIN) for key in keys) or len(set(keys)) != len(keys):
            raise ValueError(f"{shown(keys)} are no keys of a dict")
        members = [member for _, member in members]
    return [index for member in members for index in _check_tree(member, slots)]


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"{shown(value)} is no list")
    return value


def _tensor(entry: Json) -> _Tensor:
    return _Tensor(DTYPES[entry["dtype"]], [_checked_size(size) for size in _list(entry["shape"])])


def _checked_size(size: Any) -> int | str | None:
    if size is not None and type(size) is not str and (type(size) is not int or size < 0):
        raise ValueError(f"{shown(size)} is no size")
    return size


def _checked_range(low: Any, high: Any) -> tuple[int | None, int | None]:
    if any(bound is not None and type(bound) is not int for bound in (low, high)):
        raise ValueError(f"{shown([low, high])} are no bounds of a size")
    return low, high


def _conditions(texts: Any, limits: Limits) -> list[str]:
    if any(type(text) is not str for text in _list(texts)):
        raise ValueError(f"{shown(texts)} are no conditions")
    total = sum(map(len, texts))
    if total > limits.conditions:
        raise ValueError(f"its conditions have {total} characters, and more than {limits.conditions} are not read; see Limits")
    return list(texts)


def _fill(tree: Json, value: Any, where: str, flat: list[Any]) -> None:
    """Put the tensors of a value where the program wants them; everything else has to be as it was compiled in."""
    ((kind, content),) = tree.items()
    if kind == "tensor":
        if not isinstance(value, torch.Tensor):
            raise FxplugError(f"{where} has to be a tensor, not {_short(value)}")
        flat[content] = value
    elif kind == "is" or kind == "like":
        same = type(value) is type(content) and value == content if kind == "is" else repr(value) == content
        if not same:
            raise FxplugError(
                f"{where} is {_short(value)}; this package was compiled with {_text(tree)} for it: "
                "export it again with the other value"
            )
    else:
        members = None if isinstance(value, torch.Tensor) else children(value)
        found = None if members is None else dict(members)
        keys = [key for key, _ in content] if kind == "dict" else list(range(len(content)))
        if found is None or set(found) != set(keys):
            what = f"with {', '.join(map(str, keys))}" if kind == "dict" else f"of {len(content)}"
            raise FxplugError(f"{where} has to be a {kind} {what}, not {_short(value)}")
        for key, entry in content if kind == "dict" else enumerate(content):
            _fill(entry, found[key], f"{where}[{key!r}]", flat)


def _rebuild(tree: Json, flat: list[Any]) -> Any:
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return flat[content]
    if kind == "number":
        return flat[content].item()
    if kind == "dict":
        return {key: _rebuild(entry, flat) for key, entry in content}
    if kind in ("list", "tuple"):
        members = [_rebuild(entry, flat) for entry in content]
        return members if kind == "list" else tuple(members)
    return content


def _path(tree: Json, index: int) -> str | None:
    for kind, content in tree.items():
        if kind == "tensor":
            return "" if content == index else None
        if kind in ("dict", "list", "tuple"):
            for key, entry in content if kind == "dict" else enumerate(content):
                found = _path(entry, index)
                if found is not None:
                    return f"[{key!r}]{found}"
    return None


def _text(tree: Json) -> str:
    ((kind, content),) = tree.items()
    return repr(content) if kind == "is" else str(content) if kind == "like" else f"a {kind}"


def _short(value: Any) -> str:
    text = f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) < 60 else f"a {type(value).__name__}"
