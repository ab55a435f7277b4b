"""Many adapters in one run: each learns what its run alone does, whatever the others do, and however the run ends."""

import copy
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import many_adapters as many
import pytest
import torch
from fuzz_many import fuzz_many
from many_adapters import Samples, are_equal, base, distance, settings, slotted, train, train_alone, trained
from torch import nn

import fxplug
from fxplug.config.run_config import check_settings
from fxplug.core.errors import SpecError, TrainError
from fxplug.training.adapter_runs import AdapterRuns
from fxplug.training.adapter_turns import choose_separate_passes
from fxplug.training.checkpoint import list_checkpoints, read
from fxplug.training.shared_pass import SharedPass
from fxplug.training.train_section import Train
from fxplug.training.trainer import Trainer


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "loha", "lokr", "dora", "ia3", "ssf", "lora_weight", "delta"])
def test_each_learns_what_its_run_alone_does(kind):
    count = 8 if kind == "lora" else 3
    rows = [settings(number, kind) for number in range(count)]
    module = slotted(kind, slots=count)
    run = train(module, rows, in_turn=False)
    assert isinstance(run, AdapterRuns) and not run.failed
    for row in rows:
        own = trained(run, row["name"])
        alone = train_alone(row, kind)
        assert distance(own, alone.trained) < 1e-9
        if row is rows[-1]:  # what is true of each is tried on one
            single = train(slotted(kind, slots=1), [row], in_turn=False)
            assert distance(own, trained(single, row["name"])) < 1e-9
            new = train_alone({**row, "steps": 1, "lr": 0.0}, kind)
            assert distance(own, new.trained) > 1e-4  # it has learnt something
        losses = [record["loss"] for record in run.history if record["adapter"] == row["name"]]
        assert losses == pytest.approx([record["loss"] for record in alone.history], abs=1e-9)
        assert len(losses) == row["steps"]
    if kind == "ssf":  # whose blocks have no slots
        return
    assert module.adapters.names == [row["name"] for row in rows]
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    for row in rows:
        module.eval().adapters.use(row["name"])
        assert torch.allclose(module(x), run.get_adapter(row["name"]).eval()(x), atol=1e-6)


@pytest.mark.slow
def test_adapters_of_several_kinds_train_side_by_side():
    kinds = ("lora", "loha", "lokr", "ia3", "dora", "ia3", "lora")
    module, at = base(), ["stem", "qkv"]
    for kind in dict.fromkeys(kinds):
        module = slotted(kind, slots=2 - (kind == "lora"), gm=module, at=at)  # the second LoRA waits for the first one's slot
    rows = [{**settings(number, kind), "passes": [kind]} for number, kind in enumerate(kinds)]
    run = train(module, rows, in_turn=False)
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    for kind, row in zip(kinds, rows, strict=True):
        alone = train_alone({key: value for key, value in row.items() if key != "passes"}, kind, at=at)
        assert distance(trained(run, row["name"]), alone.trained) < 1e-9
        if row["name"] != "a6":  # whose slot 'a0' has
            module.eval().adapters.use(row["name"])
            assert torch.allclose(module(x), alone.module.eval()(x), atol=1e-6)
    assert sorted(module.adapters.names) == [f"a{number}" for number in range(6)]
    both = {**settings(1, "ia3"), "passes": ["lora", "ia3"]}
    run = train(slotted("ia3", gm=slotted(at=at), at=at), [both, settings(0, "ia3")])
    assert all(len(trained(run, name)) == 6 for name in ("a0", "a1"))  # two of each LoRA and a gate, in two layers


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_in_turn_each_is_its_run_alone_to_the_bit(kind):
    """Whatever the base does with samples, and whatever these are: no pass has those of two adapters."""
    gm = base(torch.float32, drop=0.3, batch_norm=True)
    rows = [{**settings(number, kind), "ema": 0.9} for number in range(4)]
    rows[1]["data"] = Samples(1, 10, spoil=3)
    more = {"mode": "train", "in_turn": True} if kind == "lora" else {"in_turn": None}
    run = train(slotted(kind, slots=2, gm=gm), rows, **more)
    assert list(run.failed) == ["a1"] and not run.sharing
    for row in rows[:1] + rows[2:]:
        own = {**row, "fuse": True, **({"mode": "train"} if kind == "lora" else {})}  # the defaults of a run
        alone = train_alone(own, kind, gm=gm)
        assert are_equal(trained(run, row["name"]), dict(alone.trained))
        losses = [record["loss"] for record in run.history if record["adapter"] == row["name"]]
        assert losses == [record["loss"] for record in alone.history]


