"""ZhiJian's configuration files converted, its reuse_keys, and the modules of add-ins imported as they are."""

from __future__ import annotations

import sys
from textwrap import dedent

import pytest
import small
import timm
import torch
import yaml
from torch import nn

import fxplug
from fxplug.compat.zhijian import AddinBase, model_config, reuse_keys, stand_in
from fxplug.core.errors import SpecError

GAIN = """
    import torch
    from torch import nn
    from zhijian.models.addin.module.base import AddinBase

    def prepare_specific_addin_parser(parser):
        parser.add_argument("--gain-start", type=float, default=0.5)
        parser.add_argument("--gain-deep", type=bool, default=False)
        return parser

    class Gain(AddinBase):
        def __init__(self, config, model_config, **kwargs):
            super().__init__()
            self.gain = nn.Parameter(torch.full((model_config.hidden_size,), config.gain_start))

        def adapt(self, module, inputs, outputs):
            return outputs + self.gain * outputs
"""
HEAVY = "raise ImportError('this imports the world')\n"


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A folder with an add-in where ZhiJian has its own; what its packages import cannot be imported."""
    folder = tmp_path / "zhijian/models/addin/module"
    folder.mkdir(parents=True)
    for package in (tmp_path / "zhijian", tmp_path / "zhijian/models"):
        (package / "__init__.py").write_text(HEAVY)
    (folder / "base.py").write_text(HEAVY)
    (folder / "gain.py").write_text(dedent(GAIN))
    (tmp_path / "my_gain.py").write_text(dedent(GAIN))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("fxplug.compat.zhijian.imports._imported", {})
    yield tmp_path
    sys.modules.pop("my_gain", None)


def test_a_module_is_imported_as_it_is_beside_a_stand_in_that_is_gone_then(modules):
    before = {name for name in sys.modules if name.partition(".")[0] == "zhijian"}
    with stand_in():
        from my_gain import Gain
        from zhijian.models.addin.module.gain import Gain as There

        assert issubclass(Gain, AddinBase) and issubclass(There, AddinBase)
    assert {name for name in sys.modules if name.partition(".")[0] == "zhijian"} == before
    with stand_in():
        from zhijian.models.addin.module.gain import Gain as Again
    assert Again is There
    with pytest.raises(ImportError):
        import zhijian.models.addin.module.gain  # noqa: F401


@pytest.mark.parametrize("module", ["my_gain", "zhijian.models.addin.module.gain"])
def test_a_configuration_names_a_module_as_it_is(modules, module):
    config = {"gain_start": 2.0}
    addin = {"use": f"{module}:Gain", "options": {"config": config, "model_config": {"hidden_size": 4}}}
    gm, x = fxplug.trace(nn.Sequential(nn.Linear(4, 4)), (torch.randn(2, 4),)), torch.randn(2, 4)
    given = {"name": "Gain", "location": [[0]], "hook": [["adapt", "post"]]}
    new = fxplug.apply(gm, fxplug.blitz([given], addin))
    assert torch.equal(new(x), gm(x) + 2 * gm(x))


VIT = {"timm": "vit_tiny_patch16_224", "options": {"img_size": 32, "depth": 2, "embed_dim": 24, "num_heads": 2}}
FILE = {
    "addins": [
        {"name": "Gain", "location": [["blocks", 0, "mlp"], ["blocks", 1]], "hook": [["adapt", "post"], ["adapt", "post"]]},
        {"name": "Gain", "location": [["norm"]], "hook": [["adapt", "post"]]},
    ],
    "gain_start": 0.25,
    "pretrained_url": [],
    "reuse_keys": [["addin"], ["head"], ["fc_norm"], ["blocks", 1]],
}


def converted(folder, file, *more):
    (folder / "theirs.yaml").write_text(yaml.safe_dump(file))
    (folder / "model.yaml").write_text(yaml.safe_dump({"model": VIT, "inputs": {"x": [2, 3, 32, 32]}}))
    return small.command("convert", "zhijian", folder / "theirs.yaml", "-o", folder / "ours.yaml", *more)


def test_a_file_is_converted_and_is_what_its_add_ins_say(modules):
    done = converted(modules, FILE, "--model", str(modules / "model.yaml"))
    assert done.exit_code == 0, done.output
    assert "left out, because no add-in reads it: pretrained_url" in done.output
    made = yaml.safe_load((modules / "ours.yaml").read_text())
    (entry,) = made["passes"]
    assert entry["blitz"]["line"] == FILE["addins"] and made["train"]["trainable"] == ["head", "blocks.1"]
    options = entry["blitz"]["addin"]["Gain"]["options"]
    assert options["config"] == {"gain_start": 0.25, "gain_deep": False} and options["model_config"]["hidden_size"] == 24
    result = fxplug.rewrite(modules / "ours.yaml", verify=False)
    assert sum(p.numel() for p in result.module.blitz.parameters()) == 2 * 24
    x = torch.randn(2, 3, 32, 32)
    assert not torch.equal(result.module(x), result.base(x))


@pytest.mark.parametrize(
    ("file", "kind", "steps", "epochs"),
    [
        ({}, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 30), 4, 30),
        ({"max_epoch": 3}, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 3, eta_min=0), 4, 3),
        ({"max_epoch": 5, "lr": 0.1}, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5), 1, 5),
        ({"max_epoch": 4, "eta_min": 1e-3}, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4, eta_min=1e-3), 7, 4),
        ({"max_epoch": 6, "lr_scheduler": "step", "step_size": 2, "gamma": 0.5},
         lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5), 3, 6),
        ({"max_epoch": 6, "lr_scheduler": "multistep", "step_size": "1,4", "gamma": 0.1, "optimizer": "sgd", "mom": 0.8},
         lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 4], 0.1), 2, 6),
    ],
)  # fmt: skip
def test_the_learning_rate_falls_by_epoch_as_in_zhijian(modules, file, kind, steps, epochs):
    from fxplug.training.optimizers import make_optimizer
    from fxplug.training.param_groups import make_scheduler

    assert converted(modules, {**FILE, **file}).exit_code == 0
    given = yaml.safe_load((modules / "ours.yaml").read_text())["train"]
    from fxplug.training.train_section import Train  # other tests here do without the extension

    own = Train.model_validate(given)
    weight = [nn.Parameter(torch.zeros(1))]
    here = make_optimizer(own.optimizer, [{"name": "base", "params": weight, "lr": own.lr, "weight_decay": own.weight_decay}])
    scheduler, by_epoch = make_scheduler(own.scheduler, here, epochs * steps, steps)
    there = torch.optim.SGD(weight, lr=file.get("lr", 0.01))
    course = kind(there)
    assert own.epochs == epochs and by_epoch and here.defaults.get("momentum", 0.8) == 0.8
    for _ in range(epochs):
        for optimizer, its in ((here, scheduler), (there, course)):
            for _ in range(steps):
                optimizer.step()
            assert optimizer.param_groups[0]["lr"] == pytest.approx(there.param_groups[0]["lr"], rel=1e-9, abs=1e-15)
            its.step()


def test_lines_and_what_trains_in_text_are_converted_too(modules):
    file = {"config_blitz": "(Gain.adapt): ...->(blocks[0:2].mlp){inout1}->...", "reuse_keys_blitz": "head,blocks[0:1]"}
    assert converted(modules, file, "--model", str(modules / "model.yaml")).exit_code == 0
    made = yaml.safe_load((modules / "ours.yaml").read_text())
    (entry,) = made["passes"]
    assert entry["blitz"]["line"] == [file["config_blitz"]] and entry["blitz"]["train"] is False
    assert made["train"]["trainable"] == ["head", "blocks.{0:1}"] and made["train"]["epochs"] == 30


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"addins": [{"name": "Gian", "location": [["head"]], "hook": [["adapt", "post"]]}]}, "did you mean"),
        ({"addins": {"name": "Gain"}}, "must be a list of add-ins, not a mapping"),
        ({"addins": [{"name": "Gain", "hook": []}]}, "theirs.yaml:2: addins[0]: missing key 'location'"),
        ({"lr_scheduler": "plateau"}, "lr_scheduler: 'plateau' is stepped without a loss there"),
        ({"optimizer": "lamb"}, "optimizer: ZhiJian has no optimizer 'lamb'"),
        ({"lr_scheduler": "step", "gamma": 0.1}, "step_size: must be a number of epochs, not null"),
        ({"reuse_keys": [["haed"]]}, "'haed' matches no module of the model (did you mean 'head'?)"),
    ],
)
def test_a_file_that_is_wrong_says_where(modules, change, finding):
    done = converted(modules, {**FILE, **change}, "--model", str(modules / "model.yaml"))
    assert done.exit_code != 0
    assert finding in str(done.exception) + done.output and not (modules / "ours.yaml").exists()


def test_a_file_of_something_else_is_refused(modules):
    done = converted(modules, {"train": {}})
    assert done.exit_code != 0 and "nothing to convert" in str(done.exception) + done.output


# --- what trains, and what add-ins ask of the model


@pytest.fixture(scope="module")
def vit():
    return timm.create_model(VIT["timm"], **VIT["options"], num_classes=10)


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ("addin,head,fc_norm", ["head"]),
        ("addin, blocks[0:2] ,head", ["blocks.{0:2}", "head"]),
        ("blocks[1].mlp,blocks[-1].norm1", ["blocks.1.mlp", "blocks.{-1}.norm1"]),
        ([["addin"], ["blocks", 1], ["fc_norm"], ["head"]], ["blocks.1", "head"]),
        ([["blocks", -1]], ["blocks.{-1}"]),
        ([], []),
        (None, ["**"]),
    ],
)
def test_reuse_keys_are_what_a_trainer_takes(vit, keys, found):
    assert reuse_keys(keys, vit) == found
    assert [key for key in reuse_keys(keys) if key != "fc_norm"] == found


@pytest.mark.parametrize(
    ("keys", "finding"),
    [("blcoks[0:2]", "'blcoks.{0:2}' matches no module"), ("blocks[0", "found '[0'"), ("head)", "found ')'")],
)
def test_reuse_keys_that_name_nothing_are_refused(vit, keys, finding):
    with pytest.raises(SpecError) as error:
        reuse_keys(keys, vit)
    assert finding in str(error.value)


def test_reuse_keys_train_what_they_name(vit):
    gm = fxplug.trace(vit, (torch.randn(2, 3, 32, 32),))
    new = fxplug.apply(gm, fxplug.blitz("(AddinBase.add_post): (blocks[i].mlp.fc1){in1}->(blocks[i].mlp.act){out1}", AddinBase))
    data = [(torch.randn(3, 32, 32), 1)]
    settings = {"trainable": reuse_keys("addin,blocks[1:2],head", new), "batch": 1, "steps": 1, "quiet": True}
    fxplug.Trainer(new, {"classify": {"criterion": nn.CrossEntropyLoss()}}, data, **settings).fit()
    names = {name for name, p in new.named_parameters() if p.requires_grad}
    assert names == {name for name, _ in vit.named_parameters() if name.startswith(("blocks.1.", "head."))}


def test_what_add_ins_ask_of_the_model_is_read_off_it(vit):
    expected = {"hidden_size": 24, "patches_size": [16, 16], "transformer_num_layers": 2, "num_heads": 2, "head_dim": 12}
    assert model_config(vit) == {**expected, "head_output": 10}
    assert model_config(nn.Linear(3, 3)) == {}
