"""The table of a training run, for a terminal of 80 columns and for a log file: a row for each epoch and for each test."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping

WIDTH = 80
COLUMN = 11  # characters of a column, and of more with a long head


def make_training_row(
    epoch: int, epochs: int, seconds: float, loss: float, lr: float, memory: float | None = None
) -> dict[str, str]:
    """Return the cells of an epoch's row by their heads.

    Args:
        epoch: The epoch, counted from 0.
        epochs: Number of epochs of the run.
        seconds: Mean of a step.
        loss: Mean of a step.
        lr: The learning rate of the last step.
        memory: Bytes that are reserved on the GPU; None where there is none.
    """
    return {**_first(epoch, epochs, memory), "s/step": f"{seconds:.4g}", "Loss": f"{loss:.4g}", "LR": f"{lr:.5g}"}


def make_testing_row(
    epoch: int, epochs: int, seconds: float, metrics: Mapping[str, float], memory: float | None = None
) -> dict[str, str]:
    """Return the cells of a test's row by their heads; `seconds` is the mean of a batch."""
    cells = {_title(name): f"{value:.4g}" for name, value in metrics.items()}
    return {**_first(epoch, epochs, memory), "s/batch": f"{seconds:.4g}", **cells}


def _first(epoch: int, epochs: int, memory: float | None) -> dict[str, str]:
    return {"Epoch": f"{epoch + 1}/{epochs}", **({} if memory is None else {"GPU GB": f"{memory / 1e9:.3g}"})}


def split_row(cells: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return the cells that fit into the width, and the others as lines of text, "" if there are none."""
    fitting: dict[str, str] = {}
    rest = dict(cells)
    for name, cell in cells.items():
        if sum(map(_width, fitting)) + _width(name) > WIDTH:
            break
        fitting[name] = cell
        del rest[name]
    text = ", ".join(f"{name}\0{cell}" for name, cell in rest.items())  # a line ends between two of them
    lines = textwrap.wrap(text, WIDTH - 6, break_on_hyphens=False, break_long_words=False)
    return fitting, "\n".join(f"      {line}" for line in lines).replace("\0", " ")


def format_header(names: tuple[str, ...]) -> str:
    """Return the line of column heads."""
    return "".join(f"{name:>{_width(name)}}" for name in names)


def format_row(cells: Mapping[str, str]) -> str:
    """Return a row under `format_header(tuple(cells))`."""
    return "".join(f"{cell:>{_width(name)}}" for name, cell in cells.items())


def _width(name: str) -> int:
    return max(COLUMN, len(name) + 2)


def format_progress(step: int, steps: int, epoch: int, epochs: int, loss: float, seconds: float) -> str:
    """Return the line of a log file within an epoch: `step 120/5000, epoch 1/10, loss 0.1234, 0.45 s/step, 36:36 left`.

    `epoch` counts from 0; `seconds` and `loss` are means of a step.
    """
    left = int(seconds * (steps - step))
    clock = f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}" if left >= 3600 else f"{left // 60}:{left % 60:02}"
    return f"step {step}/{steps}, epoch {epoch + 1}/{epochs}, loss {loss:.4g}, {seconds:.3g} s/step, {clock} left"


def choose_columns(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the accuracies, which the table shows of a classifier, or else all metrics."""
    return {name: value for name, value in metrics.items() if re.fullmatch(r"acc\d+", name)} or dict(metrics)


def _title(name: str) -> str:
    """Return the head of a metric's column: of `acc1` `Acc@1 %`, of `loss` `Test loss`, other names unchanged."""
    return "Test loss" if name == "loss" else re.sub(r"^acc(\d+)$", r"Acc@\1 %", name)


def format_best(best: Mapping[str, float]) -> str:
    """Format the best results: `Best so far: Acc@1 % 80, Acc@5 % 90`."""
    return "Best so far: " + ", ".join(f"{_title(name)} {value:.4g}" for name, value in best.items())


def format_parameters(trainable: int, total: int) -> str:
    """Format the counts: `Trainable/total parameters of the model: 0.03M / 38.64M (0.08843%)`"""
    share = trainable / max(total, 1) * 100
    return f"Trainable/total parameters of the model: {trainable / 1e6:.2f}M / {total / 1e6:.2f}M ({share:.5f}%)"