def test_the_rule_of_turns_is_one_of_kinds_and_sizes(tmp_path):
    def turns(module, kinds, **more):
        rows = [{"name": f"a{n}", "passes": [kind], "steps": 1} for n, kind in enumerate(kinds)]
        given = check_settings(Train, {"task": "classify", "adapters": rows, **more}, "train")
        return [bool(why) for why in choose_separate_passes(module, given, {"lora": 2, "loha": 2})]

    both = slotted("lora", slots=2, gm=slotted("loha", slots=2), at=["stem", "qkv"])
    assert turns(both, ["loha", "lora", "loha", "lora"]) == [False] * 4  # as many as share small layers
    assert turns(both, ["loha", "loha", "loha", "lora"]) == [True, True, True, False]  # three at once
    assert turns(both, ["lora", "loha"], in_turn=True) == [True, True]
    assert turns(both, ["lora", "loha"], in_turn=False) == [False, False]
    gm = fxplug.trace(nn.Sequential(nn.Flatten(), nn.Linear(108, 2500)), torch.randn(2, 3, 6, 6))
    rows = [settings(0, "dora", steps=1) | {"name": f"a{n}"} for n in range(4)]
    run = train(slotted("dora", gm=gm, at=["1"]), rows, out=tmp_path)
    assert all("a weight of 270,000 numbers is changed" in why for why in run.turns)
    said = "a0, a1, a2, a3: each has a pass of its own, one after the other: a weight of 270,000"
    assert said in (tmp_path / "log.jsonl").read_text()
    with pytest.raises(SpecError, match="in_turn.*has no effect without 'adapters'"):
        Trainer(slotted(), "classify", Samples(), in_turn=True, epochs=1)


def test_the_base_is_computed_once_for_all_and_is_one(monkeypatch):
    sizes = []
    forward = SharedPass._pass

    def counted(self, calls):
        sizes.append([call.size for _, call in calls])
        return forward(self, calls)

    monkeypatch.setattr(SharedPass, "_pass", counted)
    rows = [settings(number) for number in range(4)]
    run = train(slotted(slots=4), rows)
    # two adapters together and each alone, by which the base is tried; then a pass a step, without those that have ended
    assert sizes[:3] == [[1, 1], [1], [1]]
    # steps of 'a2' and 'a3' have two micro steps, but for the last one of an epoch of 'a2'
    assert sizes[3:] == [[1, 2, 3, 1], [3, 1], [1, 2, 3, 1], [1], [1, 2, 3, 1], [3, 1], [1, 2, 1], [1], [1, 1], [1]]
    homes = {run.get_adapter(row["name"]).get_parameter("qkv.weight").data_ptr() for row in rows}
    assert homes == {base().get_parameter("qkv.weight").data_ptr()}


