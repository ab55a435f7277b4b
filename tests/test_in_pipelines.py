"""Pipelines of diffusers with traced and rewritten models in them, and pipelines that say how their models are called."""

from __future__ import annotations

import copy

import peft
import pipelines
import pytest
import torch
import unets
from safetensors.torch import save_file
from torch import nn

import fxplug
from fxplug.core.errors import ArtifactError, MatchError, SpecError, TraceError

CALL = {"num_inference_steps": 2, "height": 64, "width": 64, "output_type": "pt"}


def _picture(pipe, **more):
    return pipe("a cat", generator=torch.Generator().manual_seed(1), **CALL, **more).images


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def traced(folder):
    """The traced models of a pipeline, and the picture that it draws."""
    pipe = pipelines.stable_diffusion(folder)
    want = _picture(pipe)
    return fxplug.trace_pipeline(pipe, "a cat", **CALL), want


def test_one_call_of_a_pipeline_traces_its_models(traced, folder):
    models, want = traced
    assert list(models) == ["text_encoder", "unet"]
    pipe = pipelines.stable_diffusion(folder)
    for name, model in models.items():
        setattr(pipe, name, model)
    assert torch.equal(_picture(pipe), want) and not any(model.variants for model in models.values())
    again = fxplug.trace_pipeline(pipe, "a cat", parts="unet", **CALL)
    assert again["unet"] is models["unet"]


@pytest.mark.slow
def test_a_pipeline_is_cast_with_what_is_in_it(folder):
    pipes = [pipelines.stable_diffusion(folder) for _ in range(2)]
    pipes[0].unet = fxplug.trace_pipeline(pipes[0], "a cat", parts="unet", **CALL)["unet"]
    for pipe in pipes:
        pipe.to(torch.bfloat16)
    assert torch.equal(*map(_picture, pipes))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dit", "flux", "sd3"])
def test_a_transformer_is_traced_as_its_pipeline_calls_it(name):
    case = pipelines.made(name)
    want = case()
    case = case.with_transformer(fxplug.trace_pipeline(_Called(case))["transformer"])
    assert torch.equal(case(), want)


class _Called:
    """Any object with models that calls them."""

    def __init__(self, case):
        self.components = case.pipe.components
        self.case = case

    def __call__(self):
        return self.case()


@pytest.mark.parametrize("parts, message", [
    ("unt", "no model 'unt' .did you mean 'unet'"), ("vae", "does not call vae"),
])  # fmt: skip
def test_a_part_that_cannot_be_traced_so(folder, parts, message):
    with pytest.raises(fxplug.TraceError, match=message):
        fxplug.trace_pipeline(pipelines.stable_diffusion(folder), "a cat", parts=parts, **CALL)
    with pytest.raises(fxplug.TraceError, match="dict has no models"):
        fxplug.trace_pipeline({})


@pytest.mark.parametrize("method, arguments, message", [
    ("enable_freeu", (0.9, 0.2, 1.2, 1.4), "load_pass.'freeu'"), ("disable_freeu", (), "without the pass"),
    ("load_lora_weights", ({"unet.down_blocks.0.attentions.0.proj_in.lora_A.weight": torch.zeros(2, 8)},), r"adapters\.load"),
    ("fuse_lora", (), r"fxplug\.lower.*merge=True"),
])  # fmt: skip
def test_a_method_of_the_pipeline_names_the_call_that_does_it(traced, folder, method, arguments, message):
    pipe = pipelines.stable_diffusion(folder)
    pipe.unet, pipe.text_encoder = traced[0]["unet"], traced[0]["text_encoder"]
    with pytest.raises(AttributeError, match=message):
        getattr(pipe, method)(*arguments)
    for switch in ("disable_lora", "enable_lora", "unload_lora_weights", "unfuse_lora"):
        getattr(pipe, switch)()  # there is nothing to switch
    assert torch.equal(_picture(pipe), traced[1]) and pipe.get_list_adapters() == {}


