"""What graph.json says of modules, tensors and nodes, as records that are checked when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import FailFast, Field

from ..errors import ArtifactError, SpecError
from ..spec.yaml_source import Section, validate

R = TypeVar("R", bound=Section)


def check_record(kind: type[R], data: Any, where: str) -> R:
    """Validate JSON, or plain values, as a record of this kind. Raises ArtifactError, which begins with `where`."""
    try:
        return validate(kind, data)
    except SpecError as error:
        raise ArtifactError(f"{where}: {error}") from None


class ModuleRecord(Section):
    """A module: none, the `same` as one before, a container, or one of a class, made by `arguments`, else of what it holds.

    `parameters` and `buffers` say by name whether there is a tensor; `fixed` has the attributes that forward may have read.
    """

    kind: Literal["none", "same", "container", "module", "block", "leaf"]
    same: str = Field("", alias="as")
    classes: list[str] = Field([], min_length=1)
    cls: str = Field("", alias="class")
    arguments: dict[str, Any] | None = None
    attributes: dict[str, Any] = {}
    fixed: list[str] | None = None
    parameters: dict[str, bool] = {}
    buffers: dict[str, bool] = {}


class PartRecord(Section):
    """A plain tensor that a packed one is made of."""

    kind: Literal["parameter", "buffer"]
    shape: list[Annotated[int, Field(ge=0)]]
    dtype: str
    stride: list[Annotated[int, Field(ge=0)]] | None = None


class TensorRecord(PartRecord):
    """A parameter or buffer; a packed one has a class, what that keeps beside its numbers, and parts."""

    persistent: bool = True
    requires_grad: bool = False
    same_as: str | None = None
    stored: bool = True
    cls: str = Field("", alias="class")
    context: Any = None
    parts: dict[str, PartRecord] | None = Field(None, min_length=1, max_length=16)


class ResultRecord(Section):
    """The class of a result, by its import path; a NamedTuple has fields."""

    result: str
    fields: list[str] | None = None


class NodeMeta(Section):
    """What a node keeps in its meta; `stack` is the number of its module stack."""

    index: int = 0
    effect: bool = False
    reads_dtype: bool = False
    behind: str = ""
    constant: bool = False
    port: Annotated[tuple[str, Literal["in", "out", "param"], list[int | str]] | None, Field(strict=False)] = None
    shape: list[int] = []
    dtype: str = ""
    passed: Any = Field(None, alias="pass")
    call: Any = None
    named: Any = None
    stack: Annotated[int, Field(ge=0)] = 0


class NodeRecord(Section):
    """A node of a graph; its values are encoded."""

    name: Any = None
    op: Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]
    target: Any = None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    meta: NodeMeta = NodeMeta.model_validate({})


class Graphs(Section):
    """The graphs of a module, of one mode or of both."""

    eval: Annotated[list[NodeRecord], FailFast()] = []
    train: Annotated[list[NodeRecord], FailFast()] = []


class Variant(Section):
    """The graphs of another form of call."""

    twin_error: str | None = None
    graphs: Graphs


class Document(Variant):
    """All of graph.json."""

    format: int
    classes: list[str]
    training: bool
    modes: Annotated[list[str], FailFast()]
    meta: dict[str, Any]
    extras: dict[str, Any]
    tensors: dict[str, TensorRecord]
    modules: dict[str, ModuleRecord]
    stacks: Annotated[list[list[Annotated[tuple[str, str, str], Field(strict=False)]]], FailFast()]
    variants: list[Variant] = []


class Free(Section):
    """A record that may have more keys than are looked at."""

    model_config = {"extra": "ignore"}


class BankRecord(Free):
    """What `apply` writes down of a block for several adapters."""

    kind: str
    slots: int
    rank: int
    shape: Any


class SiteRecord(Free):
    """What `apply` writes down of a place that a pass changed."""

    path: str
    place: str
    block: str
    bank: Annotated[BankRecord, Field()] = None  # type: ignore[assignment]


class AppliedPass(Free):
    """What `apply` writes down of a pass."""

    name: str
    params: dict[str, Any]
    train: bool
    neutral: bool
    sites: list[SiteRecord]
    inputs: list[Any]
    networks: list[Any]


def check_counts(document: Mapping[str, Any], limits: Mapping[str, int]) -> None:
    """Raise ArtifactError for an object of graph.json with more members than `limits` has for it."""
    for key, most in limits.items():
        if isinstance(found := document.get(key, ()), (dict, list)) and len(found) > most:
            raise ArtifactError(f"graph.json has {len(found)} {key}; the limit is {most}")
