"""The errors that the guides quote are those that are printed: each is provoked, and its text held to the page."""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import re
import time
from datetime import timedelta
from pathlib import Path

import diffusers
import processes
import pytest
import small
import test_after_trace as after
import test_parallel as parallel
import test_parallel_pipelines as pictures
import test_parallel_rows as rows
import test_parallel_training as training
import test_parallel_values as values
import test_pipefusion as pipefusion
import test_reparallelize as again
import torch
import torch.distributed as dist
import zoo
from accelerate import cpu_offload
from runs import launched
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import prune

import fxplug
from fxplug.blocks import Block
from fxplug.parallel.runtime.mesh import fill_degrees
from fxplug.parallel.runtime.pretended import run_simulated

ROOT = Path(__file__).parents[1]
LORA = {"at": "head", "rank": 2}


def quoted(page):
    """The texts in the columns "what is printed" of a page, each as `SpecError: what it says`."""
    for table in re.findall(r"(?:^\|.*\n)+", (ROOT / page).read_text("utf-8"), re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]
        if "what is printed" in head:
            said = (row[head.index("what is printed")].replace(r"\|", "|") for row in rows)
            yield from (quote for text in said for quote in re.findall(r"`((?:\w+Error|CodeInGraph): [^`]+)`", text))


PARALLEL, TRACED, MET = (set(quoted(f"docs/{page}.md")) for page in ("guides/parallel", "guides/tracing", "reference/errors"))


def shown(error):
    return f"{type(error).__name__}: {error}"


def quote_of(text, quotes=PARALLEL):
    """The quote that a text is, None where the page has none; `...` in a quote is any text, and a page has it in one line."""
    texts = {quote: ".*".join(map(re.escape, quote.split("..."))) for quote in quotes}
    line = " ".join(text.split())
    return next((quote for quote, pattern in texts.items() if re.fullmatch(pattern, line)), None)


def own(**ways):
    """A diffusion transformer that no library has, as it is split, the plan, and its inputs."""
    gm, inputs = parallel.own("sdpa"), parallel.own_inputs()
    plan = fxplug.parallel_plan(gm, inputs, **ways or {"ulysses": 2})
    return fxplug.parallelize(gm, plan), plan, inputs


def plan(**given):
    fxplug.parallel_plan(parallel.own("sdpa"), parallel.own_inputs(), **given)


def call_with_few_tokens():
    new, plan, _ = own()
    run_simulated(plan.ways, lambda rank: new(*parallel.own_inputs(1, 2, 2)))


def call_with_other_inputs():
    new, plan, (x, *rest) = own()
    run_simulated(plan.ways, lambda rank: new(x + rank, *rest))


def call_for_another_size():
    plan, new = pictures.parallel("pixart", ulysses=2)
    pictures.drawn(plan, pictures.case("pixart")[0], new, size=(48, 32))


def split_without_attention():
    fxplug.parallel_plan(fxplug.trace(nn.Linear(3, 3), torch.randn(2, 3)), torch.randn(2, 3), ulysses=2)


def split_a_video_vae():
    (case,) = (case for case in zoo.cases("diffusers/") if case.name == "diffusers/AutoencoderKLAllegro")
    args, kwargs = case.inputs(batch=1)
    fxplug.parallel_plan(fxplug.trace(case.build(), args, kwargs).eval(), args, kwargs, rows=2)


def train_where_no_plan_is():
    norm = small.Call(lambda x, norm: x + norm(x.mean(1))[:, None], nn.BatchNorm1d(16))
    _, new = values.parallel(values.traced(lambda: values.Tokens(norm), values.x()), values.x(1), ulysses=2)
    new.train()


def apply_after_the_plan():
    gm = parallel.own("sdpa")
    plan = fxplug.parallel_plan(gm, parallel.own_inputs(), ulysses=2)
    fxplug.parallelize(fxplug.apply(gm, fxplug.load_pass("lora", **LORA)), plan)


