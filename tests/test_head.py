"""A new last layer: found by structure, trained, saved, and merged so that its own library takes it."""

from __future__ import annotations

import re

import pytest
import small
import timm
import torch
import unets
from safetensors.torch import load_file, save_file
from sweeps import sweep
from torch import nn

import fxplug

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def head(**given):
    return fxplug.load_pass("head", **given)


def of_timm(name, **options):
    with torch.device("meta"):
        model = timm.create_model(name, **options).eval()
        return fxplug.trace(model, (torch.empty(1, 3, 64, 64),))


def of_transformers(config, cls, **inputs):
    import transformers

    model = small.seeded(lambda: getattr(transformers, cls)(config)).eval()
    return model, small.traced(model, **inputs)


@pytest.fixture(scope="module")
def new():
    return fxplug.apply(small.plain_vit().gm, head(classes=37))


@sweep(
    "name, path", [("resnet10t", "fc"), ("mobilenetv3_small_050", "classifier"), ("convnext_atto", "head.fc")], 0
)
def test_the_last_layer_of_a_classifier_is_found(name, path):
    gm = of_timm(name)
    assert {site.path for site in fxplug.find(gm, head(classes=37))} == {path}
    assert fxplug.apply(gm, head(classes=37))(torch.empty(2, 3, 64, 64, device="meta")).shape == (2, 37)
    with pytest.raises(fxplug.MatchError, match="this model has no single last layer: its result is from .*timm's "
                                                "num_classes"):
        fxplug.find(of_timm(name, num_classes=0), head(classes=37))


def test_the_last_layer_of_a_unet_has_another_number_of_channels():
    gm, _, kwargs = unets.sd15()
    new = fxplug.apply(gm, head(size=8))
    assert new(**kwargs)[0].shape[1] == 8


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        x = self.body(x).relu()
        return self.one(x), self.two(x)


class Residual(Two):
    def forward(self, x):
        return x + self.body(x)


class Softened(Two):
    def forward(self, x):
        return self.one(self.body(x).relu()).view(-1, 3).softmax(-1), x


@pytest.mark.parametrize(
    "model, says",
    [
        (Two, "this model has 2 last layers, one, two: name the ones to change, at: [...]"),
        (Residual, "this model has no single last layer: its result is from body, x"),
        (nn.Identity, "this model has no single last layer"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), "its result is from 1 (LayerNorm)"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "its result is from 1 (ReLU)"),
    ],
)
def test_a_model_without_one_last_layer_says_so(model, says):
    gm = fxplug.trace(model().eval(), (torch.zeros(2, 4),))
    with pytest.raises(fxplug.MatchError, match=re.escape(says)):
        fxplug.find(gm, head(classes=2))


def test_a_layer_that_is_named_gets_another_size():
    gm = fxplug.trace(Two().eval(), (torch.zeros(2, 4),))
    assert [out.shape[1] for out in fxplug.apply(gm, head(classes=7, at="two"))(torch.zeros(2, 4))] == [3, 7]
    assert [out.shape[1] for out in fxplug.apply(gm, head(classes=7, at=["one", "two"]))(torch.zeros(2, 4))] == [7, 7]
    soft = fxplug.trace(Softened().eval(), (torch.zeros(2, 4),))
    assert [site.path for site in fxplug.find(soft, head(classes=7))] == ["one", "one"]


@pytest.mark.parametrize(
    "given, says",
    [
        ({}, "needs one of 'classes' and 'size', or 'weights'; found none"),
        ({"classes": 3, "size": 4}, "needs one of 'classes' and 'size', or 'weights'; found classes and size"),
        ({"classes": 0}, "classes must be a whole number, 1 or more, not 0"),
        ({"classes": "37"}, "classes must be a whole number, 1 or more, not '37'"),
        ({"size": True}, "size must be a whole number, 1 or more, not True"),
    ],
)
def test_a_size_that_is_none_says_so(given, says):
    with pytest.raises(fxplug.SpecError, match=re.escape(says)):
        fxplug.apply(small.plain_vit().gm, head(**given))


def test_other_passes_leave_a_new_head_alone_and_say_where_they_cannot(new):
    gm = small.plain_vit().gm
    lora = fxplug.load_pass("lora", at="**", rank=2)
    assert "head" not in [site.path for site in fxplug.find(new, lora)]
    assert "head" not in [site.path for site in fxplug.find(new, fxplug.load_pass("lora", at="all-linear"))]
    for at, p in (("head", "lora"), ("last-layer", "lora")):
        with pytest.raises(fxplug.MatchError, match="'head' was resized by pass 'new_head', which trains all of it"):
            fxplug.find(new, fxplug.load_pass(p, at=at))
    with pytest.raises(fxplug.SpecError, match="pass 'lora' was applied to it at its old size: put the new head before that "
                                               "pass"):
        fxplug.apply(fxplug.apply(gm, lora), head(classes=37))


