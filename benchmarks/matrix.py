"""Which features compose: `python benchmarks/matrix.py [CELL ...] [--keep FILE] [--page FILE] [--json FILE]`.

A cell is a model and one, two or three features in an order, "unet: lora_slots + outline". What the features make of the model
is compared with an oracle: the features that adapt it alone, applied together, eager, on one process. A cell is

equal           within the tolerance of the dtype that `fxplug.core.ir.containers` has, or as close to the result in float64 as
                the oracle is (twice, three times for gradients), and no adapter was without an effect
refused         an error of fxplug's, with its sentence
does not apply  a feature alone is refused on this model, or has no meaning for it: not counted
fault           other numbers, an exception of another kind, an adapter without an effect, or no end within --limit seconds

With names of cells it runs these, and prints what it finds. Without, it runs all pairs of `matrix_models.MODELS`, --triples
random triples, and --recent random pairs on each of the newest classes, in --jobs processes. Each result is appended to --keep
at once, and what stands there is not run again (but for the outcome that --again names). With MATRIX_DEVICE=cuda in the
environment all of it is on a GPU, and torch.compile is Inductor.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from matrix_features import FEATURES, applied, begin, retraceable
from matrix_models import MODELS, recent
from matrix_state import NotApplicable, State, is_float, result_of
from record import COMMIT

from fxplug.core.errors import FxplugError
from fxplug.core.ir.comparison import RESULT, WITHIN, Difference, measure_difference
from fxplug.core.ir.containers import map_leaves

EQUAL, REFUSED, NOT_APPLICABLE, FAULT = "equal", "refused", "does not apply", "fault"
LOUD = 3  # times the tolerance that an adapter must change
SILENT = 1e-13  # the share of the largest value that rounding in float64 changes
HALF = {"bfloat16", "autocast"}
WORKER_CELLS = 400  # a worker is a new process after so many: what torch.compile keeps grows


@dataclass(frozen=True)
class Cell:
    """A model and features in an order."""

    model: str
    features: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.model}: {' + '.join(self.features)}"


def cell_of(name: str) -> Cell:
    model, _, features = name.rpartition(": ")
    found = Cell(model, tuple(part.strip() for part in features.split("+")))
    if unknown := [f for f in found.features if f not in FEATURES]:
        raise SystemExit(f"{name}: no feature {unknown[0]!r}; there are {', '.join(FEATURES)}")
    return found


# --- one cell


def expanded(names: Sequence[str]) -> tuple[str, ...]:
    """The features of a cell, and first what some of them need before them."""
    found: list[str] = []
    for number, name in enumerate(names):
        needs = FEATURES[name].needs
        if needs and not set(needs) & {*found, *names[:number]}:
            found += [other for other in needs if other not in names][:1]
    return (*found, *names)


def done_to(state: State, names: Sequence[str]) -> State:
    """Features one after the other, and a call after each, which must not matter to the next."""
    for number, name in enumerate(names, 1):
        feature = FEATURES[name]
        state = feature.do(replace(state, result=None, whole=state.whole if feature.splits else None))
        state = replace(state, done=(*state.done, name))
        if number < len(names) and not state.around:
            result_of(state)
    return state


def plainly(state: State, names: Sequence[str]) -> State:
    """The same where neighbouring passes are applied together."""
    for joint, group in itertools.groupby(names, lambda name: FEATURES[name].passes is not None):
        several = [FEATURES[name] for name in group]
        if joint:
            state = applied(state, [p for f in several for p in f.passes(state)])  # type: ignore[misc]
            for feature in several:
                state = feature.after(state)
            state = replace(state, done=(*state.done, *(f.name for f in several)))
        else:
            for feature in several:
                state = feature.do(state)
                state = replace(state, done=(*state.done, feature.name))
    return state


@cache
def oracle(model: str, names: tuple[str, ...], gradients: bool) -> tuple[Any, list[torch.Tensor]]:
    """What the adapting features alone give, and the gradients."""
    values, grads = result_of(replace(plainly(begin(model), names), gradients=gradients))
    return values[0], grads


def without_effect(model: str, names: tuple[str, ...]) -> str:
    """The first adapting feature without which the result is the same. NotApplicable where only rounding makes it so."""
    kept = tuple(name for name in names if name not in HALF)
    whole = oracle(model, kept, False)[0]
    for name in kept:
        rest = tuple(other for other in kept if other != name)
        with contextlib.suppress(FxplugError):  # one that another one needs
            if measure_difference(oracle(model, rest, False)[0], whole).times >= LOUD:
                continue
            if measure_difference(exactly(model, rest, False)[0], exactly(model, kept, False)[0]).distance > SILENT:
                raise NotApplicable(f"{name} changes less here than rounding does")
            return name
    return ""


def compared(cell: Cell) -> tuple[str, str, float]:
    """Outcome, a sentence, and the distance of the results over the largest value."""
    names = expanded(cell.features)
    adapting = tuple(name for name in names if FEATURES[name].adapts)
    state = begin(cell.model)
    with state.entered:
        made = done_to(state, names)
        values, gradients = result_of(made)
    wanted, wanted_gradients = oracle(cell.model, adapting, made.gradients)
    if name := without_effect(cell.model, adapting):
        return FAULT, f"{name} changes nothing", 0.0
    dtypes = (torch.bfloat16,) if HALF & set(adapting) else ()
    off, most = distance(wanted, values, lambda: exactly(cell.model, adapting, made.gradients)[0], False, dtypes)
    if off.times > most:
        return FAULT, f"the result differs by {off.distance:.1e}", off.distance
    for number, (a, b) in enumerate(zip(wanted_gradients, gradients, strict=True)):
        slope, most = distance(a, [b], lambda n=number: exactly(cell.model, adapting, True)[1][n], True, dtypes)
        if slope.times > most:
            return FAULT, f"a gradient differs by {slope.distance:.1e}", slope.distance
    return EQUAL, "", off.distance


def distance(
    wanted: Any, found: Sequence[Any], exact: Callable[[], Any], gradient: bool, dtypes: Sequence[torch.dtype]
) -> tuple[Difference, float]:
    """How far results, or gradients, are from the oracle's, and how far they may be.

    Both are rounded, so that they may lie further apart than each from what both mean. Where they do, they are held as
    FlashAttention's tests hold half precision: no further from the exact result than twice what the oracle is, and gradients
    than three times.
    """
    tolerance = WITHIN if gradient else RESULT
    off = max(measure_difference(wanted, value, tolerance, dtypes) for value in found)
    if off.times <= 1:
        return off, 1.0
    middle = in_float32(exact())
    most = (3 if gradient else 2) * measure_difference(middle, in_float32(wanted), tolerance, dtypes).times
    return max(measure_difference(middle, in_float32(value), tolerance, dtypes) for value in found), max(1.0, most)


@cache
def exactly(model: str, names: tuple[str, ...], gradients: bool) -> tuple[Any, list[torch.Tensor]]:
    """What the oracle gives in float64."""
    state = plainly(begin(model), tuple(name for name in names if name not in HALF))
    kwargs = map_leaves(dict(state.kwargs), lambda leaf, _: leaf.double() if is_float(leaf) else leaf)
    gm = copy.deepcopy(retraceable(state)).double()
    values, slopes = result_of(replace(state, gm=gm, kwargs=kwargs, gradients=gradients))
    return values[0], slopes


def in_float32(value: Any) -> Any:
    return map_leaves(value, lambda leaf, _: leaf.float() if is_float(leaf) else leaf)


def run(cell: Cell, limit: int) -> dict[str, Any]:
    """A line of the file that is kept."""
    start = time.perf_counter()

    def late(*_: Any) -> None:
        raise TimeoutError(f"not done in {limit} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(limit)
    off, where = 0.0, ""
    torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome, text, off = compared(cell)
    except NotApplicable as error:
        outcome, text = NOT_APPLICABLE, str(error)
    except FxplugError as error:
        outcome, text = REFUSED, str(error)
    except torch._dynamo.exc.Unsupported as error:  # which has the error of ours that a compiled call ends in
        refusal = re.search(r"raised exception GuardError\(['\"](.*)['\"]\)", str(error))
        outcome, text = (REFUSED, refusal[1]) if refusal else (FAULT, str(error)[:500])
    except Exception as error:  # which no feature may raise
        outcome, text = FAULT, f"{type(error).__name__}: {error}"[:500]
        where = "".join(traceback.format_tb(error.__traceback__)[-6:])[-3000:]
    finally:
        signal.alarm(0)
    seconds = round(time.perf_counter() - start, 2)
    line = {"cell": str(cell), "outcome": outcome, "text": text, "off": off, "seconds": seconds, "commit": COMMIT}
    return {**line, "where": where} if where else line


# --- all cells


def singles(models: Sequence[str], features: Sequence[str]) -> list[Cell]:
    return [Cell(model, (name,)) for model in models for name in features]


def possible(lines: dict[str, dict[str, Any]], model: str, features: Sequence[str]) -> list[str]:
    """The features that are equal, or a fault, alone on a model."""
    return [name for name in features if lines.get(f"{model}: {name}", {}).get("outcome") in (EQUAL, FAULT)]


def further(lines: dict[str, dict[str, Any]], features: Sequence[str], options: argparse.Namespace) -> list[Cell]:
    """Pairs and triples of features that each are possible alone, in a random order, which is that of the seed.

    Those that one oracle is for follow each other, so that a worker computes it once.
    On the newest classes any pairs: whether each feature is possible alone is asked where a pair is refused.
    """
    draw = random.Random(options.seed)
    found = [Cell(m, pair) for m in options.models for pair in itertools.permutations(possible(lines, m, features), 2)]
    for _ in range(options.triples):
        model = draw.choice(options.models)
        found.append(Cell(model, tuple(draw.sample(possible(lines, model, features), 3))))
    for model in options.newest:
        found += [Cell(model, pair) for pair in draw.sample(list(itertools.permutations(features, 2)), options.recent)]
    alike: dict[tuple[str, frozenset[str]], list[Cell]] = {}
    for cell in dict.fromkeys(found):
        adapting = frozenset(name for name in expanded(cell.features) if FEATURES[name].adapts)
        alike.setdefault((cell.model, adapting), []).append(cell)
    groups = list(alike.values())
    draw.shuffle(groups)
    return list(itertools.chain(*groups))


def doubtful(lines: dict[str, dict[str, Any]], models: Sequence[str]) -> list[Cell]:
    """The features alone of pairs that were refused."""
    refused = [cell_of(name) for name, line in lines.items() if line["outcome"] == REFUSED]
    return [Cell(cell.model, (name,)) for cell in refused if cell.model in models for name in cell.features]


class Kept:
    """The lines of the file, of which the last one of a cell counts."""

    def __init__(self, file: Path) -> None:
        self.file, self.lock = file, threading.Lock()
        file.parent.mkdir(parents=True, exist_ok=True)
        read = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
        self.lines: dict[str, dict[str, Any]] = {line["cell"]: line for line in read}

    def add(self, line: dict[str, Any]) -> None:
        with self.lock:
            self.lines[line["cell"]] = line
            with self.file.open("a") as file:
                file.write(json.dumps(line) + "\n")
            if line["outcome"] != EQUAL:
                print(f"{line['outcome']:8} {line['cell']}: {line['text'][:160]}", flush=True)


def answers(cells: Iterator[Cell], limit: int) -> Iterator[dict[str, Any]]:
    """Lines of a worker, which is another process after one that hung, died or ran long."""
    count, process = 0, None
    for cell in cells:
        if process is None or process.poll() is not None or count >= WORKER_CELLS:
            if process is not None:
                process.kill()
            command = [sys.executable, "-W", "ignore", __file__, "--work", "--limit", str(limit)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            count = 0
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{cell}\n".encode())
        process.stdin.flush()
        count += 1
        text = answer_of(process, 2 * limit + (120 if count == 1 else 0))
        died = {"cell": str(cell), "outcome": FAULT, "text": "the process died, or hung", "off": 0.0, "seconds": 0.0}
        line = died if text is None else json.loads(text)
        if line is died or line["text"].startswith("TimeoutError"):
            process.kill()
            process.wait()
        yield line
    if process is not None:
        process.kill()


def answer_of(process: Any, seconds: float) -> str | None:
    """The next line that begins as results do; None where there is none in time."""
    end, found = time.monotonic() + seconds, b""
    while (left := end - time.monotonic()) > 0:
        if not select.select([process.stdout], [], [], left)[0]:
            return None
        piece = os.read(process.stdout.fileno(), 1 << 16)
        if not piece:
            return None
        found += piece
        for line in found.split(b"\n")[:-1]:
            if line.startswith(b"RESULT "):
                return line.removeprefix(b"RESULT ").decode()
    return None


def work(limit: int) -> None:
    """Answer cells that come line by line."""
    for name in sys.stdin:
        line = run(cell_of(name.strip()), limit)
        sys.stdout.write("\nRESULT " + json.dumps(line) + "\n")
        sys.stdout.flush()


def run_all(cells: Sequence[Cell], kept: Kept, options: argparse.Namespace) -> None:
    """Run what is not kept yet, until --until."""
    todo = [c for c in cells if kept.lines.get(str(c), {"outcome": options.again}).get("outcome") == options.again]
    lock, end = threading.Lock(), time.monotonic() + options.seconds
    waiting = iter(todo)

    def take() -> Iterator[Cell]:
        while time.monotonic() < end:
            with lock:
                cell = next(waiting, None)
            if cell is None:
                return
            yield cell

    def one() -> None:
        for line in answers(take(), options.limit):
            kept.add(line)

    threads = [threading.Thread(target=one) for _ in range(options.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", help="cells by name: these alone are run")
    parser.add_argument("--keep", type=Path, help="where results are appended; by default a file for this run")
    parser.add_argument("--again", default="", help="an outcome whose cells are run again: fault, refused, equal")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS), help="names of models")
    parser.add_argument("--features", type=lambda text: text.split(","), default=None, help="names of features")
    parser.add_argument("--triples", type=int, default=300, help="how many random triples")
    parser.add_argument("--recent", type=int, default=10, help="how many random pairs on each of the newest classes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--limit", type=int, default=60, help="seconds for a cell")
    parser.add_argument("--seconds", type=float, default=7200, help="seconds for all: what is left is not measured")
    parser.add_argument("--long", action="store_true", help="AOTInductor and ONNX too")
    parser.add_argument("--page", type=Path, help="write the page of what is kept")
    parser.add_argument("--json", type=Path, help="write what is kept")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # whose rounding is a hundred times what float32 is held to
    if options.work:
        return work(options.limit)
    if options.cells:
        for name in options.cells:
            line = run(cell_of(name), options.limit)
            print(f"{line['cell']}: {line['outcome']}, {line['off']:.1e}, {line['seconds']} s", flush=True)
            print(line["text"], line.get("where", ""), sep="\n", flush=True)
        os._exit(0)
    features = options.features or [name for name, feature in FEATURES.items() if options.long or not feature.slow]
    options.newest = recent() if options.recent else ()
    kept = Kept(options.keep or Path(tempfile.mkdtemp()) / "matrix.jsonl")
    run_all(singles(options.models, features), kept, options)
    run_all(further(kept.lines, features, options), kept, options)
    run_all(list(dict.fromkeys(doubtful(kept.lines, options.newest))), kept, options)
    from matrix_page import write

    write(kept.lines, features, options)


if __name__ == "__main__":
    main()