def apply_to_a_loaded_one(folder):
    fxplug.save(again.split(again.traced(), {"batch": 2}), folder / "new")
    fxplug.apply(fxplug.load(folder / "new"), again.lora())


def call_with_other_rows():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), small.Call(rows.halved_and_repeated))
    gm = fxplug.trace(model, torch.randn(1, 3, 16, 16))
    plan = fxplug.parallel_plan(gm, torch.randn(1, 3, 16, 16), rows=2)
    other = torch.randn(1, 3, 17, 16)
    run_simulated(plan.ways, lambda rank: plan.written(other))


def begin_guidance_late():
    found = pipefusion.made(2, 3)
    x, now = pipefusion.inputs()
    with torch.no_grad():
        for t in (900.0, 700.0, 500.0, 500.0):
            found(x, torch.full_like(now, t))


def draw_by_a_scheduler_that_looks_at_all():
    pipe, one = pipefusion.with_pixart(diffusers.DDIMScheduler(thresholding=True), overlap=True)

    def run(rank):
        mine = copy.copy(pipe)
        mine.scheduler = copy.deepcopy(pipe.scheduler)
        mine.transformer = one.with_options(links=pipefusion.links())
        pipefusion.paint(mine)

    run_simulated({"stages": 2, **fill_degrees({})}, run)


def steps(**given):
    fxplug.pipefusion(pipefusion.own(), pipefusion.inputs(), **{"patches": 2, **given})


# a piece of each quote, and what provokes it in this process
HERE = {
    "cannot be split over 32 processes": lambda folder: plan(ulysses=32),
    "1 samples ('hidden_states'": lambda folder: pictures.parallel("flux", batch=2, ulysses=2),
    "1 tokens (dimension 2": lambda folder: call_with_few_tokens(),
    "'if self.height != height": lambda folder: call_for_another_size(),
    "no node 'flaten'": lambda folder: plan(ulysses=2, split={"flaten": 1}),
    "SpecError: nothing of this model can be split along 'sequence': no attention": lambda folder: split_without_attention(),
    "is torch's MultiheadAttention": lambda folder: values.parallel(
        values.traced(values.packed, values.x()), values.x(), ulysses=2
    ),
    "is torch's TransformerEncoderLayer": lambda folder: values.parallel(
        values.traced(lambda: values.encoder(0.1), values.x(), training=True), values.x(), batch=2
    ),
    "autoencoder_kl_allegro.py": lambda folder: split_a_video_vae(),
    "no graph for training": lambda folder: train_where_no_plan_is(),
    "a parallel pass is not applied with apply": lambda folder: fxplug.apply(
        parallel.own("sdpa"), fxplug.load_pass("sequence_parallel", ulysses=2)
    ),
    "is parallel already": lambda folder: fxplug.parallel_plan(own()[0], parallel.own_inputs(), ulysses=2),
    "is for another graph": lambda folder: apply_after_the_plan(),
    "was loaded, or changed": apply_to_a_loaded_one,
    "cannot be split as before": lambda folder: fxplug.apply(
        again.split(again.traced(), {"batch": 2}), fxplug.load_pass(again.CONDITION)
    ),
    "there is no process group": lambda folder: own()[0](*parallel.own_inputs()),
    "the input 0 of process 1": lambda folder: call_with_other_inputs(),
    "cannot be cut into 99 stages": lambda folder: steps(stages=99),
    "correct=2 needs": lambda folder: steps(correct=2),
    "no input 'timestp'": lambda folder: steps(clock="timestp"),
    "must be a multiple of 8, as in the plan": lambda folder: call_with_other_rows(),
    "two calls at timestep 500": lambda folder: begin_guidance_late(),
    "the scheduler's step": lambda folder: draw_by_a_scheduler_that_looks_at_all(),
    "computes no gradients": lambda folder: pipefusion.made(2, 3).train(),
    "runs it in steps": lambda folder: fxplug.in_steps(parallel.own("sdpa"), parallel.own_inputs()),
}


