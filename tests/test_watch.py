"""What a person sees of a run: the table, the log, the pictures, and that none of it ends a run."""

from __future__ import annotations

import io
import json
import math
import re
import time

import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import nn

from fxplug.training import epoch_table as table
from fxplug.training.log_files import Lines
from fxplug.training.monitor import RunMonitor
from fxplug.training.pictures import make_grid, save_curves
from fxplug.training.train_section import Train

MODULE = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 5, bias=False))
MODULE[0].weight.requires_grad = False


def watch(out, *, steps=8, epochs=2, terminal=False, quiet=False, by_steps=False, width=120, **log):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width)
    length = {"steps": steps} if by_steps else {"epochs": epochs}
    settings = Train(task="classify", batch=4, log=log, **length)
    return RunMonitor(out, settings, steps=steps, epochs=epochs, console=console, quiet=quiet)


def record(step, **more):
    return {"step": step, "epoch": (step - 1) // 4, "loss": 4.0 / step, "lr": 1e-3 * step, "seconds": 0.25, **more}


def go(w, first, last, after=lambda step: None):
    """These steps of a run."""
    w.rewind(first - 1, w.log_length)
    w.start(MODULE, (50, 150))
    for step in range(first, last + 1):
        epoch, rest = divmod(step, w.steps // w.epochs)
        w.step(record(step, epoch=epoch - (not rest)), last=not rest)
        after(step)


def run(w, last=8):
    go(w, 1, last)
    w.close([record(step) for step in range(1, last + 1)])
    return w.console.file.getvalue()


def steps(out):
    return [r["step"] for r in Lines(out / "log.jsonl").read() if "loss" in r]


# the table


def test_column_heads_say_what_they_count_within_80_columns():
    row = table.make_training_row(1, 50, 0.1016, 4.538, 0.00090451)
    assert table.format_header(tuple(row)) == "      Epoch     s/step       Loss         LR"
    assert table.format_row(row) == "       2/50     0.1016      4.538 0.00090451"
    row = table.make_testing_row(2, 5, 0.02688, {"acc1": 2.3785828, "acc5": 10.161226, "loss": 0.5}, 0.784e9)
    assert table.format_header(tuple(row)) == "      Epoch     GPU GB    s/batch    Acc@1 %    Acc@5 %  Test loss"
    assert table.format_row(row) == "        3/5      0.784    0.02688      2.379      10.16        0.5"
    assert table.format_best({"acc1": 1.8710191082802548, "loss": 0.25}) == "Best so far: Acc@1 % 1.871, Test loss 0.25"
    line = "Trainable/total parameters of the model: 0.03M / 38.64M (0.08843%)"
    assert table.format_parameters(34171, 38641865) == line

    many = {f"a_metric_with_a_long_name_{n}": n / 7 for n in range(9)}  # all are shown, none is cut
    fitting, rest = table.split_row(table.make_testing_row(0, 1, 0.5, many))
    lines = [table.format_header(tuple(fitting)), table.format_row(fitting), *rest.splitlines()]
    assert max(map(len, lines)) <= 80 and all(f"{name} " in f"{lines[0]} {rest} " for name in many)
    assert len(rest.splitlines()) > 1 and "a_metric_with_a_long_name_8 1.143" in rest
    assert table.split_row({"x" * 200: "1"})[1].split() == ["x" * 200, "1"]


def test_a_log_file_has_a_line_each_minute(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("fxplug.training.monitor.time.monotonic", lambda: clock[0])
    w = watch(None, steps=10_000, epochs=1)
    w.start(MODULE, (50, 150))
    for step in range(1, 400):  # half a second each, far from the end of the epoch
        clock[0] += 0.5
        w.step({**record(1), "step": step, "epoch": 0, "seconds": 0.5}, last=False)
    lines = w.console.file.getvalue().splitlines()[1:]
    assert lines == [f"step {n}/10000, epoch 1/1, loss 4, 0.5 s/step, {left} left"
                     for n, left in ((121, "1:22:19"), (242, "1:21:19"), (363, "1:20:18"))]  # fmt: skip
    said = table.format_progress(9_940, 10_000, 0, 1, 0.123456, 1.5)
    assert said == "step 9940/10000, epoch 1/1, loss 0.1235, 1.5 s/step, 1:30 left"

    w = watch(None, steps=10_000, epochs=1, quiet=True)
    w.start(MODULE, (50, 150))
    clock[0] += 500
    w.step({**record(1), "epoch": 0}, last=False)
    assert w.console.file.getvalue() == ""


def test_a_file_gets_the_rows_only(tmp_path):
    w = watch(tmp_path)

    def test(step):
        if step % 4 == 0:
            w.test(step // 4, {"acc1": 10.0 * step, "acc5": 90.0, "loss": 1.5}, 0.5, {"acc1": 80.0, "acc5": 90.0, "loss": 1.0})

    go(w, 1, 8, test)
    w.close()
    text = w.console.file.getvalue()
    assert "\x1b" not in text and "\r" not in text
    assert text.split("\n") == [
        f"Log files are recorded in: {tmp_path}",
        "Trainable/total parameters of the model: 0.00M / 0.00M (33.33333%)",
        "",
        "      Epoch     s/step       Loss         LR",
        "        1/2       0.25      2.083      0.004",
        "",
        "      Epoch    s/batch    Acc@1 %    Acc@5 %",
        "        1/2        0.5         40         90",
        "Best so far: Acc@1 % 80, Acc@5 % 90",
        "",
        "      Epoch     s/step       Loss         LR",
        "        2/2       0.25     0.6345      0.008",
        "",
        "      Epoch    s/batch    Acc@1 %    Acc@5 %",
        "        2/2        0.5         80         90",
        "Best so far: Acc@1 % 80, Acc@5 % 90",
        "",
    ]


@pytest.mark.parametrize("gpu", [False, True])
def test_a_terminal_of_80_columns_gets_a_bar_with_loss_speed_and_time_left(tmp_path, monkeypatch, gpu):
    w = watch(tmp_path, terminal=True, width=80, steps=120_000, epochs=30_000)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda: 123.4e9)
    w.rewind(0, 0)
    w.start(MODULE, (50, 150))
    w._on_gpu = gpu
    for step in range(1, 5):
        w._shown = 0.0
        w.step({**record(step), "loss": 1.234e-5}, last=step == 4)
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", w.console.file.getvalue())
    w.close()
    bars = [line for line in re.split(r"[\r\n]+", text) if "/120000 " in line]
    memory = r" +123 GB" if gpu else ""
    line = rf"[━╺╸]+ +\d+/120000( loss [\d.e-]+ +[\d.e+]+ samples/s{memory})? +[\d:-]+ left"
    assert all(re.fullmatch(line, bar.strip()) for bar in bars) and any("loss" in bar for bar in bars), bars
    assert max(map(len, bars)) <= 80
    row = r" +1/30000 +123 +0\.25 +1.234e-05 +0\.004" if gpu else r" +1/30000 +0\.25 +1.234e-05 +0\.004"
    assert re.search(row, text)  # rows of the table stay above it


def test_a_run_of_steps_has_few_rows(tmp_path):
    w = watch(None, steps=1000, epochs=500, by_steps=True)
    text = run(w, last=1000)
    assert text.count("/500 ") == 50 and "    500/500" in text


def test_quiet_shows_notes_only(tmp_path):
    w = watch(tmp_path, quiet=True, terminal=True)
    assert run(w) == ""
    w.note("three images were skipped")
    assert w.console.file.getvalue() == "three images were skipped\n"
    assert Lines(tmp_path / "log.jsonl").read()[-1] == {"step": 8, "note": "three images were skipped"}


# the log


def test_every_step_has_a_line_and_tensorboard_every_so_many(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(watch(tmp_path, every=4))
    assert Lines(tmp_path / "log.jsonl").read() == [record(step) for step in range(1, 9)]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 4.0), (4, 1.0), (8, 0.5)]
    assert {"train/loss", "train/lr", "train/seconds"} == set(events.Tags()["scalars"])


def test_nothing_is_written_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    w = watch(None)
    w.samples(1, torch.rand(4, 1, 8, 8))
    run(w)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_resumed_run_goes_on_without_duplicates(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    w, lengths = watch(tmp_path), {}
    go(w, 1, 6, lambda step: (w.note(f"after {step}"), lengths.update({step: w.log_length})))
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"step": 7, "lo')  # killed here; the last checkpoint was that of step 4
    time.sleep(1.1)  # tensorboard reads files by name: a second, then a process, then a counter as text
    again = watch(tmp_path)
    dropped = again.rewind(4, lengths[4])
    assert again.history() == [record(step) for step in range(1, 5)]
    assert [json.loads(line)["step"] for line in dropped.splitlines()] == [5, 5, 6, 6]
    go(again, 5, 8)
    again.close()
    w.close()
    assert steps(tmp_path) == list(range(1, 9))
    notes = [r["note"] for r in Lines(tmp_path / "log.jsonl").read() if "note" in r]
    assert notes == [f"after {step}" for step in range(1, 5)]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("train/loss")] == list(range(1, 9))


def test_numbers_that_json_lacks(tmp_path):
    lines = Lines(tmp_path / "log.jsonl")
    lines.write({"step": 1, "loss": math.nan, "norm": torch.tensor(math.inf), "more": {"a": [torch.tensor(2), object]}})
    json.loads((tmp_path / "log.jsonl").read_text(), parse_constant=pytest.fail)
    (found,) = lines.read()
    assert math.isnan(found["loss"]) and found["norm"] == math.inf and found["more"]["a"][0] == 2
    assert lines.cut(lines.length) == b""
    json.loads((tmp_path / "log.jsonl").read_text(), parse_constant=pytest.fail)


# a full disk


def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    w = watch(tmp_path)
    go(w, 1, 1)
    with monkeypatch.context() as patch:
        patch.setattr("fxplug.training.log_files.open", full, raising=False)
        patch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", full)
        patch.setattr("fxplug.core.writing.os.replace", full)
        for step in range(2, 6):
            w.step(record(step), last=False)
            w.samples(step, torch.zeros(2, 1, 8, 8))
    for step in range(6, 9):
        w.step(record(step), last=False)
    w.close()
    said = [line for line in w.console.file.getvalue().splitlines() if "cannot be written" in line]
    assert [line.partition(" ")[0] for line in said] == ["log.jsonl", "tensorboard", "samples"]
    assert all(line.endswith("No space left on device; the run continues") for line in said)
    assert steps(tmp_path) == [1, 6, 7, 8]  # there was room again
    assert not list((tmp_path / "samples").iterdir())


def test_half_a_line_is_taken_back(tmp_path, monkeypatch):
    class Short(io.FileIO):
        def write(self, data):
            return super().write(data[:5])

    lines = Lines(tmp_path / "log.jsonl")
    lines.write({"step": 1})
    with monkeypatch.context() as patch:
        patch.setattr("fxplug.training.log_files.open", lambda path, mode, buffering: Short(path, "ab"), raising=False)
        with pytest.raises(OSError, match="No space left"):
            lines.write({"step": 2})
    lines.write({"step": 3})
    assert lines.read() == [{"step": 1}, {"step": 3}]


# pictures


def test_sample_grids(tmp_path):
    w = watch(tmp_path)
    go(w, 1, 0)
    w.samples(10, torch.full((10, 1, 8, 8), 0.5))
    w.close()
    with Image.open(tmp_path / "samples" / "step-00000010.png") as image:
        assert image.mode == "RGB" and image.size == (52, 22)  # two rows of five
        assert image.getpixel((5, 5)) == (128, 128, 128)


def test_a_grid_takes_what_a_model_may_give():
    wild = torch.full((3, 3, 4, 4), math.nan, dtype=torch.bfloat16, requires_grad=True)
    assert make_grid(wild).unique().tolist() == [0]
    assert make_grid(torch.full((1, 1, 4, 4), 7.0)).max() == 255


def test_the_curves(tmp_path):
    tests = [{"step": 50, "test": {"acc1": 40.0}}, {"step": 100, "test": {"acc1": 60.0, "loss": math.nan}}]
    history = [{"step": step, "loss": 1 / step, "lr": 1e-3} for step in range(1, 101)] + [{"step": 101, "loss": math.nan}]
    assert save_curves(history, tests, tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as image:
        assert image.size[0] > 600 and len(image.convert("RGB").getcolors(1 << 20)) > 20
    assert not save_curves([], [], tmp_path / "none.png")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png"]


def test_what_tests_give_is_on_axes_of_its_kind_and_a_constant_rate_on_none(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    seen = []
    drawn = lambda self, file, **_: (seen.append([axis.get_ylabel() for axis in self.axes]), file.touch())  # noqa: E731
    monkeypatch.setattr(Figure, "savefig", drawn)
    tests = [{"step": n, "test": {"loss": 1 / n, "acc1": 3.0, "acc5": 9.0}} for n in (1, 2)]
    for rates in ([0.1, 0.1], [0.1, 0.2]):
        save_curves([{**record(n), "lr": rate} for n, rate in enumerate(rates, 1)], tests, tmp_path / "loss.png")
    assert seen == [["loss", "accuracy (%)"], ["loss", "accuracy (%)", "learning rate"]]


def test_the_curves_have_the_steps_before_a_resume(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("fxplug.training.monitor.save_curves", lambda history, tests, path: drawn.append((history, tests)))
    w = watch(tmp_path)
    run(w, last=4)
    w = watch(tmp_path)
    go(w, 5, 5)
    w.test(1, {"acc1": 3.0}, 0.1)
    w.close([record(5)])
    assert [r["step"] for r in drawn[-1][0]] == [1, 2, 3, 4, 5] and drawn[-1][1][0]["test"] == {"acc1": 3.0}