def test_with_lora_it_is_verified_saved_and_lowered(new, tmp_path):
    gm, x, _ = small.plain_vit()
    both = fxplug.apply(new, fxplug.load_pass("lora", at="all-linear", rank=2))
    report = fxplug.verify(gm, both, x, compile=False)
    assert report.ok and "a gradient reaches 18 new parameters" in str(report)
    fxplug.save(both, tmp_path / "both")
    again = fxplug.load(tmp_path / "both")
    assert torch.equal(again(*x), both(*x)) and both(*x).shape == (2, 37)
    for lowered in (fxplug.lower(both, fuse=True), fxplug.lower(both, fuse="blas")):
        torch.testing.assert_close(lowered(*x), both(*x), rtol=1e-4, atol=1e-5)
    assert torch.equal(fxplug.unmerge(fxplug.merge(both))(*x), both(*x)) and small.plain_vit().gm(*x).shape == (2, 10)


def test_merged_it_is_a_checkpoint_of_timm(new, tmp_path):
    _, x, _ = small.plain_vit()
    merged = fxplug.merge(new)
    assert torch.equal(merged(*x), new(*x)) and merged.head.out_features == 37
    assert merged.state_dict().keys() == small.plain_vit().gm.state_dict().keys()
    fxplug.save_checkpoint(new, tmp_path / "model.safetensors", to="timm")
    options = {"img_size": 32, "depth": 2, "embed_dim": 96, "num_classes": 37}
    plain = timm.create_model("vit_tiny_patch16_224", **options, checkpoint_path=str(tmp_path / "model.safetensors")).eval()
    assert torch.equal(plain(*x), new(*x))


def test_merged_it_is_a_model_of_transformers(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**SIZES, image_size=16, patch_size=8, num_labels=3)
    _, (gm, _, kwargs) = of_transformers(config, "ViTForImageClassification", pixel_values=torch.randn(2, 3, 16, 16))
    new = fxplug.apply(gm, head(classes=37))
    assert new(**kwargs).logits.shape == (2, 37)
    fxplug.save_checkpoint(new, tmp_path / "model.safetensors", to="safetensors")
    ViTConfig(**SIZES, image_size=16, patch_size=8, num_labels=37).save_pretrained(tmp_path)
    plain = ViTForImageClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(plain(**kwargs).logits, new(**kwargs).logits)


@pytest.mark.slow
def test_a_head_that_is_tied_to_embeddings_leaves_them_alone():
    from transformers import GPT2Config

    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 40, "n_positions": 16}
    config = GPT2Config(**sizes, tie_word_embeddings=True, use_cache=False)
    model, (gm, _, kwargs) = of_transformers(config, "GPT2LMHeadModel", input_ids=torch.arange(6)[None])
    new = fxplug.apply(gm, head(classes=5))
    assert new(**kwargs).logits.shape == (1, 6, 5)
    merged = fxplug.merge(new)
    assert torch.equal(merged(**kwargs).logits, new(**kwargs).logits)
    assert merged.state_dict()["transformer.wte.weight"].shape == (40, 16)
    assert merged.state_dict()["lm_head.weight"].shape == (5, 16)


@pytest.mark.slow
def test_a_configuration_trains_it_and_plain_timm_takes_the_result(tmp_path):
    from PIL import Image

    for name, colour in (("cat", 0), ("dog", 255), ("eel", 120)):
        (tmp_path / "data" / name).mkdir(parents=True)
        for index in range(2):
            Image.new("RGB", (32, 32), (colour, colour, 90)).save(tmp_path / "data" / name / f"{index}.png")
    options = {"img_size": 32, "depth": 1, "embed_dim": 96, "num_classes": 10}
    config = {
        "model": {"timm": "vit_tiny_patch16_224", "options": options},
        "passes": [{"head": {"classes": 3}}, {"lora": {"at": "qkv", "rank": 2}}],
        "train": {"task": "classify", "steps": 2, "batch": 3, "lr": 0.01, "log": {"tensorboard": False}},
        "data": {"classes": str(tmp_path / "data"), "size": 32},
    }
    run = fxplug.train(config, out=tmp_path / "run", quiet=True)
    trained = [name for name, p in run.module.named_parameters() if p.requires_grad]
    assert {name.partition(".")[0] for name in trained} == {"new_head", "lora"}
    fxplug.save_checkpoint(run.module, tmp_path / "model.safetensors", to="timm")
    kept = load_file(tmp_path / "model.safetensors")
    assert kept["head.weight"].shape == (3, 96) and not [key for key in kept if "lora" in key or "new_head" in key]
    plain = timm.create_model(
        "vit_tiny_patch16_224", **{**options, "num_classes": 3}, checkpoint_path=str(tmp_path / "model.safetensors")
    ).eval()
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(plain(x), run.module.eval()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")  # peft's advice on its own options
def test_peft_reads_it_with_lora_and_an_adapter_of_pefts_gives_it_back(new, tmp_path):
    import peft

    _, x, _ = small.plain_vit()
    both = fxplug.apply(new, fxplug.load_pass("lora", at=["qkv", "fc1"], rank=2))
    with torch.no_grad():
        for name, parameter in both.named_parameters():
            if name.startswith("lora.") and name.endswith("up.weight"):
                parameter.normal_(std=0.1)
    fxplug.save_adapter(both, tmp_path / "peft", as_="peft")
    options = {"img_size": 32, "depth": 2, "embed_dim": 96, "num_classes": 37}
    plain = timm.create_model("vit_tiny_patch16_224", **options)
    plain.load_state_dict({k: v for k, v in small.plain_vit().model.state_dict().items() if "head" not in k}, strict=False)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "peft").eval()
    torch.testing.assert_close(loaded(*x), both(*x), rtol=1e-4, atol=1e-5)
    loaded.save_pretrained(tmp_path / "again")
    for folder in ("peft", "again"):
        again = fxplug.apply(small.plain_vit().gm, head(weights=str(tmp_path / folder)))
        assert torch.equal(again(*x), new(*x))
        assert fxplug.apply(small.plain_vit().gm, head(weights=str(tmp_path / folder), classes=37))(*x).shape == (2, 37)
    with pytest.raises(fxplug.ArtifactError, match="'head.weight' is a whole parameter of a new layer, which kohya cannot"):
        fxplug.save_adapter(both, tmp_path / "kohya", as_="kohya")