# what two processes or a training are needed for: the test at the end
PROCESSES = (
    "the plan is for 3 processes", "the mesh has 2 processes", "process 0 has a plan for ulysses 2", "the weight 'position'",
    "keeps only its part of some weights", "process 1 has died", "the processes do not do the same things",
    "4 processes share each sample", "draws random numbers alth",
    "train.parallel: nothing of this model", "processes 0 and 1 share each sample",
)  # fmt: skip
READ = ("unknown key 'ulyses'",)  # tests/test_parallel_training.py provokes it


@pytest.mark.slow
def test_each_quote_is_provoked():
    assert [quote for quote in PARALLEL if not any(piece in quote for piece in (*HERE, *PROCESSES, *READ))] == []


@pytest.mark.slow
@pytest.mark.parametrize("piece", HERE)
def test_an_error_of_one_process_reads_as_the_page_says(piece, tmp_path):
    with pytest.raises(fxplug.FxplugError) as error:
        HERE[piece](tmp_path)
    assert piece in str(quote_of(shown(error.value))), shown(error.value)


# --- what a traced module cannot do


def traced():
    return fxplug.trace(after.net(), after.X)


def changed(function):
    return lambda: function(traced())


def unet(function):
    """With a traced UNet."""
    return lambda: function(copy.deepcopy(small.unet().gm))


def halved(gm):
    cast = {k: v.half() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in small.unet().kwargs.items()}
    gm.half()(*(x.half() if x.is_floating_point() else x for x in small.unet().args), **cast)


def under_autocast(gm):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gm(*small.unet().args, **small.unet().kwargs)


def tied():
    return fxplug.trace(after.Twice(), torch.tensor([[1, 2]]))


def assigned():
    gm = tied()
    gm.load_state_dict({key: value.clone() for key, value in gm.state_dict().items()}, assign=True)


def given_another():
    gm = tied()
    gm.head.weight = nn.Parameter(torch.randn(9, 4))
    gm(torch.tensor([[1, 2]]))


def of_a_pipeline(gm):
    fxplug.pipeline_part(gm, small.unet().model).set_attn_processor({})


AFTER = {
    "cannot be called by itself": changed(lambda gm: gm.blocks[0](after.X)),
    "'blocks.0.register_forward_hook'": changed(lambda gm: gm.blocks[0].register_forward_hook(print)),
    "'blocks.0.weight_orig'": changed(lambda gm: prune.l1_unstructured(gm.blocks[0], "weight", 0.5)),
    "'blocks.0.compile'": changed(lambda gm: gm.blocks[0].compile()),
    "to set it to 3.0": changed(lambda gm: setattr(gm, "scale", 3.0)),
    "'scale' of a traced Net cannot be deleted": changed(lambda gm: delattr(gm, "scale")),
    "'blocks.0.forward'": changed(lambda gm: setattr(gm.blocks[0], "forward", print)),
    "is replaced by Identity": changed(lambda gm: gm.blocks.__setitem__(0, nn.Identity())),
    "'blocks.1' of a traced ModuleList cannot be deleted": changed(lambda gm: gm.blocks.__delitem__(1)),
    "load_state_dict(assign=True)": assigned,
    "GuardError: 'table.weight' and 'head.weight'": given_another,
    "'method' is a method of Block": lambda: fxplug.trace(after.Block().eval(), after.X).method(after.X),
    "now it is torch.float16": unet(halved),
    "'dtype = hidden_states.dtype'": unet(under_autocast),
    "cannot be pickled": changed(pickle.dumps),
    "'set_attn_processor' is a method of": unet(lambda gm: gm.set_attn_processor({})),
    "'set_attn_processor' of the traced": unet(of_a_pipeline),
    "attn1.processor'": unet(lambda gm: setattr(gm.mid_block.attentions[0].transformer_blocks[0].attn1, "processor", print)),
}


