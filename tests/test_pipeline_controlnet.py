"""`denoise` on a stock pipeline whose denoiser has a ControlNet from a pass: the pictures of `data.conditions` go into it."""

from __future__ import annotations

import diffusers
import pytest
import runs
import tiny_pipelines as tiny
import torch
from safetensors.torch import load_file
from test_pipeline_caches import loader, picture, pictures
from test_pipeline_denoise import SIZE, batch_of, inpainting

import fxplug
from fxplug.core.errors import SpecError, TrainError
from fxplug.pipelines.denoiser_call import example_call
from fxplug.training.adapter_output import check_adapter, list_written_passes
from fxplug.training.network_output import find_frozen_network, find_network
from fxplug.training.random_draws import Draws
from fxplug.training.tasks.added_inputs import AddedInputs
from fxplug.training.tasks.pipeline_denoise import PipelineDenoise
from fxplug.training.tasks.task import TaskInfo

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # numpy's, of some schedulers
EMBEDDING = {"conditioning_embedding_out_channels": [4, 8, 8, 16]}
CONFIG = """
model: {pipeline: tiny, part: unet}
passes: [controlnet: {options: {conditioning_embedding_out_channels: [4, 8, 8, 16]}}]
train:
  task: {denoise: {samples: 1, sample_steps: 2, dropout: 0.3, guidance: 3}}
  steps: 4
  batch: 2
  lr: 1.0e-2
  log: {samples: 0, tensorboard: false}
data: {images: data, conditions: edges, size: 64, flip: true, cache: cache}
"""


@pytest.fixture(autouse=True, scope="module")
def shared():
    """The runs of this file have what is traced and seen of a tiny pipeline in common."""
    with runs.sharing():
        yield


def random_network(unet, seed=0):
    """A ControlNet none of whose weights are zero, so that its pictures reach the output."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        made = diffusers.ControlNetModel.from_unet(unet, **EMBEDDING).eval()
        for parameter in made.parameters():
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=2.0)
    return made


def controlled(pipe, network=None):
    """The UNet of a pipeline with a network in its graph, that takes any form of call."""
    seen = runs.observe_once(pipe, {"height": SIZE[0], "width": SIZE[1]})
    given = {"network": network} if network is not None else {"options": EMBEDDING}
    traced = fxplug.trace(pipe.unet, kwargs=example_call(pipe, seen))
    return fxplug.variants(fxplug.apply(traced, fxplug.load_pass("controlnet", **given)), pipe.unet)


def set_up(task, module, batch):
    task.setup(module, TaskInfo(SIZE, examples=lambda count: {k: v[:count] for k, v in batch.items()}, sizes=(SIZE,)))
    return task


def both_of(*captions):
    """Samples with a black picture, a white one, and so on."""
    condition = torch.stack([torch.full((3, *SIZE), float(n % 2)) for n in range(len(captions))])
    return batch_of(*captions, condition=condition)


def frozen_beside(module):
    """The module, of which the network alone trains, as in a run."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.startswith("controlnet."))
    return module


def folders(top, name="sd15"):
    """The folder of a run: pictures, their edges, a tiny pipeline and its configuration."""
    pictures(top, edges=1)
    tiny.save(name, top / "tiny")
    (top / "c.yaml").write_text(CONFIG)
    return top / "c.yaml"


@pytest.mark.slow
def test_the_loss_is_that_of_diffusers_two_models():
    pipe, both = tiny.make("sd15"), both_of("a red ball", "a blue cat on a box")
    network = random_network(pipe.unet)
    module = controlled(pipe, network)
    task = set_up(PipelineDenoise(pipe, samples=0), module, both)
    found = float(task.loss(module, dict(both), Draws(0, 1)).detach())
    draw, one = Draws(0, 1), task.sized.of(SIZE)
    index = one.steps[(draw.uniform(2) * len(one.steps)).long()]
    with torch.no_grad():
        x = task._latents(both, draw, one)
        noise = draw.like(x)
        noisy, losses = one.noise.noisy(x, noise, index), []
        for row, caption in enumerate(both["caption"]):
            call = {"encoder_hidden_states": pipe.encode_prompt(caption, "cpu", 1, False)[0]}
            args = noisy[row : row + 1], index[row : row + 1]
            down, middle = network(*args, **call, controlnet_cond=both["condition"][row : row + 1], return_dict=False)
            got = pipe.unet(*args, **call, down_block_additional_residuals=down, mid_block_additional_residual=middle)[0]
            losses.append((got - noise[row : row + 1]).square().mean())
    assert found == pytest.approx(float(sum(losses) / 2), rel=1e-5)
    other = task.loss(module, {**both, "condition": both["condition"].flip(0)}, Draws(0, 1))
    assert abs(float(other.detach()) - found) > 5e-5 * found


