"""The calls of models by requests that run at once: which may be one call, how it is made, and whether it is right."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ..core.ir.comparison import RESULT, is_close
from ..core.torch_internals.trees import tree_flatten, tree_unflatten

PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)  # compared by their values, kinds apart
Modes = tuple[tuple[str, bool, torch.dtype], ...]  # of autocast, which each thread has for itself
Sizes = tuple[torch.Size | None, ...]  # of the tensors among the leaves of a call


def read_modes() -> Modes:
    """Return the modes of autocast of this thread, by kind of device."""
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return tuple((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices)


@contextmanager
def use_modes(modes: Modes) -> Iterator[None]:
    """Use the modes of another thread within a block."""
    with ExitStack() as stack:
        for mode in modes:
            if mode not in read_modes():
                stack.enter_context(torch.autocast(mode[0], enabled=mode[1], dtype=mode[2]))
        yield


class LeafKind(Enum):
    """What a leaf of a call is to the samples."""

    ROWS = "a tensor with the samples first"
    BROADCAST = "a tensor of one number that holds for all samples"
    SHARED = "anything else: the same in all calls that are joined"


@dataclass(eq=False)
class ModelCall:
    """One call of a model by a request, in leaves.

    `rows` is the number of its samples, and `key` what it shares with those that may join it; None for one that none may join,
    since it has an argument that cannot be compared.
    """

    model: nn.Module
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: list[Any] = field(default_factory=list)
    structure: Any = None
    kinds: tuple[LeafKind, ...] = ()
    rows: int = 1
    key: tuple[Any, ...] | None = None
    result: Any = None
    modes: Modes = field(default_factory=read_modes)

    @property
    def sizes(self) -> Sizes:
        """Shapes of its tensors."""
        return tuple(x.shape if isinstance(x, Tensor) else None for x in self.leaves)


@dataclass
class FormState:
    """What is known of the calls of one key.

    `proven` says that a joint call was seen to be right, and `padded` that a call with rows added was; `splits` which leaves of
    a result have the samples first. `refused` is why no joint call is made, and `limit` bounds the rows of one, where memory
    does. `called` is when a call of this form was made last.
    """

    proven: bool = False
    padded: bool = False
    splits: tuple[bool, ...] = ()
    refused: str = ""
    limit: int | None = None
    called: int = -1


class CallForms:
    """The forms of calls that are known: which of their tensors have the samples first, and which forms are right jointly."""

    def __init__(self) -> None:
        self.kinds: dict[tuple[Any, ...], tuple[LeafKind, ...]] = {}
        self.forms: dict[tuple[Any, ...], FormState] = {}

    def form_of(self, call: ModelCall) -> FormState:
        """Return what is known of the form of a call that others may join."""
        if call.key is None:
            return FormState(refused="it has an argument that cannot be compared")
        return self.forms.setdefault(call.key, FormState())

    def describe(self, model: nn.Module, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModelCall:
        """Describe a call, so that it can be compared with others.

        Args:
            model: The model.
            method: The method of it that is called.
            args: The arguments by place.
            kwargs: The arguments by name.

        Returns:
            The call.
        """
        call = ModelCall(model, method, args, dict(sorted(kwargs.items())))
        call.leaves, call.structure = tree_flatten((call.args, call.kwargs))
        found = self.kinds.get(structure_of(call)) or _guess_kinds(call)
        if (rows := _count_rows(call, found)) is None:
            return call
        call.kinds, call.rows = found, rows
        leaves = tuple(_key_of(x, kind, rows) for x, kind in zip(call.leaves, found, strict=True))
        call.key = None if None in leaves else (*structure_of(call), call.modes, leaves)
        return call

    def list_forms(self, models: Mapping[str, nn.Module]) -> Iterator[tuple[str, str, str]]:
        """List the forms that were called.

        Args:
            models: The models by name.

        Yields:
            The name of the model, the sizes of one sample in its tensors, and "joined", "not met twice", or why calls of it are
            not made jointly.
        """
        names = {id(model): name for name, model in models.items()}
        for (model, method, _, _, leaves), form in self.forms.items():
            tensors = [leaf for leaf in leaves if len(leaf) == 5]  # those with the samples first
            sizes = " ".join(f"{list(shape)}" for *_, shape in tensors)
            state = form.refused or ("joined" if form.proven else "not met twice")
            yield names.get(model, "?") + ("" if method == "__call__" else f".{method}"), sizes, state

    def learn(self, one: Sequence[ModelCall], two: Sequence[ModelCall]) -> None:
        """Learn which tensors have the samples first, from two runs of a pipeline that differ in the number of pictures.

        Args:
            one: The calls of the run for one picture.
            two: Those of the run for two.
        """
        doubles = {structure_of(call): call.sizes for call in reversed(two)}
        for call in one:
            sizes = doubles.get(structure_of(call))
            if sizes is None or len(sizes) != len(call.leaves):
                continue
            kinds = tuple(_compare_sizes(a, b) for a, b in zip(call.sizes, sizes, strict=True))
            if LeafKind.ROWS in kinds:  # else the pipeline ignores the number
                self.kinds[structure_of(call)] = kinds

    def prove(self, calls: Sequence[ModelCall], apart: Sequence[Any], joint: Any, size: int) -> bool:
        """Compare the first joint call of a form with the same calls made apart, and keep what came out.

        Of equal calls each would be right where rows look at each other: they prove nothing, and nothing is kept then.

        Args:
            calls: The calls, of one form.
            apart: The result of each.
            joint: The result of the joint call.
            size: The rows of it, with those that were added.

        Returns:
            Whether the joint result may be used.
        """
        form, why = self.form_of(calls[0]), ""
        splits = _find_splits(apart, [call.rows for call in calls], joint, size)
        if splits is None:
            why = "its results are not those of the samples, one after the other"
        else:
            parts = split(joint, [call.rows for call in calls], size, splits)
            if not all(is_close(a, b, RESULT) for a, b in zip(apart, parts, strict=True)):
                why = "its rows differ from those of the calls made apart"
        if why:
            form.refused = why
        elif splits is not None and _is_any_different(calls):
            form.proven, form.splits = True, splits
        return form.proven

    def prove_padding(self, call: ModelCall, alone: Any, padded: Any, size: int) -> bool:
        """Compare a call with rows added to it, which differ from its own, with itself.

        Args:
            call: The call.
            alone: Its result.
            padded: That with the rows added.
            size: The rows of that.

        Returns:
            Whether rows may be added.
        """
        form = self.form_of(call)
        splits = _find_splits([alone], [call.rows], padded, size)
        if splits is None or not is_close(alone, split(padded, [call.rows], size, splits)[0], RESULT):
            form.refused = "its rows differ where others are added"
        else:
            form.padded, form.splits = True, splits
        return form.padded


def structure_of(call: ModelCall) -> tuple[Any, ...]:
    """Return what the calls share of which the same tensors have the samples first."""
    return id(call.model), call.method, call.structure


def join(calls: Sequence[ModelCall], size: int, different: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Join calls of one form to one.

    Its tensors are new and contiguous, since strides and offsets are guards of a compiled graph.

    Args:
        calls: The calls.
        size: How many rows there shall be: the last is repeated.
        different: Whether what is added has other values than the last row.

    Returns:
        The arguments by place and by name.
    """
    rows, leaves = sum(call.rows for call in calls), []
    for index, kind in enumerate(calls[0].kinds):
        parts = [call.leaves[index] for call in calls]
        if kind is LeafKind.SHARED:
            leaves.append(parts[0])
            continue
        if kind is LeafKind.BROADCAST:
            parts = [part.reshape(1).expand(call.rows) for part, call in zip(parts, calls, strict=True)]
        each = parts[0].shape[0] // calls[0].rows
        if size > rows:
            last = parts[-1][-each:]
            parts += [_change(last) if different else last] * (size - rows)
        leaves.append(torch.cat(parts).contiguous())
    args, kwargs = tree_unflatten(leaves, calls[0].structure)
    return args, kwargs


