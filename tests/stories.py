"""What is done with a module in one process and in several: `fuzz_processes` plays it in both, and compares step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fxplug
from fxplug import Every, StepCache, TeaCache, Threshold

SIZES = [(6, 8), (6, 8), (8, 6), (4, 4), (2, 8), (10, 6), (2, 2), (6, 10)]
BATCHES = [4, 4, 4, 2, 3, 5, 1]
MODES = [torch.no_grad, torch.enable_grad, torch.inference_mode]


def drawn_call(run: Any, host: Any = None, same: bool = False) -> Any:
    """A call of the size of the plan, or of another."""
    host, rng = host or run.case.host, run.rng
    seed = rng.randrange(2**20)
    if same or rng.random() < 0.4:
        return host.call(seed)
    if run.case.story in ("train", "resume"):  # of which no step may be refused
        same_rows = [(6, 8), (6, 8), (6, 10)] if "rows" in run.case.ways else SIZES[:3]
        return host.call(seed, rng.choice([4, 5, 6]), rng.choice(same_rows), rng.choice([5, 7]))
    return host.call(seed, rng.choice(BATCHES), rng.choice(SIZES), rng.choice([5, 5, 3, 1, 9]))


def made(run: Any, case: Any = None) -> Any:
    """The module of a case; what it is like is no value to compare."""
    found: list[Any] = []
    run.step("make", lambda: found.append(run.make(case)))
    if not found:
        raise Stopped
    return found[0]


class Stopped(Exception):
    """There is no module to go on with: it was refused."""


def calls(run: Any) -> None:
    """Calls of several sizes, with gradients and without."""
    module = made(run)
    for _ in range(run.rng.randint(3, 5)):
        args, kwargs = drawn_call(run)
        mode = run.rng.choice(MODES)
        if run.rng.random() < 0.2:
            args = (args[0].mT.contiguous().mT, *args[1:])
        with mode():
            run.step(f"call {mode.__name__} {[tuple(a.shape) for a in args]}", lambda: module(*args, **kwargs))  # noqa: B023


def two(run: Any) -> None:
    """Two modules with plans of their own, one after the other, and one on what the other gave."""
    first, second = made(run), made(run, run.case.second) if run.case.second else made(run)
    other = run.case.second.host if run.case.second else run.case.host
    for _ in range(3):
        one, two_ = drawn_call(run), drawn_call(run, other)
        with torch.no_grad():
            run.step("first", lambda: first(*one[0], **one[1]))  # noqa: B023
            run.step("second", lambda: second(*two_[0], **two_[1]))  # noqa: B023
    if other.image == run.case.host.image:
        one, two_ = (host.call(3) for host in (run.case.host, other))
        x = one[0][0].clone().requires_grad_()

        def chained() -> Any:
            y = second(first(x, *one[0][1:], **one[1]).to(other.dtype), *two_[0][1:], **two_[1])
            return averaged(run, torch.autograd.grad(y.float().square().mean(), x)[0])

        run.step("chained", chained)


def group_of(run: Any) -> Any:
    return None if run.mesh is None or run.case.mesh == "named" else run.mesh.get_group()


def averaged(run: Any, x: Tensor, group: Any = None) -> Tensor:
    """The mean over the processes of the module."""
    if run.split:
        x = x.clone()
        group = group or group_of(run)
        dist.all_reduce(x, group=group)
        x /= dist.get_world_size(group)
    return x


def gradients(run: Any) -> None:
    """The mean over the processes of the gradients of inputs, and of parameters that are not kept in parts."""
    module = made(run)
    for _ in range(2):
        args, kwargs = drawn_call(run)
        args = tuple(a.clone().requires_grad_(index != 1) for index, a in enumerate(args))

        def found(args: Any = args, kwargs: Any = kwargs) -> Any:
            module.zero_grad()
            module(*args, **kwargs).float().square().mean().backward()
            named = sorted(module.named_parameters(), key=lambda row: row[0]) if run.case.ways.get("tensor", 1) == 1 else []
            found = [averaged(run, t.grad) for t in (*args, *(p for _, p in named)) if t.grad is not None]
            # where all that a gradient has is rounding, as that of a bias of keys, it is seen beside the largest
            least = max(g.float().abs().max() for g in found) * 1e-2
            return [torch.cat([g.flatten(), least.to(g.dtype)[None]]) for g in found]

        run.step(f"gradients {[tuple(a.shape) for a in args]}", found)


def alike(run: Any) -> Any:
    """The group of the processes that have the same part of weights, where there are some."""
    ways = run.case.ways.get("tensor", 1)
    if not run.split or ways == 1 or run.case.world == ways:
        return None
    groups = [dist.new_group(list(range(rank, run.case.world, ways))) for rank in range(ways)]
    return groups[run.rank % ways]


def average_parts(run: Any, module: Any, group: Any) -> None:
    if group is not None:
        for name in module.meta.get("parts", ()):
            if (p := module.get_parameter(name)).grad is not None:
                p.grad = averaged(run, p.grad, group)


def clip(run: Any, module: Any, most: float) -> Any:
    """As torch does it; of what is kept in parts the squares are summed over the processes."""
    parts, ways = set(module.meta.get("parts", ())), run.case.ways.get("tensor", 1)
    if not (run.split and parts):
        return torch.nn.utils.clip_grad_norm_(module.parameters(), most)
    squares = [torch.zeros(()), torch.zeros(())]
    for name, p in module.named_parameters():
        if p.grad is not None:
            squares[name in parts] += p.grad.float().square().sum()
    dist.all_reduce(squares[1], group=group_of(run))
    total = (squares[0] + squares[1] / (run.case.world // ways)).sqrt()
    torch.nn.utils.clip_grads_with_norm_(list(module.parameters()), most, total)
    return total


def train(run: Any, resumed: bool = False) -> None:
    """Some steps with AdamW and clipped gradients; with `resumed` another module goes on in the middle."""
    module, groups, rng = made(run), alike(run), run.rng
    new = [name for name in run.case.passes if run.case.lowered != "merge"]
    only, mode = bool(new) and rng.random() < 0.5, rng.random() < 0.5
    saved = resumed and rng.random() < 0.5 and not module.meta.get("parts") and not run.case.lowered

    def optimizer_of(module: Any) -> Any:
        if only:
            for name, p in module.named_parameters():
                p.requires_grad_(name.split(".")[0] in new)
        ends = [p for p in module.parameters() if p.requires_grad]
        # what has no gradient but rounding gets no step of its size
        return torch.optim.AdamW(ends, 1e-2, eps=1e-2, weight_decay=0.1)

    optimizer = optimizer_of(module)
    if mode:
        module.train()
    for index in range(5):
        args, kwargs = drawn_call(run, same=index % 2 == 0)
        if resumed and index == 3:
            found: list[Any] = []
            run.step("resume", lambda: found.append(again(run, module, saved) if run.split else module))  # noqa: B023
            if not found:
                raise Stopped
            (module,) = found
            state, optimizer = copy.deepcopy(optimizer.state_dict()), optimizer_of(module)
            optimizer.load_state_dict(state)

        def step() -> Any:
            optimizer.zero_grad()  # noqa: B023
            y = module(*args, **kwargs)  # noqa: B023
            loss = (y - args[0]).float().square().mean()  # noqa: B023
            loss.backward()
            missing = sum(p.grad is None for p in module.parameters() if p.requires_grad)  # noqa: B023
            parts = module.meta.get("parts", ())  # noqa: B023
            for name, p in module.named_parameters():  # noqa: B023
                if p.grad is not None and name not in parts:
                    p.grad = averaged(run, p.grad)
            average_parts(run, module, groups)  # noqa: B023
            norm = clip(run, module, 0.5)  # noqa: B023
            optimizer.step()  # noqa: B023
            return [loss, norm.float(), missing]

        run.step(f"train {[tuple(a.shape) for a in args]}", step)

    def state() -> list[Tensor]:
        found = fxplug.whole_state(module) if run.split else module.state_dict()
        return [found[name] for name in sorted(found) if found[name].is_floating_point()]

    run.step("weights", state)


def again(run: Any, module: Any, saved: bool) -> Any:
    """The module in another one: saved by one process and loaded by all, or by its state."""
    if saved:
        path = run.folder / f"saved-{run.group}"
        group = group_of(run)
        if dist.get_rank(group) == 0:
            fxplug.save(module, path)
        dist.barrier(group=group)
        found = fxplug.load(path)
        if run.mesh is not None:
            fxplug.localize(found, run.mesh)
        return found.train(module.training)
    found = run.make()
    found.load_state_dict(module.state_dict())
    return found.train(module.training)


def switching(run: Any) -> None:
    """Adapters that come and go, and are mixed by sample."""
    module, rng = made(run), run.rng
    at = "**" if run.case.host.convolutional else "transformer_blocks.**"
    one = fxplug.apply(run.case.host.gm, fxplug.load_pass("lora", name="lora", at=at, rank=2))
    files = {}
    for seed, name in enumerate("ab"):
        draw = torch.Generator().manual_seed(seed)
        new = {n: p.shape for n, p in one.named_parameters() if n.startswith("lora.")}
        files[name] = {n: torch.randn(shape, generator=draw) * 0.2 for n, shape in new.items()}
    loaded: list[str] = []
    for _ in range(6):
        if len(loaded) < 2 and rng.random() < 0.6:
            name = "ab"[len(loaded)]
            run.step(f"load {name}", lambda: module.adapters.load(name, files[name]) and None)  # noqa: B023
            loaded.append(name)
        batch = rng.choice([4, 4, 2, 3])
        names = [None, *loaded]
        choice = rng.choice([
            rng.choice(names), {name: rng.choice([0.5, 1.0, -0.7]) for name in loaded} or None,
            [rng.choice(names) for _ in range(rng.choice([batch, batch, 2]))],
        ])  # fmt: skip
        run.step(f"use {choice}", lambda: module.adapters.use(choice) and None)  # noqa: B023
        args, kwargs = run.case.host.call(rng.randrange(2**20), batch)
        with torch.no_grad():
            run.step(f"call {batch}", lambda: module(*args, **kwargs))  # noqa: B023


def caches(run: Any) -> None:
    """A step cache around the module, for several images."""
    rng = run.rng
    policy = rng.choice([Every(2), Every(3), Threshold(0.15), TeaCache(0.2)])
    cache = StepCache(made(run), policy, clock=rng.choice(["timestep", None]))
    for _ in range(3):
        (sample, _, *text), _ = run.case.host.call(rng.randrange(2**20), rng.choice([4, 4, 2, 3]))
        kwargs = run.case.host.call(0, len(sample))[1]
        with torch.no_grad():
            if cache.clock.name is None:
                cache.reset()
            for t in (900, 700, 500, 300, 100)[: rng.choice([2, 5, 5])]:
                times = torch.full((len(sample),), float(t)).to(sample.dtype)
                y = run.step(f"step {t}", lambda: cache(sample, times, *text, **kwargs))  # noqa: B023
                run.step("counts", lambda: [dict(cache.counts)])
                if y is None:
                    break
                sample = sample - 0.2 * y


def settled(x: Any) -> Any:
    return x.settled() if hasattr(x, "settled") else x


def images(run: Any) -> None:
    """Images step by step, with guidance in one call or in two, noise, and other sizes."""
    module, rng, host = made(run), run.rng, run.case.host
    for index in range(3):
        batch, size = rng.choice([4, 4, 2]), rng.choice([(6, 8), (6, 8), (8, 6), (4, 8)])
        (sample, _, *text), _ = host.call(rng.randrange(2**20), batch, size)
        kwargs = host.call(1, batch, size)[1]
        guided = rng.choice(["", "", "two calls", "one call"])
        noisy, low = rng.random() < 0.3, rng.random() < 0.3
        noise = torch.Generator().manual_seed(index)
        if rng.random() < 0.2 and hasattr(module, "new_image"):
            module.new_image()

        def image(x: Any = sample, text: Any = text, guided: str = guided, noisy: bool = noisy, low: bool = low) -> Any:
            found = []
            for t in (900, 700, 500, 300, 100):
                times = torch.full((len(sample),), float(t)).to(sample.dtype)  # noqa: B023
                if guided == "two calls" and text:
                    a, b = module(x, times, *(v * 0 for v in text), **kwargs), module(x, times, *text, **kwargs)  # noqa: B023
                    y = a + 2 * (b - a)
                elif guided == "one call":
                    both = (torch.cat([x, x]), torch.cat([times, times]), *(torch.cat([v * 0, v]) for v in text))
                    a, b = module(*both, **{k: torch.cat([v, v]) for k, v in kwargs.items()}).chunk(2)  # noqa: B023
                    y = a + 2 * (b - a)
                else:
                    y = module(x, times, *text, **kwargs)  # noqa: B023
                x = (x.float() - 0.2 * y.float()).to(x.dtype) if low else x - 0.2 * y
                if noisy:
                    x = x + 0.1 * torch.randn(sample.shape, generator=noise).to(sample.dtype)  # noqa: B023
            found.append(settled(x))
            return found

        with torch.no_grad():
            run.step(f"image {batch} {size} {guided}{' noisy' * noisy}{' float' * low}", image)


STEPPED = ("images",)
STORIES: dict[str, Callable[[Any], None]] = {
    "calls": calls, "gradients": gradients, "train": train, "resume": lambda run: train(run, True), "two": two,
    "switching": switching, "caches": caches, "images": images,
}  # fmt: skip