@pytest.mark.slow
@pytest.mark.parametrize("decoded", [True, False])
def test_a_picture_has_the_crop_and_the_flip_of_its_sample(tmp_path, decoded):
    """The conditions are the pictures themselves: what a pass is given is the sample, in [0, 1]."""
    top = pictures(tmp_path)
    for number in range(4):
        picture(tmp_path / "edges" / f"{number}.png", number)
    data = loader(top, conditions="../edges", flip=True, **({"crop": "random"} if decoded else {}))
    data.skip_decoding = None if decoded else lambda item: True
    inputs, flipped = AddedInputs(controlled(tiny.make("sd15")), torch.device("cpu")), set()
    for batch in (batch for epoch in range(3) for batch in data.epoch(epoch)):
        image = batch["image"] if decoded else torch.stack([each.read() for each in batch["image"]])
        flipped |= set(batch["flipped"].tolist())
        assert torch.allclose(inputs.of(batch)["cond"], image / 2 + 0.5, atol=1e-6)
    assert flipped == {True, False}


@pytest.mark.slow
def test_the_sample_is_that_of_diffusers_controlnet_pipeline():
    pipe, both = tiny.make("sd15"), both_of("a red ball", "a blue cat")
    network = random_network(pipe.unet)
    module = controlled(pipe, network)
    task = set_up(PipelineDenoise(pipe, samples=2, sample_steps=2, guidance=3.0), module, both)
    theirs = diffusers.StableDiffusionControlNetPipeline(**pipe.components, controlnet=network, requires_safety_checker=False)
    theirs.set_progress_bar_config(disable=True)
    call = {"num_inference_steps": 2, "guidance_scale": 3.0, "output_type": "pt", "height": SIZE[0], "width": SIZE[1]}
    drawn = task.samples(module)
    for n, caption in enumerate(both["caption"]):
        noise = torch.Generator().manual_seed(n)
        want = theirs(caption, image=both["condition"][n : n + 1], generator=noise, **call).images[0]
        assert torch.allclose(drawn[n], want, atol=1e-5)
    assert pipe.unet is theirs.unet and "forward" not in vars(pipe.unet)
    assert not torch.allclose(drawn, task.draw(module, {**both, "condition": both["condition"].flip(0)}), atol=1e-3)


@pytest.mark.slow
def test_a_run_trains_resumes_and_leaves_a_controlnet_of_diffusers(tmp_path, monkeypatch):
    config = folders(tmp_path)
    run = fxplug.train(config, out=tmp_path / "run", quiet=True)
    said = [line for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines() if "stock pipeline" in line]
    assert "equal" in said[0] if said else "ControlNetModel.from_pretrained" in run.use
    network = diffusers.ControlNetModel.from_pretrained(tmp_path / "run" / "adapter")
    kept = fxplug.load(tmp_path / "run" / "module")
    assert all(torch.equal(value, kept.state_dict()[f"controlnet.cn.{name}"]) for name, value in network.state_dict().items())
    assert any(value.any() for name, value in network.state_dict().items() if name.startswith("controlnet_down_blocks"))
    # the same without a cache, and as a run of two halves
    plain = fxplug.train(config, set=["data.cache=false"], out=tmp_path / "plain", quiet=True)
    fxplug.train(config, set=["train.steps=2", "train.save={every: 1}"], out=tmp_path / "half", quiet=True)
    resumed = fxplug.train(config, set=["train.save={every: 1}"], out=tmp_path / "half", resume=True, quiet=True)
    for other in (plain, resumed):
        weights = load_file(other.out / "adapter" / "diffusion_pytorch_model.safetensors")
        assert weights.keys() == network.state_dict().keys()
        assert all(torch.equal(weights[name], value) for name, value in network.state_dict().items())
    (tmp_path / "edges" / "0.png").unlink()
    picture(tmp_path / "edges" / "0.png", 99)
    changed = fxplug.train(config, out=tmp_path / "changed", quiet=True)
    assert [row["loss"] for row in changed.history] != [row["loss"] for row in run.history]


