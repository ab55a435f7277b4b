"""`model: {pipeline: ...}`: a rewrite of a model where its stock pipeline is all that is known of it."""

import json
import re
import shutil
import sys
from functools import cache

import diffusers
import pytest
import recipe_twins
import runs
import small
import tiny_pipelines
import torch
import yaml
from safetensors.torch import save_file
from test_base_checkpoints import original

import fxplug
from fxplug.config import flow
from fxplug.config.models.factory import build
from fxplug.config.run_config import load_config, resolve
from fxplug.core.quantised import is_quantised
from fxplug.pipelines import pipeline_model
from fxplug.pipelines.opening import open_pipeline, quantize_part

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of diffusers' own schedulers
LORA = [{"lora": {"at": ["to_q", "to_v"], "rank": 2}}]
SIZED = {"data": {"images": ".", "size": 64}}


@pytest.fixture(autouse=True, scope="module")
def shared():
    """The rewrites of this file have the traces of one configuration in common."""
    with runs.sharing():
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("pipelines")


@pytest.fixture
def pipes(home):
    """The folder of pipelines, in which those of these names are."""

    def with_(*names):
        for name in names:
            if not (home / name).exists():
                tiny_pipelines.save(name, home / name)
        return home

    return with_


def rewritten(base, model, *, passes=LORA, out=None, **sections):
    return fxplug.rewrite(load_config({"model": model, "passes": passes, **sections}, base=base), out=out, verify=False)


def built(base, model, **sections):
    """The part and what it is called with, not traced."""
    return pipeline_model.build_pipeline_model(load_config({"model": model, **SIZED, **sections}, base=base))


def refused(base, model, **sections):
    with pytest.raises(fxplug.SpecError) as caught, pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow, "_traced", runs.build_traced)
        rewritten(base, model, **{**SIZED, **sections})
    text = str(caught.value)
    assert "\n" not in text
    return text


def part_of(pipe):
    return "unet" if hasattr(pipe, "unet") else "transformer"


QUICK = ("flux", "z_image")


# of LTX-2 the calls for guidance leave blocks out, which are other forms: a GuardError refuses them in a loaded module
FAMILIES = [name for name in tiny_pipelines.CALLS if name != "ltx2"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES])
def test_what_is_saved_answers_every_call_of_its_pipeline_where_it_is_loaded(name, pipes, tmp_path):
    base = pipes(name)
    model = {"pipeline": name, "call": tiny_pipelines.CALLS[name], **({"part": "transformer"} if name == "wan22" else {})}
    result = rewritten(base, model, **SIZED, out=tmp_path / "out")
    pipe = result.pipeline
    part = part_of(pipe)
    assert not isinstance(getattr(pipe, part), fxplug.core.ir.traced_module.TracedModule)
    guidance = {"true_cfg_scale": 3.0} if name == "qwen_image" else {"guidance_scale": 3.0}
    negative = {} if name == "flux" else {"negative_prompt": "black"}
    calls = [
        {}, {"prompt": "a gold cat on the box"}, {"steps": 3}, tiny_pipelines.UNGUIDED[name], {**guidance, **negative},
        {"prompt": "a dog", "num_videos_per_prompt" if "num_frames" in model["call"] else "num_images_per_prompt": 2},
    ]  # fmt: skip
    wanted = [tiny_pipelines.draw(pipe, name, **call) for call in calls]
    loaded = fxplug.load(tmp_path / "out")
    assert {entry["name"] for entry in loaded.meta["passes"]} == {"lora"}
    hoisted = fxplug.lower(loaded, fuse=None, hoist=True)  # by what was seen of its inputs
    for way in (loaded, fxplug.pipeline_part(loaded), hoisted):
        setattr(pipe, part, way)
        for call, want in zip(calls, wanted, strict=True):
            assert torch.equal(tiny_pipelines.draw(pipe, name, **call), want), call
    assert hoisted.groups.time == (("t",) if name == "z_image" else ("timestep",))
    assert hoisted.counts["step"] or name == "qwen_image"  # whose graph is of two texts, as their sizes are plain numbers


