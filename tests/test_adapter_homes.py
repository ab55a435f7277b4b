"""A home for every update: what PEFT's and LyCORIS' methods make of a model is what the slots and blocks here make of it."""

from __future__ import annotations

import copy
from collections import OrderedDict

import peft
import pytest
import small
import torch
from lycoris import LycorisNetwork, create_lycoris, create_lycoris_from_weights
from safetensors.torch import load_file, save_file
from sweeps import sweep
from torch import nn

import fxplug
from fxplug.adapters import files, peft_config
from fxplug.core.errors import ArtifactError, SpecError

NEAR = {"rtol": 1e-5, "atol": 1e-5}
AT = ["attn.qkv", "mlp.fc2"]
EVERY = r"re:blocks\.\d+\.(attn\.qkv|mlp\.fc2)$"

# PEFT's methods: its configuration, and the passes without slots that hold it
PEFT = {
    "lora": (lambda: peft.LoraConfig(r=4, lora_alpha=6), "lora"),
    "lora with a bias": (lambda: peft.LoraConfig(r=4, lora_alpha=6, lora_bias=True), "lora"),
    "dora": (lambda: peft.LoraConfig(r=4, lora_alpha=6, use_dora=True), "dora"),
    "adalora": (lambda: peft.AdaLoraConfig(init_r=4, lora_alpha=6, total_step=10), "lora"),
    "vera": (lambda: peft.VeraConfig(r=4), "lora"),
    "vera of a key": (lambda: peft.VeraConfig(r=4, save_projection=False, projection_prng_key=7), "lora"),
    "vblora": (lambda: peft.VBLoRAConfig(r=2, num_vectors=16, vector_length=16, topk=3), "lora"),
    "vblora of weights": (
        lambda: peft.VBLoRAConfig(r=2, num_vectors=16, vector_length=16, topk=3, save_only_topk_weights=True), "lora"
    ),
    "miss": (lambda: peft.MissConfig(r=5), "lora"),
    "miss mini": (lambda: peft.MissConfig(r=4, mini_r=8, init_weights="mini"), "lora"),
    "bat": (lambda: peft.MissConfig(r=8, init_weights="bat"), "delta"),
    "oft": (lambda: peft.OFTConfig(oft_block_size=8), "oft"),
    "oft exact and shared": (lambda: peft.OFTConfig(oft_block_size=8, block_share=True, use_cayley_neumann=False), "oft"),
    "oft bounded": (lambda: peft.OFTConfig(oft_block_size=8, coft=True, eps=1.0), "oft"),
    "boft": (lambda: peft.BOFTConfig(boft_block_size=8, boft_n_butterfly_factor=3), "boft"),
    "ia3": (lambda: peft.IA3Config(feedforward_modules=["mlp.fc2"]), "ia3"),
    "hra": (lambda: peft.HRAConfig(r=4), "delta"),
    "hra orthogonal": (lambda: peft.HRAConfig(r=4, apply_GS=True), "delta"),
    "c3a": (lambda: peft.C3AConfig(block_size=16), "delta"),
    "fourierft": (lambda: peft.FourierFTConfig(n_frequency=50, random_loc_seed=3), "delta"),
    "shira": (lambda: peft.ShiraConfig(r=2), "delta"),
    "randlora": (lambda: peft.RandLoraConfig(r=8), "delta"),
    "hira": (lambda: peft.HiraConfig(r=4), "delta"),
    "road 1": (lambda: peft.RoadConfig(group_size=16), "delta"),
    "road 2": (lambda: peft.RoadConfig(group_size=16, variant="road_2"), "delta"),
    "road 4": (lambda: peft.RoadConfig(group_size=16, variant="road_4"), "delta"),
    "delora": (lambda: peft.DeloraConfig(r=4), "delta"),
    "gralora": (lambda: peft.GraloraConfig(r=8, gralora_k=2), "delta"),
    "gralora hybrid": (lambda: peft.GraloraConfig(r=8, gralora_k=2, hybrid_r=2), "delta"),
    "beft": (lambda: peft.BeftConfig(), "delta"),
    "norms": (lambda: peft.LNTuningConfig(target_modules=["norm1"]), "delta"),
    "whole modules": (lambda: peft.LoraConfig(r=4, modules_to_save=["norm", "norm2"]), "lora delta"),
    "biases": (lambda: peft.LoraConfig(r=4, bias="all"), "lora delta"),
    "biases and whole modules": (lambda: peft.LoraConfig(r=4, bias="all", modules_to_save=["norm", "blocks.1.norm2"]),
                                 "lora delta"),
    "biases of the layers": (lambda: peft.LoraConfig(r=4, bias="lora_only"), "lora delta"),
}  # fmt: skip
PASSES = {
    "lora": {"at": EVERY, "rank": 8}, "dora": {"at": EVERY, "rank": 4}, "boft": {"at": EVERY, "block_size": 8},
    "delta": {"at": r"re:.*"}, "ia3": {"at": "blocks.*.attn.qkv", "feedforward": "blocks.*.mlp.fc2"},
}  # fmt: skip