def test_losses_in_float32_are_those_of_runs_alone():
    gm = base(torch.float32)
    rows = [settings(number) for number in range(4)]
    run = train(slotted(slots=4, gm=gm), rows)
    for row in rows:
        losses = [record["loss"] for record in run.history if record["adapter"] == row["name"]]
        alone = [record["loss"] for record in train_alone(row, gm=gm).history]
        assert losses == pytest.approx(alone, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_under_bf16_each_learns_what_its_run_alone_does(kind):
    gm = base(torch.float32)
    rows = [settings(number, kind, steps=4) for number in range(2)]
    run, exact = (train(slotted(kind, slots=2, gm=gm), rows, precision=precision) for precision in ("bf16", "fp32"))
    for row in rows:
        alone = train_alone(row, kind, gm=gm, precision="bf16")
        losses = [record["loss"] for record in run.history if record["adapter"] == row["name"]]
        # the same to the bit where torch's kernels do not choose by the size of a batch: within one rounding of a loss
        assert losses == pytest.approx([record["loss"] for record in alone.history], rel=2**-8)
        assert distance(trained(run, row["name"]), trained(exact, row["name"])) > 0  # it was not computed in float32


def test_a_base_in_8_bits_is_shared():
    """Weights that torchao packs stay as they are, and no gradient reaches them."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = many.build(torch.float32)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(), lambda layer, _: isinstance(layer, nn.Linear))
    gm = fxplug.trace(model, torch.randn(2, 3, 6, 6))
    for kind in ("lora", "ia3"):
        rows = [settings(number, kind, steps=4) for number in range(2)]
        run = train(slotted(kind, slots=2, gm=gm, at=["qkv", "out"]), rows)
        for row in rows:
            alone = train_alone(row, kind, gm=gm, at=["qkv", "out"])
            losses = [record["loss"] for record in run.history if record["adapter"] == row["name"]]
            assert losses == pytest.approx([record["loss"] for record in alone.history], abs=1e-4)


def test_more_adapters_than_slots_take_those_of_adapters_that_end():
    rows = [settings(number) for number in range(5)]
    module = slotted(slots=2)
    run = train(module, rows)
    for row in rows:
        assert distance(trained(run, row["name"]), train_alone(row).trained) < 1e-9
    assert module.adapters.names == ["a0", "a1"]


def test_one_that_gets_nan_ends_alone():
    rows = [settings(number) for number in range(4)]
    others = train(slotted(), copy.deepcopy(rows))
    rows[1]["data"] = Samples(1, 10, spoil=3)
    run = train(slotted(), rows)
    assert list(run.failed) == ["a1"] and "the loss is nan" in run.failed["a1"]
    for name in ("a0", "a2", "a3"):
        assert distance(trained(run, name), trained(others, name)) < 1e-9
    assert all(bool(value.isfinite().all()) for value in trained(run, "a1").values())
    assert run.module.adapters.names == ["a0", "a2", "a3"]


def test_weights_that_are_nan_end_one_adapter_alone():
    rows = [settings(number) for number in range(3)]
    others = train(slotted(), copy.deepcopy(rows))
    run: AdapterRuns = Trainer(slotted(), "classify", adapters=rows, **many.COMMON)
    with torch.no_grad():
        next(iter(trained(run, "a1").values())).fill_(float("nan"))
    run.fit()
    assert list(run.failed) == ["a1"]
    assert all(distance(trained(run, name), trained(others, name)) < 1e-9 for name in ("a0", "a2"))


def test_every_adapter_that_fails_is_an_error_of_the_run():
    rows = [{**settings(number), "data": Samples(0, 6, spoil=0), "steps": 9} for number in range(2)]
    with pytest.raises(TrainError, match=r"(?s)every adapter failed.*a0: .*nan.*a1: "):
        train(slotted(), rows)


class Pictures(fxplug.Task):
    """Noise that the module sees, and what it says of it; tests have a number."""

    def loss(self, module, batch, draw):
        image = batch["image"].double()
        return (module(x=image + draw.like(image)) ** 2).mean(), {"seen": float(len(image))}

    def test(self, module, batches):
        found = [module(x=batch["image"].double()) for batch in batches]
        return {"square": (float(sum((y**2).sum() for y in found)), float(sum(len(y) for y in found)))}

    def check_samples(self, module):
        return True

    def samples(self, module, draw):
        y = module(x=draw.normal(2, 3, 6, 6).double())
        return y.sigmoid().float()[:, None, None, :].expand(-1, 3, 5, -1)


@pytest.mark.slow
def test_samples_tests_averages_and_files_are_those_of_each(tmp_path):
    rows = [{**settings(n), "test": Samples(50 + n), "ema": 0.9, "epochs": 1, "steps": None} for n in range(3)]
    run = train(slotted(), rows, Pictures(), out=tmp_path, log={"samples": 4}, test={"every": 1})
    for row in rows:
        own = {key: value for key, value in row.items() if key not in ("steps", "rank", "alpha", "dropout")}
        folder = tmp_path / "alone" / row["name"]
        options = {key: row[key] for key in ("rank", "alpha", "dropout")}
        torch.manual_seed(row["seed"])
        new = fxplug.apply(base(), fxplug.load_pass("lora", at=many.LAYERS["lora"], **options))
        name = own.pop("name")
        test = {"every": 1, "data": own.pop("test")}
        given = {**many.COMMON, **own, "test": test, "log": {"samples": 4}, "out": folder, "fuse": False}
        alone = Trainer(new, Pictures(), given.pop("data"), **given)
        alone.fit()
        assert run.metrics[f"{name}/square"] == pytest.approx(alone.metrics["square"], abs=1e-9)
        pictures = sorted(path.name for path in (folder / "samples").iterdir())
        assert pictures and pictures == sorted(path.name for path in (tmp_path / "runs" / name / "samples").iterdir())
        for picture in pictures:
            both = [(home / "samples" / picture).read_bytes() for home in (folder, tmp_path / "runs" / name)]
            assert both[0] == both[1]
        assert (tmp_path / "adapter" / name / "adapter_model.safetensors").is_file()
        assert (tmp_path / "ema" / name / "adapter_model.safetensors").is_file()
        x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
        loaded = slotted()
        loaded.adapters.load(name, tmp_path / "adapter" / name)
        loaded.adapters.use(name)
        assert torch.allclose(loaded(x), run.get_adapter(name)(x), atol=1e-6)
    saved = fxplug.load(tmp_path / "module")
    assert saved.adapters.names == [row["name"] for row in rows]


# --- stopped and resumed

# a process for each number of reads after which it is killed; libraries are imported once
SCRIPT = """
import os, sys, warnings; warnings.filterwarnings("ignore")
import many_adapters as many
for given in sys.argv[2:]:
    fatal, in_turn = given.split()
    if os.fork() == 0:
        rows = [{**many.settings(n, steps=7), "data": many.Samples(n, 9 + n, fatal=int(fatal))} for n in range(4)]
        more = {"in_turn": in_turn == "True", "save": {"every": 2, "keep": 9}, "log": {"tensorboard": False}}
        many.train(many.slotted(slots=3), rows, out=os.path.join(sys.argv[1], fatal), **more)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def start(out, spoil=None, backwards=False, last=7, **more):
    rows = [settings(n, steps=7 if n < 3 else last) for n in range(4)]
    if spoil is not None:
        rows[2]["data"] = Samples(2, 30, spoil=spoil)
    rows = rows[::-1] if backwards else rows
    given = {"out": out, "save": {"every": 2, "keep": 9}, "log": {"tensorboard": False}, **many.COMMON, **more}
    return Trainer(slotted(slots=3), "classify", adapters=rows, **given)


def final(out):
    kept = read(list_checkpoints(out / "checkpoints")[-1])
    return kept.state


@pytest.mark.slow
def test_killed_and_resumed_it_is_the_same_to_the_bit(tmp_path, own_rule):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), "50 False", "54 True"]
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(fxplug.__file__).parents[1])])
    env = {**os.environ, "FATAL": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=env, timeout=300, check=True, stdout=subprocess.PIPE, text=True)
    assert [int(code) for code in done.stdout.split()] == [-signal.SIGKILL] * 2
    for in_turn, fatal in (("False", "50"), ("True", "54")):
        whole, out = tmp_path / in_turn, tmp_path / fatal
        runs = [start(whole, in_turn=in_turn == "True"), start(out, in_turn=in_turn == "True")]
        assert not (out / "module").exists() and list_checkpoints(out / "checkpoints")
        runs[0].fit()
        runs[1].fit(resume=out)
        assert are_equal(final(whole), final(out))
        both = [[{k: v for k, v in record.items() if k != "seconds"} for record in run.history] for run in runs]
        assert both[0] == both[1]