def _files(folder, names):
    """LoRA of PEFT on both models, in files of diffusers."""
    for seed, name in enumerate(names):
        pipe, parts = pipelines.stable_diffusion(folder), {}
        for part, layers in (("unet", ["to_q", "to_out.0"]), ("text_encoder", ["q_proj", "v_proj"])):
            model = getattr(pipe, part)
            settings = {"r": seed + 1, "lora_alpha": 3, "target_modules": layers, "init_lora_weights": False}
            torch.manual_seed(seed)
            model.add_adapter(peft.LoraConfig(**settings))
            parts[f"{part}_lora_layers"] = peft.get_peft_model_state_dict(model)
            parts[f"{part}_lora_adapter_metadata"] = settings
        pipe.save_lora_weights(folder / name, **parts)


STEPS = [
    ("load_lora_weights", ("{}/ink",), {"adapter_name": "ink"}), ("load_lora_weights", ("{}/film",), {}),
    ("set_adapters", (["ink", "default_1"], [0.7, 0.2]), {}), ("disable_lora", (), {}), ("enable_lora", (), {}),
    ("set_adapters", ("ink", {"unet": 0.3, "text_encoder": 0.8}), {}), ("set_adapters", ("default_1",), {}),
    ("delete_adapters", ("ink",), {}), ("unload_lora_weights", (), {}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")  # of PEFT
def test_adapters_of_a_pipeline_are_in_slots(traced, folder):
    _files(folder, ("ink", "film"))
    plain, ours = (pipelines.stable_diffusion(folder) for _ in range(2))
    slots = fxplug.load_pass("lora", at="re:.*(to_q|to_out.0|[qv]_proj)$", rank=2, slots=2)
    for name, model in traced[0].items():
        setattr(ours, name, fxplug.apply(model, slots))
    for method, args, kwargs in STEPS:
        args = [arg.format(folder) if isinstance(arg, str) else arg for arg in args]
        for pipe in (plain, ours):
            getattr(pipe, method)(*args, **kwargs)
        torch.testing.assert_close(_picture(ours), _picture(plain), msg=lambda text, m=method: f"{m}: {text}")
        assert ours.get_list_adapters() == plain.get_list_adapters()
    assert torch.equal(_picture(ours), traced[1])
    ours.load_lora_weights(folder / "ink", adapter_name="ink")
    assert not torch.equal(_picture(ours), traced[1]) and ours.unet.active_adapters() == ["ink"]
    with pytest.raises(fxplug.SpecError, match="needs groups of layers, and 'lora' has none"):
        ours.set_adapters("ink", {"unet": {"down": 0.3}})
    with pytest.raises(fxplug.SpecError, match="'ink' is loaded already"):
        ours.load_lora_weights(folder / "ink", adapter_name="ink")


def test_a_traced_module_is_taken_for_what_it_was_traced_from(traced, folder):
    unet = traced[0]["unet"]
    assert isinstance(unet, type(pipelines.stable_diffusion(folder).unet)) and isinstance(unet, fxplug.TracedModule)
    assert isinstance(unet, nn.Module) and not isinstance(unet, nn.Linear) and type(unet).__name__ == "TracedModule"
    again = copy.deepcopy(unet)
    again.__class__ = type("Sharded", (again.__class__,), {})  # as FSDP does
    assert type(again).__bases__[0].__name__ == "TracedModule" and not issubclass(type(again), type(unet))
    with pytest.raises(fxplug.SpecError, match="set_attn_processor"):
        _ = again.set_attn_processor


@pytest.mark.slow
def test_a_scale_that_no_pass_sees_is_refused(traced, folder):
    pipe = pipelines.stable_diffusion(folder)
    pipe.unet = fxplug.apply(traced[0]["unet"], fxplug.load_pass("lora", at="re:.*to_q$", rank=2, slots=2))
    assert torch.equal(_picture(pipe, cross_attention_kwargs={"scale": 1.0}), traced[1])
    with pytest.raises(fxplug.GuardError, match=r"'scale' in cross_attention_kwargs.*adapters\.use"):
        _picture(pipe, cross_attention_kwargs={"scale": 0.5})


@pytest.fixture(scope="module")
def network(folder):
    return unets.control(pipelines.stable_diffusion(folder).unet)


def _image(seed=2):
    return torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
def test_a_controlnet_pipeline_runs_with_traced_parts(network, folder):
    pipes = [pipelines.stable_diffusion(folder, controlnet=network) for _ in range(2)]
    for name, part in fxplug.trace_pipeline(pipes[0], "a cat", image=_image(), **CALL).items():
        setattr(pipes[0], name, part)
    assert isinstance(pipes[0].controlnet, fxplug.TracedModule)
    for scale in (1.0, 0.5):
        assert torch.equal(*(_picture(pipe, image=_image(), controlnet_conditioning_scale=scale) for pipe in pipes))


def _joined(folder, networks, image):
    plain, ours = (pipelines.stable_diffusion(folder, controlnet=copy.deepcopy(networks)) for _ in range(2))
    parts = fxplug.trace_pipeline(ours, "a cat", image=image, join=True, parts="unet", **CALL)
    assert not isinstance(ours.unet, fxplug.TracedModule) and list(parts) == ["unet", "controlnet"]
    for name, part in parts.items():
        setattr(ours, name, part)
    return plain, ours


ONE = [{}, {"controlnet_conditioning_scale": 0.3}, {"guess_mode": True}, {"control_guidance_start": 0.4}]
TWO = [
    {"controlnet_conditioning_scale": [0.5, 0.2]}, {"guess_mode": True}, {"control_guidance_end": [0.4, 1.0]},
    {"guess_mode": True, "guidance_scale": 1.0, "controlnet_conditioning_scale": [0.1, 0.7]}, {},
]  # fmt: skip


@pytest.mark.slow
def test_one_graph_of_unet_and_networks_is_the_pipelines_two_calls(network, folder, tmp_path):
    second = unets.control(pipelines.stable_diffusion(folder).unet, seed=5)
    plain, ours = _joined(folder, [network, second], image := [_image(), _image(3)])
    for options in TWO:
        assert torch.equal(*(_picture(pipe, image=image, **options) for pipe in (plain, ours))), options
    assert len(ours.unet.variants) == 2  # guess_mode, with guidance and without
    ours.save_pretrained(tmp_path)
    again = pipelines.quiet(type(ours).from_pretrained(tmp_path))
    assert torch.equal(*(_picture(pipe, image=image, guess_mode=True) for pipe in (ours, again)))
    for pipe in (plain, ours):
        pipe.to(torch.bfloat16)
    assert torch.equal(*(_picture(pipe, image=image, controlnet_conditioning_scale=0.7) for pipe in (plain, ours)))


@pytest.mark.slow
def test_passes_go_into_the_one_graph(network, folder):
    plain, ours = _joined(folder, network, _image())
    for options in ONE:
        assert torch.equal(*(_picture(pipe, image=_image(), **options) for pipe in (plain, ours))), options
    assert len(ours.unet.variants) == 1 and not list(ours.controlnet.parameters())
    new = fxplug.apply(ours.unet, fxplug.load_pass("lora", at="to_q", rank=2))
    layers = [name for name, _ in new.named_modules() if name.endswith(".Lora")]
    assert {name.startswith("lora.controlnet.") for name in layers} == {True, False}
    ours.unet, ours.controlnet = new, fxplug.controlnet_of(new)
    assert torch.equal(*(_picture(pipe, image=_image()) for pipe in (plain, ours)))
    with pytest.raises(fxplug.GuardError, match="'class_labels' is not an input"):
        ours.controlnet(torch.zeros(1), 3, torch.zeros(1), _image(), class_labels=torch.zeros(1))
    plain.unet = new
    with pytest.raises(fxplug.GuardError, match=r"the ControlNet is in this graph.*controlnet_of.unet"):
        _picture(plain, image=_image())
    with pytest.raises(fxplug.TraceError, match="traced already"):
        fxplug.trace_pipeline(ours, "a cat", image=_image(), join=True, **CALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "Img2Img", "Inpaint"])
def test_one_graph_in_a_pipeline_of_sdxl(name):
    pipe, call = pipelines.controlled(name)

    def pictures():
        ways = ({}, {"guess_mode": True}, {"controlnet_conditioning_scale": 0.4})
        return [pipe(**{**call, **more}, generator=torch.Generator().manual_seed(1)).images for more in ways]

    want = pictures()
    for part, model in fxplug.trace_pipeline(pipe, join=True, **call).items():
        setattr(pipe, part, model)
    assert all(map(torch.equal, pictures(), want))


def test_what_has_no_network_to_join(traced, network, folder):
    with pytest.raises(fxplug.TraceError, match="must have both 'unet' and 'controlnet'"):
        fxplug.trace_pipeline(pipelines.stable_diffusion(folder), "a cat", join=True, **CALL)
    with pytest.raises(fxplug.SpecError, match="it has none.*join=True"):
        fxplug.controlnet_of(traced[0]["unet"])
    new = fxplug.apply(traced[0]["unet"], fxplug.load_pass("controlnet", network=network))
    with pytest.raises(fxplug.SpecError, match="'controlnet' has its own inputs: bind them"):
        fxplug.controlnet_of(new)


@pytest.mark.slow
def test_a_bound_controlnet_draws_in_the_plain_pipeline(traced, network, folder):
    image = _image()
    plain, full = pipelines.stable_diffusion(folder), pipelines.stable_diffusion(folder, controlnet=network)
    new = fxplug.apply(traced[0]["unet"], fxplug.load_pass("controlnet", network=network))
    plain.unet = new.bind(cond=image, strength=0.7)
    torch.testing.assert_close(_picture(plain), _picture(full, image=image, controlnet_conditioning_scale=0.7))
    plain.unet.bind(strength=0.0)
    assert torch.equal(_picture(plain), traced[1]) and isinstance(plain.unet.bound, nn.Module)


@pytest.mark.slow
def test_a_pipeline_is_saved_with_what_is_in_it(traced, folder, tmp_path, capfd):
    pipe = pipelines.stable_diffusion(folder)
    pipe.unet = fxplug.apply(traced[0]["unet"], fxplug.load_pass("lora", at="re:.*to_q$", rank=2))
    for name, parameter in pipe.unet.named_parameters():
        if name.startswith("lora."):
            nn.init.normal_(parameter, std=0.1)
    want = _picture(pipe)
    pipe.text_encoder = traced[0]["text_encoder"]
    pipe.save_pretrained(tmp_path)
    for load in (fxplug.load_pipeline, type(pipe).from_pretrained):
        again = pipelines.quiet(load(tmp_path))
        assert torch.equal(_picture(again), want) and not torch.equal(want, traced[1])
    said = capfd.readouterr()
    assert "conv_in" not in said.out + said.err and "cannot be saved" not in said.err
    assert type(pipe).from_pretrained(tmp_path, dtype=torch.bfloat16).unet.dtype == torch.bfloat16
    again.unet = torch.compile(again.unet)
    fxplug.save_pipeline(again, tmp_path / "again")
    assert (tmp_path / "again" / "unet" / "lora.safetensors").is_file()
    pipe.unet = fxplug.load(tmp_path / "again" / "unet")  # no part of a pipeline yet
    fxplug.save_pipeline(pipe, tmp_path / "third")
    assert (tmp_path / "third" / "unet" / "lora.safetensors").is_file()
    with pytest.raises(fxplug.ArtifactError, match="is not a pipeline"):
        fxplug.load_pipeline(tmp_path / "unet")


def _saved(pipe, folder, **layers):
    """A file of diffusers with LoRA of PEFT in these layers of a pipeline's parts."""
    torch.manual_seed(len(str(folder)))
    found = {}
    for part, names in layers.items():
        model = copy.deepcopy(getattr(pipe, part))
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=names))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        state = peft.get_peft_model_state_dict(model)
        found[f"{part}_lora_layers"] = {key.removeprefix("base_model.model."): value for key, value in state.items()}
    type(pipe).save_lora_weights(folder, **found)
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_files_are_put_into_the_models_that_they_have_layers_for(folder, tmp_path):
    pipe = pipelines.stable_diffusion(folder)
    files = {
        "ink": _saved(pipe, tmp_path / "ink", unet=["to_q", "to_v"], text_encoder=["q_proj"]),
        "film": _saved(pipe, tmp_path / "film_", unet=["to_k"]),
    }
    assert fxplug.rewrite_pipeline(pipe, adapters=files, slots=3, prompt="a cat", **CALL) is pipe
    assert pipe.text_encoder.adapters.names == ["ink"] and pipe.unet.adapters.active == {"ink": 1.0, "film": 1.0}
    for name, file in files.items():
        theirs = pipelines.stable_diffusion(folder)
        before = _picture(theirs)
        theirs.load_lora_weights(file, adapter_name=name)
        pipe.set_adapters(name)
        torch.testing.assert_close(_picture(pipe), _picture(theirs), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(_picture(pipe), before, atol=1e-3)
    fxplug.rewrite_pipeline(pipe, adapters={"extra": files["film"]}, prompt="a cat", **CALL)
    assert pipe.unet.adapters.names == ["ink", "film", "extra"] and pipe.unet.meta["passes"][1]["name"] == "adapter_2"
    pipe.load_lora_weights(files["film"], adapter_name="more")
    assert pipe.unet.adapters.names == ["ink", "film", "more", "extra"]


@pytest.mark.slow
def test_passes_go_into_the_models_that_they_are_given_for(folder):
    pipe = pipelines.stable_diffusion(folder)
    text, want = pipe.text_encoder, _picture(pipe)
    lora = fxplug.load_pass("lora", at=["to_q"], rank=2)
    fxplug.rewrite_pipeline(pipe, {"unet": [lora, fxplug.load_pass("freeu")]}, prompt="a cat", **CALL)
    assert [entry["name"] for entry in pipe.unet.meta["passes"]] == ["lora", "freeu"] and pipe.text_encoder is text
    assert not torch.equal(_picture(pipe), want)
    plain = fxplug.rewrite_pipeline(pipelines.stable_diffusion(folder), prompt="a cat", **CALL)
    assert torch.equal(_picture(plain), want) and isinstance(plain.text_encoder, fxplug.TracedModule)


@pytest.mark.slow
def test_a_pipeline_that_cannot_be_rewritten_is_as_it_was(folder, tmp_path):
    pipe = pipelines.stable_diffusion(folder)
    before = dict(pipe.components)
    lora, text = fxplug.load_pass("lora", at=["to_q"], rank=2), fxplug.load_pass("lora", at=["nothing"], rank=2)
    file = _saved(pipe, tmp_path / "ink", unet=["to_q"])
    other = tmp_path / "other.safetensors"
    save_file({f"text_encoder_2.q_proj.lora_{half}.weight": torch.ones(4, 4) for half in "AB"}, other)
    for passes, options, error, text_of in (
        ({"unet": lora, "text_encoder": text}, {}, MatchError, "nothing"),
        ({"unett": lora}, {}, TraceError, "did you mean 'unet'"),
        ({"unet": "lora"}, {}, SpecError, "such as load_pass returns, not 'lora'"),
        ({"vae": lora}, {}, TraceError, "does not call vae"),
        (None, {"adapters": {"ink": file}, "slots": 0.5}, SpecError, "slots"),
        (None, {"adapters": {"ink": other}}, ArtifactError, "layers for 'text_encoder_2', .*did you mean 'text_encoder'"),
        (None, {"adapters": {"ink": tmp_path / "missing.safetensors"}}, ArtifactError, "missing.safetensors"),
        (lora, {}, SpecError, "passes must be a mapping by the models' names, not .*: {\"unet\": fxplug.load_pass"),
        (None, {"adapters": str(file)}, SpecError, "adapters must be a mapping by their own names"),
        (None, {"adapters": {"ink": {}}}, SpecError, "adapter 'ink' must be a file or a folder, not "),
        (None, {"join": True}, TraceError, "must have both 'unet' and 'controlnet'"),
    ):
        with pytest.raises(error, match=text_of):
            fxplug.rewrite_pipeline(pipe, passes, prompt="a cat", **options, **CALL)
        assert all(pipe.components[name] is value for name, value in before.items())
