"""One run on a CUDA device: are the Triton kernels right there, and what do the forms of linear layers and of models cost.

python benchmarks/gpu_trial.py [--minutes 5] [--json FILE] [--sections check swap tiles layers models]
python benchmarks/gpu_trial.py --write FILE     what was measured becomes `limits.json`, `tiles.json` and a table of the docs

It needs torch and Triton and loads the files of the forms alone: fxplug itself takes newer versions and more packages. Models
are those of timm and diffusers, beside PEFT, where these are installed. What was found is written at once, and each section
has a process of its own: one that crashes or hangs ends itself alone, and at the end of the minutes all is over. Without CUDA
all runs at tiny sizes, in Triton's interpreter with TRITON_INTERPRET=1, to try the program; those times mean nothing.

`check`    values and gradients beside float64, and replays of a CUDA graph between which slots are switched
`swap`     `block_swap.py`, where fxplug can be imported: is training with blocks on the host equal, and what does it cost
`tiles`    the time of `expand` in each tile, and the list of tiles that loses least by the rule that takes one of them
`layers`   each form over the plain layer (which a merged one is): by events with the host's time, and as a CUDA graph
`models`   each form over the plain model: eager, as a CUDA graph, compiled, and compiled with mode="reduce-overhead"
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.util
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_models
import torch
import torch.nn.functional as F
from gpu_sections import Trial, finish, start
from torch import Tensor

ROOT = Path(__file__).parent.parent
CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
TF32 = 1e-3  # what float32 is off where it is multiplied in TF32
LIMITS = {torch.float32: TF32 if CUDA else 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
# the layers that adapters are for: rows, features in and out, and how many are alike
MODELS = {
    "vit-large (64)": [(12608, 1024, 3072, 24), (12608, 1024, 1024, 24), (12608, 1024, 4096, 24), (12608, 4096, 1024, 24)],
    "flux-whole-4k (1)": [(4096, 3072, 3072, 76), (512, 3072, 3072, 76), (4608, 3072, 3072, 114)],
    "sd15 (16)": [
        (65536, 320, 320, 30), (1232, 768, 320, 10), (16384, 640, 640, 30), (1232, 768, 640, 10), (4096, 1280, 1280, 30),
        (1232, 768, 1280, 12), (1024, 1280, 1280, 6),
    ],
    "sdxl (2)": [(8192, 640, 640, 60), (154, 2048, 640, 20), (2048, 1280, 1280, 360), (154, 2048, 1280, 120)],
    "vit-small (64)": [(12608, 384, 1152, 12), (12608, 384, 384, 12), (12608, 384, 1536, 12), (12608, 1536, 384, 12)],
    "sd15 (2)": [
        (8192, 320, 320, 30), (154, 768, 320, 10), (2048, 640, 640, 30), (154, 768, 640, 10), (512, 1280, 1280, 30),
        (154, 768, 1280, 12), (128, 1280, 1280, 6),
    ],
}  # fmt: skip
SMALL = {"small (2)": [(96, 64, 48, 2), (34, 32, 40, 1)]}
MORE = [(256, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 64, 64, 4, 4), (64, 128, 64, 4, 4)]  # tiles that no table has yet
FORMS = {
    "inference": ["stock", "fused", "weight", "triton", "triton:weight"], "mixed": ["stock", "fused", "triton"],
    "training": ["stock", "fused", "triton"],
}  # fmt: skip
Call = Callable[[], Any]
Times = dict[str, Any]


def load(name: str) -> Any:
    """A file of fxplug's, without what its packages import."""
    for package in ("fxplug", "fxplug.lowerings", "fxplug.lowerings.linear"):
        if package not in sys.modules:
            folder = ROOT / package.replace(".", "/")
            given = {"submodule_search_locations": [str(folder)]}
            spec: Any = importlib.util.spec_from_file_location(package, folder / "__init__.py", **given)
            sys.modules[package] = importlib.util.module_from_spec(spec)  # which is not run
    return importlib.import_module(f"fxplug.lowerings.linear.{name}")


devices, operators = load("devices"), load("operators")
low_rank = importlib.import_module("fxplug.blocks.low_rank")
if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 12):  # whose compiler takes its programs for exports
    importlib.import_module("torch._dynamo.variables.torch")
    torch.compiler.is_exporting = lambda: False


# --- time


