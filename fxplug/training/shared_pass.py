"""One forward and one backward pass of a base for the batches of several adapters, each of whose losses calls it as its own.

The loop and the loss of each adapter are those of a run alone, in a thread of its own, of which one runs at a time: a call of
the module pauses it until all others call it too, and so does the end of its backward pass.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.capture.isolation import get_random_state, set_random_state
from ..core.errors import GuardError, TrainError
from ..core.torch_internals.modules import tree_flatten, tree_unflatten
from .adapter_modules import RandomState, SampleRows


class ThreadEnd(BaseException):
    """Ends a paused thread whose run ends."""


class PausableThread(RandomState):
    """A function in a thread of its own that runs only while `resume` waits for it, with its own state of the generators."""

    def __init__(self, function: Callable[[], object], random: tuple[Any, ...]) -> None:
        super().__init__(random)
        self.function = function
        self.error: BaseException | None = None
        self.done = self.closed = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        used = bool(random[3])  # whether CUDA runs: its device is one of a thread
        self._device = torch.cuda.current_device() if used else None
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), daemon=True)

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self.closed:
                if self._device is not None:
                    torch.cuda.set_device(self._device)
                self.function()
        except ThreadEnd:
            pass
        except BaseException as error:  # whatever it is: the one who resumes looks at it
            self.error = error
        finally:
            self.done = True
            self._back.release()

    def resume(self) -> None:
        """Let it run until it pauses or ends.

        The generators stay where it leaves them: whoever resumes threads preserves them around all of it.
        """
        if self.done:
            return
        if not self._thread.is_alive():
            self._thread.start()
        set_random_state(self.random)  # the caller has a state of its own only around all of its calls
        try:
            self._go.release()
            self._back.acquire()
        finally:
            self.random = get_random_state()

    def pause(self) -> None:
        """Pause, within the thread, until it is resumed."""
        self._back.release()
        self._go.acquire()
        if self.closed:
            raise ThreadEnd

    def close(self) -> None:
        """End it, wherever it is paused."""
        self.closed = True
        if self._thread.is_alive():
            self.resume()
            self._thread.join()
        self.done = True


@dataclass
class SharedCall:
    """A call of the module by one adapter: its arguments flattened, whether it wants gradients, and what came out."""

    leaves: list[Any]
    spec: Any
    with_gradients: bool
    result: Any = None
    outputs: list[Tensor | None] = field(default_factory=list)  # leaves of its own autograd graph, by result of the pass

    @property
    def size(self) -> int:
        """Number of samples: the first size of the first tensor."""
        return next((len(leaf) for leaf in self.leaves if isinstance(leaf, Tensor) and leaf.dim()), 0)

    def cut(self, count: int) -> SharedCall:
        """Return a call without gradients with the first samples of this one, at most `count`."""
        n = self.size
        leaves = [leaf[:count] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == n else leaf for leaf in self.leaves]
        return SharedCall(leaves, self.spec, False)

    def describe(self) -> list[Any]:
        """Describe what must be equal in two calls that are made one, by leaf."""
        found: list[Any] = [str(self.spec)]
        for leaf in self.leaves:
            if isinstance(leaf, Tensor):
                by_sample = bool(leaf.dim()) and len(leaf) == self.size
                found.append((str(leaf.dtype), tuple(leaf.shape[1:]) if by_sample else [tuple(leaf.shape), leaf.tolist()]))
            else:
                found.append(repr(leaf))
        return found


class SharedModule(nn.Module):
    """What the loss of one adapter calls in the place of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.thread: PausableThread | None = None
        self.call: SharedCall | None = None  # which waits for its result

    @property
    def waits(self) -> bool:
        """Whether a call has no result yet."""
        return self.call is not None and self.call.result is None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.thread is not None
        leaves, spec = tree_flatten((args, kwargs))
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            raise TrainError("the loss needs gradients of the module's inputs: not supported for many adapters")
        self.call = made = SharedCall(leaves, spec, torch.is_grad_enabled())
        if not made.size:
            raise TrainError("the module is called without a tensor that has samples, by which adapters are distinguished")
        self.thread.pause()
        self.call = None
        return made.result

    def wait_for_gradients(self) -> None:
        """Pause until the backward pass of all adapters has reached the parameters of this one."""
        assert self.thread is not None
        self.thread.pause()


