"""ZhiJian's lines in graphs, held to the hooks that ZhiJian registers: outputs, gradients, and the places there are."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import timm
import torch
from small import net
from test_blitz import Own, Wrong, mlp_addin, narrow_mlp, quiet
from torch import nn
from zhijian.manual import LINES

import fxplug
from fxplug.compat.zhijian import AddinBase
from fxplug.core.errors import FxplugError

# --- held to hooks


def hooked(model, hooks):
    """A copy of a model with the hooks that ZhiJian registers: (path, "pre" or "post", method of an add-in)."""
    model = copy.deepcopy(model)
    for path, kind, call in hooks:
        module = model.get_submodule(path)
        module.register_forward_pre_hook(call) if kind == "pre" else module.register_forward_hook(call)
    return model


def same_step(new, reference, addins, name, *inputs):
    """Outputs, and the gradients of every add-in, weight and input, torch.equal to the hooked model's.

    `addins` has the add-ins of the reference by the path of their site.
    """
    for module in (new, reference, *addins.values()):
        module.zero_grad()
    mine, theirs = ([x.clone().requires_grad_(x.is_floating_point()) for x in inputs] for _ in range(2))
    a, b = new(*mine), reference(*theirs)
    assert torch.equal(a, b)
    weights = torch.randn_like(a)
    (a * weights).sum().backward()
    (b * weights).sum().backward()
    for x, y in zip(mine, theirs, strict=True):
        assert torch.equal(x.grad, y.grad) and x.grad.any()
    for key, parameter in reference.named_parameters():  # the base model's
        assert parameter.grad is not None and torch.equal(new.get_parameter(key).grad, parameter.grad), key
    for path, addin in addins.items():
        parameters = dict(addin.named_parameters())
        assert parameters
        for key, parameter in parameters.items():
            own = new.get_parameter(f"{name}.{path}.Addin.addin.{key}")
            assert torch.equal(own.grad, parameter.grad) and own.grad.any(), (path, key)


@pytest.fixture(scope="module")
def mlp():
    return narrow_mlp()


FORMS = {
    LINES[0]: lambda a: ("fc2", [("fc2", "pre", a.adapt_input)]),
    LINES[1]: lambda a: ("fc1", [("fc1", "post", a.adapt_output)]),
    LINES[2]: lambda a: ("fc3", [("fc2", "pre", a.get_pre), ("fc3", "pre", a.adapt_across_input)]),
    LINES[3]: lambda a: ("fc3", [("fc1", "post", a.get_post), ("fc3", "pre", a.adapt_across_input)]),
    LINES[4]: lambda a: ("fc2", [("fc2", "pre", a.get_pre), ("fc2", "post", a.adapt_across_output)]),
    LINES[5]: lambda a: ("fc2", [("fc1", "post", a.get_post), ("fc2", "post", a.adapt_across_output)]),
    # the manual's second figure: a method for inputs behind a module, where ZhiJian's hook fails for its third argument
    ">>> (MLPAddin.adapt_input): ...->(fc2){inout1}->...": lambda a: (
        "fc2",
        [("fc2", "post", lambda m, i, o: a.adapt_input(m, (o,)))],
    ),
    ">>> (MLPAddin.adapt_across_input): ...->(fc1){in1}->...->{out1}(fc3)->...`": lambda a: (
        "fc3",
        [("fc1", "post", a.get_post), ("fc3", "pre", a.adapt_across_input)],
    ),
    "(MLPAddin.adapt_across_input): (fc1){in1}->(fc2){out1}->...": lambda a: (
        "fc2",
        [("fc1", "post", a.get_post), ("fc2", "post", lambda m, i, o: a.adapt_across_input(m, (o,)))],
    ),
}


@pytest.mark.parametrize("line", FORMS)
def test_each_form_is_what_its_hooks_compute(mlp, line):
    model, gm, image = mlp
    addin = mlp_addin(out=256)
    theirs = copy.deepcopy(addin)
    path, hooks = FORMS[line](theirs)
    new = fxplug.apply(gm, quiet(line, addin))
    same_step(new, hooked(model, hooks), {path: theirs}, "blitz", image)
    assert not torch.equal(new(image), model(image))
    assert all(p.grad is None for p in addin.parameters())


def test_several_points_and_lines_are_several_add_ins(mlp):
    model, gm, image = mlp
    a, b, c = (mlp_addin() for _ in range(3))
    lines = [
        "(MLPAddin.adapt_across_input): ...->(fc1){in1}->{in2}(fc2)->{out1}(fc3){out2}->..., (Own.adapt): (fc2){inout1}",
    ]
    own = Own(0.25)
    # the second pair goes to an output, where the method gets the result as its inputs
    hooks = [
        ("fc2", "post", (their_own := copy.deepcopy(own)).adapt),
        ("fc1", "post", (first := copy.deepcopy(a)).get_post),
        ("fc3", "pre", first.adapt_across_input),
        ("fc2", "pre", (second := copy.deepcopy(a)).get_pre),
        ("fc3", "post", lambda m, i, o: second.adapt_across_input(m, (o,))),
    ]
    wide = copy.deepcopy(model)
    wide.fc3 = nn.Linear(256, 256)
    new = fxplug.apply(fxplug.trace(wide, (image,)), quiet(lines, {"MLPAddin": a, "Own": own}, name="two"))
    reference = hooked(wide, hooks)
    same_step(new, reference, {"fc2": their_own, "fc3": first}, "two", image)
    assert torch.equal(new.get_parameter("two.fc3.Addin_2.addin.fc1.weight").grad, second.fc1.weight.grad)


def vit(**options):
    torch.manual_seed(0)
    options = {"img_size": 32, "depth": 4, "num_classes": 10, "embed_dim": 48, "num_heads": 3, **options}
    return timm.create_model("vit_tiny_patch16_224", **options).eval()


@pytest.fixture(scope="module")
def blocks():
    model = vit()
    image = torch.randn(2, 3, 32, 32)
    return model, fxplug.trace(model, (image,)), image


class LoRA(AddinBase):
    """A low-rank update for the joint projection, as ZhiJian's: `adapt` behind a module."""

    def __init__(self, width=48, rank=4):
        super().__init__()
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, 3 * width, bias=False)

    def adapt(self, module, inputs, outputs):
        return outputs + self.up(self.down(inputs[0]))