@pytest.mark.parametrize(
    "tensors, given, says",
    [
        ({"head.weight": torch.zeros(5, 96), "head.bias": torch.zeros(5)}, {"classes": 6}, "is [5, 96] in '"),
        ({"head.weight": torch.zeros(5, 95), "head.bias": torch.zeros(5)}, {}, "is [5, 95] in '"),
        ({"head.weight": torch.zeros(5, 96)}, {}, "has no 'head.bias' (did you mean 'head.weight'?)"),
        ({"heat.weight": torch.zeros(5, 96)}, {}, "has no 'head.weight' (did you mean 'heat.weight'?)"),
        ({"head.weight": torch.zeros(0, 96), "head.bias": torch.zeros(0)}, {}, "is [0, 96] in '"),
        ({"head.weight": torch.zeros(5, 96, dtype=torch.int64)}, {}, "has no 'head.weight'"),
        ({"head.weight": torch.tensor(1.0)}, {}, "is [] in '"),
    ],
)
def test_a_file_without_that_layer_says_so(tensors, given, says, tmp_path):
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(fxplug.SpecError, match=re.escape(says)):
        fxplug.apply(small.plain_vit().gm, head(weights=str(tmp_path / "a.safetensors"), **given))


def test_a_file_that_cannot_be_read_says_so(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"no weights")
    for name in ("a.safetensors", "b.safetensors", ""):
        with pytest.raises(fxplug.FxplugError, match="safetensors"):
            fxplug.apply(small.plain_vit().gm, head(weights=str(tmp_path / name)))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """What PEFT saves of a model with other classes and LoRA, and what that model gives."""
    from peft import LoraConfig, get_peft_model

    base = small.plain_vit()
    model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32, num_classes=9, embed_dim=96)
    with torch.no_grad():
        known = base.model.state_dict()
        for key, value in model.state_dict().items():
            if key in known and known[key].shape == value.shape:
                value.copy_(known[key])
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["qkv"], modules_to_save=["head"])).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    folder = tmp_path_factory.mktemp("tuned")
    model.save_pretrained(folder)
    return folder, model(*base.args).detach()


@pytest.mark.parametrize("slots", [0, 1])
def test_an_adapter_with_a_new_head_comes_with_it(tuned, slots):
    folder, wanted = tuned
    base = small.plain_vit()
    with_head = fxplug.apply(base.gm, head(weights=folder))
    new = fxplug.apply(with_head, fxplug.pass_for(folder, with_head, slots=slots))
    if slots:
        new.adapters.load("it", folder)
        new.adapters.use("it")
    else:
        fxplug.load_adapter(new, folder)
    torch.testing.assert_close(new(*base.args), wanted, rtol=0, atol=1e-5)
    again = fxplug.apply(base.gm, head(weights=folder), fxplug.load_pass("adapter", file=str(folder), slots=slots))
    assert torch.equal(again(*base.args), new(*base.args))


def test_a_new_head_is_filled_or_refused(tuned):
    folder, wanted = tuned
    base = small.plain_vit()
    with pytest.raises(fxplug.ArtifactError, match=r"it is a new layer: apply the pass head with \{weights: the file\}"):
        fxplug.pass_for(folder, base.gm)
    lora = fxplug.load_pass("lora", at="qkv", rank=2)
    new = fxplug.apply(base.gm, head(classes=9), lora)
    fxplug.load_adapter(new, folder)
    torch.testing.assert_close(new(*base.args), wanted, rtol=0, atol=1e-5)
    other = fxplug.apply(base.gm, head(classes=8), lora)
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(fxplug.ArtifactError, match=r"'head' has the weight \[9, 96\], and the new layer here is \[8, 96\]"):
        fxplug.load_adapter(other, folder)
    assert all(torch.equal(before[key], value) for key, value in other.state_dict().items())
    slotted = fxplug.apply(base.gm, head(classes=9), fxplug.load_pass("lora", at="qkv", rank=2, slots=1))
    with pytest.raises(fxplug.SpecError, match="has a new last layer, which slots cannot hold"):
        slotted.adapters.load("it", folder)
    assert not slotted.adapters.names
