"""Random passes on random models: neutral, saved, merged, lowered, copied, compiled, each against what it came from.

The models compute in float64, so that rounding stays far below the tolerance.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import fuzz_models
import random_models
import torch
from fuzz_models import Way, limited, plain, unequal
from torch import nn

import fxplug
from fxplug.lowerings.merging.fold import merge, unmerge

CLOSE = 1e-6  # of the largest value
MISSES = ("silent", "raw", "hang")
# float32 or less in the middle of a model, or a result that rounding decides
UNFIT = {
    "casts", "autocast", "autocast_off", "casts_by_weight", "constants", "out_arguments", "fourier", "constant_kernel", "noise",
    "sinusoids", "rotary", "film", "no_grad", "bucketize", "embedding_bag", "prune", "one_hot", "by_dtype",
}  # fmt: skip
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding)
KERNELS = (nn.Linear, nn.Conv1d, nn.Conv2d)


def options(rng: random.Random, name: str) -> dict[str, Any]:
    """Parameters of a pass, its places apart."""
    rank = {"rank": rng.choice([1, 2, 4, 8]), "alpha": rng.choice([None, 1.0, 7.5]), "rslora": rng.random() < 0.3}
    given: dict[str, Callable[[], dict[str, Any]]] = {
        "lora": lambda: {**rank, "dropout": rng.choice([0.0, 0.0, 0.1]), "bias": rng.random() < 0.2},
        "lora slots": lambda: {"rank": rank["rank"], "slots": rng.choice([1, 2, 3])},
        "lora_weight": lambda: rank,
        "loha": lambda: {**rank, "tucker": rng.random() < 0.3},
        "lokr": lambda: {**rank, "factor": rng.choice([-1, 2, 4]), "full_matrix": rng.random() < 0.3},
        "dora": lambda: rank,
        "oft": lambda: {"block_size": rng.choice([2, 4, 8]), "share": rng.random() < 0.3, "terms": rng.choice([0, 5])},
        "boft": lambda: {"block_size": rng.choice([2, 4])},
        "adapter": lambda: {"bottleneck": rng.choice([1, 4]), "act": rng.choice(["GELU", "ReLU"])},
        "parallel_adapter": lambda: {"bottleneck": rng.choice([1, 4])},
        "weight_norm": lambda: {"dim": rng.choice([0, -1])},
        "ia3": dict, "scale": dict, "ssf": dict, "bitfit": dict, "skip": dict, "spectral_norm": dict,
    }  # fmt: skip
    return given[name]()


NAMES = [
    "lora", "lora", "lora slots", "lora_weight", "loha", "lokr", "dora", "oft", "boft", "adapter", "parallel_adapter",
    "weight_norm", "ia3", "scale", "ssf", "bitfit", "skip", "spectral_norm",
]  # fmt: skip
KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(["lora", "lora slots", "lora_weight", "loha", "lokr", "dora"], LAYERS),
    **dict.fromkeys(["oft", "boft", "bitfit", "weight_norm", "spectral_norm"], KERNELS),
    "ssf": (nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm, nn.GroupNorm, nn.BatchNorm2d, nn.BatchNorm1d),
}


def within(rng: random.Random, gm: nn.Module, index: int, path: str) -> fxplug.Pass:
    """A pass on what an attention reads itself, or on layers in the encoder layer around it."""
    layer = path.rpartition(".")[0]
    if layer and isinstance(gm.get_submodule(layer), nn.TransformerEncoderLayer) and rng.random() < 0.4:
        name = rng.choice(["lora", "dora", "loha"])
        at: Any = rng.choice([f"{layer}.linear1", f"{layer}.linear?"])
        return fxplug.load_pass(name, at=at, name=f"added{index}", **options(rng, name))
    name = rng.choice(["lora_weight", "lora_weight", "lora_weight", "loha", "lokr"])
    at, param = rng.choice([(path, "in_proj_weight"), (f"{path}.out_proj", "weight"), ([path, f"{path}.out_proj"], "*weight")])
    return fxplug.load_pass(name, at=at, param=param, name=f"added{index}", **options(rng, name))


def drawn(rng: random.Random, gm: nn.Module, index: int) -> fxplug.Pass | None:
    """A shipped pass at random places, or None where the model has none for it."""
    attentions = [p for p, m in gm.named_modules() if isinstance(m, nn.MultiheadAttention) and not p.startswith("added")]
    if attentions and rng.random() < 0.4:
        return within(rng, gm, index, rng.choice(attentions))
    name = rng.choice(NAMES)
    kinds = KINDS.get(name, (nn.Module,))
    paths = [p for p, m in gm.named_modules() if p and isinstance(m, kinds) and not p.startswith("added")]
    if name in ("scale", "ia3", "adapter", "parallel_adapter", "skip"):
        paths = [p for p in paths if gm.get_submodule(p)._parameters or not list(gm.get_submodule(p).children())]
    if not paths:
        return None
    some = rng.sample(paths, rng.randint(1, min(4, len(paths))))
    at: Any = rng.choice([some[0], some])
    if name in KINDS and rng.random() < 0.4:
        at = rng.choice(["**", f"{some[0].partition('.')[0]}**", "re:.*"])
    given = options(rng, name)
    if name == "skip":
        if len(paths) < 2:
            return None
        one, two = sorted(rng.sample(range(len(paths)), 2))
        given |= {"from": paths[one], "to": paths[two]}
    else:
        given["at"] = at
    return fxplug.load_pass(name.partition(" ")[0], name=f"added{index}", **given)


def loud(gm: nn.Module, seed: int) -> None:
    """Weights of the passes that are not neutral any more."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in gm.named_parameters():
            if name.startswith("added"):
                p.add_(torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype) * 0.05)


