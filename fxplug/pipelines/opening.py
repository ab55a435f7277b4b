"""A pipeline of diffusers from a folder, a name on the hub, or one checkpoint file, on its device, its denoiser quantised."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config.model_section import CHECKPOINTS, INDEX, check_pipeline_folder
from ..core.errors import SpecError, did_you_mean, quote
from ..core.reading import read_json

OPTIONS = ("variant", "revision", "without")  # the first two are keyword arguments of `from_pretrained`
UNUSED = ("safety_checker",)  # parts that only look at the finished picture
KEPT = "_keep_in_fp32_modules"  # names of layers that stay in float32, in classes of diffusers, whose code asks for their dtype
FOUR_BITS = 64  # weights that share a scale: of fewer bitsandbytes mistakes rows for columns
INSTALL = {"int8": "torchao", "nf4": "bitsandbytes"}  # which library quantises so


def open_pipeline(
    source: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Open a pipeline of diffusers, without its safety checker and its progress bars, in evaluation.

    Args:
        source: A folder that `save_pretrained` of a pipeline or of a modular pipeline wrote, a checkpoint of all its models
            in one file, or a name on the hub, of which the hub's cache serves where there is no network.
        config: For a checkpoint the folder of a pipeline that has the configurations of its models, and those parts that the
            file lacks; None is that of the pipeline for which diffusers takes the file, from the hub's cache.
        dtype: The dtype of the weights; None is float32, in which diffusers opens its models: transformers opens text encoders
            in the dtype in which they were saved, and the two together do not run.
        device: Where its models are.
        options: `variant` and `revision` of diffusers' `from_pretrained`; `without`, names of blocks of a modular pipeline that
            are left out, such as one that rewrites prompts.

    Returns:
        The pipeline.

    Raises:
        SpecError: There is no pipeline, or it cannot be opened; what diffusers raised is quoted.
    """
    options = dict(options or {})
    without = _read_without(options.pop("without", []))
    if (wrong := next((name for name in options if name not in OPTIONS), None)) is not None:
        hint = did_you_mean(wrong, OPTIONS)
        raise SpecError(f"a pipeline has no option '{wrong}'{hint}; it has {', '.join(OPTIONS)}", path=("model", "options"))
    path, dtype = Path(source), dtype or torch.float32
    with silence_libraries():
        try:
            if path.is_file():
                pipe = _from_file(path, config, dtype)
            elif path.is_dir():
                check_pipeline_folder(path, str(source), "pipeline")
                modular = not (path / INDEX[0]).is_file()
                pipe = _modular(path, dtype, options, without) if modular else _from_folder(path, path, dtype, options)
            else:
                pipe = _from_hub(str(source), path, dtype, options, without)
            if without and not is_modular(pipe):
                finding = f"{type(pipe).__name__} has no blocks to leave out, which modular pipelines have"
                raise SpecError(finding, path=("model", "options", "without"))
            for each in (pipe, *(_blocks_of(pipe._blocks) if is_modular(pipe) else ())):
                if hasattr(each, "set_progress_bar_config"):
                    each.set_progress_bar_config(disable=True)
            for part in _modules(pipe).values():
                part.eval()
            return pipe.to(device)
        except SpecError:
            raise
        except Exception as error:  # of diffusers, transformers, and whatever reads their files
            why = f"the pipeline '{source}' cannot be opened: {quote_error(error)}"
            raise SpecError(why, path=("model", "pipeline")) from error


def _from_folder(name: Any, folder: Path, dtype: torch.dtype, options: Mapping[str, Any]) -> Any:
    """Open the pipeline of a folder, which may be that of a hub's name."""
    from diffusers import DiffusionPipeline

    index = _index(folder)
    unused: dict[str, Any] = {part: None for part in UNUSED if part in index}
    if unused and "requires_safety_checker" in index:
        unused["requires_safety_checker"] = False
    return DiffusionPipeline.from_pretrained(name, local_files_only=True, dtype=dtype, **unused, **options)


def _from_hub(name: str, path: Path, dtype: torch.dtype, options: Mapping[str, Any], without: Sequence[str]) -> Any:
    """Open a pipeline by its name on the hub. Raises SpecError where it is in no cache, and the hub does not give it."""
    from diffusers import DiffusionPipeline

    if path.is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise SpecError(f"'{name}': no such folder or file", path=("model", "pipeline"))
    try:
        folder = DiffusionPipeline.download(name, revision=options.get("revision"), variant=options.get("variant"))
    except Exception as error:  # of the hub, or of its cache: not found, no network, no such revision
        if (modular := _fetch_modular(name, options.get("revision"))) is not None:
            return _modular(modular, dtype, options, without, local=False)
        finding = f"'{name}' is not a folder here, nor a pipeline that the hub gives, or its cache where there is no network"
        raise SpecError(f"{finding}: {quote_error(error)}", path=("model", "pipeline")) from error
    return _from_folder(folder, Path(folder), dtype, {key: value for key, value in options.items() if key != "revision"})


