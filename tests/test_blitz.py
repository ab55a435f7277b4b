"""ZhiJian's lines: what is read, what is refused and how it is said, and the block that calls a method."""

from __future__ import annotations

import functools
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from torch import nn

import fxplug
from fxplug.compat.zhijian import Addin, AddinBase, ModuleView, dict2args
from fxplug.compat.zhijian.line import parse
from fxplug.core.errors import SpecError

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))
from zhijian.manual import LINES, MLP, MLPAddin  # noqa: E402


def mlp_addin(width=256, out=None):
    """The manual's add-in, for values of this width."""
    return MLPAddin(SimpleNamespace(mlp_addin_output_size=out), SimpleNamespace(hidden_size=width))


@functools.cache
def narrow_mlp():
    """The manual's MLP, its first layer narrow so that pictures of 8 x 8 do; its graph, and pictures."""
    torch.manual_seed(0)
    model = MLP(None, 10)
    model.fc1 = nn.Linear(192, 256)
    image = torch.randn(5, 3, 8, 8)
    return model.eval(), fxplug.trace(model, (image,)), image


def quiet(*args, **kwargs):
    """`fxplug.blitz` without the warning about the manual's {in2}."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return fxplug.blitz(*args, **kwargs)


# --- the grammar


def read(text):
    """Lines as plain data: method, and for each insertion where its value is from and where it goes."""
    found = []
    for line in parse(text):
        ends = [(str(i.start or ""), str(i.end)) for i in line.insertions]
        found.append((f"{line.addin}.{line.method}", [(a.removeprefix("the "), b.removeprefix("the ")) for a, b in ends]))
    return found


@pytest.mark.parametrize(
    ("text", "method", "ends"),
    [
        (LINES[0], "adapt_input", [("", "input of 'fc2'")]),
        (LINES[1], "adapt_output", [("", "output of 'fc1'")]),
        (LINES[2], "adapt_across_input", [("input of 'fc2'", "input of 'fc3'")]),
        (LINES[3], "adapt_across_input", [("output of 'fc1'", "input of 'fc3'")]),
        (LINES[4], "adapt_across_output", [("input of 'fc2'", "output of 'fc2'")]),
        (LINES[5], "adapt_across_output", [("output of 'fc1'", "output of 'fc2'")]),
        # the manual's text, with its prompt and its stray backtick
        (">>> (MLPAddin.adapt_input): ...->(fc2){inout1}->...", "adapt_input", [("", "output of 'fc2'")]),
        (
            ">>> (MLPAddin.adapt_across_input): ...->(fc1){in1}->...->{out1}(fc3)->...`",
            "adapt_across_input",
            [("output of 'fc1'", "input of 'fc3'")],
        ),
        ("( MLPAddin . adapt_input ):...-> { inout1 } ( fc2 )\n ->...", "adapt_input", [("", "input of 'fc2'")]),
        ("(MLPAddin.f): input->(a.0.b[3]){inout7}->output", "f", [("", "output of 'a.0.b.3'")]),
        (
            "(MLPAddin.f): (a){in1}{inout1}->{in2}(b){out1}->(c)->{out2}(d)",
            "f",
            [("", "output of 'a'"), ("output of 'a'", "output of 'b'"), ("input of 'b'", "input of 'd'")],
        ),
    ],
)
def test_a_line_is_read(text, method, ends):
    assert read(text) == [(f"MLPAddin.{method}", ends)]


def test_several_lines_are_read_from_one_text():
    two = "(A.f): ...->{inout1}(fc2)->..., (B.g): ...->(fc3){inout1}->...,"
    expected = [("A.f", [("", "input of 'fc2'")]), ("B.g", [("", "output of 'fc3'")])]
    assert read(two) == read(two.replace(", ", "\n>>> ")) == expected


@pytest.mark.parametrize("index", ["i", "0:12", "0:12:2", ":12", "3:", "::2", "-1", "-2:", ":-1", "::-1"])
def test_indices_become_globs(index):
    (line,) = parse(f"(A.f): ...->(blocks[{index}].mlp.fc2){{inout1}}->...")
    place = line.insertions[0].end
    assert place.pattern() == f"blocks.{{{index}}}.mlp.fc2"
    assert place.pattern({0: "n"}) == f"blocks.{{{'i' if index == 'i' else f'n={index}'}}}.mlp.fc2"
    counted = {"0:12": 12, "0:12:2": 6, ":12": 12, "-1": 1}
    assert place.indices[0].count == counted.get(index)


WRONG = [
    ("", "expected '(' and the add-in"),
    ("MLPAddin.f: ...->{inout1}^(fc2)", "expected '(' and the add-in"),
    ("(MLPAddin^): ...", "expected '.' and a method, as in '(MLPAddin.adapt_input)', found ')'"),
    ("(MLPAddin.^): ...", "expected a method of MLPAddin, found ')'"),
    ("(A.f) ^...->{inout1}(fc2)", "expected ':' after '(A.f)', found '...'"),
    ("(A.f): ...->^{inuot1}(fc2)->...", "'{in1}' or '{out1}', not '{inuot1}' (did you mean 'inout'?)"),
    ("(A.f): ...->^{on1}(fc2)->...", "a point must be '{inout1}', '{in1}' or '{out1}', not '{on1}'"),
    ("(A.f): ...->^{inout}(fc2)->...", "'{in1}' or '{out1}', not '{inout}'"),
    ("(A.f): ...->^{1}(fc2)->...", "'{in1}' or '{out1}', not '{1}'"),
    ("(A.f): ...->^{in1(fc2)->...", "a point must be '{inout1}', '{in1}' or '{out1}'"),
    ("(A.f): ...->^{inout1}->(fc2)->...", "a point must be directly before or after a module"),
    ("(A.f): ...^{inout1}->(fc2)->...", "a point must be directly before or after a module"),
    ("(A.f): ...->^fc2{inout1}->...", "expected '...' or a module in brackets such as '(fc2)', found 'fc2'"),
    ("(A.f): ...->^", "such as '(fc2)', found the end of the line"),
    ("(A.f): ...^>(fc2){inout1}", "expected '->' or the end of the line, found '>'"),
    ("(A.f): (a){inout1}^(b)", "expected '->' or the end of the line, found '('"),
    ("(A.f): (a^]){inout1}", "expected ')' after the module, found ']'"),
    ("(A.f): (a.^){inout1}", "expected a name after the dot, found ')'"),
    ("(A.f): (^){inout1}", "expected the name of a module, as print(model) shows it, found ')'"),
    ("(A.f): (a[^]){inout1}", "expected a number, a range such as [0:12], or a variable such as [i], found '[]'"),
    ("(A.f): (a[^0:1.b){inout1}", "expected a number, a range such as [0:12], or a variable such as [i], found '[0:1.b'"),
    ("(A.f): (a[^0:4:0]){inout1}", "the step of a range cannot be 0"),
    ("(A.f): (a[^4:4]){inout1}", "the range [4:4] is empty"),
    ("^(A.f): ...->(fc2)->...", "this line has no place for the add-in"),
    ("(A.f): (a)^{in1}->...", "'{in1}' has no '{out1}', and they belong together"),
    ("(A.f): (a)->^{out2}(b)", "'{out2}' has no '{in2}', and they belong together"),
    ("(A.f): (a)^{in1}->{out2}(b)", "'{in1}' has no '{out1}', and they belong together; write '{inout1}'"),
    ("(A.f): (a)^{in1}->{in2}(b)->{in3}(c)", "'{in1}' has no '{out1}'"),
    ("(A.f): (a){in1}->^{in1}(b)", "'{in1}' is there twice: each point of a line needs its own number"),
    ("(A.f): ^{out1}(a)->(b){in1}", "'{out1}' runs before '{in1}', and a value can only flow to what runs later"),
    ("(A.f): ^{out1}(a){in1}", "'{out1}' runs before '{in1}'"),
    ("(A.f): (a){inout1}^{inout2}", "two points change the output of 'a': make two passes"),
    ("(A.f): (a[0:12]){in1}->(b)^{out1}", "'{in1}' matches several modules and '{out1}' one"),
    ("(A.f): (a[i]){in1}->(b)^{out1}", "'{in1}' matches several modules and '{out1}' one"),
    ("(A.f): (a[0:12].n){in1}->(a[0:11].d)^{out1}", "'{in1}' matches 12 modules and '{out1}' 11; they are paired in order"),
]


@pytest.mark.parametrize(("marked", "finding"), WRONG)
def test_what_is_wrong_is_pointed_at(marked, finding):
    at = marked.find("^") if "^" in marked else 0
    text = marked.replace("^", "", 1)
    at = 0 if text.startswith("MLPAddin") else at
    with pytest.raises(SpecError) as error:
        parse(text)
    said, line, caret = str(error.value).split("\n")
    assert finding in said
    assert line == f"  {text.rstrip()}" and caret == f"  {' ' * at}^"


def test_the_caret_is_under_the_line_that_is_wrong():
    with pytest.raises(SpecError) as error:
        parse("(A.f):\n  ...->{inout1}(fc2)\n  ->(fc3){inot2}->...")
    assert str(error.value).split("\n")[1:] == ["    ->(fc3){inot2}->...", " " * 11 + "^"]


@hypothesis.given(hypothesis.strategies.data())
@hypothesis.settings(max_examples=300, deadline=None, database=None)
def test_a_damaged_line_is_read_or_refused_with_a_caret(data):
    draw, whole = data.draw, hypothesis.strategies
    text = draw(whole.sampled_from([*LINES, "(A.f): input->{in1}(a.b[0:-1:2]){inout2}->\n(c[i]){out1}, (B.g): (d){inout1}"]))
    for _ in range(draw(whole.integers(1, 3))):
        at = draw(whole.integers(0, len(text)))
        put = draw(whole.sampled_from(["", " ", "\n", *"(){}[].:,->`1ix", "->", "...", "{in1}", "é"]))
        text = text[:at] + put + text[at + draw(whole.integers(0, 3)) :]
    try:
        lines = parse(text)
    except SpecError as error:
        assert str(error).endswith("^") and str(error).count("\n") == 2
        return
    assert lines and all(line.insertions and line.text for line in lines)
    assert [read(line.text)[0] for line in lines] == read(text)


def test_what_is_no_text_is_refused():
    with pytest.raises(SpecError, match="a line must be text"):
        parse(3)


# --- the manual's slips


@pytest.mark.parametrize("line", [line for line in LINES if "{in2}" in line])
def test_a_second_in_without_an_out_is_read_as_the_out_and_said(line):
    with pytest.warns(UserWarning) as caught:
        p = fxplug.blitz(line, mlp_addin())
    (warning,) = caught
    assert line in str(warning.message) and "'{in2}' is read as '{out1}'" in str(warning.message)
    assert warning.filename == __file__
    right = fxplug.blitz(line.replace("{in2}", "{out1}"), mlp_addin())
    assert [(r.match, r.place, r.args) for r in p.rules] == [(r.match, r.place, r.args) for r in right.rules]


def test_the_lines_of_the_manual_are_the_six_and_three_of_them_have_the_slip():
    assert len(LINES) == len(set(LINES)) == 6 and sum("{in2}" in line for line in LINES) == 3


# --- the add-ins that are given


class Own(AddinBase):
    """Adds what the module gets, times a number, to what it gives."""

    def __init__(self, start=0.5, config=None):
        super().__init__()
        self.config = config
        self.gain = nn.Parameter(torch.tensor(float(start)))

    def adapt(self, module, inputs, outputs):
        return outputs + self.gain * outputs.mean()

    def adapt_first(self, module, inputs):
        return inputs[0] * self.gain

    def adapt_all(self, module, inputs):
        return tuple(x * self.gain for x in inputs)

    def adapt_either(self, module, inputs, outputs=None):
        return (inputs[0] if outputs is None else outputs) * self.gain


LINE = "(Own.adapt): ...->(fc2){inout1}->..."


@pytest.mark.parametrize(
    ("addin", "finding"),
    [
        (SimpleNamespace(), "must be an add-in (an nn.Module)"),
        ({}, "must have an add-in for each of Own"),
        ({"Own": Own(), "Onw": Own()}, "no line names 'Onw' (did you mean 'Own'?)"),
        ({"Other": Own()}, "no line names 'Other'"),
        (MLPAddin, "no add-in 'Own'; there is MLPAddin"),
        ({"use": "a.b:Own", "opt": {}}, "unknown key 'opt' (did you mean 'options'?)"),
        ({"use": "a.b.Own"}, "must look like 'package.module:Name'"),
        ({"use": "a.b:Onw"}, "no add-in 'Own' (did you mean 'Onw'?)"),
        ({"use": "a.b:Own", "options": [1]}, "addin.options: must be a mapping"),
        ({"Own": {"use": "a.b"}}, "addin.Own.use: must look like"),
    ],
)
def test_what_is_no_add_in_is_refused(addin, finding):
    with pytest.raises(SpecError) as error:
        fxplug.blitz(LINE, addin)
    assert finding in str(error.value)


def test_a_method_that_is_not_there_names_the_nearest():
    with pytest.raises(SpecError) as error:
        fxplug.blitz("(MLPAddin.adapt_across_inputs): ...->(fc1){in1}->{out1}(fc3)", mlp_addin())
    assert "MLPAddin has no method 'adapt_across_inputs' (did you mean 'adapt_across_input'?)" in str(error.value)
    assert "adapt_across_output, adapt_input, adapt_output" in str(error.value) and "{in1}" in str(error.value)


def test_no_line_is_refused():
    with pytest.raises(SpecError, match="at least one line"):
        fxplug.blitz([], Own())


# --- the block on its own, which a graph holds traced


def ran(driver, *values):
    """What a block gives when it runs, held to what its graph gives."""
    plain = driver(*values)
    traced = fxplug.trace(driver, values)(*values)
    leaves = fxplug.core.ir.containers.list_leaves
    assert leaves(plain) and len(leaves(plain)) == len(leaves(traced))
    for a, b in zip(fxplug.core.ir.containers.list_leaves(plain), fxplug.core.ir.containers.list_leaves(traced), strict=True):
        assert torch.equal(a, b)
    return plain


X, Y, Z = torch.randn(3, 2, 4).unbind()


def test_a_tensor_before_a_module_takes_the_place_of_the_first_argument():
    block = Addin(Own(2.0), "adapt_first", "in")
    assert torch.equal(ran(block, (X,))[0], X * 2)
    first, second = ran(block, (X, Y))
    assert torch.equal(first, X * 2) and torch.equal(second, Y)


def test_a_tuple_before_a_module_takes_the_place_of_all():
    first, second = ran(Addin(Own(2.0), "adapt_all", "in"), (X, Y))
    assert torch.equal(first, X * 2) and torch.equal(second, Y * 2)


def test_behind_a_module_a_method_gets_the_result_as_outputs_or_as_inputs():
    assert torch.equal(ran(Addin(Own(2.0), "adapt", "out"), (X,), Y), Y + 2.0 * Y.mean())
    assert torch.equal(ran(Addin(Own(2.0), "adapt_first", "out"), (X,), Y), Y * 2)
    assert torch.equal(ran(Addin(Own(2.0), "adapt_all", "out"), (X,), Y), Y * 2)
    assert torch.equal(ran(Addin(Own(2.0), "adapt_either", "out"), (X,), Y), Y * 2)
    assert torch.equal(ran(Addin(Own(2.0), "adapt_either", "in"), (X,))[0], X * 2)


def test_across_modules_the_last_value_is_the_cache_while_the_method_runs():
    addin = AddinBase()
    assert torch.equal(ran(Addin(addin, "add_post", "out", across=True), (X,), Y, Z), Y + Z)
    assert torch.equal(ran(Addin(addin, "add_pre", "in", across=True), (X,), Z)[0], X + Z)
    assert addin.inputs_cache is None


def test_a_cache_that_no_point_fills_is_named():
    with pytest.raises(SpecError, match="AddinBase.add_post uses 'inputs_cache', and the line has no '{in1}'"):
        Addin(AddinBase(), "add_post", "out")((X,), Y)


@pytest.mark.parametrize(
    ("method", "point", "finding"),
    [
        ("adapt", "in", "takes outputs, and before a module there are none"),
        ("adpat", "out", "has no method 'adpat' (did you mean 'adapt'?)"),
        ("get_log_str", "out", "must take (module, inputs), or (module, inputs, outputs)"),
    ],
)
def test_a_method_that_does_not_fit_its_point_is_refused(method, point, finding):
    with pytest.raises(SpecError) as error:
        Addin(Own(), method, point)
    assert finding in str(error.value)


class Wrong(AddinBase):
    """Returns and keeps what it must not."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros(()))
        self.seen = []
        self.steps = 0

    def adapt_kept_only(self, module, inputs, outputs):
        self.kept = outputs.mean()

    def adapt_pair(self, module, inputs, outputs):
        return outputs, outputs

    def adapt_list(self, module, inputs):
        return [inputs[0]]

    def adapt_kept(self, module, inputs, outputs):
        self.kept = outputs
        return outputs

    def adapt_counted(self, module, inputs, outputs):
        self.steps += 1
        return outputs

    def adapt_seen(self, module, inputs, outputs):
        self.seen.append(outputs)
        return outputs

    def adapt_mean(self, module, inputs, outputs):
        self.mean = outputs.mean(0)
        return outputs

    def adapt_in_place(self, module, inputs, outputs):
        self.count.add_(1)
        return outputs * self.count

    def adapt_again(self, module, inputs, outputs):
        return module(outputs)

    def adapt_weight(self, module, inputs, outputs):
        return outputs @ module.weight + module.bias

    def adapt_all_weights(self, module, inputs, outputs):
        return outputs + sum(p.sum() for p in module.parameters())

    def adapt_mark(self, module, inputs, outputs):
        module.mark = 1
        return outputs

    def adapt_look(self, module, inputs, outputs):
        assert isinstance(module, nn.Linear) and not isinstance(module, nn.Conv2d)
        return outputs * module.out_features