def shaken(model, *but):
    """The parameters that an adapter has, as a training leaves them."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not any(word in name for word in but):
                parameter.add_(torch.randn_like(parameter) * 0.05)


def tuned(make):
    """PEFT's model of a ViT, and what its configuration says."""
    config = make()
    config.target_modules = config.target_modules or set(AT)
    model = peft.get_peft_model(copy.deepcopy(small.plain_vit().model), config)
    shaken(model)
    return model.eval()


@sweep("kind", PEFT, "lora", "dora", "adalora", "vera", "vera of a key", "biases and whole modules")
@pytest.mark.filterwarnings("ignore")
def test_what_peft_wrote_does_the_same_here_in_blocks_and_in_slots(kind, tmp_path):
    make, names = PEFT[kind]
    gm, (x,), _ = small.plain_vit()
    model = tuned(make)
    with torch.no_grad():
        wanted = model(x)
    model.save_pretrained(tmp_path)
    assert (wanted - gm(x)).abs().max() > 1e-3, "the adapter does something"
    assert fxplug.inspect_adapter(tmp_path, gm).plan is not None
    options = dict(PASSES)
    entry = files.read(tmp_path).entries[0]
    if names == "boft":
        options["boft"] = {**options["boft"], "levels": len(entry.tensors["rotation"])}
    if names == "oft":
        options["oft"] = {"at": EVERY, "block_size": 8, "share": entry.options["share"], "terms": entry.options["terms"]}
    if "bias" in kind and names == "lora":
        options["lora"] = {**options["lora"], "bias": True}
    new = fxplug.apply(gm, *(fxplug.load_pass(name, **options[name]) for name in names.split()))
    fit = fxplug.load_adapter(new, tmp_path)
    assert not fit.missing and not fit.homeless and not fit.outside
    torch.testing.assert_close(new(x), wanted, **NEAR)
    new = both()
    small.load_and_use(new, tmp_path)
    torch.testing.assert_close(new(x), wanted, **NEAR)
    new.adapters.use({"it": 0.5})
    assert not torch.allclose(new(x), wanted) and not torch.allclose(new(x), gm(x))
    new.adapters.use(None)
    assert torch.equal(new(x), gm(x))


def both(slots=2):
    """A module with slots for all that there is."""
    lora = fxplug.load_pass("lora", at=EVERY, rank=8, slots=slots)
    return fxplug.apply(small.plain_vit().gm, lora, fxplug.load_pass("delta", at="re:.*", slots=slots))


LYCORIS = {
    "full": {"algo": "full"},
    "diag-oft": {"algo": "diag-oft"},
    "diag-oft, bounded and rescaled": {"algo": "diag-oft", "constraint": 0.001, "rescaled": True},
    "boft": {"algo": "boft", "linear_dim": 20},
    "boft, bounded and rescaled": {"algo": "boft", "linear_dim": 20, "constraint": 0.001, "rescaled": True},
    "glora": {"algo": "glora"},
    "ia3": {"algo": "ia3"},
    "ia3 on inputs": {"algo": "ia3", "train_on_input": True},
    "dora": {"algo": "locon", "dora_wd": True},
    "dora by input": {"algo": "locon", "dora_wd": True, "wd_on_output": False},
    "doha": {"algo": "loha", "dora_wd": True},
    "dokr by input": {"algo": "lokr", "dora_wd": True, "wd_on_output": False},
    "norms": {"algo": "locon", "train_norm": True},
}


def lycoris_file(model, path, linear_dim=4, **options):
    LycorisNetwork.apply_preset({"enable_conv": True, "target_module": ["Attention", "Mlp", "Block", "ResnetBlock2D"]})
    network = create_lycoris(model, 1.0, linear_dim=linear_dim, linear_alpha=2, **options)
    network.apply_to()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.01 if "oft" in name else 0.05))
    state = {key: value.detach().clone().contiguous() for key, value in network.state_dict().items()}
    save_file(state, path)
    return network, state


@sweep("kind", LYCORIS, "full", "diag-oft", "glora")
@pytest.mark.filterwarnings("ignore")
def test_what_lycoris_wrote_does_the_same_here(kind, tmp_path, capsys):
    _, (x,), _ = small.plain_vit()
    model = copy.deepcopy(small.plain_vit().model)
    lycoris_file(model, tmp_path / "it.safetensors", **LYCORIS[kind])
    with torch.no_grad():
        wanted = model(x)
    whole = fxplug.load_pass("delta", at="re:.*")
    new = fxplug.apply(small.plain_vit().gm, whole)
    fxplug.load_adapter(new, tmp_path / "it.safetensors")
    torch.testing.assert_close(new(x), wanted, **NEAR)
    slots = fxplug.apply(small.plain_vit().gm, fxplug.load_pass("delta", at="re:.*", slots=1))
    small.load_and_use(slots, tmp_path / "it.safetensors")
    torch.testing.assert_close(slots(x), wanted, **NEAR)