def _fetch_modular(name: str, revision: Any) -> Path | None:
    """Return the folder in the hub's cache of a modular pipeline, whose parts may be in other repositories; None for none."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, INDEX[1], revision=revision)).parent
    except Exception:  # of the hub: what it said of the whole repository is told
        return None


def _from_file(path: Path, config: Any, dtype: torch.dtype) -> Any:
    """Open a checkpoint of all models of a pipeline. Raises SpecError where it is not known how they are configured."""
    import diffusers

    if path.suffix not in CHECKPOINTS:
        finding = f"'{path.name}' is not a checkpoint: one ends with {', '.join(CHECKPOINTS)}"
        raise SpecError(finding, path=("model", "pipeline"))
    folder = Path(_cached_config(path) if config is None else config)
    name = _index(folder).get("_class_name")
    kind = getattr(diffusers, str(name), None)
    if not hasattr(kind, "from_single_file"):
        finding = f"'{folder}' is of a {name}, which diffusers does not read from one file: give a pipeline's folder"
        raise SpecError(finding, path=("model", "pipeline"))
    unused: dict[str, Any] = {part: None for part in UNUSED if part in inspect.signature(kind).parameters}  # type: ignore[arg-type]
    options = {"config": str(folder), "local_files_only": True, "dtype": dtype, **unused}
    return kind.from_single_file(str(path), **options)  # type: ignore[union-attr]


def _cached_config(path: Path) -> str:
    """Return the folder in the hub's cache of the pipeline that diffusers takes a checkpoint for. Raises SpecError."""
    from diffusers.loaders.single_file_utils import fetch_diffusers_config, load_single_file_checkpoint
    from huggingface_hub import try_to_load_from_cache

    repo = fetch_diffusers_config(load_single_file_checkpoint(str(path)))["pretrained_model_name_or_path"]
    found = try_to_load_from_cache(repo, INDEX[0])
    if not isinstance(found, str):
        finding = f"'{path.name}' has weights alone, and {repo}, as which diffusers would read it, is not in the hub's cache: "
        raise SpecError(finding + "give 'config', a folder with its model_index.json", path=("model", "pipeline"))
    return str(Path(found).parent)


def _read_without(given: Any) -> list[str]:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise SpecError(f"must be names of blocks, not {quote(given)}", path=("model", "options", "without"))
    return list(names)


def _modular(
    folder: Path, dtype: torch.dtype, options: Mapping[str, Any], without: Sequence[str] = (), *, local: bool = True
) -> Any:
    """Open a modular pipeline of a folder, as far as its blocks and parts are there, without some of its blocks; `local` takes
    no parts from a hub. Raises SpecError for what is missing."""
    from diffusers import ModularPipeline

    pipe = ModularPipeline.from_pretrained(str(folder), local_files_only=True, **options)
    if without:
        blocks = pipe.blocks
        for name in without:
            if name not in blocks.sub_blocks:
                hint = f"{did_you_mean(name, blocks.sub_blocks)}; there are {', '.join(blocks.sub_blocks)}"
                raise SpecError(f"{type(pipe).__name__} has no block '{name}'{hint}", path=("model", "options", "without"))
            blocks.sub_blocks.pop(name)
        pipe = blocks.init_pipeline(str(folder))
    pipe.load_components(local_files_only=local, dtype=dtype)  # which logs what it could not load, and goes on
    if missing := [name for name in pipe.pretrained_component_names if getattr(pipe, name, None) is None]:
        finding = f"the modular pipeline '{folder.name}' lacks {', '.join(missing)}, which could not be loaded from the places "
        raise SpecError(finding + f"that its {INDEX[1]} names", path=("model", "pipeline"))
    return pipe


def quantize_part(module: nn.Module, how: str, device: torch.device | str = "cpu") -> nn.Module:
    """Quantise the linear layers of a model where they stand, each on a device as it comes to it, and freeze the model.

    Args:
        module: The model.
        how: `int8`, weights alone, in 8 bits by torchao's `quantize_`; or `nf4`, in 4 bits by bitsandbytes (QLoRA, arXiv
            2305.14314), which computes in the weights' dtype.
        device: Where the quantised layers are.

    Returns:
        The same module.

    Raises:
        SpecError: The library is not installed.
    """
    try:
        if how == "int8":
            library = import_module("torchao.quantization")
            library.quantize_(module, library.Int8WeightOnlyConfig(), device=device)
        else:
            _with_four_bits(module, import_module("bitsandbytes.nn").Linear4bit, device)
    except ImportError as error:
        finding = f"{how} needs {INSTALL[how]}, which cannot be imported ({error}): pip install {INSTALL[how]}"
        raise SpecError(finding, path=("model", "quantize")) from error
    return module.requires_grad_(False)