@pytest.mark.parametrize(
    ("method", "finding"),
    [
        ("adapt_pair", "returns (tensor, tensor) after a module that returns tensor"),
        ("adapt_kept", "Wrong.adapt_kept sets 'kept' of the add-in"),
        ("adapt_counted", "sets 'steps' of the add-in"),
        ("adapt_seen", "sets 'seen' of the add-in"),
        ("adapt_mean", "sets 'mean' of the add-in"),
        ("adapt_again", "the add-in calls 'fc', and it may only read that module of the base model"),
        ("adapt_all_weights", "the add-in uses 'parameters' of 'fc', and it may only read"),
        ("adapt_mark", "the add-in sets 'mark' of 'fc', and it may only read"),
    ],
)
def test_what_a_graph_cannot_say_is_refused(method, finding):
    with pytest.raises(SpecError) as error:
        Addin(Wrong(), method, "out", host=(ModuleView(nn.Linear(4, 4), "fc"),))((X,), Y)
    assert finding in str(error.value)
    if " of the add-in" in finding:
        assert "buffer that is changed in place" in str(error.value) and "inputs_cache" in str(error.value)


class Looks(AddinBase):
    """Returns nothing, and keeps nothing."""

    def before(self, module, inputs):
        _ = inputs[0].mean()

    def after(self, module, inputs, outputs):
        torch.sigmoid(inputs[0])

    def either(self, module, inputs):
        return None

    def sometimes(self, module, inputs, outputs):
        if outputs.shape[-1] != 4:
            return outputs * 2