class Block(nn.Module):
    """A convolution of a channel each, and one across channels."""

    def __init__(self):
        super().__init__()
        self.deep, self.wide = nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 8, 1)

    def forward(self, x):
        return self.wide(self.deep(x))


@pytest.mark.parametrize("algo", ["lora", "loha", "lokr"])
def test_magnitudes_of_inputs_have_a_place_in_the_pass_for_them(algo, tmp_path, capsys):
    torch.manual_seed(0)
    model, x = nn.Sequential(Block()), torch.randn(1, 4, 6, 6)
    gm = fxplug.trace(copy.deepcopy(model), (x,))
    lycoris_file(model, tmp_path / "it.safetensors", algo=algo, dora_wd=True, wd_on_output=False)
    new = fxplug.apply(gm, fxplug.pass_for(tmp_path / "it.safetensors", gm))
    small.load_and_use(new, tmp_path / "it.safetensors")
    torch.testing.assert_close(new(x), model(x), **NEAR)


# --- DoRA


def doras(tmp_path, **options):
    """Two DoRA's of PEFT in folders, with what each makes of a ViT."""
    gm, (x,), _ = small.plain_vit()
    made = {}
    for n, name in enumerate(["ink", "film"]):
        config = peft.LoraConfig(r=2 + n, lora_alpha=6, use_dora=True, target_modules=set(AT))
        model = peft.get_peft_model(copy.deepcopy(small.plain_vit().model), config)
        shaken(model)
        if n:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 if not parameter.requires_grad else 1.1)
        model.eval().save_pretrained(tmp_path / name)
        with torch.no_grad():
            made[name] = model(x)
    return made


@pytest.mark.filterwarnings("ignore")
def test_doras_in_slots_are_each_pefts_come_back_and_add_up(tmp_path):
    gm, (x,), _ = small.plain_vit()
    wanted = doras(tmp_path)
    new = fxplug.apply(gm, fxplug.load_pass("dora", at=EVERY, rank=4, slots=3))
    assert torch.equal(new(x), gm(x))
    for name in wanted:
        new.adapters.load(name, tmp_path / name)
    for name in wanted:
        new.adapters.use(name)
        torch.testing.assert_close(new(x), wanted[name], **NEAR)
        new.adapters.save(name, tmp_path / f"{name} again", as_="peft")
        again = peft.PeftModel.from_pretrained(copy.deepcopy(small.plain_vit().model), tmp_path / f"{name} again").eval()
        torch.testing.assert_close(again(x), wanted[name], **NEAR)
    one, other = (fxplug.merge(new, adapters={name: 1.0}) for name in wanted)
    both = fxplug.merge(new, adapters={"ink": 0.6, "film": 0.3})
    for path in ("blocks.0.attn.qkv", "blocks.1.mlp.fc2"):
        base, a, b, c = (module.get_submodule(path).weight for module in (gm, one, other, both))
        torch.testing.assert_close(c, base + 0.6 * (a - base) + 0.3 * (b - base), **NEAR)
    new.adapters.use({"film": 0.3, "ink": 0.6})
    torch.testing.assert_close(new(x), both(x), **NEAR)
    live = fxplug.lower(new, merge="live")
    torch.testing.assert_close(live(x), both(x), **NEAR)
    fxplug.save(new, tmp_path / "saved")
    assert torch.equal(fxplug.load(tmp_path / "saved")(x), new(x))
    new.adapters.use(None)
    assert torch.equal(new(x), gm(x))


def test_a_dora_by_input_goes_where_magnitudes_are_the_inputs(tmp_path):
    gm, (x,), _ = small.plain_vit()
    model = copy.deepcopy(small.plain_vit().model)
    lycoris_file(model, tmp_path / "it.safetensors", algo="locon", dora_wd=True, wd_on_output=False)
    with torch.no_grad():
        wanted = model(x)
    at = r"re:blocks\.\d+\.(attn|mlp)\..*(qkv|proj|fc1|fc2)$"
    new = fxplug.apply(gm, fxplug.load_pass("dora", at=at, rank=4, slots=1, by="input"))
    small.load_and_use(new, tmp_path / "it.safetensors")
    torch.testing.assert_close(new(x), wanted, **NEAR)
    new.adapters.save("it", tmp_path / "back.safetensors", as_="comfy")
    again = fxplug.apply(gm, fxplug.load_pass("dora", at=at, rank=4, by="input"))
    fxplug.load_adapter(again, tmp_path / "back.safetensors")
    torch.testing.assert_close(again(x), wanted, **NEAR)
    outputs = fxplug.apply(gm, fxplug.load_pass("dora", at=at, rank=4, slots=1))
    with pytest.raises(SpecError, match="is dora by input, .*slots here are for dora: apply the pass dora with by=input"):
        outputs.adapters.load("it", tmp_path / "it.safetensors")
    with pytest.raises(ArtifactError, match="has dora by input, which kohya cannot represent"):
        new.adapters.save("it", tmp_path / "no.safetensors", as_="kohya")


