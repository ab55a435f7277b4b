"""Change a PyTorch model by rewriting its graph.

The names below are the public face. They are imported when first used, so that reading a pass or a
configuration does not wait for torch. No submodule bears the name of a public function: importing it
would put the module in the function's place.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .adapting.switching import Adapters
    from .artifact import load, save
    from .blitz_pass import blitz
    from .caching import StepCache
    from .checks import verify
    from .config import load_config
    from .edit import apply
    from .errors import (
        ArtifactError,
        ClashError,
        FxplugError,
        GuardError,
        MatchError,
        SpecError,
        TraceError,
        TrainError,
        VerifyError,
    )
    from .exporting import export
    from .fastattention import FastAttention
    from .flow import Result, rewrite
    from .limits import Limits
    from .lowerings.folding import merge, unmerge
    from .lowerings.fusing import fuse
    from .lowerings.lowering import lower
    from .lowerings.tuning import tune
    from .match import Site, find
    from .packages import Package, load_package
    from .parallel.fusion import in_steps, pipefusion, stale_sequence
    from .parallel.localizing import localize, whole_state
    from .parallel.pipeline import PipeFusion
    from .parallel.plan import Plan, parallel_plan, parallelize
    from .policies import Every, TeaCache, Threshold
    from .printing import diff, show
    from .rules import Match, Pass, Rule
    from .spec import load_pass
    from .tracing import trace
    from .training.run import Run, train
    from .training.tasks.task import Task
    from .training.trainer import Trainer

__all__ = [
    "Adapters",
    "ArtifactError",
    "ClashError",
    "Every",
    "FastAttention",
    "FxplugError",
    "GuardError",
    "Limits",
    "Match",
    "MatchError",
    "Package",
    "Pass",
    "PipeFusion",
    "Plan",
    "Result",
    "Rule",
    "Run",
    "Site",
    "SpecError",
    "StepCache",
    "Task",
    "TeaCache",
    "Threshold",
    "TraceError",
    "TrainError",
    "Trainer",
    "VerifyError",
    "apply",
    "blitz",
    "diff",
    "export",
    "find",
    "fuse",
    "in_steps",
    "load",
    "load_config",
    "load_package",
    "load_pass",
    "localize",
    "lower",
    "merge",
    "parallel_plan",
    "parallelize",
    "pipefusion",
    "rewrite",
    "save",
    "show",
    "stale_sequence",
    "trace",
    "train",
    "tune",
    "unmerge",
    "verify",
    "whole_state",
]

_HOME = {
    "artifact": ["load", "save"],
    "blitz_pass": ["blitz"],
    "caching": ["StepCache"],
    "checks": ["verify"],
    "config": ["load_config"],
    "edit": ["apply"],
    "errors": [name for name in __all__ if name.endswith("Error")],
    "exporting": ["export"],
    "fastattention": ["FastAttention"],
    "flow": ["Result", "rewrite"],
    "lowerings.folding": ["merge", "unmerge"],
    "lowerings.fusing": ["fuse"],
    "lowerings.lowering": ["lower"],
    "limits": ["Limits"],
    "match": ["Site", "find"],
    "packages": ["Package", "load_package"],
    "parallel.fusion": ["in_steps", "pipefusion", "stale_sequence"],
    "parallel.localizing": ["localize", "whole_state"],
    "parallel.pipeline": ["PipeFusion"],
    "parallel.plan": ["Plan", "parallel_plan", "parallelize"],
    "policies": ["Every", "TeaCache", "Threshold"],
    "printing": ["diff", "show"],
    "rules": ["Match", "Pass", "Rule"],
    "spec": ["load_pass"],
    "adapting.switching": ["Adapters"],
    "tracing": ["trace"],
    "training.run": ["Run", "train"],
    "training.tasks.task": ["Task"],
    "training.trainer": ["Trainer"],
    "lowerings.tuning": ["tune"],
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'fxplug' has no attribute '{name}'")
    value = getattr(import_module(f".{_MODULE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
