"""What does not depend on a denoiser's latents is computed once: equal to the bit at every step, never stale, and refused in
words."""

from __future__ import annotations

import copy
import pickle
import re
import threading
import warnings
from types import SimpleNamespace

import fuzz_hoist
import modular
import pytest
import tiny_pipelines
import torch
import torch.nn.functional as F
from fuzz_hoist import is_same
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import fxplug
from fxplug.core.errors import FxplugError, SpecError
from fxplug.lowerings.hoist.cut import StageCut, prepare_graph
from fxplug.lowerings.hoist.planner import IN_TURN
from fxplug.parallel.runtime import pretended

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of diffusers' own schedulers
GROUPS = {"conditions": ["text"], "time": ["t"]}


class Denoiser(nn.Module):
    """A stage for each set of groups: text alone, time alone, both, and latents."""

    def __init__(self, width=8):
        super().__init__()
        self.text, self.time, self.both = nn.Linear(6, width), nn.Linear(4, width), nn.Linear(width, width)
        self.enter, self.leave = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x, t, text):
        waves = torch.outer(t.float(), torch.arange(4, device=t.device).float()).cos()
        both = self.both(F.silu(self.time(waves))[:, None] + self.text(text))
        hidden = self.enter(x)
        return self.leave(F.gelu(hidden + both.mean(1).reshape(hidden.size(0), 1, -1)))


def inputs(seed=0, batch=2, words=3, time=5.0):
    gen = torch.Generator().manual_seed(seed)
    x, text = torch.randn(batch, 5, 4, generator=gen), torch.randn(batch, words, 6, generator=gen)
    return {"x": x, "t": torch.full((batch,), time), "text": text}


def make(model=None, groups=GROUPS, call=None, **options):
    """A module traced from a model, and the same hoisted."""
    torch.manual_seed(0)
    gm = fxplug.trace((model or Denoiser)().eval(), kwargs=call or inputs())
    return gm, fxplug.lower(gm, fuse=None, hoist=groups, **options)


@torch.no_grad()
def check(gm, hoisted, **call):
    """One call of both; the counts of the stages that it computed."""
    before = dict(hoisted.counts)
    assert is_same(hoisted(**call), gm(**call))
    return {name: count - before[name] for name, count in hoisted.counts.items() if count != before[name] and name != "step"}


ALL = {"always": 1, "conditions": 1, "time": 1, "conditions+time": 1}


@pytest.mark.slow
def test_a_stage_is_computed_once_for_what_it_needs():
    gm, hoisted = make()
    assert hoisted.used == ("always", "conditions", "time", "conditions+time", "step")
    assert check(gm, hoisted, **inputs()) == ALL
    assert check(gm, hoisted, **{**inputs(), "x": inputs(1)["x"]}) == {}
    assert check(gm, hoisted, **inputs(time=4.0)) == {"time": 1, "conditions+time": 1}
    assert check(gm, hoisted, **{**inputs(), "text": inputs(1)["text"]}) == {"conditions": 1, "conditions+time": 1}
    assert check(gm, hoisted, **inputs()) == {}
    assert check(gm, hoisted, **inputs(words=4)) == ALL  # other sizes are another form of call
    assert "bytes kept" in hoisted.listing and [row.name for row in hoisted.stages] == list(hoisted.used)


def test_the_report_has_the_table_of_stages(tmp_path):
    gm, hoisted = make()
    check(gm, hoisted, **inputs())
    page = fxplug.report(gm, hoisted, tmp_path / "page.html")
    table = page.tables[-1]
    assert table.title == "Stages" and [row[0] for row in table.rows] == list(hoisted.used)
    assert "Conditions: text; time: t." in table.about
    for row, stage in zip(table.rows, hoisted.stages, strict=True):
        assert row[2] == f"{stage.weights:,}" and row[-1] == f"{stage.kept_bytes:,}"
    assert "conditions+time" in (tmp_path / "page.html").read_text()
    assert len(hoisted.listing.splitlines()) == len(table.rows) + 1
    hoisted(**inputs())  # with gradients
    about = fxplug.report(gm, hoisted, tmp_path / "other.html").tables[-1].about
    assert "Nothing is kept of the last call: gradients are enabled" in about
    assert hoisted.listing.splitlines()[-1].startswith("nothing is kept of the last call: gradients are enabled")


def test_no_step_reads_the_weights_of_what_is_kept():
    gm, hoisted = make()
    call = inputs()
    with torch.no_grad():
        want = gm(**call)
        hoisted(**call)
        for layer in (gm.text, gm.time, gm.both):
            layer.weight.data.fill_(torch.nan)  # which leaves no trace
        assert torch.equal(hoisted(**call), want)
        hoisted.reset()
        assert hoisted(**call).isnan().all()