@pytest.mark.parametrize(
    ("index", "numbers"), [("i", "0123"), ("0:4", "0123"), ("1:3", "12"), ("-1", "3"), ("::2", "02"), ("-2:", "23"), ("2", "2")]
)
def test_indices_are_places_with_an_add_in_each(blocks, index, numbers):
    model, gm, image = blocks
    addin = LoRA()
    theirs = {f"blocks.{n}.attn.qkv": copy.deepcopy(addin) for n in numbers}
    reference = hooked(model, [(path, "post", a.adapt) for path, a in theirs.items()])
    new = fxplug.apply(gm, fxplug.blitz(f"(LoRA.adapt): ...->(blocks[{index}].attn.qkv){{inout1}}->...", addin, name="lora"))
    same_step(new, reference, theirs, "lora", image)
    assert sum(p.numel() for p in new.lora.parameters()) == len(numbers) * sum(p.numel() for p in addin.parameters())


@pytest.mark.parametrize(
    ("line", "pairs"),
    [
        # ZhiJian's own line for Convpass, both ranges of one length
        (
            "...->(blocks[0:4].norm1){in1}->(blocks[0:4].drop_path1){in2}->...",
            [(f"{i}.norm1", f"{i}.drop_path1") for i in range(4)],
        ),
        ("...->(blocks[i].norm2){in1}->...->(blocks[i].mlp.fc2){out1}", [(f"{i}.norm2", f"{i}.mlp.fc2") for i in range(4)]),
        # from one block to the next, in step
        ("...->(blocks[0:3].norm1){in1}->(blocks[1:4].mlp){out1}", [(f"{i}.norm1", f"{i + 1}.mlp") for i in range(3)]),
        ("...->(blocks[:-1].norm1){in1}->(blocks[1:].mlp){out1}", [(f"{i}.norm1", f"{i + 1}.mlp") for i in range(3)]),
        # one value for all of them
        ("...->(blocks[0].norm1){in1}->(blocks[1:].mlp){out1}", [("0.norm1", f"{i}.mlp") for i in range(1, 4)]),
        ("...->(blocks[-2].norm1){in1}->(blocks[-1].mlp){out1}", [("2.norm1", "3.mlp")]),
    ],
)
def test_both_ends_of_a_range_pair_up(blocks, line, pairs):
    model, gm, image = blocks
    addin = mlp_addin(48)
    theirs, hooks = {}, []
    for start, end in pairs:
        theirs[f"blocks.{end}"] = own = copy.deepcopy(addin)
        hooks += [(f"blocks.{start}", "post", own.get_post), (f"blocks.{end}", "post", own.adapt_across_output)]
    new = fxplug.apply(gm, quiet(f"(MLPAddin.adapt_across_output): {line}", addin))
    same_step(new, hooked(model, hooks), theirs, "blitz", image)


