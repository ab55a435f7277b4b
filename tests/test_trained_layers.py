"""Layers of the base that train beside passes: what each format of adapter files keeps of them, and what comes back."""

from __future__ import annotations

import copy
import json

import pytest
import small
import timm
import torch
import unets
from safetensors.torch import load_file, save_file
from sweeps import sweep
from torch import nn

import fxplug
from fxplug.blocks.base import Block

peft = pytest.importorskip("peft")


class Bare(nn.Module):
    """Parameters of its own, of a module whose parameter has another name, and a layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1, 6))
        self.body, self.twice, self.gain = nn.Linear(4, 6), nn.Linear(6, 6), nn.Module()
        self.gain.gamma = nn.Parameter(torch.ones(6))
        self.gain.forward = lambda x: x
        self.table = nn.Embedding(5, 6)
        self.out = nn.Linear(6, 5, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x):
        x = self.twice(self.twice(self.body(x)).relu())
        return self.out((x + self.shift + self.table.weight.mean(0)) * self.gain.gamma)


def bare():
    return Bare(), (torch.randn(3, 4),)


def of_timm(name, **options):
    return timm.create_model(name, num_classes=5, **options), (torch.randn(2, 3, 64, 64),)


def bert():
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 20}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes)), (torch.randint(20, (2, 7)),)


CASES = {
    "vit": (lambda: of_timm("vit_tiny_patch16_224", img_size=64, depth=2), "qkv", ["head"]),
    "vit-norm": (lambda: of_timm("vit_tiny_patch16_224", img_size=64, depth=2), "qkv", ["norm", "blocks.1.norm2"]),
    "vit-one": (lambda: of_timm("vit_tiny_patch16_224", img_size=64, depth=2), "qkv", ["head.bias", "patch_embed.proj"]),
    "resnet": (lambda: of_timm("resnet10t"), "layer1.*.conv2", ["fc", "layer2.*.bn1"]),
    "convnext": (lambda: of_timm("convnext_atto"), "stages.1.**.fc1", ["head.fc", "stages.0.blocks.0.norm"]),
    "bert": (bert, ["query", "value"], ["classifier", "bert.pooler"]),
}


def made_and_trained(name):
    """A model, a function that makes it again, its inputs, and what was made of it with other numbers in all that trains."""
    model, at, names = CASES[name]
    first, args = small.seeded(model)
    again = small.seeded(lambda: copy.deepcopy(first)).eval()
    new = fxplug.apply(fxplug.trace(first.eval(), args), fxplug.load_pass("lora", at=at, rank=2))
    groups = fxplug.trainable(new, *names)
    new.train()
    torch.optim.SGD(groups, lr=0.1).zero_grad()
    with torch.no_grad():
        for group in groups:
            for p in group["params"]:
                p.add_(0.1 * torch.randn_like(p))
        for layer in new.modules():
            if isinstance(layer, nn.BatchNorm2d) and layer.weight.requires_grad:
                layer.running_mean.add_(0.3)
    return lambda: copy.deepcopy(again), args, new.eval()


def result(module, args):
    with torch.no_grad():
        out = module(*args)
    return out if isinstance(out, torch.Tensor) else out[0]


@pytest.mark.slow
@sweep("name", list(CASES), *CASES)
@pytest.mark.filterwarnings("ignore")
def test_pefts_file_has_them_and_gives_exactly_what_was_trained(name, tmp_path):
    base, args, new = made_and_trained(name)
    wanted = result(new, args)
    assert not torch.equal(result(base(), args), wanted)
    folder = fxplug.save_adapter(new, tmp_path / "it").path
    assert torch.equal(result(peft.PeftModel.from_pretrained(base(), folder).eval(), args), wanted)
    _, at, names = CASES[name]
    again = fxplug.apply(fxplug.trace(base(), args), fxplug.load_pass("lora", at=at, rank=2))
    fxplug.trainable(again, *names)
    fxplug.load_adapter(again, folder)
    assert torch.equal(result(again, args), wanted)
    gm = fxplug.trace(base(), args)
    if name == "resnet":
        with pytest.raises(fxplug.ArtifactError, match="running_.*' is a statistic of a norm, which no pass holds"):
            fxplug.pass_for(folder, gm, slots=0)
        return
    before = result(gm, args)
    fresh = fxplug.apply(gm, fxplug.pass_for(folder, gm, slots=0))
    fxplug.load_adapter(fresh, folder)
    assert torch.equal(result(fresh, args), wanted) and torch.equal(result(gm, args), before)
    fxplug.save_adapter(fresh, tmp_path / "again")
    assert torch.equal(result(peft.PeftModel.from_pretrained(base(), tmp_path / "again").eval(), args), wanted)


@pytest.mark.filterwarnings("ignore")
def test_a_file_that_peft_trained_comes_back_exactly(tmp_path):
    base, args, _ = made_and_trained("vit")
    config = peft.LoraConfig(r=2, target_modules=["attn.qkv"], modules_to_save=["head", "norm"], init_lora_weights=False)
    model = peft.get_peft_model(base(), config).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "modules_to_save" in key:
                p.add_(torch.randn_like(p))
    model.save_pretrained(tmp_path / "it")
    gm = fxplug.trace(base(), args)
    new = fxplug.apply(gm, fxplug.pass_for(tmp_path / "it", gm, slots=0))
    fxplug.load_adapter(new, tmp_path / "it")
    assert torch.equal(result(new, args), result(model, args))


@sweep("as_", ["kohya", "comfy", "lycoris"], "comfy", "lycoris")
def test_formats_of_differences_have_the_difference(as_, tmp_path):
    base, args, new = made_and_trained("vit")
    fxplug.save_adapter(new, tmp_path / "it", as_=as_)
    gm = fxplug.trace(base(), args)
    again = fxplug.apply(gm, fxplug.pass_for(tmp_path / "it.safetensors", gm, slots=0))
    fxplug.load_adapter(again, tmp_path / "it.safetensors")
    torch.testing.assert_close(result(again, args), result(new, args), rtol=1e-5, atol=1e-5)


WEIGHTS = "pytorch_lora_weights.safetensors"


@sweep("names", [["conv_out"], ["conv_in"], ["mid_block.resnets.0.conv1"], ["time_embedding.linear_1"]], 0)
@pytest.mark.filterwarnings("ignore")
def test_diffusers_loads_a_change_of_a_layer_as_a_lora_of_full_rank(names, tmp_path):
    from diffusers import UNet2DConditionModel

    gm, args, kwargs = unets.sd15()
    model = UNet2DConditionModel.from_config(gm.config)
    model.load_state_dict(copy.deepcopy(gm.state_dict()))
    new = fxplug.apply(fxplug.trace(copy.deepcopy(model), args, kwargs), fxplug.load_pass("lora", at="to_q", rank=2))
    with torch.no_grad():
        for group in fxplug.trainable(new, *names):
            for p in group["params"]:
                p.add_(0.05 * torch.randn_like(p))
        fxplug.save_adapter(new, tmp_path / "it", as_="diffusers")
        model.eval().load_lora_adapter(tmp_path / "it", prefix="unet", weight_name=WEIGHTS)
        wanted = new(*args, **kwargs)[0]
        torch.testing.assert_close(model(*args, **kwargs)[0], wanted, rtol=1e-4, atol=1e-5)


@sweep("names, as_, why", [
    (["norm"], "diffusers", "'norm' is a whole parameter, which diffusers cannot represent"),
    (["norm"], "kohya", None),
    (["pos_embed"], "peft", "'pos_embed' is a whole parameter of the model itself"),
    (["cls_token"], "comfy", "'cls_token' is a whole parameter"),
    (["blocks.0.attn.qkv.weight"], "peft", "is a whole parameter in a layer with an update, which PEFT cannot represent"),
    (["blocks.0"], "peft", "is a whole parameter in a layer with an update"),
], 0, 2, 4)  # fmt: skip
def test_what_a_format_has_no_form_for_is_named(names, as_, why, tmp_path):
    base, args, _ = made_and_trained("vit")
    new = fxplug.apply(fxplug.trace(base(), args), fxplug.load_pass("lora", at="qkv", rank=2))
    with torch.no_grad():
        for p in fxplug.trainable(new, *names)[-1]["params"]:
            p.add_(0.1)
    if why is None:
        assert fxplug.save_adapter(new, tmp_path / "it", as_=as_).path.is_file()
    else:
        with pytest.raises(fxplug.ArtifactError, match=why):
            fxplug.save_adapter(new, tmp_path / "it", as_=as_)
        assert not list(tmp_path.iterdir())


@sweep("names", [["head"], ["pos_embed", "cls_token"], ["blocks.0.attn.qkv"], ["blocks.1"], ["**"], ["norm.bias"]], 1, 2)
def test_our_own_file_has_any_parameter(names, tmp_path):
    base, args, _ = made_and_trained("vit")
    lora = fxplug.load_pass("lora", at="qkv", rank=2)
    new = fxplug.apply(fxplug.trace(base(), args), lora)
    with torch.no_grad():
        for group in fxplug.trainable(new, *names):
            for p in group["params"]:
                p.add_(0.1 * torch.randn_like(p))
    file = fxplug.save_adapter(new, tmp_path / "it", as_="fxplug").path
    again = fxplug.apply(fxplug.trace(base(), args), lora)
    with pytest.raises(fxplug.ArtifactError, match=r"it was trained, and is not trainable here: call fxplug.trainable\("):
        fxplug.load_adapter(again, file)
    fxplug.trainable(again, *names)
    fxplug.load_adapter(again, file)
    assert torch.equal(result(again, args), result(new, args))
    folder = fxplug.save(new, tmp_path / "module")
    one, two = load_file(file), load_file(fxplug.save_adapter(fxplug.load(folder), tmp_path / "it2", as_="fxplug").path)
    assert one.keys() == two.keys() and all(torch.equal(value, two[key]) for key, value in one.items())


def test_tied_weights_and_parameters_by_other_names():
    model, args = small.seeded(bare)
    base = copy.deepcopy(model)
    lora = fxplug.load_pass("lora", at=["body", "twice"], rank=2)
    new = fxplug.apply(fxplug.trace(model, args), lora)
    with torch.no_grad():
        for p in fxplug.trainable(new, "shift", "gain", "table")[-1]["params"]:
            p.add_(torch.randn_like(p))
    held = fxplug.adapters.saved_heads.get_trained_layers(new)
    assert sorted(held) == ["gain.gamma", "out.weight", "shift", "table.weight"]
    assert held["out.weight"] is held["table.weight"]
    assert not torch.equal(result(base, args), result(new, args))


def test_what_is_set_by_hand_after_trainable_is_saved_too(tmp_path):
    base, args, _ = made_and_trained("vit")
    new = fxplug.apply(fxplug.trace(base(), args), fxplug.load_pass("lora", at="qkv", rank=2))
    fxplug.save_adapter(new, tmp_path / "a")
    assert json.loads((tmp_path / "a/adapter_config.json").read_text())["modules_to_save"] is None
    fxplug.trainable(new)
    new.head.requires_grad_(True)
    fxplug.save_adapter(new, tmp_path / "a")
    assert json.loads((tmp_path / "a/adapter_config.json").read_text())["modules_to_save"] == ["head"]


class Gain(Block):
    """A block of one's own, with a buffer."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.gain = nn.Parameter(torch.ones(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @classmethod
    def at(cls, site):
        return cls(site.y.shape[-1])

    def forward(self, y):
        return y * self.gain + self.count


