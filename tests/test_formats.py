"""Files of our own say which version of their format they have, and a later one is refused in the same words everywhere."""

from __future__ import annotations

import json

import pytest
import torch

from fxplug.core.errors import ArtifactError, TrainError
from fxplug.core.reading import check_format, make_reporter
from fxplug.training import checkpoint


@pytest.mark.parametrize(
    ("manifest", "finding"),
    [
        ({"format": 4, "fxplug": "9.9"}, "f has format 4, written by fxplug 9.9; this version reads up to 3: update fxplug"),
        ({"format": 4}, "f has format 4; this version reads up to 3: update fxplug"),
        ({"format": True}, "f cannot be read: its manifest has the format True, which is not a version"),
        ({"format": 0}, "f cannot be read: its manifest has the format 0, which is not a version"),
        ({}, "f cannot be read: its manifest has the format None, which is not a version"),
        ([], "f cannot be read: its manifest has the format None, which is not a version"),
    ],
)
def test_what_is_refused(manifest, finding):
    with pytest.raises(ArtifactError) as raised:
        check_format(manifest, 3, make_reporter("f"))
    assert str(raised.value) == finding
    check_format({"format": 1}, 3, make_reporter("f"))
    check_format({"format": 3}, 3, make_reporter("f"))


def test_a_checkpoint_of_a_later_format(tmp_path):
    state = {"weights": {"w": torch.ones(2)}, "ema": {}, "progress": {"step": 1}}
    folder = checkpoint.write(tmp_path, checkpoint.Checkpoint(state), keep=1)
    assert checkpoint.read(folder).state["progress"] == {"step": 1}
    said = json.loads((folder / "progress.json").read_text())
    (folder / "progress.json").write_text(json.dumps({**said, "format": 3}))
    with pytest.raises(TrainError, match="has format 3; this version reads up to 2: update fxplug; resume from another one"):
        checkpoint.read(folder)
    (folder / "progress.json").write_text(json.dumps({"format": 1, "step": 1}))
    with pytest.raises(TrainError, match="is a checkpoint of an earlier version, which counts batches and not samples"):
        checkpoint.read(folder)
