"""The features of `make matrix`: an entry each in `FEATURES`; a new one is one more entry.

A feature takes a `State` (a traced module, its example call, what was done so far) and gives the next. One that `adapts`
changes what is computed and is part of the oracle; the others must leave the result as it is. A feature that is a pass gives
`passes`, and the oracle applies neighbouring ones together.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matrix_models import DEVICE, places, seeded, subject, traced
from matrix_serving import served
from matrix_state import Feature, NotApplicable, State, gradients_of, is_float, target_of
from torch import Tensor, nn

import fxplug
from fxplug.core.ir.containers import map_leaves
from fxplug.lowerings.linear.forms import FORMS
from fxplug.lowerings.regions.fsdp import shard
from fxplug.lowerings.regions.submodules import outline

ADDED = "added_"  # before the names of passes that adapt: some are names of modules
NETWORKS = {"controlnet"}  # whose weights are those of a network that is there already
WEIGHTS = ("lora", "lora_mixed", "lora_slots", "dora", "loha", "lokr", "delta")  # functions of weights
LORAS = ("lora", "lora_mixed", "lora_slots")


def begin(name: str) -> State:
    made = subject(name)
    return State(made, made.gm, made.kwargs)


# --- passes


def number(text: str) -> int:
    return zlib.crc32(text.encode())


def fill(gm: nn.Module, name: str) -> None:
    """Give the parameters of a pass values that depend on their names alone, none of them neutral."""
    with torch.no_grad():
        for key, parameter in gm.named_parameters():
            if not key.startswith(f"{name}.") or not is_float(parameter):
                continue
            random = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number(key))).to(parameter.device)
            flat = parameter.flatten()
            if parameter.numel() < 2 or bool((flat == flat[0]).all()):
                parameter.add_((0.2 * random).to(parameter.dtype))
            else:
                inner = max(1, parameter.numel() // parameter.shape[0]) if parameter.ndim > 1 else 100
                parameter.copy_(random * inner**-0.5)


def made_from(gm: Any) -> Any:
    """What a lowered or parallel module was made from, where passes go."""
    gm = gm.meta.get("source", gm)
    plan = gm.meta.get("plan")
    return plan.unsplit(gm) if plan is not None and plan.is_of(gm) else gm


def applied(state: State, passes: list[Any]) -> State:
    return replace(state, gm=seeded(lambda: fxplug.apply(state.gm, *passes)))


def relowered(state: State) -> State:
    return replace(state, gm=fxplug.lower(state.gm, **{"fuse": None, **state.lowered})) if state.lowered else state


def adapter(name: str, what: str, file: str = "", more: Callable[[State], State] | None = None, **params: Any) -> Feature:
    """A pass of the folder under the feature's name: its weights are filled, then `more` is done."""
    file = file or name

    def passes(state: State) -> list[Any]:
        if missing := sorted(set(needs) - places(state.subject.name).keys()):
            raise NotApplicable(f"this model has no two values of one shape, or no such module, for {missing[0]}")
        if file == "dora" and "merge_fold" in state.done:
            raise NotApplicable("DoRA divides by the norm of the weights, which are others once something was merged")
        own = {**params, **places(state.subject.name).get(file, {}), **state.subject.options.get(file, {})}
        own = {key: value(state) if callable(value) else value for key, value in own.items()}
        return [fxplug.load_pass(file, name=ADDED + name, **own)]

    def after(state: State) -> State:
        if file not in NETWORKS:
            fill(made_from(state.gm), ADDED + name)
        return more(state) if more else state

    if file in WEIGHTS:
        params = {"at": partial(layers, file), **params}
    needs = {"skip", "replace"} & {file}

    def do(state: State) -> State:
        return after(applied(state, passes(state)))

    return Feature(name, what, do, True, passes, after)


def layers(file: str, state: State) -> list[str]:
    """Where a pass acts: all layers of the model but the last one and one that is replaced, which other features change."""
    gm, kept = made_from(state.gm), {places(state.subject.name).get("replace", {}).get("at")}
    with contextlib.suppress(fxplug.FxplugError):  # there is none, or it is a new one already
        kept |= {site.path for site in fxplug.find(gm, fxplug.load_pass("head", size=1))}
    found = fxplug.find(gm, fxplug.load_pass(file, name="looked_for", at="**"))
    return sorted({site.path.partition("@")[0] for site in found} & dict(state.subject.model.named_modules()).keys() - kept)


