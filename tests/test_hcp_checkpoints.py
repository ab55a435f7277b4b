"""Files of HCP-Diffusion in converted passes, and back."""

from __future__ import annotations

import functools

import pytest
import small
import torch
from safetensors.torch import save_file
from torch import nn

import fxplug
from fxplug.compat.hcp import PluginBlock, SinglePluginBlock
from fxplug.compat.hcp.checkpoint_files import read_sections
from fxplug.compat.hcp.checkpoints import load_checkpoint, save_checkpoint
from fxplug.core.errors import ArtifactError, SpecError


def layers():
    parts = {"conv": nn.Conv2d(3, 8, 3, padding=1), "head": nn.Linear(8, 4)}
    return small.net(lambda self, x: self.head(self.conv(x).mean((2, 3))), **parts)


def rewritten(*passes):
    new = fxplug.trace(small.seeded(layers).eval(), torch.randn(4, 3, 5, 5))
    for name, options in passes:
        new = fxplug.apply(new, fxplug.load_pass(name, **options))
    return new


LORA = ("hcp/lora", {"name": "lora_block_0", "at": ["conv", "head"], "rank": 2})
NEW, OLD = ("layer.W_down", "layer.W_up"), ("layer.lora_down.weight", "layer.lora_up.weight")


def lora_state(names=NEW, between=".___.", **changed):
    """As HCP-Diffusion writes it, alpha divided by the rank."""
    shapes = {"conv": ([2, 3, 3, 3], [8, 2, 1, 1]), "head": ([2, 8], [4, 2])}
    state = {}
    for layer, halves in shapes.items():
        for name, shape in zip(names, halves, strict=True):
            state[f"{layer}{between}{name}"] = torch.randn(shape)
        state[f"{layer}{between}alpha"] = torch.tensor(0.25)
    return {**state, **changed}