def _with_four_bits(module: nn.Module, kind: Any, device: torch.device | str) -> None:
    whole = getattr(module, KEPT, None) or ()
    for path, layer in [*module.named_modules()]:
        if type(layer) is not nn.Linear or layer.weight.numel() < FOUR_BITS or any(name in path.split(".") for name in whole):
            continue
        options = {"bias": layer.bias is not None, "compute_dtype": layer.weight.dtype, "quant_type": "nf4"}
        made = kind(layer.in_features, layer.out_features, **options)
        made.load_state_dict(layer.state_dict())
        made.support_avx512bf16_for_cpu = False  # else its first call rounds scales to bfloat16, and fails for small layers
        if layer.bias is not None:  # by which a model tells its dtype, and its pipeline what to compute in
            made.bias = nn.Parameter(layer.bias.detach(), requires_grad=False)
        owner, _, key = path.rpartition(".")
        setattr(module.get_submodule(owner), key, made.train(layer.training).to(device))


def is_modular(pipe: Any) -> bool:
    """Return whether a pipeline of diffusers is a modular one, of blocks."""
    return hasattr(pipe, "blocks") and hasattr(pipe, "load_components")


def call_parameters(pipe: Any) -> dict[str, bool]:
    """Return the arguments that a pipeline takes, and whether it needs them."""
    if is_modular(pipe):  # whose call takes anything
        # what some of its blocks need others make, also where these are among several of which one is chosen
        made = {each.name for block in _blocks_of(pipe.blocks) for each in block.intermediate_outputs}
        return {each.name: bool(each.required) and each.name not in made for each in pipe.blocks.inputs if each.name}
    return dict(_list_parameters(type(pipe).__call__))


@functools.lru_cache(64)
def _list_parameters(call: Callable[..., Any]) -> tuple[tuple[str, bool], ...]:
    """List the arguments of a method besides the object, and whether it needs them."""
    _, *parameters = inspect.signature(call).parameters.values()
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    return tuple((each.name, each.default is each.empty) for each in named)


def list_loaded_parts(pipe: Any) -> tuple[str, ...]:
    """Return the names of the models whose layers a pipeline's `load_lora_weights` reads; none where it has no such method."""
    return tuple(getattr(pipe, "_lora_loadable_modules", ())) if hasattr(pipe, "load_lora_weights") else ()


def _blocks_of(block: Any) -> Iterator[Any]:
    yield block
    for each in getattr(block, "sub_blocks", {}).values():
        yield from _blocks_of(each)


def _modules(pipe: Any) -> dict[str, nn.Module]:
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}


def _index(folder: Path) -> dict[str, Any]:
    found = read_json(folder / INDEX[0], lambda finding: SpecError(f"'{folder / INDEX[0]}' {finding}", path=("model",)))
    if not isinstance(found, dict):
        raise SpecError(f"'{folder / INDEX[0]}' must be a mapping of parts, not {quote(found)}", path=("model", "pipeline"))
    for name, entry in found.items():
        named = isinstance(entry, list) and len(entry) == 2 and all(isinstance(x, str | None) for x in entry)
        if not named and (folder / name).is_dir() and not name.startswith("_"):  # others are options, lists too
            finding = f"'{folder / INDEX[0]}' must name the library and the class of '{name}', not {quote(entry)}"
            raise SpecError(finding, path=("model", "pipeline"))
    return found


def quote_error(error: BaseException) -> str:
    """Quote an error of somebody else's in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400] or 'without a text'}"


@contextlib.contextmanager
def silence_libraries() -> Iterator[None]:
    """Show no progress bars, warnings and log of the two libraries inside, but errors: what matters is raised.

    Of an error that modular pipelines raise not even that: each block around it logs the whole traceback beside.
    """
    import diffusers.utils.logging
    import transformers.utils.logging

    libraries: Sequence[Any] = (diffusers.utils.logging, transformers.utils.logging)
    before = [(library.is_progress_bar_enabled(), library.get_verbosity()) for library in libraries]
    blocks, tracebacks = logging.getLogger("diffusers.modular_pipelines.modular_pipeline"), logging.Filter()
    tracebacks.filter = lambda record: False  # type: ignore[method-assign]
    blocks.addFilter(tracebacks)
    try:
        for library in libraries:
            library.disable_progress_bar()
            if library.get_verbosity() != logging.ERROR:  # to set a level empties the caches of all loggers of the process
                library.set_verbosity_error()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of how diffusers calls itself and torch
            yield
    finally:
        blocks.removeFilter(tracebacks)
        for library, (bars, verbosity) in zip(libraries, before, strict=True):
            if bars:
                library.enable_progress_bar()
            if library.get_verbosity() != verbosity:
                library.set_verbosity(verbosity)
