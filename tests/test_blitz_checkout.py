"""ZhiJian's own add-ins by its own files and lines, held to its own hooks: outputs, gradients, numbers of parameters.

It takes a folder of checkouts: SEEDS=folder; ZhiJian's is found by what is in it.
"""

from __future__ import annotations

import copy
import functools
import importlib
import re
import sys
from types import SimpleNamespace

import pytest
import timm
import torch
import yaml
from test_blitz_lists import homes_of
from zhijian_checkout import OnCPU, arguments, checkout, configuration, zhijian

import fxplug
from fxplug.compat.zhijian import model_config, reuse_keys, settings
from fxplug.compat.zhijian.convert_file import convert
from fxplug.compat.zhijian.line import parse
from fxplug.core.errors import FxplugError, SpecError
from fxplug.training.param_groups import choose
from fxplug.training.train_section import Train

ROOT = checkout()
pytestmark = [
    pytest.mark.skipif(ROOT is None, reason="SEEDS is not set to a folder with a checkout of LAMDA-ZhiJian"),
    pytest.mark.filterwarnings("ignore:Importing from timm.models.layers"),
]
WIDTH = 48
FILES = """adapter adaptformer_parallel adaptformer_sequential convpass kd_st lora ssf vpt_deep vpt_shallow vqt""".split()
FACT = ["fact_tk", "fact_tt"]
MODULES = "zhijian.models.addin.module"


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr("fxplug.compat.zhijian.imports._imported", {})


@functools.cache
def vit():
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", embed_dim=WIDTH, num_classes=10).eval()
    image = torch.randn(2, 3, 224, 224)
    return model, fxplug.trace(model, (image,)), image


def entries(name):
    """The add-ins and the settings of a file, widths as the model has them."""
    file = configuration(ROOT, name)
    addins = file.pop("addins")
    for entry in addins:
        if "kwargs" in entry:
            entry["kwargs"] = {key: value * WIDTH // 768 for key, value in entry["kwargs"].items()}
    return addins, file


def theirs(model, addins, args, model_args, repair=None):
    """ZhiJian's add-ins, and the model with its hooks."""
    with zhijian(ROOT) as code:
        if repair:
            repair(importlib.import_module(f"{MODULES}.{addins[0]['name'].lower()}"))
        made, _ = code.addin.prepare_addins(args, model_args)
        model = copy.deepcopy(model)
        code.backbone.prepare_hook(args.addins, made, model, "addin")
    torch.manual_seed(1)
    for parameter in (p for one in made for p in one.parameters()):
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1)
    return made, model


def use(addins, args, model_args):
    """The add-ins by class, as a configuration of fxplug names them."""
    options = {"config": vars(args), "model_config": vars(model_args)}
    return {name: {"use": f"{MODULES}.{name.lower()}:{name}", "options": options} for name in {one["name"] for one in addins}}


def held(name, addins, args, model_args, given=None, kinds=None, repair=None):
    """Outputs, gradients and numbers of parameters are those of ZhiJian's hooks, in evaluation and in training."""
    model, gm, image = vit()
    made, reference = theirs(model, addins, args, model_args, repair)
    new = fxplug.apply(gm, fxplug.blitz(given or addins, kinds or use(addins, args, model_args)))
    own = {key: p for key, p in new.named_parameters() if key.startswith("blitz.")}
    assert sum(p.numel() for p in own.values()) == sum(p.numel() for p in reference.addin.parameters())
    homes = list(homes_of(new, addins))
    for home, one in zip(homes, made, strict=True):
        new.get_submodule(f"{home}.addin").load_state_dict(one.state_dict())
    for training in (False, True):
        outputs = []
        for each in (new, reference):
            each.zero_grad()
            each.train(training)
            torch.manual_seed(2)
            with OnCPU():
                outputs.append(each(image))
            outputs[-1].square().sum().backward()
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-6, atol=1e-6)
        assert not torch.allclose(outputs[0], model(image))
        for home, one in zip(homes, made, strict=True):
            for key, parameter in one.named_parameters():
                mine = own[f"{home}.addin.{key}"].grad
                assert (mine is None) == (parameter.grad is None), (name, key)
                if mine is not None:
                    torch.testing.assert_close(mine, parameter.grad, rtol=1e-5, atol=1e-5 * float(parameter.grad.abs().max()))


