"""What repeats in listings and diffs is said once: nothing is lost, and nothing is said that is not there."""

import io
import random
import re
import sys

import pytest
from small import vit

import fxplug
from fxplug.config.cli.terminal import make_diff, print_diff, print_rows
from fxplug.config.flow import read_saved_diff
from fxplug.core.ir.text import find_patterns, fold_diff, summarize_diff
from fxplug.core.spec.addresses import compile_pattern, expand_braces


def taken(pattern: str, paths: list[str]) -> list[str]:
    """The paths that a pattern of the pass language takes, its slices counted as `at:` counts them."""
    found = []
    for text in expand_braces(pattern):
        spans = [range(int(a), int(b)) for a, b in re.findall(r"\{(\d+):(\d+)\}", text)]
        match = compile_pattern(text)
        for path in paths:
            if (hit := match.fullmatch(path)) and all(int(i) in span for i, span in zip(hit.groups(), spans, strict=True)):
                found.append(path)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_patterns_stand_for_the_paths_and_no_others(seed):
    of = random.Random(seed)
    every = [f"a.{i}.b.{j}.{n}" for i in range(5) for j in range(4) for n in ("q", "k", "out.0")]
    every += [f"a.{i}.x" for i in range(9)] + ["head", "7", "8.9"]
    some = of.sample(every, of.randrange(1, len(every)))
    found = find_patterns(some)
    assert sorted(path for pattern in found for path in taken(pattern.text, every)) == sorted(some)
    assert sum(pattern.count for pattern in found) == len(some)
    assert [pattern.first for pattern in found] == sorted((pattern.first for pattern in found), key=some.index)


def test_alike_blocks_are_one_pattern_and_parts_that_are_patterns_themselves_are_left():
    paths = [f"blocks.{i}.attn.{name}" for i in range(28) for name in ("qkv", "proj")]
    assert [(p.text, p.count) for p in find_patterns(paths)] == [("blocks.{0:28}.attn.{qkv,proj}", 56)]
    assert [p.text for p in find_patterns(["a.0.b", "a.2.b", "a.{x}.b", "a.*.b"])] == ["a.{0,2}.b", "a.{x}.b", "a.*.b"]
    assert find_patterns([]) == [] and [p.text for p in find_patterns(["a.1@1.b", "a.1@2.b"])] == ["a.{1@1,1@2}.b"]


def unfolded(text: str) -> list[str]:
    """The places of a folded diff as bodies, written out again."""
    bodies = []
    for head, body in re.findall(r"^(@@ .*? @@)$\n((?:[ +-].*\n)*)", text, re.MULTILINE):
        told = re.match(r"@@ x(\d+): (\S+) = (.*) @@", head)
        if told is None:
            bodies.append(body)
            continue
        several = re.findall(r"(?:[^,{]|\{[^}]*\})+", told[3])
        letters, rows = told[2].split("."), [row for one in several for row in _numbers(one.strip())]
        assert len(rows) == int(told[1])
        for row in rows:
            copy = body
            for letter, number in zip(letters, row, strict=True):
                copy = copy.replace(f"{{{letter}}}", number)
            bodies.append(copy)
    return sorted(bodies)


def _numbers(pattern: str) -> list[list[str]]:
    rows: list[list[str]] = [[]]
    for part in pattern.split("."):
        span = re.fullmatch(r"\{(\d+):(\d+)\}", part)
        names = [str(n) for n in range(int(span[1]), int(span[2]))] if span else part.strip("{}").split(",")
        rows = [[*row, name] for row in rows for name in names]
    return rows


@pytest.mark.parametrize(("name", "at"), [("lora", "**"), ("bottleneck", "blocks.*.mlp"), ("replace", "blocks.*.mlp.act")])
def test_a_folded_diff_can_be_written_out_again(name, at):
    gm = vit().gm
    more = {"module": "GELU", "with": "ReLU"} if name == "replace" else {}
    new = fxplug.apply(gm, fxplug.load_pass(name, at=at, **more))
    text = fxplug.diff(gm, new)
    short = fold_diff(text)
    assert len(short) < len(text)
    assert unfolded(short) == unfolded(text)