def test_the_pipeline_is_opened_once_and_has_its_model_still(pipes, monkeypatch):
    opened, first = [], []
    monkeypatch.setattr(flow, "_traced", runs.build_traced)
    monkeypatch.setattr(pipeline_model, "open_pipeline", lambda *a, **k: opened.append(open_pipeline(*a, **k)) or opened[-1])
    result = rewritten(pipes("flux"), {"pipeline": "flux"}, **SIZED)
    assert [result.pipeline] == opened
    model = result.pipeline.transformer
    assert result.module.transformer_blocks[0].attn.to_q.weight is model.transformer_blocks[0].attn.to_q.weight
    assert "forward" not in vars(model) and "encode_prompt" not in vars(result.pipeline)
    handle = model.register_forward_pre_hook(lambda m, a, k: first.append(k), with_kwargs=True)
    tiny_pipelines.draw(result.pipeline, "flux", ["a photo"] * 2)
    handle.remove()
    given = result.inputs[1]
    assert given.keys() == first[0].keys()
    assert torch.equal(given["encoder_hidden_states"], first[0]["encoder_hidden_states"])  # the call is a real one
    assert given["hidden_states"].shape == (2, 16, 16)


@pytest.mark.slow
def test_the_saved_configuration_is_read_again_and_has_the_call(pipes, tmp_path):
    base = pipes("flux")
    rewritten(base, {"pipeline": "flux", "call": {"guidance_scale": 2.5}}, **SIZED, out=tmp_path / "out")
    kept = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert kept["model"] == {"pipeline": "flux", "call": {"guidance_scale": 2.5}, "options": {}}
    assert kept["inputs"]["hidden_states"] == {"shape": [2, 16, 16], "dtype": "float32"}
    assert kept["inputs"]["return_dict"] == {"value": False}
    assert resolve(load_config(kept, base=base)) == {**kept, "data": load_config(kept, base=base).data.model_dump()}
    module = fxplug.load(tmp_path / "out")
    args, kwargs = fxplug.config.flow.make_saved_inputs(tmp_path / "out", module)
    assert module(*args, **kwargs)[0].shape == (2, 16, 16)


def test_inputs_take_the_place_of_what_the_pipeline_gives(pipes):
    base = pipes("flux")
    result = rewritten(base, {"pipeline": "flux"}, **SIZED, inputs={"timestep": {"shape": [2], "fill": 0.25}})
    args, kwargs = result.inputs
    assert any(torch.equal(value, torch.full((2,), 0.25)) for value in (*args, *kwargs.values()) if torch.is_tensor(value))
    assert "takes no input 'timestp' (did you mean 'timestep'?)" in refused(
        base, {"pipeline": "flux"}, inputs={"timestp": {"shape": [2]}}
    )


@pytest.mark.slow
def test_the_command_line_takes_it(pipes, tmp_path):
    base = pipes("flux")
    file = base / "run.yaml"
    file.write_text(yaml.safe_dump({"model": {"pipeline": "flux", "call": {"height": 64, "width": 64}}, "passes": LORA}))
    for words in (["sites", file], ["diff", file], ["rewrite", file, "--dry-run"]):
        done = small.command(*words)
        assert done.exit_code == 0 and "transformer_blocks" in done.stdout, done.output
    done = small.command("rewrite", file, "--no-verify", "--set", "model.call.width=96", "--out", tmp_path / "out")
    assert done.exit_code == 0 and (tmp_path / "out" / "manifest.json").is_file(), done.output
    done = small.command("sites", file, "--set", "model.part=unet")
    assert done.exit_code == 1 and "no model 'unet'" in done.stderr


# --- the part