def split(result: Any, rows: Sequence[int], size: int, splits: Sequence[bool]) -> list[Any]:
    """Split the result of a joint call.

    Args:
        result: The result.
        rows: How many rows each of the calls had.
        size: The rows of the joint call.
        splits: Which leaves have the samples first, see `FormState`.

    Returns:
        A result for each call, with the same memory where it has the samples, else with its own.
    """
    leaves, structure = tree_flatten(result)
    made, at = [], 0
    for count in rows:
        own = [
            _part(x, at, count, size) if flag else x.clone() if isinstance(x, Tensor) else x
            for x, flag in zip(leaves, splits, strict=True)
        ]
        made.append(tree_unflatten(own, structure))
        at += count
    return made


def _part(x: Tensor, at: int, count: int, size: int) -> Tensor:
    each = x.shape[0] // size
    return x[at * each : (at + count) * each]


def _change(x: Tensor) -> Tensor:
    """Return other values that a model can take: floating-point ones from back to front, and less; others the same."""
    return x.flip(-1) * 0.75 if x.is_floating_point() and x.dim() > 1 else x


def _guess_kinds(call: ModelCall) -> tuple[LeafKind, ...]:
    """Guess which tensors have the samples first: those whose first size is that of the first tensor of two dimensions."""
    first = next((x.shape[0] for x in call.leaves if isinstance(x, Tensor) and x.dim() > 1), None)

    def guess(x: Any) -> LeafKind:
        if not isinstance(x, Tensor) or first is None:
            return LeafKind.SHARED
        if x.dim() and x.shape[0] == first:
            return LeafKind.ROWS
        return LeafKind.BROADCAST if x.numel() == 1 and x.dim() < 2 else LeafKind.SHARED

    return tuple(map(guess, call.leaves))