@pytest.mark.slow
def test_resumed_from_any_checkpoint_it_is_the_same_to_the_bit(tmp_path):
    """One gets NaN before or after it, and the list of adapters may have another order: each second time it has."""
    whole = start(tmp_path / "whole", spoil=24)
    whole.fit()
    paths, ends = list_checkpoints(tmp_path / "whole" / "checkpoints")[:-1], []
    for number, path in enumerate(paths):
        resumed = start(tmp_path / path.name, spoil=24, backwards=number % 2 == 0)
        resumed.fit(resume=path)
        assert are_equal(final(tmp_path / "whole"), final(tmp_path / path.name))
        assert resumed.failed == whole.failed and list(whole.failed) == ["a2"]
        ends.append(whole.runs[2].trainer.progress.step < read(path).step)
    assert {*ends} == {False, True}
    rows = [{**settings(n, steps=7), **({"lr": 0.5} if n == 2 else {})} for n in range(4)]
    other = Trainer(slotted(slots=3), "classify", adapters=rows, out=tmp_path / "other", **many.COMMON)
    with pytest.raises(TrainError, match=r"(?s)another run.*adapters\.a2\.groups"):
        other.fit(resume=path)
    shorter = start(tmp_path / "other", spoil=24, last=1)
    before = copy.deepcopy(trained(shorter, "a0"))
    match = r"adapter 'a3': (\d) steps were taken, and the run ends after 1: set 'steps' to \1 or more"
    with pytest.raises(TrainError, match=match):
        shorter.fit(resume=path)
    assert are_equal(before, trained(shorter, "a0"))


