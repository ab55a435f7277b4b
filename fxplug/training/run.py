"""One configuration from its model to trained weights: rewrite, open the data, train, test, save, put to use."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator
from torch import nn

from ..config.flow import Step, rewrite, save_run_record
from ..config.run_config import Config, load_config, resolve
from ..core.errors import FxplugError, SpecError, TrainError, format_fields, prefix_path
from ..core.ir.traced_module import TracedModule
from ..core.reading import report_errors
from ..pipelines.pipeline_model import list_denoisers
from ..pipelines.recorded_run import get_components
from ..reporting.reports import report
from .adapter_output import FILE, check_adapter, find_pipeline, has_adapter, prove_adapter, write_adapter
from .adapter_runs import RUNS, AdapterRuns
from .adapter_settings import check_adapter_settings, make_adapter_data, make_adapter_settings
from .checkpoint import find_newest
from .data.loader import Loader
from .data.sources import open_items
from .distributed import check_agreement, gather, make_accelerator
from .encoded_cache import EncodedCache, open_cache
from .model_digest import digest_models
from .plugins import Plugins, load_plugins
from .random_draws import mix
from .run_folder import RunFolder
from .shared_samples import share
from .tasks.pipeline_denoise import PipelineDenoise
from .tasks.pipeline_options import check_options
from .tasks.task import Task, make_task
from .train_section import Data
from .trainer import Trainer

LATENTS = "latents"  # what the cache of a VAE has, beside its weights


@dataclass
class Run:
    """What a training gave: the trained `module`, the `history` (a dict a step: step, epoch, loss, lr, seconds and more), the
    folder `out`, the `metrics` of the last test (of the best one, where `test.best` takes its weights), the `trainer`, and the
    lines of Python that `use` the result in a pipeline."""

    module: TracedModule
    history: list[dict[str, Any]]
    out: Path
    metrics: dict[str, float]
    trainer: Trainer
    use: str = ""

    __repr__ = format_fields


def train(
    source: str | Path | Mapping[str, Any] | Config,
    *,
    out: str | Path | None = None,
    set: Sequence[str] = (),
    resume: bool | str | Path = False,
    name: str | None = None,
    quiet: bool = False,
    progress: Step | None = None,
) -> Run:
    """Do all that a configuration says: rewrite its model, train the passes on its data, test, and save.

    Args:
        source: A configuration, as `load_config` takes it.
        out: The folder for what the run leaves: config.yaml, log.jsonl, tensorboard/, checkpoints/, samples/, pictures,
            module/, an artifact that `fxplug.load` reads, report.html, a page about all, and of a denoiser of diffusers
            adapter/, which its pipeline loads. None is `out/<name>-<time>`.
        set: Changes of values, as in `load_config`.
        resume: True goes on from the newest checkpoint in `out`; a path is a checkpoint, or another run's folder.
        name: The name of the run; None is that of the configuration.
        quiet: Whether nothing is printed.
        progress: `progress(text)` gives a context manager for each step of the rewrite.

    Returns:
        The run: its module, history, metrics and folder.

    Raises:
        SpecError: The configuration has something wrong.
        TrainError: The run cannot start or go on.
    """
    config = source if isinstance(source, Config) else load_config(source, set)
    if config.train is None:
        raise SpecError("the section 'train' is missing: it sets the task, epochs or steps, and lr", where=config.where())
    if config.data is None and not config.train.adapters:
        raise SpecError("the section 'data' is missing: it names the samples", where=config.where())
    with config.located():
        device = config.device if "device" in config.model_fields_set else None
        accelerator = make_accelerator(config.train.precision, device)
        plain = resolve(config)
        check_agreement(accelerator, plain)
        named = Path(source).stem if isinstance(source, (str, Path)) else "train"
        folder = gather(accelerator, _folder(name or named, out, resume))[0]
        start = None if not resume else find_newest(folder if resume is True else Path(resume))
        if accelerator.is_main_process:
            check = RunFolder(folder, config.train.save, warnings.warn).check
            check(resumes=start is not None and start.is_relative_to(folder))
        if config.train.adapters:
            return _train_adapters(config, folder, start, accelerator, plain, progress, quiet)
        piped = config.model.kind == "pipeline" and config.train.task.name == "denoise"
        if piped:
            check_options(config.train.task)
        elif isinstance(config.model.part, list) and len(config.model.part) > 1:
            finding = f"names {', '.join(config.model.part)}, and only the task denoise trains several: name one"
            raise SpecError(finding, path=("model", "part"))
        task: Task | None = None if piped else make_task(config.train.task)
        assert config.data is not None
        plugins = load_plugins(config.train.plugins, base=config.base, on_error=config.train.on_plugin_error)
        rank, world = share(accelerator, config.train)
        common: dict[str, Any] = {"seed": config.seed, "rank": rank, "world": world, "batch": config.train.batch}
        hooks = plugins if plugins.transforms else None
        prior = _open_prior(config.data, config.base, config.seed, hooks)
        data = Loader(open_items(config.data, config.base), config.data, hooks=hooks, prior=prior, **common)
        tests: Data | None = config.data.test
        test = None
        if tests is not None:
            test = Loader(open_items(tests, config.base, test=True), tests, train=False, **common)
        checked = config.verify and accelerator.is_main_process
        result = rewrite(config, verify=checked, progress=progress, compile=False)
        for one in result.by_part.values():
            save_run_record(one)
        if task is None:
            pipe, arguments = result.pipeline, config.model.arguments
            others: dict[str, Any] = {"beside": {name: one.module for name, one in result.beside.items()}}
            others |= {"store": _open_store(config, pipe), "latents": functools.partial(_open_cache, config, LATENTS)}
            with prefix_path("train", "task", "denoise"):
                task = PipelineDenoise(pipe, arguments, result.part, **others, **config.train.task.options)
        trainer = Trainer(
            result.module,
            task,
            data,
            test,
            out=folder,
            seed=config.seed,
            base=config.base,
            config=plain,
            timm=str(config.model.target) if config.model.kind == "timm" else None,
            settings=config.train,
            accelerator=accelerator,
            plugins=plugins,
            quiet=quiet,
        )
        trainer.outputs.open(start)
        if accelerator.is_main_process:
            with report_errors(lambda finding: TrainError(f"{folder} {finding}"), "cannot be written"):
                (folder / "config.yaml").write_text(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), "utf-8")
            if has_adapter(task, config, result.module):
                check_adapter(result.module, task)
        try:
            history = trainer.fit(resume=start)
        finally:
            if accelerator.is_main_process and (folder / "module").is_dir():
                _report(folder, trainer)
        use = ""
        if accelerator.is_main_process and has_adapter(task, config, result.module):
            use = write_adapter(result.module, task, folder, find_pipeline(config))
            if isinstance(task, PipelineDenoise) and (folder / "adapter").is_dir():
                prove_adapter(trainer, task, folder / "adapter")
    return Run(result.module, history, folder, trainer.metrics, trainer, use)


def _train_adapters(
    config: Config, folder: Path, start: Path | None, accelerator: Accelerator, plain: Any, progress: Step | None, quiet: bool
) -> Run:
    """Train the adapters of a configuration in one run; see `train`."""
    settings, kind = config.train, config.model
    assert settings is not None
    piped = kind.kind == "pipeline" and settings.task.name == "denoise"
    if piped:
        check_options(settings.task)
    check_adapter_settings(settings, accelerator)
    if isinstance(kind.part, list) and len(kind.part) > 1:
        raise SpecError("names several models, but many adapters train for one: name one", path=("model", "part"))
    adapters: list[dict[str, Any]] = []
    for index, one in enumerate(settings.adapters):
        own = make_adapter_settings(settings, index)
        spec, seed = make_adapter_data(config.data, one, index), config.seed if one.seed is None else one.seed
        common: dict[str, Any] = {"seed": seed, "batch": own.batch}
        with prefix_path("train", "adapters", index):
            prior = _open_prior(spec, config.base, seed, None)
            data = Loader(open_items(spec, config.base), spec, prior=prior, **common)
            test = None
            if spec.test is not None:
                test = Loader(open_items(spec.test, config.base, test=True), spec.test, train=False, **common)
        adapters.append({**one.model_dump(exclude_unset=True), "data": data, "test": test})
    result = rewrite(config, verify=config.verify, progress=progress, compile=False)
    save_run_record(result)
    for given in adapters:
        if piped:
            read = config.model_copy(update={"data": given["data"].spec})
            pipe = result.pipeline
            caches: dict[str, Any] = {"store": _open_store(read, pipe)}
            caches["latents"] = functools.partial(_open_cache, read, LATENTS)
            with prefix_path("train", "task", "denoise"):
                given["task"] = PipelineDenoise(pipe, kind.arguments, result.part, **caches, **settings.task.options)
    trainer: Any = AdapterRuns(
        Trainer,
        result.module,
        adapters[0].get("task") or settings.task,
        adapters=adapters,
        out=folder,
        seed=config.seed,
        base=config.base,
        config=plain,
        timm=str(kind.target) if kind.kind == "timm" else None,
        settings=settings,
        accelerator=accelerator,
        quiet=quiet,
    )
    trainer.open(start)
    with report_errors(lambda finding: TrainError(f"{folder} {finding}"), "cannot be written"):
        (folder / "config.yaml").write_text(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), "utf-8")
    for one in trainer.runs:
        if has_adapter(one.trainer.task, config, one.trainer.module):
            check_adapter(one.trainer.module, one.trainer.task)
    try:
        history = trainer.fit(resume=start)
    finally:
        for one in trainer.runs:
            if one.ended:
                _report(folder / RUNS / one.name, one.trainer)
    for one in trainer.runs:
        written = folder / "adapter" / one.name
        if isinstance(one.trainer.task, PipelineDenoise) and (written / FILE).is_file() and not one.failed:
            prove_adapter(one.trainer, one.trainer.task, written)
    return Run(result.module, history, folder, trainer.metrics, trainer)


def _open_prior(spec: Data, base: Path, seed: int, hooks: Plugins | None) -> Loader | None:
    """Open the prior images of a `data` section, one a batch; None where it has none. They take the sizes of the samples."""
    if spec.prior is None:
        return None
    whole = spec.prior.model_copy(update={"buckets": None})
    return Loader(open_items(spec.prior, base, prior=True), whole, 1, seed=mix(seed, 1), hooks=hooks)


def _open_store(config: Config, pipe: Any) -> EncodedCache | None:
    """Open the cache on the disk for what a pipeline makes of captions, and of pictures beside them: without these its VAE has
    a part in it by its configuration alone."""
    denoisers = list_denoisers(pipe)
    makers = {name: part for name, part in get_components(pipe).items() if part is not None and name not in denoisers}
    if config.data is not None and config.data.conditions is None:
        makers = {name: _without_weights(part) for name, part in makers.items()}
    return _open_cache(config, type(pipe), makers)


def _without_weights(part: Any) -> Any:
    """Return the class and the configuration of a VAE; anything else as it is."""
    if not isinstance(part, nn.Module) or not (hasattr(part, "encode") and hasattr(part, "decode")):
        return part
    return [type(part), dict(getattr(part, "config", {}))]


def _open_cache(config: Config, *makers: Any) -> EncodedCache | None:
    """Open a cache on the disk for what these make; None where nothing tells what they do, and where the data has none."""
    if config.data is None or config.data.cache is False:
        return None
    try:
        return open_cache(config.data, config.base, digest_models(*makers))
    except TrainError:
        return None


def _folder(name: str, out: str | Path | None, resume: bool | str | Path) -> Path:
    """Return the folder of a run: `out`, that of the checkpoint, or a new one."""
    if out is not None:
        return Path(out)
    if resume is True:
        raise SpecError("resume continues the run in a folder: give it with out (--out)")
    if resume:
        path = Path(resume)
        if path.name == "best" and (path / "progress.json").is_file():
            return path.parent
        return path.parent.parent if path.parent.name == "checkpoints" else path
    return Path("out") / f"{name}-{time.strftime('%m%d-%H%M%S')}-{time.time_ns() // 10**6 % 1000:03}"


def _report(folder: Path, trainer: Trainer) -> None:
    """Write report.html; if that fails, note it and go on."""
    try:
        report(None, trainer.module, folder / "report.html", folder=folder)
    except (FxplugError, OSError) as error:
        trainer.watch.note(f"report.html could not be written: {error}")