GAIN = fxplug.Pass("gain", [fxplug.Rule(fxplug.Match("blocks.*.mlp"), Gain, args=["y"])])
SSF = ("ssf", {"at": "blocks.*.mlp.fc2"})


def changed(gm, *passes):
    new = fxplug.apply(gm, *passes)
    with torch.no_grad():
        for p in (p for entry in new.meta["passes"] for p in new.get_submodule(entry["name"]).parameters()):
            p.add_(0.1 * torch.randn_like(p))
        for name, buffer in new.named_buffers():
            if name.endswith("Gain.count"):
                buffer.fill_(2)
    return new


def test_blocks_of_ones_own_go_alone_into_passes_of_the_same_places(tmp_path):
    gm, args, _ = small.plain_vit()
    lora = fxplug.load_pass("lora", at="qkv", rank=2)
    new = changed(gm, GAIN, lora)
    file = fxplug.save_adapter(new, tmp_path / "it", as_="fxplug").path
    again = fxplug.apply(gm, GAIN, lora)
    fxplug.load_adapter(again, file)
    assert torch.equal(result(again, args), result(new, args))
    with pytest.raises(fxplug.ArtifactError, match="the block 'test_trained_layers:Gain' of 'gain' is not one of fxplug's"):
        fxplug.pass_for(file, gm, slots=0)
    with pytest.raises(fxplug.ArtifactError, match="'gain' has a Gain at 'blocks.0.mlp' .after., and no pass here does"):
        fxplug.load_adapter(fxplug.apply(gm, lora), file)
    other = fxplug.Pass("gain", [fxplug.Rule(fxplug.Match("blocks.0.mlp"), Gain, args=["y"])])
    before = {key: value.clone() for key, value in gm.state_dict().items()}
    small_one = fxplug.apply(gm, other, lora)
    with pytest.raises(fxplug.ArtifactError, match="has a Gain at 'blocks.1.mlp'"):
        fxplug.load_adapter(small_one, file)
    assert all(torch.equal(value, before[key]) for key, value in gm.state_dict().items())
    for who in (lambda: fxplug.convert_adapter(file, tmp_path / "b", as_="peft"), lambda: small.load_and_use(slots(gm), file)):
        with pytest.raises(fxplug.ArtifactError, match="has gain, lora as a module has them"):
            who()