def adapter(gm: nn.Module, name: str, seed: int) -> dict[str, torch.Tensor]:
    """An adapter for the places of a pass with slots, as PEFT writes it."""
    g = torch.Generator().manual_seed(seed)
    found = {}
    for entry in gm.meta["passes"]:  # type: ignore[union-attr,index]
        for site in entry["sites"] if entry["name"] == name else []:
            path = site["path"].partition("@")[0]
            layer = gm.get_submodule(path)
            key = f"base_model.model.{path}.lora_"
            if isinstance(layer, nn.Embedding):
                found[f"{key}embedding_A"] = torch.randn(1, layer.num_embeddings, generator=g)
                found[f"{key}embedding_B"] = torch.randn(layer.embedding_dim, 1, generator=g)
            else:
                if not hasattr(layer, "weight"):  # it is computed, and no file says of what shape
                    continue
                out, inner, *kernel = layer.weight.shape
                found[f"{key}A.weight"] = torch.randn(1, inner, *kernel, generator=g) * 0.1
                found[f"{key}B.weight"] = torch.randn(out, 1, *[1] * len(kernel), generator=g) * 0.1
    return found


@dataclasses.dataclass
class Trial:
    """One model, its graph, and random passes on it."""

    seed: int
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    step: str = ""

    def run(self) -> str | None:
        """What is wrong, or None."""
        rng = random.Random(f"passes {self.seed}")
        program = random_models.program(self.seed, False, fit=lambda s: s.name not in UNFIT)
        program.training = program.warm = False
        if program.result == "dataclass":  # a loaded module has fxplug's own class for it
            program.result = "tuple"
        with random_models.built(random_models.write(random_models.source(program)), self.seed) as (_, model):
            model.double()
            self.example = Way("as traced", before="double", grad=False)
            self.first = program.first
            args, kwargs = fuzz_models.inputs(self.first, self.example, self.seed)
            try:
                with torch.no_grad():
                    model(*copy.deepcopy(args), **copy.deepcopy(kwargs))
            except Exception:
                self.counts["invalid"] += 1
                return None
            try:
                gm = fxplug.trace(model, args, kwargs)
            except fxplug.FxplugError:
                self.counts["trace refused"] += 1
                return None
            return self.passes(rng, gm)

    def passes(self, rng: random.Random, gm: Any) -> str | None:
        bits = {k: v.clone() for k, v in gm.state_dict().items()}
        ways = [self.example, Way("train", training=True), Way("batch 3", "batch3"), Way("tall", "tall")]
        ways.append(Way("mixed modes", training=True, before="modes"))
        before = {way.name: self.call(gm, way) for way in ways}
        new, texts = gm, []
        for index in range(rng.randint(1, 4)):
            try:
                made = drawn(rng, new, index)
                if made is None:
                    continue
                self.step = f"{made.name} {made.params}"
                torch.default_generator.manual_seed(self.seed)
                new = fxplug.apply(new, made)
                texts.append(made.name)
            except fxplug.FxplugError as error:
                self.counts[f"{type(error).__name__} in apply"] += 1
        if new is gm:
            self.counts["no pass"] += 1
            return None
        self.step = "passes " + "; ".join(
            f"{e['name']} {[s['path'] for s in e['sites']][:6]}" for e in new.meta["passes"]
        )
        self.counts["combinations"] += 1
        neutral = all(entry["neutral"] for entry in new.meta["passes"])
        opened = any(isinstance(m, (nn.MultiheadAttention, nn.TransformerEncoderLayer)) for m in gm.modules())
        draws = any(getattr(m, "dropout", 0) for n, m in new.named_modules() if n.startswith("added"))
        for way in ways:
            if way.training and draws:  # the numbers that the model's own dropout would have got
                continue
            # an opened MultiheadAttention computes in another order
            if (got := self.call(new, way)) is fxplug.GuardError:  # a block whose width follows the size of the input
                self.counts["GuardError in a call"] += 1
            elif neutral and (found := self.unlike(before[way.name], got, 1e-12 if opened else 0)):
                return f"neutral, {way.name}: {found}"
        loud(new, self.seed)
        slotted = [e["name"] for e in new.meta["passes"] if e.get("slots")]
        for name in slotted:
            try:
                new.adapters.load(f"ink{name}", adapter(new, name, self.seed))
            except fxplug.FxplugError as error:
                self.counts[f"{type(error).__name__} in adapters.load"] += 1
        try:
            if slotted and (names := list(new.adapters.names if hasattr(new.adapters, "names") else [])):
                new.adapters.use(names[0])
        except fxplug.FxplugError as error:
            self.counts[f"{type(error).__name__} in adapters.use"] += 1
        return self.made(rng, gm, new, ways, before, bits)

    def made(self, rng: random.Random, gm: Any, new: Any, ways: list[Way], before: Any, bits: Any) -> str | None:
        """The same from what is made of the rewritten module."""
        state = {k: v.clone() for k, v in new.state_dict().items()}
        loudly = {way.name: self.call(new, way) for way in ways}
        for what, close, kinds, make in self.forms(rng, new):
            try:
                other = make()
            except fxplug.FxplugError as error:
                self.counts[f"{type(error).__name__} in {what}"] += 1
                continue
            self.counts[what] += 1
            for way in ways[:kinds]:
                if way.training and close:  # merged statistics and dropout are of evaluation
                    continue
                if found := self.unlike(loudly[way.name], self.call(other, way), close):
                    return f"{what}, {way.name}: {found}"
            if what == "merge" and unmerge(other) is not new:
                return "unmerge gives another module"
            for k, v in new.state_dict().items():
                if not torch.equal(v, state[k]):
                    return f"{what} wrote {k}"
        for way in ways:
            if found := self.unlike(before[way.name], self.call(gm, way), 0):
                return f"the model without passes, {way.name}: {found}"
        if written := [k for k, v in gm.state_dict().items() if not torch.equal(v, bits[k])]:
            return f"{written[0]} of the model was written"
        return None

    def forms(self, rng: random.Random, new: Any) -> Iterator[tuple[str, float, int, Callable[[], Any]]]:
        """What is made of a module: its name, how close, at how many ways of calling, and how."""

        def saved() -> Any:
            with tempfile.TemporaryDirectory() as folder:
                fxplug.save(new, folder)
                return fxplug.load(folder)

        def filed() -> Any:
            other = copy.deepcopy(new)
            free = tuple(f"{e['name']}." for e in new.meta["passes"] if not e.get("slots"))
            with tempfile.TemporaryDirectory() as folder, torch.no_grad():
                fxplug.save_adapter(new, f"{folder}/adapter")
                for key, value in other.named_parameters():
                    if key.startswith(free):
                        value.zero_()
                fxplug.load_adapter(other, f"{folder}/adapter")
            return other

        yield "PEFT's file", CLOSE, 4, filed
        yield "deepcopy", 0, 4, lambda: copy.deepcopy(new)
        yield "save and load", 0, 4, saved
        yield "merge", CLOSE, 4, lambda: merge(new)
        for how in rng.sample(["auto", "addmm", "fuse", "side"], 1):
            yield f"fuse {how}", CLOSE, 4, lambda how=how: fxplug.fuse(new, how) if how == "auto" else fxplug.lower(new)
        for how in rng.sample(["fold", "live", "auto"], 2):
            yield f"lower {how}", CLOSE, 4, lambda how=how: fxplug.lower(new, merge=how)
        if rng.random() < 0.03 and not any(isinstance(m, nn.RNNBase) for m in new.modules()):  # which dynamo does not take
            torch._dynamo.reset()
            yield "compile", 0, 1, lambda: torch.compile(new, backend="eager", fullgraph=True)

    def call(self, module: nn.Module, way: Way) -> Any:
        """The result, or the error of fxplug that stands for it."""
        args, kwargs = fuzz_models.inputs(self.first, dataclasses.replace(way, before="double"), self.seed)
        state = {k: v.clone() for k, v in module.state_dict().items()} if way.training else {}
        module.train(way.training)
        if way.before == "modes":
            fuzz_models.mix_modes(module, self.seed)
            # torch's way through a whole encoder layer in evaluation has no dropout, also of parts in training
            torch.backends.mha.set_fastpath_enabled(False)
        try:
            torch.default_generator.manual_seed(self.seed)
            with torch.no_grad():
                return plain(module(*args, **kwargs))
        except fxplug.GuardError:
            return fxplug.GuardError
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
            if way.training:  # it moved running statistics
                module.eval()
                self.put(module, state)

    def unlike(self, a: Any, b: Any, close: float) -> str | None:
        if a is fxplug.GuardError or b is fxplug.GuardError:
            return None if a is b else f"one is turned away: {str(a)[:60]}, {str(b)[:60]}"
        return unequal(a, b, close)

    def put(self, module: nn.Module, state: dict[str, torch.Tensor]) -> None:
        """The values that these tensors had."""
        with torch.no_grad():
            for key, value in module.state_dict().items():
                if key in state:
                    value.copy_(state[key])


