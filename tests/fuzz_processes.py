"""Random denoisers, passes, plans and stories over 2 to 4 gloo processes: each gives what one gives, or all refuse in words.

A case is traced and planned here; then one process plays the story on the module as it is, and the others on what is split.
`python tests/fuzz_processes.py --cases N --seed S` prints what was refused, too.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import math
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import denoisers
import torch
import torch.distributed as dist
import unets
from stories import STEPPED, STORIES, Stopped, group_of
from torch.distributed.device_mesh import DeviceMesh

import fxplug
from fxplug.core.errors import FxplugError, VerifyError
from fxplug.core.ir.comparison import RESULT, WITHIN, measure_difference
from fxplug.core.ir.containers import list_leaves

COST = 200

CONTEXT = multiprocessing.get_context("fork")  # of a process that ran no backward pass
SECONDS, DEADLINE = 20, 90  # of a collective, of a story
LOST = re.compile("has died or did not reach|wait for each other|does not answer")
WAYS: dict[str, list[dict[str, int]]] = {
    "tokens": [
        {"ulysses": 2}, {"ulysses": 3}, {"ring": 2}, {"ring": 3}, {"batch": 2}, {"batch": 3}, {"tensor": 2}, {"tensor": 3},
        {"ulysses": 2, "ring": 2}, {"batch": 2, "ulysses": 2}, {"batch": 2, "ring": 2}, {"batch": 2, "tensor": 2},
        {"ulysses": 2, "tensor": 2}, {"ring": 2, "tensor": 2}, {"ulysses": 4}, {"ring": 4},
    ],
    "convolutions": [{"rows": 2}, {"rows": 3}, {"batch": 2}, {"batch": 2, "rows": 2}, {"rows": 2}],
}  # fmt: skip
PASSES: dict[str, dict[str, Any]] = {
    "lora": {"at": "**", "rank": 2}, "dora": {"at": "**", "rank": 2}, "loha": {"at": "**", "rank": 2},
    "lokr": {"at": "**"}, "vera": {"at": "transformer_blocks.**", "rank": 2}, "bitfit": {"at": "**"},
    "oft": {"at": "transformer_blocks.**", "block_size": 3}, "ssf": {"at": "**"}, "scale": {"at": "**"},
    "bottleneck": {"at": "transformer_blocks.*.ff"}, "parallel_adapter": {"at": "transformer_blocks.*.ff"},
    "slots": {"at": "transformer_blocks.**", "rank": 2, "slots": 2}, "ip_adapter": {"image": ["n", 4, denoisers.TEXT]},
    "first_block_cache": {}, "teacache": {}, "controlnet": {},
}  # fmt: skip


@dataclass
class Case:
    """What is played: the module as it is, how it is split, and the story."""

    seed: int
    host: denoisers.Host
    gm: Any
    story: str
    ways: dict[str, int] = field(default_factory=dict)
    plan: Any = None
    stepped: dict[str, Any] = field(default_factory=dict)
    mesh: str = "all"  # or "named": given, "groups": two of two processes, "some": two of four
    after: str = ""
    second: Case | None = None
    passes: list[str] = field(default_factory=list)
    lowered: str = ""

    @property
    def text(self) -> str:
        how = {**self.ways, **self.stepped}
        more = [self.host.text, f"passes {self.passes}" * bool(self.passes), self.lowered, f"{how}", self.mesh, self.story]
        return "; ".join(filter(None, [*more, f"after: {self.after}" * bool(self.after), self.second and self.second.text]))

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [each.host.dtype for each in (self, self.second) if each]

    @property
    def world(self) -> int:
        return math.prod(v for k, v in (self.ways or self.stepped).items() if k in denoisers.AXES)


@dataclass
class Run:
    """A story in one process: `split` says whether it is one of several; `steps` is what was seen."""

    case: Case
    folder: Path
    rank: int = 0
    split: bool = False
    group: int = 0  # which of several groups that play the same story on other inputs
    mesh: DeviceMesh | None = None
    steps: list[tuple[str, str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"story {self.case.seed} {self.group}")

    def make(self, case: Case | None = None) -> Any:
        """The module on weights of its own, as this process runs it."""
        case = case or self.case
        gm = copy.deepcopy(case.gm)
        if case.stepped:
            return stepped(case, gm, self.mesh, self.split)
        if not self.split:
            return changed(case.after, gm)
        return changed(case.after, fxplug.parallelize(gm, case.plan, self.mesh))

    def step(self, label: str, call: Callable[[], Any]) -> Any:
        """Note what a call gives, or its error."""
        try:
            value = call()
            found = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in list_leaves(value)]
            self.steps.append((label, "value", found))
            return value
        except FxplugError as error:
            self.steps.append((label, "refused", f"{type(error).__name__}: {error}"))
            if LOST.search(str(error)):
                raise Ended from error
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            self.steps.append((label, "error", f"{type(error).__name__}: {error} ({at.filename}:{at.lineno})"))
            if isinstance(error, (dist.DistError, ConnectionError)) or "imed out" in str(error):
                raise Ended from error
        return None


class Ended(Exception):
    """The processes have lost each other."""


def stepped(case: Case, gm: Any, mesh: DeviceMesh | None, split: bool) -> Any:
    """PipeFusion, or a stale exchange; one process alone runs all stages, and waits for nothing."""
    options = dict(case.stepped) if split else {k: v for k, v in case.stepped.items() if k not in ("batch", "overlap")}
    make = fxplug.stale_sequence if "ways" in options else fxplug.pipefusion
    if not split and make is fxplug.pipefusion:
        options["overlap"] = False
    return make(gm, *case.host.call(0), **options, mesh=mesh, check=False)


def changed(after: str, gm: Any) -> Any:
    """A module that is changed once it is split."""
    if after == "lora":
        torch.manual_seed(0)
        gm = fxplug.apply(gm, fxplug.load_pass("lora", name="late", at="**", rank=2))
        fill(gm, "late")
        return gm
    return {"": lambda: gm, "fuse": lambda: fxplug.lower(gm, fuse="fused"), "merge": lambda: fxplug.merge(gm)}[after]()


def fill(gm: Any, name: str, seed: int = 0) -> None:
    """Random values for the new weights of a pass."""
    with torch.no_grad():
        for key, p in gm.named_parameters():
            if key.startswith(f"{name}."):
                noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed + len(key)))
                p.add_((noise * 0.2).to(p.dtype))


# --- what is drawn


def draw(seed: int, kinds: tuple[str, ...] = (), again: bool = True) -> Case:
    """A case. Raises SpecError where its parts do not fit."""
    rng = random.Random(f"case {seed}")
    story = rng.choice(kinds or list(STORIES))
    # a gradient of few values in half precision is mostly rounding, in one process as in several
    dtype = torch.bfloat16 if rng.random() < 0.2 and story != "gradients" else torch.float32
    kind = rng.choice(["tokens", "patches", "text", "text", "convolutions"])
    if story in ("caches", *STEPPED) and kind == "convolutions":
        kind = "patches"
    if story == "calls" and rng.random() < 0.15:
        kind = "unet"
    host = denoisers.build(rng, kind, dtype)
    names = {"switching": ["slots"], "caches": [rng.choice(["first_block_cache", "teacache"])]}.get(story, [])
    if kind == "convolutions":
        names = [name for name in names if name == "slots"]
    if (kind == "unet" or "text='cross'" in host.text) and rng.random() < 0.4:
        names.append("ip_adapter")
        host.pictures = True
    others = [name for name in PASSES if name not in ("slots", "ip_adapter", "first_block_cache", "teacache", "controlnet")]
    if kind == "unet":
        names += rng.sample(["controlnet", "lora"], rng.choice([1, 2]))
    else:
        names += rng.sample(others, rng.choice([0, 0, 1, 1, 2]))
    gm = host.gm
    for name in names:
        options = {**PASSES[name]}
        if kind == "convolutions":
            options["at"] = "**"
        if name == "controlnet":
            host.controlled, options = True, {"network": unets.control(host.unet).to(dtype)}
        gm = fxplug.apply(gm, fxplug.load_pass("lora" if name == "slots" else name, name=name, **options))
        fill(gm, name, len(name))
    case = Case(seed, host, gm.eval(), story, passes=names)
    plain = not {"switching", "caches"} & {story}
    if rng.random() < 0.3 and names and plain:
        case.lowered, case.gm = rng.choice([
            ("merge", lambda: fxplug.merge(gm)), ("fuse", lambda: fxplug.lower(gm, fuse="fused")),
            ("outline", lambda: fxplug.lower(gm, fuse=None, outline=["transformer_blocks.*"])),
        ])  # fmt: skip
        case.gm = case.gm()
    if story in STEPPED:
        late, options = rng.random() < 0.3, {"warmup": rng.choice([1, 1, 2])}
        number = rng.choice([2, 2, 3])
        case.stepped = {**options, "ways": number} if late else {
            **options, "stages": number, "patches": rng.choice([2, 3, 4]), "overlap": rng.random() < 0.6,
        }  # fmt: skip
        if number == 2 and rng.random() < 0.25:
            case.stepped["batch"] = 2
        return case
    keys = {"convolutions": ["convolutions"], "unet": list(WAYS)}.get(kind, ["tokens"])
    case.ways = rng.choice([ways for key in keys for ways in WAYS[key]])
    case.plan = fxplug.parallel_plan(case.gm, *host.call(0), **case.ways, check=False)  # which takes threads: no fork after it
    meshes = ["all", "all", "named"] if case.world != 2 else ["all", "all", "named", "groups", "some"]
    case.mesh = rng.choice(meshes)
    if story in ("calls", "gradients") and rng.random() < 0.2:
        case.after = rng.choice(["lora", "fuse", "merge"])
    if story == "two" and again:
        for other in range(seed + 10**6, seed + 10**6 + 200):
            with contextlib.suppress(FxplugError):
                case.second = draw(other, ("calls",), False)
                if case.second.world == case.world and not case.second.after:
                    break
        case.mesh = "all"
    return case


# --- processes


def mesh_of(case: Case, rank: int) -> tuple[DeviceMesh | None, int]:
    """The mesh of a case for this process, and which of two groups it is in."""
    axes = [axis for axis in ("batch", "rows", "ring", "ulysses", "tensor") if case.ways.get(axis, 1) > 1]
    if case.mesh == "groups":
        return DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("apart", axes[0]))[axes[0]], rank // 2
    if case.mesh == "some":
        return DeviceMesh("cpu", torch.tensor([1, 3]), mesh_dim_names=(axes[0],)), 0
    if case.mesh == "named":
        return DeviceMesh("cpu", torch.arange(case.world).view([case.ways[a] for a in axes]), mesh_dim_names=tuple(axes)), 0
    return None, 0


def member(case: Case, folder: Path, rank: int | None, world: int, group: int) -> None:
    """A process: one of several, or without a rank the one alone; it writes down what it has seen."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.dup2(os.open(folder / f"printed-{rank}-{group}", os.O_WRONLY | os.O_CREAT), 2)
    faulthandler.dump_traceback_later(DEADLINE - 5)
    run = Run(case, folder, rank or 0, group=group)
    try:
        if rank is not None:
            store = dist.FileStore(str(folder / "store"), world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS))
            mesh, group = mesh_of(case, rank)
            run = Run(case, folder, rank, True, group, mesh)
        elif case.plan:
            case.plan.check()
        if rank is None or case.mesh != "some" or rank in (1, 3):
            with contextlib.suppress(Stopped):
                STORIES[case.story](run)
            if rank is not None:
                dist.barrier(group=group_of(run))
    except Ended:
        pass
    except VerifyError as error:
        run.steps.append(("check", "refused", f"VerifyError: {error}"))
    except Exception as error:  # in what stands around the steps
        run.steps.append(("around", "error", "".join(traceback.format_exception(error))))
    name = f"one-{group}" if rank is None else f"rank-{rank}"
    torch.save((run.group, run.steps), folder / f"{name}.part")
    os.rename(folder / f"{name}.part", folder / f"{name}.pt")
    sys.stdout.flush()
    os._exit(0)