def test_numbers_that_are_values_are_not_folded():
    place = "@@ -{0},2 +{0},2 @@\n-a_{0} = b_{0}.view({1}, 2)\n+p_{0} = p.{0}.X(b_{0})\n"
    text = "".join(place.format(i, 3 if i < 2 else 4) for i in range(4))
    assert fold_diff(text).splitlines() == [
        "@@ x2: i = {0,1} @@", "-a_{i} = b_{i}.view(3, 2)", "+p_{i} = p.{i}.X(b_{i})",
        "@@ x2: i = {2,3} @@", "-a_{i} = b_{i}.view(4, 2)", "+p_{i} = p.{i}.X(b_{i})",
    ]  # fmt: skip
    assert summarize_diff(text, ["p", "q"]) == "4 lines put in (4 by p), 0 changed, 4 taken out"
    assert fold_diff("") == "" and summarize_diff("", []) == "0 lines put in, 0 changed, 0 taken out"


def test_text_that_is_no_diff_of_ours_does_no_harm():
    for text in ("@@ @@", "@@ a @@\n\0\n@@ a @@\n\0", "no place", "@@ -1 +1 @@\n+a_1\0 = b\n@@ -1 +1 @@\n+a_2\0 = b\n"):
        assert "\0" not in fold_diff(text) and summarize_diff(text, ["a"])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    """What is printed now is on a terminal: gives how wide, and what stands there."""
    for name in ("NO_COLOR", "FORCE_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def begin(columns: int) -> Terminal:
        monkeypatch.setenv("COLUMNS", str(columns))
        shown = Terminal()
        monkeypatch.setattr(sys, "stdout", shown)
        return shown

    return begin


def test_a_diff_has_colours_on_a_terminal_and_its_width(terminal, monkeypatch, capsys):
    gm = vit().gm
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="blocks.*.attn.qkv"))
    text = fxplug.diff(gm, new)
    shown = terminal(60)
    print_diff(make_diff(text, new, False), False)
    lines = shown.getvalue().splitlines()
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    assert max(map(len, plain)) <= 60 and any(line.endswith("\u2026") for line in plain)
    assert any(line.startswith("\x1b[32m+lora_") for line in lines) and any(line.startswith("\x1b[31m-") for line in lines)
    shown = terminal(60)
    print_diff(make_diff(text, new, True), True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue()).startswith(text)
    monkeypatch.setenv("NO_COLOR", "1")
    shown = terminal(60)
    print_diff(make_diff(text, new, False), False)
    assert not re.search(r"\x1b\[\d*;?3[0-9]m", shown.getvalue())
    monkeypatch.undo()
    print_diff(make_diff(text, new, False), False)
    assert capsys.readouterr().out == fold_diff(text) + summarize_diff(text, ["lora"]) + "\n"


def test_sites_stand_in_columns_or_below_each_other(terminal):
    rows = "  blocks.{0:2}.attn.qkv  Linear  [1] -> [3]  Lora +8  x2\n  head  Linear  [1] -> [2]"
    listing = f"lora: 3 sites\n{rows}\n9 parameters"
    shown = terminal(100)
    print_rows(listing)
    one, two = shown.getvalue().splitlines()[1:3]
    assert one.index("Linear") == two.index("Linear")
    shown = terminal(40)
    print_rows(listing)
    assert shown.getvalue().splitlines()[1:3] == ["  blocks.{0:2}.attn.qkv", "      Linear  [1] -> [3]  Lora +8  x2"]


def test_the_command_folds_sites_and_all_lists_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = {"model": "call", "passes": [{"lora": {"at": "blocks.*.attn.*", "rank": 2}}]}
    given["model"] = {"timm": "vit_tiny_patch16_224", "options": {"depth": 3, "img_size": 32}}
    found = fxplug.rewrite({**given, "inputs": {"x": [1, 3, 32, 32]}}, dry_run=True)
    assert [line.split()[0] for line in found.folded.splitlines()[1:3]] == ["blocks.{0:3}.attn.qkv", "blocks.{0:3}.attn.proj"]
    assert found.folded.count(" x3") == 2 and len(found.listing.splitlines()) == len(found.folded.splitlines()) + 4
    again = fxplug.find(found.base, fxplug.load_pass("lora", at="blocks.{0:3}.attn.{qkv,proj}"))
    assert [site.path for site in again] == [site.path for site in found.sites["lora"]]


def test_a_saved_diff_steers_no_terminal(tmp_path):
    new = fxplug.apply(vit().gm, fxplug.load_pass("lora", at="blocks.0.attn.qkv"))
    new.meta["diff"] = {"passes": ["lora"], "text": "@@ a @@\n+x\x1b]0;title\x07 = 1\n"}
    assert "\x1b" not in read_saved_diff("it", new) and "\\x1b]0;title" in read_saved_diff("it", new)
