"""Passes as values: which regions, which block, put where, fed with what. Frozen dataclasses; imports no torch."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ..errors import SpecError, did_you_mean, format_fields
from .addresses import compile_expression, parse_port, parse_relative
from .yaml_source import (
    NOWHERE,
    Section,
    check_finite,
    check_number,
    describe_braces,
    make_validator,
    quote_yaml,
    read_number,
    validate,
)
from .yaml_source import Where as Where

PLACES = ("before", "after", "replace", "param")
COMMON = ("name", "lr", "weight_decay", "train", "expect")  # settings that every pass takes beside its own parameters
COMBINE = ("sum", "chain")
GATES = "gates"  # the network that a pass with slots brings
_COUNTS: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq,
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


_INPUT = re.compile(r"[^\W\d]\w*(\[\d+\]|\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class Match:
    """Which regions a rule acts on: every condition that is given must hold.

    `path` is an exact path, a glob (`*`, `**`, `{i}`, `{0:12}`) or `re:...`, or several of them; `module` names
    classes (or is classes); `op` names functions or methods (or is them). With `within` (class names or classes)
    the rule acts on every layer of such a class among and below the regions of `path`. `bare` is for a rule with place
    `param`: `module` says then whose `weight` and `bias` are meant among the classes of torch.nn. A parameter of another name
    is taken whatever module has it, and a matrix `weight` of a class that is none of torch.nn's. Raises SpecError.
    """

    path: str | Sequence[str] = "**"
    module: Any = ()
    op: Any = None
    within: Any = ()
    bare: bool = False

    __repr__ = format_fields

    def __post_init__(self) -> None:
        if not isinstance(self.bare, bool):
            raise SpecError(f"must be true or false, not {quote_yaml(self.bare)}", path=("bare",))
        patterns = self.path if isinstance(self.path, str) else tuple(_many(self.path, "path", "a path"))
        classes = tuple(_many(() if self.module is None else self.module, "module", "a class name", type))
        ops = tuple(_many(() if self.op is None else self.op, "op", "a function name", Callable))
        inner = tuple(_many(() if self.within is None else self.within, "within", "a class name", type))
        for pattern in (patterns,) if isinstance(patterns, str) else patterns:
            _check_pattern(pattern)
        if not isinstance(patterns, str) and not patterns:
            raise SpecError("needs at least one path", path=("path",))
        if inner and ops:
            raise SpecError("'within' finds layers and 'op' finds operations: give only one of them", path=("within",))
        _set(self, path=patterns, module=classes, op=ops or None, within=inner)

    @property
    def patterns(self) -> tuple[str, ...]:
        """Path patterns as a tuple, also if there is only one."""
        return (self.path,) if isinstance(self.path, str) else tuple(self.path)


@dataclass(frozen=True)
class Rule:
    """Which regions (`match`), which block (`use`), put where (`place`, `port`), fed with what (`args`).

    `use` is `"package.module:Class"` or a class; without it the value in `args` itself is put there. `port` is the value of
    the region that is changed, such as `x[1]`, `y[:]` (all of the result) or a parameter's name; of an operation a tensor
    that it reads, `x[1]`, or a member of its result. `args` holds `x`, the first input, `y`, the result, `value`, what is
    changed, or port addresses; an item that is a list has one address for each path pattern of the match. `combine` says what a
    replacement does where there is one already: `sum` or `chain`. `expect` is `(operator, count)`. Raises SpecError.

    A block of a rule with a `name` returns `(result, value)`, and the value goes to whatever has that name in its `args`. A
    rule that has it in its own gets what the site before it left, None at the first, in the order in which the model runs;
    `at` gets the first such block as `beside`, where it takes that, and `ended` of the last one what is left, where it has it.
    """

    match: Match
    use: str | type | None = None
    place: str = "after"
    port: str | None = None
    args: Any = None
    options: Any = field(default=None, hash=False)
    expect: Any = ">=1"
    name: str | None = None
    combine: str | None = None
    where: Where = field(default=NOWHERE, compare=False)

    __repr__ = format_fields

    def __post_init__(self) -> None:
        match, use, place, name, combine = self.match, self.use, self.place, self.name, self.combine
        try:
            if not isinstance(match, Match):
                raise SpecError(f"must be a Match, not {quote_yaml(match)}", path=("match",))
            if place not in PLACES:
                found = f"no place {quote_yaml(place)}{did_you_mean(place, PLACES)}"
                raise SpecError(f"{found}; one of {', '.join(PLACES)}", path=("place",))
            if use is not None and not isinstance(use, type):
                check_target(use, "use")
            _check_port(self.port, place)
            if combine is not None and (combine not in COMBINE or place != "replace"):
                found = f"must be one of {', '.join(COMBINE)}, not {quote_yaml(combine)}{did_you_mean(combine, COMBINE)}"
                raise SpecError(found if combine not in COMBINE else "is only allowed with 'place: replace'", path=("combine",))
            _check_operation(match, place, combine)
            if self.port is not None and (named := next((p for p in match.patterns if _names_port(p)), None)) is not None:
                raise SpecError(f"'{named}' in the path names the value already: give only one of the two", path=("port",))
            options = {} if self.options is None else self.options
            if not isinstance(options, Mapping):
                raise SpecError(f"must be a mapping, not {quote_yaml(options)}", path=("options",))
            check_finite(dict(options), "options")
            if name is not None and (not isinstance(name, str) or not name):
                raise SpecError(f"must be text, not {quote_yaml(name)}", path=("name",))
            if name is not None and place == "param":
                raise SpecError("place 'param' cannot keep a second result: its block returns the parameter alone; remove "
                                "'name'", path=("name",))
            usual = {"before": ("value",), "param": ("value",)}.get(place, ("x", "y"))
            addresses = _check_args(usual if self.args is None else self.args, match)
            if use is None and (len(addresses) != 1 or options or name):
                raise SpecError(
                    "a rule without 'use' replaces a value by another: give one value in 'args', and neither 'options' nor "
                    "'name'"
                )
            count = _check_expect(self.expect)
        except SpecError as error:
            raise SpecError(error.finding, path=error.path, where=self.where) from None
        _set(self, args=addresses, options=dict(options), expect=count)

    @property
    def carries(self) -> bool:
        """Return whether the rule passes a value from site to site: it stores one under `name`, and has that in its own
        `args`."""
        return self.name is not None and self.name in self.args

    def admits(self, count: int) -> bool:
        """Say whether `expect` allows this many sites.

        Args:
            count: A number of sites.

        Returns:
            Whether it is one that the rule expects.
        """
        return _COUNTS[self.expect[0]](count, self.expect[1])

    @property
    def counted(self) -> bool:
        """Return whether `expect` is a number of sites, rather than any or at least one."""
        return self.expect not in ((">=", 0), (">=", 1))


NUMERICS = {
    "exact": "bit for bit the operation that it states; the output stays `torch.equal` if a new pass is neutral",
    "rounding": "the same result, summed in another order",
    "lossy": "an approximation of the result",
}


@dataclass(frozen=True)
class Pass:
    """A named list of rules; `params` are the values its parameters got. Raises SpecError.

    `lr`, `weight_decay` and `train` say how the parameters of its blocks are trained. Its `name` is the
    first part of their keys. `expect` is how many places all its rules together must find, as a rule's own; None leaves
    that to the rules. With `slots` its blocks are banks for that many adapters, which come and go without a new graph;
    `samples` names the input of the model in whose first dimension the samples are that choose among them, `t` or `x[0]`; None
    is the first that is a tensor. With `per_sample` a sample takes so many of them at most, and its cost is that of these; and
    with `groups`, "block" or patterns of paths, each group of layers may take another strength of them. With `regions` an
    adapter may act at some places of a picture alone.

    Extensions have subclasses, with further fields. One that is `made_for_model` gets its rules, and the values of its blocks,
    when it meets a model; all of one that `goes_last` are applied together by `finish`, after the other passes of a run.

    `numerics` says how near its results are to what it stands for, one of `NUMERICS`; None does not say.
    """

    name: str
    rules: Sequence[Rule]
    about: str = ""
    params: Mapping[str, Any] = field(default_factory=dict, hash=False)
    inputs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    networks: Mapping[str, Any] = field(default_factory=dict, hash=False)
    slots: int = 0
    lr: float | None = None
    weight_decay: float | None = None
    train: bool = True
    where: Where = field(default=NOWHERE, compare=False)
    samples: str | None = None
    expect: str | int | None = None
    numerics: str | None = None
    per_sample: int = 0
    groups: Any = field(default=None, hash=False)
    regions: bool = False

    made_for_model: ClassVar[bool] = False
    goes_last: ClassVar[bool] = False

    __repr__ = format_fields

    def __post_init__(self) -> None:
        check_common({key: getattr(self, key) for key in COMMON})
        if not isinstance(self.about, str):
            raise SpecError(f"must be text, not {quote_yaml(self.about)}", path=("about",))
        if not isinstance(self.slots, int) or isinstance(self.slots, bool) or self.slots < 0:
            raise SpecError(f"must be a whole number, 0 or more, not {quote_yaml(self.slots)}", path=("slots",))
        if self.samples is not None and not (isinstance(self.samples, str) and _INPUT.fullmatch(self.samples)):
            found = f"must be the name of an input of the model, such as 'timestep' or 'x[0]', not {quote_yaml(self.samples)}"
            raise SpecError(found, path=("samples",))
        if self.samples is not None and not self.slots:
            raise SpecError("requires 'slots': it names the input whose samples choose among them", path=("samples",))
        most = self.per_sample
        if not isinstance(most, int) or isinstance(most, bool) or not 0 <= most <= max(self.slots, 0):
            found = f"must be a whole number from 1 to 'slots', {self.slots}, or 0, not {quote_yaml(most)}"
            raise SpecError(found, path=("per_sample",))
        self._check_groups()
        if not isinstance(self.regions, bool):
            raise SpecError(f"must be true or false, not {quote_yaml(self.regions)}", path=("regions",))
        if self.regions and not self.per_sample:
            raise SpecError("requires 'per_sample': regions are where the adapters of a sample act", path=("regions",))
        check_numerics(self.numerics)
        if self.expect is not None:
            _set(self, expect="".join(map(str, _check_expect(self.expect))))
        if not isinstance(self.rules, (list, tuple)) or not (self.rules or self.made_for_model):
            found = "an empty list" if self.rules in ([], ()) else quote_yaml(self.rules)
            raise SpecError(f"must be a list of rules, not {found}", path=("rules",))
        for index, rule in enumerate(self.rules):
            if not isinstance(rule, Rule):
                raise SpecError(f"must be a Rule, not {quote_yaml(rule)}", path=("rules", index))
            if not self.slots and rule.options.get("rank_max") is not None:
                raise SpecError("rank_max is for adapters in slots, and this pass has none: give 'rank', or 'slots'")
        _set(self, rules=tuple(self.rules))
        for key in ("params", "inputs", "networks"):
            value = getattr(self, key)
            if key == "inputs" and isinstance(value, (list, tuple)):
                for index, name in enumerate(value):
                    check_name(name, key, index)
                value = dict.fromkeys(value)
            if not isinstance(value, Mapping):
                raise SpecError(f"must be a mapping, not {quote_yaml(value)}", path=(key,))
            for name in value:
                check_name(name, key)
            _set(self, **{key: dict(value)})
        read = {name: validate(Input, {} if spec is None else spec, "inputs", name) for name, spec in self.inputs.items()}
        _set(self, inputs={name: spec.model_dump(by_alias=True) for name, spec in read.items()})
        for name, spec in self.networks.items():
            validate(Network, spec, "networks", name)

    def _check_groups(self) -> None:
        """Raise SpecError unless `groups` is "block" or patterns, of a pass with `per_sample`."""
        if self.groups is None:
            return
        if self.groups != "block" and not (isinstance(self.groups, (list, tuple)) and self.groups):
            raise SpecError(f"must be 'block', or a list of patterns of paths, not {quote_yaml(self.groups)}", path=("groups",))
        if not self.per_sample:
            raise SpecError("requires 'per_sample': groups have strengths of their own by sample", path=("groups",))
        if self.groups != "block":
            _set(self, groups=tuple(_many(self.groups, "groups", "a pattern")))
            for pattern in self.groups:
                _check_pattern(pattern)

    def for_model(self, module: Any) -> Pass:
        """Return the pass with the rules that it needs in a traced module: itself, where they are written.

        Args:
            module: The traced module.

        Returns:
            A pass whose rules are complete.
        """
        return self

    def fill(self, module: Any) -> None:
        """Write the values that the pass brings into its blocks in a traced module that has them: it brings none.

        Args:
            module: The traced module.
        """

    @classmethod
    def finish(cls, result: Any, step: Any) -> None:
        """Apply all passes of this class to the `Result` of a run whose other passes are applied, within `step(text)`."""
        raise NotImplementedError

    def admits(self, count: int) -> bool:
        """Say whether `expect` of the pass allows this many sites of all its rules together; its rules have their own.

        Args:
            count: A number of sites.

        Returns:
            Whether it is one that the pass expects; True where it says nothing.
        """
        sign, number = _check_expect(">=0" if self.expect is None else self.expect)
        return _COUNTS[sign](count, number)


def check_numerics(value: Any) -> None:
    """Raise SpecError unless a value is one of `NUMERICS`, or None."""
    if value is not None and value not in [*NUMERICS]:
        near = did_you_mean(value, NUMERICS) if isinstance(value, str) else ""
        raise SpecError(f"must be one of {', '.join(NUMERICS)}, not {quote_yaml(value)}{near}", path=("numerics",))


def check_common(settings: Mapping[str, Any]) -> None:
    """Check those of `name`, `lr`, `weight_decay`, `train` and `expect` that are given; SpecError names the key."""
    if "name" in settings:
        check_name(settings["name"], "name")
        if iskeyword(settings["name"]):
            raise SpecError(f"'{settings['name']}' is a Python keyword: choose another name", path=("name",))
    for key in ("lr", "weight_decay"):
        value = settings.get(key)
        if value is not None:
            check_number(value, key, least=0)
    if not isinstance(settings.get("train", True), bool):
        raise SpecError(f"must be true or false, not {quote_yaml(settings['train'])}", path=("train",))
    if settings.get("expect") is not None:
        _check_expect(settings["expect"])


def _set(self: object, **values: Any) -> None:
    for key, value in values.items():
        object.__setattr__(self, key, value)


def _many(value: Any, key: str, what: str, also: Any = ()) -> list[Any]:
    """Return one value or a list of values, each a text or an instance of `also`, as a list."""
    single = isinstance(value, str) or (also and isinstance(value, also))
    items = [value] if single else value
    if not isinstance(items, (list, tuple)):
        raise SpecError(f"must be {what} or a list of them, not {quote_yaml(value)}", path=(key,))
    for index, item in enumerate(items):
        if not (isinstance(item, str) or (also and isinstance(item, also))):
            raise SpecError(f"must be {what}, not {quote_yaml(item)}{describe_braces(item)}", path=(key, index))
    return list(items)


def _check_pattern(pattern: str) -> None:
    if pattern.startswith("re:"):
        compile_expression(pattern[3:], lambda finding: SpecError(f"'{pattern}' {finding}", path=("path",)))


def is_target(text: Any) -> bool:
    """Return whether `text` looks like `package.module:Name`."""
    return isinstance(text, str) and _TARGET.fullmatch(text) is not None


def check_target(text: Any, *path: str) -> None:
    """Raise SpecError, with this path, unless `text` looks like `package.module:Name`."""
    if not is_target(text):
        raise SpecError(f"must look like 'package.module:Name', not {quote_yaml(text)}", path=path)


def _names_port(pattern: str) -> bool:
    """Return whether a path pattern ends in a port with keys, such as `:in[1]` or `:param.weight`."""
    try:
        return bool(parse_port(pattern).keys)
    except SpecError:  # which finding its places says, with the pattern
        return False


def _check_operation(match: Match, place: str, combine: str | None) -> None:
    """Refuse what has no effect where a rule matches operations."""
    if not match.op:
        return
    if place == "param":
        found = "'op' finds operations, and place 'param' changes a parameter of a layer: leave one of them out"
        raise SpecError(found, path=("place",))
    if combine is not None:
        raise SpecError("combines replacements of regions, and 'op' finds operations: leave it out", path=("combine",))
    for pattern in match.patterns:
        if pattern.endswith((":in", ":out")) or _names_port(pattern):
            raise SpecError(
                f"'op' finds operations in a region, and '{pattern}' is a port of one: give its path and a 'port'",
                path=("match", "path"),
            )


def _check_port(port: Any, place: str) -> None:
    if port is None:
        return
    if not isinstance(port, str) or not port:
        raise SpecError(f"must be text, not {quote_yaml(port)}", path=("port",))
    if place == "param":
        if not re.fullmatch(r"[\w*?]+", port):
            raise SpecError(f"must be the name of a parameter, such as 'weight', not {quote_yaml(port)}", path=("port",))
        return
    side = "x" if place == "before" else "y"
    if parse_relative(port) is None or port[0] != side or port.endswith("[**]"):
        forms = f"'{side}', '{side}[1]', '{side}.name', '{side}[1][*]' for each member, '{side}[:]' for all of it"
        raise SpecError(f"place '{place}' changes {forms}; not {quote_yaml(port)}", path=("port",))


def check_name(name: Any, *path: str | int) -> None:
    """Raises SpecError unless `name` is an identifier; `path` is where it stands in what the user wrote."""
    if not isinstance(name, str) or not name.isidentifier():
        finding = f"must be a name of letters, digits and '_', not {quote_yaml(name)}"
        raise SpecError(finding, path=path)


def _check_args(args: Any, match: Match) -> tuple[str | tuple[str, ...], ...]:
    if not isinstance(args, (list, tuple)):
        raise SpecError(f"must be a list of ports, not {quote_yaml(args)}", path=("args",))
    addresses: list[str | tuple[str, ...]] = []
    for index, item in enumerate(args):
        if isinstance(item, str):
            addresses.append(item)
            continue
        if not isinstance(item, (list, tuple)) or not all(isinstance(part, str) for part in item):
            finding = f"must be a port or a list of ports, not {quote_yaml(item)}; constants go to 'options'"
            raise SpecError(finding, path=("args", index))
        if len(item) != len(match.patterns):
            finding = f"{len(item)} ports for {len(match.patterns)} path patterns: they are paired in order, so give as many"
            lists = f"\n  path: {list(match.patterns)}\n  args[{index}]: {list(item)}"
            raise SpecError(finding + lists, path=("args", index))
        addresses.append(tuple(item))
    return tuple(addresses)


def _check_expect(expect: Any) -> tuple[str, int]:
    text = "".join(map(str, expect)) if isinstance(expect, tuple) else str(expect)
    found = re.fullmatch(r"\s*(==|>=|<=|!=|>|<|)\s*(\d+)\s*", text, re.ASCII)
    if not found or isinstance(expect, bool):
        forms = ", ".join(f"{sign}N" for sign in _COUNTS)
        raise SpecError(f"{quote_yaml(expect)} is not a count: write one of {forms}", path=("expect",))
    return found[1] or "==", int(found[2])


_SIZE = re.compile(r"\s*(\d+|[^\W\d]\w*)(\s*\*\s*(\d+|[^\W\d]\w*))*\s*")


def _sizes(value: Any) -> list[int | str] | None:
    if value is not None and not isinstance(value, (list, tuple)):
        raise SpecError(f"must be a list of sizes and names, not {quote_yaml(value)}")
    for size in value or ():
        if isinstance(size, bool) or not (isinstance(size, int) or (isinstance(size, str) and _SIZE.fullmatch(size))):
            raise SpecError(f"must be a number, a name, or numbers and names with '*', such as 8*h; not {quote_yaml(size)}")
    return value  # type: ignore[return-value]


def _tries(value: Any) -> dict[str, list[int]]:
    value = value or {}
    if not isinstance(value, Mapping) or not all(isinstance(sizes, (list, tuple)) for sizes in value.values()):
        raise SpecError(f"must be a mapping of names to lists of sizes, not {quote_yaml(value)}")
    return {name: list(sizes) for name, sizes in value.items()}


def _arguments(value: Any) -> Any:
    if not isinstance(value, (Mapping, list, tuple)):
        raise SpecError(f"must be a mapping or a list, not {quote_yaml(value)}")
    return value


class Input(Section):
    """A new input of the model: its sizes, and what it is where it is not given."""

    shape: Annotated[Any, make_validator(_sizes)] = None
    dtype: Any = None
    default: Annotated[Any, make_validator(read_number)] = None
    tries: Annotated[Any, make_validator(_tries)] = Field(default={}, alias="try")


class Network(Section):
    """A network that is traced into the graph."""

    use: Any = Field(description="a module, a folder, or 'package.module:function'")
    args: Annotated[Any, make_validator(_arguments)] = {}
    options: Any = None
    neutral: Any = None
