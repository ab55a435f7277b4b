"""What dynamo takes and what it leaves. It is imported when one of these is called: that costs seconds."""

from __future__ import annotations

from types import CodeType
from typing import Any

import torch._C._dynamo.eval_frame

__all__ = ["constant_floats", "is_listening", "leave_frame", "leave_module"]

# what dynamo has set to be given each frame that begins, None where it compiles nothing
_listener = torch._C._dynamo.eval_frame.get_eval_frame_callback


def leave_frame(code: CodeType) -> None:
    """Let frames of this code run as they stand, in compiled code too; we need that what they call is compiled."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(code)


def leave_module(name: str) -> None:
    """Let the functions of a Python file run as they stand; we need that what they call is compiled."""
    from torch._dynamo import trace_rules

    trace_rules.add(name)


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
