"""One configuration from its model to its artifact: build, trace, find, apply, verify, save."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..core import extensions
from ..core.artifacts.artifact import save
from ..core.capture.fake_tensors import is_missing_values
from ..core.capture.tracer import trace
from ..core.errors import DEFAULT, LONGEST, ArtifactError, FxplugError, SpecError, cut_lines, escape, format_fields
from ..core.ir.containers import count_pass_parameters
from ..core.ir.text import diff, find_patterns
from ..core.ir.traced_module import TracedModule, list_class_names
from ..core.rewriter.applying import apply
from ..core.rewriter.matcher import find
from ..core.rewriter.sites import Site, Sites
from ..core.writing import check_folder
from .models.built_model import BuiltModel
from .models.example_inputs import build_with_inputs, fill_inputs, make_added_inputs, make_inputs
from .models.factory import find_device
from .run_config import Config, load_config, resolve
from .saved_config import read_saved_config

if TYPE_CHECKING:  # what a dry run may do without is imported by what needs it
    from ..core.verifier import Report

SHOWN = 30  # so many sites are listed in the text of a result
Step = Callable[[str], AbstractContextManager[Any]]


@dataclass
class Result:
    """What a rewrite gave: the rewritten `module`, the `base` it was made of (they share weights), the `sites` of each
    pass, the `report` of verification (None when it was off), the example `inputs`, the artifact `out`, the `plan` of
    parallel passes (`fxplug.Plan`), what runs the module in steps, `stepped`, where a pass says so, and the `pipeline` that
    the model is a part of, with the model still in it (None: a model without one). `beside` has the results of further models
    of that pipeline by their names, where the configuration names several; `part` is the name of this one."""

    module: TracedModule
    base: TracedModule
    config: Config
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    sites: dict[str, Sites] = field(default_factory=dict)
    report: Report | None = None
    out: Path | None = None
    plan: Any = None
    stepped: Any = None
    pipeline: Any = None
    part: str = ""
    beside: dict[str, Result] = field(default_factory=dict)

    __repr__ = format_fields

    @property
    def by_part(self) -> dict[str, Result]:
        """Results of all models, by their names in the pipeline: this one and those beside it."""
        return {self.part: self, **self.beside}

    @property
    def listing(self) -> str:
        """Every site with its shapes, and the parameters that each pass adds: as long as there are sites."""
        return self._listed(lambda found: (f"  {site}{block}" for site, block in found))

    @property
    def folded(self) -> str:
        """Listing with similar sites in one line: `blocks.{0:12}.attn.qkv Linear [...] -> [...] x12`."""
        return self._listed(_folded_rows)

    def describe(self) -> dict[str, Any]:
        """Return as plain values where each pass acts and the parameters that it adds: what `listing` says as text."""
        return {
            "part": self.part,
            "model": self.base.classes[0],
            "parameters": sum(p.numel() for p in self.module.parameters()),
            "base_parameters": sum(p.numel() for p in self.base.parameters()),
            "passes": [_describe_sites(self, name, sites) for name, sites in self.sites.items()],
        }

    def _listed(self, rows: Callable[[Iterable[tuple[Site, str]]], Iterator[str]]) -> str:
        plan = [self.plan.listing] if self.plan is not None else []
        plan += [self.stepped.extra_repr()] if self.stepped is not None else []
        return "\n".join([*_site_lines(self, rows), *plan, count_pass_parameters(self.module)])

    def __str__(self) -> str:
        """Return the listing if it is short, else the number of sites of each pass, what it left out, and the parameters."""
        if sum(map(len, self.sites.values())) <= SHOWN and len(text := self.listing) <= LONGEST:
            return text
        rows = (f"{name}: {sites.summary}" for name, sites in self.sites.items())
        return cut_lines("\n".join([*rows, count_pass_parameters(self.module)]))


def rewrite(
    source: str | Path | Mapping[str, Any] | Config,
    *,
    out: str | Path | None = None,
    set: Sequence[str] = (),
    dry_run: bool = False,
    verify: bool | None = None,
    progress: Step | None = None,
    compile: bool = True,
) -> Result:
    """Do all that a configuration says, and save the result in the folder `out` when one is given.

    Of several models of a pipeline each is rewritten by the same passes, and saved in a folder of its name in `out`. The global
    random state is left as it was.

    Args:
        source: A configuration, as `load_config` takes it.
        out: The folder to write; None saves nothing.
        set: Changes of values, as in `load_config`.
        dry_run: Check only the structure and write nothing. It uses no memory for weights, but for a model that reads values
            out of its data, with a warning.
        verify: Whether the result is verified; None is what the configuration says.
        progress: `progress(text)` gives a context manager for each step.
        compile: Whether verification compiles.

    Returns:
        The rewritten module, the one before, the sites, and the report of the verification.

    Raises:
        FxplugError: Anything that the configuration or the rewrite has wrong; a folder that cannot be written before anything
            else. Nothing is written then.
    """
    if isinstance(source, Config) and set:
        raise SpecError(
            "'set' is only allowed with a file or mapping, and this is a configuration that was read already: set the values "
            "when you read it"
        )
    config = source if isinstance(source, Config) else load_config(source, set)
    if out is not None and not dry_run:
        check_folder(Path(out), ArtifactError)
    step = progress or (lambda text: nullcontext())
    checked = config.verify if verify is None else verify
    devices = [find_device(config)] if find_device(config).type == "cuda" else []
    with torch.random.fork_rng(devices):
        result = _plan(config, step) if dry_run else _rewritten(config, step)
        if checked:
            with step("verify"):
                from ..core.verifier import verify as run_checks

                for one in result.by_part.values():
                    args, kwargs = one.inputs
                    one.report = run_checks(one.base, one.module, args, kwargs, compile=compile and not dry_run)
    if out is not None and not dry_run:
        with step("save"):
            for name, one in result.by_part.items():
                one.out = Path(out, name) if result.beside else Path(out)
                save_run_record(one)
                inputs = {**fill_inputs(config, one.base, one.inputs), **make_added_inputs(config, one.module)[1]}
                save(one.module, one.out, config={**resolve(config), "inputs": inputs})
    return result


def make_saved_inputs(folder: str | Path, module: TracedModule) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs for a saved rewrite, as the configuration in its folder has them. Builds and imports nothing."""
    read = read_saved_config(folder)
    if read is None:
        raise SpecError(
            f"'{folder}' was saved without a configuration, so its example inputs are not known: load it in Python, and pass "
            "them there"
        )
    kept: dict[str, Any] = {key: read[key] for key in ("inputs", "device", "dtype", "seed", "mode") if key in read}
    return make_inputs(load_config({"model": "the saved one", **kept}), module)