@pytest.mark.parametrize("line", LINES)
def test_the_manuals_lines_work_on_the_blocks_of_a_vit(blocks, line):
    model, gm, image = blocks
    layers = {"fc1": "blocks.{}.norm2", "fc2": "blocks.{}.mlp", "fc3": "blocks.{}.ls2"}
    addin = mlp_addin(48)
    theirs, hooks = {}, []
    for number in range(4):
        own = copy.deepcopy(addin)
        path, found = FORMS[line](own)
        theirs[layers[path].format(number)] = own
        hooks += [(layers[p].format(number), kind, call) for p, kind, call in found]
    for name, path in layers.items():
        line = line.replace(f"({name})", f"({path.replace('.{}', '[i]')})")
    new = fxplug.apply(gm, quiet(line, addin))
    same_step(new, hooked(model, hooks), theirs, "blitz", image)


def test_dropout_in_an_add_in_draws_what_the_hooks_draw(blocks):
    class Dropped(LoRA):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def adapt(self, module, inputs, outputs):
            return outputs + self.drop(self.up(self.down(inputs[0])))

    model, image = vit(attn_drop_rate=0.2), blocks[2]  # what timm does in training only makes it two graphs
    gm = fxplug.trace(model, (image,))
    addin = Dropped()
    theirs = [copy.deepcopy(addin) for _ in range(4)]
    reference = hooked(model, [(f"blocks.{n}.attn.qkv", "post", theirs[n].adapt) for n in range(4)])
    new = fxplug.apply(gm, fxplug.blitz("(Dropped.adapt): ...->(blocks[i].attn.qkv){inout1}->...", addin))
    for mode in (True, False):
        new.train(mode)
        for module in (reference, *theirs):
            module.train(mode)
        torch.manual_seed(3)
        mine = new(image)
        torch.manual_seed(3)
        assert torch.equal(mine, reference(image))


# --- what a model does not have


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("...->(block[i].mlp.fc2){inout1}->...", "blocks."),
        ("...->(blocks[0:12].mlp.fc2){inout1}->...", "'{0:12}' in 'blocks.{0:12}.mlp.fc2' goes up to 12, but 'blocks' has 4"),
        ("...->(blocks[7].mlp.fc2){inout1}->...", "blocks.7.mlp.fc2"),
        ("...->(blocks[0].mpl){inout1}->...", "did you mean 'blocks.0.mlp'?"),
        ("...->(norm3)->(blocks[0].mlp){inout1}->...", "the line names 'norm3', and the model has no such module"),
        ("...->(blocks[1].mlp){in1}->(blocks[0].mlp){out1}->...", "flow"),
        ("...->(blocks[i].mlp){in1}->(blocks[1:].mlp){out1}->...", "paired in order"),
    ],
)
def test_a_place_that_is_not_there_is_named_with_the_nearest(blocks, line, found):
    text = f"(MLPAddin.adapt_across_output): {line}"
    with pytest.raises(FxplugError) as error:
        fxplug.apply(blocks[1], fxplug.blitz(text, mlp_addin(48)))
    assert found in str(error.value) and text in str(error.value)


