"""What the names in the shapes of a pass's inputs stand for, and sizes to try for those that nothing binds."""

from __future__ import annotations

import itertools
import re
from collections.abc import Generator, Mapping, Sequence

from ..errors import SpecError
from ..ir.traced_module import TracedModule
from ..spec.rules import Pass
from .sites import own_inputs


def factors(size: int | str) -> list[int | str]:
    """A size as its factors: `8*h` is 8 and h."""
    if isinstance(size, int):
        return [size]
    return [int(part) if part.isdigit() else part for part in re.split(r"\s*\*\s*", size.strip())]


def size_of(factor: int | str, sizes: Mapping[str, int]) -> int:
    """What a factor stands for. Raises KeyError for a name that has no size."""
    return sizes[factor] if isinstance(factor, str) else factor


def named_sizes(gm: TracedModule, p: Pass) -> tuple[dict[str, int], dict[str, list[int]]]:
    """What the names in the shapes of a pass's inputs stand for; and what those that nothing binds may stand for."""
    own = own_inputs(gm, p)
    bound: dict[str, int] = {}
    placeholders = {str(n.target): n for n in gm.graph.nodes if n.op == "placeholder"}
    for name in p.inputs.keys() - own.keys():
        shape, wanted = placeholders[name].meta.get("shape"), p.inputs[name]["shape"]
        if shape is None or len(shape) != len(wanted):
            found = "no tensor" if shape is None else f"of shape {list(shape)}"
            raise SpecError(f"{p.name}: the model's input '{name}' is {found}; the pass wants {wanted}")
        for size, known in zip(wanted, shape, strict=True):
            if isinstance(size, str) and size.isidentifier():
                bound[size] = int(known)
    free: dict[str, list[int]] = {}
    for spec in own.values():
        for factor in (f for size in spec["shape"] or () for f in factors(size) if isinstance(f, str)):
            if factor not in bound:
                free.setdefault(factor, spec["try"].get(factor) or TRIES)
    return bound, free


def how_deep(error: BaseException | None) -> Depth:
    """How far a trace came before an error: the number of the network, and of the nodes that it had written by then."""
    found: Depth = ()
    while error is not None:
        found = (*found, *getattr(error, "fxplug_at", ()))
        error = error.__cause__
    return found


def size_tries(free: Mapping[str, Sequence[int]]) -> Generator[dict[str, int], Depth | None, None]:
    """Sizes to try, until one fits. Each is answered with how far the trace came.

    One name is changed at a time, and a size that leads further is kept: names that do not depend on each other take as many
    tries as they have sizes. All combinations come last, for those that do.
    """
    at = {name: values[0] for name, values in free.items()}
    seen = [at]
    best = yield at
    while best is not None:
        for name, size in ((name, size) for name, values in free.items() for size in values):
            if (one := {**at, name: size}) in seen:
                continue
            seen.append(one)
            found = yield one
            if found is not None and found > best:
                at, best = one, found
                break
        else:
            break
    for choice in itertools.product(*free.values()):
        if (one := dict(zip(free, choice, strict=True))) not in seen:
            yield one


TRIES = [8, 4, 2, 16, 1, 32]  # what a size that nothing binds may be: how much larger a condition is than a latent
Depth = tuple[int, ...]
