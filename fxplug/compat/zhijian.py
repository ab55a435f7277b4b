"""What add-ins written for ZhiJian import: their base class, and the block that calls their methods in a graph.

ZhiJian (LAMDA-ZhiJian, 2023) registers the methods as forward hooks of the base model, one add-in for each place.
Here they are traced once, and nothing is hooked.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from ..blocks.base import Block
from ..errors import SpecError, did_you_mean
from ..ir.pytree import children
from ..spec.addresses import select
from ..spec.import_path import import_target
from ..spec.options import check_options
from .zhijian_pass import entries

if TYPE_CHECKING:
    from ..rewriter.sites import Site

CACHE = "inputs_cache"
# what torch keeps in a module, and what every module may change
OWN = set(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"} | {CACHE}


class AddinBase(nn.Module):
    """A module with methods that stand at places of another model, as in ZhiJian.

    `adapt...(module, inputs)` gets the positional arguments that a module is called with, as a tuple, and returns a tensor
    for the first of them, or a tuple for all; `adapt...(module, inputs, outputs)` gets its result too and returns another
    one. Keyword arguments stay as they are.
    `inputs_cache` is the value at the line's in point, for as long as the method runs.
    """

    inputs_cache: Any

    def __init__(self, config: Any = None, model_config: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.inputs_cache = None

    def get_pre(self, module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        """Keep the first argument."""
        self.inputs_cache = inputs[0]
        return inputs[0]

    def get_post(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Keep the result."""
        self.inputs_cache = output
        return output

    def add_pre(self, module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        """The first argument and what was kept."""
        return inputs[0] + self.inputs_cache

    def add_post(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """The result and what was kept."""
        return output + self.inputs_cache

    def get_log_str(self) -> str:
        """What an add-in says of itself in a log: here nothing."""
        return ""


class Addin(Block):
    """Calls one method of an add-in. Its forward is traced into the graph, so a saved graph knows neither class.

    At a `point` "in" the method gets the module and its arguments; a tensor that it returns takes the place of the first,
    a tuple that of all. At a `point` "out" it gets the result too; a method that takes no outputs gets the result as its
    inputs there, being what goes into the next module. `across` says that the last value given is the `inputs_cache`.
    """

    inline: ClassVar[bool] = True

    def __init__(
        self, addin: nn.Module, method: str, point: str, across: bool = False, host: tuple[Any, ...] = (None,)
    ) -> None:
        """`host` holds what the method gets for the module. Raises SpecError for a method that the add-in has not."""
        super().__init__()
        self.addin, self.method, self.point, self.across, self.host = addin, method, point, across, host
        self.takes_outputs = _takes(addin, method, point)

    @classmethod
    def at(
        cls,
        site: Site,
        addin: Any,
        method: str,
        point: str,
        across: bool = False,
        modules: Sequence[str] = (),
    ) -> Addin:
        """A call of `method` of a copy of `addin`, or of a new add-in where that is a class or `{use, options}`.

        `modules` are patterns that each must name a module of the model. Raises SpecError.
        """
        _check_named(site, modules)
        if across:
            _check_called_once(site, site.args[-1].path)
        return cls(_own(addin), method, point, across, (Seen(site.module, site.path),))

    def forward(self, *values: Any) -> Any:
        """`(inputs)` or `(inputs, outputs)`, and the cache behind them where the line goes across modules."""
        given = list(values)
        if self.across:
            object.__setattr__(self.addin, CACHE, None)
            setattr(self.addin, CACHE, given.pop())
        before = _state(self.addin)
        call = getattr(self.addin, self.method)
        try:
            if self.point == "in":
                result = call(self.host[0], given[0])
            elif self.takes_outputs:
                result = call(self.host[0], *given)
            else:
                result = call(self.host[0], (given[1],))
        except (TypeError, AttributeError) as error:
            if not self.across and getattr(self.addin, CACHE, None) is None and "None" in str(error):
                raise SpecError(
                    f"{self.called} uses 'inputs_cache', and the line has no '{{in1}}' that says which value that is ({error})"
                ) from error
            raise
        finally:
            setattr(self.addin, CACHE, None)
        self.refuse_state(before, _state(self.addin))
        return self.inputs(result, given[0]) if self.point == "in" else self.outputs(result, given[1])

    @property
    def called(self) -> str:
        """Class and method, as messages name them."""
        return f"{type(self.addin).__name__}.{self.method}"

    def inputs(self, result: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """All arguments of the module, the method's result among them."""
        new = (result, *inputs[1:]) if isinstance(result, Tensor) else result
        if not isinstance(new, (tuple, list)) or _structure(tuple(new)) != _structure(tuple(inputs)):
            raise SpecError(
                f"{self.called} returns {_structure(result)} before a module that is called with {_structure(tuple(inputs))}; "
                "return a tensor for the first argument, or a tuple for all"
            )
        return tuple(new)

    def outputs(self, result: Any, outputs: Any) -> Any:
        """The module's result, the method's in its place. Raises SpecError for one of another structure."""
        if not self.takes_outputs and isinstance(result, (tuple, list)) and len(result) == 1:
            result = result[0]
        if _structure(result) != _structure(outputs):
            raise SpecError(
                f"{self.called} returns {_structure(result)} behind a module that returns {_structure(outputs)}; "
                "what reads it needs the same structure"
            )
        return result

    def refuse_state(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Raise SpecError where the method kept something in the add-in: a graph would not."""
        for name in before.keys() | after.keys():
            if name not in before or name not in after or not _same(before[name], after[name]):
                raise SpecError(
                    f"{self.called} sets '{name}' of the add-in, which would stay what it was when traced. A value from "
                    "elsewhere in the model comes by an in point, as 'inputs_cache'; what lasts from one call to the next "
                    "is a buffer that is changed in place (self.count.add_(1)); a value for this call only needs no 'self.'"
                )

    def extra_repr(self) -> str:
        return self.called


class Seen:
    """The module at a point, for the method to read: its settings and its weights, which stay the base model's."""

    __slots__ = ("_module", "_path")

    def __init__(self, module: nn.Module, path: str) -> None:
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_path", path)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(object.__getattribute__(self, "_module"))

    def __getattr__(self, name: str) -> Any:
        module, path = (object.__getattribute__(self, slot) for slot in Seen.__slots__)
        if name in ("forward", "parameters", "named_parameters", "buffers", "named_buffers", "state_dict"):
            raise self._refused(f"uses '{name}' of '{path}'")
        value = getattr(module, name)
        return Seen(value, f"{path}.{name}") if isinstance(value, nn.Module) else value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._refused(f"calls '{object.__getattribute__(self, '_path')}'")

    def __setattr__(self, name: str, value: Any) -> None:
        raise self._refused(f"sets '{name}' of '{object.__getattribute__(self, '_path')}'")

    def __repr__(self) -> str:
        return repr(object.__getattribute__(self, "_module"))

    def __deepcopy__(self, memo: Any) -> Seen:
        return self

    @staticmethod
    def _refused(what: str) -> SpecError:
        return SpecError(
            f"the add-in {what}, and may only read that module of the base model: its settings, and its weights by their "
            "names; a module that is to run again is written as a block of one's own"
        )


def _own(addin: Any) -> nn.Module:
    """An add-in for one place."""
    if isinstance(addin, nn.Module):
        return copy.deepcopy(addin)
    if isinstance(addin, Mapping):
        kind: Any = import_target(str(addin["use"]))
        options = {k: settings(v) for k, v in dict(addin.get("options") or {}).items()}
    else:
        kind, options = addin, {}
    made = getattr(kind, "func", kind)
    name = getattr(made, "__name__", repr(made))
    try:
        check_options(kind, options, name)
    except SpecError as error:
        raise SpecError(f"{name} cannot be made of the options {', '.join(options) or '(none)'}: {error}") from None
    addin = kind(**options)
    if not isinstance(addin, nn.Module):
        raise SpecError(f"{name} makes a {type(addin).__name__}; an add-in is an nn.Module")
    return addin


def settings(value: Any) -> Any:
    """A mapping as an object with attributes, all the way down, as the configurations of ZhiJian are."""
    if isinstance(value, Mapping):
        return SimpleNamespace(**{str(k): settings(v) for k, v in value.items()})
    return [settings(v) for v in value] if isinstance(value, (list, tuple)) else value


dict2args = settings  # ZhiJian's name


def _takes(addin: nn.Module, method: str, point: str) -> bool:
    """Whether the method takes (module, inputs, outputs) rather than (module, inputs)."""
    call = getattr(addin, method, None)
    name = type(addin).__name__
    if not callable(call):
        known = entries(type(addin))
        raise SpecError(f"{name} has no method '{method}'{did_you_mean(method, known)}; it has {', '.join(known) or 'none'}")
    signature = inspect.signature(call)
    fits = []
    for count in (2, 3):
        try:
            signature.bind(*[None] * count)
            fits.append(count)
        except TypeError:
            pass
    if not fits:
        raise SpecError(f"{name}.{method}{signature} must take (module, inputs), or (module, inputs, outputs)")
    if point == "in" and 2 not in fits:
        raise SpecError(
            f"{name}.{method}{signature} takes outputs, and before a module there are none; put the point behind the module, "
            "or name a method that takes (module, inputs)"
        )
    return 3 in fits


def _check_named(site: Site, modules: Sequence[str]) -> None:
    known = [name for name, _ in site.root.named_modules(remove_duplicate=False) if name]
    for pattern in modules:
        if not select(pattern, known):
            raise SpecError(f"the line names '{pattern}', and the model has no such module{did_you_mean(pattern, known)}")


def _check_called_once(site: Site, path: str) -> None:
    """A hook would keep what the last call gave; an address is that of the first."""
    graphs = getattr(site.root, "graphs", {})
    keys = {node.meta["port"].path for graph in graphs.values() for node in graph.nodes if node.meta.get("port")}
    calls = sorted(key for key in keys if key.partition("@")[0] == path)
    if len(calls) > 1:
        raise SpecError(
            f"the in point is at '{path}', which the model calls {len(calls)} times ({', '.join(calls)}), and a line cannot "
            f"say which call is meant; write a rule with args: [..., '{calls[-1]}'] and a block of your own"
        )


def _state(addin: nn.Module) -> dict[str, Any]:
    """What the attributes of an add-in are, with the members of lists and dicts."""
    found: dict[str, Any] = {}
    for path, module in addin.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                found.update({".".join(filter(None, (path, key))): member for key, member in value.items()})
            elif name not in OWN:
                kept = dict(value) if isinstance(value, dict) else list(value) if isinstance(value, (list, set)) else value
                found[".".join(filter(None, (path, name)))] = kept
    return found


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return isinstance(a, (bool, int, float, str)) and type(a) is type(b) and a == b


def _structure(value: Any) -> str:
    """How a value is nested: `(tensor, {'sample': tensor})`."""
    if isinstance(value, Tensor):
        return "a tensor"
    if value is None:
        return "nothing"
    if isinstance(value, (bool, int, float, str)):
        return repr(value)
    members = children(value) if isinstance(value, (tuple, list, dict)) else None
    if members is None:
        return f"a {type(value).__name__}"
    inner = [f"'{key}': {_structure(m)}" if isinstance(value, dict) else _structure(m) for key, m in members]
    return f"{{{', '.join(inner)}}}" if isinstance(value, dict) else f"({', '.join(inner)})"
