"""PipeFusion: stages on patches of tokens with what the others had a step before; steps in one piece are the model's own."""

from __future__ import annotations

import copy
import functools
import queue
import threading
import warnings

import processes
import pytest
import small
import torch
import zoo
from sweeps import sweep
from torch import nn

import fxplug
from fxplug.core.ir.comparison import measure_distance
from fxplug.core.ir.containers import list_leaves
from fxplug.core.torch_internals import modules as pytree
from fxplug.parallel.pipelines.deferred import DeferredTensor
from fxplug.parallel.pipelines.entry import distances
from fxplug.parallel.pipelines.links import Links, make_links
from fxplug.parallel.runtime.mesh import fill_degrees
from fxplug.parallel.runtime.pretended import PRETENDED, run_simulated

CLOSE = 1e-6


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.again = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, step):
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm(x) + step).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))
        return x + self.down(nn.functional.gelu(self.up(self.again(x))))


class UShaped(nn.Module):
    """A diffusion transformer whose later blocks take what the earlier ones gave, and a rest of the input at the end."""

    def __init__(self, depth: int = 3, width: int = 24) -> None:
        super().__init__()
        self.patch, self.time = nn.Conv2d(4, width, 2, 2), nn.Linear(1, width)
        self.position = nn.Parameter(torch.randn(1, 256, width) * 0.1)
        self.down = nn.ModuleList(Block(width) for _ in range(depth))
        self.up = nn.ModuleList(Block(width) for _ in range(depth))
        self.joins = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depth))
        self.head = nn.Linear(width, 16)

    def forward(self, x, timestep):
        b, _, h, w = x.shape
        y = self.patch(x).flatten(2).transpose(1, 2)
        y = y + self.position[:, : y.shape[1]]
        step = self.time(timestep[:, None] / 1000).unsqueeze(1)
        skips = []
        for block in self.down:
            y = block(y, step)
            skips.append(y)
        for join, block in zip(self.joins, self.up, strict=True):
            y = block(join(torch.cat([y, skips.pop()], -1)), step)
        y = self.head(y).view(b, h // 2, w // 2, 4, 2, 2)
        return y.permute(0, 3, 1, 4, 2, 5).reshape(b, 4, h, w) + 0.1 * x


def inputs(batch=2, height=8, width=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 4, height, width, generator=generator), torch.full((batch,), 900.0)


@functools.cache
def own(depth=3):
    model = small.seeded(lambda: UShaped(depth)).eval()
    return fxplug.trace(model, inputs()).eval()


@functools.cache
def planned(stages):
    return fxplug.pipefusion(own(), inputs(), stages=stages, patches=4)


def made(stages, patches, warmup=1, **more):
    return planned(stages).with_options(patches, warmup, **more)


def image(model, steps=6, **given):
    """A few steps of a denoiser; what it gave at each, and the image."""
    x, time = inputs(**given)
    found = []
    with torch.no_grad():
        for t in torch.linspace(900, 100, steps):
            found.append(model(x, torch.full_like(time, float(t))))
            x = x - found[-1] / steps
    return [whole(v) for v in found], whole(x)


def whole(x):
    return x.settled() if isinstance(x, DeferredTensor) else x


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def far(a, b):
    return float((a - b).norm() / b.norm())


# --- in one process


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_steps_in_one_piece_are_the_models_own(stages):
    want, last = image(own())
    one, x = image(made(stages, 1))
    assert equal(one, want) and torch.equal(x, last)
    for warmup in (1, 3):
        found = made(stages, 4, warmup)
        got, x = image(found)
        assert equal(got[:warmup], want[:warmup]) and not torch.equal(got[warmup], want[warmup])
        assert found.counts == {"entire": warmup, "patches": 6 - warmup}
        assert far(x, last) < 0.05


def test_patches_with_nothing_stale_give_what_the_model_gives():
    for stages in (1, 2, 4):
        for patches in (2, 5, 24):  # 24 tokens
            found = made(stages, patches)
            assert found.check(inputs(), {}) < CLOSE
            assert found.check(inputs(1, 12, 6), {}) < CLOSE if patches < 18 else True


@pytest.mark.parametrize("patches", [3, 5])
def test_stages_change_nothing(patches):
    one, x = image(made(1, patches))
    for stages in (2, 3, 4):
        got, y = image(made(stages, patches))
        assert equal(one, got) and torch.equal(x, y)


def test_stages_have_equal_work_and_hand_on_what_later_ones_need():
    plan = made(3, 2).plan
    total = sum(stage.work for stage in plan.stages)
    assert all(0.25 < stage.work / total < 0.45 for stage in plan.stages)
    assert len(made(2, 2).plan.stages[1].taken) == 3  # what goes on, and two skips
    assert {0, 1} == set(plan.stages[2].taken.values())  # past the one between
    weights = [{name for name, _ in m.named_parameters()} for m in made(2, 2).stages]
    assert "0.down.0.qkv.weight" in weights[0] and not any("up.2" in name for name in weights[0])
    assert "0.up.2.qkv.weight" in weights[1] and not any("down.0" in name for name in weights[1])


def test_patches_are_computed_with_what_the_others_had_before():
    """The definition, written out: blocks one by one, keys and values of other patches from the step before."""
    model = small.seeded(lambda: UShaped(1)).eval()
    gm = fxplug.trace(model, inputs()).eval()
    kept = {}

    def block(name, module, x, step, at):
        b, _, c = x.shape
        q, k, v = module.qkv(module.norm(x) + step).view(b, x.shape[1], 3, 4, -1).permute(2, 0, 3, 1, 4)
        for key, value in (("k", k), ("v", v)):
            if (name, key) not in kept or x.shape[1] == 24:
                kept[name, key] = value.clone()
            kept[name, key][:, :, at] = value
        y = nn.functional.scaled_dot_product_attention(q, kept[name, "k"], kept[name, "v"])
        x = x + module.out(y.transpose(1, 2).reshape(b, x.shape[1], c))
        return x + module.down(nn.functional.gelu(module.up(module.again(x))))

    def reference(x, t, first=[True]):  # noqa: B006
        out = torch.empty(2, 24, 16)
        for at in [slice(0, 24)] if first[0] else [slice(0, 8), slice(8, 16), slice(16, 24)]:
            y = (model.patch(x).flatten(2).transpose(1, 2) + model.position[:, :24])[:, at]
            step = model.time(t[:, None] / 1000).unsqueeze(1)
            skip = block("down", model.down[0], y, step, at)
            y = block("up", model.up[0], model.joins[0](torch.cat([skip, skip], -1)), step, at)
            out[:, at] = model.head(y)
        first[0] = False
        return out.view(2, 4, 6, 4, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(2, 4, 8, 12) + 0.1 * x

    got, _ = image(fxplug.pipefusion(gm, inputs(), stages=2, patches=3))
    want, _ = image(reference)
    for a, b in zip(got, want, strict=True):
        assert measure_distance(b, a) < CLOSE


# --- images


@pytest.mark.slow
def test_images_one_after_the_other():
    found = made(2, 3)
    first = image(found)
    assert equal(first[0], image(found)[0])  # the timestep goes up: what was kept is forgotten
    wide = image(found, height=12)
    assert torch.equal(wide[0][0], image(own(), height=12)[0][0]) and not torch.equal(wide[0][1], image(own(), height=12)[0][1])
    assert equal(first[0], image(found)[0])
    silent = fxplug.pipefusion(own(), inputs(), stages=2, patches=3, clock=None)
    assert equal(first[0], image(silent)[0]) and not equal(first[0], image(silent)[0])
    silent.new_image()
    assert equal(first[0], image(silent)[0])


class Worded(nn.Module):
    """A denoiser with a condition (samples, 3)."""

    def __init__(self):
        super().__init__()
        self.words, self.inner = nn.Linear(3, 4), UShaped()

    def forward(self, x, timestep, words):
        return self.inner(x + self.words(words)[:, :, None, None], timestep)


WORDS = torch.randn(2, 3, generator=torch.Generator().manual_seed(5)) * 2


@functools.cache
def worded():
    return fxplug.trace(small.seeded(Worded).eval(), (*inputs(), WORDS)).eval()


def guided(model, conditions):
    """What the calls of an image give, by step and condition; `conditions` are the calls of each step, in their order."""
    x, time = inputs(1)
    found = []
    with torch.no_grad():
        for t, several in zip(torch.linspace(900, 100, len(conditions)), conditions, strict=True):
            out = {n: model(x, torch.full_like(time, float(t)), WORDS[n : n + 1]) for n in several}
            found.append({n: whole(v).clone() for n, v in out.items()})
            x = whole(x - sum(out.values()) / 6)
    return found


@pytest.mark.parametrize(
    "conditions",
    [[(0, 1)] * 6, [(0, 1)] * 3 + [(1,)] * 3, [(0, 1)] * 3 + [(0,)] * 3, [(1,)] * 2 + [(0, 1)] * 4, [(0, 1), (1, 0)] * 3,
     [(0, 1), (0, 1), (1,), (0, 1), (0, 1)]],
    ids=["both", "ends", "ends with the first", "begins", "turns", "stops for a step"],
)  # fmt: skip
def test_guidance_that_changes_is_told_apart_by_its_conditions(conditions):
    """Each condition goes on with what it had itself at the step before, or begins with a step in one piece."""
    found, exact = fxplug.pipefusion(worded(), (*inputs(1), WORDS[:1]), patches=4), worded()
    got, time = guided(found, conditions), torch.linspace(900, 100, len(conditions))
    x, before = inputs(1)[0], set()
    for t, step, several in zip(time, got, conditions, strict=True):
        for n in several:
            with torch.no_grad():
                want = exact(x, t[None], WORDS[n : n + 1])
            assert far(step[n], want) < 0.1 and torch.equal(step[n], want) is (n not in before)
        before, x = set(several), whole(x - sum(step.values()) / 6)


def test_two_halves_of_guidance_in_one_call_or_in_two():
    found = fxplug.pipefusion(worded(), (*inputs(), WORDS), stages=2, patches=3)
    x, time = inputs()
    with torch.no_grad():
        for t in torch.linspace(900, 100, 6):
            halves = zip(x.chunk(2), WORDS.chunk(2), strict=True)
            apart = torch.cat([found(half, torch.full((1,), float(t)), words) for half, words in halves])
            x = x - apart / 6
    found.new_image()
    y, time = inputs()
    with torch.no_grad():
        for t in torch.linspace(900, 100, 6):
            y = y - found(y, torch.full_like(time, float(t)), WORDS) / 6
    assert measure_distance(y, x) < CLOSE


def test_calls_that_nothing_tells_apart_run_in_one_piece():
    found, exact = made(2, 3), own()
    x, time = inputs()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, t in enumerate((900.0, 700.0, 500.0, 300.0, 100.0)):
            now = torch.full_like(time, t)
            for other in (x * 0.1 + 3, x)[i > 2 :]:  # guidance ends early, and the first is left out
                assert torch.equal(found(other, now), exact(other, now)) is (i < 4)
            x = x * 0.9
    with pytest.warns(UserWarning, match="calls at one time have the same conditions"), torch.no_grad():
        found.new_image()
        for t in (900.0, 900.0, 700.0):
            found(x, torch.full_like(time, t))
    found.new_image()
    with torch.no_grad():
        for t in (900.0, 700.0, 500.0):
            found(x, torch.full_like(time, t))
        with pytest.raises(fxplug.SpecError, match="two calls at timestep 500 have the same conditions, .* new_image"):
            found(x * 2, torch.full_like(time, 500.0))
    found.new_image()


def test_the_last_steps_are_corrected():
    model = own()
    found = fxplug.pipefusion(model, inputs(), patches=4, correct=2, steps=6)
    x, time = inputs()
    with torch.no_grad():
        for i, t in enumerate(torch.linspace(900, 100, 6)):
            out, want = found(x, torch.full_like(time, float(t))), model(x, torch.full_like(time, float(t)))
            assert torch.equal(out, want) is (i in (0, 4, 5))
            x = x - out / 6
    asked = fxplug.pipefusion(model, inputs(), patches=4, correct=1, steps=lambda: 3)
    image(asked, steps=3)
    assert asked.counts == {"entire": 2, "patches": 1}


# --- models of a library


def build(name, **more):
    import diffusers

    def make():
        model = getattr(diffusers, name)(**more).eval()
        zoo._randomize(model)
        return model

    return small.seeded(make)


NAMES = ["SanaTransformer2DModel", "GlmImageTransformer2DModel", "UVit2DModel"]


@sweep("name", NAMES, "SanaTransformer2DModel")
def test_transformers_of_diffusers(name):
    (case, *_) = (c for c in zoo.cases("diffusers/") if c.name == f"diffusers/{name}")
    args, kwargs = case.inputs(2)
    gm = fxplug.trace(case.build().eval(), args, kwargs, check=False).eval()
    found = fxplug.pipefusion(gm, args, kwargs, stages=2, patches=2, clock=None)
    with torch.no_grad():
        assert equal(list_leaves(found(*args, **kwargs)), list_leaves(gm(*args, **kwargs)))
    assert found.check(args, kwargs) < CLOSE


@pytest.mark.slow
def test_long_skips_of_hunyuan_dit():
    (case, *_) = (c for c in zoo.cases("diffusers/") if c.name == "diffusers/HunyuanDiT2DModel")
    args, kwargs = case.inputs(2)
    config = {k: v for k, v in case.build().config.items() if not k.startswith("_")}
    gm = fxplug.trace(build("HunyuanDiT2DModel", **config | {"num_layers": 6}), args, kwargs, check=False).eval()
    found = fxplug.pipefusion(gm, args, kwargs, stages=3, patches=2, clock=None)
    assert 0 in found.plan.stages[2].taken.values() and found.check(args, kwargs) < CLOSE


# --- processes


class LocalLinks(Links):
    """What stages send each other, between threads of this process."""

    def __init__(self, local):
        size = local.barrier.parties
        super().__init__(local.rank, range(size), ())
        queues = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
        self.local, self.queues = local, vars(local.barrier).setdefault("queues", queues)

    def send(self, to, values, key):
        self.queues[self.rank, to].put(copied(values))

    def receive(self, source, key):
        while True:
            try:
                return self.queues[source, self.rank].get(timeout=0.1)
            except queue.Empty:
                if self.local.barrier.broken:  # another thread has failed
                    raise threading.BrokenBarrierError from None

    def share(self, source, values, key):
        return copied(self.local.swap(copied(values))[source])  # written again meanwhile

    def swap(self, values, key):
        return tuple, self.local.swap(copied(values))


def copied(values):
    return pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, values)


def links():
    return LocalLinks(PRETENDED.get().groups["stages"])


@functools.cache
def stale(ways):
    return fxplug.stale_sequence(own(), inputs(), ways=ways)


@pytest.mark.parametrize(("make", "count"), [(lambda n: made(n, 3), 2), (lambda n: made(n, 3), 3), (stale, 3)])
def test_pretended_processes_give_what_one_gives(make, count):
    one = make(count)
    want = image(one), image(one, height=12)

    def run(rank):
        mine = one.with_options(links=links())
        return image(mine), image(mine, height=12)

    for got in run_simulated({"stages": count, **fill_degrees({})}, run):
        for (a, x), (b, y) in zip(want, got, strict=True):
            assert equal(a, b) and torch.equal(x, y)


def test_steps_do_not_wait_for_the_last_patch():
    one = made(2, 3)

    def run(rank):
        mine = one.with_options(links=links())
        x, time = inputs()
        for i, t in enumerate((900.0, 700.0, 500.0, 300.0)):
            out = mine(x, torch.full_like(time, t))
            x = (x - 0.1 * out).clamp(-3, 3)
            assert isinstance(out, DeferredTensor) is (i > 0)
            assert i == 0 or (out.recipe.whole is None and x.recipe.whole is None)
        first = mine.waited
        assert float(x.std()) > 0  # somebody looks at it: every process gets it
        again = mine.waited
        text = r"patch by patch: 'std' \(.*test_pipefusion.py:\d+\) needs the whole output .* overlap=False"
        with pytest.raises(fxplug.SpecError, match=text):
            mine(x, torch.full_like(time, 100.0))
        return first, again, whole(x)

    (first, again, x), (_, _, y) = run_simulated({"stages": 2, **fill_degrees({})}, run)
    assert first == "" and again.startswith("'std'") and torch.equal(x, y)


# --- in a pipeline that knows nothing of it


def pixart(scheduler):
    import diffusers

    config = {
        "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 8, "num_layers": 3,
        "cross_attention_dim": 16, "sample_size": 8, "patch_size": 2, "caption_channels": 12,
        "use_additional_conditions": False,
    }  # fmt: skip
    vae = small.seeded(
        lambda: diffusers.AutoencoderKL(
            block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4, norm_num_groups=4, layers_per_block=1,
        ).eval()
    )  # fmt: skip
    pipe = diffusers.PixArtAlphaPipeline(None, None, vae, build("PixArtTransformer2DModel", **config), scheduler)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def paint(pipe, steps=5, size=16):
    """An image with guidance: both halves in one batch."""
    prompts = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))  # threads have one global generator
    out = pipe(
        prompt=None, negative_prompt=None, prompt_embeds=prompts[:1], negative_prompt_embeds=prompts[1:],
        height=size, width=size,
        prompt_attention_mask=torch.ones(1, 5), negative_prompt_attention_mask=torch.ones(1, 5), num_inference_steps=steps,
        use_resolution_binning=False, generator=torch.Generator().manual_seed(0), output_type="pt",
    )  # fmt: skip
    return out.images