def read_saved_diff(folder: str | Path, module: TracedModule) -> str:
    """Return the diff of the rewrite that was saved in a folder. Raises SpecError if none was kept."""
    kept = load_run_record(module)
    if kept is None:
        raise SpecError(f"'{folder}' was not saved by `fxplug rewrite`, so the model before the rewrite is not known")
    return escape("".join(kept["text"]))


def load_run_record(module: TracedModule) -> dict[str, Any] | None:
    """Return a saved rewrite's record of the model before it; None if other passes were applied since.

    `text` is the diff, `changes` are for pages, None without fxplug.reporting; `checks` is what verification had found, None
    where it was off. What older versions saved lacks both.
    """
    kept, applied = module.meta.get("diff"), [entry["name"] for entry in module.meta.get("passes", [])]
    return kept if isinstance(kept, dict) and kept.get("passes") == applied else None


def save_run_record(result: Result) -> None:
    """Keep with the module of a result what is said of it later: what it was before, and how it was checked."""
    text, piece = diff(result.base, result.module), DEFAULT.string
    checks = result.report.json()["checks"] if result.report is not None else None
    changes = extensions.import_part("hooks", "changes")
    result.module.meta["diff"] = {
        "passes": [entry["name"] for entry in result.module.meta.get("passes", [])],
        "text": [text[i : i + piece] for i in range(0, len(text), piece)],
        "changes": changes and changes(result.base, result.module),
        "checks": checks and [{key: check[key] for key in ("name", "status", "detail")} for check in checks],
    }


def _plan(config: Config, step: Step) -> Result:
    """Rewrite on meta tensors; on real ones, with a warning, for a model that reads values out of its data."""
    try:
        traced = _traced(config, step, "meta")
    except Exception as error:  # the model's code may raise anything
        if find_device(config).type == "meta" or not is_missing_values(error):
            raise
        warnings.warn("the model cannot be built without memory on the meta device, so the real model is built: "
                      f"{error}", stacklevel=2)
        return _rewritten(config, step)
    return _applied(config, *traced, step, "meta")


def _rewritten(config: Config, step: Step) -> Result:
    return _applied(config, *_traced(config, step, None), step, None)


def _traced(config: Config, step: Step, device: str | None) -> tuple[TracedModule, BuiltModel]:
    torch.manual_seed(config.seed)
    with step("build the model"):
        built = build_with_inputs(config, device=device, later=_later(config))
    return _trace(config, built, step), built


def _trace(config: Config, built: BuiltModel, step: Step) -> TracedModule:
    with step(f"trace {built.part}".rstrip()), config.located():
        try:
            return built.complete(trace(built.module, *built.inputs, leaf=config.leaf))
        except Exception as error:  # the model's, which a pipeline called
            if built.pipeline is None or isinstance(error, FxplugError):
                raise
            finding = f"{type(built.module).__name__} fails on what its pipeline calls it with: {type(error).__name__}: {error}"
            raise SpecError(finding, path=("model",)) from error


