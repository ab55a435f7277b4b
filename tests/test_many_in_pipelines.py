"""Many adapters of a stock pipeline in one run: pictures in buckets, captions of several lengths, each as its run alone."""

import copy
import json

import pytest
import tiny_pipelines as tiny
import yaml
from PIL import Image

import fxplug

AT = ["**.to_q", "**.to_k"]


def draw(folder, sizes, longer):
    folder.mkdir()
    for number, size in enumerate(sizes):
        Image.effect_noise(size, 40 + number).convert("RGB").save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a red ball" + " on a box" * (longer if number % 2 else 0))


@pytest.mark.slow
def test_adapters_of_a_pipeline_are_those_of_runs_alone(tmp_path):
    tiny.make("sd15").save_pretrained(tmp_path / "pipe")
    draw(tmp_path / "a", [(64, 64)] * 3 + [(96, 64)] * 3, 1)
    draw(tmp_path / "b", [(64, 64)] * 2 + [(64, 96)] * 4, 3)
    rows = [{"name": "x", "rank": 4, "seed": 3}, {"name": "y", "data": {"images": "b"}, "rank": 2, "accumulate": 2}]
    train = {
        "task": {"denoise": {"sample_steps": 2}}, "mode": "eval", "steps": 3, "batch": 2, "lr": 1e-2,
        "log": {"samples": 3, "tensorboard": False},
    }  # fmt: skip
    config = {
        "model": {"pipeline": "pipe", "call": tiny.CALLS["sd15"]}, "passes": [{"lora": {"at": AT, "rank": 4, "slots": 2}}],
        "data": {"images": "a", "size": 64, "buckets": {"step": 32}}, "train": {**train, "adapters": rows}, "device": "cpu",
        "verify": False,
    }  # fmt: skip

    def go(given, out):
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(given))
        return fxplug.train(tmp_path / "c.yaml", out=tmp_path / out, quiet=True)

    run = go(config, "many")
    assert not run.trainer.failed
    for row, one in [*zip(rows, run.trainer.runs, strict=True)][1:]:  # a run alone costs some seconds
        own = copy.deepcopy(config)
        row = dict(row)
        own["train"] = {**train, **({"accumulate": row["accumulate"]} if "accumulate" in row else {})}
        own["passes"] = [{"lora": {"at": AT, "rank": row["rank"]}}]
        own["data"] |= row.get("data", {})
        own["seed"] = row.get("seed", 0)
        alone = go(own, f"alone {row['name']}")
        far = [float((value - one.trainer.trained[name]).detach().abs().max()) for name, value in alone.trainer.trained.items()]
        assert max(far) < 1e-4
        losses = [[record["loss"] for record in trainer.history] for trainer in (alone.trainer, one.trainer)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-4)
        home = tmp_path / "many" / "runs" / row["name"]
        assert (home / "report.html").is_file()
        notes = [json.loads(line).get("note", "") for line in (home / "log.jsonl").read_text().splitlines()]
        assert any(note.startswith("adapter/ in the stock pipeline: equal") for note in notes)