FAST = ["flux", "z_image"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in fuzz_hoist.FAMILIES])
def test_pipelines_compute_the_same_at_every_step(name):
    pipe = tiny_pipelines.make(name)
    part = "unet" if getattr(pipe, "unet", None) is not None else "transformer"
    call = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "latent", **tiny_pipelines.CALLS[name]}
    fxplug.rewrite_pipeline(pipe, {part: fxplug.load_pass("lora", at="**", rank=2, slots=2)}, prompt="a red ball", **call)
    plain = fxplug.lower(getattr(pipe, part))
    hoisted = fxplug.lower(getattr(pipe, part), hoist=True)
    computed = []  # in all stages before each call of the step
    hoisted._part("step").register_forward_pre_hook(
        lambda *_: computed.append(sum(count for stage, count in hoisted.counts.items() if stage != "step"))
    )
    steps = 3
    for prompt in ("a red ball", "a blue photo of gold", "a red ball"):
        setattr(pipe, part, plain)
        want = tiny_pipelines.draw(pipe, name, prompt, steps)
        setattr(pipe, part, hoisted)
        computed.clear()
        assert torch.equal(tiny_pipelines.draw(pipe, name, prompt, steps), want)
        assert computed[1] == computed[-1]  # for all steps at once; guidance is a second call
    away, others = hoisted._offload, name == "ltx2"  # which has calls of another form, that need all weights, in each step
    assert away is None if others else away.count_bytes() == 0 and away.stages
    counts = hoisted.counts
    assert counts["time"] in (steps, 2 * steps) and counts["conditions"] in (2, 3, 4) and counts["step"] >= 3 * steps


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in fuzz_hoist.FAMILIES])
def test_random_changes_between_calls_are_seen(name):
    subject = fuzz_hoist.Subject(name, 1, fuse=None)
    for turn in range(20):
        assert subject.call(), (turn, subject.last.__name__)
    assert fuzz_hoist.count_kept(subject.hoisted) > 10


# --- the rule


def test_bits_are_compared_and_not_values():
    class Sign(Denoiser):
        def forward(self, x, t, text):
            signed = self.text(text).clamp(0, 0).copysign(text[..., :1])
            return self.leave(F.gelu(self.enter(x) + (1 / signed).mean(1)[:, None]))

    gm, hoisted = make(Sign, {"conditions": ["text"]})
    zeros = torch.zeros(2, 3, 6)
    assert check(gm, hoisted, **{**inputs(), "text": zeros}) == {"conditions": 1}
    assert check(gm, hoisted, **{**inputs(), "text": -zeros}) == {"conditions": 1}


def test_expanded_and_unaligned_conditions_are_compared():
    gm, hoisted = make()
    text = torch.randn(1, 3, 6)
    call = {**inputs(), "text": text.expand(2, 3, 6), "t": torch.tensor(5.0).expand(2)}
    assert check(gm, hoisted, **call) == ALL
    assert check(gm, hoisted, **call) == {}
    text.data[0, 0, 0] += 1
    assert check(gm, hoisted, **call) == {"conditions": 1, "conditions+time": 1}
    memory = torch.randn(2 * 3 * 6 + 1)
    assert "conditions" in check(gm, hoisted, **{**inputs(), "text": memory[1:].view(2, 3, 6)})


def test_what_is_kept_lies_in_no_memory_of_the_caller():
    class View(Denoiser):
        def forward(self, x, t, text):
            first = text.to(torch.float32)[:, 0, :4].unsqueeze(1)  # a view of the input
            return x * first + self.leave(self.text(text)).mean(1, keepdim=True), first, self.text(text)

    gm, hoisted = make(View, {"conditions": ["text"]})
    call, old = inputs(), inputs()["text"]
    check(gm, hoisted, **call)
    call["text"].numpy()[:] = 7.0  # the first text is gone from this memory, which the values of the stage may be in
    check(gm, hoisted, **call)
    assert check(gm, hoisted, **{**call, "text": old}) == {}
    with torch.no_grad():
        for result in hoisted(**{**call, "text": old}):
            result.zero_()  # a result is the caller's
    assert check(gm, hoisted, **{**call, "text": old}) == {}


WRITES = {
    "in place": lambda gm: gm.text.weight.add_(1.0),
    "another Parameter": lambda gm: setattr(gm.text, "weight", nn.Parameter(gm.text.weight + 1)),
    "its data": lambda gm: setattr(gm.text.weight, "data", gm.text.weight + 1),
    "load_state_dict": lambda gm: gm.load_state_dict({key: value + 1 for key, value in gm.state_dict().items()}),
    "assigned": lambda gm: gm.load_state_dict({key: value + 1 for key, value in gm.state_dict().items()}, assign=True),
    "double": lambda gm: gm.text.weight.copy_(gm.text.weight.double() * 1.1),
    "another layer": lambda gm: setattr(gm, "text", nn.Linear(6, 8)),
    "swapped": lambda gm: torch.utils.swap_tensors(gm.text.weight, nn.Parameter(gm.text.weight + 1)),
}


@pytest.mark.parametrize("way", WRITES)
def test_written_weights_are_seen(way):
    gm, hoisted = make()
    check(gm, hoisted, **inputs())
    with torch.no_grad():
        WRITES[way](gm)
    assert check(gm, hoisted, **inputs())["conditions"] == 1


def test_other_memory_at_the_address_of_a_weight_is_seen():
    gm, hoisted = make()
    memory = gm.text.weight.detach().numpy().copy()
    gm.text.weight.data = torch.from_numpy(memory)
    check(gm, hoisted, **inputs())
    memory += 1
    gm.text.weight.data = torch.from_numpy(memory)  # as an allocator may give an address again
    assert check(gm, hoisted, **inputs())["conditions"] == 1


