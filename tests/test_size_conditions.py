"""Conditions on the sizes of inputs that packages and ONNX models say: evaluated in bounds, and nothing else of Python."""

from __future__ import annotations

import pytest
import torch
from hostile_files import watched

from fxplug.core.errors import FxplugError
from fxplug.exports import expressions

GUARDS = [
    "9**9**9", "9**99999999", "(9**200)**(9**200)", "2**-99999999999", "0**-1", "1/0", "1%0", "1//0", "round(1, -999999999)",
    "L['image'].size() * 999999999", "L['image'].size() + L['image'].size()", "L", "L['image']", "L['gone'].size()[0]",
    "L['image'].size()[99]", "L['image'].size()['x']", "L['image'].__class__", "().__class__.__bases__[0].__subclasses__()",
    "__import__('os').system('id')", "open('/tmp/evil', 'w')", "eval('1')", "lambda: 1", "[x for x in ()]", "x := 1",
    "f'{1}'", "a",
    "math.factorial(99999)", "math.sqrt(-1)", "math.floor(1e400)", "math.ceil(1e400 - 1e400)", "max(5)", "min()", "abs(1, 2)",
    "torch.sym_ite(1)", "max(*L)", "max(1, key=2)", "'x' * 999999999", "'x' < 1", "None", "...", "1 < 2 < 'x'", "1j * 1j < 1",
    "(-8) ** 0.5 < 1", "not " * 20_000 + "1", "-" * 50_000 + "1", "~1",
    "(" * 500 + "1" + ")" * 500, "[" * 150 + "]" * 150, "1+" * 5000 + "1",
    "L" + "['a']" * 5000, "1 if 1 else 2", "1 and " * 10_000 + "1", "max(" * 90 + "1, 1" + ", 1)" * 90, "\\", "\0",
    "{" * 99, "1\n2",
    "0x" + "f" * 5000 + " < 1", "9" * 5000 + " < 1", "1" + "0" * 200_000, "L['image'].size(0)",
    "L['image'].size()[-1]", "True", "1",
    "x" * 300_000,
]  # fmt: skip
ARGUMENTS = {"image": torch.ones(2, 3, 8, 8), "more": {"scale": torch.ones(2, 1)}, "pair": (0, torch.ones(5))}


@pytest.mark.parametrize("guard", GUARDS)
def test_hostile_conditions(guard):
    """They are refused, or a number within bounds; none is run."""
    with watched() as seen:
        try:
            value = expressions.evaluate(expressions.parse(guard), ARGUMENTS)
        except (FxplugError, ArithmeticError):
            value = 0
    seen = [each for each in seen if not each.startswith("compile (b")]  # of text, to a tree that is never run
    assert not seen and isinstance(value, (bool, int, float)) and (not isinstance(value, int) or value.bit_length() <= 256)


@pytest.mark.parametrize(
    "text, value",
    [
        ("L['image'].size()[0] < 64", True), ("(L['image'].size()[3] % 2) == 0", True), ("-L['image'].size()[1] + 2", -1),
        ("L['more']['scale'].size()[0] == 2 and not L['image'].size()[2] > 8", True), ("2**L['image'].size()[1]", 8),
        ("math.ceil(L['image'].size()[2] / 3) * max(1, L['image'].size()[1])", 9), ("torch.sym_ite(1 > 2, 3, 4)", 4),
        ("L['pair'][1].size()[0]", 5), ("1 < L['image'].size()[0] <= 2", True), ("round(L['image'].size()[1] / 2, 1)", 1.5),
    ],
)  # fmt: skip
def test_conditions_are_evaluated(text, value):
    assert expressions.evaluate(expressions.parse(text), ARGUMENTS) == value