@pytest.mark.slow
def test_an_interrupt_ends_all_after_one_step(tmp_path, monkeypatch):
    start(tmp_path / "whole").fit()
    stopped = start(tmp_path / "a", save={"every": 0})
    monkeypatch.setattr(Samples, "interrupt", Samples.reads + 40)
    with pytest.raises(KeyboardInterrupt, match="stopped after step"):
        stopped.fit()
    assert len({one.trainer.progress.step for one in stopped.runs[:3] if not one.ended}) == 1
    start(tmp_path / "a").fit(resume=tmp_path / "a")
    assert are_equal(final(tmp_path / "whole"), final(tmp_path / "a"))


# --- refused


def refused(match, *changes, module=None, error=SpecError, **more):
    rows = [{**settings(n), **change} for n, change in enumerate(changes or ({}, {}))]
    with pytest.raises(error, match=match):
        train(slotted() if module is None else module, rows, **more)


def test_what_cannot_be_trained_so_is_refused_in_words():
    refused(r"'a1' is the name of adapter 1 already", {"name": "a1"}, {})
    refused("rank.*is 9, and the slots of pass 'lora' are for ranks up to 8: give the pass rank_max: 9", {}, {"rank": 9})
    refused("ranks", {}, {"ranks": 9})
    refused("name", {"name": "../x"})
    refused("name: has 129 bytes as UTF-8, and a slot keeps 128", {"name": "名" * 43})
    refused("needs one of 'steps' and 'epochs' at most", {"epochs": 2})
    refused(r"adapters\[0\].passes: no pass 'lra' trains here \(did you mean 'lora'\?\); there are lora", {"passes": ["lra"]})
    refused("needs one pass at least; there are lora", {"passes": []})
    refused("no pass here has blocks with a dropout", {"rank": 4}, module=slotted("loha"))
    refused("cannot be used with many adapters: all adapters share the base", trainable=["head"])
    refused("cannot be used with many adapters: the adapters of a batch", compile=True)
    refused("has the weights of its last step", test={"best": True})
    with pytest.raises(SpecError, match="the list is empty"):
        train(slotted(), [])
    with pytest.raises(SpecError, match="must be a list of adapters"):
        train(slotted(), {"name": "ink"})
    with pytest.raises(SpecError, match="needs data"):
        train(slotted(), [{"name": "ink", "steps": 1}])


