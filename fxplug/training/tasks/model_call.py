"""How a task calls a module: which of its inputs gets what."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...core.errors import SpecError, did_you_mean, format_fields
from ...core.ir import ops

# the names that diffusers' models and their relatives have
NOISY = ("sample", "hidden_states", "x", "latents", "noisy")
TIME = ("timestep", "timesteps", "t", "time")
LABEL = ("class_labels", "y", "labels", "label")


@dataclass(frozen=True)
class ModuleInput:
    """An input of a module: `shape` and `dtype` of the example tensor it was traced with, None where that is not known.

    `fixed` says that it is a part of the graph, and is to be given as `value`; `added` that a pass has added it.
    """

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    fixed: bool = False
    value: Any = None
    required: bool = False
    added: bool = False

    __repr__ = format_fields


def list_inputs(module: nn.Module) -> dict[str, ModuleInput]:
    """Return the inputs of a module by name. Of a module that was not traced only the names are known."""
    if not isinstance(module, fx.GraphModule):
        parameters = inspect.signature(module.forward).parameters.values()
        return {p.name: ModuleInput(required=p.default is p.empty) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    fixed: dict[str, Any] = {}
    optional: set[str] = set()
    for node in (n for n in module.graph.nodes if n.op == "call_function"):
        if node.target is ops.check_constants:
            fixed.update(zip(node.args[2], node.args[1], strict=True))
        elif node.target is ops.check_added and not node.args[4]:
            optional.add(node.args[1])
    found = {}
    for node in (n for n in module.graph.nodes if n.op == "placeholder"):
        name, default = str(node.target), node.args[0] if node.args else inspect.Parameter.empty
        if name.startswith("*"):
            continue
        kept = name in fixed
        found[name] = ModuleInput(
            shape=tuple(node.meta["shape"]) if "shape" in node.meta else None,
            dtype=node.meta.get("dtype"),
            fixed=kept,
            value=fixed.get(name),
            # a tensor that a pass asks for has the default None only because arguments with a default stand before it
            required=not kept and name not in optional and (default is inspect.Parameter.empty or default is None),
            added="pass" in node.meta,
        )
    return found


class ModuleCall:
    """Calls a module by keywords and gives its first tensor.

    `mapping` says for each input where its value comes from: the name of a value (`noisy`, `text.pooled`), a number, or a
    mapping of these for an input that is a mapping. What the module was traced with and is no tensor (`return_dict`) is
    given again.
    """

    def __init__(self, mapping: Mapping[str, Any], inputs: Mapping[str, ModuleInput], known: Collection[str]) -> None:
        """Check the mapping: `known` has the names of the available values. Raises SpecError for a name that is none of them,
        for an input that the module does not have, and for a required one that is missing."""
        self.mapping, self.inputs = dict(mapping), dict(inputs)
        for name, source in self.mapping.items():
            if name not in inputs:
                hint = did_you_mean(name, inputs)
                raise SpecError(f"the model has no input '{name}'{hint}; {format_inputs(inputs)}", path=("call",), key=name)
            if inputs[name].fixed:
                raise SpecError(
                    f"the model was traced with {name}={inputs[name].value!r}, which is part of the graph: give a tensor for "
                    f"'{name}' in the section 'inputs'",
                    path=("call", name),
                )
            _check_sources(source, known, ("call", name))
        missing = [name for name, i in inputs.items() if i.required and name not in mapping]
        if missing:
            text = f"the model needs '{missing[0]}', and no value is set for it"
            hint = f"write call: {{{missing[0]}: ...}} with one of {', '.join(known)}"
            raise SpecError(f"{text}; {hint}; {format_inputs(inputs)}", path=("call",))

    def uses(self, name: str) -> bool:
        """Return whether the value of that name is passed to the module."""
        return name in _sources(self.mapping)

    def __call__(self, module: nn.Module, values: Mapping[str, Any]) -> Tensor:
        given = {name: self._value(source, values, self.inputs[name].dtype) for name, source in self.mapping.items()}
        constants = {name: i.value for name, i in self.inputs.items() if i.fixed}
        return find_tensor(module(**given, **constants))

    def _value(self, source: Any, values: Mapping[str, Any], dtype: torch.dtype | None) -> Any:
        if isinstance(source, Mapping):
            return {name: self._value(member, values, None) for name, member in source.items()}
        if not isinstance(source, str):
            return source
        if source not in values:
            found = f"the data has no '{source}', which 'call' passes to the model{did_you_mean(source, values)}"
            raise SpecError(f"{found}; there are {', '.join(values)}", path=("data",))
        value = values[source]
        floats = isinstance(value, Tensor) and value.is_floating_point() and dtype is not None and dtype.is_floating_point
        return value.to(dtype) if floats else value


def _sources(source: Any) -> set[str]:
    if isinstance(source, Mapping):
        return {name for member in source.values() for name in _sources(member)}
    return {source} if isinstance(source, str) else set()


def _check_sources(source: Any, known: Collection[str], path: tuple[str, ...]) -> None:
    for name in _sources(source):
        # another name may be a column of the data, which is known with the first batch
        if name not in known and "." in name:
            raise SpecError(f"no value '{name}'{did_you_mean(name, known)}; there are {', '.join(known)}", path=path)


def make_default_call(inputs: Mapping[str, ModuleInput], texts: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the default arguments of a denoising model by the names of its inputs. Raises SpecError if the names are
    unknown."""
    free = [name for name, i in inputs.items() if not i.fixed]
    found = {name: f"text.{name}" for name in free if name in texts}
    for names, value in ((NOISY, "noisy"), (TIME, "time"), (LABEL, "label")):
        name = next((name for name in names if name in free and name not in found), None)
        if name is not None:
            found[name] = value
        elif value != "label":
            hint = f"write call: {{NAME: {value}, ...}}; {format_inputs(inputs)}"
            raise SpecError(f"no input of the model has a name that means '{value}'; {hint}", path=("call",))
    return found | dict.fromkeys(list_condition_inputs(inputs), "condition")