@cache
def adapter_file(name: str, seed: int) -> dict[str, Tensor]:
    """A LoRA for a model's layers, as a state dict in fxplug's layout."""
    gm = fxplug.apply(traced(name)[1], fxplug.load_pass("lora", at=layers("lora", begin(name)), rank=2))
    fill(gm, "lora")
    with torch.no_grad():
        for key, parameter in gm.named_parameters():
            if key.startswith("lora."):
                parameter.mul_(seed).add_(0.05 * (seed - 1))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.safetensors"
        fxplug.save_adapter(gm, file, as_="fxplug")
        from safetensors.torch import load_file

        return load_file(file)


def head_size(state: State) -> int:
    """Another number of classes; of a model whose result is cut from patches the number that it has."""
    (path,) = {site.path for site in fxplug.find(made_from(state.gm), fxplug.load_pass("head", size=1))}
    return 6 if hasattr(state.subject.model, "num_classes") else state.subject.model.get_submodule(path).weight.shape[0]


def with_adapters(use: Any, state: State) -> State:
    """Two adapters in the slots, and how they are used."""
    for seed, name in enumerate("ab", 1):
        with tempfile.TemporaryDirectory() as folder:
            from safetensors.torch import save_file

            save_file(adapter_file(state.subject.name, seed), file := Path(folder) / "a.safetensors")
            state.gm.adapters.load(name, file)
    state.gm.adapters.use(use)
    return state


def control_network(state: State) -> nn.Module:
    import unets

    if "quantised" in state.done:
        raise NotApplicable("diffusers copies no packed weights into a ControlNet: quantise the two")
    try:
        network = unets.control(state.subject.model)
    except ValueError as error:  # ControlNetModel has not the blocks of every UNet
        raise NotApplicable(f"diffusers makes no ControlNet of this model: {error}") from error
    return network.to(DEVICE)  # type: ignore[no-any-return]


def of_a_unet(feature: Feature, given: Callable[[State], dict[str, Any]]) -> Feature:
    """A feature that only UNets have, which adds inputs."""

    def with_inputs(state: State) -> State:
        return replace(state, kwargs={**state.kwargs, **given(state)})

    def passes(state: State) -> list[Any]:
        if "sample" not in state.kwargs or not hasattr(state.subject.model, "up_blocks"):
            raise NotApplicable("it is made for UNets of diffusers")
        assert feature.passes is not None
        return feature.passes(state)

    def after(state: State) -> State:
        return with_inputs(feature.after(state))

    def do(state: State) -> State:
        return after(applied(state, passes(state)))

    return replace(feature, do=do, passes=passes, after=after)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(5)).to(DEVICE, dtype)


def picture(state: State) -> dict[str, Any]:
    n, _, h, w = state.kwargs["sample"].shape
    return {"cond": random(n, 3, 8 * h, 8 * w, dtype=state.kwargs["sample"].dtype)}


def image_shape(state: State) -> list[Any]:
    return ["n", 3, state.subject.model.config.cross_attention_dim]


def image_tokens(state: State) -> dict[str, Any]:
    return {"image": random(2, *image_shape(state)[1:], dtype=state.kwargs["sample"].dtype)}


# --- step caches


STEPS: set[Any] = set()


def stepping(name: str, what: str, wrap: Callable[[Any, State], Any], **params: Any) -> Feature:
    """Marks of a pass in the graph, and what takes them at the second call: equal inputs, so an equal result."""

    def do(state: State) -> State:
        own = {**params, **state.subject.options.get(name, {})}
        marked = applied(state, [fxplug.load_pass(name, **own)])
        others = tuple(other for other in state.around if other not in STEPS)
        STEPS.add(wrap)  # of two, which are two marks in one graph, the later one decides
        return replace(marked, around=(*others, wrap), calls=2)

    return Feature(name, what, do)