@pytest.mark.slow
def test_a_part_is_chosen_where_several_are_called(pipes):
    base, call = pipes("wan22"), {"num_frames": 1}
    assert "several denoisers, transformer, transformer_2: choose with 'part'" in refused(
        base, {"pipeline": "wan22", "call": call}
    )
    result = rewritten(base, {"pipeline": "wan22", "part": "transformer_2", "call": call}, **SIZED)
    pipe = result.pipeline
    assert result.module.blocks[0].attn1.to_q.weight is pipe.transformer_2.blocks[0].attn1.to_q.weight
    for wrong in ("transformr", ["transformer", "transformr"]):
        assert "has no model 'transformr' (did you mean 'transformer'?); it has transformer, transformer_2, " in refused(
            base, {"pipeline": "wan22", "part": wrong, "call": call}
        )
    alone = rewritten(base, {"pipeline": "wan22", "part": ["transformer_2"], "call": call}, **SIZED)
    assert alone.beside == {} and torch.equal(alone.module.lora.blocks[0].attn1.to_q.Lora.down.weight,
                                              result.module.lora.blocks[0].attn1.to_q.Lora.down.weight)  # fmt: skip
    twice = {"pipeline": "wan22", "part": ["transformer", "transformer"], "call": call}
    assert "model.part: 'transformer' is listed 2 times: list each part once" in refused(base, twice)
    uncalled = {"pipeline": "wan22", "part": ["transformer", "vae"], "call": call}
    assert "this call of WanPipeline does not call 'vae'" in refused(base, uncalled)


@pytest.mark.slow
def test_two_parts_are_rewritten_and_saved_by_the_same_passes(pipes, tmp_path):
    base = pipes("wan22")
    both = {"pipeline": "wan22", "part": ["transformer_2", "transformer"], "call": {"num_frames": 1}}
    result = rewritten(base, both, out=tmp_path / "out", **SIZED)
    assert [*result.by_part] == ["transformer_2", "transformer"] and result.by_part["transformer_2"] is result
    for name, one in result.by_part.items():
        own = getattr(result.pipeline, name)
        assert one.module.blocks[0].attn1.to_q.weight is own.blocks[0].attn1.to_q.weight
        assert len(one.sites["lora"]) == 8 and one.out == tmp_path / "out" / name
        args, kwargs = one.inputs
        wanted = one.module(*args, **kwargs)[0]
        assert torch.equal(fxplug.load(one.out)(*args, **kwargs)[0], wanted)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["transformer", "transformer_2"]
    assert "weights: are those of one model, and 'part' names transformer_2, transformer" in refused(
        base, both, weights=str(tmp_path / "out" / "transformer" / "lora.safetensors")
    )


@pytest.mark.slow
def test_the_command_line_says_of_which_part_it_tells(pipes):
    base = pipes("wan22")
    file = base / "both.yaml"
    model = {"pipeline": "wan22", "part": ["transformer", "transformer_2"], "call": {"num_frames": 1}}
    file.write_text(yaml.safe_dump({"model": model, "passes": LORA, **SIZED}))
    for words in (["sites", file], ["diff", file], ["rewrite", file, "--no-verify"]):
        done = small.command(*words)
        assert done.exit_code == 0, done.output
        first, second = (done.stdout.index(f"{part} (WanTransformer3DModel)\n") for part in model["part"])
        assert first < second


def test_one_of_two_that_is_not_called_is_not_chosen_among(home, pipes):
    pipes("wan22")
    if not (home / "late").exists():  # every time is before the border
        shutil.copytree(home / "wan22", home / "late")
        index = json.loads((home / "late" / "model_index.json").read_text())
        (home / "late" / "model_index.json").write_text(json.dumps({**index, "boundary_ratio": 0.0}))
    result = rewritten(home, {"pipeline": "late", "call": {"num_frames": 1}}, **SIZED)
    assert result.module.blocks[0].attn1.to_q.weight is result.pipeline.transformer.blocks[0].attn1.to_q.weight


@pytest.mark.slow
def test_any_model_that_the_call_calls_is_a_part(pipes):
    base = pipes("flux")
    result = rewritten(base, {"pipeline": "flux", "part": "text_encoder"}, passes=[{"lora": {"at": "**.q_proj"}}], **SIZED)
    assert result.module.classes[0] == "CLIPTextModel"
    assert "does not call 'vae'" in refused(base, {"pipeline": "flux", "part": "vae"})