def write(path, sections):
    if path.suffix == ".ckpt":
        torch.save(sections, path)
    else:
        save_file({f"{section}:{key}": value for section, state in sections.items() for key, value in state.items()}, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
@pytest.mark.parametrize("names, between", [(NEW, ".___."), (OLD, ".___."), (OLD, ".lora_block."), (OLD, ".lora_block_0.")])
def test_a_low_rank_file_is_what_its_weights_add(tmp_path, suffix, names, between):
    state = lora_state(names, between)
    new = rewritten(LORA)
    file = write(tmp_path / f"unet-100{suffix}", {"base": {}, "lora": state} if suffix == ".ckpt" else {"lora": state})
    assert len(load_checkpoint(new, file)) == 6
    model, x = small.seeded(layers).eval(), torch.randn(4, 3, 5, 5)
    with torch.no_grad():
        for layer in ("conv", "head"):
            down, up = (state[f"{layer}{between}{name}"] for name in names)
            weight = model.get_submodule(layer).weight
            weight += 0.25 * (up.flatten(1) @ down.flatten(1)).view(weight.shape)
    torch.testing.assert_close(new(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_what_is_written_is_read(tmp_path, suffix):
    new, other = rewritten(LORA), rewritten(LORA)
    nn.init.normal_(new.get_parameter("lora_block_0.head.Lora.up.weight"))
    names = save_checkpoint(new, tmp_path / f"a{suffix}")
    assert load_checkpoint(other, tmp_path / f"a{suffix}") and len(names) == 6
    assert all(torch.equal(a, b) for a, b in zip(new.state_dict().values(), other.state_dict().values(), strict=True))
    if suffix == ".ckpt":
        assert set(torch.load(tmp_path / "a.ckpt")["lora"]) == set(lora_state())
    with pytest.raises(SpecError, match="must end in .ckpt or .safetensors"):
        save_checkpoint(new, tmp_path / "a.bin")


def test_the_branches_have_files_of_their_own(tmp_path):
    how = {"at": ["conv", "head"], "rank": 2}
    new = rewritten(
        ("hcp/half_lora", {"name": "p", "half": "second", **how}), ("hcp/half_lora", {"name": "n", "half": "first", **how})
    )
    file = write(tmp_path / "unet-neg-1.ckpt", {"lora": lora_state()})
    with pytest.raises(SpecError, match=r"p and n both have weights at 'conv': choose one"):
        load_checkpoint(new, file)
    assert all(name.startswith("n.") for name in load_checkpoint(new, file, passes=["n"]))
    with pytest.raises(SpecError, match="no pass 'm'"):
        load_checkpoint(new, file, passes=["m"])


def test_averages_are_sections_of_their_own(tmp_path):
    new, mean = rewritten(LORA), lora_state()
    file = write(tmp_path / "a.ckpt", {"lora": lora_state(), "lora_ema": mean})
    load_checkpoint(new, file, ema=True)
    assert torch.equal(new.get_parameter("lora_block_0.head.Lora.up.weight"), mean["head.___.layer.W_up"])


class Pair(PluginBlock):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, fea_from, fea_in, fea_out):
        return fea_out + self.gain * fea_from[0].mean()


PAIR = [["conv:in[:]"], ["conv:out[:]"], "x[:]", "y[:]"]
PLUGINS = [
    ("hcp/single", {"name": "a", "plugin": "hcp_guide:LoraBlock", "layers": ["conv", "head"], "options": {"rank": 2}}),
    ("hcp/pair", {"name": "a", "plugin": f"{__name__}:Pair", "to": ["head"], "args": PAIR}),
    ("hcp/patch_after", {"name": "a", "plugin": "fxplug.compat.hcp.sample_plugins:Times", "layers": ["head"]}),
]


@pytest.mark.parametrize("row", PLUGINS, ids=lambda row: row[0])
def test_a_plugins_file(tmp_path, row):
    new, other = rewritten(row), rewritten(row)
    with torch.no_grad():
        for name, value in new.state_dict().items():
            if name.startswith("a."):
                value.add_(1.5)
    save_checkpoint(new, tmp_path / "unet-a-1.ckpt")
    (section,) = (sections := torch.load(tmp_path / "unet-a-1.ckpt"))
    layers = {"hcp/pair": {"conv"}, "hcp/single": {"conv", "head"}, "hcp/patch_after": {"head"}}
    assert section == "plugin" and {key.partition(".")[0] for key in sections[section]} == layers[row[0]]  # pairs by the first
    load_checkpoint(other, tmp_path / "unet-a-1.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(new.state_dict().values(), other.state_dict().values(), strict=True))


def square():
    return small.net(lambda self, x: self.b(self.a(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4))


LOHA = {"plugin": "hcp_guide:LohaLayer", "options": {"rank": 2}}
RESIDUAL = "fxplug.compat.hcp.sample_plugins:Residual"
FILES = {
    "hook_param": [("hcp/param", {"name": "p", "layers": ["a", "b"], **LOHA})],
    "hook_param and its result": [
        ("hcp/param", {"name": "p", "layers": ["a"], **LOHA}),
        ("hcp/single", {"name": "q", "plugin": "fxplug.compat.hcp.sample_plugins:Gain", "layers": ["a"]}),
    ],
    "two in one container": [
        ("hcp/patch_around", {"name": "p", "plugin": RESIDUAL, "layers": ["a"], "also": [{"name": "q", "plugin": RESIDUAL}]}),
    ],
}


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
@pytest.mark.parametrize("case", FILES)
def test_every_plugin_has_a_file_that_gives_it_back(tmp_path, case, suffix):
    loud, other = (fxplug.trace(small.seeded(square).eval(), torch.randn(2, 4)) for _ in range(2))
    for name, given in FILES[case]:
        loud, other = (fxplug.apply(gm, fxplug.load_pass(name, **given)) for gm in (loud, other))
    with torch.no_grad():
        own = {name for name, value in loud.state_dict().items() if name[:2] in ("p.", "q.") and value.normal_() is value}
    names = ["p", "q"] if "and" in case or "two" in case else ["p"]
    if len(names) > 1:
        with pytest.raises(SpecError, match="the passes p and q both have weights at 'a': choose one"):
            save_checkpoint(loud, tmp_path / f"both{suffix}")
    written = [save_checkpoint(loud, tmp_path / f"{name}{suffix}", passes=[name]) for name in names]
    assert {key for names in written for key in names} >= {name for name in own if name in dict(loud.named_parameters())}
    for name in names:
        load_checkpoint(other, tmp_path / f"{name}{suffix}", passes=[name])
    x = torch.randn(3, 4)
    assert torch.equal(other(x), loud(x))


class Hooked(SinglePluginBlock):
    def __init__(self, name, host, host_model=None, hooked="weight"):
        super().__init__(name, host, hook_param=hooked, host_model=host_model)
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, host_param):
        return host_param * self.gain


HOOKED = {
    "one layer": (["a"], "weight", torch.float32),
    "two layers": (["a", "b"], "weight", torch.float32),
    "an expression": ("re:.*", "weight", torch.float32),
    "a pattern": ("*", "weight", torch.float32),
    "half precision": (["a"], "weight", torch.float16),
    "bfloat16, two layers": (["a", "b"], "weight", torch.bfloat16),
    "a bias": (["b"], "bias", torch.float32),
}


@pytest.mark.parametrize("case", HOOKED)
def test_a_file_with_the_layers_own_parameter(tmp_path, case):
    """HCP-Diffusion's plugin with `hook_param` has that as `backup` (plugin.py), so it is in the file beside the weights."""
    layers, param, dtype = HOOKED[case]
    plugin = f"{__name__}:Hooked"
    given = {"name": "p", "plugin": plugin, "layers": layers, "param": param, "options": {"hooked": param}}
    model = small.seeded(square).eval()
    new = fxplug.apply(fxplug.trace(small.seeded(square).eval(), torch.randn(2, 4)), fxplug.load_pass("hcp/param", **given))
    paths = layers if isinstance(layers, list) else ["a", "b"]
    own = {path: model.get_submodule(path).get_parameter(param).detach().clone() for path in paths}
    rows = [(f"{path}.___", number, value) for number, (path, value) in enumerate(own.items(), 2)]
    state = {f"{at}.backup": value for at, _, value in rows} | {f"{at}.gain": torch.tensor(float(n)) for at, n, _ in rows}
    file = write(tmp_path / "unet-p-1.ckpt", {"plugin": {key: value.to(dtype) for key, value in state.items()}})
    assert len(load_checkpoint(new, file)) == len(paths)
    with torch.no_grad():
        for number, (path, value) in enumerate(own.items(), 2):
            model.get_submodule(path).get_parameter(param).copy_(value * number)
    x = torch.randn(3, 4)
    assert torch.equal(new(x), model(x))
    for changed in (own[paths[-1]] + 1, own[paths[-1]][:2]):
        before = {name: value.clone() for name, value in new.state_dict().items()}
        write(file, {"plugin": {**state, f"{paths[0]}.___.gain": torch.tensor(9.0), f"{paths[-1]}.___.backup": changed}})
        with pytest.raises(SpecError, match=f"'{paths[-1]}' has the model's own weight beside the plugin's"):
            load_checkpoint(new, file)
        assert all(torch.equal(value, before[name]) for name, value in new.state_dict().items())


def test_only_a_plugin_with_hook_param_has_a_parameter_of_its_layer_beside_it(tmp_path):
    new = rewritten(PLUGINS[2])
    (name,) = [name for name, _ in new.named_parameters() if name.startswith("a.")]
    backup = {"head.___.backup": new.get_parameter("head.weight"), f"head.___.{name.rpartition('.')[2]}": torch.tensor(1.0)}
    with pytest.raises(SpecError, match="'head' has no weight 'backup'"):
        load_checkpoint(new, write(tmp_path / "a.ckpt", {"plugin": backup}))


@pytest.mark.slow
def test_a_controlnets_file_has_the_names_of_the_plugin(tmp_path):
    unet = small.unet()
    new = fxplug.apply(unet.gm, fxplug.load_pass("controlnet", name="c"))
    save_checkpoint(new, tmp_path / "a.ckpt")
    keys = set(torch.load(tmp_path / "a.ckpt")["plugin"])
    heads = {f".___.cond_head.{number}.{what}" for number in range(0, 15, 2) for what in ("weight", "bias")}
    assert heads == {key for key in keys if "cond_head" in key}
    assert ".___.controlnet_mid_block.weight" in keys and ".___.conv_in.weight" in keys
    assert len(load_checkpoint(new, tmp_path / "a.ckpt")) == len(keys)


@pytest.mark.parametrize(
    "sections, kind, message",
    [
        ({"lora": lora_state(**{"body.___.layer.W_up": torch.zeros(1)})}, SpecError, "weights of 'body', and 2 layers"),
        ({"lora": lora_state(**{"head.___.layer.W_up": torch.zeros(4, 3)})}, SpecError, r"W_up \[4, 3\], and .* is \[4, 2\]"),
        ({"lora": lora_state(**{"head.___.layer.W_mid": torch.zeros(4)})}, SpecError, "'head' has no weight 'layer.W_mid'"),
        ({"lora": {k: v for k, v in lora_state().items() if "W_up" not in k}}, SpecError, "it has no 'lora_block_0.*up"),
        ({"lora": {k: v for k, v in lora_state().items() if "head" in k}}, SpecError, "it has no 'lora_block_0.conv"),
        ({"plugin": {"head.___.w": torch.zeros(1)}}, SpecError, "of 'head', and no pass here has such weights"),
        ({"base": {"head.weight": torch.zeros(1)}}, ArtifactError, "has no low-rank updates and no plugins .*it has base"),
        ([1], ArtifactError, "contains a list, so it is not a checkpoint"),
    ],
)
def test_a_file_of_something_else_changes_nothing(tmp_path, sections, kind, message):
    new = rewritten(LORA)
    before = {name: value.clone() for name, value in new.state_dict().items()}
    torch.save(sections, tmp_path / "a.ckpt")
    with pytest.raises(kind, match=message):
        load_checkpoint(new, tmp_path / "a.ckpt")
    assert all(torch.equal(before[name], value) for name, value in new.state_dict().items())


# --- the verb


@pytest.fixture
def saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fxplug.save(rewritten(LORA), "saved")
    return tmp_path / "saved"


run = functools.partial(small.command, "convert", "hcp")


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_a_checkpoint_goes_into_a_saved_rewrite_and_comes_out_of_it(saved, suffix):
    state = lora_state(OLD, ".lora_block.")
    file = write(saved.parent / f"unet-100{suffix}", {"lora": state})
    done = run(file, "--into", saved)
    assert done.exit_code == 0, done.stderr
    assert "6 weights of lora_block_0" in done.stdout
    up = fxplug.load(saved).get_parameter("lora_block_0.head.Lora.up.weight")
    assert torch.equal(up, state["head.lora_block.layer.lora_up.weight"])
    again = run(saved, "-o", f"again{suffix}", "--pass", "lora_block_0")
    assert again.exit_code == 0, again.stderr
    read = read_sections(f"again{suffix}")["lora"]
    assert read.keys() == lora_state().keys() and torch.equal(read["head.___.layer.W_up"], up)


@pytest.mark.parametrize("row", PLUGINS, ids=lambda row: row[0])
def test_weights_of_plugins_go_into_a_saved_rewrite(tmp_path, monkeypatch, row):
    monkeypatch.chdir(tmp_path)
    fxplug.save(rewritten(row), "saved")
    loud = rewritten(row)
    with torch.no_grad():
        for name, value in loud.state_dict().items():
            if name.startswith("a."):
                value.add_(1.5)
    save_checkpoint(loud, "a.ckpt")
    assert run("a.ckpt", "--into", "saved").exit_code == 0
    x = torch.randn(4, 3, 5, 5)
    assert torch.equal(fxplug.load("saved", allow=[__name__])(x), loud(x))


@pytest.mark.parametrize(
    "words, code, message",
    [
        (("text.ckpt", "--into", "saved"), 1, "cannot be read"),
        (("other.ckpt", "--into", "saved"), 1, "2 of its 4 layers have no such pass here, and 2 are not in this model"),
        (("other.ckpt", "--into", "saved"), 1, "2 of its 4 layers have no such pass here, and 2 are not"),
        (("both.ckpt", "--into", "saved"), 1, "twice, under the names of two versions"),
        (("a.ckpt", "--into", "no"), 1, "'no' is not a folder of a saved rewrite"),
        (("a.ckpt", "--into", "run"), 1, "of a training run it is run/module"),
        (("a.ckpt", "--into", "saved", "--pass", "lora"), 1, "no pass 'lora'; there are lora_block_0"),
        (("a.ckpt", "--into", "saved", "--ema"), 1, "none of the sections 'base_ema', 'lora_ema', 'plugin_ema'; it has lora"),
        (("no.ckpt", "--into", "saved"), 1, "no such file"),
        (("saved", "-o", "a.bin"), 1, "must end in .ckpt or .safetensors"),
        (("saved", "-o", "a.yaml/a.ckpt"), 1, "cannot be written"),
        (("plain", "-o", "a.ckpt"), 1, "no pass here has weights that a checkpoint of HCP-Diffusion can store"),
        (("a.ckpt",), 2, "--into DIR"),
        (("a.yaml", "--into", "saved"), 2, "--into is only for a checkpoint"),
        (("a.ckpt", "--into", "saved", "-o", "b.yaml"), 2, "--into is only for a checkpoint"),
        (("saved", "-o", "a.ckpt", "--model", "x"), 2, "--model is only for a configuration"),
    ],
)
def test_what_the_verb_gets_wrong_changes_nothing(saved, words, code, message):
    fxplug.save(rewritten(), "plain")
    (saved.parent / "run").mkdir()
    fxplug.save(rewritten(), "run/module")
    (saved.parent / "text.ckpt").write_text("hello")
    (saved.parent / "a.yaml").write_text("lora_unet: []")
    torch.save({"lora": lora_state()}, "a.ckpt")
    text = {f"text_model.encoder.layers.{n}.fc1.___.layer.W_up": torch.zeros(1, 2) for n in (0, 2)}
    torch.save({"lora": lora_state(**text)}, "other.ckpt")
    torch.save({"lora": lora_state(**{"head.lora_block.layer.lora_up.weight": torch.zeros(4, 2)})}, "both.ckpt")
    before = {file: file.read_bytes() for file in saved.parent.rglob("*") if file.is_file()}
    done = run(*words)
    assert done.exit_code == code
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert {file: file.read_bytes() for file in saved.parent.rglob("*") if file.is_file()} == before