# --- the way back


@pytest.mark.parametrize("kind", ["full", "norms"])
@pytest.mark.filterwarnings("ignore")
def test_whole_changes_come_back_and_lycoris_reads_them(kind, tmp_path, capsys):
    gm, (x,), _ = small.plain_vit()
    model = copy.deepcopy(small.plain_vit().model)
    _, state = lycoris_file(model, tmp_path / "it.safetensors", **LYCORIS[kind])
    with torch.no_grad():
        wanted = model(x)
    new = fxplug.apply(
        gm, fxplug.load_pass("lora", at="blocks.**", rank=4, slots=1), fxplug.load_pass("delta", at="re:.*", slots=1)
    )
    new.adapters.load("it", tmp_path / "it.safetensors")
    saved = new.adapters.save("it", tmp_path / "back.safetensors", as_="lycoris")
    back = load_file(saved.path)
    assert back.keys() == state.keys()
    same = [key for key in state if ".lora_up" not in key and ".alpha" not in key]
    assert all(torch.equal(back[key], state[key].to(back[key])) for key in same)
    plain = copy.deepcopy(small.plain_vit().model)
    network, _ = create_lycoris_from_weights(1.0, str(saved.path), plain)
    network.apply_to()
    with torch.no_grad():
        torch.testing.assert_close(plain(x), wanted, **NEAR)
    for as_ in ("comfy", "fxplug"):
        saved = new.adapters.save("it", tmp_path / f"{as_}.safetensors", as_=as_)
        small.load_and_use(new, saved.path, replace=True)
        torch.testing.assert_close(new(x), wanted, **NEAR)
    if kind == "full":
        with pytest.raises(ArtifactError, match="can be written as peft: .* is a whole layer, and PEFT"):
            new.adapters.save("it", tmp_path / "peft", as_="peft")
        return
    new.adapters.save("it", tmp_path / "peft", as_="peft")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(small.plain_vit().model), tmp_path / "peft").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(x), wanted, **NEAR)


@pytest.mark.filterwarnings("ignore")
def test_biases_go_back_to_peft_and_are_not_given_to_who_leaves_them_out(tmp_path):
    gm, (x,), _ = small.plain_vit()
    model = tuned(PEFT["lora with a bias"][0])
    model.save_pretrained(tmp_path / "it")
    new = both()
    new.adapters.load("it", tmp_path / "it")
    new.adapters.save("it", tmp_path / "back", as_="peft")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(small.plain_vit().model), tmp_path / "back").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(x), model(x), **NEAR)
    with pytest.raises(ArtifactError, match="a change of a bias without a whole change of the weight, which tools ignore in "
                                            "lycoris"):
        new.adapters.save("it", tmp_path / "no.safetensors", as_="lycoris")
    saved = new.adapters.save("it", tmp_path / "comfy.safetensors", as_="comfy")
    assert {key.rpartition(".")[2] for key in load_file(saved.path)} == {"weight", "alpha", "diff_b"}
    small.load_and_use(new, saved.path, "again")
    with torch.no_grad():
        torch.testing.assert_close(new(x), model(x), **NEAR)


@pytest.mark.parametrize(("slots", "options"), [(0, {}), (1, {}), (1, {"use_dora": True, "bias": "lora_only"})])
@pytest.mark.filterwarnings("ignore")
def test_layers_that_pefts_file_has_whole_go_back_to_peft(slots, options, tmp_path):
    gm, (x,), _ = small.plain_vit()
    model = tuned(lambda: peft.LoraConfig(r=4, modules_to_save=["head", "norm", "blocks.1.norm2"], **options))
    model.save_pretrained(tmp_path / "it")
    new = fxplug.apply(gm, fxplug.pass_for(tmp_path / "it", gm, slots=slots))
    if slots:
        small.load_and_use(new, tmp_path / "it")
        new.adapters.save("it", tmp_path / "back", as_="peft")
    else:
        fxplug.load_adapter(new, tmp_path / "it")
        fxplug.save_adapter(new, tmp_path / "back", as_="peft")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("back", "it"))
    assert ours.keys() == theirs.keys()
    again = peft.PeftModel.from_pretrained(copy.deepcopy(small.plain_vit().model), tmp_path / "back").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(x), model(x), **NEAR)
        torch.testing.assert_close(new(x), model(x), **NEAR)
    back = fxplug.apply(gm, fxplug.pass_for(tmp_path / "back", gm, slots=0))
    fxplug.load_adapter(back, tmp_path / "back")
    torch.testing.assert_close(back(x), model(x), **NEAR)