@torch.no_grad()
def test_steps_that_count_no_version_up_are_seen():
    gm, hoisted = make()
    check(gm, hoisted, **inputs())
    for parameter in gm.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(gm.parameters(), 0.1, fused=True).step()  # which counts no version up
    check(gm, hoisted, **inputs())

    class ByAddress(torch.optim.Optimizer):  # as kernels of other libraries
        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(1)

    ByAddress(gm.parameters(), {}).step()
    check(gm, hoisted, **inputs())


def test_layers_that_change_are_seen():
    class Norm(Denoiser):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(6)

        def forward(self, x, t, text):
            return super().forward(x, t, self.norm(text))

    gm, hoisted = make(Norm)
    check(gm, hoisted, **inputs())
    gm.norm.eps = 0.5
    assert check(gm, hoisted, **inputs())["conditions"] == 1
    handle = gm.norm.register_forward_hook(lambda layer, args, out: out * 2)
    assert check(gm, hoisted, **inputs()) == {}  # nothing is kept while somebody hooks a layer of a stage
    handle.remove()
    check(gm, hoisted, **inputs())
    calls = []
    handle = nn.modules.module.register_module_forward_hook(lambda *args: calls.append(1))
    try:
        check(gm, hoisted, **inputs())
        assert calls
    finally:
        handle.remove()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hoisted(**inputs())
    assert counter.get_total_flops() == 2 * (6 * 6 * 8 + 2 * 4 * 8 + 6 * 8 * 8 + 10 * 4 * 8 + 10 * 8 * 4)


def test_modes_of_torch_are_seen():
    gm, hoisted = make()
    check(gm, hoisted, **inputs())
    with torch.autocast("cpu", torch.bfloat16):
        assert check(gm, hoisted, **inputs()) == ALL
    assert check(gm, hoisted, **inputs()) == {}
    with torch.inference_mode():
        assert is_same(hoisted(**inputs()), gm(**inputs()))
    assert hoisted.counts["conditions"] == 3
    matmul, threads = torch.backends.mkldnn.matmul, torch.get_num_threads()
    precision = matmul.fp32_precision
    for change, back in (
        (lambda: torch.set_num_threads(threads + 1), lambda: torch.set_num_threads(threads)),
        (lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)),
        (lambda: setattr(matmul, "fp32_precision", "bf16"), lambda: setattr(matmul, "fp32_precision", precision)),
        (lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)),
    ):
        try:
            change()
            assert check(gm, hoisted, **inputs()) == ALL
        finally:
            back()
        assert check(gm, hoisted, **inputs()) == {}


def test_with_gradients_and_in_training_nothing_is_kept():
    gm, hoisted = make()
    result = hoisted(**inputs())
    result.sum().backward()
    assert gm.text.weight.grad is not None and hoisted.counts == dict.fromkeys(hoisted.used, 0)
    hoisted.train()
    assert gm.training
    with torch.no_grad():
        hoisted(**inputs())
    assert hoisted.counts["step"] == 0
    hoisted.eval()
    assert check(gm, hoisted, **inputs()) == ALL


def test_what_draws_or_writes_is_of_the_step():
    class Odd(Denoiser):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.drop = nn.Dropout(0.5)

        def forward(self, x, t, text):
            self.calls += 1
            noise = torch.rand(text.shape[0], 1, 8, device=text.device)  # needs no input but a size
            q = self.text(self.drop(text))[:, None]
            attended = F.scaled_dot_product_attention(q, q, q, dropout_p=0.0)[:, 0]
            shifted = torch.zeros_like(attended)
            shifted[:, 0] = attended[:, 1]
            shifted += self.calls
            return self.leave(self.enter(x) + noise + attended.mean(1, keepdim=True) + shifted.mean(1, keepdim=True))

    gm, hoisted = make(Odd, {"conditions": ["text"]})
    assert hoisted.stages[0].operations >= 3  # the layer, and attention, which drops nothing
    other = copy.deepcopy(gm)
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            ours = hoisted(**inputs())
        torch.manual_seed(seed)
        with torch.no_grad():
            assert torch.equal(ours, other(**inputs()))
    assert hoisted.counts["conditions"] == 1 and gm.calls == other.calls == 3
    gm.drop.train()  # what draws in training alone is looked at when it is called
    with torch.no_grad():
        assert not torch.equal(hoisted(**inputs()), hoisted(**inputs()))


