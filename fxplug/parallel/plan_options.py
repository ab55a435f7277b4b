"""The keywords of a plan as a pass or configuration has them. Imports no torch."""

from __future__ import annotations

from pydantic import Field

from ..core.spec.yaml_source import Section, Text

WAYS = ("ulysses", "ring", "batch", "rows", "tensor")  # numbers of processes
AXES = (*WAYS, "stages", "patches")  # the same of all that runs on several processes
STEP_KEYS = ("stages", "patches", "stale", "warmup", "correct", "steps", "clock")  # of what is run a step late


class PlanOptions(Section):
    """The keywords of a plan, as far as they can be checked without a model."""

    ulysses: int = Field(default=1, ge=1)
    ring: int = Field(default=1, ge=1)
    batch: int = Field(default=1, ge=1)
    rows: int = Field(default=1, ge=1)
    tensor: int = Field(default=1, ge=1)
    split: dict[str, int] | None = None
    at: Text | None = Field(default=None, description="the path of a region")
    stages: int | None = Field(default=None, ge=1)
    patches: int | None = Field(default=None, ge=1)
    stale: bool = False
    warmup: int | None = Field(default=None, ge=1)
    correct: int | None = Field(default=None, ge=0)
    steps: int | None = Field(default=None, ge=1)
    clock: str | None = Field(default=None, description="the name of an input")