def test_pipelines_that_need_a_picture_get_a_grey_one(home):
    given = {**tiny_pipelines.make("sd15").components, "unet": tiny_pipelines.unet(cross_attention_dim=12, in_channels=8,
                                                                                   attention_head_dim=2)}
    given = {**{k: v for k, v in given.items() if k != "image_encoder"}, "requires_safety_checker": False}
    diffusers.StableDiffusionInstructPix2PixPipeline(**given).save_pretrained(home / "edits")
    assert built(home, {"pipeline": "edits"}).inputs[0][0].shape[1:] == (8, 8, 8)  # the picture is of that size


# --- arguments and sizes


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ({"guidance": 3}, "model.call.guidance: FluxPipeline takes no argument 'guidance' (did you mean 'guidance_scale'?)"),
        ({"num_frames": 1}, "takes no argument 'num_frames'; it has prompt, "),
        ({"self": 1}, "takes no argument 'self'"),
        ({"guidance_scale": "much"}, "model.call.guidance_scale: FluxPipeline cannot take 'much' as 'guidance_scale': TypeErr"),
        ({"max_sequence_length": 5000}, "model.call.max_sequence_length: FluxPipeline cannot take 5000"),
        ({"prompt": 3}, "cannot be called with prompt=3, height=64, width=64: ValueError: `prompt` has to be"),
        ({"height": 0}, "model.call.height: must be a whole number above 0, not 0"),
        ({"height": "64"}, "model.call.height: must be a whole number above 0, not '64'"),
        ({"width": 60}, "model.call: FluxPipeline makes 48 of width 60: give a multiple of 16, such as 48 or 64"),
    ],
)
def test_arguments_that_the_pipeline_does_not_take(call, text, pipes):
    assert text in refused(pipes("flux"), {"pipeline": "flux", "call": call})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("flux", "data.size: FluxPipeline makes 48 of height 60: give a multiple of 16, such as 48 or 64"),
        ("sd15", "have to be divisible by 8 but are 60 and 60.; 60 x 60 must be multiples of 8, such as 64"),
        ("wan", "; 60 x 60 must be multiples of 16, such as 64"),
    ],
)
def test_a_size_that_the_pipeline_does_not_draw(name, text, pipes):
    found = refused(pipes(name), {"pipeline": name, "call": tiny_pipelines.CALLS[name]}, data={"images": ".", "size": 60})
    assert found.startswith("data.size") and text in found


def test_sides_of_a_size_are_height_and_width(pipes):
    result = built(pipes("flux"), {"pipeline": "flux"}, data={"images": ".", "size": [32, 96]})
    assert result.inputs[1]["hidden_states"].shape == (2, 12, 16)
    assert result.inputs[1]["img_ids"].amax(0).tolist() == [0, 1, 5]


# --- where it comes from


def test_a_relative_folder_is_relative_to_the_configuration(pipes, tmp_path, monkeypatch):
    base = pipes("flux")
    (base / "own").mkdir(exist_ok=True)
    (base / "own" / "run.yaml").write_text("model: {pipeline: ../flux}\n")
    monkeypatch.chdir(tmp_path)
    pipe = pipeline_model.open_config_pipeline(load_config(base / "own" / "run.yaml"))
    assert type(pipe).__name__ == "FluxPipeline" and pipe.transformer.training is False


def test_pipelines_that_are_none(home, pipes):
    base = pipes("flux")
    (base / "bare").mkdir(exist_ok=True)
    (base / "notes.txt").write_text("a")
    for name, text in {
        "bare": "'bare' is not a pipeline: it has no model_index.json",
        "flux/transformer": "it is the folder of one model: give its parent, and 'part: transformer'",
        ".": "these in it have one: ",
        "flx": "'flx': no such folder (did you mean 'flux'?)",
        "flux/unet": "no such folder",
        "notes.txt": "is neither a folder nor a checkpoint",
        "it.safetensors": "no such file",
        "nobody/nothing": "is not a folder here, nor a pipeline that the hub gives, or its cache where there is no network: ",
    }.items():
        found = refused(base, {"pipeline": name})
        assert found.startswith("model.pipeline: ") and text in found, name


