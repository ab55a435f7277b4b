"""Calls in other forms than the traced one: each is a graph of its own on the same weights, and the model's to the bit."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import threading
from functools import cache

import pytest
import small
import torch
import unets
from sweeps import sweep
from torch import nn
from torch._dynamo.testing import CompileCounter

import fxplug

TIMES = {
    "int": 3, "float": 3.0, "a fraction": 0.3, "tensor": torch.tensor(3), "floating tensor": torch.tensor(3.5),
    "batch": torch.tensor([3, 900]), "one for all": torch.tensor([3]),
}  # fmt: skip


@cache
def _unet():
    unet = small.seeded(unets.sd15_model)
    return unet, small.seeded(lambda: unets.inputs(unet))


def _traced(model, args=(), kwargs=None, limit=8):
    return fxplug.variants(fxplug.trace(model, args, kwargs), model, limit)


def _first(out):
    return out[0] if isinstance(out, tuple) else out.sample


def _same(gm, model, call):
    with torch.no_grad():
        got, want = gm(**call), model(**call)
    assert type(got) is type(want)
    assert _first(got).dtype == _first(want).dtype and torch.equal(_first(got), _first(want))


def _lora(gm):
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="re:.*to_[qkv]$", rank=2))
    for name, parameter in new.named_parameters():
        if name.startswith("lora."):
            nn.init.normal_(parameter, std=0.1)
    return new


class Ways(nn.Module):
    """Goes another way for each kind of call; `scale` is a number that Python looks at."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.more = nn.Linear(4, 4)

    def forward(self, x, scale=1.0, more=None, steps=1):
        x = self.norm(self.layer(x))
        if scale > 2:
            x = x.relu()
        for _ in range(steps):
            x = x * scale
        return x if more is None else x + self.more(more)


def _adapted():
    """LoRA on the layers of such a model, with a variant of the trace from before it."""
    gm = _traced(small.seeded(Ways).eval(), torch.randn(2, 4))
    gm(torch.randn(2, 4), more=torch.randn(2, 4))
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="layer", rank=2))
    for name, parameter in new.named_parameters():
        if name.startswith("lora."):
            nn.init.normal_(parameter, std=0.1)
    return new


@pytest.fixture(scope="module")
def traced():
    unet, call = _unet()
    return _traced(unet, kwargs=call), unet, call


@pytest.mark.slow
@sweep("kind", TIMES, "int", "batch")
def test_a_timestep_is_what_the_model_takes(traced, kind):
    gm, unet, call = traced
    for again in range(2):
        _same(gm, unet, {**call, "timestep": TIMES[kind] + 40 * again})
    assert len([name for name in gm.variants if "timestep" in name]) <= 3  # others are of other tests