def test_inputs_that_share_memory_keep_nothing_where_one_is_written():
    class Writer(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.text = nn.Linear(6, 8), nn.Linear(6, 8)

        def forward(self, x, text):
            x.mul_(2)
            return self.enter(x) + self.text(text)

    gm, hoisted = make(Writer, {"conditions": ["text"]}, {"x": torch.randn(2, 6), "text": torch.randn(2, 6)})
    memory = torch.randn(4, 6)
    for rows in (slice(2, 4), slice(1, 3)):  # beside, and one row in common
        found = []
        for module in (hoisted, gm):
            own = memory.clone()
            with torch.no_grad():
                found.append(module(x=own[:2], text=own[rows]))
        assert is_same(*found) and "share memory" in hoisted.obstacle
    with torch.no_grad():
        hoisted(x=memory[:2].clone(), text=memory[2:].clone())
    assert hoisted.obstacle == "" and hoisted.counts["conditions"] == 1


def test_sizes_by_value_are_values():
    class Sized(Denoiser):
        def forward(self, x, t, text, count):
            size = x[:, :count].size(1)  # which no shape of an input tells
            return self.leave(self.enter(x)) + self.text(text)[:, :size].sum() * torch.ones(size).sum()

    call = {**inputs(), "count": 2}
    gm, hoisted = make(Sized, {"conditions": ["text"]}, call)
    for count in (2, 3, 2, 1):
        try:
            with torch.no_grad():
                want = gm(**{**call, "count": count})
        except FxplugError:
            continue
        with torch.no_grad():
            assert torch.equal(hoisted(**{**call, "count": count}), want)


def test_large_values_without_weights_are_computed_again():
    class Table(Denoiser):
        def forward(self, x, t, text):
            grid = torch.outer(text[0, :, 0].repeat(1000), torch.arange(2000.0)).cos()  # 24 MB of no weight
            return super().forward(x, t, text) + grid.mean()

    gm, hoisted = make(Table)
    check(gm, hoisted, **inputs())
    assert sum(row.kept_bytes for row in hoisted.stages) < 1 << 20


def test_equal_nodes_are_joined():
    class Twice(Denoiser):
        def forward(self, x, t, text):
            parts = [(text * 2).to(torch.float64).cos().float() for _ in range(5)]
            return self.leave(self.enter(x)) + sum(self.leave(self.text(part)).mean() for part in parts)

    gm, hoisted = make(Twice, {"conditions": ["text"]})
    cut = StageCut(gm.graph, gm, {"text": "conditions"})
    assert len([n for n in prepare_graph(gm.graph).nodes if n.target == "cos"]) == 5
    assert len([n for n in cut.graph.nodes if n.target == "cos"]) == 1
    check(gm, hoisted, **inputs())


def test_calls_that_the_graph_refuses_are_errors_as_before():
    gm, hoisted = make()
    for call in ({**inputs(), "t": 5}, {**inputs(), "text": None}, {**inputs(), "text": torch.ones(2, 3, 7)}):
        with torch.no_grad(), pytest.raises(Exception) as ours:
            hoisted(**call)
        with torch.no_grad(), pytest.raises(type(ours.value)) as theirs:
            gm(**call)
        assert str(theirs.value) == str(ours.value)
    check(gm, hoisted, **inputs())
    assert check(gm, hoisted, **inputs()) == {}


def test_limits_bound_what_is_kept():
    gm, hoisted = make()
    hoisted.limit(conditions=2, times=3)
    for seed in range(4):
        for time in range(5):
            check(gm, hoisted, **inputs(seed, time=float(time)))
    assert len(hoisted._planner.known.rows) == 2
    assert len({key.time for key in hoisted._planner.kept.rows if key.stage == "time"}) == 3
    size = sum(row.kept_bytes for row in hoisted.stages)
    hoisted.limit(bytes=size // 2)
    for seed in range(4):
        check(gm, hoisted, **inputs(seed))
    assert sum(row.kept_bytes for row in hoisted.stages) <= size // 2
    for wrong in ({"conditions": 0}, {"times": True}, {"bytes": "1 GiB"}):
        with pytest.raises(SpecError, match=f"limit: {next(iter(wrong))} must be a whole number"):
            hoisted.limit(**wrong)


def test_a_condition_that_changes_at_every_call_is_said_once():
    gm, hoisted = make()
    with pytest.warns(UserWarning, match="hoist: the condition 'text' changed in each of the last"):
        for seed in range(IN_TURN + 1):
            check(gm, hoisted, **inputs(seed))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(2 * IN_TURN):
            check(gm, hoisted, **inputs(seed))


# --- groups


def test_groups_are_checked():
    gm = fxplug.trace(Denoiser().eval(), kwargs=inputs())
    wrong = {
        r"no input 'txt'\. Did you mean 'text'\?|no input 'txt'": {"conditions": ["txt"]},
        "no group 'times'": {"times": ["t"]},
        "must be a list of inputs, not 'text'": {"conditions": "text"},
        "'t' is in both groups": {"conditions": ["t"], "time": ["t"]},
        "the groups name no input": {"conditions": []},
        "hoist must be False, True, or a mapping": "auto",
        "hoist=True reads what the run of a pipeline has noted": True,
    }
    for message, hoist in wrong.items():
        with pytest.raises(SpecError, match=message):
            fxplug.lower(gm, hoist=hoist)


def test_nothing_to_hoist_names_the_node_in_the_way():
    class Mixed(Denoiser):
        def forward(self, x, t, text):
            return self.leave(self.enter(x) + self.text(text + x.mean()).mean(1, keepdim=True))

    with pytest.raises(SpecError, match="nothing can be hoisted: of text the first reader, 'add', needs the input 'x'"):
        make(Mixed, {"conditions": ["text"]})


# --- all at once, and weights that leave


def test_prepare_fills_all_stages_in_one_visit():
    gm, hoisted = make()
    call, times = inputs(), [9.0, 5.0, 1.0]
    hoisted.prepare(**{**call, "x": torch.full_like(call["x"], torch.nan)}, times=torch.tensor(times))
    assert hoisted.counts == {"always": 1, "conditions": 1, "time": 3, "conditions+time": 3, "step": 0}
    for time in times:
        assert check(gm, hoisted, **inputs(time=time)) == {}
        assert check(gm, hoisted, **{**call, "t": torch.tensor(time).expand(2)}) != {}  # of other strides
    for wrong in ("now", [], [None]):
        with pytest.raises(SpecError, match="prepare: times must be"):
            hoisted.prepare(**call, times=wrong)
    with pytest.raises(SpecError, match="prepare: nothing is kept of this call, because it is in training"):
        hoisted.train().prepare(**call)


def test_weights_that_no_step_reads_leave():
    """The CPU stands for the device: where weights are away, what is there in their place is the host's."""
    gm, hoisted = make()
    with pytest.raises(SpecError, match=r"the times of a run are not known.*prepare\(\.\.\., times=scheduler\.timesteps\)"):
        hoisted.offload("cpu")
    times = [9.0, 5.0]
    plain = copy.deepcopy(gm)
    hoisted.prepare(**inputs(), times=times)
    hoisted.offload("cpu")
    early = {name: value.nbytes for name, value in gm.named_parameters() if name.startswith(("text.", "time.", "both."))}
    found = {id(t): t.nbytes for own in hoisted._offload.stages.values() for t in own}
    assert sum(found.values()) == sum(early.values())
    assert hoisted._offload.count_bytes() == 0
    seen = []
    for name in hoisted.used:
        part = hoisted._part(name)
        part.register_forward_pre_hook(lambda *_, name=name: seen.append((name, hoisted._offload.count_bytes())))
    for time in times:
        assert check(plain, hoisted, **inputs(time=time)) == {}
    assert seen == [("step", 0)] * 2
    seen.clear()
    assert check(plain, hoisted, **inputs(1, time=9.0)) == {"conditions": 1, "conditions+time": 2}  # for both times at once
    assert check(plain, hoisted, **inputs(1, time=5.0)) == {}
    sizes = [sum(early[f"{part}.{kind}"] for kind in ("weight", "bias")) for part in ("text", "both")]
    assert seen == [("conditions", sizes[0]), *[("conditions+time", sizes[1])] * 2, *[("step", 0)] * 2]
    assert torch.equal(hoisted(**inputs()), plain(**inputs()))  # with gradients all weights come back
    with torch.no_grad():
        for module in (plain, gm):
            module.text.weight.add_(1)
    assert check(plain, hoisted, **inputs(1, time=9.0))["conditions"] == 1
    for part in hoisted._parts.values():
        part._forward_pre_hooks.clear()
    hoisted.offload(None)
    assert check(plain, hoisted, **inputs(1, time=9.0)) == {}


class Scheduler:
    def __init__(self, times):
        self.config, self.times = SimpleNamespace(num_train_timesteps=100), times

    def set_timesteps(self):
        self.timesteps = torch.tensor(self.times)


class Pipe:
    """Draws with a denoiser that is told a time for each of the scheduler's; `text` may be another one in each step."""

    def __init__(self, model, times, tell=lambda time: time):
        self.model, self.scheduler, self.tell = model, Scheduler(times), tell

    @torch.no_grad()
    def __call__(self, seed=0, texts=()):
        self.scheduler.set_timesteps()
        call, made = inputs(seed), []
        for number, time in enumerate(self.scheduler.timesteps):
            call["t"] = self.tell(time).float().expand(2)
            call["text"] = texts[number] if texts else call["text"]
            made.append(self.model(**call))
        return torch.stack(made)


def make_noted(**options):
    """A module as the run of a pipeline leaves it, and the same hoisted."""
    gm = fxplug.trace(Denoiser().eval(), kwargs=inputs())
    gm.meta["input_groups"] = GROUPS
    return gm, fxplug.lower(gm, fuse=None, hoist=True, **options)


FORMS = {
    "as it is": lambda t: t, "a share": lambda t: t / 100, "the rest of one": lambda t: 1 - t / 100,
    "of a whole number": lambda t: t.long(), "of another kind": lambda t: t.sqrt(),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_times_of_a_pipeline_are_computed_at_its_first_call(form):
    gm, hoisted = make_noted()
    pipes = [Pipe(model, [97.0, 50.0, 3.0], FORMS[form]) for model in (gm, hoisted)]
    for seed in (0, 1):
        assert torch.equal(pipes[0](seed), pipes[1](seed))
    assert hoisted.counts == {"always": 1, "conditions": 2, "time": 3, "conditions+time": 6, "step": 6}
    assert hoisted._offload is None if form == "of another kind" else hoisted._offload.count_bytes() == 0


def test_another_form_of_the_times_is_taken_where_the_first_was_not_the_right_one():
    gm, hoisted = make_noted()
    pipes = [Pipe(model, [50.0, 20.0, 10.0, 3.0], FORMS["the rest of one"]) for model in (gm, hoisted)]  # 0.5 is a share, too
    assert torch.equal(pipes[0](), pipes[1]())
    assert hoisted.counts["time"] == 4 + 3


def test_a_pipeline_computes_no_more_early_than_is_kept():
    texts = [inputs(seed)["text"] for seed in range(40)]
    times = [float(time) for time in range(40, 0, -1)]
    for limits, most in (({"times": 10}, 4), ({"bytes": 2000}, 40), ({}, 1)):
        gm, hoisted = make_noted()
        hoisted.limit(**limits)
        assert torch.equal(Pipe(gm, times)(), Pipe(hoisted, times)())
        assert hoisted.counts["time"] <= 2 * len(times), limits
        assert hoisted.counts["conditions"] <= most, limits
    assert hoisted._offload.count_bytes() == 0
    with pytest.warns(UserWarning, match="changed in each of the last"):
        assert torch.equal(Pipe(gm, times)(0, texts), Pipe(hoisted, times)(0, texts))  # another prompt in each step
    assert hoisted.counts["conditions+time"] < 12 * len(times) and hoisted._offload is None
    assert torch.equal(Pipe(gm, times)(), Pipe(hoisted, times)())
    assert hoisted._offload.count_bytes() == 0
    hoisted.offload(None)
    assert torch.equal(Pipe(gm, times)(5), Pipe(hoisted, times)(5)) and hoisted._offload is None  # for good


def test_weights_that_left_by_themselves_are_moved_saved_and_loaded(tmp_path):
    gm, hoisted = make_noted()
    times = [9.0, 7.0]
    pipes = Pipe(gm, times), Pipe(hoisted, times)
    pipes[1]()
    hoisted.to(torch.float64).to(torch.float32)
    assert torch.equal(pipes[0](), pipes[1]()) and hoisted._offload.count_bytes() == 0
    fxplug.save(hoisted, tmp_path / "it")
    assert is_same(fxplug.load(tmp_path / "it")(**inputs()), gm(**inputs()))
    hoisted.load_state_dict({key: value + 1 for key, value in hoisted.state_dict().items()})
    assert torch.equal(pipes[0](), pipes[1]())
    twin = copy.deepcopy(pipes[1])
    assert torch.equal(pipes[0](), twin()) and twin.model._offload.count_bytes() == 0
    for scheduler in (SimpleNamespace(timesteps="now"), SimpleNamespace(timesteps=[[9.0], [7.0]]), SimpleNamespace(
            timesteps=torch.tensor([]), sigmas=torch.tensor([]), config={}), SimpleNamespace(timesteps=None)):  # fmt: skip
        hoisted.reset()
        Around.scheduler = scheduler
        with torch.no_grad():
            assert is_same(Around(hoisted)(**inputs()), Around(gm)(**inputs()))
    with pytest.raises(TypeError, match=r"a HoistedModule cannot be pickled: use fxplug.save"):
        pickle.dumps(hoisted)
    assert is_same(copy.copy(hoisted)(**inputs()), gm(**inputs()))


@pytest.mark.slow
def test_a_modular_pipeline_sees_what_a_hoisted_model_takes():
    case = modular.made("flux3")
    fxplug.rewrite_pipeline(case.pipe, {"transformer": ()}, **case.call)
    want = case()
    hoisted = fxplug.lower(case.pipe.transformer, fuse=None, hoist=True)
    case.pipe.update_components(transformer=hoisted)
    assert torch.equal(case(), want) and hoisted.counts["time"] == modular.STEPS


# --- with what else there is


def test_a_hoisted_module_is_saved_as_its_source_and_its_groups(tmp_path):
    gm, hoisted = make()
    gm = fxplug.apply(gm, fxplug.load_pass("lora", at="**", rank=2, slots=2))
    hoisted = fxplug.lower(gm, hoist=GROUPS)
    fxplug.save(hoisted, tmp_path / "it")
    loaded = fxplug.load(tmp_path / "it")
    assert [n.name for n in loaded.graph.nodes] == [n.name for n in gm.graph.nodes] and "input_groups" not in gm.meta
    again = fxplug.lower(loaded, hoist=True)
    assert again.groups == hoisted.groups
    check(again.module, again, **inputs())
    assert is_same(again(**inputs()), hoisted(**inputs()))
    twin = copy.deepcopy(hoisted)
    check(twin.module, twin, **inputs())
    with torch.no_grad():
        twin.text.weight.add_(1)
    assert check(hoisted.module, hoisted, **inputs()) == ALL
    assert check(hoisted.module, hoisted, **inputs()) == {}


@pytest.mark.parametrize("options", [{}, {"merge": "live"}, {"merge": "fold"}, {"merge": "auto"}, {"fuse": "fused"}], ids=str)
def test_slots_are_switched_in_every_form(options):
    gm, _ = make()
    gm = fxplug.apply(gm, fxplug.load_pass("lora", at="**", rank=2, slots=2))
    for seed, name in enumerate(("ink", "film")):
        gm.adapters.load(name, fuzz_hoist.make_adapter(gm, seed))
    hoisted = fxplug.lower(gm, hoist=GROUPS, **options)
    plain = hoisted.module
    check(plain, hoisted, **inputs())
    if options.get("merge") == "fold":
        return
    choices = ["ink", {"ink": 0.5, "film": -1.0}, None, "film", "ink"]
    choices += [] if "merge" in options else [["ink", "film"], ["film", None], ["ink", "film"]]
    for choice in choices:
        hoisted.adapters.use(choice)
        check(plain, hoisted, **inputs())
        assert check(plain, hoisted, **inputs()) == {}
    if "merge" not in options:
        hoisted.adapters.use("ink")
        assert check(plain, hoisted, **inputs()) == {}  # a switch back finds what was kept
        with hoisted.adapters.using("film"):
            check(plain, hoisted, **inputs())
        assert check(plain, hoisted, **inputs()) == {}
    hoisted.adapters.load("ink", fuzz_hoist.make_adapter(plain, 7), replace=True)
    check(plain, hoisted, **inputs())


def test_slots_of_a_gathered_bank_are_switched():
    plain, _ = make()
    gm = fxplug.apply(plain, fxplug.load_pass("dora", at="**", rank=2, slots=4, per_sample=2))
    for seed, name in enumerate(("ink", "film", "oil")):
        gm.adapters.load(name, fuzz_hoist.make_adapter(plain, seed))
    hoisted = fxplug.lower(gm, fuse=None, hoist=GROUPS)
    choices = [["ink", None], [{"film": 0.5, "oil": -1.0}, "film"], [{"oil": -1.0, "film": 0.5}, "film"], "oil"]
    for choice in [*choices, *(hoisted.adapters.rows(each) for each in choices)]:
        with hoisted.adapters.using(choice):
            check(gm, hoisted, **inputs())
            assert check(gm, hoisted, **inputs()) == {}
        hoisted.adapters.use(choice)
        assert check(gm, hoisted, **inputs()) == {}
    (table,) = hoisted._planner._tables
    table.which.fill_(3)  # of all numbers that a table has these alone: each sample takes the zeros
    assert check(gm, hoisted, **inputs())
    with torch.no_grad():
        hoisted.adapters.use(None)
        want = gm(**inputs())
        hoisted.adapters.use("ink")
        assert not torch.equal(hoisted(**inputs()), want)


@pytest.mark.filterwarnings("ignore:hoist. the condition")  # three threads have more than are kept
def test_threads_with_other_adapters_and_prompts_get_their_own():
    gm, _ = make()
    gm = fxplug.apply(gm, fxplug.load_pass("lora", at="**", rank=2, slots=2))
    for seed, name in enumerate(("ink", "film")):
        gm.adapters.load(name, fuzz_hoist.make_adapter(gm, seed))
    hoisted = fxplug.lower(gm, fuse=None, hoist=GROUPS).limit(conditions=2, times=2)
    wrong = []

    def work(number):
        for turn in range(30):
            call = inputs(turn % 3 + number, time=float(turn % 4))
            with torch.no_grad(), hoisted.adapters.using(["ink", "film"][(turn + number) % 2]):
                if not torch.equal(hoisted(**call), gm(**call)):
                    wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.slow
def test_stages_are_compiled_once():
    torch._dynamo.reset()
    gm, hoisted = make()
    gm = fxplug.apply(gm, fxplug.load_pass("lora", at="**", rank=2, slots=2))
    for seed, name in enumerate(("ink", "film")):
        gm.adapters.load(name, fuzz_hoist.make_adapter(gm, seed))
    hoisted = fxplug.lower(gm, fuse=None, hoist=GROUPS)
    counter = CompileCounterWithBackend("eager")
    hoisted.compile(backend=counter)
    plain = torch.compile(copy.deepcopy(gm), backend="eager", fullgraph=True)
    with torch.no_grad():
        for turn, choice in enumerate(["ink", "film", None, {"ink": 0.5}, "film"]):
            for module in (hoisted, plain):
                module.adapters.use(choice)
            assert torch.allclose(hoisted(**inputs(turn, time=float(turn))), plain(**inputs(turn, time=float(turn))), atol=1e-6)
    assert counter.frame_count == len(hoisted.used)
    with torch.no_grad(), pytest.raises(Exception, match=r"call its own compile\(\)"):
        torch.compile(hoisted, backend="eager")(**inputs())
    with torch.no_grad(), pytest.raises(Exception, match=r"call its own compile\(\)"):
        torch.compile(Around(hoisted), backend="eager", fullgraph=True)(**inputs())


class Around(nn.Module):
    scheduler = None

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **call):
        return self.inner(**call) + 1

    def __call__(self, **call):  # as a pipeline's, whose scheduler is asked
        return super().__call__(**call)


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.time, self.text, self.out = nn.Linear(4, width), nn.Linear(6, width), nn.Linear(width, width)
        self.wide = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(width, width), nn.GELU())))

    def forward(self, x, waves, text):
        return x + self.out(F.gelu(self.wide(x) + self.time(waves)[:, None] + self.text(text).mean(1, keepdim=True)))


