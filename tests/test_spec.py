"""Pass files and passes made in Python: what is read, and what each mistake is told."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fxplug
from fxplug.config.run_config import load_config
from fxplug.core.errors import Limits, SpecError, did_you_mean, format_path
from fxplug.core.spec.pass_file import Match, Pass, Rule, Where, folder, import_target, list_shipped, load_pass
from fxplug.core.spec.yaml_source import parse_yaml

RULE = "{match: {path: a}, use: 'm:C'}"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(text, name="p.yaml"):
    Path(name).write_text(text)
    return name


def message(call, *args, **kwargs):
    with pytest.raises(SpecError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


# YAML


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-4", 1e-4),
        ("1E3", 1000.0),
        ("-.5", -0.5),
        ("3.", 3.0),
        (".inf", float("inf")),
        ("-.INF", float("-inf")),
        ("12", 12),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("on", "on"),
        ("yes", "yes"),
        ("No", "No"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("=", "="),
        ("'1'", "1"),
        ("!!str 1", "1"),
        ("[a, 1]", ["a", 1]),
        ("[&x {a: 1}, *x]", [{"a": 1}, {"a": 1}]),
    ],
)
def test_yaml_values(text, value):
    found = parse_yaml(text).data
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3: key 'a' given twice"),
        ("a: {b: 1,\n    b: 2}", "f.yaml:2: key 'b' given twice"),
        ("a: 1\nb: !!python/object:os.system x", "tag '!!python/object:os.system' is not allowed"),
        ("\n- !!python/object/apply:os.system [ls]", "f.yaml:2: tag '!!python/object/apply:os.system'"),
        ("- !mine 3", "f.yaml:1: tag '!mine' is not allowed: only plain YAML values are read"),
        ("- !!timestamp 2024-01-01", "f.yaml:1: tag '!!timestamp' is not allowed"),
        ("- !!int no", "f.yaml:1: 'no' does not fit its tag '!!int'"),
        ("- !!map x", "f.yaml:1: tag '!!map' is not allowed"),
        ("1: a", "f.yaml:1: key '1' is not text; put it in quotes"),
        ("true: a", "f.yaml:1: key 'true' is not text"),
        ("a: 1\n[b]: 2", "f.yaml:2: key here is not text"),
        ("a: [1,\nb: 2", "f.yaml:2: not valid YAML"),
        ("a: 1\n\tb: 2", "f.yaml:2: not valid YAML: found character"),
        ("a: 1\n---\nb: 2", "f.yaml:2: not valid YAML"),
        ("a: *b", "f.yaml:1: not valid YAML: found undefined alias 'b'"),
        ("a: &x [*x]", "f.yaml:1: an alias inside its own anchor: it would contain itself"),
        ("a: \0", "f.yaml: not valid YAML: special characters are not allowed"),
        ("[" * 3000, "f.yaml:1: nested too deeply: more than 64 levels"),
    ],
)
def test_yaml_refused(text, expected):
    assert expected in message(parse_yaml, text, "f.yaml")


def test_aliases_of_aliases_end():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert "more than 10000 values" in message(parse_yaml, "\n".join(lines), "f.yaml")


# PyYAML writes text such as 1e5 without quotes, since YAML 1.1 has no such numbers; here it is one, as in YAML 1.2
text = st.text().filter(lambda t: not re.fullmatch(r"[-+]?(\d[\d_]*\.?|\.\d)[\d_]*[eE][-+]?\d+", t))
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@given(plain)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_yaml_reads_what_pyyaml_writes(value):
    assert parse_yaml(yaml.safe_dump(value)).data == value


def test_a_text_that_is_read_again_is_not_what_a_caller_has_made_of_it():
    text = "a: {b: [1, 2]}\nc: x\n"
    one = parse_yaml(text, "f.yaml")
    one.data["a"]["b"].append(3)
    one.lines.clear()
    assert parse_yaml(text, "f.yaml").data == {"a": {"b": [1, 2]}, "c": "x"}
    assert str(parse_yaml(text, "g.yaml").where("c")) == "g.yaml:2"
    assert "more than 2 values" in message(lambda text: parse_yaml(text, "f.yaml", Limits(entries=2)), text)


def test_every_value_has_its_line():
    source = parse_yaml("a: 1\nb:\n  - x\n  - {c: 1,\n     d: 2}\n", "f.yaml")
    assert str(source.where("a")) == "f.yaml:1"
    assert str(source.where("b", 0)) == "f.yaml:3"
    assert str(source.where("b", 1, "d")) == "f.yaml:5"
    assert str(source.where("b", 1, "nothing")) == "f.yaml:4"


def test_where_is_relative_to_the_working_folder(tmp_path):
    assert str(Where(str(tmp_path / "passes" / "lora.yaml"), 3)) == str(Path("passes/lora.yaml:3"))
    assert str(Where("/elsewhere/lora.yaml", 3)) == "/elsewhere/lora.yaml:3"
    assert str(Where("f.yaml")) == "f.yaml" and str(Where()) == ""


# passes made in Python


class Gate:
    pass


def test_a_pass_in_python():
    made = Pass("gate", rules=[Rule(Match(path="blocks.*.mlp"), use=Gate)])
    (rule,) = made.rules
    assert rule.use is Gate and rule.place == "after" and rule.args == ("x", "y") and rule.options == {}
    assert rule.expect == (">=", 1) and str(rule.where) == "" and made.train is True
    assert hash(made) == hash(Pass("gate", rules=(rule,)))
    assert load_pass(made, name="other", lr=0.1).name == "other"
    assert message(load_pass, made, rank=3) == (
        "pass 'gate' was loaded with its parameters already, so these cannot be given: rank"
    )


def test_match_takes_one_or_many():
    match = Match(path=["a", "b"], module=Gate, op=len)
    assert match.path == match.patterns == ("a", "b")
    assert match.module == (Gate,) and match.op == (len,)
    assert Match(module=["Linear", Gate]).module == ("Linear", Gate)
    assert Match("a").patterns == ("a",) and Match(module=None, op=[]).op is None


def test_arguments_by_place():
    assert Rule(Match(), Gate, place="before").args == ("value",)
    assert Rule(Match(), Gate, place="param").args == ("value",)
    assert Rule(Match(path=["a", "b"]), Gate, args=["y", ["c", "d"]]).args == ("y", ("c", "d"))


@pytest.mark.parametrize(
    "expect, parsed, admitted, refused",
    [
        (">=1", (">=", 1), 1, 0),
        ("== 12", ("==", 12), 12, 11),
        ("<3", ("<", 3), 2, 3),
        ("<=3", ("<=", 3), 3, 4),
        (">2", (">", 2), 3, 2),
        ("!=0", ("!=", 0), 1, 0),
        (4, ("==", 4), 4, 5),
        ("4", ("==", 4), 4, 5),
    ],
)
def test_expect(expect, parsed, admitted, refused):
    rule = Rule(Match(), Gate, expect=expect)
    assert rule.expect == parsed and rule.admits(admitted) and not rule.admits(refused)


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda: Match(path=3), "path: must be a path or a list of them, not 3"),
        (lambda: Match(path=["a", None]), "path[1]: must be a path, not null"),
        (lambda: Match(path=[]), "path: needs at least one path"),
        (lambda: Match(module=True), "module: must be a class name or a list of them, not true"),
        (lambda: Match(op=[1]), "op[0]: must be a function name, not 1"),
        (
            lambda: Match(path="re:a(b"),
            "path: 're:a(b' is not a regular expression: "
            "missing ), unterminated subpattern at position 1\n  a(b\n   ^",
        ),
        (lambda: Rule("a", Gate), "match: must be a Match, not 'a'"),
        (
            lambda: Rule(Match(), Gate, place="befor"),
            "place: no place 'befor' (did you mean 'before'?); one of before, after, replace, param",
        ),
        (lambda: Rule(Match(), "fxplug.blocks.Lora"), "use: must look like 'package.module:Name', not"),
        (lambda: Rule(Match(), Gate, args="x"), "args: must be a list of ports, not 'x'"),
        (lambda: Rule(Match(), Gate, args=["x", 2]), "args[1]: must be a port or a list of ports, not 2"),
        (
            lambda: Rule(Match(path=["a", "b"]), Gate, args=[["c"]]),
            "args[0]: 1 ports for 2 path patterns: they are paired in order, so give as many\n"
            "  path: ['a', 'b']\n  args[0]: ['c']",
        ),
        (
            lambda: Match(path="re:a{99999999999}"),
            "path: 're:a{99999999999}' is not a regular expression: the",
        ),
        (lambda: Rule(Match(), Gate, options=0), "options: must be a mapping, not 0"),
        (lambda: Rule(Match(), Gate, options=[1]), "options: must be a mapping, not a list"),
        (lambda: Rule(Match(), Gate, expect="some"), "expect: 'some' is not a count: write one of ==N, >=N"),
        (lambda: Rule(Match(), Gate, expect=True), "expect: true is not a count"),
        (lambda: Rule(Match(), Gate, name=3), "name: must be text, not 3"),
        (lambda: Rule(Match(), Gate, "x", where=Where("f.yaml", 2)), "f.yaml:2: place: no place 'x'"),
        (lambda: Pass("g", []), "rules: must be a list of rules, not an empty list"),
        (lambda: Pass("g", [Match()]), "rules[0]: must be a Rule, not a Match"),
        (lambda: Pass("a.b", [Rule(Match(), Gate)]), "name: must be a name of letters, digits and '_', not"),
        (lambda: Pass("class", [Rule(Match(), Gate)]), "name: 'class' is a Python keyword: choose another name"),
        (lambda: Pass("g", [Rule(Match(), Gate)], lr=-1), "lr: must be a number, 0 or more, not -1"),
        (lambda: Pass("g", [Rule(Match(), Gate)], lr=True), "lr: must be a number, 0 or more, not true"),
        (lambda: Pass("g", [Rule(Match(), Gate)], train=1), "train: must be true or false, not 1"),
        (lambda: Pass("g", [Rule(Match(), Gate)], inputs=["a b"]), "inputs[0]: must be a name of letters"),
        (lambda: Pass("g", [Rule(Match(), Gate)], networks=3), "networks: must be a mapping, not 3"),
    ],
)
def test_refused_in_python(make, expected):
    assert message(make).startswith(expected)


# pass files

TEMPLATE = """\
about: An example.
params: {at: "**", rank: 8, alpha: null, more: [1], which: a, must: $required}
inputs: {image: {dtype: $which}}
rules:
  - match: {path: $at, module: Linear}
    use: "blocks_$which:C"
    place: $which
    args: [x, "p.{i}.$which", $must]
    options: {rank: $rank, nested: {alpha: [$alpha, "$$5", "r$rank$"]}, more: $more, fixed: 1}
    expect: ">=$rank"
    name: kept{i}
