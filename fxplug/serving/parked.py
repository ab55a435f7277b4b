"""Stock pipelines in threads of their own, one of which runs at a time, and whose calls of models wait for the engine.

What stands at `pipe.unet`, `pipe.transformer`, `pipe.text_encoder` is of the model's class and has its attributes; its call, or
`decode` of a VAE, waits until the engine has made it. Nothing in diffusers, tokenizers or torch has to be thread safe, and grad
mode, autocast and context variables are each thread's own.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from ..core.capture.isolation import get_random_state, set_random_state
from ..core.errors import FxplugError, SpecError
from ..pipelines.recorded_run import get_components

CallModel = Callable[[nn.Module, str, tuple[Any, ...], Mapping[str, Any]], Any]
_thread = threading.local()  # `call`: what makes the calls of this thread


class Cancelled(FxplugError):  # noqa: N818
    """A request that was cancelled, by its ticket, by the end of its engine, or since its deadline has passed."""


class Unwind(BaseException):
    """Raised in the thread of a cancelled request at its next call of a model: nothing in a pipeline catches it."""


def make_stand_in(model: nn.Module, methods: tuple[str, ...]) -> nn.Module:
    """Make what stands in a pipeline for a model: of its class and with its attributes, of which there is one set for both.

    Args:
        model: The model.
        methods: Of which calls wait, `__call__` or others.

    Returns:
        The stand-in.
    """
    own = {"__module__": type(model).__module__, "__qualname__": type(model).__qualname__}
    kind = type(type(model).__name__, (type(model),), {**own, **{name: _make_method(model, name) for name in methods}})
    made: nn.Module = object.__new__(kind)
    object.__setattr__(made, "__dict__", vars(model))
    return made


def _make_method(model: nn.Module, name: str) -> Callable[..., Any]:
    real = getattr(type(model), name)

    @functools.wraps(real)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        call: CallModel | None = getattr(_thread, "call", None)
        if call is None:
            raise SpecError(
                f"{type(model).__name__} was called outside of its request, by another thread or after its end: an engine "
                "serves pipelines that call their models within their own call"
            )
        return call(model, name, args, kwargs)

    return method


def check_outside() -> None:
    """Check that no request makes this call: its engine waits for it. Raises SpecError."""
    if getattr(_thread, "call", None) is not None:
        raise SpecError("a request cannot wait for its own engine, which waits for it: call only submit in a request")


class OwnDraws:
    """A block with random numbers of its own: what is drawn there without a generator changes nothing outside."""

    def __init__(self) -> None:
        self._own = self._others = get_random_state()

    def __enter__(self) -> None:
        self._others = get_random_state()
        set_random_state(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = get_random_state()
        set_random_state(self._others)


class RequestThread:
    """A thread that runs until its next call of a model, and goes on when it is told to.

    `call` is the call that waits. At the end there is a `result` or an `error`; of a thread that was cancelled neither. It runs
    within `draws`.
    """

    def __init__(self, function: Callable[[], Any], describe: CallModel, draws: AbstractContextManager[Any]) -> None:
        self.function, self.describe, self.draws = function, describe, draws
        self.call: Any = None
        self.result: Any = None
        self.error: Exception | None = None
        self.done = self.cancelled = False
        self._runs = False  # the locks only wake who looks at it: an interrupt may come right before or after one is taken
        self._go, self._stopped = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._stopped.acquire()
        self._thread = threading.Thread(target=self._run, name="fxplug request", daemon=True)

    def resume(self) -> None:
        """Let the thread run to its next call of a model, or to its end."""
        if not self._thread.ident:
            self._thread.start()
        with self.draws:
            try:
                self._runs = True
                _wake(self._go)
                self._wait_for_stop()
            except BaseException:  # an interrupt: nobody else may run while it does
                if self._runs:
                    _wake(self._go)
                self._wait_for_stop()
                raise
        if self.done:
            self._thread.join()

    def _wait_for_stop(self) -> None:
        while self._runs:
            self._stopped.acquire()

    def _stop(self) -> None:
        self._runs = False
        _wake(self._stopped)

    def _wait_to_run(self) -> None:
        while not self._runs:
            self._go.acquire()

    def cancel(self) -> None:
        """End the thread at the call at which it waits."""
        self.cancelled = True
        if not self._thread.ident:
            self.done = True
        while not self.done:  # a pipeline may call models while it ends
            self.resume()

    def _run(self) -> None:
        self._wait_to_run()
        _thread.call = self._park
        try:
            self.result = self.function()
        except Unwind:
            pass
        except Exception as error:  # of the pipeline: the ticket raises it
            self.error = error
        except BaseException as error:  # as SystemExit, which ends a thread and must not end the engine
            self.error = RuntimeError(f"the pipeline ended with {type(error).__name__}: {error}")
        finally:
            _thread.call = None
            self.done = True
            self._stop()

    def _park(self, model: nn.Module, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.cancelled:
            raise Unwind
        self.call = self.describe(model, method, args, kwargs)
        self._stop()
        self._wait_to_run()
        call, self.call = self.call, None
        if self.cancelled:
            raise Unwind
        if isinstance(call.result, BaseException):
            raise call.result
        return call.result


def _wake(lock: threading.Lock) -> None:
    """Wake who waits for a lock, or the next one who does: each looks again whether it may go on."""
    if lock.locked():
        lock.release()


class use_caller:  # noqa: N801
    """Let a function make the calls of stand-ins in this thread, within a block."""

    def __init__(self, call: CallModel) -> None:
        self.call = call

    def __enter__(self) -> None:
        self.before = getattr(_thread, "call", None)
        _thread.call = self.call

    def __exit__(self, *_: object) -> None:
        _thread.call = self.before


# --- pipelines


class StepCount:
    """How many steps a request's scheduler has made."""

    def __init__(self) -> None:
        self.steps = 0