def test_modules_without_free_slots_are_refused():
    plain = fxplug.apply(base(), fxplug.load_pass("lora", at=["qkv"], rank=4))
    refused("pass 'lora' has no slots", module=plain)
    refused("needs a pass with a slot per adapter", module=base())
    refused("pass 'lora' has per_sample, .* leave per_sample out", module=slotted(per_sample=2))
    module = slotted(slots=1)
    train(module, [settings(0)])
    refused("'a0' is in a slot of pass 'lora' already", {}, module=module)
    refused("all 1 slots of pass 'lora' are taken, by a0", {"name": "b"}, module=module)


def test_samples_of_other_shapes_are_refused_with_both_shapes():
    match = r"'a0' and 'a1' cannot be put into one batch.*\[3, 6, 6\].*\[3, 8, 8\]"
    with torch.random.fork_rng(devices=[]):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)).eval()
    module = slotted(gm=fxplug.trace(model, torch.randn(2, 3, 6, 6)), at=["0", "3"])
    refused(match, {}, {"data": Samples(size=8)}, error=TrainError, module=module)


def test_a_base_that_draws_or_couples_samples_is_refused_without_mode_eval():
    drawing, coupling = base(drop=0.3), base(batch_norm=True)
    refused("draws random numbers.*mode: eval", module=slotted(gm=drawing), error=TrainError, mode="train")
    refused("it mixes samples.*mode: eval", module=slotted(gm=coupling), error=TrainError, mode="train")
    for gm in (drawing, coupling):
        # torch's backward of a batch norm in evaluation is wrong for a batch of one whose gradient is transposed, as alone here
        rows = [{**settings(number), "batch": 2 + number} for number in range(2)]
        run = train(slotted(gm=gm), rows)
        assert all(distance(trained(run, row["name"]), train_alone(row, gm=gm).trained) < 1e-9 for row in rows)


def test_a_layer_without_samples_is_refused():
    refused("without samples|distinguished", module=slotted(at=["placed", "qkv"]), error=(SpecError, TrainError))


