"""Values as JSON, in the two forms that files have: bare in a graph, each with its kind in the signature of a package."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch

from fxplug.core.artifacts.value_json import decode
from fxplug.core.errors import ArtifactError, FxplugError
from fxplug.exports import call_signature as signatures


@dataclass
class Out:
    """A result class."""

    sample: object
    kept: object = None


VALUE = {"a": [signatures.Placeholder("tensor", 1), (2, "x", None)], "b": Out(True, torch.float16)}
# what packages of format 1 have had since there are any
WRITTEN = (
    '{"dict": [["a", {"list": [{"tensor": 1}, {"tuple": [{"is": 2}, {"is": "x"}, {"is": null}]}]}],'
    ' ["b", {"dict": [["sample", {"is": true}], ["kept", {"like": "torch.float16"}]]}]]}'
)


def test_what_packages_say_stays():
    assert json.dumps(signatures.encode_value(VALUE)) == WRITTEN


def test_it_is_read_again_and_held_to_a_call():
    read, x = signatures._decoded(json.loads(WRITTEN), ("tensor",)), torch.ones(2)
    assert signatures._places(read, "y") == [(1, "y['a'][0]")]
    right = {"a": [x, (2, "x", None)], "b": Out(True, torch.float16)}
    for given in (right, {"a": (x, [2, "x", None]), "b": vars(VALUE["b"])}):
        flat: list[object] = [None, None]
        signatures._fill(read, given, "y", flat, "package was compiled")
        assert flat == [None, x]
    for wrong, said in [
        ({"a": [x, (2, "x", None)]}, "y must be a dict with a, b"),
        ({"a": [x], "b": Out(True, torch.float16)}, r"y\['a'\] must be a list of 2"),
        ({"a": [3, (2, "x", None)], "b": Out(True, torch.float16)}, r"y\['a'\]\[0\] must be a tensor, not 3"),
        ({"a": [x, (2.0, "x", None)], "b": Out(True, torch.float16)}, r"y\['a'\]\[1\]\[0\] is 2.0; .* compiled with 2 for it"),
        ({"a": [x, (2, "x", None)], "b": Out(1, torch.float16)}, r"y\['b'\]\['sample'\] is 1; .* compiled with True"),
        ({"a": [x, (2, "x", None)], "b": Out(True, torch.float32)}, "compiled with torch.float16 for it"),
    ]:
        with pytest.raises(FxplugError, match=said):
            signatures._fill(read, wrong, "y", [None, None], "package was compiled")
    result = signatures._decoded({"tuple": [{"tensor": 0}, {"list": [{"number": 1}, {"is": 3}]}]}, ("tensor", "number"))
    assert signatures._rebuild(result, [x, torch.tensor(7)]) == (x, [7, 3])


@pytest.mark.parametrize(
    "data",
    [
        {}, {"is": [1]}, {"is": {"a": 1}}, {"tensor": -1}, {"tensor": True}, {"tensor": 1 << 20}, {"number": 0}, {"like": 3},
        {"dict": [["a", {"is": 1}], ["a", {"is": 2}]]}, {"dict": [[["a"], {"is": 1}]]}, {"list": 3}, {"node": "x"},
        {"dict": [1]}, {"is": 1, "like": "a"}, {"device": "cpu"}, {"list": [{"list": [{"number": 0}]}]},
    ],
)  # fmt: skip
def test_what_is_no_value_of_a_signature(data):
    with pytest.raises((ValueError, TypeError, ArtifactError)):
        signatures._decoded(data, ("tensor",))


def test_a_number_that_json_has_not():
    assert json.loads(json.dumps(signatures.encode_value(float("inf")), allow_nan=False)) == {"float": "inf"}
    assert signatures._decoded({"list": [{"float": "inf"}]}, ()) == [float("inf")]


def test_a_key_twice_is_refused():
    with pytest.raises(ArtifactError, match="graph.json: .* is not a valid dict: 'it has the same key twice'"):
        decode({"dict": [["a", 1], ["a", 2]]})