def by_events(call: Call, turns: int = 5, least: float = 2.0) -> float:
    """Microseconds of a call with the host's time, the median over turns of at least so many milliseconds."""

    def turn(repeats: int) -> float:
        if not CUDA:
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            return 1000 * (time.perf_counter() - start) / repeats
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(repeats):
            call()
        done.record()
        torch.cuda.synchronize()
        return begun.elapsed_time(done) / repeats

    turn(3 if CUDA else 1)
    repeats = max(3, round(least / turn(3))) if CUDA else 1
    return 1000 * statistics.median(turn(repeats) for _ in range(turns if CUDA else 1))


def graphed(calls: list[Call]) -> Call:
    """A replay of a CUDA graph of some calls; without CUDA the calls."""
    if not CUDA:
        return lambda: [call() for call in calls]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is compiled or found at a first call is not captured
        for call in [*calls, *calls]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def times(calls: list[Call]) -> Times:
    """Microseconds of one of these calls, which take turns so that no weight stays in the cache for nothing."""
    in_turn = itertools.cycle(calls)
    try:
        return {"eager": by_events(lambda: next(in_turn)()), "graph": by_events(graphed(calls)) / len(calls)}
    except Exception as error:
        return {"error": said(error)}


def said(error: Exception) -> str:
    """What an error says; raises one where the device takes nothing any more, as after an illegal access."""
    if CUDA:
        torch.cuda.synchronize()
    return f"{type(error).__name__}: {str(error)[:200]}"


def ratios(of: dict[str, Times], how: str) -> dict[str, float]:
    plain = of["plain"].get(how)
    return {form: round(each[how] / plain, 3) for form, each in of.items() if plain and form != "plain" and how in each}


# --- layers


