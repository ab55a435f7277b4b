"""Modular pipelines of diffusers with traced and rewritten models in them; some families of models have no other pipeline."""

from __future__ import annotations

import pkgutil

import diffusers.modular_pipelines
import diffusers.pipelines
import modular
import pytest
import torch
from diffusers import AutoGuidance, LayerSkipConfig, PerturbedAttentionGuidance, SkipLayerGuidance
from diffusers.modular_pipelines import ModularPipelineBlocks
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import linear

import fxplug
from fxplug.core.errors import ArtifactError, SpecError, TraceError

FAMILIES = "anima flux3 h3 music3".split()  # noqa: SIM905
LAYER = "re:.*blocks.*(attn|ff).*"


def test_families_that_are_modular_alone():
    """Four of these six are below; the others' models are traced as the zoo's are, but for Wan-Animate 2's."""
    normal, blocks = ({m.name for m in pkgutil.iter_modules(p.__path__) if m.ispkg} for p in (
        diffusers.pipelines, diffusers.modular_pipelines
    ))  # fmt: skip
    assert blocks - normal == {"anima", "echo", "flux3", "minimax_h3", "minimax_music3", "wan_animate_2"}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_modular_pipeline_is_traced_by_one_call(name, caplog):
    case = modular.made(name)
    want, models = case(), {k: v for k, v in case.pipe.components.items() if isinstance(v, nn.Module)}
    caplog.clear()
    assert fxplug.rewrite_pipeline(case.pipe, {"transformer": ()}, **case.call) is case.pipe
    assert not caplog.records
    assert isinstance(case.pipe.transformer, fxplug.TracedModule) and torch.equal(case(), want)
    assert case.pipe.get_component_spec("transformer").type_hint is type(case.pipe.transformer)
    assert case.pipe.config["transformer"][:2] == ("fxplug", "TracedModule")
    assert all(case.pipe.components[name] is model for name, model in models.items() if name != "transformer")
    fxplug.rewrite_pipeline(case.pipe, **case.call)  # the rest, too
    assert all(isinstance(case.pipe.components[name], fxplug.TracedModule) for name in models) and torch.equal(case(), want)


class Wrapped(nn.Module):
    """A linear layer and an update beside it, by hand."""

    def __init__(self, layer, down, up, scale):
        super().__init__()
        self.layer, self.down, self.up, self.scale = layer, down, up, scale

    def forward(self, x):
        return torch.add(self.layer(x), linear(linear(x, self.down) * self.scale, self.up))


@pytest.mark.parametrize("name", FAMILIES)
def test_its_denoiser_is_rewritten(name):
    case, plain = modular.made(name), modular.made(name)
    want = case()
    lora = fxplug.load_pass("lora", at=LAYER, rank=2)
    fxplug.rewrite_pipeline(case.pipe, {"transformer": lora}, **case.call)
    assert torch.equal(case(), want)  # a new one is neutral
    model, count = case.pipe.transformer, 0
    for path in (site["path"] for site in model.meta["passes"][0]["sites"]):
        block = model.get_submodule(f"lora.{path}.Lora")
        nn.init.normal_(block.up.weight, std=0.2)
        hand = Wrapped(plain.pipe.transformer.get_submodule(path), block.down.weight, block.up.weight, block.scale)
        plain.pipe.transformer.set_submodule(path, hand)
        count += 1
    assert count >= 8 and torch.equal(case(), plain()) and not torch.allclose(case(), want, atol=1e-3)