class ModuleInTurn(nn.Module):
    """What the loss of one adapter calls whose steps are taken in turn: `runner`, that of its run alone, when it is its turn.

    A turn is several steps, since each begins with caches that another adapter has filled. The first call of each, at a number
    of steps that `step` gives and `turn` divides, waits for it.
    """

    def __init__(self, runner: nn.Module, step: Callable[[], int], turn: int) -> None:
        super().__init__()
        self.runner, self.step, self.turn = runner, step, turn
        self.thread: PausableThread | None = None
        self.waits = False  # whether it waits for its turn
        self._begun: int | None = None
        self._due = 0  # the round of its next turn: it takes a step a round in the mean

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.thread is not None
        if self._begun != self.step():
            self._begun = self.step()
            if self._begun % self.turn == 0:
                self.waits = True
                self.thread.pause()
        return self.runner(*args, **kwargs)

    def begin(self) -> None:
        """Forget the step that was begun, in the thread of an earlier run."""
        self._begun, self.waits, self._due = None, False, 0

    def take_turn(self, rounds: int) -> None:
        """Let it go on, if its turn is in this round or before."""
        if rounds >= self._due:
            self.waits, self._due = False, rounds + self.turn


class SharedPass:
    """Runs `module`, which `join_adapters` made, for the calls of several adapters at once."""

    def __init__(self, module: nn.Module, rows: SampleRows, autocast: Callable[[], Any]) -> None:
        self.module, self.rows, self.autocast = module, rows, autocast
        self._done: list[tuple[list[Any], list[tuple[SharedCall, int]]]] = []  # results of passes that wait for gradients

    def forward(self, calls: Sequence[tuple[int, SharedCall]]) -> None:
        """Give each call its result, of the adapter with this number: one pass for those whose arguments make one batch.

        Raises TrainError if the graph does not take the batch.
        """
        for group in group_calls(calls):
            self._pass(group)

    def _pass(self, calls: Sequence[tuple[int, SharedCall]]) -> None:
        first = calls[0][1]
        leaves = [_join([call.leaves[n] for _, call in calls], first) for n in range(len(first.leaves))]
        args, kwargs = tree_unflatten(leaves, first.spec)
        self.rows.parts = [(index, call.size) for index, call in calls]
        try:
            with torch.set_grad_enabled(any(call.with_gradients for _, call in calls)), self.autocast():
                found, spec = tree_flatten(self.module(*args, **kwargs))
        except GuardError as error:
            raise TrainError(f"the graph does not take the samples of all adapters as one batch: {error}") from error
        starts, start, total = [], 0, self.rows.total
        for _, call in calls:
            starts.append((call, start))
            results = []
            for leaf in found:
                own, given = _rows_of(leaf, start, call.size, total, call.with_gradients)
                call.outputs.append(own)
                results.append(given)
            call.result = tree_unflatten(results, spec)
            start += call.size
        if any(call.with_gradients for _, call in calls):
            self._done.append((found, starts))

    def backward(self) -> None:
        """Take the gradients that the losses left at the results on to the parameters, all in one backward pass."""
        tensors, gradients = [], []
        for found, starts in self._done:
            for n, leaf in enumerate(found):
                rows = [call.outputs[n] for call, _ in starts]
                if not isinstance(leaf, Tensor) or all(row is None or row.grad is None for row in rows):
                    continue
                whole = torch.zeros_like(leaf)
                for (call, start), row in zip(starts, rows, strict=True):
                    if row is not None and row.grad is not None:
                        whole[start : start + call.size] = row.grad
                tensors.append(leaf)
                gradients.append(whole)
        self._done = []
        if tensors:
            torch.autograd.backward(tensors, gradients)


def _rows_of(leaf: Any, start: int, size: int, total: int, with_gradients: bool) -> tuple[Tensor | None, Any]:
    """Return an adapter's rows of a result, as a leaf where they take part in gradients, and what its loss is given."""
    if not isinstance(leaf, Tensor):
        return None, leaf
    if not leaf.dim() or len(leaf) != total:
        if leaf.requires_grad:
            raise TrainError(
                f"the module returns {list(leaf.shape)} for {total} samples, so adapters cannot be distinguished in it, "
                "as where samples are a list: set train.in_turn: true"
            )
        return None, leaf
    own = leaf.detach()[start : start + size]
    if not (leaf.requires_grad and with_gradients):
        return None, own.clone()
    own = own.requires_grad_()
    return own, own.clone()  # which the loss may write


def _join(values: list[Any], first: SharedCall) -> Any:
    """Return the values of one argument as that of the batch of all."""
    value = values[0]
    if len(values) == 1 or not isinstance(value, Tensor) or not value.dim() or len(value) != first.size:
        return value
    return torch.cat(values)


def group_calls(calls: Sequence[tuple[int, SharedCall]]) -> list[list[tuple[int, SharedCall]]]:
    """Group calls whose arguments can be put into one batch, in their order."""
    groups: list[tuple[list[Any], list[tuple[int, SharedCall]]]] = []
    for one in calls:
        described = one[1].describe()
        home = next((found for known, found in groups if known == described), None)
        if home is None:
            groups.append((described, [one]))
        else:
            home.append(one)
    return [found for _, found in groups]