@pytest.mark.slow
@pytest.mark.parametrize("piece", AFTER)
def test_an_error_of_a_traced_module_reads_as_the_page_says(piece):
    with pytest.raises((fxplug.FxplugError, AttributeError, TypeError, NotImplementedError)) as error:
        AFTER[piece]()
    assert piece in str(quote_of(shown(error.value), TRACED)), shown(error.value)


def test_each_quote_about_a_traced_module_is_provoked():
    assert [quote for quote in TRACED if not any(piece in quote for piece in AFTER)] == []


def test_what_the_page_says_of_the_rest():
    gm = traced()
    for call in (lambda: gm.blocks[0].fuse(), lambda: gm.blocks.append(nn.Identity())):
        with pytest.raises(AttributeError, match="object has no attribute"):
            call()
    assert not isinstance(gm.blocks[0], after.Block) and gm.blocks[0].classes == ("Block",)
    assert small.unet().gm.attn_processors == {}
    model, images = small.plain_vit().model, small.plain_vit().args
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(small.plain_vit().gm(*images), model(*images))


# --- what users meet most


def vit():
    """A traced ViT whose images are 32 pixels, and LoRA of rank 4 on its attention."""
    return small.plain_vit().gm, fxplug.load_pass("lora", at="blocks.*.attn.*", rank=4)


def slots(**options):
    """The same with two slots."""
    return fxplug.apply(vit()[0], fxplug.load_pass("lora", at="blocks.*.attn.*", **{"rank": 4, "slots": 2, **options}))


def ink(folder):
    """An adapter file for it."""
    fxplug.save_adapter(fxplug.apply(*vit()), folder / "ink.safetensors", as_="kohya")
    return folder / "ink.safetensors"


def file_of(path, layer, rows, columns):
    down, up = torch.randn(4, columns), torch.randn(rows, 4)
    save_file({f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}, path)
    return path


def use_for_two(folder):
    gm = slots()
    small.load_and_use(gm, ink(folder), "ink")
    gm.adapters.use(["ink", None])
    gm(torch.randn(4, 3, 32, 32))


def load_a_third(folder):
    adapters, file = slots().adapters, ink(folder)
    for name in ("ink", "film", "wash"):
        adapters.load(name, file)


def traced_function(function, *x, **options):
    return fxplug.trace(small.Call(function, nn.Linear(4, 4)).eval(), *(x or (torch.randn(2, 4),)), **options)


class Scaled(nn.Module):
    def forward(self, x, scale=1.0):
        return x * 2 if scale > 1 else x * scale


class Detached(Block):
    neutral = True

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    @classmethod
    def at(cls, site):
        return cls()

    def forward(self, y):
        return y + self.gate.detach()


def on_mlp(name, path="blocks.0.mlp", **keys):
    return fxplug.Pass(name, [fxplug.Rule(fxplug.Match(path=path), **keys)])


def replaced_twice():
    first, second = (on_mlp(name, place="replace", args=["x"]) for name in ("first", "second"))
    fxplug.apply(fxplug.apply(vit()[0], first), second)


def verify_what_detaches():
    gm = vit()[0]
    fxplug.verify(gm, fxplug.apply(gm, on_mlp("detached", use=Detached, args=["y"])), *small.plain_vit().args, compile=False)


def fit(folder, images, times=1):
    data = [{"image": image, "label": n} for n, image in enumerate(images)]
    for _ in range(times):
        loader = torch.utils.data.DataLoader(data, batch_size=2)
        fxplug.Trainer(fxplug.apply(*vit()), "classify", loader, steps=1, out="run", quiet=True).fit()


def save_with_a_hook(folder):
    gm = fxplug.apply(*vit())
    gm.register_forward_hook(print)
    fxplug.save(gm, folder / "hooked")


def save_a_local_class(folder):
    class Local(nn.Module):
        def forward(self, x):
            return x + 1

    fxplug.save(fxplug.trace(nn.Sequential(nn.Linear(4, 4), Local()), torch.randn(2, 4), leaf=["1"]), folder / "local")