def slots(gm):
    return fxplug.apply(gm, fxplug.load_pass("lora", at="qkv", rank=2, slots=1))


def test_several_passes_of_a_file_become_one_or_are_chosen(tmp_path):
    gm, args, _ = small.plain_vit()
    new = changed(gm, fxplug.load_pass("lora", at="qkv", rank=2), fxplug.load_pass(SSF[0], **SSF[1]), fxplug.load_pass("vpt"))
    file = fxplug.save_adapter(new, tmp_path / "it", as_="fxplug").path
    again = fxplug.apply(gm, fxplug.pass_for(file, gm))
    fxplug.load_adapter(again, file)
    assert torch.equal(result(again, args), result(new, args))
    new = changed(gm, fxplug.load_pass("lora", at="qkv", rank=2), fxplug.load_pass("scale", at="blocks.*.attn.qkv"))
    file = fxplug.save_adapter(new, tmp_path / "two", as_="fxplug").path
    with pytest.raises(fxplug.ArtifactError, match="'lora' and 'scale' both have a block at 'blocks.0.attn.qkv' .after.: make"):
        fxplug.pass_for(file, gm)
    one, two = (fxplug.pass_for(file, gm, name=name, passes=[name]) for name in ("lora", "scale"))
    again = fxplug.apply(gm, one, two)
    fxplug.load_adapter(again, file)
    assert torch.equal(result(again, args), result(new, args))
    with pytest.raises(fxplug.SpecError, match="has no pass 'scala' .did you mean 'scale'"):
        fxplug.pass_for(file, gm, passes=["scala"])


