"""What add-ins written for ZhiJian import: their base class, and the block that calls their methods in a graph.

ZhiJian (LAMDA-ZhiJian, 2023) registers the methods as forward hooks of the base model, one add-in for each place.
Here they are traced once, and nothing is hooked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from ...blocks.base import Block
from ...core.errors import SpecError, did_you_mean
from ...core.spec.addresses import select
from ..kept_state import MethodCall, ReadNames
from ..structures import describe
from .addin_factory import OnItsDevice, create_parameters, has_outputs, make_addin
from .host import ModuleView

if TYPE_CHECKING:
    from ...core.rewriter.sites import Site

CACHE = "inputs_cache"
KEEPS = (
    "store a value for later calls in a buffer that is changed in place (self.count.add_(1), self.seen.copy_(value)); a value "
    "for this call needs no 'self.'"
)


class Addin(Block):
    """Calls one method of an add-in. Its forward is traced into the graph, so a saved graph knows neither class.

    At a `point` "in" the method gets the module and its arguments; a tensor that it returns takes the place of the first,
    a tuple that of all. At a `point` "out" it gets the result too; a method that takes no outputs gets the result as its
    inputs there, being what goes into the next module. A method that returns None changes nothing.
    `across` says that the last value given is the `inputs_cache`.

    With `carries` the add-in has several places: the last value given is what it has kept in its attributes by then, None
    for nothing, and the block returns that beside its result. The blocks of one add-in share it and `read`.
    """

    inline: ClassVar[bool] = True

    def __init__(
        self,
        addin: nn.Module,
        method: str,
        point: str,
        across: bool = False,
        host: tuple[Any, ...] = (None,),
        carries: bool = False,
    ) -> None:
        """Store the add-in; `host` has the module for the method. Raises SpecError for a method that the add-in does not
        have."""
        super().__init__()
        self.addin, self.method, self.point, self.across, self.host = addin, method, point, across, host
        self.takes_outputs = has_outputs(addin, method, point)
        self.carries = carries
        self.read = ReadNames()

    @classmethod
    def at(
        cls,
        site: Site,
        addin: Any,
        method: str,
        point: str,
        across: bool = False,
        modules: Sequence[str] = (),
        carries: bool = False,
        beside: Addin | None = None,
    ) -> Addin:
        """Make a call of `method` of a copy of `addin`, or of a new add-in if that is a class or `{use, options}`.

        `modules` are patterns that each must name a module of the model. With `carries` the add-in is that of the block
        `beside`, if there is one. Raises SpecError.
        """
        _check_named(site, modules)
        if across:
            _check_called_once(site, site.args[-1].path)
        host = (ModuleView(site.module, site.path),)
        if beside is not None:
            block = cls(beside.addin, method, point, host=host, carries=True)
            block.read = beside.read
            return block
        block = cls(make_addin(addin), method, point, across, host, carries)
        if not carries:
            block.addin = create_parameters(block.addin, block.result, site.args)
        return block

    def forward(self, *values: Any) -> Any:
        """Run the method on `(inputs)` or `(inputs, outputs)`, followed by the cache if the line goes across modules."""
        left = values[-1] if self.carries else None
        given = values[:-1] if self.carries else values
        with MethodCall(self.addin, left) as call:
            result = self.result(self.addin, *given)
        for name in [*call.anew, *(() if self.carries else call.set)]:
            if name != CACHE:
                raise SpecError(
                    f"{self.called} sets '{name}' of the add-in, which a graph cannot change. For a value from elsewhere in "
                    f"the model use an in point, 'inputs_cache'; {KEEPS}"
                )
        self.read.names.update(call.read)
        return (result, call.next_call_state()) if self.carries else result

    def result(self, addin: nn.Module, *values: Any) -> Any:
        """Return the result of the method of `addin` for `(inputs)` or `(inputs, outputs)`, in the structure of what it
        changes."""
        given = list(values)
        if self.across:
            object.__setattr__(addin, CACHE, None)
            setattr(addin, CACHE, given.pop())
        try:
            with OnItsDevice():
                result = self.called_with(addin, given)
        except (TypeError, AttributeError) as error:
            if not self.across and not self.carries and getattr(addin, CACHE, None) is None and "None" in str(error):
                raise SpecError(
                    f"{self.called} uses 'inputs_cache', and the line has no '{{in1}}' to name that value ({error})"
                ) from error
            raise
        finally:
            if not self.carries:
                setattr(addin, CACHE, None)
        if result is None:  # as a hook of torch that returns nothing
            return tuple(given[0]) if self.point == "in" else given[1]
        return self.inputs(result, given[0]) if self.point == "in" else self.outputs(result, given[1])

    def called_with(self, addin: nn.Module, given: Sequence[Any]) -> Any:
        """Return the result of the method itself."""
        call = getattr(addin, self.method)
        if self.point == "in":
            return call(self.host[0], given[0])
        return call(self.host[0], *given) if self.takes_outputs else call(self.host[0], (given[1],))

    def ended(self, left: Mapping[str, Any]) -> None:
        """Raise SpecError if the add-in reads an attribute that the forward before changed; `left` has the final attributes."""
        for name in self.read.stale(self.addin, left):
            raise SpecError(
                f"{type(self.addin).__name__} reads '{name}' from the previous call of the model, which a graph does not "
                f"store: {KEEPS}"
            )

    @property
    def called(self) -> str:
        """Name of class and method, for messages."""
        return f"{type(self.addin).__name__}.{self.method}"

    def inputs(self, result: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return all arguments of the module, with the method's result replacing the first or all."""
        new = (result, *inputs[1:]) if isinstance(result, Tensor) else result
        if not isinstance(new, (tuple, list)) or describe(tuple(new)) != describe(tuple(inputs)):
            raise SpecError(
                f"{self.called} returns {describe(result)} before a module that is called with {describe(tuple(inputs))}: "
                "return a tensor for the first argument, or a tuple for all"
            )
        return tuple(new)

    def outputs(self, result: Any, outputs: Any) -> Any:
        """Return the method's result in place of the module's. Raises SpecError for one of another structure."""
        if not self.takes_outputs and isinstance(result, (tuple, list)) and len(result) == 1:
            result = result[0]
        if describe(result) != describe(outputs):
            raise SpecError(
                f"{self.called} returns {describe(result)} after a module that returns {describe(outputs)}: return the "
                "same structure"
            )
        return result

    def extra_repr(self) -> str:
        return self.called


def _check_named(site: Site, modules: Sequence[str]) -> None:
    known = [name for name, _ in site.root.named_modules(remove_duplicate=False) if name]
    for pattern in modules:
        if not select(pattern, known):
            raise SpecError(f"the line names '{pattern}', and the model has no such module{did_you_mean(pattern, known)}")


def _check_called_once(site: Site, path: str) -> None:
    """Raise SpecError for a module that is called several times: a hook would see the last call, an address the first."""
    graphs = getattr(site.root, "graphs", {})
    keys = {node.meta["port"].path for graph in graphs.values() for node in graph.nodes if node.meta.get("port")}
    calls = sorted(key for key in keys if key.partition("@")[0] == path)
    if len(calls) > 1:
        raise SpecError(
            f"the in point is at '{path}', which the model calls {len(calls)} times ({', '.join(calls)}), and a line cannot "
            f"choose one: write a rule with args: [..., '{calls[-1]}'] and your own block"
        )