def played(case: Case) -> dict[str, Any]:
    """What each process has seen, by its name; text of one that did not end."""
    world = 4 if case.mesh in ("groups", "some") else case.world
    groups = 2 if case.mesh == "groups" else 1
    with tempfile.TemporaryDirectory() as folder:
        jobs: dict[str, Any] = {f"one-{group}": (None, group) for group in range(groups)}
        jobs.update({f"rank-{rank}": (rank, 0) for rank in range(world)})
        members = {
            name: CONTEXT.Process(target=member, args=(case, Path(folder), rank, world, group), daemon=False)
            for name, (rank, group) in jobs.items()
        }
        for process in members.values():
            process.start()
        end = time.monotonic() + DEADLINE
        for process in members.values():
            process.join(max(0.0, end - time.monotonic()))
        for process in members.values():
            if process.is_alive():
                process.kill()
                process.join()
        found = {}
        for name in members:
            path = Path(folder) / f"{name}.pt"
            printed = "".join(p.read_text() for p in Path(folder).glob(f"printed-{jobs[name][0]}-*"))[-3000:]
            found[name] = torch.load(path, weights_only=False) if path.exists() else f"{members[name].exitcode} {printed}"
        return found


# --- what is wrong


def missed(case: Case, found: dict[str, Any], refusals: Counter[str]) -> str | None:
    """The first miss of a case as text."""
    if gone := [f"{name} ({value})" for name, value in found.items() if isinstance(value, str)]:
        return f"did not end in {DEADLINE} s: {', '.join(gone)}"
    ranks = {name: value for name, value in found.items() if name.startswith("rank") and value[1]}
    for group in sorted({group for group, _ in ranks.values()}):
        one = found[f"one-{group}"][1]
        if one and one[0][0] == "check":
            refusals[f"a plan proves wrong: {one[0][2][:120]}"] += 1
            return None
        many = {name: steps for name, (mine, steps) in ranks.items() if mine == group}
        for index in range(max(len(one), *(len(steps) for steps in many.values()))):
            label, kind, want = one[index] if index < len(one) else ("", "ended", None)
            rows = {name: steps[index] if index < len(steps) else ("", "ended", None) for name, steps in many.items()}
            kinds = {name: row[1] for name, row in rows.items()}
            told = "; ".join(f"{name}: {row[2]}" for name, row in rows.items() if row[1] in ("refused", "error"))
            if any(LOST.search(str(row[2])) for row in rows.values() if row[1] == "refused"):
                return f"step {index} {label}: processes lost each other: {told}"
            if len(set(kinds.values())) > 1:
                return f"step {index} {label}: not the same in each process, {kinds}: {told}"
            (many_kind,) = set(kinds.values())
            if many_kind == "ended":
                return None if kind == "ended" else f"step {index} {label}: the processes stopped"
            if many_kind == "refused" and kind != "error":
                texts = {re.sub(r"\d+", "0", row[2]) for row in rows.values()}
                refusals.update(f"{text[:180]} [{case.story}]" for text in texts)
                if len(texts) > 1:
                    return f"step {index} {label}: refused in other words: {told}"
                if kind == "value" and (label in ("make", "resume") or case.story in ("train", "resume", "caches", "images")):
                    return None  # what comes now is another story
                continue
            if kind == "value" and many_kind == "value":
                for name, row in rows.items():
                    off = measure_difference(want, row[2], WITHIN if "weights" in label else RESULT, case.dtypes)
                    if not off.times <= 1:
                        return f"step {index} {label}: {name} is {off.distance:.1e} off"
            elif (kind, many_kind) not in {("error", "error"), ("error", "refused"), ("refused", "refused")}:
                one_told = str(want)[:200] * (kind != "value")
                return f"step {index} {label}: one process {kind} {one_told}, others {many_kind}: {told}"
    return None


def cases_of(
    cases: int, seed: int, refusals: Counter[str], kinds: tuple[str, ...] = ()
) -> Iterator[tuple[int, str, str | None]]:
    """Number, text and miss of each case."""
    for n in range(seed, seed + cases):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                case = draw(n, kinds)
            except FxplugError as error:
                refusals[f"draw: {re.sub(r'[0-9]+', '0', str(error))[:150]}"] += 1
                continue
            except Exception as error:
                yield n, "", f"draw: {type(error).__name__}: {error}"
                continue
        yield n, case.text, missed(case, played(case), refusals)


def fuzz_processes(cases: int, seed: int) -> list[str]:
    """A line for each case in which processes gave something else than one, or did not refuse alike."""
    torch.set_num_threads(1)
    return [f"case {n}: {text}: {miss}" for n, text, miss in cases_of(cases, seed, Counter()) if miss]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Stories over processes, with what was refused.")
    parser.add_argument("stories", nargs="*")
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for number, what, miss in cases_of(given.cases, given.seed, counts, tuple(given.stories)):
        print(f"{number}: {what}" + (f"\n    MISS {miss}" if miss else ""), flush=True)
    print(*(f"{count:4} {text}" for text, count in counts.most_common()), sep="\n")
