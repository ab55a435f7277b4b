"""PipeFusion: a denoiser in stages, on patches of its tokens, with what the other patches had at the step before."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...core.clock import Clock
from ...core.errors import GuardError, SpecError, VerifyError
from ...core.ir.comparison import RESULT, measure_difference
from ...core.ir.containers import list_leaves
from ...core.ir.traced_module import TracedModule
from ..runtime.checksums import check_equal_on_ranks
from .links import Links
from .patches import PatchValue, start_sum, update_cache
from .stages import Stages

Steps = int | Callable[[], int] | None


@dataclass
class ImageRun:
    """What is known of the calls of one image that have one number."""

    shapes: Any
    index: int = 0
    fixed: dict[str, Any] = field(default_factory=dict)
    cells: dict[Any, Tensor] = field(default_factory=dict)  # what is kept of values that are put together
    sizes: dict[Any, list[int]] = field(default_factory=dict)  # of their streams
    others: list[Any] = field(default_factory=list)  # what else goes behind the last stage


class PipeFusion(nn.Module):
    """A denoiser that runs in stages on patches of its tokens; it takes the model's place in a pipeline.

    The first `warmup` steps of an image, and the last `correct`, run all tokens in one piece and give what the model gives.
    In between each stage runs one patch after the other, and hands it on while it takes the next; attention and all else where
    tokens meet takes what the other patches gave last. What is kept between calls are inputs and results of the stages' graphs.

    A new image begins where the clock, an input such as the timestep, goes back, where the shapes of the inputs change, where
    a pipeline of diffusers begins one, and with `new_image()`. Calls with other conditions are kept apart; those at one time
    with the same ones run in one piece, as nothing says which of them goes on with which.

    Every process holds the weights of its own stage alone; one without torch.distributed runs all. No gradients.
    """

    by_stages = True  # a process is a stage, not a patch

    def __init__(
        self, gm: TracedModule, stages: Stages, patches: int, warmup: int, correct: int, steps: Steps, clock: str | None,
        links: Links | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.__dict__["module"] = gm  # no submodule: a process has the weights of its own stage
        self.signature = inspect.signature(gm.forward)
        self.plan, self.peers, self.links = stages, links, links if self.by_stages else None
        self.patches, self.warmup, self.correct, self.steps = patches, warmup, correct, steps
        self.clock = Clock(clock, list(self.signature.parameters), samples=False)  # which may be computed later
        self.mine = range(len(stages.stages)) if self.links is None else [self.links.rank]
        self.stages = nn.ModuleList(nn.ModuleList((s.entire, s.early, s.late)) for s in (stages.stages[i] for i in self.mine))
        self.tail = stages.tail
        self.training = False
        self.counts = {"entire": 0, "patches": 0}
        self.new_image()

    def with_options(
        self, patches: int | None = None, warmup: int | None = None, correct: int | None = None, links: Links | None = None
    ) -> Self:
        """Give the same graphs with other numbers, or as one process of several runs them.

        Args:
            patches: The number of patches; None leaves it.
            warmup: The steps at the beginning in one piece; None leaves it.
            correct: The steps at the end in one piece; None leaves it.
            links: The connections to the processes of the other stages; None leaves them.

        Returns:
            A module of its own, which begins a new image.
        """
        rows = zip((patches, warmup, correct), (self.patches, self.warmup, self.correct), strict=True)
        numbers = [old if new is None else new for new, old in rows]
        return type(self)(
            self.module, self.plan, numbers[0], numbers[1], numbers[2], self.steps, self.clock.name, links or self.peers
        )  # fmt: skip

    def new_image(self) -> None:
        """Clear all cached values: the next call begins an image."""
        self.forget()
        self.clock.reset()

    def _reset_stateful_cache(self, recurse: bool = True) -> None:
        """Begin a new image, as pipelines of diffusers call it on each of their models at the end of a run."""
        self.new_image()

    def forget(self) -> None:
        """Clear the state of an image's calls."""
        self.runs: dict[int, ImageRun] = {}

    # --- a call

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the next step of an image, for the arguments that the model takes.

        Args:
            *args: Inputs by position.
            **kwargs: Inputs by name.

        Returns:
            What the model returns.

        Raises:
            GuardError: The model does not take the arguments, or those of the processes differ.
        """
        inputs = self.bound(args, kwargs)
        run = self.begin(inputs)
        self.compare(run, inputs)
        return self.step(run, inputs, self.is_full_step(run))

    def compare(self, run: ImageRun, inputs: Sequence[Any]) -> None:
        """Compare step, inputs, weights and adapters of this process with those of the others.

        Args:
            run: The image.
            inputs: The inputs in the signature's order.

        Raises:
            GuardError: They differ; in every process.
        """
        if self.peers is not None and self.peers.world is not None:
            check_equal_on_ranks(self.module, self.peers.world, inputs, {}, f"step {run.index} of an image")

    def is_full_step(self, run: ImageRun) -> bool:
        """Say whether the next step of a run is one for all tokens, and count it.

        Args:
            run: The image; its `index` goes up by one.

        Returns:
            True for a step in one piece.
        """
        entire = run.index < self.warmup or self.is_last(run.index)
        run.index += 1
        self.counts["entire" if entire else "patches"] += 1
        return entire

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """List the arguments in the signature's order, with defaults.

        Args:
            args: Inputs by position.
            kwargs: Inputs by name.

        Returns:
            One value for each parameter of `forward`.

        Raises:
            GuardError: The model does not take this call.
        """
        try:
            given = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise GuardError(f"the model does not take this call: {error}") from None
        given.apply_defaults()
        return list(given.arguments.values())

    def begin(self, inputs: list[Any]) -> ImageRun:
        """Give the run that this call is a step of: a new one where an image begins and for inputs of other shapes.

        Args:
            inputs: The inputs in the signature's order.

        Returns:
            What is known of the image.
        """
        new, number = self.clock.tick(inputs, {})
        shapes = tuple((x.shape, x.dtype) for x in list_leaves(inputs) if isinstance(x, Tensor))
        if self.clock.is_ambiguous:
            warnings.warn(
                "calls at one time have the same conditions and cannot be matched between steps, so all of them run in one "
                "piece: give the value that differs as an input",
                stacklevel=3,
            )
        if new:
            self.forget()
        self.runs = {n: run for n, run in self.runs.items() if n in self.clock.numbers}
        if number not in self.runs or self.runs[number].shapes != shapes:
            self.runs[number] = ImageRun(shapes)
        return self.runs[number]

    def is_last(self, index: int) -> bool:
        """Say whether the step of this number is one of the last `correct`.

        Args:
            index: The number of the step, from 0.

        Returns:
            Whether it is; False without `correct`.
        """
        if not self.correct:
            return False
        steps = self.steps() if callable(self.steps) else self.steps
        assert steps is not None
        return index >= steps - self.correct

    def step(self, run: ImageRun, inputs: list[Any], entire: bool) -> Any:
        """Compute the result for all tokens, in one piece or patch by patch.

        Args:
            run: The image.
            inputs: The inputs in the signature's order.
            entire: Whether the step is in one piece.

        Returns:
            What the model returns.
        """
        if self.links is not None:
            self.links.device = self.device
        patches = 1 if entire else self.patches
        early = {} if entire else {s: self.early(s, run, inputs) for s in self.mine}
        values: dict[str, Any] = {}
        for patch in range(patches):
            values = {}
            for stage in self.mine:
                self.patch(stage, run, inputs, early, patch, patches, values)
        return self.end(run, inputs, values, entire)

    def early(self, number: int, run: ImageRun, inputs: list[Any]) -> Any:
        """Compute what is the same for all patches of a stage.

        Args:
            number: The stage.
            run: The image.
            inputs: The inputs in the signature's order.

        Returns:
            The values, for `patch`.
        """
        stage = self.plan.stages[number]
        return stage.early(*inputs, *(run.fixed[name] for name in stage.fixed_used))

    def patch(
        self,
        number: int,
        run: ImageRun,
        inputs: list[Any],
        early: dict[int, Any],
        patch: int,
        patches: int,
        values: dict[str, Any],
    ) -> None:
        """Run one stage on one patch.

        Args:
            number: The stage.
            run: The image, whose values that are put together are written.
            inputs: The inputs in the signature's order.
            early: What `early` gave, by stage; empty for a step in one piece.
            patch: The number of the patch.
            patches: How many there are.
            values: What goes from stage to stage, by name; what this stage gives is added.
        """
        stage, entire = self.plan.stages[number], number not in early
        self.take(number, run, patch, patches, entire, values)
        taken = [values[name] for name in stage.taken]
        if entire:
            before = [run.fixed[name] for name in stage.fixed_taken]
            given, parts, fixed = stage.entire(*inputs, 0, 1, *taken, *before, *(None for _ in stage.kept))
            run.fixed.update(zip(stage.fixed, fixed, strict=True))
        else:
            fixed = [run.fixed[name] for name in stage.fixed_used]
            cells = [run.cells[row.node] for row in stage.kept]
            given, parts = stage.late(patch, patches, *early[number], *fixed, *taken, *cells)
        for row, (value, *sizes) in zip(stage.kept, parts, strict=True):
            self.put(run, row, value, patch, patches, sizes)
        values.update(zip(stage.given, given, strict=True))
        self.give(number, run, patch, patches, entire, values)

    def put(self, run: ImageRun, row: PatchValue, value: Tensor, patch: int, patches: int, sizes: list[int]) -> None:
        """Keep what one patch gives to a value that is put together.

        Args:
            run: The image.
            row: The value.
            value: The part of this patch, a tensor.
            patch: The number of the patch.
            patches: How many there are.
            sizes: The sizes of the value's streams.
        """
        run.sizes[row.node] = sizes
        if patches == 1 and not row.inner:
            run.cells[row.node] = start_sum(value, self.patches)
        else:
            run.cells[row.node] = update_cache(run.cells.get(row.node), value, patch, patches, row.dim, row.inner, sizes)

    def end(self, run: ImageRun, inputs: list[Any], values: dict[str, Any], entire: bool) -> Any:
        """Compute what comes behind the last stage, in every process.

        Args:
            run: The image.
            inputs: The inputs in the signature's order.
            values: What the stages of this process gave, by name.
            entire: Whether the step is in one piece.

        Returns:
            What the model returns.
        """
        plan = self.plan
        if self.links is not None:
            last = len(plan.stages) - 1
            found: Any = None
            if self.links.rank == last:
                fixed = [run.fixed[name] for name in plan.fixed] if entire else []
                wholes = [(run.cells[row.node], run.sizes[row.node]) for row in plan.wholes]
                found = wholes, [values[name] for name in plan.others], fixed
            wholes, others, fixed = self.links.share(last, found, (run.shapes, entire))
            run.fixed.update(zip(plan.fixed, fixed, strict=False))
            for row, (cell, sizes) in zip(plan.wholes, wholes, strict=True):
                run.cells[row.node], run.sizes[row.node] = cell, sizes
        else:
            others = [values[name] for name in plan.others]
        run.others = others
        return self.ended(run, inputs, run.cells, others)

    def ended(self, run: ImageRun, inputs: list[Any], cells: Mapping[Any, Tensor], others: Sequence[Any]) -> Any:
        """Compute what comes behind the last stage.

        Args:
            run: The image.
            inputs: The inputs in the signature's order.
            cells: The tensors that were put together, by node.
            others: What else the stages give.

        Returns:
            What the model returns.
        """
        wholes = [cells[row.node].clone() for row in self.plan.wholes]  # results may be views of them, which are written again
        return self.plan.tail(*inputs, *(run.fixed[name] for name in self.plan.fixed), *wholes, *others)

    # --- from stage to stage

    def take(self, number: int, run: ImageRun, patch: int, patches: int, entire: bool, values: dict[str, Any]) -> None:
        """Receive what earlier stages send this one, where each has a process of its own.

        Args:
            number: The stage.
            run: The image, whose numbers are written.
            patch: The number of the patch.
            patches: How many there are.
            entire: Whether the step is in one piece.
            values: Where the values are put, by name.
        """
        if self.links is None:
            return
        for source in range(number):
            names, fixed = self.between(source, number, entire)
            if names or fixed:
                found = self.links.receive(source, (run.shapes, patch, patches))
                values.update(zip(names, found, strict=False))
                run.fixed.update(zip(fixed, found[len(names) :], strict=True))

    def give(self, number: int, run: ImageRun, patch: int, patches: int, entire: bool, values: dict[str, Any]) -> None:
        """Send later stages what they take of this one, where each has a process of its own.

        Args:
            number: The stage.
            run: The image.
            patch: The number of the patch.
            patches: How many there are.
            entire: Whether the step is in one piece.
            values: The values, by name.
        """
        if self.links is None:
            return
        for to in range(number + 1, len(self.plan.stages)):
            names, fixed = self.between(number, to, entire)
            if names or fixed:
                found = [values[name] for name in names] + [run.fixed[name] for name in fixed]
                self.links.send(to, found, (run.shapes, patch, patches))

    def between(self, source: int, to: int, entire: bool) -> tuple[list[str], list[str]]:
        """List the names of what one stage sends another: values, and in a step in one piece numbers too.

        Args:
            source: The stage that sends.
            to: The stage that receives.
            entire: Whether the step is in one piece.

        Returns:
            The names of the values and those of the numbers.
        """
        stage = self.plan.stages[to]
        fixed = dict(stage.fixed_taken)
        if to == len(self.plan.stages) - 1:
            fixed.update((n, s) for n, s in self.plan.fixed.items() if s < to)
        return [n for n, s in stage.taken.items() if s == source], [n for n, s in fixed.items() if s == source and entire]

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        """Run a call in one piece, and again patch by patch: nothing is stale then, and both must be what the model gives.

        Args:
            args: Inputs by position.
            kwargs: Inputs by name.

        Returns:
            The largest difference over the largest value.

        Raises:
            VerifyError: It is larger than rounding in its dtype.
        """
        inputs, run = self.bound(args, kwargs), ImageRun(None)
        with torch.no_grad():
            want = self.module(*args, **kwargs)
            worst = max(measure_difference(want, self.step(run, inputs, entire), RESULT) for entire in (True, False))
        if worst.times > 1:
            raise VerifyError(f"running patch by patch gives another result: an output differs by {worst.distance:.1e}")
        return worst.distance

    # --- it stands for the model

    @property
    def device(self) -> torch.device:
        """Device of the parameters of these stages; the CPU if there are none."""
        return next((t.device for t in self.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model."""
        return self.module.dtype  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "module" not in self.__dict__:
                raise
        return getattr(self.module, name)

    def train(self, mode: bool = True) -> PipeFusion:
        """Do as torch's `train` for `mode` False.

        Args:
            mode: Only False.

        Returns:
            This module.

        Raises:
            SpecError: `mode` is True: there are no gradients.
        """
        if mode:
            raise SpecError("PipeFusion computes no gradients: train the module that it was made from")
        return super().train(False)

    def extra_repr(self) -> str:
        total = max(1, sum(stage.work for stage in self.plan.stages))
        shares = ", ".join(f"{stage.work / total:.1%}" for stage in self.plan.stages)
        return f"stages: {shares} of the work; {self.patches} patches, warm-up {self.warmup}, correct {self.correct}"