def hoisted(gm: Any, state: State) -> Any:
    """What does not depend on the latents computed once, with the other lowerings of the cell: a call before has kept it."""
    if not isinstance(gm, nn.Module):
        raise NotApplicable("what is around a module is around what is hoisted of it")
    inputs = [str(node.target).lstrip("*") for node in gm.graph.nodes if node.op == "placeholder"]
    conditions = [name for name in inputs[1:] if name != "timestep" and name in state.kwargs]
    if not conditions and "timestep" not in inputs:
        raise NotApplicable("the model has no input but what changes at every call")
    source = gm.meta["source"] if state.lowered and "source" in gm.meta else gm
    groups = {"conditions": conditions, "time": [name for name in inputs if name == "timestep"]}
    return fxplug.lower(source, **{"fuse": None, **state.lowered}, hoist=groups)


def hoisting(state: State) -> State:
    return replace(state, around=(*state.around, hoisted), calls=2)


# --- lowerings


def lowering(name: str, what: str, needs: tuple[str, ...] = (), **options: Any) -> Feature:
    def do(state: State) -> State:
        gm = state.gm.meta["source"] if state.lowered and "source" in state.gm.meta else state.gm
        return relowered(replace(state, gm=gm, lowered={**state.lowered, **options}))

    return Feature(name, what, do, needs=needs)


def folded(state: State) -> State:
    """Adapters folded into weights: an ordinary module, for which what was lowered before is lowered again."""
    gm = state.gm.meta["source"] if state.lowered and "source" in state.gm.meta else state.gm
    passes = [entry["name"] for entry in gm.meta["passes"] if entry["name"].removeprefix(ADDED) in WEIGHTS]
    return relowered(replace(state, gm=fxplug.merge(gm, passes)))


def compile_whole(state: State) -> State:
    return replace(state, compiled=True)


def compile_regions(state: State) -> State:
    return compile_whole(FEATURES["outline"].do(state))


# --- the module as a value


def saved(state: State) -> State:
    with tempfile.TemporaryDirectory() as folder:
        fxplug.save(state.gm, folder)
        gm = fxplug.load(folder, allow=["diffusers", "timm", "torchao"]).to(DEVICE)
    return relowered(replace(state, gm=gm.train(state.gm.training)))


def copied(state: State) -> State:
    return replace(state, gm=copy.deepcopy(state.gm))


def exported(to: str, state: State) -> State:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.pt2"
        with contextlib.ExitStack() as stack:  # a program has the dtypes that it was exported with
            for context in state.contexts:
                stack.enter_context(context())
            fxplug.export(state.gm, file, (), state.kwargs, to=to, free="batch")
        if to == "pt2":
            return replace(state, result=torch.export.load(file).module())
        if to == "aoti":
            return replace(state, result=fxplug.load_package(file, trusted=True))
        return replace(state, result=fxplug.load_onnx(file))


def other_form(made: Callable[[Any, nn.Module], Any], state: State) -> State:
    """A call in a form that was not traced: the result in a class in the place of a tuple."""
    if "return_dict" not in state.kwargs:
        raise NotApplicable("the model has one form of call")
    flipped = not state.kwargs["return_dict"]
    gm = made(state.gm, state.subject.model)
    wrapped = replace(state, gm=gm)

    def call(**kwargs: Any) -> Any:
        found = target_of(wrapped)(**{**kwargs, "return_dict": flipped})
        return tuple(found.values()) if isinstance(found, Mapping) else found

    return replace(wrapped, result=call)


# --- precision


def to_bfloat16(state: State) -> State:
    def cast(value: Any, _: Any = None) -> Any:
        return value.bfloat16() if is_float(value) else value

    kwargs = map_leaves(dict(state.kwargs), cast)
    if not state.done:
        return replace(state, gm=fxplug.trace(state.subject.model.bfloat16(), kwargs=kwargs).eval(), kwargs=kwargs)
    return replace(state, gm=retraceable(state).to(torch.bfloat16), kwargs=kwargs)


def retraceable(state: State) -> Any:
    """The module that answers calls in another dtype too; as it is where it was loaded or merged and has no model to trace."""
    with contextlib.suppress(fxplug.SpecError):
        return fxplug.variants(state.gm, state.subject.model)
    return state.gm


