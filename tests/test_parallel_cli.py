"""Parallel passes in a configuration, `fxplug parallel`, and verification of parallel modules, on real processes too."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import small
import torch
from sweeps import sweep
from test_parallel_faults import Tokens
from typer.testing import CliRunner

import fxplug
from fxplug.__main__ import app
from fxplug.config.cli.pages import SMALL
from fxplug.core.spec.pass_file import list_shipped, open_pass
from fxplug.parallel import processes as cli_processes
from fxplug.parallel.comparison import check_pretended, get_degrees, simulate_rank
from fxplug.parallel.plan_options import STEP_KEYS, WAYS, PlanOptions
from fxplug.parallel.runtime.attention import Attention
from fxplug.parallel.runtime.pretended import make_position
from fxplug.parallel.stage import make_single_position

CLOSE = 1e-5
MODEL = """\
model: {timm: vit_tiny_patch16_224, options: {img_size: 32, depth: 2, num_classes: 10}}
inputs: {x: [2, 3, 32, 32]}
"""
CONFIG = (
    MODEL
    + """\
passes:
  - batch_parallel
  - lora: {at: "blocks.*.mlp.fc1", rank: 2}
  - sequence_parallel: {ulysses: 2}
"""
)
NAMES = [name for name in list_shipped("passes") if "parallel" in open_pass(name).source.data]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def forked(monkeypatch):
    """Processes that the verb starts are forked from one that has imported torch."""
    start = torch.multiprocessing.start_processes
    monkeypatch.setattr(cli_processes, "spawn", functools.partial(start, start_method="forkserver"))


def run(*args, code=0):
    done = CliRunner().invoke(app, args)
    assert done.exit_code == code, done.output + done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.mark.slow
def test_parallel_passes_are_one_plan_after_all_others():
    Path("c.yaml").write_text(CONFIG)
    done = fxplug.rewrite("c.yaml", out="out")
    assert done.plan.ways == {**dict.fromkeys(done.plan.ways, 1), "batch": 2, "ulysses": 2}
    assert [e["name"] for e in done.module.meta["passes"]] == ["lora", "batch_parallel", "sequence_parallel"]
    checks = {c.name: c for c in done.report.checks}
    assert all(checks[n].status == "ok" for n in ("lint", "base", "shapes", "saved", "one graph", "parallel")), done.report
    assert re.search(r"4 simulated .* by \S+e-\d+, and one from the module before by 0.0e\+00", checks["parallel"].detail)
    again = fxplug.load("out")
    assert get_degrees(again) == get_degrees(done.module) and check_pretended(again, *done.inputs) < CLOSE
    with simulate_rank(make_single_position()):
        assert torch.equal(again(*done.inputs[0], **done.inputs[1]), done.base(*done.inputs[0], **done.inputs[1]))
    text = run("sites", "c.yaml")
    assert "batch 2 x ulysses 2" in text and "lora: 2 sites" in text and "2 Attention" in text
    assert "sequence_parallel.attention1(" in run("diff", "c.yaml")


@pytest.mark.slow
@sweep("name", NAMES, 0, 1)
def test_every_parallel_pass_gives_what_one_process_gives(name):
    example = open_pass(name).source.data["example"]
    with pytest.raises(fxplug.SpecError, match=f"{name}: a parallel pass is not applied with apply"):
        fxplug.apply(small.vit().gm, fxplug.load_pass(name, **example["with"]))
    given = {"model": example.get("model", SMALL), "inputs": example.get("inputs", {}), "passes": [{name: example["with"]}]}
    done = fxplug.rewrite(given, verify=False)
    report = fxplug.verify(done.base, done.module, *done.inputs, compile=False)
    assert {c.name: c.status for c in report.checks}["in steps" if done.stepped else "parallel"] == "ok"
    assert done.module.state_dict().keys() == done.base.state_dict().keys()
    assert [entry["name"] for entry in done.module.meta["passes"]] == [name]


def test_ways_of_one_leave_the_model_as_it_is():
    Path("c.yaml").write_text(MODEL + "passes: [sequence_parallel, {batch_parallel: {ways: 1}}]\n")
    done = fxplug.rewrite("c.yaml", verify=False)
    assert done.plan is None and done.module is done.base


def test_the_keys_of_a_plan_are_the_arguments_of_parallel_plan():
    import inspect

    known = inspect.signature(fxplug.parallel_plan).parameters
    assert {*PlanOptions.model_fields} - {"at", *STEP_KEYS} <= {*known}
    assert {*WAYS} <= {k for k, p in known.items() if p.default == 1}
    assert {*STEP_KEYS} - {"stale"} <= {*inspect.signature(fxplug.pipefusion).parameters}


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ("sequence_parallel: {ulises: 2}", r"c.yaml:4: .*no parameter 'ulises' .did you mean 'ulysses'"),
        ("sequence_parallel: {ulysses: two}", r"c.yaml:4: .*ulysses: must be a whole number, not 'two'"),
        ("sequence_parallel: {ring: 0}", r"c.yaml:4: .*parallel.ring: must be 1 or more, not 0"),
        ("sequence_parallel: {ring: true}", r"c.yaml:4: .*ring: must be a whole number, not true"),
        ("sequence_parallel: {ulysses: 2, split: {x: a}}", r"c.yaml:4: .*parallel.split.x: must be a whole number, not 'a'"),
        ("sequence_parallel: {ulysses: 2, split: {no: 1}}", "split: no node 'no'.*given at c.yaml:4"),
        ("batch_parallel: {ways: 2, lr: 0.1}", "c.yaml:4: .*a parallel pass has no 'lr'"),
        ("batch_parallel: {ways: 3}", r"2 samples \('x', dimension 0\) cannot be split over 3 processes.*given at c.yaml:4"),
        ("spatial_parallel: {at: decodr}", "spatial_parallel: 'decodr' matched 0 places.*given at c.yaml:4"),
        ("spatial_parallel: {at: 3}", "c.yaml:4: .*must be the path of a region, not 3"),
        ("sequence_parallel: {ulysses: 2}\n  - own.yaml", "another pass sets 'ulysses' too, .*given at c.yaml:5"),
    ],
)
def test_mistakes_are_told_with_file_and_line(entry, text):
    Path("own.yaml").write_text("about: Mine.\nparallel: {ulysses: 2}\n")
    Path("c.yaml").write_text(f"{MODEL}passes:\n  - {entry}\n")
    assert re.search(text, run("sites", "c.yaml", code=1), re.S)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("parallel: {ulises: 2}", "own.yaml:1: parallel: unknown key 'ulises' .did you mean 'ulysses'"),
        ("parallel: [2]", "own.yaml:1: parallel: must be a mapping of ulysses, ring"),
        ("parallel: {ring: 2}\nslots: 2", "a parallel pass has no 'slots'"),
        ("parallel: {ring: 2}\nrules: [{match: {}, use: 'a:B'}]", "a parallel pass has no 'rules'"),
        ("parallel: {}", "missing|every rule|empty list"),
    ],
)
def test_a_pass_file_that_is_none(given, text):
    Path("own.yaml").write_text(given)
    with pytest.raises(fxplug.SpecError, match=text):
        fxplug.load_pass("own.yaml")


# --- the verb


@pytest.mark.slow
def test_a_plan_needs_no_values():
    text = run("parallel", "vit_lora", "--ways", "ulysses=3", "--plan-only", "--set", "weights=null")
    assert "ulysses 3\nsequence_parallel: 9" in text and "collectives of process 0 send" in text


@pytest.mark.slow
def test_ways_on_the_line_take_the_place_of_those_in_the_file_and_are_saved():
    Path("c.yaml").write_text(CONFIG)
    text = run("parallel", "c.yaml", "--ways", "ring=2", "--out", "out")
    assert text.startswith("ring 2\n") and "simulated processes differ from one by" in text and text.endswith("saved in out\n")
    assert [p.name for p in fxplug.load_config("out/config.yaml").passes] == ["lora", "sequence_parallel"]
    assert run("parallel", "out", "--plan-only").splitlines()[0] == "ring 2"
    assert "is parallel already, with --ways ring=2" in run("parallel", "out", "--ways", "ulysses=2", code=1)
    run("rewrite", "c.yaml", "--set", "passes=[lora]", "--out", "plain", "--no-verify")
    assert "'plain' is not parallel: give --ways" in run("parallel", "plain", code=1)
    run("parallel", "plain", "--ways", "batch=2", "--out", "two")
    assert [p.name for p in fxplug.load_config("two/config.yaml").passes] == ["lora", "batch_parallel"]


@pytest.mark.parametrize(
    ("ways", "text"),
    [
        ("ulises=2", "--ways 'ulises=2': no axis 'ulises' .did you mean 'ulysses'"),
        ("ring=0", "ring must be a whole number, 1 or more, not '0'"),
        ("ring", "ring must be a whole number, 1 or more, not ''"),
        ("ring=2,ring=2", "'ring' is given twice"),
        ("", "has no parallel degrees: give --ways ulysses=2"),
    ],
)
def test_wrong_ways(ways, text):
    Path("c.yaml").write_text(MODEL)
    assert re.search(text, run("parallel", "c.yaml", "--ways", ways, code=1))


def torchrun(count, *args):
    """The verb in processes that believe that torchrun has started them."""
    folder = Path("printed")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return processes.ended(processes.verb, *args, folder=folder, world=count)


SAID = r"2 simulated processes differ from one by \S+, real ones from simulated ones by \S+; every value was compared\n"


def saved():
    Path("c.yaml").write_text(MODEL + "passes: [{sequence_parallel: {ulysses: 2}}]\n")
    return run("parallel", "c.yaml", "--check", "--out", "out")


@pytest.mark.slow
def test_a_check_on_processes_of_its_own_and_of_torchrun(forked):
    assert re.search(SAID + "saved in out\n$", saved())
    done = torchrun(2, "parallel", "out", "--check")
    assert done.codes == [0, 0], done.stderr
    assert len(re.findall(SAID, done.stdout)) == 1 and done.stdout.count("collectives of process 0") == 1
    done = torchrun(2, "rewrite", "none.yaml")  # a verb for one process, which fails
    assert done.stderr.count("none.yaml") == 1 and done.codes == [1, 0]


@pytest.mark.slow  # programs that import torch, the two that the verb starts among them
def test_torchrun_itself():
    saved()
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(fxplug.__file__).parent.parent)])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "fxplug"]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command += ["parallel", "out", "--check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(SAID, done.stdout)) == 1 and done.stdout.count("collectives of process 0") == 1


def test_what_differs_is_named(monkeypatch):
    base = small.vit()
    new = fxplug.parallelize(base.gm, fxplug.parallel_plan(base.gm, base.args, ulysses=2))
    real = Attention.attend
    monkeypatch.setattr(Attention, "attend", lambda self, q, *rest: real(self, q.flip(2), *rest))
    with pytest.raises(fxplug.VerifyError, match="first value that differs is 'blocks_0_add'"):
        fxplug.verify(base.gm, new, base.args, compile=False)


# --- what it will cost

TOKENS = "model: {call: 'test_parallel_faults:Tokens'}\ninputs: {x: [2, 64, 16]}\n"


def test_bytes_are_those_of_the_papers():
    from fxplug.parallel.costs.prediction import LINKS, predict, winners

    gm = fxplug.trace(Tokens().eval(), torch.randn(2, 64, 16)).eval().to("meta")
    rows = predict(gm, torch.empty(2, 64, 16, device="meta"), {}, [2, 4], LINKS["pcie"], pixels=128)
    found = {row.method: row for row in rows}
    all_tokens, layers = 2 * 64 * 16 * 4, 3
    for n in (2, 4):
        gather = all_tokens * (n - 1) // n
        # DeepSpeed-Ulysses: queries, keys, values and results of N / P tokens, of which all but a P-th goes to others
        assert found[f"ulysses {n}"].bytes == layers * 4 * all_tokens * (n - 1) // n // n + gather
        # Ring Attention: keys and values of N / P tokens go on P - 1 times
        assert found[f"ring {n}"].bytes == layers * 2 * all_tokens * (n - 1) // n + gather
        assert found[f"ulysses {n}"].calls == layers * 4 + 1 and found[f"ring {n}"].calls == layers * (n - 1) + 1
    # USP: heads among two, and the keys and values of two go around
    assert found["ulysses 2 x ring 2"].bytes == layers * (4 * all_tokens // 8 + 2 * all_tokens // 4) + all_tokens * 3 // 4
    assert found["batch 2"].bytes == all_tokens // 2 and found["batch 2"].calls == 1
    assert found["batch 2 x ulysses 2"].bytes == (layers * all_tokens + all_tokens // 2) // 2 + all_tokens // 2
    assert {row.devices for row in winners(rows)} == {1, 2, 4} and all(0 < row.compute <= 1 for row in rows)
    plan = fxplug.parallel_plan(gm, torch.empty(2, 64, 16, device="meta"), ulysses=2, ring=2)
    assert found["ulysses 2 x ring 2"].bytes == plan.bytes()


@pytest.mark.slow
def test_the_fastest_plan_is_the_one_that_is_predicted_to_be(monkeypatch):
    from fxplug.parallel.costs import prediction

    base = small.vit()
    figures, speed = prediction.link_of("100gbe"), 0.001
    rows = prediction.predict(base.gm, base.args, base.kwargs, [2], figures, speed)
    wanted = sorted((row for row in rows if row.ways), key=lambda row: row.seconds)
    plan = fxplug.fastest_plan(base.gm, base.args, base.kwargs, devices=2, link="100gbe", speed=speed)
    assert {axis: n for axis, n in plan.ways.items() if n > 1} == {axis: n for axis, n in wanted[0].ways.items() if n > 1}
    text = str(plan)
    assert "at 10 GB/s and 30 us per call, 0.001 TFLOP/s per device" in text and all(row.method in text for row in rows)
    new = fxplug.parallelize(base.gm, plan)
    with simulate_rank(make_position(plan.ways, 0)):
        new(*base.args, **base.kwargs)

    def refuse(gm, args, kwargs, **given):
        if given == {**wanted[0].ways, "check": True}:
            raise fxplug.SpecError("not here")
        return fxplug.parallel_plan(gm, args, kwargs, **given)

    monkeypatch.setattr(prediction, "parallel_plan", refuse)
    plan = fxplug.fastest_plan(base.gm, base.args, base.kwargs, devices=2, link="100gbe", speed=speed)
    assert {axis: n for axis, n in plan.ways.items() if n > 1} == {axis: n for axis, n in wanted[1].ways.items() if n > 1}
    assert f"{wanted[0].method}: not here" in str(plan)


def test_a_module_can_be_called_while_its_costs_are_predicted(monkeypatch):
    from fxplug.parallel.costs import prediction

    base, step, seen = small.vit(), prediction.GraphRun.step, []

    def called(self, *args):
        seen.append({type(p) for p in base.gm.parameters()})
        return step(self, *args)

    monkeypatch.setattr(prediction.GraphRun, "step", called)
    prediction.predict(base.gm, base.args, base.kwargs, [2], prediction.LINKS["pcie"])
    assert len(seen) > 2 and set().union(*seen) == {torch.nn.Parameter}


def test_the_fastest_ways_are_taken_and_printed():
    Path("c.yaml").write_text(TOKENS)
    text = run("parallel", "c.yaml", "--ways", "auto", "--devices", "2", "--link", "pcie", "--plan-only")
    chosen, _, plan = text.partition("batch 2\nbatch_parallel")
    assert chosen.startswith("chosen among, at 20 GB/s") and "ulysses 2" in chosen and plan


@pytest.mark.slow
def test_a_prediction_is_printed_and_drawn():
    from xml.etree import ElementTree

    Path("c.yaml").write_text(TOKENS)
    text = run("parallel", "c.yaml", "--predict", "128,256", "--devices", "2,4", "--link", "100gbe", "--out", "p.svg")
    assert text.startswith("float32, 10 GB/s and 30 us per call, 300 TFLOP/s per device\n")
    assert text.endswith("saved in p.svg\n")
    rows = [line.replace("*", " ").split() for line in text.splitlines()[2:-1]]
    sent = {(row[0], row[1], " ".join(row[2:-5])): row[-4] for row in rows}
    assert ("128", "4", "ulysses 2 x ring 2") in sent and ("256", "2", "ring 2") in sent
    assert text.count("*") == 4  # one for each resolution and number of devices
    lines = [group for group in ElementTree.parse("p.svg").iter() if group.get("id", "").startswith("line2d_")]
    assert len(lines) >= 2 * 5


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--predict", "1k"], "--predict '1k': must be whole numbers, 1 or more"),
        (["--predict", "128", "--devices", "1"], "--devices '1': must be whole numbers, 2 or more"),
        (["--predict", "128", "--link", "nvlnk"], "link 'nvlnk': no such link .did you mean 'nvlink'.*or GB/s"),
        (["--predict", "128", "--link", "measured"], "measured needs several processes: start with torchrun"),
        (["--ways", "auto", "--devices", "2", "--speed", "0"], "speed must be in TFLOP/s, above 0, not 0.0"),
        (["--ways", "auto"], "--ways auto is for one number of processes, not 2,4,8: give --devices 2"),
        (["--ways", "auto", "--devices", "67"], "no way to split this model over 67 processes: .*tensor"),
        (["--ways", "auto", "--devices", "2", "--link", "measured"], "measured needs several processes: start with torchrun"),
    ],
)
def test_wrong_predictions(args, text):
    Path("c.yaml").write_text(TOKENS)
    assert re.search(text, run("parallel", "c.yaml", *args, code=1))


@pytest.mark.slow
def test_guidance_tokens_and_heads_in_one_plan():
    passes = [{"tensor_parallel": {"ways": 2}}, "batch_parallel", {"sequence_parallel": {"ring": 2}}]
    done = fxplug.rewrite({"model": SMALL, "inputs": {"x": [2, 3, 32, 32]}, "passes": passes}, verify=False)
    assert {axis: n for axis, n in done.plan.ways.items() if n > 1} == {"batch": 2, "ring": 2, "tensor": 2}
    assert check_pretended(done.module, *done.inputs, every=True) < CLOSE


# --- a step late

PIXART = open_pass("pipefusion").source.data["example"]


def written(*passes):
    return fxplug.rewrite({"model": PIXART["model"], "inputs": PIXART["inputs"], "passes": list(passes)}, out="out")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("passes", "said"),
    [
        ([{"pipefusion": {"stages": 2, "patches": 2}}], {"stages": 2, "patches": 2, "warmup": 1, "correct": 0}),
        (["batch_parallel", {"pipefusion": {"warmup": 3, "clock": ""}}], {"stages": 2, "patches": 4, "batch": 2, "warmup": 3}),
        ([{"sequence_parallel": {"ulysses": 2, "ring": 2, "stale": True}}], {"ways": 4}),
        (["batch_parallel", {"sequence_parallel": {"ulysses": 3, "stale": True, "correct": 1, "steps": 9}}], {"ways": 3}),
    ],
)
def test_a_pass_says_how_a_module_is_run_in_steps(passes, said):
    done = written(*passes)
    args, kwargs = done.inputs
    again = fxplug.load("out")
    for module in (done.module, again):
        assert said.items() <= module.meta["stepped"].items()
        late = fxplug.in_steps(module, args, kwargs)
        assert late.warmup == said.get("warmup", 1) and late.check(args, kwargs) < CLOSE
        assert (late.clock.name is None) is (passes[-1].get("pipefusion", {}).get("clock") == "")
        assert torch.equal(late(*args, **kwargs)[0], done.base(*args, **kwargs)[0])  # the first step is in one piece
    (check,) = (c for c in done.report.checks if c.name == "in steps")
    assert check.status == "ok" and re.search(r"differs by \S+ in one piece and by patches; stages: ", check.detail)
    assert done.plan is None and "patches, warm-up" in str(done)
    assert [e["name"] for e in done.module.meta["passes"]] == [*passes[-1]]


@pytest.mark.parametrize(
    ("passes", "match"),
    [
        ([{"sequence_parallel": {"ulysses": 2, "warmup": 2}}], "sequence_parallel: 'warmup' is only for stale values"),
        (["pipefusion", "tensor_parallel"], "pipefusion: 'tensor' cannot be used with stages: leave it out"),
        (["spatial_parallel", {"sequence_parallel": {"ulysses": 2, "stale": True}}], "'rows' cannot be used with stale: true"),
        (["pipefusion", {"sequence_parallel": {"ulysses": 2, "stale": True}}], "'ulysses' cannot be used with stages"),
        ([{"pipefusion": {"stages": 0}}], "must be 1 or more, not 0"),
        ([{"pipefusion": {"correct": 2}}], r"correct=2 needs the number of steps of an image"),
        ([{"pipefusion": {"stages": 99}}], "this model cannot be cut into 99 stages"),
        ([{"sequence_parallel": {"ulysses": 2, "stale": 1}}], "must be true or false, not 1"),
    ],
)
def test_what_cannot_be_run_in_steps(passes, match):
    with pytest.raises(fxplug.SpecError, match=match):
        written(*passes)
    assert not Path("out").exists()


@pytest.mark.slow
def test_stages_from_the_command_line(forked):
    model = json.dumps(PIXART["model"]), json.dumps(PIXART["inputs"])
    Path("c.yaml").write_text("model: {}\ninputs: {}\n".format(*model))
    said = r"stages: [\d.]+%, [\d.]+% of the work; 2 patches, warm-up 1, correct 0\n"
    checked = r"one process differs by \S+ in one piece and by patches, 2 real ones by \S+\n"
    shown = run("parallel", "c.yaml", "--ways", "stages=2,patches=2", "--check", "--out", "out")
    assert re.fullmatch(said + checked + "saved in out\n", shown)
    done = torchrun(2, "parallel", "out", "--check")
    assert done.codes == [0, 0] and len(re.findall(said + checked, done.stdout)) == 1, done.stderr
    assert re.fullmatch(said, run("parallel", "out", "--plan-only"))
    assert "'out' is parallel already, with --ways stages=2,patches=2" in run("parallel", "out", "--ways", "ulysses=2", code=1)
    assert "write stages=2,patches=4" in run("parallel", "c.yaml", "--ways", "patches=2", code=1)
    run("rewrite", "c.yaml", "--out", "plain", "--no-verify")
    assert re.fullmatch(said, run("parallel", "plain", "--ways", "stages=2,patches=2", "--plan-only"))