OWN = """
from fxplug.blocks import Block
class Gate(Block):
    neutral = True
    @classmethod
    def at(cls, site):
        return cls()
    def forward(self, y):
        return y * 1
"""


def load_an_own_block(folder):
    (folder / "own_gate.py").write_text(OWN)
    own_gate = importlib.import_module("own_gate")
    fxplug.save(fxplug.apply(vit()[0], on_mlp("gate", use=own_gate.Gate, args=["y"])), folder / "own")
    fxplug.load(folder / "own")


MEETINGS = {
    "no pass named 'lroa'": lambda folder: fxplug.load_pass("lroa"),
    "unknown key 'pases'": lambda folder: fxplug.load_config({"pases": [], "model": "resnet18"}),
    "timm has no model": lambda folder: fxplug.rewrite({"model": {"timm": "vit_tny"}, "inputs": {"x": [1]}, "passes": []}),
    "apply takes a traced module": lambda folder: fxplug.apply(small.plain_vit().model, vit()[1]),
    "no adapter 'ink'": lambda folder: slots().adapters.use("ink"),
    "2 entries but the batch has 4": use_for_two,
    "all 2 slots": load_a_third,
    "a rank above rank_max=2": lambda folder: slots(rank=2).adapters.load("ink", ink(folder)),
    "bottleneck cannot be merged": lambda folder: fxplug.merge(
        fxplug.apply(vit()[0], fxplug.load_pass("bottleneck", at="blocks.*.mlp"))
    ),
    "branches on a value": lambda folder: traced_function(lambda x, layer: x * 2 if x.sum() > 0 else layer(x)),
    "(numpy)": lambda folder: traced_function(lambda x, layer: x.detach().numpy()),
    "calls Tensor.backward()": lambda folder: traced_function(lambda x, layer: (layer(x).sum().backward(), x)[1]),
    "does not take these example inputs": lambda folder: fxplug.trace(small.plain_vit().model),
    "is offloaded (AlignDevicesHook)": lambda folder: fxplug.trace(
        cpu_offload(copy.deepcopy(small.plain_vit().model), execution_device="cpu"), small.plain_vit().args
    ),
    "argument 'scale' was 1.0": lambda folder: fxplug.trace(Scaled().eval(), torch.randn(2))(torch.randn(2), scale=2.0),
    "now it is 3.0": lambda folder: traced_function(lambda x, layer: layer(x))(3.0),
    "argument 'x' was torch.float32": lambda folder: traced_function(
        lambda x, layer: x * 2 if x.dtype == torch.float32 else x
    )(torch.randn(2, 4).half()),
    "the class does not match": lambda folder: fxplug.find(vit()[0], fxplug.load_pass("lora", at="blocks.*.norm1")),
    "expected ==1": lambda folder: fxplug.find(
        vit()[0], on_mlp("one", "blocks.*.mlp", use=Detached, args=["y"], expect="1")
    ),
    "is replaced by pass 'first'": lambda folder: replaced_twice(),
    "no gradient reaches": lambda folder: verify_what_detaches(),
    "the loss is nan": lambda folder: fit(folder, torch.full((4, 3, 32, 32), torch.nan)),
    "images are [48, 48]": lambda folder: fit(folder, torch.randn(4, 3, 48, 48)),
    "has a run already": lambda folder: fit(folder, torch.randn(4, 3, 32, 32), times=2),
    "the module has hooks": save_with_a_hook,
    "cannot be imported from a file": save_a_local_class,
    "allow=['own_gate']": load_an_own_block,
    "layers are not in the graph": lambda folder: slots().adapters.load(
        "other", file_of("other.safetensors", "foo.layer", 96, 96)
    ),
    "have other shapes": lambda folder: slots().adapters.load(
        "wide", file_of("wide.safetensors", "blocks.0.attn.qkv", 288, 200)
    ),
    "have no slots here": lambda folder: slots().adapters.load(
        "mlp", file_of("mlp.safetensors", "blocks.0.mlp.fc1", 384, 96)
    ),
}