class Blocks(Denoiser):
    def __init__(self):
        super().__init__()
        self.transformer_blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x, t, text):
        waves = torch.outer(t.float(), torch.arange(4, device=t.device).float()).cos()
        hidden = self.enter(x)
        for block in self.transformer_blocks:
            hidden = block(hidden, waves, text)
        return self.leave(hidden)


@pytest.mark.parametrize("regions", ["auto", True, ["transformer_blocks.*"]])
def test_the_step_is_outlined(regions):
    gm, hoisted = make(Blocks, outline=regions)
    assert list(hoisted._part("step").meta["nested"].values()) == [[f"transformer_blocks.{n}" for n in range(4)]]
    for time in (5.0, 4.0, 5.0):
        check(gm, hoisted, **inputs(time=time))
    assert hoisted.counts == {"always": 1, "conditions": 1, "time": 2, "step": 3}
    with pytest.raises(FxplugError, match="matches nothing|no region"):
        make(Blocks, outline=["layers.*"])
    _, alone = make(outline="auto")  # nothing is repeated
    assert "nested" not in alone._part("step").meta


@pytest.mark.slow
@pytest.mark.parametrize("policy", [fxplug.Every(3), fxplug.Threshold(2.0)], ids=str)
def test_a_step_cache_takes_the_step(policy):
    torch.manual_seed(0)
    gm = fxplug.apply(fxplug.trace(Blocks().eval(), kwargs=inputs()), fxplug.load_pass("first_block_cache"))
    gm = fxplug.apply(gm, fxplug.load_pass("lora", at="**", rank=2, slots=2))
    for seed, name in enumerate(("ink", "film")):
        gm.adapters.load(name, fuzz_hoist.make_adapter(gm, seed))
    plain = fxplug.StepCache(gm, policy, clock="t")
    hoisted = fxplug.lower(gm, fuse=None, hoist=GROUPS)
    cached = fxplug.StepCache(hoisted, policy, clock="t")
    again = copy.deepcopy(cached)
    for run, adapter in enumerate((None, "ink", "ink", {"ink": 0.5, "film": -1.0})):
        for module in (plain, again):
            module.adapters.use(adapter)  # those of `cached` are those of `plain`
        sample, texts = inputs(run // 2)["x"], [inputs(seed)["text"] for seed in (run // 2, run // 2 + 7)]
        for time in (9.0, 8.0, 7.0, 6.0, 5.0, 4.0):
            for text in texts:  # with a condition and without, at one time
                call = {"x": sample, "t": torch.full((2,), time), "text": text}
                with torch.no_grad():
                    want = plain(**call)
                    assert torch.equal(cached(**call), want) and torch.equal(again(**call), want)
            sample = sample + 0.01 * want
    assert cached.counts == plain.counts == again.counts and plain.counts["shallow"] > 5
    assert (hoisted.counts["time"], hoisted.counts["conditions"], hoisted.counts["step"]) == (18, 8, 48)
    cached.train()
    assert gm.training and not cached.eval().module.training
    cached.to(torch.float32)
    assert torch.equal(cached(**call), gm(**call))  # with gradients a step is computed in full


WAYS = {"batch": 1, "rows": 1, "ring": 2, "ulysses": 1, "tensor": 1}


class Mixed(nn.Module):
    """The condition has the dtype of what attention among all tokens gave; that and its sizes are numbers of the step."""

    def __init__(self):
        super().__init__()
        self.text, self.query, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, text):
        query = self.query(x).unflatten(-1, (2, 4)).transpose(1, 2)
        mixed = x + self.out(F.scaled_dot_product_attention(query, query, query).transpose(1, 2).flatten(2))
        return mixed + self.text(text).to(mixed.dtype)[:, None].expand(-1, mixed.shape[1], -1).cos()