def test_a_method_that_keeps_state_is_refused_when_it_is_applied(mlp):
    with pytest.raises(FxplugError) as error:
        fxplug.apply(mlp[1], fxplug.blitz("(Wrong.adapt_kept): (fc2){inout1}", Wrong()))
    said = "(Wrong.adapt_kept): (fc2){inout1}: blitz: Addin at 'fc2': Wrong.adapt_kept sets 'kept' of the add-in"
    assert said in str(error.value)


def test_a_weight_that_a_method_reads_is_the_base_models_own(mlp):
    model, gm, image = mlp
    new = fxplug.apply(gm, fxplug.blitz("(Wrong.adapt_weight): (fc2){inout1}", Wrong()))
    added = new.state_dict().keys() - gm.state_dict().keys()
    assert added == {f"blitz.fc2.Addin.addin.{key}" for key in ("mean", "count")}
    reference = hooked(model, [("fc2", "post", Wrong().adapt_weight)])
    same_step(new, reference, {}, "blitz", image)
    with torch.no_grad():
        plain = new(image)
        new.fc2.weight.mul_(2)
        assert not torch.equal(new(image), plain) and torch.equal(model.fc2.weight, new.fc2.weight)
        new.fc2.weight.div_(2)
        assert torch.equal(new(image), plain)


def test_a_constant_among_the_arguments_is_seen_and_cannot_be_changed():
    class Counts(AddinBase):
        def adapt_by(self, module, inputs):
            return inputs[0] * inputs[1], inputs[1]

        def adapt_to(self, module, inputs):
            return inputs[0], 4

    host, x = net(lambda self, x: self.mix(x, 3), mix=net(lambda self, a, n: a * n)), torch.randn(3)
    gm = fxplug.trace(host, (torch.randn(3),))
    assert torch.equal(fxplug.apply(gm, fxplug.blitz("(Counts.adapt_by): {inout1}(mix)", Counts()))(x), x * 3 * 3)
    with pytest.raises(FxplugError, match=r"returns \(tensor, 4\) before a module that is called with \(tensor, 3\)"):
        fxplug.apply(gm, fxplug.blitz("(Counts.adapt_to): {inout1}(mix)", Counts()))


def test_a_buffer_changed_in_place_lasts(mlp):
    _, gm, image = mlp
    new = fxplug.apply(gm, fxplug.blitz("(Wrong.adapt_in_place): (fc3){inout1}", Wrong()))
    plain = gm(image)
    assert [torch.equal(new(image), plain * n) for n in (1, 2, 3)] == [True] * 3


def test_a_module_with_several_arguments():
    class Pair(AddinBase):
        def adapt_both(self, module, inputs):
            return inputs[1], inputs[0] * 3

        def adapt_result(self, module, inputs, outputs):
            return outputs[0] - inputs[1], {"b": outputs[1]["b"]}

        def adapt_short(self, module, inputs, outputs):
            return outputs[0]

    mix = net(lambda self, a, b: (a * 2 + b, {"b": b}))
    model, x = net(lambda self, x: self.mix(x, x + 1)[0], mix=mix), torch.randn(3)
    gm = fxplug.trace(model, (x,))
    for method, place, kind in (("adapt_both", "{inout1}(mix)", "pre"), ("adapt_result", "(mix){inout1}", "post")):
        new = fxplug.apply(gm, fxplug.blitz(f"(Pair.{method}): {place}", Pair()))
        reference = hooked(model, [("mix", kind, getattr(Pair(), method))])
        assert torch.equal(new(x), reference(x)) and not torch.equal(new(x), model(x))
    with pytest.raises(FxplugError, match=r"Pair.adapt_short returns tensor after a module that returns \(tensor, {b: tensor}"):
        fxplug.apply(gm, fxplug.blitz("(Pair.adapt_short): (mix){inout1}", Pair()))