@pytest.mark.parametrize("piece", MEETINGS)
def test_an_error_that_users_meet_reads_as_the_page_says(piece, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(fxplug.FxplugError) as error:
        MEETINGS[piece](tmp_path)
    assert piece in str(quote_of(shown(error.value), MET)), shown(error.value)


def test_each_quote_of_what_users_meet_is_provoked():
    assert len(MEETINGS) == 30 and [quote for quote in MET if not any(piece in quote for piece in MEETINGS)] == []


# --- several processes


def _in_two(rank, folder):
    gm, inputs = parallel.own("sdpa"), parallel.own_inputs()
    other = fxplug.parallel_plan(gm, inputs, **({"ulysses": 2} if rank == 0 else {"ring": 2}))
    ulysses, tensor = (fxplug.parallel_plan(gm, inputs, **{way: 2}) for way in ("ulysses", "tensor"))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ring",))
    lora = fxplug.load_pass("lora", **LORA)
    changed = copy.deepcopy(gm)
    with torch.no_grad():
        next(changed.parameters()).add_(rank)
    tries = [
        lambda: fxplug.parallelize(gm, fxplug.parallel_plan(gm, inputs, ulysses=3))(*inputs),
        lambda: fxplug.parallelize(gm, ulysses, mesh=mesh),
        lambda: fxplug.parallelize(gm, other)(*inputs),
        lambda: fxplug.parallelize(changed, fxplug.parallel_plan(changed, inputs, ulysses=2, check=False))(*inputs),
        lambda: fxplug.apply(fxplug.parallelize(gm, tensor), lora),
    ]
    said = []
    for each in tries:
        with pytest.raises(fxplug.FxplugError) as error:
            each()
        said.append(shown(error.value))
    torch.save(said, f"{folder}/{rank}.pt")


def _one_looks(rank, folder):
    new = fxplug.pipefusion(pipefusion.own(), pipefusion.inputs(), stages=2, patches=3, check=False)
    x, now = pipefusion.inputs()
    with torch.no_grad(), pytest.raises(fxplug.GuardError) as error:
        for step, t in enumerate((900.0, 700.0, 500.0, 300.0)):
            if step == 3 and rank == 1:
                x.mean().item()
            x = x - new(x, torch.full_like(now, t)) / 4
    torch.save([shown(error.value)], f"{folder}/looks{rank}.pt")


def _one_dies(folder):
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    new, _, inputs = own()
    new(*inputs)
    if dist.get_rank() == 1:
        os._exit(3)
    time.sleep(1)
    with pytest.raises(fxplug.GuardError) as error:
        new(*inputs)
    torch.save([shown(error.value)], f"{folder}/dead.pt")


@pytest.mark.slow
def test_the_errors_of_several_processes_read_as_the_page_says(tmp_path):
    processes.group(_in_two, str(tmp_path))
    said = torch.load(tmp_path / "0.pt")
    assert said == torch.load(tmp_path / "1.pt")
    processes.group(_one_looks, str(tmp_path))
    assert torch.load(tmp_path / "looks0.pt") == torch.load(tmp_path / "looks1.pt")
    said += torch.load(tmp_path / "looks0.pt")
    processes.ended(_one_dies, str(tmp_path), folder=tmp_path, world=2)
    said += torch.load(tmp_path / "dead.pt")
    (tmp_path / "training").mkdir()
    refused = launched(tmp_path / "training", training.run, *((n, changed, {}) for n, (changed, _) in training.WRONG.items()))
    said += refused[0].values()
    found = {text: quote_of(text) for text in said}
    assert [text for text, quote in found.items() if quote is None] == []
    assert [piece for piece in PROCESSES if not any(piece in quote for quote in found.values())] == []