@pytest.mark.slow
def test_files_go_into_a_modular_pipeline(tmp_path):
    cases = [modular.made("anima") for _ in range(2)]
    shapes = {k: v.shape for k, v in cases[0].pipe.transformer.state_dict().items() if k.endswith("to_q.weight")}
    torch.manual_seed(1)
    layers = {}
    for name, (outer, inner) in shapes.items():
        layer = f"transformer.{name.removesuffix('.weight')}"
        layers |= {f"{layer}.lora_A.weight": torch.randn(2, inner), f"{layer}.lora_B.weight": torch.randn(outer, 2) * 0.2}
    save_file(layers, tmp_path / "ink.safetensors")
    before = cases[0]()
    cases[1].pipe.load_lora_weights(tmp_path / "ink.safetensors", adapter_name="ink")
    fxplug.rewrite_pipeline(cases[0].pipe, adapters={"ink": tmp_path / "ink.safetensors"}, **cases[0].call)
    torch.testing.assert_close(cases[0](), cases[1]())
    assert not torch.allclose(cases[0](), before, atol=1e-3)
    cases[0].pipe.disable_lora()
    assert torch.equal(cases[0](), before)


@pytest.mark.slow
def test_a_modular_pipeline_is_saved_and_loaded_on_its_blocks(tmp_path):
    case = modular.made("anima")
    fxplug.rewrite_pipeline(case.pipe, {"transformer": fxplug.load_pass("lora", at="re:.*to_q$", rank=2)}, **case.call)
    nn.init.normal_(next(p for name, p in case.pipe.transformer.named_parameters() if "up.weight" in name))
    want = case()
    fxplug.save_pipeline(case.pipe, tmp_path / "saved")
    with pytest.raises(ArtifactError, match=r"is a modular pipeline.*blocks\.init_pipeline\('.*load_components"):
        fxplug.load_pipeline(tmp_path / "saved")
    case.pipe = case.pipe.blocks.init_pipeline(str(tmp_path / "saved"))
    case.pipe.load_components()
    case.pipe.set_progress_bar_config(disable=True)
    assert torch.equal(case(), want) and isinstance(case.pipe.transformer, fxplug.TracedModule)


LAYERS = {"indices": [1], "fqn": "blocks"}
GUIDERS = {
    "SkipLayerGuidance": lambda: SkipLayerGuidance(skip_layer_config=LayerSkipConfig(**LAYERS)),
    "AutoGuidance": lambda: AutoGuidance(auto_guidance_config=LayerSkipConfig(**LAYERS)),
    "PerturbedAttentionGuidance": lambda: PerturbedAttentionGuidance(perturbed_guidance_config=LayerSkipConfig(**LAYERS)),
}


@pytest.mark.parametrize("name", GUIDERS)
def test_guiders_that_hook_layers_are_refused(name):
    case = modular.made("wan")
    case.pipe.update_components(guider=GUIDERS[name]())
    before = case.pipe.components
    with pytest.raises(SpecError, match=rf"'guider' of the WanModularPipeline is a {name}: it hooks layers of the denoiser"):
        fxplug.rewrite_pipeline(case.pipe, **case.call)
    assert case.pipe.components == before


class Reads(ModularPipelineBlocks):
    """A block that puts attention processors back as they are."""

    def __call__(self, components, state):
        self.reset(components.transformer)
        return components, state

    def reset(self, model):
        model.set_attn_processor(model.attn_processors)


def test_what_cannot_be_done_is_refused_before_a_picture_is_begun():
    case = modular.made("wan")
    for options, error, message in (
        ({"passes": {"unet": ()}}, TraceError, "no model 'unet'.*it has transformer"),
        ({"join": True}, TraceError, "WanModularPipeline is a modular pipeline, whose blocks call both"),
    ):
        with pytest.raises(error, match=message):
            fxplug.rewrite_pipeline(case.pipe, **options, **case.call)
    case.pipe._blocks.sub_blocks.insert("reads", Reads(), 0)
    with pytest.raises(SpecError, match="Reads.reset uses 'attn_processors' of its models while it runs"):
        fxplug.rewrite_pipeline(case.pipe, **case.call)
    assert not isinstance(case.pipe.transformer, fxplug.TracedModule)


def test_a_rewritten_model_has_no_processors():
    case = modular.made("wan")
    fxplug.rewrite_pipeline(case.pipe, **case.call)
    with pytest.raises(SpecError, match="of the traced WanTransformer3DModel: attention is part of the graph"):
        case.pipe.transformer.set_attn_processor(None)