def test_the_file_of_a_pass_in_a_saved_folder_goes_into_that_pass(tmp_path):
    gm, args, _ = small.plain_vit()
    new = changed(gm, fxplug.load_pass(SSF[0], **SSF[1]))
    folder = fxplug.save(new, tmp_path / "s")
    again = fxplug.apply(gm, fxplug.load_pass(SSF[0], **SSF[1]))
    fxplug.load_adapter(again, folder / "ssf.safetensors")
    assert torch.equal(result(again, args), result(new, args))


def rewritten(path, about):
    """A file with another description of its passes."""
    save_file(load_file(path), path, {"fxplug.adapter": about})
    return path


@sweep("about, why", [
    ("{", "its fxplug.adapter"),
    ("[]", "its fxplug.adapter"),
    ('{"passes": [{"name": 3}], "trained": []}', "is not a list of passes"),
    ('{"passes": [{"name": "ssf", "sites": []}], "trained": []}', "does not say the rules of the pass 'ssf'"),
    ('{"passes": [{"name": "ssf", "sites": [], "rules": {"rules": [{"match": {"path": "head"}, "use": "os:system"}]}}], '
     '"trained": []}', "the block 'os:system' of 'ssf' is not one of fxplug's own"),
    ('{"passes": [{"name": "ssf", "sites": [], "rules": {"rules": [{"match": {"path": "head"}, "use": "fxplug.blocks:Head", '
     '"options": {"weights": "/etc/passwd"}}]}}], "trained": []}', "the file '/etc/passwd' of 'ssf' is not one"),
    ('{"passes": [{"name": "ssf", "sites": [], "rules": {"rules": [{"mtch": 3}]}}], "trained": []}', "cannot be made"),
], 0, 4, 5)  # fmt: skip
def test_a_strangers_description_is_data(about, why, tmp_path):
    gm, _, _ = small.plain_vit()
    new = changed(gm, fxplug.load_pass(SSF[0], **SSF[1]))
    file = rewritten(fxplug.save_adapter(new, tmp_path / "it", as_="fxplug").path, about)
    with pytest.raises(fxplug.ArtifactError, match=why):
        fxplug.pass_for(file, gm)