def with_pixart(scheduler, **more):
    """A pipeline, and what takes its transformer's place."""
    pipe = pixart(scheduler)
    args = (small.seeded(lambda: torch.randn(2, 4, 8, 8)),)
    kwargs = {
        "encoder_hidden_states": torch.randn(2, 5, 12), "encoder_attention_mask": torch.ones(2, 5),
        "timestep": torch.tensor([5, 5]), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}, "return_dict": False,
    }  # fmt: skip
    gm = fxplug.trace(pipe.transformer, args, kwargs).eval()
    return pipe, fxplug.pipefusion(gm, args, kwargs, stages=2, patches=3, **more)


def schedulers():
    import diffusers as d

    return {
        "DDIM": d.DDIMScheduler(), "Euler": d.EulerDiscreteScheduler(), "DPM++": d.DPMSolverMultistepScheduler(),
        "DPM first order": d.DPMSolverMultistepScheduler(solver_order=1), "ancestral": d.EulerAncestralDiscreteScheduler(),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")
@sweep("name", ["DDIM", "Euler", "DPM++", "DPM first order", "ancestral"], "Euler")
def test_an_unchanged_pipeline_steps_patch_by_patch(name):
    pipe, one = with_pixart(schedulers()[name])
    serial = paint(pipe)
    pipe.transformer = one
    want = paint(pipe), paint(pipe)
    assert torch.equal(*want) and far(want[0], serial) < 0.5 and not torch.equal(want[0], serial)

    def run(rank):
        mine = copy.copy(pipe)
        mine.scheduler, mine.transformer = copy.deepcopy(pipe.scheduler), one.with_options(links=links())
        needed, settle = [], mine.transformer.settle
        mine.transformer.settle = lambda recipe, like, why: needed.append(why) or settle(recipe, like, why)
        found = paint(mine), paint(mine)
        assert needed and all("convolution" in why for why in needed)  # the decoder, and nothing before it
        return found

    for got in run_simulated({"stages": 2, **fill_degrees({})}, run):
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[0])


