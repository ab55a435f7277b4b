"""Which features compose (`benchmarks/matrix.py`): a sample of cells has no fault, and the program finds one where it is."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import matrix
import matrix_features
from matrix_features import FEATURES
from matrix_page import grid
from sweeps import sweep

import fxplug

LIMIT = 60
SAMPLE = [
    "vit: lora_slots + outline",
    "vit: fuse_fused + lora",
    "vit: tensor + train",
    "vit: merge_fold + save_load",
    "dit: first_block_cache + dora",
    "dit: bfloat16 + ulysses",
    "dit: lora_slots + batch + ring",
    "convnet: loha + rows",
    "vit: batch + lora_slots",
    "vit: autocast + fsdp + merge_live",  # closer to what float64 gives than the oracle
    "dit: outline + pipeline_part",
    "dit: lora_slots + hoist + ring",
    "dit: lora_slots + served",
]


def found(name):
    return matrix.run(matrix.cell_of(name), LIMIT)


@pytest.mark.slow
@sweep("name", SAMPLE, 0, 3, 7, 8)
def test_a_sample_is_equal(name):
    line = found(name)
    assert (line["outcome"], line["text"]) == (matrix.EQUAL, "")


@pytest.mark.parametrize("name, text", [
    ("vit: dora + merge_live", "leave it un-merged"),
    ("vit: ulysses + save_load + lora", "make the plan of the module that this gives"),
    ("vit: quantised + fsdp", "cannot cut these into shards"),
])  # fmt: skip
def test_a_refusal_has_its_sentence(name, text):
    line = found(name)
    assert line["outcome"] == matrix.REFUSED and text in line["text"]


def test_what_makes_no_sense_has_its_reason():
    line = found("vit: controlnet")
    assert line["outcome"] == matrix.NOT_APPLICABLE and "UNets" in line["text"]


@pytest.fixture
def broken(monkeypatch):
    """Put a feature of another behaviour in the place of one, for one test."""

    def put(name, **changes):
        monkeypatch.setitem(FEATURES, name, replace(FEATURES[name], **changes))
        forget()

    def forget():
        matrix.oracle.cache_clear()
        matrix.exactly.cache_clear()

    yield put
    forget()


def test_other_numbers_are_a_fault(broken):
    def scaled(state):
        return replace(state, result=lambda **kwargs: 1.001 * state.gm(**kwargs))

    broken("export", do=scaled)
    line = found("vit: lora + export")
    assert line["outcome"] == matrix.FAULT and "the result differs by" in line["text"]


def test_another_gradient_is_a_fault(broken):
    def steeper(state):
        return replace(state, gradients=True, result=lambda x: state.gm(x + 0.01 * (x - x.detach())))

    broken("checkpointing", do=steeper)
    line = found("vit: lora + checkpointing")
    assert line["outcome"] == matrix.FAULT and "a gradient differs by" in line["text"]


def test_an_adapter_that_is_lost_is_a_fault(broken):
    broken("save_load", do=lambda state: replace(state, gm=matrix_features.begin("vit").gm))
    assert found("vit: lora + save_load")["outcome"] == matrix.FAULT


def test_an_adapter_without_an_effect_is_a_fault(broken):
    lora = FEATURES["lora"]
    broken("lora", do=lambda state: matrix_features.applied(state, lora.passes(state)), after=lambda state: state)
    line = found("vit: lora + deepcopy")
    assert line["outcome"] == matrix.FAULT and line["text"] == "lora changes nothing"


@pytest.mark.slow
def test_an_exception_of_another_kind_is_a_fault_and_so_is_no_end(broken):
    def fails(state):
        raise RuntimeError("shape mismatch")

    def hangs(state):
        while True:
            torch.ones(1).add_(1)

    broken("deepcopy", do=fails)
    line = found("vit: lora + deepcopy")
    assert line["outcome"] == matrix.FAULT and line["text"] == "RuntimeError: shape mismatch" and "fails" in line["where"]
    broken("deepcopy", do=hangs)
    line = matrix.run(matrix.cell_of("vit: deepcopy"), 1)
    assert line["outcome"] == matrix.FAULT and "not done in 1 s" in line["text"]


def test_an_error_of_ours_is_a_refusal(broken):
    def refuses(state):
        raise fxplug.SpecError("quantise the model first")

    broken("deepcopy", do=refuses)
    assert found("vit: deepcopy")["outcome"] == matrix.REFUSED


def test_what_a_feature_needs_is_put_before_it():
    assert matrix.expanded(["merge_fold", "train"]) == ("lora", "merge_fold", "train")
    assert matrix.expanded(["dora", "merge_fold"]) == ("dora", "merge_fold")
    assert matrix.expanded(["fuse_fused", "lora"]) == ("lora_mixed", "fuse_fused", "lora")


def test_results_are_kept_and_the_last_one_counts(tmp_path):
    file = tmp_path / "kept.jsonl"
    kept = matrix.Kept(file)
    for outcome in (matrix.FAULT, matrix.EQUAL):
        kept.add({"cell": "vit: lora + dora", "outcome": outcome, "text": "", "off": 0.0, "seconds": 0.1})
    assert matrix.Kept(file).lines["vit: lora + dora"]["outcome"] == matrix.EQUAL


def test_a_pair_that_was_not_measured_is_seen():
    names = ["lora", "dora", "head"]
    cells = {("lora", "dora"): "equal", ("dora", "lora"): "", ("lora", "head"): "fault"}
    assert grid(cells, names).splitlines()[2:] == [" 1 lora  =F", " 2 dora .", " 3 head"]


def test_the_newest_classes_are_described_nowhere():
    from matrix_models import MODELS, recent

    names = recent()
    assert len(names) == 20
    files = Path(matrix.__file__).parent.glob("matrix*.py")
    text = "".join(file.read_text() for file in files)
    assert not [name for name in names if name.rpartition("/")[2] in text] and not set(names) & set(MODELS)