def test_folders_that_diffusers_cannot_read(pipes, tmp_path):
    base = pipes("flux")

    def broken(change):
        folder = tmp_path / change.__name__
        shutil.copytree(base / "flux", folder)
        change(folder)
        return refused(tmp_path, {"pipeline": folder.name})

    def weights(folder):
        (folder / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"x" * 100)

    def gone(folder):
        shutil.rmtree(folder / "transformer")

    def index(folder):
        (folder / "model_index.json").write_text("{")

    def stranger(folder):
        (folder / "model_index.json").write_text('{"_class_name": "NoPipeline"}')

    def rows(folder):
        (folder / "model_index.json").write_text("[]")

    assert "cannot be opened: OSError: Unable to load weights from checkpoint file" in broken(weights)
    assert "cannot be opened: OSError: Error no file named config.json" in broken(gone)
    assert "model_index.json' is not JSON" in broken(index)
    assert "cannot be opened: AttributeError: module diffusers has no attribute NoPipeline" in broken(stranger)
    assert "must be a mapping of parts" in broken(rows)


LAYERS = [
    (r"down_blocks\.(\d)\.resnets", r"down.\1.block"), (r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample"),
    (r"up_blocks\.(\d)\.resnets", lambda m: f"up.{3 - int(m[1])}.block"), (r"mid_block\.attentions\.0", "mid.attn_1"),
    (r"up_blocks\.(\d)\.upsamplers\.0", lambda m: f"up.{3 - int(m[1])}.upsample"), ("conv_shortcut", "nin_shortcut"),
    (r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}"), (r"to_out\.0", "proj_out"), ("to_([qkv])", r"\1"),
    ("group_norm", "norm"), ("conv_norm_out", "norm_out"),
]  # fmt: skip


@cache
def checkpoint(home):
    """Stable Diffusion in one file, under the names of its first code base."""
    pipe = tiny_pipelines.make("sd15")
    state = {f"model.diffusion_model.{key}": value for key, value in original(pipe.unet, str).items()}
    for key, value in pipe.vae.state_dict().items():
        for pattern, name in LAYERS:
            key = re.sub(pattern, name, key)
        state[f"first_stage_model.{key}"] = value
    for key, value in pipe.text_encoder.state_dict().items():
        state[f"cond_stage_model.transformer.text_model.{key.removeprefix('text_model.')}"] = value
    save_file({key: value.clone().contiguous() for key, value in state.items()}, home / "one.safetensors")


def test_one_file_of_all_models_is_read_by_the_configuration_of_a_folder(home, pipes):
    pipes("sd15", "flux")
    checkpoint(home)
    config = load_config({"model": {"pipeline": "one.safetensors", "config": "sd15"}}, base=home)
    pipe = pipeline_model.open_config_pipeline(config)
    wanted = tiny_pipelines.draw(tiny_pipelines.make("sd15"), "sd15")
    assert torch.equal(tiny_pipelines.draw(pipe, "sd15"), wanted)
    assert "is not in the hub's cache: give 'config', a folder" in refused(home, {"pipeline": "one.safetensors"})
    assert "'config' " not in refused(home, {"pipeline": "one.safetensors", "config": "flux"})
    assert "model.config: 'sd1': no such" in refused(home, {"pipeline": "one.safetensors", "config": "sd1"})
    assert "is for a checkpoint in one file" in refused(home, {"pipeline": "sd15", "config": "sd15"})
    (home / "junk.safetensors").write_bytes(b"hello")
    assert "cannot be opened" in refused(home, {"pipeline": "junk.safetensors", "config": "sd15"})


def test_a_modular_pipeline_of_a_folder(home, pipes):
    from diffusers.modular_pipelines.flux import FluxAutoBlocks

    pipe, made = FluxAutoBlocks().init_pipeline(), tiny_pipelines.make("flux")
    pipe.update_components(**{name: part for name, part in made.components.items() if name in pipe.component_names})
    pipe.save_pretrained(str(home / "modular"), overwrite_modular_index=True)
    result = built(home, {"pipeline": "modular"})
    assert result.inputs[1]["hidden_states"].shape == (2, 16, 16)
    assert "takes no argument 'guidance' (did you mean 'guidance_scale'?)" in refused(
        home, {"pipeline": "modular", "call": {"guidance": 1}}
    )
    assert "makes 48 of height 60" in refused(home, {"pipeline": "modular"}, data={"images": ".", "size": 60})
    (home / "modular" / "text_encoder").rename(home / "elsewhere")
    assert "lacks text_encoder, which could not be loaded" in refused(home, {"pipeline": "modular"})


def test_a_block_of_a_modular_pipeline_is_left_out(home):
    """FLUX.3's folder says that its blocks rewrite prompts, and has no model for that."""
    recipe_twins.save("flux3", home / "flux3")
    given = {"pipeline": "flux3", "part": "transformer", "call": {"text_encoder_out_layers": [1, 2]}}
    assert "lacks prompt_upsampler, prompt_upsampler_processor" in refused(home, given)
    result = built(home, {**given, "options": {"without": ["prompt_upsampler"]}})
    assert [*result.pipeline.blocks.sub_blocks] == ["text_encoder", "vae_encoder", "denoise", "decode"]
    wrong = "has no block 'prompt_upsample' (did you mean 'prompt_upsampler'?); there are prompt_upsampler, text_encoder"
    assert wrong in refused(home, {**given, "options": {"without": "prompt_upsample"}})
    assert "must be names of blocks, not 3" in refused(home, {**given, "options": {"without": 3}})
    tiny_pipelines.save("sd15", home / "sd15")
    assert "StableDiffusionPipeline has no blocks to leave out" in refused(
        home, {"pipeline": "sd15", "options": {"without": ["text_encoder"]}}
    )


def test_a_modular_pipeline_by_its_name(home, monkeypatch):
    recipe_twins.save("flux3", home / "named")

    def fetched(name, file, revision=None):
        assert (name, file, revision) == ("somebody/flux3", "modular_model_index.json", None)
        return str(home / "named" / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetched)
    pipe = open_pipeline("somebody/flux3", options={"without": ["prompt_upsampler"]})
    assert type(pipe).__name__ == "Flux3ModularPipeline" and pipe.transformer.config.in_channels == 16


def test_a_layer_in_four_bits_keeps_the_dtype_of_its_bias():
    """By its first parameter of floats a model tells the dtype in which its pipeline computes."""
    pytest.importorskip("bitsandbytes")
    model = tiny_pipelines.make("qwen_image").transformer.to(torch.bfloat16)
    before = model.img_in.bias.detach().clone()
    quantize_part(model, "nf4")
    assert {p.dtype for p in model.parameters() if p.is_floating_point()} == {torch.bfloat16}
    assert model.dtype == torch.bfloat16 and torch.equal(model.img_in.bias, before)


def test_all_models_are_of_one_dtype_whatever_they_were_saved_in(home):
    half = tiny_pipelines.make("sd15")
    for part in (half.unet, half.vae, half.text_encoder):
        part.to(torch.bfloat16)
    half.save_pretrained(home / "half")
    for dtype in (None, "bfloat16"):
        result = built(home, {"pipeline": "half"}, dtype=dtype)
        found = {part.dtype for part in (result.pipeline.unet, result.pipeline.vae, result.pipeline.text_encoder)}
        assert found == {torch.float32 if dtype is None else torch.bfloat16} == {result.inputs[0][0].dtype}


def test_options_and_devices_that_a_pipeline_does_not_have(pipes):
    base = pipes("flux")
    assert "has no option 'varient' (did you mean 'variant'?)" in refused(base, {"pipeline": "flux", "options": {"varient": 1}})
    assert "no such modeling files" in refused(base, {"pipeline": "flux", "options": {"variant": "fp16"}})
    assert "device: a pipeline is called once" in refused(base, {"pipeline": "flux"}, device="meta")


def test_build_gives_the_model_alone(pipes):
    model = build(load_config({"model": {"pipeline": "flux"}, **SIZED}, base=pipes("flux")))
    assert type(model) is diffusers.FluxTransformer2DModel


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({"pipeline": "flux", "timm": "resnet18"}, "one of 'timm', 'diffusers', 'call', 'pipeline'; found 'timm' and 'pip"),
        ({"pipeline": 3}, "model.pipeline: must be text, not 3"),
        ({"pipeline": "flux", "call": "a:b"}, "model.call: must be a mapping of the arguments"),
        ({"pipeline": "flux", "part": []}, "model.part: must be the name of a model of the pipeline, or a list of names"),
        ({"pipeline": "flux", "part": ""}, "model.part: must be the name"),
        ({"pipeline": "flux", "prt": "unet"}, "unknown key 'prt' (did you mean 'part'?)"),
        ({"pipeline": "flux", "quantize": "int4"}, "model.quantize: must be one of int8, nf4, not 'int4'"),
        ({"timm": "resnet18", "part": "unet"}, "model.part: is a key beside 'pipeline', and this is a model of 'timm'"),
        ({"call": "a:b", "quantize": "int8"}, "model.quantize: is a key beside 'pipeline'"),
    ],
)
def test_keys_that_do_not_go_together(model, text, pipes):
    assert text in refused(pipes("flux"), model)