def _later(config: Config) -> set[str]:
    """Return the inputs that passes will add."""
    return {called for p in config.passes for name in p.inputs for called in (name, f"{p.name}_{name}")}


def _applied(config: Config, base: TracedModule, built: BuiltModel, step: Step, device: str | None) -> Result:
    torch.manual_seed(config.seed)  # new blocks do not depend on how much the model's own initialisation drew
    result = Result(base, base, config, built.inputs, pipeline=built.pipeline, part=built.part)
    for index, p in enumerate(config.passes):
        if not p.goes_last:
            with step(f"apply {p.name}"), with_config_lines(config, index):
                found = result.sites[p.name] = find(result.module, p)
                result.module = apply(result.module, found)
    if result.module is not base:
        added = make_added_inputs(config, result.module, device=device if built.pipeline is None else None)[0]
        result.inputs = built.inputs[0], {**built.inputs[1], **added}
    for kind in dict.fromkeys(type(p) for p in config.passes if p.goes_last):
        kind.finish(result, step)
    for name, other in built.beside.items():
        result.beside[name] = _applied(config, _trace(config, other, step), other, step, device)
    return result


@contextmanager
def with_config_lines(config: Config, *indices: int) -> Iterator[None]:
    """Add to an error inside passes the lines of the configuration that asked for them."""
    try:
        yield
    except FxplugError as error:
        where = ", ".join(str(config.where("passes", index)) for index in indices)
        if not where or where in str(error):
            raise
        text = f"{error}\n  given at {where}"
        raise (SpecError(text) if isinstance(error, SpecError) else type(error)(text)) from error


def _folded_rows(found: Iterable[tuple[Site, str]]) -> Iterator[str]:
    alike: dict[tuple[str, int], list[str]] = {}
    times = Counter[tuple[str, str]]()
    for site, block in found:
        key = (f"{site.what}{block}", site.where)
        alike.setdefault((key[0], times[key]), []).append(site.where)  # two blocks at one place are two lines
        times[key] += 1
    rows = [(where, what) for (what, _), places in alike.items() for where in find_patterns(places)]
    order = {where: index for index, (_, where) in enumerate(times)}
    for where, what in sorted(rows, key=lambda row: order[row[0].first]):
        yield f"  {where.text}  {what}" + (f"  x{where.count}" if where.count > 1 else "")


def _site_lines(result: Result, rows: Callable[[Iterable[tuple[Site, str]]], Iterator[str]]) -> Iterator[str]:
    for name, sites in result.sites.items():
        added = dict(result.module.named_modules()).get(name)
        blocks = [entry["block"] for entry in _entry(result.module, name)["sites"]]
        count = sum(p.numel() for p in added.parameters()) if added is not None else 0
        head, _, left = sites.summary.partition("; ")
        yield f"{name}: {head}, {count:,} parameters"
        for network in _entry(result.module, name)["networks"]:
            module = result.module.get_submodule(f"{name}.{network}")
            yield f"  network {network}  {list_class_names(module)[0]}  +{sum(p.numel() for p in module.parameters()):,}"
        yield from rows((site, _added(result, block)) for site, block in zip(sites, blocks, strict=True))
        if left:
            yield f"{name}: {left}"


def _describe_sites(result: Result, name: str, sites: Sites) -> dict[str, Any]:
    entry = _entry(result.module, name)

    def count(path: str) -> int:
        return sum(p.numel() for p in result.module.get_submodule(path).parameters()) if path else 0

    rows = [
        {
            "where": site.where, "path": site.path, "class": site.classes[0], "caught": dict(site.caught),
            "input": list(site.x.shape) if site.x else None, "output": list(site.y.shape) if site.y else None,
            "block": made["block"] or None, "parameters": count(made["block"]),
        }
        for site, made in zip(sites, entry["sites"], strict=True)
    ]  # fmt: skip
    networks = [{"name": network, "parameters": count(f"{name}.{network}")} for network in entry["networks"]]
    added = sum(p.numel() for path, p in result.module.named_parameters() if path.startswith(f"{name}."))
    return {"name": name, "parameters": added, "left_out": sites.left, "networks": networks, "sites": rows}


def _added(result: Result, block: str) -> str:
    """Return a block's class and its number of parameters, as text."""
    if not block:
        return ""
    count = sum(p.numel() for p in result.module.get_submodule(block).parameters())
    return f"  {block.rpartition('.')[2]} +{count:,}"


def _entry(module: TracedModule, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(entry for entry in module.meta["passes"] if entry["name"] == name)
    return found