@pytest.mark.filterwarnings("ignore")
def test_a_whole_change_that_peft_would_take_for_others_is_refused(tmp_path):
    """PEFT takes every module whose name ends so, and puts it in the place of what is adapted."""
    gm, _, _ = small.plain_vit()
    at = "blocks.0.attn.qkv"
    new = fxplug.apply(gm, fxplug.load_pass("loha", at=at, rank=2), fxplug.load_pass("delta", at=at, param="bias"))
    with torch.no_grad():
        for parameter in [*new.delta.parameters(), *new.loha.parameters()]:
            parameter.add_(0.1)
    with pytest.raises(ArtifactError, match="has a whole change, which PEFT would also apply to a layer with another update"):
        fxplug.save_adapter(new, tmp_path / "it", as_="peft")


def test_what_blocks_learned_is_saved_with_its_biases(tmp_path):
    gm, (x,), _ = small.plain_vit()
    new = fxplug.apply(gm, fxplug.load_pass("bitfit", at="blocks.**"), fxplug.load_pass("delta", at="norm"))
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if name.startswith(("bitfit", "delta")):
                parameter.add_(torch.randn_like(parameter) * 0.05)
    saved = fxplug.save_adapter(new, tmp_path / "it.safetensors", as_="comfy")
    assert not saved.left_out
    fxplug.save(new, tmp_path / "folder")
    assert torch.equal(fxplug.load(tmp_path / "folder")(x), new(x))
    with pytest.raises(ArtifactError, match="without the names of their parameters: save them with adapters.save"):
        files.read(tmp_path / "folder" / "delta.safetensors")
    again = fxplug.apply(gm, fxplug.load_pass("delta", at="re:.*", slots=1))
    small.load_and_use(again, saved.path)
    torch.testing.assert_close(again(x), new(x), **NEAR)


# --- convolutions


CONVOLUTIONS = {
    "full": {}, "diag-oft": {"constraint": 0.001, "rescaled": True}, "glora": {}, "ia3": {"train_on_input": True},
    "locon": {"dora_wd": True, "wd_on_output": False, "train_norm": True}, "loha": {"dora_wd": True},
}  # fmt: skip


QUICK = ("diag-oft", "locon")


@pytest.mark.slow
@pytest.mark.parametrize("algo", [a if a in QUICK else pytest.param(a, marks=pytest.mark.slow) for a in CONVOLUTIONS])
@pytest.mark.filterwarnings("ignore")
def test_what_lycoris_made_of_a_unet(algo, tmp_path, capsys):
    gm, args, kwargs = small.unet()
    model = copy.deepcopy(small.unet().model)
    options = {"conv_dim": 4, "conv_alpha": 2, **CONVOLUTIONS[algo]}
    lycoris_file(model, tmp_path / "it.safetensors", algo=algo, **options)
    with torch.no_grad():
        wanted = model(*args, **kwargs).sample
        new = fxplug.apply(gm, fxplug.load_pass("delta", at="re:.+", slots=1))
        fit = new.adapters.load("it", tmp_path / "it.safetensors")
        assert any(len(fit.layers[path]) == 4 for path in fit.placed if path in fit.layers)
        new.adapters.use("it")
        torch.testing.assert_close(new(*args, **kwargs).sample, wanted, **NEAR)


