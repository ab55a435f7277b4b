"""A home for every update: what PEFT's and LyCORIS' methods make of a model is what the slots and blocks here make of it."""

from __future__ import annotations

import copy

import peft
import pytest
import small
import torch
from lycoris import LycorisNetwork, create_lycoris
from safetensors.torch import save_file

import fxplug
from fxplug.adapters import files

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


@pytest.mark.parametrize("kind", PEFT)
@pytest.mark.filterwarnings("ignore")
def test_what_peft_wrote_does_the_same_here(kind, tmp_path):
    make, names = PEFT[kind]
    gm, (x,), _ = small.plain_vit()
    model = tuned(make)
    with torch.no_grad():
        wanted = model(x)
    model.save_pretrained(tmp_path)
    assert (wanted - gm(x)).abs().max() > 1e-3, "the adapter does something"
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


@pytest.mark.parametrize("kind", PEFT)
@pytest.mark.filterwarnings("ignore")
def test_what_peft_wrote_goes_into_slots(kind, tmp_path):
    gm, (x,), _ = small.plain_vit()
    model = tuned(PEFT[kind][0])
    with torch.no_grad():
        wanted = model(x)
    model.save_pretrained(tmp_path)
    new = both()
    new.adapters.load("it", tmp_path)
    new.adapters.use("it")
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


@pytest.mark.parametrize("kind", LYCORIS)
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
    slots.adapters.load("it", tmp_path / "it.safetensors")
    slots.adapters.use("it")
    torch.testing.assert_close(slots(x), wanted, **NEAR)