@pytest.mark.slow
def test_a_scheduler_that_looks_at_all_of_a_step_is_refused():
    import diffusers

    for overlap in (True, False):
        pipe, one = with_pixart(diffusers.DDIMScheduler(thresholding=True), overlap=overlap)
        pipe.transformer = one
        want = paint(pipe)

        def run(rank, pipe=pipe, one=one):
            mine = copy.copy(pipe)
            mine.scheduler, mine.transformer = copy.deepcopy(pipe.scheduler), one.with_options(links=links())
            return paint(mine)

        if overlap:
            with pytest.raises(fxplug.SpecError, match=r"patch by patch: '.*' \(.*scheduling_ddim.py:\d+\) needs the whole"):
                run_simulated({"stages": 2, **fill_degrees({})}, run)
        else:
            assert all(torch.equal(got, want) for got in run_simulated({"stages": 2, **fill_degrees({})}, run))


# --- a step late, without stages


def test_an_exchange_a_step_late():
    want, last = image(own())
    got, x = image(stale(3))
    assert torch.equal(got[0], want[0]) and not torch.equal(got[1], want[1]) and far(x, last) < 0.05
    assert stale(3).check(inputs(), {}) < CLOSE
    fused, _ = image(made(1, 3))  # there a patch sees what those before it have in this step
    assert not torch.equal(fused[1], got[1])
    one, y = image(fxplug.stale_sequence(own(), inputs(), ways=1))
    assert equal(one, want) and torch.equal(y, last)


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_guidance_over_processes_and_stages_or_a_step_late(late):
    two = {"ways": 2} if late else {"stages": 2, "patches": 3}
    one = (fxplug.stale_sequence if late else fxplug.pipefusion)(own(), inputs(), **two, batch=2)
    want, last = image(stale(2) if late else made(2, 3))

    def run(rank):
        return image(one.with_options(links=links()))

    for got, x in run_simulated({**fill_degrees({"batch": 2}), "stages": 2}, run):
        assert all(measure_distance(a, b) < CLOSE for a, b in zip(want, got, strict=True))
        assert measure_distance(last, x) < 10 * CLOSE


