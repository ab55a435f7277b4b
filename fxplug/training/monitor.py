"""What a person sees of a run: a table and a progress bar on stderr, a log, curves and pictures in its folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from .epoch_table import (
    choose_columns,
    format_best,
    format_header,
    format_parameters,
    format_progress,
    format_row,
    make_testing_row,
    make_training_row,
    split_row,
)
from .log_files import Lines, convert_plain
from .pictures import make_grid, save_animation, save_curves, save_picture
from .train_section import Train

FLUSHED = 10  # seconds after which TensorBoard has what was written
ROWS = 50  # of a run that is given in steps: with small data it has very many epochs
MINUTE = 60.0  # seconds after which a log file gets a line again


class RunMonitor:
    """Tells how a run goes.

    `out` is the folder for `log.jsonl`, `tensorboard/`, `samples/` and `loss.png`; None writes nothing.
    `console` is where to show it, by default stderr: a terminal gets a progress bar below the table, anything else the rows of
    the table, and between them a line each minute. `quiet` shows nothing but notes. Steps are optimizer steps and count from 1.
    A file that cannot be written (a full disk) is said once and ends nothing.
    """

    def __init__(
        self,
        out: Path | None,
        settings: Train,
        steps: int,
        epochs: int,
        console: Console | None = None,
        quiet: bool = False,
    ) -> None:
        self.out, self.settings, self.quiet = out, settings, quiet
        self.steps, self.epochs = steps, epochs
        self.console = console or Console(stderr=True)
        self._lines = Lines(out / "log.jsonl") if out else None
        self._events: SummaryWriter | None = None
        self._progress: Progress | None = None
        self._begin = 0
        self._step = 0
        self._on_gpu = False
        self._failed: set[str] = set()
        self._columns: tuple[str, ...] = ()
        self._since: list[tuple[float, float]] = []  # loss and seconds of the steps since the last row
        self._shown = 0.0
        self._printed = time.monotonic()

    @property
    def log_length(self) -> int:
        """Length of the log in bytes so far."""
        return self._lines.length if self._lines else 0

    def rewind(self, step: int, length: int) -> bytes:
        """Continue from this step, at which the log had this length. Call it before `start`. Returns the later lines of the
        log, which are dropped."""
        self._begin = self._step = step
        return (self._try("log.jsonl", self._lines.cut, length) or b"") if self._lines else b""

    def history(self) -> list[dict[str, Any]]:
        """Return the records of steps in the log."""
        return [record for record in self._lines.read() if "loss" in record] if self._lines else []

    def start(self, module: nn.Module, counts: tuple[int, int]) -> None:
        """Print the header and start the progress bar. `counts`: the numbers of trainable and of all parameters."""
        self._on_gpu = any(p.is_cuda for p in module.parameters())
        if self.out:
            if self.settings.log.tensorboard:
                purged = self._begin + 1 if self._begin else None  # what earlier files have from this step on
                self._events = self._try("tensorboard", SummaryWriter, str(self.out / "tensorboard"), "", purged, 10, FLUSHED)
            self._print(f"Log files are recorded in: {self.out}")
        self._print(format_parameters(*counts))
        if self.console.is_terminal and not self.quiet:
            self._progress = Progress(
                *(BarColumn(bar_width=12), MofNCompleteColumn(), TextColumn("{task.fields[state]}")),
                *(TimeRemainingColumn(compact=True), TextColumn("left")),
                console=self.console,
                transient=True,
                auto_refresh=False,  # its thread may hold a lock while a worker process is forked
                redirect_stdout=sys.stdout.isatty(),  # what plugins print to a file or a pipe goes there
            )
            self._progress.add_task("training", total=self.steps, completed=self._begin, state="")
            self._progress.start()

    def step(self, record: Mapping[str, Any], last: bool) -> None:
        """Log a step, which was the `last` of its epoch or not. `record` has `step`, `epoch`, `loss`, `lr`, `seconds`, and
        further values to log."""
        step = self._step = int(record["step"])
        self._since.append((float(record["loss"]), float(record["seconds"])))
        self._log(record)
        if self._events and (step % self.settings.log.every == 0 or step in (1, self.steps)):
            shown = {key: value for key, value in record.items() if key not in ("step", "epoch")}
            self._try("tensorboard", self._scalars, "train", shown)
        if self._progress and (time.monotonic() - self._shown > 0.2 or step == self.steps):
            self._shown = time.monotonic()
            task = self._progress.tasks[0]
            self._progress.update(task.id, completed=step)
            self._progress.update(task.id, state=self._state(task.speed or 0.0), refresh=True)
        if last or step == self.steps:
            self._end_epoch(int(record["epoch"]), float(record["lr"]))
        if self._since:
            self.remind(lambda: format_progress(step, self.steps, int(record["epoch"]), self.epochs, *self._means()))

    def remind(self, text: Callable[[], str]) -> None:
        """Print a line where there is no progress bar, and nothing was printed for a minute."""
        if self._progress is None and time.monotonic() - self._printed > MINUTE:
            self._print(text())

    def _means(self) -> tuple[float, float]:
        """Return the mean loss and the mean seconds of the steps since the last row."""
        return fmean(loss for loss, _ in self._since), fmean(seconds for _, seconds in self._since)

    def _state(self, speed: float) -> str:
        batch = self.settings.batch * self.settings.accumulate
        memory = "" if (reserved := self._gpu_memory()) is None else f"  {reserved / 1e9:.3g} GB"
        return f"loss {self._means()[0]:.4g}  {speed * batch:.3g} samples/s{memory}"

    def _end_epoch(self, epoch: int, lr: float) -> None:
        every = 1 if self.settings.epochs else -(-self.epochs // ROWS)
        if (epoch + 1) % every == 0 or self._step == self.steps:
            loss, seconds = self._means()
            self._row(make_training_row(epoch, self.epochs, seconds, loss, lr, self._gpu_memory()))
            self._since = []

    def test(self, epoch: int, metrics: Mapping[str, float], seconds: float, best: Mapping[str, float] | None = None) -> None:
        """Log a test after so many epochs: its metrics, the mean seconds of a batch, and the best results so far."""
        numbers = {name: float(value) for name, value in metrics.items()}
        self._log({"step": self._step, "epoch": epoch, "test": numbers, "seconds": seconds})
        self._try("tensorboard", self._scalars, "test", numbers)
        shown = choose_columns(numbers)
        self._row(make_testing_row(epoch - 1, self.epochs, seconds, shown, self._gpu_memory()))
        if best:
            self._print(format_best(choose_columns(best)))

    def samples(self, step: int, images: Tensor) -> None:
        """Save pictures that the model made after a step: [n, c, h, w] in [0, 1], c being 1 or 3; of videos [n, f, c, h, w] the
        first frames as a picture, and all as an animation beside it."""
        picture = make_grid(images if images.dim() == 4 else images[:, 0])
        if self.out and images.dim() == 5:
            frames = [make_grid(each) for each in images.unbind(1)]
            self._try("samples", save_animation, frames, self.out / "samples" / f"step-{step:08d}.webp")
        if self.out:
            self._try("samples", save_picture, picture, self.out / "samples" / f"step-{step:08d}.png")
        if self._events:
            self._try("tensorboard", self._events.add_image, "samples", picture, step)

    def beside_samples(self, given: Callable[[], tuple[Tensor | None, list[str]]]) -> None:
        """Save, before the first samples of a run, pictures of the data, [n, c, h, w] in [0, 1], and the name of each
        sample."""
        if not self.out or (self.out / "samples" / "data.png").is_file():
            return
        images, names = given()
        if images is not None and images.shape[1] in (1, 3):
            self._try("samples", save_picture, make_grid(images), self.out / "samples" / "data.png")
        if names and (self.out / "samples").is_dir():
            said = "".join(f"{' '.join(name.split())}\n" for name in names)
            self._try("samples", (self.out / "samples" / "captions.txt").write_text, said, "utf-8")

    def note(self, text: str, said: bool = True) -> None:
        """Write a note to the log, and print it if `said`."""
        if said:
            self._print(text, always=True)
        self._log({"step": self._step, "note": text})

    def close(self, history: Sequence[Mapping[str, Any]] = ()) -> None:
        """Finish the output of a run, complete or not, and draw the curves. May be called again."""
        if self._progress:
            self._progress.stop()
            self._progress = None
        if self._events:
            self._try("tensorboard", self._events.close)
            self._events = None
        if self.out and self._lines:
            # the log has the steps before a resume, the history those that were not logged
            logged = self._lines.read()
            steps = {r["step"]: r for r in [*(r for r in logged if "loss" in r), *history]}
            tests = [r for r in logged if "test" in r]
            self._try("loss.png", save_curves, [steps[step] for step in sorted(steps)], tests, self.out / "loss.png")

    def _gpu_memory(self) -> int | None:
        """Return the bytes that torch reserves on the GPU; None where the module is not on one."""
        return torch.cuda.memory_reserved() if self._on_gpu else None

    def _row(self, cells: Mapping[str, str]) -> None:
        fitting, rest = split_row(cells)
        if tuple(fitting) != self._columns:
            self._columns = tuple(fitting)
            self._print("\n" + format_header(self._columns))
        self._print(format_row(fitting))
        if rest:
            self._print(rest)

    def _print(self, text: str, always: bool = False) -> None:
        if always or not self.quiet:
            self._printed = time.monotonic()
            self.console.print(text, markup=False, highlight=False, soft_wrap=True, emoji=False)

    def _scalars(self, prefix: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if self._events and isinstance(number := convert_plain(value), (int, float)):
                self._events.add_scalar(f"{prefix}/{name}", number, self._step)

    def _log(self, record: Mapping[str, Any]) -> None:
        if self._lines:
            self._try("log.jsonl", self._lines.write, record)

    def _try(self, what: str, write: Callable[..., Any], *args: Any) -> Any:
        try:
            return write(*args)
        except OSError as error:
            if what not in self._failed:
                self._failed.add(what)
                self._print(f"{what} cannot be written: {error}; the run continues", always=True)
            return None