@pytest.mark.slow
@sweep("change", [
    {"return_dict": True}, {"encoder_attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1.0] * 5])},
    {"cross_attention_kwargs": {}}, {"sample": torch.randn(2, 4, 17, 17)},
], 0, ids=lambda change: next(iter(change)))  # fmt: skip
def test_what_is_given_and_what_is_left_out(change):
    unet, call = _unet()
    gm = _traced(unet, kwargs=call)
    _same(gm, unet, {**call, **change})
    _same(gm, unet, call)
    assert len(gm.variants) == 1


@pytest.mark.slow
def test_random_calls_are_the_models_or_refused():
    """Of SDXL's UNet, in all modes; what the model itself takes is refused at most where a check fails midway."""
    unet, draw, refused = small.seeded(unets.small_sdxl_model), random.Random(0), []
    call = small.seeded(lambda: unets.inputs(unet))
    gm, added = _traced(unet, kwargs=call, limit=24), call["added_cond_kwargs"]
    mask = torch.tensor([[1.0, 1, 1, 0, 0], [1.0] * 5])
    ways = [
        {"timestep": time} for time in (*TIMES.values(), True, -1)
    ] + [
        {"return_dict": True}, {"encoder_attention_mask": mask}, {"cross_attention_kwargs": {}}, {"timestep_cond": None},
        {"added_cond_kwargs": dict(reversed(added.items()))}, {"added_cond_kwargs": {**added, "more": 1}},
        {"added_cond_kwargs": None}, {"encoder_hidden_states": call["encoder_hidden_states"][:1]},
    ]  # fmt: skip
    for _ in range(40):
        given = {**call, **draw.choice(ways), **draw.choice(ways)}
        args = [given.pop(name) for name in ("sample", "timestep", "encoder_hidden_states")] if draw.random() < 0.5 else []
        training, grad, cast = (draw.random() < 0.3 for _ in range(3))
        gm.train(training), unet.train(training)
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=cast):
            try:
                want = unet(*args, **given)
            except (RuntimeError, TypeError, ValueError):
                with pytest.raises((fxplug.GuardError, RuntimeError, TypeError, ValueError)):
                    gm(*args, **given)
                continue
            try:
                got = gm(*args, **given)
            except fxplug.GuardError as error:
                refused.append(str(error))
                continue
        assert type(got) is type(want) and _first(got).requires_grad == _first(want).requires_grad
        assert _first(got).dtype == _first(want).dtype and torch.equal(_first(got), _first(want))
    assert len(refused) < 5 and all("depends on" in text for text in refused), refused


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_module_is_cast_as_the_model_is(dtype):
    unet, call = (copy.deepcopy(value) for value in _unet())
    gm = copy.deepcopy(_traced(unet, kwargs=call))
    call = {**call, **{name: call[name].to(dtype) for name in ("sample", "encoder_hidden_states")}}
    _same(gm.to(dtype), unet.to(dtype), call)


@pytest.mark.slow
def test_autocast_decides_as_in_the_model(traced):
    gm, unet, call = traced
    with torch.autocast("cpu", torch.bfloat16):
        _same(gm, unet, call)