@sweep(
    "config",
    [
        peft.IA3Config(feedforward_modules=["conv2"]), peft.OFTConfig(oft_block_size=8), peft.BOFTConfig(boft_block_size=8),
        peft.LoraConfig(r=2, use_dora=True), peft.HiraConfig(r=2),
    ], 3, 4,
    ids=lambda config: config.peft_type.value,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_what_peft_made_of_convolutions(config, tmp_path):
    gm, args, kwargs = small.unet()
    config.target_modules = {"conv1", "conv2"}
    model = peft.get_peft_model(copy.deepcopy(small.unet().model), config).eval()
    shaken(model)
    model.save_pretrained(tmp_path)
    merged = model.merge_and_unload()  # PEFT's own OFT of a convolution leaves out its padding, but where it is merged
    with torch.no_grad():
        wanted = merged(*args, **kwargs).sample
        new = fxplug.apply(gm, fxplug.load_pass("delta", at=r"re:.*\.conv[12]$", slots=1))
        small.load_and_use(new, tmp_path)
        torch.testing.assert_close(new(*args, **kwargs).sample, wanted, **NEAR)


def test_a_lokr_of_a_conv1d_is_another_one_in_peft(tmp_path):
    """PEFT multiplies its factors as if the kernel's were another dimension; LyCORIS as of any other convolution."""
    base = nn.Sequential(nn.Conv1d(16, 8, 3))
    peft.get_peft_model(copy.deepcopy(base), peft.LoKrConfig(target_modules=["0"], r=2)).save_pretrained(tmp_path / "it")
    with pytest.raises(ArtifactError, match="'base_model.model.0' is a LoKr of a Conv1d, whose factors PEFT combines in"):
        files.read(tmp_path / "it")
    x = torch.randn(1, 16, 9)
    new = fxplug.apply(fxplug.trace(base, (x,)), fxplug.load_pass("lokr", at="0", rank=2))
    shaken(new)
    with pytest.raises(ArtifactError, match="'0' is a LoKr of a Conv1d, whose factors PEFT combines in"):
        fxplug.save_adapter(new, tmp_path / "peft")
    fxplug.save_adapter(new, tmp_path / "a.safetensors", as_="lycoris")
    create_lycoris_from_weights(1.0, str(tmp_path / "a.safetensors"), base)[0].apply_to()
    torch.testing.assert_close(new(x), base(x), **NEAR)


def test_hira_of_an_embedding(tmp_path):
    model = peft.get_peft_model(nn.Sequential(nn.Embedding(7, 4)), peft.HiraConfig(target_modules=["0"], r=2))
    shaken(model)
    model.save_pretrained(tmp_path)
    gm = fxplug.trace(nn.Sequential(model.base_model.model[0].base_layer), (torch.arange(7),))
    new = fxplug.apply(gm, fxplug.pass_for(tmp_path, gm, slots=0))
    fxplug.load_adapter(new, tmp_path)
    torch.testing.assert_close(new(torch.arange(7)), model(torch.arange(7)), **NEAR)


# --- what a configuration leaves out


def test_what_a_configuration_leaves_out_is_what_peft_takes():
    for kind, defaults in peft_config.METHODS.items():
        values = {key: value for key, value in defaults.items() if value is not None}
        make = peft.PEFT_TYPE_TO_CONFIG_MAPPING[kind] if values else dict
        config = make(**({"total_step": 1} if kind == "ADALORA" else {}))
        assert {key: getattr(config, key) for key in values} == values, kind


@pytest.mark.parametrize("version", [None, "0.16.0", "0.17.2.dev0@abc"])
def test_a_series_that_peft_wrote_otherwise_is_refused(version):
    config = {"peft_type": "OFT", "use_cayley_neumann": True, "peft_version": version}
    with pytest.raises(ArtifactError, match="use_cayley_neumann of PEFT before 0.18, which computed another series"):
        files.read({"base_model.model.a.oft_R.weight": torch.randn(2, 28)}, config=config)


def rotation(vectors, size):
    """What OneTrainer makes of an oft_R: five terms of a series, the last one once."""
    q = torch.zeros(len(vectors), size, size)
    q[:, *torch.triu_indices(size, size, 1)] = vectors
    q = q - q.mT
    return torch.eye(size) + 2 * q + 2 * q @ q + 2 * q @ q @ q + q @ q @ q @ q


@pytest.mark.parametrize("scaled", [None, torch.tensor(True), torch.tensor(1.0, dtype=torch.bfloat16)], ids=str)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("form", ["lora_unet_{}.oft_R", "unet.{}.oft_R"])
def test_onetrainers_rotations_turn_inputs_and_kernels(form, shared, scaled, tmp_path):
    """As its modules/module/LoRAModule.py: what a linear layer reads, and the kernel of a convolution the other way round."""
    base = nn.Sequential(OrderedDict(conv=nn.Conv2d(4, 8, 3), out=nn.Flatten(), lin=nn.Linear(8, 16)))
    x, state, wanted = torch.randn(2, 4, 3, 3), {}, copy.deepcopy(base)
    with torch.no_grad():
        for name, blocks, size in (("conv", 9, 4), ("lin", 2, 4)):
            vectors = 0.2 * torch.randn(1 if shared else blocks, size * (size - 1) // 2)
            state[f"{form.format(name)}.weight"] = vectors
            state |= {} if scaled is None else {f"{form.format(name)}.scaled_oft": scaled.clone()}
            turns = rotation(vectors / (1 if scaled is None else 2 * (size - 1) ** 0.5), size).expand(blocks, -1, -1)
            weight = wanted.get_submodule(name).weight
            parts = weight.flatten(1).unflatten(1, (blocks, size))
            weight.copy_(torch.einsum("ork,rkc->orc" if name == "conv" else "orc,rkc->ork", parts, turns).reshape(weight.shape))
    save_file(state, tmp_path / "it.safetensors", {"ot_branch": "master"})
    gm = fxplug.trace(base, (x,))
    new = fxplug.apply(gm, fxplug.load_pass("delta", at=["conv", "lin"], param="weight", slots=1))
    small.load_and_use(new, tmp_path / "it.safetensors")
    torch.testing.assert_close(new(x), wanted(x), **NEAR)
    assert fxplug.inspect_adapter(tmp_path / "it.safetensors").tool == "OneTrainer"


# --- other tools' keys, and what does not fit


def test_comfys_words_for_whole_weights(tmp_path):
    gm, (x,), _ = small.plain_vit()
    base = gm.get_submodule("blocks.0.attn.qkv")
    state = {
        "blocks.0.attn.qkv.set_weight": base.weight.detach() * 2, "blocks.0.attn.qkv.diff_b": torch.ones(288),
        "blocks.1.attn.qkv.lora_up.weight": torch.randn(288, 2), "blocks.1.attn.qkv.lora_down.weight": torch.randn(2, 96),
        "blocks.1.attn.qkv.reshape_weight": torch.tensor([288, 96]),
    }  # fmt: skip
    new = both()
    new.adapters.load("it", state)
    merged = fxplug.merge(new, adapters={"it": 1.0})
    torch.testing.assert_close(merged.get_submodule("blocks.0.attn.qkv").weight, base.weight * 2, **NEAR)
    torch.testing.assert_close(merged.get_submodule("blocks.0.attn.qkv").bias, base.bias + 1, **NEAR)
    update = state["blocks.1.attn.qkv.lora_up.weight"] @ state["blocks.1.attn.qkv.lora_down.weight"]
    changed = merged.get_submodule("blocks.1.attn.qkv").weight - gm.get_submodule("blocks.1.attn.qkv").weight
    torch.testing.assert_close(changed, update, rtol=1e-4, atol=1e-5)
    state["blocks.1.attn.qkv.reshape_weight"] = torch.tensor([288, 128])
    with pytest.raises(ArtifactError, match=r"does not fit a weight of shape \[288, 128\], which its reshape_weight gives"):
        files.read(state)


def test_trained_tokens_are_rows_of_the_table():
    gm, (words,), _ = small.layers()
    rows = torch.randn(2, 12)
    state = {"base_model.model.table.token_adapter.trainable_tokens_delta": rows}
    config = {"peft_type": "LORA", "r": 2, "trainable_token_indices": {"table": [3, 7]}}
    new = fxplug.apply(gm, fxplug.load_pass("delta", at="table", slots=1))
    new.adapters.load("it", state, config=config)
    table = fxplug.merge(new, adapters={"it": 1.0}).table.weight
    torch.testing.assert_close(table[[3, 7]], rows, **NEAR)
    assert torch.equal(table[[0, 1, 2, 4, 5, 6, 8, 9, 10]], gm.table.weight[[0, 1, 2, 4, 5, 6, 8, 9, 10]])
    for wrong in ([3], [3, 3], [3, -1], ["3", "7"], None):
        with pytest.raises(ArtifactError, match="has 2 trained tokens, and its configuration has no"):
            files.read(state, config={**config, "trainable_token_indices": wrong})
    with pytest.raises(ArtifactError, match="1 layers have other shapes"):
        new.adapters.load("far", state, config={**config, "trainable_token_indices": [3, 11]})


def test_what_has_no_home_names_the_pass_that_has():
    gm = small.plain_vit().gm
    new = fxplug.apply(gm, fxplug.load_pass("lora", at=EVERY, rank=4, slots=1))
    with pytest.raises(SpecError, match="is a change of 'blocks.0.attn.qkv', .*are for lora: apply the pass delta"):
        new.adapters.load("it", {"blocks.0.attn.qkv.diff": torch.ones(288, 96)})
    with pytest.raises(ArtifactError, match=r"norm1.bias' \(apply the pass delta with at: 'blocks.\*.norm1' and param: bias"):
        new.adapters.load("it", {"blocks.0.norm1.b_norm": torch.ones(96)})
    with pytest.raises(SpecError, match=r"delta \(hra\), which is more than a low-rank update"):
        new.adapters.load("it", {"blocks.0.attn.qkv.hra_u": torch.ones(96, 2)}, config={"apply_GS": False})
    assert new.adapters.names == []
    with pytest.raises(ArtifactError, match="of T-LoRA, which is not supported: how much of it acts depends on the step"):
        files.read({"lora_unet_a.lambda_layer": torch.ones(2), "lora_unet_b.lora_up.weight": torch.ones(2, 2)})
    with pytest.raises(ArtifactError, match="needs PEFT's configuration for its apply_GS"):
        files.read({"blocks.0.attn.qkv.hra_u": torch.ones(96, 2)})


def test_a_lokr_in_slots_of_plain_products_says_what_it_costs():
    gm = small.plain_vit().gm
    state = {"blocks.0.attn.qkv.lokr_w1": torch.randn(8, 8), "blocks.0.attn.qkv.lokr_w2": torch.randn(36, 12)}
    plain = fxplug.apply(gm, fxplug.load_pass("lora", at=EVERY, rank=4, slots=1))
    with pytest.raises(SpecError, match="rank_max=96, or apply the pass lokr, which stores the factors as they are"):
        plain.adapters.load("it", state)
    options = {"at": "blocks.0.attn.qkv", "slots": 1, "full_matrix": True, "factor": 8}
    lokr = fxplug.apply(gm, fxplug.load_pass("lokr", **options))
    lokr.adapters.load("it", state)
    bank = lokr.adapters.banks["lokr"][0]
    assert sum(lokr.adapters.tensor(name).numel() for name in bank.names.values()) == 496


def test_a_load_into_blocks_is_all_or_nothing(tmp_path):
    gm = small.plain_vit().gm
    new = fxplug.apply(gm, fxplug.load_pass("lora", at=EVERY, rank=4), fxplug.load_pass("delta", at="blocks.*.norm1"))
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if name.startswith(("lora", "delta")):
                parameter.add_(1)
    before = {name: value.clone() for name, value in new.state_dict().items()}
    good = {f"blocks.{n}.attn.qkv.lora_{half}.weight": torch.randn(*size) for n in (0, 1) for half, size in
            (("up", (288, 2)), ("down", (2, 96)))}  # fmt: skip
    for more, error in [
        ({"blocks.0.mlp.fc1.diff": torch.ones(384, 96)}, ArtifactError),
        ({f"blocks.1.mlp.fc2.lora_{half}.weight": torch.ones(*s) for half, s in (("B", (96, 9)), ("A", (9, 384)))}, SpecError),
        ({"blocks.1.norm1.w_norm": torch.full((96,), torch.nan)}, ArtifactError),
        ({"blocks.1.norm1.w_norm": torch.ones(95)}, ArtifactError),
        ({"blocks.1.norm1.w_norm": torch.ones(96), "blocks.1.norm1.set_weight": torch.ones(96)}, ArtifactError),
    ]:
        with pytest.raises(error):
            fxplug.load_adapter(new, {**good, **more})
        assert all(torch.equal(value, before[name]) for name, value in new.state_dict().items())
    fxplug.load_adapter(new, {**good, "blocks.1.norm1.w_norm": torch.ones(96)})
    assert torch.equal(new.get_parameter("delta.blocks.1.norm1.Delta.delta"), torch.ones(96))
    assert not new.get_parameter("delta.blocks.0.norm1.Delta.delta").any(), "what the file has nothing for is as new"
    assert not new.get_parameter("lora.blocks.0.mlp.fc2.Lora.up.weight").any()
    with pytest.raises(SpecError, match="did you mean 'lora'"):
        fxplug.load_adapter(new, good, passes=["lora_"])
    with pytest.raises(SpecError, match="no pass here has blocks that an adapter file can be loaded into"):
        fxplug.load_adapter(gm, good)


# --- damaged


class Two(torch.nn.Module):
    """Two layers of different sizes and a normalisation."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm1 = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16), torch.nn.LayerNorm(16)

    def forward(self, x):
        return self.norm1(self.b(self.a(x)))


SPOILT = {
    "left out": lambda t: None, "turned": lambda t: t.mT if t.dim() > 1 else t[None], "flat": lambda t: t.flatten(),
    "cut": lambda t: t[: len(t) // 2] if t.dim() else t, "longer": lambda t: torch.cat([t, t]) if t.dim() else t,
    "one": lambda t: t.flatten()[:1], "empty": lambda t: t[:0] if t.dim() else t, "wide": lambda t: t[..., None],
    "of NaN": lambda t: torch.full_like(t, torch.nan) if t.is_floating_point() else -t - 1,
    "of another type": lambda t: t.long() if t.is_floating_point() else t.bool(), "no tensor": lambda t: "x",
    "huge": lambda t: t + 10**6,
}  # fmt: skip


@sweep("kind", [kind for kind in PEFT if kind not in ("whole modules", "biases")], "lora", "dora", "vera")
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_file_is_refused_or_finite(kind):
    config = PEFT[kind][0]()
    config.target_modules = {"norm1"} if kind == "norms" else {"a", "b"}
    if kind == "ia3":
        config.feedforward_modules = ["b"]
    if kind.startswith("oft"):
        config.oft_block_size = 4
    with torch.random.fork_rng():
        model = peft.get_peft_model(Two(), config)
        shaken(model)
    weights = {"a": (32, 16), "b": (16, 32), "norm1": (16,)}
    state = peft.get_peft_model_state_dict(model)
    said = config.to_dict()
    beside = {f"{path}.bias": shape[:1] for path, shape in weights.items()}
    values = {name: torch.randn(shape) for name, shape in {**weights, **beside}.items()}

    def made(given, about):
        fit = files.fit(files.read(given, config=about), weights, beside=beside).check()
        return {path: entry.changed(values[path]) for path, entry in fit.placed.items()}

    good = made(state, said)
    assert good and all(value.shape == values[path].shape for path, value in good.items())
    for key, tensor in state.items():
        for spoil in SPOILT.values():
            other = spoil(tensor.detach().clone())
            given = {**state, key: other} if other is not None else {k: v for k, v in state.items() if k != key}
            try:
                found = made(given, said)
            except ArtifactError:
                continue
            assert all(value.shape == values[path].shape and value.isfinite().all() for path, value in found.items())
    for name in said.keys() - {"peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision"}:
        for wrong in ("x", -1, 0, 10**9, [], {}, float("nan"), None):
            try:
                found = made(state, {**said, name: wrong})
            except ArtifactError:
                continue
            assert all(value.shape == values[path].shape for path, value in found.items())
