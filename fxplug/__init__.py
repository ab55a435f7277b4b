"""Change a PyTorch model by rewriting its graph.

The names below are the public face. They are imported when first used, so that reading a pass or a
configuration does not wait for torch. No submodule bears the name of a public function: importing it
would put the module in the function's place.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .core import extensions

__version__ = "0.2.0"

if TYPE_CHECKING:
    from .adapters.adapted import load_adapted
    from .adapters.extraction import extract
    from .adapters.file_passes import pass_for
    from .adapters.file_tools import convert_adapter, merge_adapters, resize_adapter
    from .adapters.inspection import inspect_adapter
    from .adapters.loading import load_adapter
    from .adapters.rows import Rows
    from .adapters.slots import Adapters
    from .adapters.state import Prepared
    from .adapters.strengths import Schedule, Strength
    from .adapters.writing import save_adapter
    from .compat.zhijian.blitz import blitz
    from .config.flow import Result, rewrite
    from .config.run_config import load_config
    from .core.artifacts.artifact import digest, load, save
    from .core.capture.retracer import variants
    from .core.capture.tracer import trace
    from .core.errors import (
        ArtifactError,
        ClashError,
        FxplugError,
        GuardError,
        Limits,
        MatchError,
        SpecError,
        TraceError,
        TrainError,
        VerifyError,
    )
    from .core.extensions import Extension
    from .core.ir.text import diff, show
    from .core.ir.traced_module import TracedModule
    from .core.rewriter.applying import apply
    from .core.rewriter.features import features
    from .core.rewriter.matcher import find
    from .core.rewriter.removing import remove
    from .core.rewriter.sites import Site
    from .core.spec.pass_file import load_pass
    from .core.spec.rules import Match, Pass, Rule
    from .core.verifier import verify
    from .exports.checkpoints import save_checkpoint
    from .exports.exporter import export
    from .exports.onnx_model import OnnxModel, load_onnx
    from .exports.package import Package, load_package
    from .hub.pushing import push
    from .lowerings.linear.fused import fuse
    from .lowerings.linear.measurement import tune
    from .lowerings.merging.fold import merge, unmerge
    from .lowerings.pipeline import lower
    from .lowerings.pruning import prune
    from .parallel.costs.prediction import fastest_plan
    from .parallel.local_weights import localize, whole_state
    from .parallel.pipelines.entry import in_steps, pipefusion, stale_sequence
    from .parallel.pipelines.pipeline import PipeFusion
    from .parallel.plan import Plan, parallel_plan, parallelize
    from .pipelines.control import controlnet_of
    from .pipelines.diffusers_types import pipeline_part
    from .pipelines.rewriting import rewrite_pipeline
    from .pipelines.tracing import load_pipeline, save_pipeline, trace_pipeline
    from .reporting.contents import Page
    from .reporting.reports import report
    from .step_cache.cache import StepCache
    from .step_cache.fast_attention import FastAttention
    from .step_cache.policies import Every, TeaCache, Threshold
    from .training.param_groups import trainable
    from .training.run import Run, train
    from .training.tasks.task import Task
    from .training.trainer import Trainer

__all__ = [
    "Adapters",
    "ArtifactError",
    "ClashError",
    "Every",
    "Extension",
    "FastAttention",
    "FxplugError",
    "GuardError",
    "Limits",
    "Match",
    "MatchError",
    "OnnxModel",
    "Package",
    "Page",
    "Pass",
    "PipeFusion",
    "Plan",
    "Prepared",
    "Result",
    "Rows",
    "Rule",
    "Run",
    "Schedule",
    "Site",
    "SpecError",
    "StepCache",
    "Strength",
    "Task",
    "TeaCache",
    "Threshold",
    "TraceError",
    "TracedModule",
    "TrainError",
    "Trainer",
    "VerifyError",
    "apply",
    "blitz",
    "controlnet_of",
    "convert_adapter",
    "diff",
    "digest",
    "export",
    "extract",
    "fastest_plan",
    "features",
    "find",
    "fuse",
    "in_steps",
    "inspect_adapter",
    "load",
    "load_adapted",
    "load_adapter",
    "load_config",
    "load_onnx",
    "load_package",
    "load_pass",
    "load_pipeline",
    "localize",
    "lower",
    "merge",
    "merge_adapters",
    "parallel_plan",
    "parallelize",
    "pass_for",
    "pipefusion",
    "pipeline_part",
    "prune",
    "push",
    "remove",
    "report",
    "resize_adapter",
    "rewrite",
    "rewrite_pipeline",
    "save",
    "save_adapter",
    "save_checkpoint",
    "save_pipeline",
    "show",
    "stale_sequence",
    "trace",
    "trace_pipeline",
    "train",
    "trainable",
    "tune",
    "unmerge",
    "variants",
    "verify",
    "whole_state",
]

_CORE = {
    "core.artifacts.artifact": ["digest", "load", "save"],
    "core.capture.retracer": ["variants"],
    "core.capture.tracer": ["trace"],
    "core.errors": [name for name in __all__ if name.endswith("Error")] + ["Limits"],
    "core.extensions": ["Extension"],
    "core.ir.text": ["diff", "show"],
    "core.ir.traced_module": ["TracedModule"],
    "core.rewriter.applying": ["apply"],
    "core.rewriter.features": ["features"],
    "core.rewriter.matcher": ["find"],
    "core.rewriter.removing": ["remove"],
    "core.rewriter.sites": ["Site"],
    "core.spec.pass_file": ["load_pass"],
    "core.spec.rules": ["Match", "Pass", "Rule"],
    "core.verifier": ["verify"],
}
_MODULE = {name: module for module, names in _CORE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULE:
        value = getattr(import_module(f".{_MODULE[name]}", __name__), name)
    elif name.startswith("_") or (value := extensions.import_part("names", name)) is None:
        note = "" if name.startswith("_") else extensions.describe_unusable()
        raise AttributeError(f"module 'fxplug' has no attribute '{name}'{note}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *extensions.list_parts("names")})
