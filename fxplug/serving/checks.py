"""What an engine is made of, checked before it starts: pipelines, models, buckets and schedulers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..core.errors import SpecError, did_you_mean, quote
from ..pipelines.opening import is_modular
from ..pipelines.recorded_run import get_components


def check_pipeline(task: str, pipe: Any) -> None:
    """Check that a pipeline can be served.

    Args:
        task: The name under which requests call it.
        pipe: The pipeline.

    Raises:
        SpecError: For what is no pipeline, a modular one, and a model with a cache over steps.
    """
    where = f"also[{task!r}]" if task else "pipe"
    if not isinstance(task, str) or not callable(pipe) or not get_components(pipe):
        raise SpecError(f"{where} must be a pipeline of diffusers, not {quote(pipe)}")
    if is_modular(pipe):
        raise SpecError(f"{where} is a modular pipeline, which is not served: use a pipeline with a call of its own")
    for name, part in get_components(pipe).items():
        if getattr(part, "is_cache_enabled", False) is True:
            raise SpecError(
                f"'{name}' of {where} has a cache over steps, which requests that run at once would share: call its "
                "disable_cache()"
            )


def list_models(pipes: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, nn.Module]:
    """List the models whose calls wait.

    Args:
        pipes: The pipelines by task.
        names: Of the models; None is all.

    Returns:
        The models by name; one of a further pipeline whose name another model has is "task:name".

    Raises:
        SpecError: For a name that no model has, with the nearest one.
    """
    found: dict[str, nn.Module] = {}
    for task, pipe in pipes.items():
        for name, part in get_components(pipe).items():
            if isinstance(part, nn.Module) and all(part is not other for other in found.values()):
                found[name if name not in found else f"{task}:{name}"] = part
    if names is None:
        return found
    for name in names:
        if name not in found:
            listed = f"{did_you_mean(name, found)}; there are {', '.join(found)}"
            raise SpecError(f"no model {quote(name)}{listed}", path=("models",))
    return {name: part for name, part in found.items() if name in names}


def read_buckets(buckets: Sequence[int] | None, rows: int, compiled: bool) -> list[int] | None:
    """Read the numbers of rows up to which calls are padded.

    Args:
        buckets: The numbers; None is none, or with `compiled` the powers of two.
        rows: The most rows of a joint call.
        compiled: Whether models are compiled.

    Returns:
        The numbers in their order, or None.

    Raises:
        SpecError: For one below 2, since a compiler makes a program of its own for one row.
    """
    if buckets is None:
        return [2**n for n in range(1, max(2, (rows - 1).bit_length() + 1))] if compiled else None
    wrong = [n for n in buckets if not isinstance(n, int) or isinstance(n, bool) or n < 2]
    if wrong or not buckets:
        raise SpecError(f"buckets must be whole numbers, 2 or more, not {quote(wrong or list(buckets))}", path=("buckets",))
    return sorted({*buckets})


def find_scheduler(name: str | None, pipe: Any) -> type | None:
    """Find the class of a request's scheduler.

    Args:
        name: Its name; None is the pipeline's.
        pipe: The pipeline.

    Returns:
        The class, or None.

    Raises:
        SpecError: For one that diffusers does not have, with the nearest name, and for a pipeline without a scheduler.
    """
    if name is None:
        return None
    import diffusers
    from diffusers import SchedulerMixin

    kind = getattr(diffusers, name, None) if name.endswith("Scheduler") else None
    if not (isinstance(kind, type) and issubclass(kind, SchedulerMixin)):
        known = [key for key in dir(diffusers) if key.endswith("Scheduler")]
        raise SpecError(f"diffusers has no scheduler {quote(name)}{did_you_mean(name, known)}", path=("scheduler",))
    if not hasattr(getattr(pipe, "scheduler", None), "config"):
        raise SpecError(f"{type(pipe).__name__} has no scheduler: leave it out", path=("scheduler",))
    return kind
