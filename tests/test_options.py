"""Options are held to what a callable takes, whatever kind of callable it is."""

from __future__ import annotations

import functools
from collections import deque

import pytest

from fxplug.core.errors import SpecError
from fxplug.core.spec.pass_file import check_options, get_arguments


class Made:
    def __init__(self, host, rank, /, alpha, *rest, scale=1.0):
        pass


class Free:
    def __init__(self, host, **more):
        pass


def test_what_is_taken():
    found = get_arguments(Made, given=1)
    assert found.names == ("alpha", "scale") and found.required == ("rank", "alpha") and not found.free
    assert get_arguments(functools.partial(Made, 1, 2, 3)).names == ("scale",)
    assert get_arguments(Free).free and get_arguments(Free, leave=("host",)).required == ()
    assert get_arguments(type("C", (deque,), {})).names == get_arguments(dict).names == ()  # these show no signature


@pytest.mark.parametrize(
    ("kind", "options", "given", "finding"),
    [
        (Made, ["alpha", "sclae"], 2, "it has no option 'sclae' (did you mean 'scale'?); it takes alpha, scale"),
        (Made, ["rest"], 2, "it has no option 'rest'; it takes alpha, scale"),
        (Made, ["scale"], 2, "it needs the option 'alpha'"),
        (Made, [], 0, "it needs the options 'host', 'rank', 'alpha'"),
        (Free, ["anything"], 0, "it needs the option 'host'"),
        (dict, ["a"], 0, "it has no option 'a'; it takes none"),
    ],
)
def test_what_is_not(kind, options, given, finding):
    with pytest.raises(SpecError) as raised:
        check_options(get_arguments(kind, given), options, "it")
    assert raised.value.finding == finding


def test_what_fits():
    check_options(get_arguments(Made, 2), ["alpha", "scale"], "it")
    check_options(get_arguments(Free), ["host", "anything"], "it")
