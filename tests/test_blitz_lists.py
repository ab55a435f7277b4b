"""Entries of ZhiJian's `addins:` lists: one add-in with many places, what it keeps between its calls, what it makes itself."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from small import net
from torch import nn

import fxplug
from fxplug.compat.zhijian import AddinBase
from fxplug.core.errors import FxplugError, SpecError

DEPTH = 3


def hooked(model, entries, addins):
    """A copy of a model with the hooks of these entries, as ZhiJian registers them."""
    model = copy.deepcopy(model)
    for entry, addin in zip(entries, addins, strict=True):
        for place, (method, side) in zip(entry["location"], entry["hook"], strict=True):
            module = model.get_submodule(".".join(map(str, place)))
            call = getattr(addin, method)
            module.register_forward_pre_hook(call) if side == "pre" else module.register_forward_hook(call)
    return model


def entry(kind, *hooks, **kwargs):
    """`("blocks.0.attn", method, side)` and so on, as an entry of a list."""
    places = [[int(part) if part.isdigit() else part for part in path.split(".")] for path, _, _ in hooks]
    made = {"name": kind.__name__, "location": places, "hook": [[method, side] for _, method, side in hooks]}
    return {**made, "kwargs": kwargs} if kwargs else made


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    options = {"img_size": 32, "depth": DEPTH, "num_classes": 10, "embed_dim": 24, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", **options).eval()
    image = torch.randn(2, 3, 32, 32)
    return model, fxplug.trace(model, (image,)), image


def same_as_hooks(vit, given, addin, images=None, training=False):
    """The rewritten model, after its outputs and gradients were held to those of hooks."""
    model, gm, image = vit
    images = [image, torch.randn(5, 3, 32, 32)] if images is None else images
    new = fxplug.apply(gm, fxplug.blitz(given, addin)).train(training)
    theirs = [copied(addin) for _ in given]
    reference = hooked(model, given, theirs).train(training)
    for one in theirs:
        one.train(training)
    own = {name: p for name, p in new.named_parameters() if name.startswith("blitz.")}
    homes = {id(one): home for one, home in zip(theirs, homes_of(new, given), strict=True)}
    assert sum(p.numel() for p in own.values()) == sum(p.numel() for one in theirs for p in one.parameters())
    for each in images:
        new.zero_grad()
        reference.zero_grad()
        torch.manual_seed(1)
        ours = new(each)
        torch.manual_seed(1)
        expected = reference(each)
        assert torch.equal(ours, expected) and not torch.equal(ours, gm.train(training)(each))
        for one in theirs:
            one.zero_grad()
        ours.square().sum().backward()
        expected.square().sum().backward()
        for one in theirs:
            for key, parameter in one.named_parameters():
                mine = own[f"{homes[id(one)]}.addin.{key}"]
                assert (mine.grad is None) == (parameter.grad is None)
                assert parameter.grad is None or torch.equal(mine.grad, parameter.grad), key
    gm.eval()
    return new


def homes_of(new, given):
    """For each entry the block that has its add-in."""
    sites = iter(new.meta["passes"][-1]["sites"])
    for one in given:
        blocks = {next(sites)["block"] for _ in one["hook"]}
        (home,) = (name for name in sorted(blocks) if "addin" in dict(new.get_submodule(name).named_children()))
        yield home


def copied(addin):
    """A new add-in with the same weights: a copy's methods would hold the first."""
    made = type(addin)()
    made.load_state_dict(addin.state_dict())
    return made


