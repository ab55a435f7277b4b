"""What dynamo takes and what it leaves. It is imported only where it compiles already: that costs a second and more."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

__all__ = ["apart", "constant_floats", "is_listening", "leave_frame", "leave_module"]

F = TypeVar("F", bound=Callable[..., Any])
_AS_IT_STANDS = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)

# what dynamo has set to be given each frame that begins, None where it compiles nothing
_listener = torch._C._dynamo.eval_frame.get_eval_frame_callback


def leave_frame(code: CodeType) -> None:
    """Let frames of this code run as they stand, in compiled code too; we need that what they call is compiled."""
    set_code_exec_strategy(code, _AS_IT_STANDS)


def leave_module(module: ModuleType) -> None:
    """Let the functions of a Python file, and the methods of its classes, run as they stand; what they call is compiled."""
    todo = [function.__code__ for function in _functions(vars(module), module.__name__)]
    while todo:
        code = todo.pop()
        leave_frame(code)
        todo += [inner for inner in code.co_consts if isinstance(inner, CodeType)]


def _functions(names: Mapping[str, Any], home: str) -> Iterator[FunctionType]:
    for value in names.values():
        if isinstance(value, type) and value.__module__ == home:
            yield from _functions(vars(value), home)
        else:
            found = inspect.unwrap(value) if callable(value) else value
            if isinstance(found, FunctionType) and found.__module__ == home:
                yield found


def apart(function: F) -> F:
    """A function that no compiler takes, nor what it calls, as `torch.compiler.disable` makes it, which imports dynamo."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        plain = torch.compiler.disable(function) if is_listening() else function  # type: ignore[no-untyped-call]
        return plain(*args, **kwargs)

    leave_frame(wrapper.__code__)  # type: ignore[attr-defined]
    wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]  # what dynamo asks of a function that it meets
    return wrapper  # type: ignore[return-value]


def constant_floats() -> Any:
    """A context in which floats of layers are constants of a compiled program; we need that compiled code may enter it.

    Torch's own list of settings that such code may change does not have this one.
    """
    from torch._dynamo import config
    from torch._dynamo.decorators import DynamoConfigPatchProxy

    return DynamoConfigPatchProxy(config.patch(specialize_float=True))


def is_listening() -> bool:
    """Whether frames that begin now are compiled; we need that dynamo has set a callback then, and neither None nor False."""
    return callable(_listener())