def _compare_sizes(one: torch.Size | None, two: torch.Size | None) -> LeafKind:
    if one is None or two is None:
        return LeafKind.SHARED
    if len(one) and len(one) == len(two) and one[0] * 2 == two[0] and one[1:] == two[1:]:
        return LeafKind.ROWS
    return LeafKind.BROADCAST if one == two and one in ((), (1,)) else LeafKind.SHARED


def _count_rows(call: ModelCall, kinds: Sequence[LeafKind]) -> int | None:
    """Count the samples of a call; None where its tensors are not of so many."""
    firsts = []
    for x, kind in zip(call.leaves, kinds, strict=True):
        if kind is not LeafKind.SHARED and not isinstance(x, Tensor):
            return None
        if kind is LeafKind.ROWS:
            firsts.append(x.shape[0] if x.dim() else 0)
        elif kind is LeafKind.BROADCAST and x.numel() != 1:
            return None
    rows = min(firsts, default=0)
    return rows if rows and all(first % rows == 0 for first in firsts) else None


def _key_of(x: Any, kind: LeafKind, rows: int) -> Any:
    """Return what must be the same of a leaf in calls that are joined; None where that cannot be told."""
    if isinstance(x, Tensor):
        if kind is LeafKind.ROWS:
            return x.dtype, x.device, x.layout, x.shape[0] // rows, x.shape[1:]
        if kind is LeafKind.BROADCAST:
            return x.dtype, x.device
        if type(x) is not Tensor and not isinstance(x, nn.Parameter) or x.layout is not torch.strided:
            return None
        raw = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return x.dtype, x.device, x.shape, hashlib.blake2b(raw.tobytes(), digest_size=16).digest()
    if isinstance(x, (*PLAIN, Enum)):
        return type(x), repr(x)
    return None


def _find_splits(apart: Sequence[Any], rows: Sequence[int], joint: Any, size: int) -> tuple[bool, ...] | None:
    """Find which leaves of a joint result have the samples first; None where its structure is another one."""
    leaves, structure = tree_flatten(joint)
    found = []
    others = [tree_flatten(one) for one in apart]
    if any(other != structure for _, other in others):
        return None
    for x, *own in zip(leaves, *(one for one, _ in others), strict=True):
        if not isinstance(x, Tensor):
            if not all(isinstance(y, PLAIN) and type(y) is type(x) and repr(y) == repr(x) for y in own):
                return None
            found.append(False)
            continue
        if not all(isinstance(y, Tensor) for y in own):
            return None
        each = x.shape[0] // size if x.dim() else 0
        found.append(bool(each) and x.shape[0] == each * size and all(
            y.dim() and y.shape[0] == each * n for y, n in zip(own, rows, strict=True)
        ))  # fmt: skip
    return tuple(found)


def _is_any_different(calls: Sequence[ModelCall]) -> bool:
    """Tell whether there are two calls of different samples: where rows look at each other, these come out wrong."""
    return any(not all(map(_is_same, calls[0].leaves, other.leaves)) for other in calls[1:])


def _is_same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape else a is b