class Prompts(AddinBase):
    """Some tokens for each block, put in the place of the first behind the class token. Methods stand on the instance."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(DEPTH, 2, 24))
        self.scale, self.drop = nn.Linear(24, 24), nn.Dropout(0.5)
        for number in range(DEPTH):
            setattr(self, f"put_{number}", self.putting(number))

    def putting(self, number):
        def put(module, inputs):
            x = inputs[0]
            tokens = self.drop(self.scale(self.tokens[number])).expand(x.shape[0], -1, -1)
            return torch.cat((x[:, :1], tokens, x[:, 3:]), dim=1)

        return put


PROMPTS = entry(Prompts, *((f"blocks.{n}", f"put_{n}", "pre") for n in range(DEPTH)))


@pytest.mark.parametrize("training", [False, True])
def test_one_add_in_with_many_places_has_its_parameters_once(vit, training):
    new = same_as_hooks(vit, [PROMPTS], Prompts(), training=training)
    own = [name for name in new.state_dict() if name.startswith("blitz.")]
    assert own == [f"blitz.blocks.0.Addin.addin.{key}" for key in ("tokens", "scale.weight", "scale.bias")]


def test_two_entries_are_two_add_ins(vit):
    first, second = (entry(Prompts, (f"blocks.{n}", f"put_{n}", "pre")) for n in range(2))
    new = same_as_hooks(vit, [first, second], Prompts())
    assert {name.split(".Addin")[0] for name, _ in new.blitz.named_parameters()} == {"blocks.0", "blocks.1"}


def test_what_was_given_is_no_part_of_the_result(vit):
    _, gm, image = vit
    addin = Prompts()
    new = fxplug.apply(gm, fxplug.blitz([PROMPTS], addin))
    again = fxplug.apply(gm, fxplug.blitz([PROMPTS], addin))
    new(image).sum().backward()
    assert addin.tokens.grad is None and all(p.grad is None for p in again.blitz.parameters())


@pytest.mark.slow
def test_a_shared_add_in_is_trained_saved_and_loaded_as_one(vit, tmp_path):
    _, gm, image = vit
    new = copy.deepcopy(fxplug.apply(gm, fxplug.blitz([PROMPTS], Prompts)))
    before = new(image).detach()
    optimizer = torch.optim.SGD(new.blitz.parameters(), lr=0.1)
    new(image).square().sum().backward()
    optimizer.step()
    fxplug.save(new, tmp_path / "saved")
    loaded = fxplug.load(tmp_path / "saved")
    assert torch.equal(loaded(image), new(image)) and not torch.equal(new(image), before)
    assert [name for name in loaded.state_dict() if name.startswith("blitz.")] == [
        name for name in new.state_dict() if name.startswith("blitz.")
    ]
    assert torch.equal(torch.compile(loaded, fullgraph=True, backend="eager")(image), new(image))


class Around(AddinBase):
    """Adds what it made of an input, to what comes later: by the cache, by attributes, a list, a dict and a submodule's."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(24, 24)
        self.inner = nn.Module()
        self.seen, self.by_name = [], {}

    def adapt(self, module, inputs):
        self.inputs_cache = self.layer(inputs[0])
        self.kept, self.B, self.inner.shape = inputs[0], inputs[0].shape[0], inputs[0].shape
        return inputs[0] + self.inputs_cache

    def collect(self, module, inputs, outputs):
        self.seen.append(outputs.mean(1))
        self.by_name["last"] = outputs
        return outputs

    def use(self, module, inputs, outputs):
        rows, columns, width = self.inner.shape
        flat = self.layer(outputs.reshape(self.B * columns, 2, width // 2).reshape(rows, columns, width))
        result = outputs + flat + self.kept + self.by_name["last"] + sum(self.seen)[:, None] * len(self.seen)
        self.seen, self.by_name = [], {}
        return result


KEPT = entry(
    Around,
    # not in the order in which the model runs them
    ("blocks.2.mlp", "use", "post"),
    ("blocks.2", "adapt", "pre"),
    ("blocks.1", "collect", "post"),
    ("blocks.1.attn", "collect", "post"),
)


def test_what_an_add_in_keeps_its_later_calls_find(vit):
    same_as_hooks(vit, [KEPT], Around())


def test_the_methods_of_the_base_class_hand_a_value_on(vit):
    given = entry(AddinBase, ("blocks.0.norm2", "get_pre", "pre"), ("blocks.1.mlp", "add_post", "post"))
    other = entry(AddinBase, ("blocks.0.norm1", "get_post", "post"), ("blocks.2.mlp", "add_pre", "pre"))
    same_as_hooks(vit, [given, other], AddinBase())


def test_what_is_kept_is_in_a_program_of_torch_export_too(vit):
    _, gm, image = vit
    new = fxplug.apply(gm, fxplug.blitz([KEPT], Around()))
    program = torch.export.export(new, (image,))
    torch.testing.assert_close(program.module()(image), new(image))


class Modes(AddinBase):
    """Keeps what every call of a layer gives, in training something else."""

    def __init__(self):
        super().__init__()
        self.gain, self.all = nn.Parameter(torch.tensor(0.5)), ()

    def keep(self, module, inputs, outputs):
        self.all = (*self.all, outputs * 2 if self.training else outputs)
        return outputs

    def add(self, module, inputs, outputs):
        total, self.all = sum(part.mean() * n for n, part in enumerate(self.all, 1)), ()
        return outputs + self.gain * total


@pytest.mark.parametrize("training", [False, True])
def test_each_call_of_a_module_is_a_place_and_modes_are_apart(training):
    torch.manual_seed(0)
    # one layer is called twice
    forward = lambda self, x: self.last(self.fc(self.fc(x.mean((2, 3)).repeat(1, 8))))  # noqa: E731
    model, image = net(forward, fc=nn.Linear(24, 24), last=nn.Linear(24, 10)), torch.randn(2, 3, 32, 32)
    given = entry(Modes, ("last", "add", "post"), ("fc", "keep", "post"))
    new = same_as_hooks((model, fxplug.trace(model, (image,)), image), [given], Modes(), training=training)
    ours = new(image)
    assert not torch.equal(ours, new.train(not training)(image))


class Sums(AddinBase):
    """Goes on from one call of the model to the next."""

    def __init__(self):
        super().__init__()
        self.steps, self.all, self.last, self.ready = 0, [], None, set()

    def count(self, module, inputs, outputs):
        self.steps += 1
        return outputs * self.steps

    def gather(self, module, inputs, outputs):
        self.all.append(outputs)
        return outputs

    def before(self, module, inputs, outputs):
        outputs = outputs if self.last is None else outputs + self.last
        self.last = outputs
        return outputs

    def first(self, module, inputs, outputs):
        if not hasattr(self, "begun"):
            self.begun = outputs
        return outputs + self.begun

    def mark(self, module, inputs, outputs):
        self.ready.add("it")
        return outputs

    def parameter(self, module, inputs, outputs):
        self.made = nn.Parameter(torch.zeros(3))
        return outputs

    def plain(self, module, inputs, outputs):
        return outputs


@pytest.mark.parametrize(
    ("method", "finding"),
    [
        ("count", "Sums reads 'steps' from the previous call of the model"),
        ("gather", "Sums reads 'all' from the previous call"),
        ("before", "Sums reads 'last' from the previous call"),
        ("first", "Sums reads 'begun' from the previous call"),
        ("mark", "'Sums.ready' is a set that changes from call to call"),
        ("parameter", "sets 'made' of the add-in"),
    ],
)
def test_what_goes_on_from_call_to_call_of_the_model_is_refused(vit, method, finding):
    given = entry(Sums, ("blocks.0.mlp", method, "post"), ("blocks.1.mlp", method, "post"), ("blocks.2.mlp", "plain", "post"))
    with pytest.raises(FxplugError) as error:
        fxplug.apply(vit[1], fxplug.blitz([given], Sums()))
    assert finding in str(error.value)


class Fits(AddinBase):
    """Takes the width of what comes, as ZhiJian's SSF does."""

    def __init__(self, dim=1):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def adapt(self, module, inputs, outputs):
        if self.scale.shape[0] != outputs.shape[-1]:
            self.scale = nn.Parameter(torch.randn(outputs.shape[-1]))
        there = outputs.cuda().to("cuda:0", dtype=outputs.dtype).to(outputs.dtype)
        return outputs * self.scale.to(torch.device("cuda")) + there


def test_parameters_of_the_first_call_are_the_blocks_and_nothing_goes_to_another_device(vit):
    _, gm, image = vit
    given = [entry(Fits, ("blocks.0.mlp.act", "adapt", "post")), entry(Fits, ("blocks.1.mlp", "adapt", "post"), dim=24)]
    new = fxplug.apply(gm, fxplug.blitz(given, Fits))
    shapes = {name: list(p.shape) for name, p in new.named_parameters() if name.startswith("blitz.")}
    assert shapes == {"blitz.blocks.0.mlp.act.Addin.addin.scale": [96], "blitz.blocks.1.mlp.Addin.addin.scale": [24]}
    assert not any("cuda" in str(node.args) or node.target == "cuda" for graph in new.graphs.values() for node in graph.nodes)
    assert torch.isfinite(new(image)).all()


class Drops(AddinBase):
    """Draws numbers when it is made and when it runs."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(24, 24), nn.Dropout(0.5)

    def adapt(self, module, inputs, outputs):
        return outputs + self.drop(self.layer(outputs))


def test_one_seed_draws_the_weights_that_the_classes_draw(vit):
    given = [entry(Drops, (f"blocks.{n}.mlp", "adapt", "post")) for n in range(2)]
    torch.manual_seed(3)
    new = fxplug.apply(vit[1], fxplug.blitz(given, Drops))
    torch.manual_seed(3)
    for n in range(2):
        assert torch.equal(new.get_parameter(f"blitz.blocks.{n}.mlp.Addin.addin.layer.weight"), Drops().layer.weight)
    widths = [entry(Fits, (f"blocks.{n}.mlp", "adapt", "post")) for n in range(2)]
    scales = [p for _, p in fxplug.apply(vit[1], fxplug.blitz(widths, Fits)).blitz.named_parameters()]
    assert len(scales) == 2 and not torch.equal(*scales)


class Twice(AddinBase):
    """Runs the layer that it stands at once more."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def adapt(self, module, inputs, outputs):
        return outputs + self.gain * module.forward(inputs[0] * 2)


def test_a_layers_forward_runs_it_once_more_on_its_own_weights(vit):
    model, gm, image = vit
    new = same_as_hooks(vit, [entry(Twice, ("blocks.0.attn.qkv", "adapt", "post"))], Twice())
    assert new.state_dict().keys() - gm.state_dict().keys() == {"blitz.blocks.0.attn.qkv.Addin.addin.gain"}
    with pytest.raises(FxplugError, match="the add-in uses 'forward' of 'blocks.0.attn'"):
        fxplug.apply(gm, fxplug.blitz([entry(Twice, ("blocks.0.attn", "adapt", "post"))], Twice()))


class Broken(AddinBase):
    """Asks for a method that it has not, as ZhiJian's FacT does."""

    def __init__(self):
        super().__init__()
        self.adapt_0 = self.get_adapt(0)


def test_a_constructor_that_fails_is_told_as_such(vit):
    with pytest.raises(FxplugError, match="Broken fails in its constructor, as it does in ZhiJian: AttributeError: .*get_ad"):
        fxplug.apply(vit[1], fxplug.blitz([entry(Broken, ("blocks.0", "adapt_0", "pre"))], Broken))


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"nmae": "x"}, "line[0]: unknown key 'nmae' (did you mean 'name'?)"),
        ({"name": "a b"}, "line[0].name: must be the class of an add-in, not 'a b'"),
        ({"location": ["blocks"]}, "line[0].location: must be a list of places such as [blocks, 0, attn], not a list"),
        ({"hook": [["put_0", "before"]]}, "line[0].hook: must be a list of [method, pre] or [method, post]"),
        ({"hook": [["put_0", "pre"]]}, "line[0].hook: 1 hooks for 3 places; they are paired in order"),
        ({"kwargs": 3}, "line[0].kwargs: must be a mapping, not 3"),
        ({"kwargs": {"a": 3}}, "line[0].kwargs: has options for Prompts, which is an instance"),
        ({"hook": [["put_0", "pre"], ["put_9", "pre"], ["put_1", "pre"]]}, "Prompts has no method 'put_9' (did you mean 'put_"),
    ],
)
def test_an_entry_that_is_wrong_says_where(change, finding):
    with pytest.raises(SpecError) as error:
        fxplug.blitz([{**PROMPTS, **change}], Prompts())
    assert finding in str(error.value)