def test_an_adapter_in_a_folder_is_replaced_and_other_things_stay(tmp_path):
    gm, args, _ = small.plain_vit()
    for as_, file in (("peft", "adapter_model.safetensors"), ("diffusers", WEIGHTS)):
        folder = tmp_path / as_
        for epoch in range(3):
            new = changed(gm, fxplug.load_pass("lora", at="qkv", rank=2 + epoch))
            fxplug.save_adapter(new, folder, as_=as_)
        again = fxplug.apply(gm, fxplug.load_pass("lora", at="qkv", rank=4))
        fxplug.load_adapter(again, folder)
        assert torch.equal(result(again, args), result(new, args))
        (folder / "notes.txt").write_text("mine")
        kept = (folder / file).read_bytes()
        with pytest.raises(fxplug.ArtifactError, match="overwrite=True replaces the adapter in it"):
            fxplug.save_adapter(changed(gm, fxplug.load_pass("lora", at="qkv")), folder, as_=as_, overwrite=False)
        assert (folder / file).read_bytes() == kept
        fxplug.save_adapter(changed(gm, fxplug.load_pass("lora", at="qkv")), folder, as_=as_)
        assert (folder / file).read_bytes() != kept and (folder / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["diffusers", "peft"]


@pytest.mark.filterwarnings("ignore")
def test_the_count_of_what_trains_is_pefts_line(capsys):
    base, args, new = made_and_trained("vit")
    fxplug.trainable(new, "head")
    new.print_trainable_parameters()
    model = peft.get_peft_model(base(), peft.LoraConfig(r=2, target_modules=["attn.qkv"], modules_to_save=["head"]))
    model.print_trainable_parameters()
    ours, theirs = capsys.readouterr().out.splitlines()
    number = sum(p.numel() for p in base().head.parameters())  # PEFT keeps the old head beside the new one
    some, every = model.get_nb_trainable_parameters()
    assert new.get_nb_trainable_parameters() == (some, every - number)
    assert theirs.partition(" || all")[0] == ours.partition(" || all")[0]
    assert ours == f"trainable params: {some:,d} || all params: {every - number:,d} || trainable%: " \
                   f"{100 * some / (every - number):.4f}"  # fmt: skip


@pytest.mark.slow
def test_verify_of_a_trained_controlnet_says_that_it_is_no_longer_new():
    gm, args, kwargs = unets.sd15()
    new = fxplug.apply(gm, fxplug.load_pass("controlnet", options={"conditioning_embedding_out_channels": [4, 4, 4, 8]}))
    with torch.no_grad():
        for p in new.controlnet.parameters():
            p.add_(0.2 * torch.randn_like(p))
    size = next(node.meta["shape"] for node in new.graph.nodes if node.op == "placeholder" and node.target == "cond")
    with pytest.raises(fxplug.VerifyError, match=r"is neutral, but outputs differ(.|\n)*trained or loaded ones do"):
        fxplug.verify(gm, new, args, {**kwargs, "cond": torch.randn(size)}, compile=False)