def test_the_cache_of_a_module_with_several_results_is_all_of_them():
    def forward(self, x):
        a, rest = self.split(x)
        return self.head(a) + rest["b"]

    class Both(AddinBase):
        def adapt_across_output(self, module, inputs, outputs):
            a, rest = self.inputs_cache
            return outputs * rest["b"] - a

    model = net(forward, split=net(lambda self, x: (x * 2, {"b": x + 1})), head=nn.Linear(3, 3))
    x, own = torch.randn(2, 3), Both()
    new = fxplug.apply(
        fxplug.trace(model, (x,)), fxplug.blitz("(Both.adapt_across_output): (split){in1}->(head){out1}", Both())
    )
    reference = hooked(model, [("split", "post", own.get_post), ("head", "post", own.adapt_across_output)])
    assert torch.equal(new(x), reference(x)) and not torch.equal(new(x), model(x))


def test_every_call_of_a_module_goes_through_its_one_add_in():
    layers = {"fc": nn.Linear(3, 3), "last": nn.Linear(3, 3)}
    model, x = net(lambda self, x: self.last(self.fc(torch.relu(self.fc(x)))), **layers), torch.randn(2, 3)
    own = Own(0.25)
    theirs = copy.deepcopy(own)
    new = fxplug.apply(fxplug.trace(model, (x,)), fxplug.blitz("(Own.adapt): (fc){inout1}", own))
    same_step(new, hooked(model, [("fc", "post", theirs.adapt)]), {"fc": theirs}, "blitz", x)

    for line in ("(fc){in1}->(last){out1}", "{in1}(fc)->(last){out1}"):
        with pytest.raises(FxplugError, match=r"at 'fc', which the model calls 2 times \(fc, fc@1\)"):
            fxplug.apply(fxplug.trace(model, (x,)), fxplug.blitz(f"(AddinBase.add_post): {line}", AddinBase()))


def test_ranges_of_ranges_are_all_of_them_and_pair_up():
    def cells():
        cell = lambda self, x: self.b(torch.relu(self.a(x)))  # noqa: E731
        return nn.Sequential(*(net(cell, a=nn.Linear(4, 4), b=nn.Linear(4, 4)) for _ in range(2)))

    grid = nn.Sequential(OrderedDict(stages=nn.Sequential(*(nn.Sequential(OrderedDict(cells=cells())) for _ in range(2)))))
    x, addin = torch.randn(2, 4), mlp_addin(4)
    theirs, hooks = {}, []
    for path in ("0.cells.0", "0.cells.1", "1.cells.0", "1.cells.1"):
        theirs[f"stages.{path}.b"] = own = copy.deepcopy(addin)
        hooks += [(f"stages.{path}.a", "pre", own.get_pre), (f"stages.{path}.b", "post", own.adapt_across_output)]
    line = "(MLPAddin.adapt_across_output): {in1}(stages[0:2].cells[i].a)->(stages[0:2].cells[i].b){out1}"
    new = fxplug.apply(fxplug.trace(grid, (x,)), fxplug.blitz(line, addin))
    same_step(new, hooked(grid, hooks), theirs, "blitz", x)


def test_keyword_arguments_are_left_as_they_are():
    mix = net(lambda self, a, b: a * 2 + b)
    model, x, own = net(lambda self, x: self.mix(x, b=x + 1), mix=mix), torch.randn(3), Own(3.0)
    for method in ("adapt_first", "adapt_all"):
        new = fxplug.apply(fxplug.trace(model, (x,)), fxplug.blitz(f"(Own.{method}): {{inout1}}(mix)", own))
        reference = hooked(model, [("mix", "pre", getattr(own, method))])
        assert torch.equal(new(x), reference(x)) and not torch.equal(new(x), model(x))