def test_distances_over_patches_and_warm_up():
    rows = distances(made(2, 2), lambda model: image(model)[1], [1, 2, 6], [1, 4])
    assert rows[1, 1] == rows[1, 4] == 0 and 0 < rows[2, 4] < rows[2, 1] < 0.05


def process(rank, folder):
    found = fxplug.pipefusion(own(), inputs(), stages=2, patches=3)
    torch.save([image(found), image(found), image(found, height=12)], f"{folder}/{rank}.pt")
    late = fxplug.stale_sequence(own(), inputs(), ways=2, check=False)
    torch.save([image(late), image(late)], f"{folder}/late{rank}.pt")
    with pytest.raises(fxplug.SpecError, match="3 stages need 3 processes, and there are 2"):
        make_links(3, {"batch": 1})
    bank = fxplug.apply(own(), fxplug.load_pass("lora", at="head", rank=2, slots=1))
    bank.adapters.load("ink", {"head.lora_A.weight": torch.ones(2, 24), "head.lora_B.weight": torch.ones(16, 2)})
    waiting = fxplug.pipefusion(bank, inputs(), stages=2, patches=3, overlap=False, check=False)
    for each in (found, late, waiting):
        with pytest.raises(fxplug.GuardError, match="the input 0 of process 1 differs from process 0"):
            image(each, seed=rank)  # as where nobody gives a seed
    waiting.adapters.use("ink" if rank else None)
    with pytest.raises(fxplug.GuardError, match=r"buffer 'lora.gates.table.weights' of process 1 differs from process 0"):
        image(waiting)
    waiting.adapters.use("ink")
    image(waiting)