"""


def test_parameters_are_filled_in_and_keep_their_type():
    made = load_pass(write(TEMPLATE), which="before", must="q", more=[2], rank=4, lr=1, name="n")
    (rule,) = made.rules
    assert made.name == "n" and made.lr == 1 and made.inputs["image"]["dtype"] == "before"
    assert made.params == {"at": "**", "rank": 4, "alpha": None, "more": [2], "which": "before", "must": "q"}
    assert rule.use == "blocks_before:C" and rule.place == "before"
    assert rule.args == ("x", "p.{i}.before", "q") and rule.name == "kept{i}"
    assert rule.options == {"rank": 4, "nested": {"alpha": [None, "$5", "r4$"]}, "more": [2], "fixed": 1}
    assert rule.expect == (">=", 4) and str(rule.where) == "p.yaml:5" and str(made.where) == "p.yaml"


@pytest.mark.parametrize(
    "params, expected",
    [
        ({}, "p.yaml: missing parameter 'must'"),
        (
            {"ranks": 3},
            "p.yaml: no parameter 'ranks' (did you mean 'rank'?); it has at, rank, alpha, more, which, must",
        ),
        ({"rank": "8"}, "p.yaml: parameter 'rank' must be a whole number, not '8' (its default is 8)"),
        ({"rank": 1.5}, "p.yaml: parameter 'rank' must be a whole number, not 1.5"),
        ({"rank": True}, "p.yaml: parameter 'rank' must be a whole number, not true"),
        ({"at": 3}, "p.yaml: parameter 'at' must be text or a list, not 3"),
        (
            {"must": "q", "which": "befor"},
            "p.yaml:7: rules[0].place: no place 'befor' (did you mean 'before'",
        ),
        ({"must": "q", "which": "after", "at": "re:["}, "p.yaml:5: rules[0].match.path: 're:[' is not a reg"),
        (
            {"must": ["a"], "which": "after", "at": ["b", "c"]},
            "p.yaml:8: rules[0].args[2]: 1 ports for 2 path",
        ),
        (
            {"must": 3, "which": "after"},
            "p.yaml:8: rules[0].args[2]: must be a port or a list of ports, not 3",
        ),
        ({"lr": "fast"}, "lr: must be a number, 0 or more, not 'fast'"),
    ],
)
def test_parameters_refused(params, expected):
    assert message(load_pass, write(TEMPLATE), **params).startswith(expected)


@pytest.mark.parametrize(
    "default, good, bad",
    [
        ("true", [False], [0, "true", None]),
        ("1", [2], [1.0, True, "1", None]),
        ("1.0", [2, 2.5], [True, "1"]),
        ("a", ["b", ["b", "c"], ("b",)], [1, True]),
        ("[a]", ["b", ["b"]], [1, {"a": 1}]),
        ("{a: 1}", [{"b": 2}], ["b", [1]]),
        ("null", [1, "a", None, [1], True], []),
        ("$required", [1, "a", None, [1], True], []),
    ],
)
def test_parameters_agree_with_their_default(default, good, bad):
    path = write(f"params: {{p: {default}}}\nrules: [{{match: {{}}, use: 'm:C', options: {{p: $p}}}}]")
    for value in good:
        assert load_pass(path, p=value).rules[0].options == {"p": value}
    for value in bad:
        assert "parameter 'p' must be" in message(load_pass, path, p=value)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", "p.yaml: must be a mapping, not null"),
        ("- a", "p.yaml: must be a mapping, not a list"),
        ("about: x", "p.yaml: missing key 'rules'"),
        ("rules: []", "p.yaml:1: rules: must be a list of rules, not an empty list"),
        ("about: x\nrules: {}", "p.yaml:2: rules: must be a list of rules, not a mapping"),
        (f"about: x\nrule: [{RULE}]", "p.yaml:2: unknown key 'rule' (did you mean 'rules'?)"),
        (f"about: 3\nrules: [{RULE}]", "p.yaml:1: about: must be text, not 3"),
        (f"rules: [{RULE}]\nlr: x", "p.yaml:2: lr: must be a number, 0 or more, not 'x'"),
        (f"rules: [{RULE}]\nname: a-b", "p.yaml:2: name: must be a name of letters"),
        (f"rules: [{RULE}]\nparams: [a]", "p.yaml:2: params: must be a mapping, not a list"),
        (f"rules: [{RULE}]\nparams: {{lr: 1}}", "p.yaml:2: params: parameter 'lr' has the name of a setting"),
        (f"rules: [{RULE}]\nparams:\n  rank: 1", "p.yaml:3: params: parameter 'rank' is not used by any rule"),
        (f"rules: [{RULE}]\ninputs: {{a b: 1}}", "p.yaml:2: inputs: must be a name of letters"),
        (f"rules:\n  - {RULE}\n  - 3", "p.yaml:3: rules[1]: must be a mapping, not 3"),
        ("rules:\n  - use: m:C", "p.yaml:2: rules[0]: missing key 'match'"),
        ("rules:\n  - match: {path: a}", "p.yaml:2: rules[0]: a rule without 'use' replaces a value by another"),
        (
            "rules:\n  - use: m:C\n    match: {modul: Linear}",
            "p.yaml:3: rules[0].match: unknown key 'modul' (did you mean 'module'?)",
        ),
        (
            "rules:\n  - use: m:C\n    match: {}\n    palce: after",
            "p.yaml:4: rules[0]: unknown key 'palce' (did you mean 'place'?)",
        ),
        ("rules:\n  - use: m:C\n    match: a", "p.yaml:3: rules[0].match: must be a mapping, not 'a'"),
        (
            "rules:\n  - use: m.C\n    match: {}",
            "p.yaml:2: rules[0].use: must look like 'package.module:Name'",
        ),
        (
            "rules:\n- use: m:C\n  match:\n    module: [1]",
            "p.yaml:4: rules[0].match.module[0]: must be a class",
        ),
        ("rules:\n- use: m:C\n  match: {}\n  args: [x,\n    [a]]", None),
        (
            "rules:\n- use: m:C\n  match: {}\n  args: [x,\n    [a, b]]",
            "p.yaml:5: rules[0].args[1]: 2 ports for 1 path patterns",
        ),
        (
            "params: {rank: 1}\nrules:\n- use: m:C\n  match: {}\n  options: {rank: $rnak, q: $rank}",
            "p.yaml:5: rules[0].options.rank: no parameter '$rnak' (did you mean 'rank'?); the parameters",
        ),
        (
            "rules:\n- use: m:C\n  match: {path: $at}",
            "p.yaml:3: rules[0].match.path: no parameter '$at'; the pass has no parameters",
        ),
    ],
)
def test_pass_files(text, expected):
    if expected is None:
        load_pass(write(text))
    else:
        assert message(load_pass, write(text)).startswith(expected)


def test_a_dollar_that_names_nothing_stays():
    made = load_pass(write("rules: [{match: {path: 're:(a$|b)\\.qkv$'}, use: 'm:C'}]"))
    assert made.rules[0].match.path == r"re:(a$|b)\.qkv$"


def test_a_value_is_not_filled_in_again():
    path = write("params: {at: a}\nrules: [{match: {path: $at}, use: 'm:C'}]")
    assert load_pass(path, at="re:$at").rules[0].match.path == "re:$at"


def test_finding_the_file():
    (Path("sub")).mkdir()
    write(f"rules: [{RULE}]", "sub/my-gate.yaml")
    assert load_pass("sub/my-gate.yaml").name == load_pass("my-gate.yaml", base="sub").name == "my_gate"
    assert load_pass(Path("sub/my-gate.yaml")).name == "my_gate"
    write(f"rules: [{RULE}]", "2d.yml")
    assert load_pass("2d.yml").name == "pass_2d"
    write(f"rules: [{RULE}]", "own.yaml")
    assert message(load_pass, "lroa") == "no pass named 'lroa' (did you mean 'lora'?)"
    assert message(load_pass, "own") == "no pass named 'own'; for the file in this folder write 'own.yaml'"
    assert message(load_pass, "onw.yaml") == "onw.yaml: no such file (did you mean 'own.yaml'?)"
    assert "nowhere/a.yaml: no such folder '" in message(load_pass, "nowhere/a.yaml")
    Path("dir.yaml").mkdir()
    assert message(load_pass, "dir.yaml").startswith("dir.yaml: cannot be read: ")
    Path("bytes.yaml").write_bytes(b"\xff\xfe\x00")
    assert message(load_pass, "bytes.yaml") == "bytes.yaml: cannot be read: not UTF-8 text; it is UTF-16: save it as UTF-8"
    assert message(load_pass, 3) == "a pass is a name, a path, a mapping or a Pass, not 3"


def test_a_mapping_is_a_pass():
    data = {"rules": [{"match": {"path": "a", "module": Gate}, "use": Gate}]}
    assert load_pass(data, name="g").rules[0] == Rule(Match("a", Gate), Gate)
    assert message(load_pass, data) == "a pass without a file needs a 'name'"
    assert message(load_pass, {**data, "rule": 1}) == "unknown key 'rule' (did you mean 'rules'?)"
    assert message(load_pass, {"rules": [{"match": {"pth": 1}, "use": "m:C"}]}) == (
        "rules[0].match: unknown key 'pth' (did you mean 'path'?)"
    )


def test_only_allowed_modules():
    path = write("rules:\n- match: {}\n  use: gates.sub:Gate\n")
    assert load_pass(path, allow=["gates"]) and load_pass(path, allow=["gates.sub"]) and load_pass(path)
    for allow in ([], ["gate"], ["gates.sub.more"]):
        found = message(load_pass, path, allow=allow)
        assert found.startswith(
            "p.yaml:3: rules[0].use: module 'gates.sub' is not allowed; allowed are fxplug"
        )
    assert load_pass("lora", allow=[])
    through = write("rules:\n- match: {}\n  use: fxplug.core.spec.pass_file:re.sub\n")
    assert "'re.sub' must be one name" in message(load_pass, through, allow=[])
    made = Pass("g", [Rule(Match(), Gate)])
    assert f"module '{__name__}' is not allowed" in message(load_pass, made, allow=[])


def test_import_target():
    assert import_target("fxplug.core.errors:SpecError") is SpecError
    assert import_target("pathlib:Path.cwd") == Path.cwd
    at = Where("c.yaml", 2)
    assert message(import_target, "fxplug.blcks:Pass", at) == (
        "c.yaml:2: no module named 'fxplug.blcks' (did you mean 'fxplug.blocks'?)"
    )
    assert message(import_target, "jsn:x", at).startswith(
        "c.yaml:2: no module named 'jsn' (did you mean 'json'"
    )
    assert message(import_target, "fxplug.core.spec.pass_file:Pas") == (
        "module 'fxplug.core.spec.pass_file' has no attribute 'Pas' (did you mean 'Pass'?)"
    )
    assert (
        message(import_target, "pathlib:Path.cdw")
        == "class 'Path' has no attribute 'cdw' (did you mean 'cwd'?)"
    )
    assert message(import_target, "json", at) == "c.yaml:2: must look like 'package.module:Name', not 'json'"


def test_import_target_tells_what_an_import_raised(tmp_path, monkeypatch):
    write("import absent_thing\n", "broken_a.py")
    write("1 / 0\n", "broken_b.py")
    at = Where(str(tmp_path / "c.yaml"), 2)
    assert message(import_target, "broken_a:x", at) == (
        "c.yaml:2: no module named 'broken_a'; broken_a.py is in the folder of c.yaml: put that folder on PYTHONPATH"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "importing 'broken_a' failed: ModuleNotFoundError: No module named 'absent_thing'" in message(
        import_target, "broken_a:x"
    )
    assert (
        message(import_target, "broken_b:x")
        == "importing 'broken_b' failed: ZeroDivisionError: division by zero"
    )


# what is shipped


def test_folders_hold_yaml_only():
    assert all(path.suffix == ".yaml" for path in folder("passes").rglob("*") if path.is_file())
    assert {"lora", "scale", "skip", "replace"} <= set(list_shipped("passes"))


@pytest.mark.parametrize("name", list_shipped("passes"))
def test_shipped_passes(name):
    data = parse_yaml(list_shipped("passes")[name].read_text()).data
    required = {key: "a" for key, value in (data.get("params") or {}).items() if value == "$required"}
    made = load_pass(name, allow=[], **{**required, **(data.get("example") or {}).get("with", {})})
    assert made.name == (data.get("name") or name.rpartition("/")[2]) and made.about.endswith(".")


def made_here(given):
    """What a pass file may name under `make`."""
    if "at" not in given:
        raise SpecError("missing key 'at'")
    rule = Rule(Match(given["at"]), "fxplug.blocks:Lora", options={"plugin": "os:system"} if given.get("odd") else {})
    return Pass(given["name"], [rule], lr=given.get("lr")) if given["at"] != "none" else 3


def test_a_pass_that_a_function_makes(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("about: Made.\nparams: {at: $required}\nmake: test_spec:made_here")
    made = load_pass(file, at="head", lr=0.5)
    assert (made.name, made.lr, made.rules[0].match.path) == ("mine", 0.5, "head")
    assert load_pass({"make": "test_spec:made_here"}, at="head", name="own").name == "own"
    config = load_config({"model": "resnet10t", "passes": [{"mine.yaml": {"at": "head", "name": "b"}}]}, base=tmp_path)
    assert config.passes[0].name == "b"
    said = message(load_config, {"model": "resnet10t", "passes": [{"mine.yaml": {}}]}, base=tmp_path)
    assert said == "passes[0].mine.yaml: missing key 'at'"
    assert message(load_pass, file, at="none").endswith("'test_spec:made_here' gave 3, not a Pass")
    assert "module 'test_spec' is not allowed" in message(load_pass, file, at="head", allow=[])
    assert load_pass(file, at="head", allow=["test_spec"]).rules and load_pass(file, at="head", odd=True).rules
    assert "module 'os' is not allowed" in message(load_pass, file, at="head", odd=True, allow=["test_spec"])
    assert "must look like 'package.module:Name'" in message(load_pass, {"make": "made_here"})
    assert "unknown key 'rules'" in message(load_pass, {"make": "test_spec:made_here", "rules": []})


def test_pairs_of_a_skip():
    made = load_pass("skip", **{"from": ["a", "b"], "to": ["c", "d"]}, place="before")
    assert made.rules[0].match.path == ("c", "d") and made.rules[0].args == ("value", ("a", "b"))
    assert "2 ports for 3 path patterns" in message(
        load_pass, "skip", **{"from": ["a", "b"], "to": ["c", "d", "e"]}
    )


# the package's face


def test_reading_yaml_does_not_wait_for_torch():
    code = (
        "import fxplug.core.spec.pass_file, fxplug.config.run_config, sys;"
        "fxplug.load_pass('lora'); fxplug.SpecError; dir(fxplug);"
        "sys.exit([m for m in ('torch', 'diffusers', 'timm', 'numpy') if m in sys.modules] or None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(fxplug.__file__).parents[1], capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


def test_public_names():
    assert set(fxplug.__all__) <= set(dir(fxplug)) and fxplug.__version__
    theirs = {"ModelMixin"}  # which diffusers asks for
    assert {*fxplug._MODULE, *fxplug.core.extensions.list_parts("names")} - theirs == set(fxplug.__all__)
    for name in fxplug.__all__:
        assert getattr(fxplug, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'fxplug' has no attribute 'tracee'"):
        fxplug.tracee  # noqa: B018


def test_no_submodule_bears_a_public_name():
    modules = {path.stem for path in Path(fxplug.__file__).parent.glob("*.py")}
    assert not modules & set(fxplug.__all__)


def test_did_you_mean():
    assert did_you_mean("ranks", ["rank", "alpha"]) == " (did you mean 'rank'?)"
    assert did_you_mean("LORA", ["LoRA"]) == " (did you mean 'LoRA'?)"
    assert did_you_mean("zzz", ["rank"]) == did_you_mean("x", []) == ""
    assert format_path(("rules", 0, "match", "path")) == "rules[0].match.path" and format_path(()) == ""
