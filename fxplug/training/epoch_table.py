"""ZhiJian's table of epochs (github.com/zhangyikaii/LAMDA-ZhiJian): its columns, widths and lines."""

from __future__ import annotations

import re
from collections.abc import Mapping

TRAINING = ("Loss", "LR")
UNITS = "Time: seconds a step, in tests a batch. GPU Mem.: 10^9 bytes. Acc@1: percent."  # which the table itself does not say


def format_header(columns: tuple[str, ...]) -> str:
    """Return the line of column names, each cut to its width."""
    return "".join(f"{name[:10]:>11}" for name in ("Epoch", "GPU Mem.", "Time", *columns))


def format_training_row(epoch: int, epochs: int, memory: float, seconds: float, loss: float, lr: float) -> str:
    """Return a row under `format_header(TRAINING)`.

    `epoch` counts from 0, `memory` is in bytes, `seconds` and `loss` are means of a step.
    """
    return f"{_first(epoch, epochs, memory)}{seconds:11.4g}{loss:11.4g}{lr:11.5g}"


def format_testing_row(epoch: int, epochs: int, memory: float, seconds: float, metrics: Mapping[str, float]) -> str:
    """Return a row under `format_header(titles(metrics))`; `seconds` is the mean of a batch."""
    return f"{_first(epoch, epochs, memory)}{seconds:11.4g}" + "".join(f"{value:11.4g}" for value in metrics.values())


def _first(epoch: int, epochs: int, memory: float) -> str:
    return f"{f'{epoch + 1}/{epochs}':>11}{f'{memory / 1e9:.3g}G':>11}"


def choose_columns(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the accuracies, which the table shows of a classifier, or else all metrics."""
    return {name: value for name, value in metrics.items() if re.fullmatch(r"acc\d+", name)} or dict(metrics)


def make_titles(metrics: Mapping[str, float]) -> tuple[str, ...]:
    """Return column titles: `acc1` as `Acc@1`, other names unchanged."""
    return tuple(re.sub(r"^acc(\d+)$", r"Acc@\1", name) for name in metrics)


def format_best(best: Mapping[str, float]) -> str:
    """Format the best results: `*** Best results: [Acc@1: 1.87], [Acc@5: 7.93]`"""
    return "***   Best results: " + ", ".join(f"[{t}: {v}]" for t, v in zip(make_titles(best), best.values(), strict=True))


def format_parameters(trainable: int, total: int) -> str:
    """Format the counts: `Trainable/total parameters of the model: 0.03M / 38.64M (0.08843%)`"""
    share = trainable / max(total, 1) * 100
    return f"Trainable/total parameters of the model: {trainable / 1e6:.2f}M / {total / 1e6:.2f}M ({share:.5f}%)"
