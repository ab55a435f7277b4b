"""Which adapter files are read, and how exactly: `make formats`, which prints the tables of docs/reference/adapter_files.md.

By trainer: the names of tests/data/trainer_keys.yaml, from trainers' sources, and how many find the layers that they mean.
By family: of each model of diffusers in the zoo that has names of its first code base, a LoRA of all layers that these name,
under the prefixes of the tools, and how many of them find their layer. By kind: adapters with random weights that PEFT and
LyCORIS make for a small ViT and a small UNet, what holds them here, and how far the module is from the tool's own. `--write`
puts the tables into the docs. Exit code 1 where an outcome differs by more than 1e-5, relative to the result's largest number.
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import fxplug
from fxplug.adapters.files import fit, read
from fxplug.adapters.layer_names import SWAPPED, family_of, map_first_names

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from trainer_keys import TRAINERS, lora_of  # noqa: E402
from zoo import cases  # noqa: E402

# what stands before a layer's name, and whether dots are underscores
PREFIXES = {
    "as published": ("", False), "ComfyUI": ("diffusion_model.", False), "checkpoint": ("model.diffusion_model.", False),
    "PEFT": ("base_model.model.", False), "kohya": ("lora_unet_", True), "VideoX-Fun": ("lora_unet__", True),
    "LyCORIS": ("lycoris_", True),
}  # fmt: skip
NEAR = 1e-5
Made = tuple[Any, torch.nn.Module, tuple[Any, ...], Callable[[], Any]]


# --- by family


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """The weights of two or more dimensions, by layer."""
    named = ((name, p) for name, p in model.named_parameters() if name.endswith(".weight") and p.dim() > 1)
    return {name.removesuffix(".weight"): tuple(p.shape) for name, p in named}


def named_lora(shapes: dict[str, tuple[int, ...]], prefix: str, flat: bool) -> dict[str, torch.Tensor]:
    """A LoRA of rank 2 under the first names of layers."""
    state = {}
    for old, paths in map_first_names(shapes).items():
        key = prefix + (old.replace(".", "_") if flat else old)
        outer = sum(shapes[path.removesuffix(SWAPPED)][0] for path in paths)
        inner = shapes[paths[0].removesuffix(SWAPPED)][1:]
        state[f"{key}.lora_down.weight"] = torch.zeros(2, *inner)
        state[f"{key}.lora_up.weight"] = torch.zeros(outer, 2, *[1] * (len(inner) - 1))
        state[f"{key}.alpha"] = torch.tensor(1.0)
    return state


def families() -> Iterator[list[str]]:
    """A row a model: the model, its family, layers that have another first name, and what is found under each prefix."""
    for case in cases("diffusers/"):
        name = case.name.removeprefix("diffusers/")
        if "Transformer" not in name and "UNet2DConditionModel" not in name:
            continue
        shapes = shapes_of(case.build())
        known = map_first_names(shapes)
        if not known:
            continue
        family = family_of(shapes)
        wanted = {path.removesuffix(SWAPPED) for paths in known.values() for path in paths}
        found = []
        for prefix, flat in PREFIXES.values():
            try:
                placed = fit(read(named_lora(shapes, prefix, flat)), shapes).placed
            except fxplug.ArtifactError:
                placed = {}
            found.append(f"{len(wanted & placed.keys()) / len(wanted):.0%}")
        yield [name, family[0].name if family else "Stable Diffusion", f"{len(wanted)} of {len(shapes)}", *found]


def trainers() -> Iterator[list[str]]:
    """A row a trainer and model: how many of its rows of names mean a layer, and which share of the layers gets its change."""
    for trainer in TRAINERS:
        case = next(one for one in cases() if one.name == f"diffusers/{trainer['model']}")
        named = ((name.removesuffix(".weight"), p) for name, p in case.build().named_parameters() if name.endswith(".weight"))
        shapes = {name: tuple(p.shape) for name, p in named}
        state, wanted = lora_of(trainer, shapes)
        placed = fit(read(state), shapes).placed
        good = sum(
            path in placed and torch.allclose(placed[path].changed(torch.zeros(shapes[path])), change, atol=1e-5)
            for path, change in wanted.items()
        )
        start = f"{trainer['start']}{', underscores' if trainer.get('flat') else ''}"
        number = str(len(trainer["keys"]))
        yield [trainer["tool"], trainer["model"], start, number, f"{good / len(wanted):.0%}", trainer["source"]]


# --- by kind


def vit() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """A small ViT of timm's, and its input."""
    import timm

    torch.manual_seed(0)
    options = {"img_size": 32, "depth": 2, "num_classes": 10, "embed_dim": 96}
    return timm.create_model("vit_tiny_patch16_224", **options).eval(), (torch.randn(2, 3, 32, 32),)