def asked(name, **more):
    """What the add-ins are given: settings and the model's configuration, both as objects."""
    addins, file = entries(name)
    return addins, arguments(ROOT, addins, **file), settings({**model_config(vit()[0]), **more})


@pytest.mark.parametrize("name", FILES)
def test_each_file_is_what_zhijians_hooks_compute(name):
    held(name, *asked(name))


@pytest.mark.parametrize("name", FACT)
def test_fact_fails_in_its_constructor_here_and_there(name):
    addins, args, model_args = asked(name)
    with pytest.raises(AttributeError, match="get_mlp_attn_1"):
        theirs(vit()[0], addins, args, model_args)
    with pytest.raises(FxplugError, match="fails in its constructor, as it does in ZhiJian: .*get_mlp_attn_1"):
        fxplug.apply(vit()[1], fxplug.blitz(addins, use(addins, args, model_args)))


def repaired(module):
    """Gives FacT the two methods that its constructor asks for by other names."""
    kind = next(value for key, value in vars(module).items() if key.startswith("FacT_"))
    kind.get_mlp_attn_1, kind.get_mlp_attn_2 = kind.get_adapt_mlp_1, kind.get_adapt_mlp_2
    return kind


@pytest.mark.parametrize("name", FACT)
def test_fact_with_its_names_put_right_is_what_the_hooks_compute(name):
    addins, args, model_args = asked(name)
    for hook in addins[0]["hook"]:
        hook[0] = hook[0].replace("adapt_mlp", "mlp_attn")
    with fxplug.compat.zhijian.stand_in():
        kind = repaired(importlib.import_module(f"{MODULES}.{name}"))
    held(name, addins, args, model_args, kinds=functools.partial(kind, args, model_args), repair=repaired)


def test_vqt_needs_more_of_the_model_than_zhijian_gives():
    addins, args, whole = asked("vqt")
    bare = SimpleNamespace(**{key: getattr(whole, key) for key in ("hidden_size", "patches_size", "transformer_num_layers")})
    with pytest.raises(AttributeError, match="head_output"):
        theirs(vit()[0], addins, args, bare)
    with pytest.raises(FxplugError, match="VQT fails in its constructor, as it does in ZhiJian: .*head_output"):
        fxplug.apply(vit()[1], fxplug.blitz(addins, use(addins, args, bare)))


def test_deep_prompts_are_one_object():
    model = timm.create_model("vit_tiny_patch16_224")
    gm = fxplug.trace(model.eval(), (torch.randn(1, 3, 224, 224),))
    addins, file = entries("vpt_deep")
    made = use(addins, arguments(ROOT, addins, **file), settings(model_config(model)))
    new = fxplug.apply(gm, fxplug.blitz(addins, made))
    assert sum(p.numel() for p in new.blitz.parameters()) == 6912


@pytest.mark.parametrize(
    "line", ["(SSF.adapt_output): (layer1[0].bn1){inout1}", "(SSF.adapt_input): {inout1}(layer2[0].conv1)"]
)
def test_ssf_on_a_resnet_takes_the_width_of_the_picture_as_there(line):
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=10, zero_init_last=False).eval()
    image, model_args = torch.randn(2, 3, 64, 96), SimpleNamespace(hidden_size=64)
    with zhijian(ROOT) as code:
        addins = code.addin.addin_config_compile(f"{line}->...")
    args = arguments(ROOT, addins)
    (one,), reference = theirs(model, addins, args, model_args)
    with OnCPU():
        reference(image)  # makes the parameters
        for parameter in one.parameters():
            torch.nn.init.normal_(parameter, mean=1.0)
        expected = reference(image)
    new = fxplug.apply(fxplug.trace(model, (image,)), fxplug.blitz(line, use(addins, args, model_args)["SSF"]))
    (home,) = {name.rpartition(".")[0] for name, _ in new.named_parameters() if name.startswith("blitz.")}
    assert [p.shape for p in one.parameters()] == [(24,), (24,)]
    new.get_submodule(home).load_state_dict(one.state_dict())
    torch.testing.assert_close(new(image), expected, rtol=1e-6, atol=1e-6)


# --- lines, and what trains