@pytest.mark.slow
def test_two_processes_give_what_one_gives(tmp_path):
    one = made(2, 3)
    want = [image(one), image(one), image(one, height=12)]
    processes.group(process, str(tmp_path))
    for rank in range(2):
        for (a, x), (b, y) in zip(want, torch.load(tmp_path / f"{rank}.pt"), strict=True):
            assert equal(a, b) and torch.equal(x, y)
        for got, x in torch.load(tmp_path / f"late{rank}.pt"):
            want_late, y = image(stale(2))
            assert equal(got, want_late) and torch.equal(x, y)


def odd_one(rank, case, late):
    """An image of which process 1 does something else at one step; the other says so, and nobody waits for ever."""
    kind = {"ways": 2} if late else {"stages": 2, "patches": 4}
    new = (fxplug.stale_sequence if late else fxplug.pipefusion)(own(), inputs(), **kind, check=False)
    x, time = inputs()
    text = {
        "skips a call": "input 1 of process 1 differs from process 0",
        "other size": "process 0 is at step 3 of an image; process 1 is at step 0",
        "begins an image": "process 0 is at step 3 of an image; process 1 is at step 0",
        "looks": r"process 0 is at step 3 of an image; process 1 is at .*, which needs all of a result",
    }[case]
    mine = rank == 1

    def run():
        y = x
        for i, t in enumerate((900.0, 700.0, 500.0, 300.0, 100.0)):
            if i == 3 and mine:
                if case == "skips a call":
                    continue
                if case == "other size":
                    y = inputs(height=12)[0]
                if case == "begins an image":
                    new.new_image()
                if case == "looks":
                    float(y.mean())
            y = y - new(y, torch.full_like(time, t)) / 5
        float(y.mean())

    with torch.no_grad(), pytest.raises(fxplug.GuardError, match=text):
        run()