class Table(nn.Module):
    """Holds a table that is not a buffer: a cast of the model leaves it as it is."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.table = torch.arange(4.0) / 3

    def forward(self, x):
        return self.layer(x).float() + self.table


def test_what_is_no_buffer_keeps_its_dtype():
    model = Table()
    gm, x = _traced(model, torch.randn(2, 4)), torch.randn(2, 4).bfloat16()
    gm, model = copy.deepcopy(gm).to(torch.bfloat16), copy.deepcopy(model).to(torch.bfloat16)
    assert torch.equal(gm(x), model(x)) and gm(x).dtype == torch.float32
    assert torch.equal(gm.float()(x.float()), model.float()(x.float()))


@pytest.mark.slow
def test_passes_are_in_every_variant(traced):
    gm, _, call = traced
    new = _lora(_traced(_unet()[0], kwargs=call))
    with torch.no_grad():
        want = new(**call)[0]
        assert not torch.equal(want, gm(**call)[0])
        draws = torch.get_rng_state()
        for other in ({"timestep": 500}, {"timestep": torch.tensor([500, 500])}, {"return_dict": True}):
            assert torch.equal(_first(new(**{**call, **other})), want)
    assert torch.equal(torch.get_rng_state(), draws)
    assert new.variants == ["timestep: int", "timestep: tensor of 1 dimensions", "return_dict=True"]
    assert fxplug.show(new).endswith("\n".join(f"# variant: {label}" for label in new.variants) + "\n")
    for parameter in new.parameters():
        parameter.grad = None
    new.train()(**{**call, "timestep": 7})[0].sum().backward()
    assert all(p.grad is not None for name, p in new.named_parameters() if name.startswith("lora."))


def test_variants_follow_copies_lowerings_and_further_passes():
    new, x = _adapted(), torch.randn(2, 4)
    with torch.no_grad():
        want = new(x, more=x)
        twin = copy.deepcopy(new)
        for parameter in twin.parameters():
            parameter.mul_(1.5)
        assert twin.variants == new.variants and not torch.equal(twin(x, more=x), want)
        further = fxplug.apply(new, fxplug.load_pass("lora", name="further", at="layer", rank=1))
        assert torch.equal(further(x, more=x), want) and further.variants == ["more: float32 of 2 dimensions"]
        for options in ({"merge": True}, {"fuse": "fused"}):
            fast = fxplug.lower(new, **options)
            torch.testing.assert_close(fast(x, more=x), want)


def test_a_saved_module_has_its_variants(tmp_path):
    new, x = _adapted(), torch.randn(2, 4)
    calls = [{"x": x}, {"x": x, "more": x}, {"x": x, "scale": 0.5}]
    with torch.no_grad():
        want = [new(**each) for each in calls]
        fxplug.save(new, tmp_path / "saved")
        again = fxplug.load(tmp_path / "saved")
        assert again.variants == new.variants and all(map(torch.equal, want, (again(**each) for each in calls)))
        fxplug.save(again, tmp_path / "again")
        files = [[(tmp_path / name / file).read_bytes() for file in ("graph.json", "graph.txt")] for name in ("saved", "again")]
        assert files[0] == files[1] and len(json.loads(files[0][0])["variants"]) == 2
        further = fxplug.apply(again, fxplug.load_pass("lora", name="further", at="layer", rank=1))
        fxplug.save(further, tmp_path / "further")
        assert torch.equal(fxplug.load(tmp_path / "further")(**calls[2]), want[2])
        with pytest.raises(fxplug.GuardError, match="steps.*loaded from an artifact"):
            again(x, steps=3)


@pytest.mark.parametrize("change", [
    lambda d: d["variants"].append({"graphs": {}}),
    lambda d: d["variants"][0].update(more=1),
    lambda d: d.update(variants={}),
    lambda d: d["variants"].extend(d["variants"][:1] * 300),
    lambda d: d["variants"][0]["graphs"]["eval"].pop(0),
    lambda d: d["variants"][0]["graphs"]["eval"][0].update(args=[1]),
])  # fmt: skip
def test_a_damaged_variant_is_refused(tmp_path, change):
    gm = _traced(Ways().eval(), torch.randn(2, 4))
    gm(torch.randn(2, 4), 0.5)
    fxplug.save(gm, tmp_path)
    document = json.loads((tmp_path / "graph.json").read_text())
    change(document)
    (tmp_path / "graph.json").write_text(json.dumps(document))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    data = (tmp_path / "graph.json").read_bytes()
    manifest["files"]["graph.json"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(fxplug.ArtifactError):
        fxplug.load(tmp_path)


@pytest.mark.slow
def test_a_compiler_is_given_the_graph_that_fits():
    model, x, counter = Ways().eval(), torch.randn(2, 4), CompileCounter()
    gm = _traced(model, torch.randn(2, 4))
    compiled = torch.compile(gm, fullgraph=True, backend=counter)
    for call in ({"more": x}, {}, {"more": x}):
        assert torch.equal(compiled(x, **call), model(x, **call))
    assert counter.frame_count == 2 and gm.variants == ["more: float32 of 2 dimensions"]


def test_numbers_are_inputs_until_python_looks_at_them():
    model = Ways().eval()
    gm, x = _traced(model, torch.randn(2, 4)), torch.randn(2, 4)
    for scale in (0.5, -1.0, 0.1, 1.5, 3.0, 2.5, 1):
        assert torch.equal(gm(x, scale), model(x, scale))
    assert len(gm.variants) == 3  # up to 2, above, and a whole number
    for steps in (2, 3):
        assert torch.equal(gm(x, 0.5, steps=steps), model(x, 0.5, steps=steps))


def test_a_layer_that_only_a_variant_calls():
    model = Ways().eval()
    gm, x = _traced(model, torch.randn(2, 4)), torch.randn(2, 4)
    names = list(gm.state_dict())
    assert torch.equal(gm(x, more=x), model(x, more=x))
    assert list(gm.state_dict()) == names
    gm.load_state_dict({name: value * 2 for name, value in gm.state_dict().items()})
    assert torch.equal(gm(x, more=x), model(x, more=x))


def test_what_a_guard_ends_midway_is_not_done_twice():
    model, x = Ways(), torch.randn(8, 4)
    gm = _traced(model, torch.randn(8, 4), {"scale": 1.0})
    gm(x, 0.5)
    with pytest.raises(fxplug.GuardError, match="scale > 2"):
        gm(x, 3.0)  # the graph of scales has moved the statistics when it comes to the question
    assert gm.eval()(x, 3.0).equal(model.eval()(x, 3.0))


def test_more_ways_than_the_bound_are_refused_with_what_differs():
    model = Ways().eval()
    gm, x = _traced(model, torch.randn(2, 4), limit=1), torch.randn(2, 4)
    gm(x, more=x)
    with pytest.raises(fxplug.GuardError, match=r"limit of 1 variants is reached.*: float32 of 2 dimensions.*limit=N"):
        gm(x, 0.5)
    none = fxplug.trace(model, torch.randn(2, 4))
    with pytest.raises(fxplug.GuardError, match="trace again") as caught:
        none(x, 0.5)
    assert "added" not in str(caught.value) and none.variants == []


def test_a_model_that_was_changed_gives_no_variant():
    model = Ways().eval()
    gm, x = _traced(model, torch.randn(2, 4)), torch.randn(2, 4)
    model.norm.eps = 0.1
    with pytest.raises(fxplug.GuardError, match="changed since it was traced, at 'norm'"):
        gm(x, 0.5)
    model.norm.eps = 1e-5
    assert torch.equal(gm(x, 0.5), model(x, 0.5))


class Stubborn(nn.Module):
    """Leaves torch for one way of calling it, and takes no nan in another."""

    def forward(self, x, out=False, strict=False):
        if strict and x.isnan().any():
            raise ValueError("no nan")
        return torch.from_numpy(x.numpy() * 2) if out else x + 1


def test_what_the_model_refuses_may_be_fine_at_the_next_call():
    model, x = Stubborn(), torch.zeros(2)
    gm = _traced(model, x)
    with pytest.raises(fxplug.GuardError, match="outside torch .numpy"):
        gm(x, out=True)
    with pytest.raises(fxplug.GuardError, match="ValueError: no nan"):
        gm(x / 0, strict=True)
    assert torch.equal(gm(x, strict=True), model(x, strict=True))


def test_an_export_is_of_the_graph_for_its_example(tmp_path):
    gm, x = _traced(Ways().eval(), torch.randn(2, 4)), torch.randn(2, 4)
    fxplug.export(gm, tmp_path / "more.pt2", (x,), {"more": x})
    program = torch.export.load(tmp_path / "more.pt2").module()
    assert torch.equal(program(x, more=x), gm(x, more=x))


def test_a_graph_that_was_changed_by_hand_gives_none():
    model = Ways().eval()
    gm, x = _traced(model, torch.randn(2, 4)), torch.randn(2, 4)
    relu = next(node for node in gm.graph.nodes if node.op == "call_module")
    with gm.graph.inserting_after(relu):
        new = gm.graph.call_method("neg", (relu,))
    relu.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    gm.recompile()
    with pytest.raises(fxplug.GuardError, match="by hand"):
        gm(x, 0.5)


def test_what_the_model_does_not_take_is_told_in_its_words():
    model = Ways().eval()
    gm = _traced(model, torch.randn(2, 4))
    with pytest.raises(fxplug.GuardError, match="'x' had 2 dimensions.*the model itself fails on this call.*1D"):
        gm(torch.randn(4))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        gm(torch.randn(2, 5))
    with pytest.raises(TypeError, match="unexpected keyword"):
        gm(torch.randn(2, 4), other=1)
    assert gm.variants == []


def test_two_threads_add_one_variant():
    model = Ways().eval()
    gm, x = _traced(model, torch.randn(2, 4)), torch.randn(2, 4)
    found, start = [], threading.Barrier(4)

    def call():
        start.wait()
        found.append(gm(x, 0.5))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(torch.equal(each, model(x, 0.5)) for each in found) and len(gm.variants) == 1


# --- inputs that a module holds


@pytest.fixture(scope="module")
def controlled():
    unet, call = _unet()
    new = fxplug.apply(_traced(unet, kwargs=call), fxplug.load_pass("controlnet"))
    for name, parameter in new.named_parameters():
        if name.startswith("controlnet.cn.controlnet_"):
            nn.init.normal_(parameter, std=0.1)
    side = 8 * unet.config.sample_size
    return new, call, torch.rand(2, 3, side, side)


@pytest.mark.slow
def test_a_bound_input_is_that_of_every_call(controlled, tmp_path):
    new, call, picture = controlled
    with torch.no_grad():
        want, weak = (new(**call, cond=picture, strength=s)[0] for s in (0.7, 0.2))
        bound = new.bind(cond=picture, strength=0.7)
        assert torch.equal(bound(**call)[0], want) and not torch.equal(want, weak)
        assert torch.equal(bound(**call, strength=0.2)[0], weak)
        assert torch.equal(bound(**{**call, "return_dict": True}).sample, want)
        assert bound.bind(strength=0.2) is bound
        assert torch.equal(bound(**call)[0], weak) and torch.equal(bound(**{**call, "return_dict": True}).sample, weak)
        assert set(bound.state_dict()) == set(new.state_dict())
        fxplug.save(bound, tmp_path / "bound")
        again = fxplug.load(tmp_path / "bound")
        assert torch.equal(again(**call)[0], weak)
        assert torch.equal(again.bind(strength=0.7)(**call)[0], want)
        assert torch.equal(bound(**call)[0], weak)


@pytest.mark.slow
def test_another_bound_value_compiles_nothing(controlled):
    new, call, picture = controlled
    bound, counter = new.bind(cond=picture, strength=0.7), CompileCounter()
    compiled = torch.compile(bound, fullgraph=True, backend=counter)
    with torch.no_grad():
        for strength in (0.7, 0.1):
            bound.bind(strength=strength, cond=picture * strength)
            assert torch.equal(compiled(**call)[0], new(**call, cond=picture * strength, strength=strength)[0])
    assert counter.frame_count == 1


@pytest.mark.slow
def test_one_condition_is_that_of_a_whole_batch(controlled):
    new, call, picture = controlled
    with torch.no_grad():
        assert torch.equal(new(**call, cond=picture[:1])[0], new(**call, cond=picture[:1].expand_as(picture))[0])
    with pytest.raises(fxplug.GuardError, match="must have the shape") as caught:
        new(**call, cond=torch.cat([picture, picture]))
    assert "added" not in str(caught.value)


@pytest.mark.parametrize("inputs, message", [
    ({"strenth": 1.0}, "no input 'strenth' .did you mean 'strength'"),
    ({"return_dict": True}, "'return_dict' is True, a bool"),
    ({"sample": torch.randn(2, 4, 16, 16)}, "'timestep' comes after 'sample'"),
    ({"cond": "a.png"}, "'cond' is 'a.png', a str"),
])  # fmt: skip
def test_what_cannot_be_bound(controlled, inputs, message):
    with pytest.raises(fxplug.SpecError, match=message):
        controlled[0].bind(**inputs)


class Noisy(torch.autograd.Function):
    """Draws in its forward, where no graph can see it."""

    @staticmethod
    def forward(ctx, x):
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx, g):
        return g


DRAWING = {
    "function": (None, lambda layer, x: Noisy.apply(x)),
    "attention": (nn.MultiheadAttention(4, 2, dropout=0.5), lambda layer, x: layer(x, x, x)[0]),
    "recurrent": (nn.GRU(4, 4, num_layers=2, dropout=0.5), lambda layer, x: layer(x)[0]),
    "encoder": (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5), lambda layer, x: layer(x)),
    "rrelu": (nn.RReLU(), lambda layer, x: layer(x)),
    "pooling": (nn.FractionalMaxPool2d(1, output_ratio=0.9), lambda layer, x: layer(x)),
    "functional": (None, lambda layer, x: torch.rrelu(x, training=True)),
}


class LateGuard(nn.Module):
    """Draws random numbers, and only then takes another way for another size."""

    def __init__(self, name):
        super().__init__()
        self.name, self.layer = name, DRAWING[name][0]

    def forward(self, x):
        x = DRAWING[self.name][1](self.layer, x)
        for _ in range(x.shape[0]):
            x = x.sin()
        return x


@pytest.mark.parametrize("name", DRAWING)
def test_no_variant_answers_a_call_that_has_drawn_random_numbers(name):
    model = LateGuard(name).train()
    gm = _traced(model, torch.randn(2, 3, 4))
    torch.manual_seed(0)
    want = model(torch.ones(5, 3, 4))
    torch.manual_seed(0)
    try:
        assert torch.equal(gm(torch.ones(5, 3, 4)), want)
    except fxplug.GuardError as error:
        assert "depends on" in str(error)


class Padding(nn.Module):
    """Pads to a multiple of four behind a dropout, as denoisers do; `late` decides by a size that is computed."""

    def __init__(self, drop, late):
        super().__init__()
        self.dropout, self.late = nn.Dropout(drop), late

    def forward(self, x):
        y = self.dropout(x)
        if -(y.sin() if self.late else x.unsqueeze(0).flatten(0, 1)).shape[0] % 4 > 0:
            y = torch.cat([y, y[-1:].repeat(-len(x) % 4, 1)])
        return y


@pytest.mark.parametrize(("drop", "late"), [(0.5, False), (0.0, True)])
def test_a_decision_by_sizes_is_made_before_anything_is_drawn(drop, late):
    """And one that comes later is made where nothing was drawn: by a dropout that drops nothing."""
    model = Padding(drop, late).train()
    gm = _traced(model, torch.ones(4, 3))
    for rows in (6, 4, 8, 5):
        torch.manual_seed(rows)
        want = model(torch.ones(rows, 3))
        torch.manual_seed(rows)
        assert torch.equal(gm(torch.ones(rows, 3)), want)
    assert len(gm.variants) == 1


class Trying(nn.Module):
    """Goes on where an operation fails, with or without its result."""

    def __init__(self, used):
        super().__init__()
        self.used = used

    def forward(self, x):
        try:
            y = x.view(-1)
            x = x.sin()
        except RuntimeError:
            y = x.cos()
            x = x * 2
        return x + y.sum() if self.used else x


@pytest.mark.parametrize("used", [True, False])
def test_an_operation_in_a_try_that_fails_in_another_call_is_told(used):
    model = Trying(used)
    gm = _traced(model, torch.randn(2, 3))
    x = torch.randn(2, 3)
    assert torch.equal(gm(x), model(x))
    with pytest.raises(fxplug.GuardError, match="which the model may catch in a `try`.*view size.*could not be added"):
        gm(torch.randn(3, 2).t())


class Failing(nn.Module):
    """Has a mistake of its own in one way of calling, where numbers are given too."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x, n=1):
        if x.dtype == torch.float64:
            raise self.error
        return x * n