# --- quantised


@pytest.mark.slow
@pytest.mark.parametrize(("how", "library"), [("int8", "torchao"), ("nf4", "bitsandbytes")])
def test_a_quantised_base_is_frozen_and_saved(how, library, pipes, tmp_path):
    pytest.importorskip(library)
    result = rewritten(pipes("flux"), {"pipeline": "flux", "quantize": how}, **SIZED)
    pipe, full = result.pipeline, tiny_pipelines.draw(tiny_pipelines.make("flux"), "flux")
    linear = [layer for layer in pipe.transformer.modules() if isinstance(layer, torch.nn.Linear)]
    assert linear and all(map(is_quantised, linear))
    assert not any(map(is_quantised, pipe.text_encoder.modules()))
    assert not any(parameter.requires_grad for parameter in pipe.transformer.parameters())
    drawn = tiny_pipelines.draw(pipe, "flux")
    assert 0 < (drawn - full).abs().max() < 0.5
    fxplug.save(result.module, tmp_path / "out")
    pipe.transformer = fxplug.load(tmp_path / "out", allow=[library])
    assert torch.equal(tiny_pipelines.draw(pipe, "flux"), drawn)


@pytest.mark.parametrize(("how", "library"), [("int8", "torchao"), ("nf4", "bitsandbytes")])
def test_a_library_that_is_not_there_is_named_with_how_to_install_it(how, library, pipes, monkeypatch):
    monkeypatch.setitem(sys.modules, {"int8": "torchao.quantization", "nf4": "bitsandbytes.nn"}[how], None)
    assert re.search(rf"model.quantize: {how} needs {library}, .*: pip install {library}$",
                     refused(pipes("flux"), {"pipeline": "flux", "quantize": how}))


def test_layers_that_a_model_keeps_in_float32_stay_so(tmp_path):
    """Wan's code asks for the dtype of its time embedding; nf4 leaves it, and the traced part has the model's own dtype."""
    tiny_pipelines.save("wan", tmp_path / "wan")
    wanted = {"pipeline": str(tmp_path / "wan"), "call": {"num_frames": 1, "height": 64, "width": 64}, "quantize": "nf4"}
    config = load_config({"model": wanted, "dtype": "bfloat16"})
    built = pipeline_model.build_pipeline_model(config)
    model, (args, kwargs) = built.module, built.inputs
    kept = [name for name, p in model.named_parameters() if p.dtype == torch.float32]
    assert {name.split(".")[-2] for name in kept if "time_embedder" in name} == {"linear_1", "linear_2"}
    assert not any("attn" in name and name.endswith("weight") and "norm" not in name for name in kept)
    part = fxplug.pipeline_part(fxplug.trace(model, args, kwargs), model)
    assert part.dtype == model.dtype == torch.bfloat16