def judge(seed: int) -> tuple[str, str, Trial]:
    """A verdict (equal, silent, raw, hang), what about it, and the trial."""
    trial = Trial(seed)
    kept = torch.get_rng_state()
    try:
        with limited(fuzz_models.SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = trial.run()
        return ("silent" if found else "equal"), f"{found} ({trial.step})" if found else "", trial
    except fuzz_models._Late:
        return "hang", trial.step, trial
    except Exception as error:
        where = fuzz_models.where(error)
        return "raw", f"{type(error).__name__}: {error} at {where} ({trial.step})", trial
    finally:
        torch.set_rng_state(kept)


def fuzz_passes(cases: int, seed: int) -> list[str]:
    """Judge this many random combinations, from this seed on; print what differs. A line for each miss."""
    misses: list[str] = []
    verdicts: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for number in range(seed, seed + cases):
        kind, what, trial = judge(number)
        verdicts[kind] += 1
        counts.update(trial.counts)
        if kind in MISSES:
            misses.append(f"{number}: {kind}: {what}")
            print(f"\n{kind}: {what}\n  again: python tests/fuzz.py passes --cases 1 --seed {number}", flush=True)
    print(f"passes: {dict(sorted(verdicts.items()))}\n{dict(counts.most_common())}")
    return misses