@pytest.mark.parametrize(
    ("method", "point", "values"),
    [
        ("before", "in", ((X,),)),
        ("before", "in", ((X, Y),)),
        ("either", "in", ((X,),)),
        ("either", "out", ((X,), Y)),
        ("after", "out", ((X,), Y)),
        ("after", "out", ((X,), (Y, Z))),
        ("sometimes", "out", ((X, Z), Y)),
    ],
)
def test_a_method_that_returns_nothing_changes_nothing(method, point, values):
    """As a hook of torch."""
    found, same = ran(Addin(Looks(), method, point), *values), values[point == "out"]
    assert type(found) is type(same) and len(found) == len(same)
    assert all(map(torch.equal, found, same))


def test_a_method_that_returns_nothing_and_keeps_a_value_is_refused_for_that():
    with pytest.raises(SpecError, match=r"adapt_kept_only sets 'kept' of the add-in.*self\.seen\.copy_\(value\)"):
        Addin(Wrong(), "adapt_kept_only", "out", host=(ModuleView(nn.Linear(4, 4), "fc"),))((X,), Y)


class Keeps(AddinBase):
    """Does what that message says."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def adapt(self, module, inputs, outputs):
        self.seen.copy_(outputs.mean())


def test_a_value_is_kept_in_a_buffer():
    model, x = nn.Sequential(), torch.randn(3, 4)
    for name, layer in {"first": nn.Linear(4, 4), "act": nn.SiLU(), "last": nn.Linear(4, 2)}.items():
        model.add_module(name, layer)
    new = fxplug.apply(fxplug.trace(model, x), fxplug.blitz("(Keeps.adapt): ...->(act){inout1}->...", Keeps()))
    assert torch.equal(new(x), model(x))
    (seen,) = (value for name, value in new.named_buffers() if name.endswith(".seen"))
    assert seen.item() and torch.equal(seen, model[:2](x).mean())


def test_a_list_of_arguments_must_have_their_number():
    with pytest.raises(SpecError, match=r"returns \[tensor\] before a module that is called with \(tensor, tensor\)"):
        Addin(Wrong(), "adapt_list", "in")((X, Y))


def test_a_method_may_look_at_the_module():
    look = Addin(Wrong(), "adapt_look", "out", host=(ModuleView(nn.Linear(4, 7), "fc"),))
    assert torch.equal(ran(look, (X,), Y), Y * 7)


def test_the_manuals_settings_are_read_by_attribute():
    made = dict2args({"hidden_size": 512, "deep": {"a": [{"b": 1}]}})
    assert made.hidden_size == 512 and made.deep.a[0].b == 1