class Sequence(nn.Module):
    """Tokens first, then samples."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(18, 8), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(torch.relu(self.first(x.flatten(2).transpose(0, 1)))).mean(0)


def test_samples_in_the_second_dimension_are_told_apart():
    torch.manual_seed(0)
    gm = fxplug.trace(Sequence().double().eval(), torch.randn(3, 6, 6, 3, dtype=torch.float64).movedim(1, 1))

    class Tokens(Samples):
        def __getitem__(self, index):
            return self.images[index].reshape(6, 6, 3).movedim(0, 0), self.labels[index]

    rows = [{**settings(n), "batch": (2, 4)[n % 2], "data": Tokens(n, 8)} for n in range(2)]
    run = train(slotted(gm=gm, at=["first", "head"]), rows, Flat())
    for row in rows:
        alone = train_alone(row, gm=gm, at=["first", "head"], task=Flat())
        assert distance(trained(run, row["name"]), alone.trained) < 1e-9


class Flat(fxplug.Task):
    def loss(self, module, batch, draw):
        return torch.nn.functional.cross_entropy(module(x=batch["image"].double()), batch["label"])


# --- configurations

CONFIG = {
    "model": "many_adapters:build",
    "inputs": {"x": {"shape": [2, 3, 6, 6], "dtype": "float64"}},
    "passes": [{"lora": {"at": ["stem", "qkv"], "rank": 8, "slots": 2}}],
    "train": {
        "task": "classify", "mode": "eval", "steps": 4, "batch": 2, "save": {"every": 2}, "log": {"tensorboard": False},
        "adapters": [{"name": "ink", "rank": 4}, {"name": "film", "data": {"call": {"many_adapters:Samples": {"seed": 1}}}}],
    },
    "data": {"call": "many_adapters:Samples"},
    "device": "cpu",
    "verify": False,
}  # fmt: skip


@pytest.mark.slow
def test_a_configuration_trains_its_adapters_and_is_resumed(tmp_path):
    whole = fxplug.train(CONFIG, out=tmp_path / "a", quiet=True)
    assert sorted(path.name for path in (tmp_path / "a" / "adapter").iterdir()) == ["film", "ink"]
    assert [row["adapter"] for row in whole.history[:2]] == ["ink", "film"] and len(whole.history) == 8
    resumed = fxplug.train(CONFIG, out=tmp_path / "b", resume=tmp_path / "a" / "checkpoints" / "step-00000002", quiet=True)
    assert are_equal(final(tmp_path / "a"), final(tmp_path / "b"))
    alone = copy.deepcopy(CONFIG)
    alone["passes"] = [{"lora": {"at": ["stem", "qkv"], "rank": 4}}]
    del alone["train"]["adapters"]
    single = fxplug.train(alone, out=tmp_path / "c", quiet=True)
    assert distance(trained(whole.trainer, "ink"), single.trainer.trained) < 1e-9
    assert resumed.module.adapters.names == ["ink", "film"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"name": "film"}, r"adapters.*name.*is the name of adapter 1 already"),
        ({"name": "b", "rnak": 3}, "unknown key 'rnak'.*did you mean 'rank'"),
        ({"name": "b", "rank": 0}, "rank"),
        ({"name": "b", "data": {"imagse": "x"}}, "imagse.*did you mean 'images'"),
        ({"name": "b", "optimizer": "adamx"}, "adamx"),
        ({}, "name"),
    ],
)
def test_mistakes_in_a_configuration_are_named(change, match, tmp_path):
    config = copy.deepcopy(CONFIG)
    config["train"]["adapters"] = [{"name": "film"}, change]
    with pytest.raises((SpecError, TrainError), match=match):
        fxplug.train(config, out=tmp_path / "a", quiet=True)


@pytest.mark.parametrize("seed", range(3))
def test_random_lists_of_adapters_learn_what_runs_alone_do(seed):
    assert fuzz_many(1, seed) == []


class Uneven(fxplug.Task):
    """Calls the module twice with gradients and once without for a batch of two; `fails` at the second step of such."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.calls = fails, 0

    def loss(self, module, batch, draw):
        x = batch["image"].double()
        out = module(x)
        if len(x) == 2:
            self.calls += 1
            if self.fails and self.calls == 2:
                raise ValueError("a mistake of one's own")
            out = out + 0.5 * module(x * 0.5)
            with torch.no_grad():
                module(x)
        return nn.functional.cross_entropy(out, batch["label"])


def test_a_loss_may_call_the_module_as_often_as_it_wants():
    rows = [settings(number) for number in range(3)]
    run = train(slotted(), rows, task=Uneven())
    for row in rows:
        assert distance(trained(run, row["name"]), train_alone(row, task=Uneven()).trained) < 1e-9


def test_a_mistake_in_a_task_is_raised_with_the_adapter_and_no_thread_is_left():
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="a mistake of one's own") as error:
        train(slotted(), [settings(number) for number in range(3)], task=Uneven(fails=True))
    assert any("in the run of the adapter 'a1'" in note for note in error.value.__notes__)
    assert set(threading.enumerate()) == before