@pytest.mark.parametrize("error", [AttributeError("a"), KeyError("a"), AssertionError("a"), ZeroDivisionError("a")])
def test_what_the_model_raises_in_a_way_that_is_tried_is_a_guard_error(error):
    gm = _traced(Failing(error), (torch.ones(2), 3))
    with pytest.raises(fxplug.GuardError, match="the model itself fails on this call"):
        gm(torch.ones(2, dtype=torch.float64), 3)


def test_a_traced_module_alone_names_the_argument_and_keeps_no_model():
    model = Ways().eval()
    gm, x = fxplug.trace(model, torch.randn(2, 4)), torch.randn(2, 4)
    calls = ({"scale": 0.5}, "'scale' was 1.0.*now it is 0.5"), ({"more": x}, "'more'"), ({"steps": 2}, "'steps'")
    for call, message in calls:
        with pytest.raises(fxplug.GuardError, match=message) as caught:
            gm(x, **call)
        assert "added" not in str(caught.value)
    assert gm.variants == [] and fxplug.apply(gm, fxplug.load_pass("lora", at="layer", rank=2)).variants == []
    with pytest.raises(TypeError, match="variants"):
        fxplug.trace(model, x, variants=8)


@pytest.mark.parametrize("dtype, call, text", [
    (torch.float32, {"scale": 0.5}, "argument 'scale' was 1.0 when the model was traced"),
    (torch.float32, {"more": torch.ones(2, 4)}, "argument 'more' was None when the model was traced"),
    (torch.float64, {}, "argument 'x' was torch.float32 when the model was traced"),
])  # fmt: skip
def test_what_a_compiler_is_refused_has_the_sentence_of_the_guard(dtype, call, text):
    gm = fxplug.trace(Ways().eval(), torch.randn(2, 4))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"GuardError\(.*{text}"):
        torch.compile(gm, fullgraph=True, backend="eager")(torch.ones(2, 4, dtype=dtype), **call)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