ODD = [("skips a call", False), ("other size", False), ("begins an image", False), ("looks", False), ("skips a call", True),
       ("other size", True), ("begins an image", True)]  # fmt: skip


def odd_ones(rank):
    for case, late in ODD:
        odd_one(rank, case, late)


@pytest.mark.slow
def test_a_process_that_does_another_thing_is_told_in_every_process():
    processes.group(odd_ones)


# --- what cannot be


def test_wrong_calls_are_told():
    gm = own()
    for given, text in [
        ({"patches": 0}, "patches must be a whole number, 1 or more, not 0"),
        ({"patches": 2, "stages": True}, "stages must be a whole number"),
        ({"patches": 2, "correct": -1}, "correct must be a whole number, 0 or more"),
        ({"patches": 2, "correct": 2}, "correct=2 needs the number of steps of an image"),
        ({"patches": 25}, r"24 tokens \('flatten', dimension 2\) cannot be split over 25 processes"),
        ({"patches": 2, "stages": 99}, r"cannot be cut into 99 stages: .* set stages=\d+ or fewer"),
        ({"patches": 2, "clock": "timestp"}, "no input 'timestp'.*did you mean 'timestep'"),
    ]:
        with pytest.raises(fxplug.SpecError, match=text):
            fxplug.pipefusion(gm, inputs(), **given)
    with pytest.raises(fxplug.SpecError, match="takes a traced module, not UShaped"):
        fxplug.pipefusion(UShaped(1), inputs(), patches=2)
    found = made(2, 3)
    with pytest.raises(fxplug.SpecError, match="computes no gradients"):
        found.train()
    with pytest.raises(fxplug.GuardError, match="does not take this call: missing a required argument: 'timestep'"):
        found(inputs()[0])
    found.new_image()
    x, time = inputs(1, 2, 2)
    found(x, time)
    with pytest.raises(fxplug.GuardError, match=r"1 tokens .dimension 2 of \(1, 24, 1\). cannot be split into 3 patches"):
        found(x, time - 1)
    found.new_image()