@pytest.mark.slow
def test_it_trains_on_sdxl_and_from_a_folder(tmp_path):
    config = folders(tmp_path, "sdxl")
    random_network(tiny.make("sdxl").unet).save_pretrained(tmp_path / "cn")
    changes = [f"passes=[{{controlnet: {{network: '{tmp_path / 'cn'}'}}}}]", "train.steps=2"]
    run = fxplug.train(config, set=changes, out=tmp_path / "run", quiet=True)
    before, after = (diffusers.ControlNetModel.from_pretrained(tmp_path / where) for where in ("cn", "run/adapter"))
    assert dict(before.config).keys() == dict(after.config).keys()
    assert all(after.config[key] == value for key, value in before.config.items() if not key.startswith("_"))
    assert not all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    assert "AutoPipelineForText2Image.from_pipe" in run.use
    # a LoRA beside it, which stays as it is: adapter/ has the LoRA
    beside = [f"passes=[{{controlnet: {{network: '{tmp_path / 'cn'}', train: false}}}}, {{lora: {{at: [to_q], rank: 2}}}}]"]
    run = fxplug.train(config, set=[*beside, "train.steps=2"], out=tmp_path / "lora", quiet=True)
    assert "adapter/ in the stock pipeline: equal" in (tmp_path / "lora" / "log.jsonl").read_text()
    assert "load_lora_weights" in run.use and f"ControlNetModel.from_pretrained('{tmp_path / 'cn'}')" in run.use
    assert all(".to_q.lora_" in key for key in load_file(tmp_path / "lora" / "adapter" / "pytorch_lora_weights.safetensors"))


@pytest.mark.slow
def test_what_is_missing_is_said_before_the_training(tmp_path):
    config = folders(tmp_path)
    with pytest.raises(SpecError, match="'cond' to the denoiser, a picture for each sample: set 'conditions'") as error:
        fxplug.train(config, set=["data={images: data, size: 64}"], out=tmp_path / "run", quiet=True)
    assert error.value.path == ("data", "conditions") and not (tmp_path / "run" / "log.jsonl").exists()
    (tmp_path / "edges" / "2.png").unlink()
    with pytest.raises((SpecError, TrainError), match="2.png"):
        fxplug.train(config, out=tmp_path / "run", quiet=True)


@pytest.mark.slow
def test_pictures_of_other_channels_are_refused():
    pipe, both = tiny.make("sd15"), both_of("a red ball")
    module = controlled(pipe)
    with pytest.raises(SpecError, match="have 1 channels, and the input 'cond' of the pass takes 3: give the pass channels: 1"):
        set_up(PipelineDenoise(pipe, samples=0), module, {**both, "condition": both["condition"][:, :1]})


@pytest.mark.slow
def test_a_pipeline_that_needs_a_picture_of_its_own_is_refused():
    pipe, both = inpainting(), both_of("a red ball")
    plain = tiny.make("sd15")
    with pytest.raises(SpecError, match="may need a condition too, .*go into 'cond' of the pass"):
        set_up(PipelineDenoise(pipe, samples=0), controlled(plain), both)


def test_a_pass_that_needs_something_else_is_refused():
    pipe = tiny.make("sd15")
    seen = runs.observe_once(pipe, {"height": SIZE[0], "width": SIZE[1]})
    spec = {"inputs": {"mood": {"shape": [1]}}, "rules": [{"match": {"path": "mid_block"}, "use": "fxplug.blocks:Scale"}]}
    module = fxplug.apply(fxplug.trace(pipe.unet, kwargs=example_call(pipe, seen)), fxplug.load_pass({"name": "mood", **spec}))
    with pytest.raises(SpecError, match="the input 'mood' to the denoiser, and nothing in a pipeline's data is for it"):
        set_up(PipelineDenoise(pipe, samples=0), module, both_of("a red ball"))


@pytest.mark.slow
def test_only_a_controlnet_that_is_all_that_trains_is_one_of_diffusers(recwarn):
    pipe, both = tiny.make("sd15"), both_of("a red ball")
    module = frozen_beside(controlled(pipe))
    assert find_network(module).prefix == "controlnet.cn."
    task = set_up(PipelineDenoise(pipe, samples=0), module, both)
    check_adapter(module, task)
    assert not [w for w in recwarn if "adapter/" in str(w.message)]
    given = frozen_beside(controlled(pipe, random_network(pipe.unet)))  # a module: nobody knows what it was made of
    with pytest.warns(UserWarning, match="adapter/ is not written; .*the configuration of the ControlNetModel is unknown"):
        check_adapter(given, task)
    lora = fxplug.apply(module, fxplug.load_pass("lora", at=["to_q"], rank=2))
    assert find_network(lora) is None
    assert list_written_passes(lora) == ["controlnet", "lora"] and find_frozen_network(lora) is None
    for name, parameter in lora.named_parameters():
        parameter.requires_grad_(name.startswith("lora."))
    assert list_written_passes(lora) == ["lora"] and find_frozen_network(lora).prefix == "controlnet.cn."