class Layer:
    """A linear layer with its update, for x (samples, tokens, in); `mixed`: four slots of which each sample takes one."""

    def __init__(self, mode: str, rows: int, inner: int, outer: int, rank: int = 16, dtype: Any = DTYPE, seed: int = 0) -> None:
        draws = torch.Generator(DEVICE).manual_seed(seed)

        def new(*shape: int, trained: bool = False) -> Tensor:
            values = torch.randn(shape, device=DEVICE, generator=draws) * shape[-1] ** -0.5
            return values.to(dtype).requires_grad_(trained and mode == "training")

        samples, self.slots = (math.gcd(rows, 4), 4) if mode == "mixed" else (1, 1)
        self.x, self.weight, self.bias = new(samples, rows // samples, inner, trained=True), new(outer, inner), new(outer)
        self.down, self.up = new(self.slots * rank, inner, trained=True), new(outer, self.slots * rank, trained=True)
        self.gates = torch.tensor(1.0, device=DEVICE)
        if mode == "mixed":
            self.gates = torch.eye(4, device=DEVICE)[:samples].repeat_interleave(rank, 1)
        self.gradient = new(samples, rows // samples, outer) if mode == "training" else None

    def forward(self, form: str) -> Tensor:
        x, weight, bias, update = self.x, self.weight, self.bias, (self.down, self.up, self.gates)
        if form == "plain":
            return F.linear(x, weight, bias)
        if form == "weight":
            return F.linear(x, low_rank.add_update(weight, *update), bias)
        if self.slots > 1:
            return operators.run_bank_linear(x, weight, bias, *update, self.slots, 0, form)
        return operators.run_lora_linear(x, weight, bias, *update, form)

    def call(self, form: str) -> Any:
        """The result; where it trains, the gradients of the input and of the update."""
        if self.gradient is None:
            with torch.no_grad():
                return self.forward(form)
        wanted = [self.x] if form == "plain" else [self.x, self.down, self.up]
        return torch.autograd.grad(self.forward(form), wanted, self.gradient)


def shapes() -> list[tuple[int, int, int]]:
    return list(dict.fromkeys(each[:3] for layers in (MODELS if CUDA else SMALL).values() for each in layers))


def several(mode: str, shape: tuple[int, int, int]) -> list[Layer]:
    """As many layers as no cache holds, at most eight."""
    size = shape[1] * shape[2] * DTYPE.itemsize
    return [Layer(mode, *shape, seed=seed) for seed in range(min(8, max(1, 100_000_000 // size)) if CUDA else 1)]


def layers(trial: Trial) -> None:
    """Each form of each layer, and of each model's layers together."""
    rows: dict[tuple[str, tuple[int, int, int]], dict[str, Times]] = {}
    for mode, shape in itertools.product(FORMS, shapes()):
        if trial.over():
            trial.say("layers: time was over at", mode, shape)
            break
        each = several(mode, shape)
        rows[mode, shape] = {
            form: times([lambda one=one, form=form: one.call(form) for one in each]) for form in ("plain", *FORMS[mode])
        }
        trial.found.setdefault("layers", []).append({"mode": mode, "shape": shape, "microseconds": rows[mode, shape]})
        trial.say(mode, shape, {how: ratios(rows[mode, shape], how) for how in ("eager", "graph")})
        errors = {form: one["error"] for form, one in rows[mode, shape].items() if "error" in one}
        trial.fail(f"layers: {mode}, {shape}", str(errors)) if errors else None
    table: dict[str, Any] = trial.found.setdefault("table", {})
    for (name, counted), mode, how in itertools.product((MODELS if CUDA else SMALL).items(), FORMS, ("graph", "eager")):
        known = [(rows.get((mode, (m, k, n)), {}), count) for m, k, n, count in counted]
        for form in FORMS[mode]:
            if all(how in of.get(one, {}) for of, _ in known for one in ("plain", form)):
                spent, plain = (sum(count * of[one][how] for of, count in known) for one in (form, "plain"))
                table.setdefault(name, {}).setdefault(f"{mode}, {how}", {})[form] = round(spent / plain, 3)
        trial.say(name, mode, how, table.get(name, {}).get(f"{mode}, {how}"))


# --- tiles


def tiles(trial: Trial) -> None:
    """The tiles of `expand` for each shape, and the list of which `tile_for` takes the best."""
    kernels, rule, rows = load("kernels"), devices.choose_tile, []
    known = {devices.Tile(*tile) for table in devices.TILES["capabilities"].values() for tile in table}
    tried = sorted({*known, *(devices.Tile(*tile) for tile in MORE)}, key=lambda tile: (-tile.m * tile.n, tile))
    tried = tried if CUDA else tried[-2:]
    for shape in shapes():
        each, of = several("inference", shape), {}
        for tile in tried:
            if trial.over():
                break
            devices.choose_tile = lambda *given, tile=tile: tile
            calls = [
                lambda one=one: kernels.compute_linear(one.x, one.weight, one.bias, one.down, one.up, one.gates) for one in each
            ]
            try:
                with torch.no_grad():
                    of[tile] = times(calls).get("graph", math.inf)
            finally:
                devices.choose_tile = rule
        if len(of) == len(tried) and min(of.values()) < math.inf:
            rows.append((shape, of))
    if not rows:
        trial.fail("tiles", "no shape was measured in each tile: give more minutes")
        return
    at_once = devices.tiles_of(torch.device(DEVICE))[1]

    def lost(chosen: tuple[Any, ...]) -> float:
        devices.tiles_of = lambda device: (list(chosen), at_once)
        device = torch.device(DEVICE)
        picked = [of[rule(m, n, device, torch.bfloat16)] / min(of.values()) for (m, _, n), of in rows]
        return math.exp(statistics.fmean(map(math.log, picked)))

    chosen = [c for count in (1, 2, 3, 4) for c in itertools.combinations(tried, count)]
    best = min(chosen, key=lost)
    trial.found["tiles"] = {"list": best, "lost": lost(best), "rows": [[shape, [*map(list, of.items())]] for shape, of in rows]}
    trial.say("tiles", best, f"lose {lost(best):.3f} of the best for each shape")


# --- values


def off(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm()) if bool(got.isfinite().all()) else math.inf


def exact(layer: Layer) -> Layer:
    """The same layer in float64."""
    new = copy.copy(layer)
    for name in ("x", "weight", "bias", "down", "up", "gates", "gradient"):
        value = getattr(layer, name)
        setattr(new, name, value if value is None else value.detach().double().requires_grad_(value.requires_grad))
    return new


def check(trial: Trial) -> None:
    """The worst relative differences from float64, and whether replays are equal to calls."""
    worst: dict[str, float] = trial.found.setdefault("off", {})
    sizes = [(264, 128, 96, 16), (132, 65, 140, 7), (4, 1, 8, 4), (68, 320, 640, 128)]
    for dtype, (m, k, n, rank), mode in itertools.product(LIMITS if CUDA else [DTYPE], sizes, FORMS):
        for form in ["triton", "triton:weight"] if mode == "inference" else ["triton"]:
            layer = Layer(mode, m, k, n, rank, dtype)
            got, wanted = (one if isinstance(one, tuple) else (one,) for one in (layer.call(form), exact(layer).call("stock")))
            key = f"{str(dtype)[6:]}, {mode}, {form}"
            worst[key] = max(worst.get(key, 0.0), *itertools.starmap(off, zip(got, wanted, strict=True)))
            if not worst[key] <= LIMITS[dtype]:
                trial.found.setdefault("wrong", []).append(f"{key}: {worst[key]:.1e} off, {(m, k, n, rank)}")
    layer = Layer("mixed", 264, 128, 96)
    out: list[Tensor] = []
    replay = graphed([lambda: (out.clear(), out.append(layer.call("triton")))])
    for shift in range(3):
        layer.gates.copy_(layer.gates.roll(shift, 0))
        replay()
        if not torch.equal(out[0], layer.call("triton")):
            trial.found.setdefault("wrong", []).append(f"a replay differs after slots were switched {shift} times")
    trial.say("off", {key: f"{value:.1e}" for key, value in worst.items()}, trial.found.get("wrong", "all right"))


def swap(trial: Trial) -> None:
    """Whether steps with blocks on the host are equal to those without, and their time and memory, in a process of its own."""
    missing = [name for name in ("networkx", "pydantic", "safetensors", "accelerate") if not importlib.util.find_spec(name)]
    if missing:
        trial.say("swap: left out, as fxplug itself needs", *missing)
        return
    told = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "swap.json")
        run = [sys.executable, "-W", "ignore", Path(__file__).with_name("block_swap.py"), "--json", file]
        done = subprocess.run(run, env=told, capture_output=True, text=True)
        if not file.is_file():
            raise RuntimeError((done.stderr.strip().splitlines() or [f"no result, and code {done.returncode}"])[-1])
        trial.found["swap"] = found = json.loads(file.read_text())
    trial.found.setdefault("wrong", []).extend(found["wrong"]) if "wrong" in found else None
    trial.say("swap", found)


# --- models


HOWS = ("eager", "graph", "reduce-overhead", "compiled")
WAYS = ("plain", "merged", "stock", "fused", "triton", "triton:weight", "peft")
# without CUDA: each way once, and the forms that differ for a compiler
TRIED = {*(("eager", way) for way in WAYS), ("compiled", "plain"), ("compiled", "stock"), ("compiled", "triton")}


@torch.no_grad()
def models(trial: Trial) -> None:
    """Each model in each way, and how far its result is from that of `stock`."""
    known = []
    try:
        for subject in gpu_models.subjects(DEVICE, DTYPE):
            known.append(subject)
    except Exception as error:  # a package that does not fit the others
        trial.fail("models: those that come behind", said(error))
    ways = WAYS if importlib.util.find_spec("peft") else WAYS[:-1]
    for index, (name, make, given, pattern) in enumerate(known):
        until = time.monotonic() + max(0.0, trial.until - time.monotonic()) / (len(known) - index)
        row = trial.found.setdefault("models", {}).setdefault(name, {"failed": {}})
        try:
            base = make().eval().requires_grad_(False).to(DEVICE, DTYPE)
            wanted = gpu_models.adapted(base, "stock", pattern, operators.run_lora_linear)(*given)
        except Exception as error:
            trial.fail(f"models: {name}", said(error))
            continue
        for how, way in itertools.product(HOWS, ways):
            if time.monotonic() > until or (not CUDA and (how, way) not in TRIED):
                continue
            try:
                model = gpu_models.adapted(base, way, pattern, operators.run_lora_linear)
                if how not in ("eager", "graph"):
                    torch._dynamo.reset()
                    mode = None if how == "compiled" else how
                    model = torch.compile(model, fullgraph=way != "peft", mode=mode, dynamic=False)
                call = functools.partial(model, *given)
                for _ in range(3):
                    call()
                apart = off(call().clone(), wanted)
                spent = by_events(graphed([call]) if how == "graph" else call, 7, 20.0) / 1000
                row.setdefault(how, {})[way] = {"milliseconds": spent, **({"off": apart} if way in FORMS["inference"] else {})}
            except Exception as error:
                row["failed"][f"{way}, {how}"] = said(error)
            trial.keep()
        for how in (how for how in HOWS if "plain" in row.get(how, {})):
            plain = row[how]["plain"]["milliseconds"]
            trial.say(name, how, {way: round(each["milliseconds"] / plain, 2) for way, each in row[how].items()})
        trial.say(name, "failed:", row["failed"]) if row["failed"] else None


# --- what ships


def write(file: Path) -> None:
    """What was measured becomes the tables of the package, and that of the page."""
    import forms
    import roofline

    found, rule, folder = json.loads(file.read_text()), load("forms"), Path(devices.__file__).parent
    if missing := [key for key in ("layers", "tiles", "table") if not found.get(key)]:
        sys.exit(f"{file} has nothing of {', '.join(missing)}: run the sections tiles and layers to their end")
    rows = []
    for row in found["layers"]:
        if not all("eager" in row["microseconds"].get(form, {}) for form in ("stock", "fused")):
            continue
        spent = {form: each["eager"] for form, each in row["microseconds"].items() if "eager" in each and form in rule.FORMS}
        ratios = {form: each / spent["stock"] for form, each in spent.items() if form != "triton"}  # which no rule takes yet
        ratios["blas"] = ratios["fused"]  # on a GPU these are one
        rows.append({"case": [row["mode"], *row["shape"], found["dtype"]], "ratios": ratios})
    about = f"measured on {found['device']}, torch {found['torch']}"
    limits = {**rule.LIMITS, "cuda": {**forms.fitted(rows, rule.LIMITS["cuda"], "cuda"), "about": about}}
    (folder / "limits.json").write_text(json.dumps(limits, indent=1) + "\n")
    table = json.loads((folder / "tiles.json").read_text())
    table["devices"][found["device"]] = found["tiles"]["list"]
    text = re.sub(r"\[[\[\]\d\s,]+\]", lambda tiles: json.dumps(json.loads(tiles[0])), json.dumps(table, indent=1))
    (folder / "tiles.json").write_text(text + "\n")
    head = ["layers (batch)", "", *FORMS["inference"]]
    lines = [
        [name, how, *(f"{of[form]:.2f}" if form in of else "" for form in head[2:])]
        for name, each in found["table"].items()
        for how, of in each.items()
    ]
    roofline.put("trial", f"{about}, Triton {found['triton']}.\n\n{roofline.table([head, *lines])}")


# --- the command


def warm(part: int, of: int) -> None:
    """Compile a share of the kernels into Triton's cache, for the process that measures."""
    each = itertools.islice(itertools.product(FORMS, shapes()), part, None, of)
    for mode, shape in each:
        Layer(mode, *shape).call("triton")


GRACE = 30  # seconds that a section may take over its share, to import torch and to come to an end
SECTIONS = {"check": 0.15, "swap": 0.1, "tiles": 0.2, "layers": 0.2, "models": 0.35}  # and their shares of the time


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path(os.environ.get("OUT", "out"), "gpu_trial.json"))
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--warm", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--join", action="store_true", help=argparse.SUPPRESS)  # to what the file has
    options = parser.parse_args(arguments)
    if options.write:
        write(options.write)
        return 0
    import triton

    devices.TRITON = min(devices.TRITON, (3, 6))  # which is tried here, and nowhere else
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    if options.warm:
        warm(*options.warm)
        return 0
    if len(options.sections) > 1:
        return run_apart(options.sections, options.json, time.monotonic() + 60 * options.minutes)
    trial, (section,) = Trial(options.json, options.minutes, options.join), options.sections
    name = torch.cuda.get_device_name() if CUDA else "a CPU, whose times mean nothing"
    trial.found.update(device=name, dtype=str(DTYPE)[6:], torch=torch.__version__, triton=triton.__version__)
    if "tiles" in trial.found:  # what is measured after them takes them
        best = [devices.Tile(*tile) for tile in trial.found["tiles"]["list"]], devices.tiles_of(torch.device(DEVICE))[1]
        devices.tiles_of = lambda device: best
    trial.say(section, "on", name, "with torch", torch.__version__, "and Triton", triton.__version__)
    try:
        globals()[section](trial)
    except Exception as error:
        trial.fail(section, f"{type(error).__name__}: {str(error)[:300]}")
    trial.found.setdefault("done", []).append(section)
    trial.say("written to", options.json)
    return int("wrong" in trial.found or "failed" in trial.found)


def run_apart(sections: list[str], file: Path, end: float) -> int:
    """Run each section in a process of its own, for its share of the time that is left; no process lives longer than `end`."""
    file.unlink(missing_ok=True)
    count = min(12, os.cpu_count() or 1) if CUDA else 0
    workers = [start(__file__, "--warm", part, count) for part in range(count)]
    until = time.monotonic() + 0.25 * (end - time.monotonic())
    for worker in workers:
        finish(worker, until)
    for index, section in enumerate(sections):
        left, now = sum(SECTIONS[name] for name in sections[index:]), time.monotonic()
        share = max(0.0, end - now) * SECTIONS[section] / left
        child = start(__file__, "--join", "--json", file, "--minutes", share / 60, "--sections", section)
        code = finish(child, min(end, now + share + GRACE))
        trial = Trial(file, 0, join=True)
        if section not in trial.found.get("done", []):
            trial.fail(section, "its time was over" if code is None else f"the process ended with code {code}")
    return int("wrong" in trial.found or "failed" in trial.found)


if __name__ == "__main__":
    sys.exit(main())