class CountedStep:
    """A scheduler's `step` that counts. The scheduler stays of its class, which pipelines ask for; a copy has its own count."""

    def __init__(self, scheduler: Any, count: StepCount) -> None:
        self.scheduler, self.count = scheduler, count
        functools.update_wrapper(self, getattr(type(scheduler), "step").__get__(scheduler))  # noqa: B009

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = type(self.scheduler).step(self.scheduler, *args, **kwargs)
        self.count.steps += 1
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> CountedStep:
        made = memo.get(id(self.scheduler))
        return self if made is None else CountedStep(made, StepCount())


def copy_pipeline(pipe: Any, stand_ins: Mapping[int, nn.Module], scheduler: type | None = None) -> tuple[Any, StepCount]:
    """Copy a pipeline for one request: stand-ins for its models, and its own schedulers, guiders, lists and dictionaries.

    Args:
        pipe: The pipeline.
        stand_ins: What stands for a model, by the model's `id`.
        scheduler: The class of its scheduler; None is the pipeline's.

    Returns:
        The copy, and the count of the steps that its scheduler makes.
    """
    count = StepCount()
    return _copy_pipeline(pipe, dict(stand_ins), scheduler, count), count


def _copy_pipeline(pipe: Any, made: dict[int, Any], scheduler: type | None, count: StepCount) -> Any:
    """Copy a pipeline and those in it; `made` has by the `id` of a part what stands for it everywhere."""
    own = copy.copy(pipe)
    parts = {**vars(pipe), **get_components(pipe)}  # some pipelines make their scheduler themselves
    for name, part in sorted(parts.items(), key=lambda item: _is_pipeline(item[1])):
        if id(part) in made:
            pass
        elif type(part) in (list, dict, set):
            made[id(part)] = copy.copy(part)
        elif hasattr(part, "set_timesteps") and not isinstance(part, nn.Module):
            kind: Any = scheduler if name == "scheduler" else None
            # a copy, since `from_config` forgets what a pipeline has changed of a configuration's default values
            other = made[id(part)] = copy.deepcopy(part) if kind is None else kind.from_config(part.config)
            if name == "scheduler" and hasattr(other, "step"):
                other.step = CountedStep(other, count)
        elif hasattr(part, "prepare_inputs") and hasattr(part, "set_state"):  # a guider, which knows its step
            made[id(part)] = copy.deepcopy(part)
        elif _is_pipeline(part):
            made[id(part)] = _copy_pipeline(part, made, None, count)
        else:
            continue
        setattr(own, name, made[id(part)])
    return own


def _is_pipeline(part: Any) -> bool:
    return not isinstance(part, nn.Module) and callable(part) and bool(get_components(part))