def list_condition_inputs(inputs: Mapping[str, ModuleInput]) -> list[str]:
    """List the inputs that passes have added for a picture of each sample, as ControlNet does."""
    return [n for n, i in inputs.items() if i.added and not i.fixed and (n == "cond" or n.endswith("_cond"))]


def format_inputs(inputs: Mapping[str, ModuleInput]) -> str:
    """List the inputs of a model that can be set, as text."""
    names = [f"{n} {list(i.shape)}" if i.shape is not None else n for n, i in inputs.items() if not i.fixed]
    return f"its inputs are {', '.join(names)}"


def find_tensor(result: Any) -> Tensor:
    """Return the first tensor of a result: itself, of a tuple, or of an output class."""
    if isinstance(result, Tensor):
        return result
    members = list(result.values()) if isinstance(result, Mapping) else result if isinstance(result, (tuple, list)) else ()
    members = members or list(vars(result).values() if hasattr(result, "__dict__") else ())
    for member in members:
        if isinstance(member, Tensor):
            return member
    raise SpecError(f"the model returns a {type(result).__name__} without a tensor")


def count_embedding_rows(module: nn.Module, name: str) -> int | None:
    """Return the number of rows of the embedding that reads an input of a traced module; None if there is none."""
    if not isinstance(module, fx.GraphModule):
        return None
    waiting = [n for n in module.graph.nodes if n.op == "placeholder" and n.target == name]
    seen = set(waiting)
    while waiting:
        for user in waiting.pop().users:
            if user.op == "call_module":
                layer = module.get_submodule(str(user.target))
                if isinstance(layer, nn.Embedding):
                    return layer.num_embeddings
            elif user not in seen:
                seen.add(user)
                waiting.append(user)
    return None


def get_images(batch: Mapping[str, Any]) -> Tensor:
    """Return the images of a batch. Raises SpecError for data without an `image`."""
    if "image" not in batch:
        found = ", ".join(name for name in batch if name not in ("index", "name")) or "nothing"
        if "video" in batch:
            raise SpecError("the task takes images, and the data has videos: give 'images'", path=("data", "videos"))
        hint = "name it with columns: {image: ...}, or call it 'image' in the data set"
        raise SpecError(f"the data has no 'image'{did_you_mean('image', batch)}; it has {found}; {hint}", path=("data",))
    image: Tensor = batch["image"]
    return image


def check_labels(batch: Mapping[str, Any], count: int, classes: Collection[str] | None, what: str) -> None:
    """Raise SpecError naming the first sample whose label is none of 0 to `count` - 1; `what` says what these label.

    On a GPU an index out of range ends the process, and checking costs a synchronisation: data whose classes fit is not
    checked.
    """
    if classes is not None and len(classes) <= count:
        return
    label: Tensor = batch["label"]
    wrong = ((label < 0) | (label >= count)).nonzero().flatten().tolist()
    if wrong:
        names = batch.get("name")
        who = f"'{names[wrong[0]]}'" if names else f"sample {wrong[0]} of the batch"
        more = f"; {len(wrong)} such labels in this batch" if len(wrong) > 1 else ""
        known = f"; the data has {len(classes)} classes" if classes is not None else ""
        found = f"{who} has the label {int(label[wrong[0]])}, and the model has {count} {what}, 0 to {count - 1}"
        raise SpecError(f"{found}{more}{known}", path=("data",))
    if classes is not None:
        found = f"the data has {len(classes)} classes, and the model has {count} {what}: none for '{list(classes)[count]}'"
        raise SpecError(found, path=("data",))