def written():
    """The lines in ZhiJian's documentation, examples and scripts."""
    files = [f for f in ROOT.rglob("*") if f.suffix in (".py", ".rst", ".md", ".sh", ".ipynb") and ".git" not in f.parts]
    found = (re.findall(r"\(\w+\.\w+\): (?:\.\.\.|input)->[^'\"`\n\\,]+", file.read_text(errors="ignore")) for file in files)
    return sorted({line.strip() for lines in found for line in lines})


def as_hooks(line):
    """A line as the entries that ZhiJian makes of it: class, and for each hook place, method, side."""
    (read,) = parse(line)
    for insertion in read.insertions:
        ends = [(insertion.start, f"get_{'pre' if insertion.start.side == 'in' else 'post'}")] if insertion.start else []
        yield read.addin, [*ends, (insertion.end, read.method)]


def expanded(name, hooks):
    """An entry for each number of a range."""
    counts = {index.count for place, _ in hooks for index in place.indices} or {1}
    for number in range(max(counts)):
        made = []
        for place, method in hooks:
            parts = [number if not isinstance(part, str) else int(part) if part.isdigit() else part for part in place.parts]
            made.append((parts, [method, "pre" if place.side == "in" else "post"]))
        yield {"name": name, "location": [parts for parts, _ in made], "hook": [hook for _, hook in made]}


@pytest.mark.filterwarnings("ignore:.*is read as")
def test_each_written_line_is_the_entries_that_zhijian_makes_of_it():
    lines, compared = written(), 0
    assert len(lines) > 8
    for line in lines:
        with zhijian(ROOT) as code:
            try:
                expected = code.addin.addin_config_compile(line)
            except NotImplementedError:  # ranges of two lengths; or an add-in that is read as a place
                expected = None
        try:
            ours = [entry for name, hooks in as_hooks(line) for entry in expanded(name, hooks)]
        except SpecError as error:
            assert expected is None and "they are paired in order" in str(error), line
            continue
        if expected:  # a line with two in points gives nothing there
            assert ours == expected, line
            compared += 1
    assert compared > 5


@pytest.mark.parametrize("line", ["LoRA.adapt): ...->(blocks[0:12].attn.qkv", "Adapter.adapt): ...->(blocks[0:12].drop_path1"])
def test_the_tutorials_lines_are_what_zhijians_hooks_compute(line):
    line = f"({line}){{inout1}}->..."
    with zhijian(ROOT) as code:
        addins = code.addin.addin_config_compile(line)
    args, model_args = arguments(ROOT, addins), settings(model_config(vit()[0]))
    held(line, addins, args, model_args, given=line)


@pytest.mark.parametrize("keys", ["addin,head,fc_norm", "addin,blocks[11],head,fc_norm", "addin,blocks[8:12],head,fc_norm"])
def test_reuse_keys_train_what_zhijian_trains(keys):
    model = copy.deepcopy(vit()[0])
    model.addin = torch.nn.ModuleList()
    with zhijian(ROOT) as code:
        found = [one for part in keys.split(",") for one in code.addin.reuse_keys_config_compile(part)]
        code.backbone.prepare_gradient(found, model)
    expected = {name for name, p in model.named_parameters() if p.requires_grad}
    gm = copy.deepcopy(vit()[1])
    choose(gm, Train(task="classify", steps=1, trainable=reuse_keys(keys, gm)))
    assert {name for name, p in gm.named_parameters() if p.requires_grad} == expected


# --- files


@pytest.mark.parametrize("file", sorted((ROOT / "zhijian/models/configs").glob("*.yaml")) if ROOT else [], ids=lambda f: f.stem)
def test_each_file_converts_or_zhijian_itself_fails(file, tmp_path):
    if file.stem == "nearest_class_mean":  # it names a class Addin, of which there is none
        with pytest.raises(SpecError, match="no module named 'zhijian.models.addin.module.addin'"):
            convert(file)
        return
    done = convert(file, model="vit_tiny_patch16_224", out=tmp_path / "ours.yaml")
    made = yaml.safe_load(done.text)
    (tmp_path / "ours.yaml").write_text(done.text)
    assert fxplug.load_config(tmp_path / "ours.yaml").train.trainable == made["train"]["trainable"]
    assert not any(name.startswith("zhijian.models") for name in sys.modules)