def test_a_form_that_is_new_to_a_compiled_module_is_traced(inside):
    unet, call = _unet()
    gm, call = _traced(unet, kwargs=call), {**call, "return_dict": True}
    if inside:
        gm.compile(backend="eager", fullgraph=True)
    compiled = gm if inside else torch.compile(gm, backend="eager", fullgraph=True)
    _same(compiled, unet, call)


def test_what_a_model_decided_is_named_to_a_compiler():
    class Cast(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y.relu() if y.dtype == torch.float32 else y

    gm, x = fxplug.trace(Cast(4, 4).eval(), torch.randn(2, 4)), torch.randn(2, 4)
    compiled = torch.compile(gm, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(torch._dynamo.exc.Unsupported, match="GuardError.*y.dtype == t"):
        compiled(x)


def test_what_a_model_read_of_torch_is_named_to_a_compiler():
    class Read(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y.relu() if torch.is_grad_enabled() else y

    gm, x = fxplug.trace(Read(4, 4).eval(), torch.randn(2, 4)), torch.randn(2, 4)
    compiled = torch.compile(gm, fullgraph=True, backend="eager")
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.Unsupported, match="GuardError.*is_grad_enabled.*state in which"):
        compiled(x)


def test_a_rewritten_module_gets_its_passes_in_further_forms():
    model, x = small.seeded(Ways).eval(), torch.randn(2, 4)
    new = fxplug.apply(fxplug.trace(model, x), fxplug.load_pass("lora", at="layer", rank=2))
    wrapped = fxplug.variants(new, model)
    for parameter in wrapped.get_submodule("lora").parameters():
        nn.init.normal_(parameter)
    assert wrapped.get_parameter("layer.weight") is new.get_parameter("layer.weight")
    half = wrapped(x, 0.5)
    torch.testing.assert_close(half, new(x) * 0.5)
    assert not torch.equal(half, model(x, 0.5))


def test_leaves_of_the_trace_are_leaves_of_its_variants():
    model, x = Ways().eval(), torch.randn(2, 4)
    gm = fxplug.variants(fxplug.trace(model, x, leaf=["more"]), model)
    assert torch.equal(gm(x, more=x), model(x, more=x))
    assert fxplug.variants(gm, model, 1).variants == gm.variants


def _changed(model):
    model.norm.eps = 0.1
    return model


@pytest.mark.parametrize("made, model, message", [
    (lambda gm: gm, lambda m: _changed(m), "changed since: 'norm.eps' differs"),
    (lambda gm: gm, lambda m: Table(), "'Table' differs"),
    (lambda gm: gm, lambda m: 3, "the model that was traced, not 3"),
    (lambda gm: 3, lambda m: m, "takes a traced module, not int"),
    (lambda gm: fxplug.merge(fxplug.apply(gm, fxplug.load_pass("lora", at="layer", rank=2))), lambda m: m, "merged"),
    (lambda gm: (gm.recompile(), gm)[1], lambda m: m, "edited by hand"),
])  # fmt: skip
def test_what_gets_no_variants(made, model, message):
    traced = Ways().eval()
    gm = fxplug.trace(traced, torch.randn(2, 4))
    with pytest.raises(fxplug.SpecError, match=message):
        fxplug.variants(made(gm), model(traced))