def unet() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """A small UNet in the style of SD 1.5, and its inputs."""
    (case,) = cases("diffusers/UNet2DConditionModel-sd15")
    torch.manual_seed(0)
    model = case.build().eval()
    args, kwargs = case.inputs(batch=2)
    return model, tuple(args) + tuple(kwargs.values())


MODELS = {"ViT": (vit, ["qkv", "proj", "fc1", "fc2"]), "UNet": (unet, ["to_q", "to_k", "to_v", "to_out.0", "conv1"])}
LINEAR = {"ViT": ["qkv", "fc1"], "UNet": ["to_q", "to_v"]}  # of kinds that change linear layers alone


def randomised(model: torch.nn.Module, names: Callable[[str], bool], size: float = 0.1) -> None:
    """Random weights for what an adapter learns, near what they are when it is new."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if names(name) and parameter.is_floating_point() and "ranknum" not in name:
                parameter.add_(torch.randn_like(parameter) * size)


def of_peft(kind: str, options: dict[str, Any]) -> Iterator[Made]:
    """An adapter of PEFT's on each model: where it was saved, the plain model, its inputs, and what PEFT's gives."""
    import peft

    everywhere = options.pop("all", True) and kind != "IA3Config"
    for name, (make, targets) in MODELS.items():
        model, args = make()
        plain = copy.deepcopy(model)
        given = {"target_modules": targets if everywhere else LINEAR[name], **options}
        if kind == "IA3Config":
            given["feedforward_modules"] = []
        wrapped = peft.get_peft_model(model, getattr(peft, kind)(**given))
        own = {f"base_model.model.{key}" for key, _ in plain.named_parameters()}
        randomised(wrapped, lambda key, own=own: key not in own and ".base_layer." not in key)
        folder = Path(tempfile.mkdtemp())
        wrapped.save_pretrained(folder)
        yield folder, plain, args, lambda wrapped=wrapped, args=args: wrapped.eval()(*args)


def of_lycoris(options: dict[str, Any]) -> Iterator[Made]:
    """The same of LyCORIS."""
    from lycoris import LycorisNetwork, create_lycoris, create_lycoris_from_weights

    for make, _ in MODELS.values():
        model, args = make()
        plain = copy.deepcopy(model)
        kinds = ["Linear"] if options["algo"] in ("dylora", "boft") else ["Linear", "Conv2d"]
        LycorisNetwork.apply_preset({"target_module": kinds, "target_name": []})
        network = create_lycoris(model, 1.0, **{"linear_dim": 4, "linear_alpha": 2, "conv_dim": 2, "conv_alpha": 1, **options})
        network.apply_to()
        randomised(network, lambda key: True, 0.05)
        file = Path(tempfile.mkdtemp()) / "network.safetensors"
        network.save_weights(str(file), torch.float32, {})
        if options["algo"] == "dylora":  # which is read as a LoCon, and gives random ranks until then
            network.restore()
            network, _ = create_lycoris_from_weights(1.0, str(file), model)
            network.apply_to()
        yield file, plain, args, lambda model=model, args=args: model(*args)


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "PEFT LoRA": ("LoraConfig", {"r": 4, "lora_alpha": 2}),
    "PEFT LoRA, rslora": ("LoraConfig", {"r": 4, "lora_alpha": 2, "use_rslora": True}),
    "PEFT LoRA, biases": ("LoraConfig", {"r": 4, "lora_bias": True}),
    "PEFT DoRA": ("LoraConfig", {"r": 4, "use_dora": True}),
    "PEFT LoHa": ("LoHaConfig", {"r": 2, "alpha": 3}),
    "PEFT LoKr": ("LoKrConfig", {"r": 2, "alpha": 3}),
    "PEFT (IA)3": ("IA3Config", {}),
    "PEFT OFT": ("OFTConfig", {"oft_block_size": 4, "all": False}),
    "PEFT BOFT": ("BOFTConfig", {"boft_block_size": 4, "all": False}),
    "PEFT HRA": ("HRAConfig", {"r": 4, "all": False}),
    "PEFT VeRA": ("VeraConfig", {"r": 4, "all": False}),
    "PEFT AdaLoRA": ("AdaLoraConfig", {"total_step": 10, "all": False}),
    "PEFT RandLora": ("RandLoraConfig", {"r": 4, "all": False}),
    "PEFT FourierFT": ("FourierFTConfig", {"n_frequency": 20, "all": False}),
    "PEFT MiSS": ("MissConfig", {"r": 4, "all": False}),
    "PEFT C3A": ("C3AConfig", {"block_size": 4, "all": False}),
    "PEFT SHiRA": ("ShiraConfig", {"r": 2, "all": False}),
    "PEFT VB-LoRA": ("VBLoRAConfig", {"num_vectors": 8, "vector_length": 4, "all": False}),
}
ALGOS: dict[str, dict[str, Any]] = {
    "LyCORIS LoRA": {"algo": "lora"}, "LyCORIS LoCon, core": {"algo": "lora", "use_tucker": True},
    "LyCORIS LoHa": {"algo": "loha"}, "LyCORIS LoHa, core": {"algo": "loha", "use_tucker": True},
    "LyCORIS LoKr": {"algo": "lokr", "factor": 4}, "LyCORIS LoKr, whole": {"algo": "lokr", "full_matrix": True, "factor": 4},
    "LyCORIS DoRA": {"algo": "lora", "dora_wd": True},
    "LyCORIS DoRA by input": {"algo": "lora", "dora_wd": True, "wd_on_output": False},
    "LyCORIS LoHa, DoRA": {"algo": "loha", "dora_wd": True},
    "LyCORIS (IA)3": {"algo": "ia3"}, "LyCORIS full": {"algo": "full"}, "LyCORIS DyLoRA": {"algo": "dylora", "block_size": 1},
    "LyCORIS GLoRA": {"algo": "glora"}, "LyCORIS diag-OFT": {"algo": "diag-oft", "linear_alpha": 0.1, "conv_alpha": 0.1},
    "LyCORIS BOFT": {"algo": "boft", "linear_dim": 20, "linear_alpha": 0.1},
}  # fmt: skip


def held(source: Any, plain: torch.nn.Module, args: tuple[Any, ...]) -> tuple[str, Any]:
    """What holds an adapter here, and the module with it in use; or why nothing does, and None."""
    gm = fxplug.trace(plain, args)
    slots = 1
    try:
        p = fxplug.pass_for(source, gm)
    except fxplug.FxplugError as error:
        try:
            slots, p = 0, fxplug.pass_for(source, gm, slots=0)
        except fxplug.FxplugError:
            return str(error).removeprefix(f"{source}").split(": ", 1)[-1], None
    new = fxplug.apply(gm, p)
    if slots:
        new.adapters.load("it", source)
        new.adapters.use("it")
    else:
        fxplug.load_adapter(new, source)
        new.eval()
    blocks = ", ".join(dict.fromkeys(str(rule.use).rpartition(":")[2] for rule in p.rules))
    return blocks if slots else f"without slots: {blocks}", new


def kinds() -> Iterator[tuple[list[str], float]]:
    """A row a kind, and the largest difference in it."""
    for kind, (config, options) in KINDS.items():
        yield compared(kind, lambda config=config, options=options: of_peft(config, dict(options)))
    for kind, options in ALGOS.items():
        yield compared(kind, lambda options=options: of_lycoris(options))


def compared(kind: str, made: Callable[[], Any]) -> tuple[list[str], float]:
    """The row of a kind: what holds it, and how far each model's result is from the tool's."""
    worst, holders, cells = 0.0, [], []
    try:
        for source, plain, args, theirs in made():
            holder, new = held(source, plain, args)
            holders.append(holder)
            if new is None:
                cells.append("refused")
                continue
            with torch.no_grad():
                ours, wanted, base = (first(call(*given)) for call, given in ((new, args), (theirs, ()), (plain, args)))
            off = ((ours - wanted).abs().max() / wanted.abs().max()).item()
            moved = ((wanted - base).abs().max() / wanted.abs().max()).item()
            cells.append(f"{off:.0e} of {moved:.0e}")
            worst = max(worst, off)
    except fxplug.FxplugError as error:
        cells.append(f"refused: {error}"[:120])
    except Exception as error:  # the tool's own
        cells.append(f"the tool itself: {type(error).__name__}: {str(error)[:60]}")
    return [kind, "; ".join(dict.fromkeys(holders)), *cells], worst


def first(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]


# --- the page


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *([*row, *[""] * (len(head) - len(row))] for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/reference/adapter_files.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    by_kind = list(kinds())
    head = ["made by", "stored by", "ViT: error, of the change", "UNet: error, of the change"]
    kind_table = table(head, [row for row, _ in by_kind])
    print(kind_table, end="\n\n", flush=True)
    head = ["trainer", "model", "prefix", "names", "layers with the right update", "source"]
    trainer_table = table(head, list(trainers()))
    print(trainer_table, end="\n\n", flush=True)
    family_table = table(["model", "family", "layers with own names", *PREFIXES], list(families()))
    print(family_table)
    if options.write:
        page = ROOT / "docs/reference/adapter_files.md"
        text = page.read_text()
        for name, made in (("kinds", kind_table), ("trainers", trainer_table), ("families", family_table)):
            start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
            text = text[: text.index(start) + len(start)] + made + "\n" + text[text.index(end) :]
        page.write_text(text)
    return int(any(worst > NEAR for _, worst in by_kind))


if __name__ == "__main__":
    sys.exit(main())
