"""The way in: a traced denoiser made one that runs in stages on patches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...core.capture.self_check import has_values
from ...core.errors import SpecError
from ...core.ir.traced_module import TracedModule
from ..plan import parallel_plan
from ..runtime.collectives import check_integer
from ..runtime.mesh import fill_degrees
from ..stage import make_entry, place
from .links import make_links
from .overlap import OverlappingPipeFusion
from .patches import Patcher
from .pipeline import PipeFusion, Steps
from .stages import cut_stages
from .stale import StaleSequence

T = TypeVar("T", bound=PipeFusion)


def pipefusion(
    gm: TracedModule,
    args: Sequence[Any] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    stages: int = 1,
    patches: int,
    warmup: int = 1,
    correct: int = 0,
    steps: Steps = None,
    batch: int = 1,
    overlap: bool = True,
    clock: str | None = "timestep",
    split: Mapping[str, int] | None = None,
    mesh: DeviceMesh | None = None,
    check: bool = True,
) -> PipeFusion:
    """Run a denoiser in stages on patches of its tokens (PipeFusion; Fang et al. 2024, arXiv 2405.14430).

    Where tokens are born and meet is found as for `parallel_plan`, and the graph is cut where little goes from stage to stage,
    into stages of about equal work.

    With torch.distributed each process is one stage for its part of the batch; without it one process runs all. A model with
    values is run once in one piece and once patch by patch on the same inputs, which must agree.

    Over processes with `overlap` a step does not wait for the last patch: a call gives tensors that come later, what the
    pipeline does with them elementwise (guidance, a scheduler's step) is done patch by patch, and where something else needs
    all of one it waits, as the decoder does at the end; between two calls that is an error that names the operation.

    Args:
        gm: The traced denoiser.
        args: Example inputs by position, as for `trace`.
        kwargs: Example inputs by name.
        stages: The number of stages.
        patches: The number of patches.
        warmup: How many steps at the beginning of an image run in one piece.
        correct: How many at its end do; that needs `steps`.
        steps: The number of steps of an image, or a function that tells it.
        batch: Over how many processes samples are split, guidance included.
        overlap: Whether a step begins before the last patch of the one before is there.
        clock: The input that says where in a run a call is; None for `new_image()` before each.
        split: Where tokens are, as in `parallel_plan`.
        mesh: Which process is which, with the axes "batch" and "stages".
        check: Whether the two ways to run are compared.

    Returns:
        A module that takes the denoiser's place in its pipeline.

    Raises:
        SpecError: Numbers are none or too many, or tokens or stages cannot be split, with what is in the way.
        VerifyError: Patches do not give what the model gives.
    """
    check_integer("stages", stages, 1)
    check_integer("patches", patches, 1)
    run = patches, warmup, correct, steps, clock
    kind, places = OverlappingPipeFusion if overlap else PipeFusion, _Places(stages, batch, split, mesh)
    return _make_denoiser(kind, gm, (args, kwargs), run, places, check)


def stale_sequence(
    gm: TracedModule,
    args: Sequence[Any] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    ways: int,
    warmup: int = 1,
    correct: int = 0,
    steps: Steps = None,
    batch: int = 1,
    clock: str | None = "timestep",
    split: Mapping[str, int] | None = None,
    mesh: DeviceMesh | None = None,
    check: bool = True,
) -> StaleSequence:
    """Split a denoiser's tokens over processes that exchange them a step late (DistriFusion; Li et al. 2024, 2402.19481).

    As `pipefusion`, without stages: each process runs all layers on its patch, with the keys and values that the others had at
    the step before, which travel while a step is computed. Without torch.distributed one process runs all.

    Args:
        gm: The traced denoiser.
        args: Example inputs by position, as for `trace`.
        kwargs: Example inputs by name.
        ways: The number of patches, each of a process.
        warmup: How many steps at the beginning of an image run in one piece.
        correct: How many at its end do; that needs `steps`.
        steps: The number of steps of an image, or a function that tells it.
        batch: Over how many processes samples are split, guidance included.
        clock: The input that says where in a run a call is; None for `new_image()` before each.
        split: Where tokens are, as in `parallel_plan`.
        mesh: Which process is which, with the axes "batch" and "stages".
        check: Whether the two ways to run are compared.

    Returns:
        A module that takes the denoiser's place in its pipeline.

    Raises:
        SpecError: As `pipefusion`.
        VerifyError: As `pipefusion`.
    """
    check_integer("ways", ways, 1)
    run = ways, warmup, correct, steps, clock
    return _make_denoiser(StaleSequence, gm, (args, kwargs), run, _Places(1, batch, split, mesh), check)


def in_steps(
    gm: TracedModule,
    args: Sequence[Any] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    overlap: bool = True,
    mesh: DeviceMesh | None = None,
    check: bool = True,
) -> PipeFusion:
    """Run a rewritten or loaded module as its pass `pipefusion`, or `sequence_parallel` with `stale`, says.

    Those passes change no graph, but write down how it is to be run: this calls `pipefusion` or `stale_sequence` with what they
    say.

    Args:
        gm: The rewritten module.
        args: Example inputs by position, as for `trace`.
        kwargs: Example inputs by name.
        overlap: As in `pipefusion`.
        mesh: As in `pipefusion`.
        check: As in `pipefusion`.

    Returns:
        A module that takes the denoiser's place in its pipeline.

    Raises:
        SpecError: No pass says how to run the module; and as those two.
        VerifyError: As those two.
    """
    said: dict[str, Any] = dict(gm.meta.get("stepped") or {})
    if not said:
        raise SpecError(
            "no pass of this module runs it in steps: apply the pass pipefusion, or sequence_parallel with stale: true; or "
            "call fxplug.pipefusion or fxplug.stale_sequence"
        )
    if "stages" in said:
        return pipefusion(gm, args, kwargs, **said, overlap=overlap, mesh=mesh, check=check)
    return stale_sequence(gm, args, kwargs, **said, mesh=mesh, check=check)


def with_steps(gm: TracedModule, name: str, said: Mapping[str, Any]) -> TracedModule:
    """Return a copy of the module that records how to run it in steps, for `in_steps`; `said` has the keys of a parallel pass.

    Raises SpecError for keys that exclude each other.
    """
    given = {key: value for key, value in said.items() if key != "stale"}
    if given.get("clock") == "":
        given["clock"] = None
    if "stages" not in given:
        given["ways"] = given.pop("ulysses", 1) * given.pop("ring", 1)
    known = inspect.signature(pipefusion if "stages" in given else stale_sequence).parameters
    what = "stages" if "stages" in given else "stale: true"
    for key in given:
        if key not in known:
            raise SpecError(f"{name}: '{key}' cannot be used with {what}: leave it out")
    new = gm.copied()
    new.meta |= {"stepped": given, "passes": [*gm.meta.get("passes", []), make_entry(name, given, [], neutral=True)]}
    return new


@dataclass(frozen=True)
class _Places:
    """Over which processes a denoiser runs, and where its tokens are; as `pipefusion` takes them."""

    stages: int
    batch: int
    split: Mapping[str, int] | None
    mesh: DeviceMesh | None


def _make_denoiser(
    kind: type[T],
    gm: TracedModule,
    call: Any,
    run: tuple[int, int, int, Steps, str | None],
    places: _Places,
    check: bool,
) -> T:
    """Make a denoiser that runs by patches, as this process runs it if there are several."""
    patches, warmup, correct, steps, clock = run
    check_integer("warmup", warmup, 1)
    if check_integer("correct", correct) and steps is None:
        raise SpecError(
            f"correct={correct} needs the number of steps of an image: give steps=..., or a function that returns it"
        )
    plan = parallel_plan(gm, *call, ulysses=max(2, patches), batch=places.batch, split=places.split, check=False)
    patcher = Patcher(plan.stages[-1].found)
    patcher.run()
    found = kind(gm, cut_stages(patcher, plan.written, places.stages), patches, warmup, correct, steps, clock)
    if check and has_values(list(gm.state_dict().values()), plan.example):
        found.check(*plan.example)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        number = places.stages if kind.by_stages else patches
        links, world = make_links(number, fill_degrees({"batch": places.batch}), places.mesh)
        place(plan.written, world)
        found = found.with_options(links=links)
    return found


def distances(
    found: PipeFusion, draw: Callable[[Any], Tensor], patches: Sequence[int], warmups: Sequence[int]
) -> dict[tuple[int, int], float]:
    """Return how far images are from the serial one, ||x - serial|| / ||serial||, by patches and warm-up.

    `draw(denoiser)` returns an image, the same for the same denoiser: a pipeline with its transformer exchanged and a seed.
    """
    serial = draw(found.module).float()
    rows = {}
    for number in patches:
        for warmup in warmups:
            image = draw(found.with_options(patches=number, warmup=warmup)).float()
            rows[number, warmup] = float((image - serial).norm() / serial.norm())
    return rows