def test_sizes_behind_an_exchange_are_found_without_one(monkeypatch):
    monkeypatch.setattr(pretended, "WAIT", 10)  # seconds: a thread that holds the guard would wait for the other

    def call(tokens):
        gen = torch.Generator().manual_seed(tokens)
        return {"x": torch.randn(2, tokens, 8, generator=gen), "text": torch.randn(2, 6, generator=gen)}

    torch.manual_seed(0)
    gm = fxplug.trace(Mixed().eval(), kwargs=call(6))
    split = fxplug.parallelize(gm, fxplug.parallel_plan(gm, (), call(6), ring=2))
    hoisted = fxplug.lower(split, fuse=None, hoist={"conditions": ["text"]})
    assert hoisted._cut.late and hoisted.used == ("conditions", "step")
    with torch.no_grad():
        for tokens in (6, 7, 6):  # of 7 one process has 4, and the other 3
            given = call(tokens)
            want = pretended.run_simulated(WAYS, lambda _, given=given: split(**given))
            for _ in range(2):
                found = pretended.run_simulated(WAYS, lambda _, given=given: hoisted(**given))
                assert all(map(torch.equal, found, want))
    assert hoisted.counts == {"conditions": 4, "step": 12}  # each process keeps its own


def test_what_does_not_go_together_is_refused():
    _, hoisted = make()
    with pytest.raises(SpecError, match="no value is marked to be cached"):
        fxplug.StepCache(hoisted, clock="t")
    with pytest.raises(SpecError, match="give one of x, t, text as clock="):
        fxplug.StepCache(hoisted)
    for refused in (fxplug.lower, fxplug.merge, lambda it: fxplug.export(it, "it.pt2", (), inputs())):
        with pytest.raises(SpecError, match="takes a traced module, not HoistedModule: give it what that was made from"):
            refused(hoisted)


def test_weights_do_not_leave_for_the_meta_device():
    _, hoisted = make()
    hoisted.prepare(**inputs(), times=[5.0])
    with pytest.raises(SpecError, match="meta device keeps no values"):
        hoisted.offload("meta")


def test_messages_are_said_in_words():
    _, hoisted = make()
    assert re.match(r"always: \d+, conditions: \d+, ", hoisted.extra_repr())