def autocast(state: State) -> State:
    return replace(state, gm=retraceable(state), contexts=(*state.contexts, partial(torch.autocast, DEVICE, torch.bfloat16)))


def quantised(state: State) -> State:
    """The model's linear layers in 8 bits, by torchao: before its trace as the guide says, or those of the traced module."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    base = {name for name, module in state.subject.model.named_modules() if isinstance(module, nn.Linear)}
    if not base:
        raise NotApplicable("the model has no linear layer")
    if state.lowered or state.ways or {"dora", "loha", "lokr", "delta", "head", "merge_fold"} & set(state.done):
        raise NotApplicable("weights that are changed or fused already are no weights to pack: quantise the model first")
    if state.done:
        quantize_(state.gm, Int8WeightOnlyConfig(), filter_fn=lambda m, name: name in base and isinstance(m, nn.Linear))
        return state
    quantize_(state.subject.model, Int8WeightOnlyConfig())
    return replace(state, gm=fxplug.trace(state.subject.model, kwargs=state.kwargs).eval())


# --- processes


def parallel(state: State, **ways: int) -> State:
    if dist.is_initialized():
        raise NotApplicable("the group of FSDP2 has one process here")
    whole, degrees = (state.gm, {}) if state.whole is None else (state.whole, state.ways)  # all ways are one plan
    plan = fxplug.parallel_plan(whole, (), state.kwargs, check=False, **{**degrees, **ways})
    if plan.share == 0:
        raise NotApplicable("nothing of this model is split")
    return replace(state, gm=fxplug.parallelize(whole, plan), ways=plan.ways, whole=whole)


def split(name: str, what: str, **ways: int) -> Feature:
    return Feature(name, what, partial(parallel, **ways), splits=True)


def staged(state: State) -> State:
    def wrap(gm: Any, now: State) -> Any:
        return fxplug.pipefusion(gm, (), now.kwargs, stages=2, patches=2, clock=None, check=False)

    return replace(state, around=(*state.around, wrap), calls=2)


def sharded(state: State) -> State:
    """FSDP2 in a group of one process, which is there until the cell is done."""
    if state.ways:
        raise NotApplicable("the group of FSDP2 has one process here")
    dist.init_process_group("gloo" if DEVICE == "cpu" else "nccl", rank=0, world_size=1, store=dist.HashStore())
    state.entered.callback(dist.destroy_process_group)
    return in_training(state, lambda gm, _: shard(outline(gm)))


# --- training


def in_training(state: State, wrap: Callable[[Any, State], Any]) -> State:
    """Regions as submodules, innermost: a training makes them last, of whatever was done to the module."""
    return replace(state, around=(wrap, *state.around), gradients=True)


def checkpointed(state: State) -> State:
    return in_training(state, lambda gm, _: outline(gm, checkpoint=True))


def trained(state: State) -> State:
    """Two steps of SGD on what passes have put in, or on all weights where there are no such."""
    gm = state.gm.meta.get("source", state.gm)
    added = [entry["name"] for entry in gm.meta.get("passes", []) if entry["name"].startswith(ADDED) and entry["train"]]
    if "merge_fold" in state.done or not added and any(FEATURES[name].passes and name not in LORAS[1:] for name in state.done):
        raise NotApplicable("what was merged is no longer there to be trained")
    if "pipefusion" in state.done:
        raise NotApplicable("what takes from an earlier step is for inference")
    if dist.is_initialized():
        raise NotApplicable("FSDP2 trains parameters of its own, as tests/test_sharding.py does")
    fxplug.trainable(gm, *([] if added else ["**"]))
    chosen = [p for p in gm.parameters() if p.requires_grad]
    for _ in range(2):
        _, slopes = gradients_of(replace(state, gm=gm, calls=1), state.kwargs, chosen)
        with torch.no_grad():
            for parameter, slope in zip(chosen, slopes, strict=True):
                parameter.sub_(0.05 * slope)
    gm.requires_grad_(False)
    return relowered(replace(state, gm=gm))


# --- the table

MIXTURE = {"a": 0.7, "b": 0.3}
TRAINS = "two steps of SGD on what passes have put in, all weights where there is nothing"
FEATURES: dict[str, Feature] = {
    feature.name: feature
    for feature in (
        adapter("lora", "LoRA beside all layers", rank=2),
        adapter("lora_slots", "LoRA in slots, a mixture for each sample", "lora", partial(with_adapters, [MIXTURE, "b"]),
                rank=2, slots=2, train=False),
        adapter("lora_mixed", "LoRA in slots, one mixture for all samples", "lora", partial(with_adapters, MIXTURE),
                rank=2, slots=2, train=False),
        adapter("dora", "DoRA", rank=2),
        adapter("loha", "LoHa", rank=2),
        adapter("lokr", "LoKr", rank=2),
        adapter("delta", "whole changes of parameters"),
        adapter("head", "a new last layer", size=head_size),
        adapter("skip", "a gated skip between two layers"),
        adapter("replace", "PReLU in the place of activations, or a new layer"),
        of_a_unet(adapter("controlnet", "a ControlNet joined into the graph", network=control_network), picture),
        of_a_unet(adapter("ip_adapter", "IP-Adapter", image=image_shape), image_tokens),
        stepping("first_block_cache", "first-block cache, at a step that takes from an earlier one",
                 lambda gm, _: fxplug.StepCache(gm, fxplug.Every(2), clock=None)),
        stepping("teacache", "TeaCache, at a step that takes from an earlier one",
                 lambda gm, _: fxplug.StepCache(gm, fxplug.TeaCache(limit=1e9), clock=None)),
        stepping("deepcache", "DeepCache, at a step that takes from an earlier one",
                 lambda gm, _: fxplug.StepCache(gm, fxplug.Every(2), clock=None)),
        stepping("ditfastattn", "DiTFastAttn with a schedule of full steps",
                 lambda gm, _: fxplug.FastAttention(gm, clock=None)),
        Feature("hoist", "lower(hoist=...), at a step whose conditions and time an earlier one had", hoisting),
        *(lowering(f"fuse_{form}", f"lower(fuse={form!r}): {about}", LORAS, fuse=form) for form, about in FORMS.items()),
        Feature("merge_fold", "merge of all passes that are functions of weights", folded, needs=WEIGHTS),
        lowering("merge_live", "lower(merge='live')", ("lora_mixed",), merge="live"),
        lowering("outline", "lower(outline=True): repeated regions as one", outline=True),
        Feature("compile", "torch.compile of the whole, one graph", compile_whole),
        Feature("compile_regions", "torch.compile of repeated regions", compile_regions),
        Feature("save_load", "save, and load", saved),
        Feature("deepcopy", "copy.deepcopy", copied),
        Feature("export", "torch.export, written, read and run", partial(exported, "pt2")),
        Feature("export_aoti", "AOTInductor, written, read and run", partial(exported, "aoti"), slow=True),
        Feature("export_onnx", "ONNX, written, read and run", partial(exported, "onnx"), slow=True),
        Feature("variants", "fxplug.variants, called in a form that was not traced", partial(other_form, fxplug.variants)),
        Feature("pipeline_part", "a pipeline's part, called in a form that was not traced",
                partial(other_form, fxplug.pipeline_part)),
        Feature("served", "each sample a request of its own, whose calls an engine joins", served),
        Feature("bfloat16", "weights and inputs in bfloat16", to_bfloat16, adapts=True),
        Feature("autocast", "a call under autocast to bfloat16", autocast, adapts=True),
        Feature("quantised", "linear layers in 8 bits, by torchao", quantised, adapts=True),
        split("ulysses", "tokens over 2 processes by heads", ulysses=2),
        split("ring", "tokens over 2 processes around a ring", ring=2),
        split("batch", "samples over 2 processes", batch=2),
        split("rows", "rows of images over 2 processes", rows=2),
        split("tensor", "heads and features over 2 processes", tensor=2),
        Feature("pipefusion", "2 stages on 2 patches, at a step with what an earlier one kept", staged),
        Feature("fsdp", "FSDP2 of repeated regions, with gradients", sharded),
        Feature("checkpointing", "gradient checkpointing of repeated regions, with gradients", checkpointed),
        Feature("train", TRAINS, trained, adapts=True),
    )
}  # fmt: skip
