"""Passes as data: YAML files and Python values become frozen dataclasses. Imports no torch."""

from __future__ import annotations

import operator
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import SpecError, did_you_mean
from .source import NOWHERE, Source, read_yaml, shown
from .source import Where as Where

HERE = Path(__file__).resolve().parent
PLACES = ("before", "after", "replace", "param")
COMMON = ("name", "lr", "weight_decay", "train")  # settings that every pass takes beside its own parameters
REQUIRED = "$required"
_COUNTS: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq,
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True, init=False)
class Match:
    """Which regions a rule acts on: every condition that is given must hold.

    `path` is an exact path, a glob (`*`, `**`, `{i}`) or `re:...`, or several of them; `module` names
    classes (or is classes); `op` names functions or methods (or is them). Raises SpecError.
    """

    path: str | tuple[str, ...] = "**"
    module: tuple[str | type, ...] = ()
    op: tuple[str | Callable[..., Any], ...] | None = None

    def __init__(
        self,
        path: str | Sequence[str] = "**",
        module: str | type | Sequence[str | type] | None = (),
        op: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
    ) -> None:
        patterns = path if isinstance(path, str) else tuple(_many(path, "path", "a path"))
        classes = tuple(_many(() if module is None else module, "module", "a class name", type))
        ops = tuple(_many(() if op is None else op, "op", "a function name", Callable))
        for pattern in (patterns,) if isinstance(patterns, str) else patterns:
            _check_pattern(pattern)
        if not isinstance(patterns, str) and not patterns:
            raise SpecError("needs at least one path", path=("path",))
        _set(self, path=patterns, module=classes, op=ops or None)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The path patterns as a tuple, also when there is only one."""
        return (self.path,) if isinstance(self.path, str) else self.path


@dataclass(frozen=True, init=False)
class Rule:
    """Which regions (`match`), which block (`use`), put where (`place`), fed with what (`args`).

    `use` is `"package.module:Class"` or a class. `args` holds `x`, `y` or port addresses; an item that is
    a list has one address for each path pattern of the match. `expect` is `(operator, count)`. Raises
    SpecError.
    """

    match: Match
    use: str | type
    place: str
    args: tuple[str | tuple[str, ...], ...]
    options: dict[str, Any] = field(hash=False)
    expect: tuple[str, int]
    name: str | None
    where: Where = field(compare=False)

    def __init__(
        self,
        match: Match,
        use: str | type,
        place: str = "after",
        args: Sequence[str | Sequence[str]] | None = None,
        options: Mapping[str, Any] | None = None,
        expect: str | int | tuple[str, int] = ">=1",
        name: str | None = None,
        where: Where = NOWHERE,
    ) -> None:
        try:
            if not isinstance(match, Match):
                raise SpecError(f"must be a Match, not {shown(match)}", path=("match",))
            if place not in PLACES:
                found = f"no place {shown(place)}{did_you_mean(place, PLACES)}"
                raise SpecError(f"{found}; one of {', '.join(PLACES)}", path=("place",))
            if not isinstance(use, type):
                check_target(use, "use")
            options = {} if options is None else options
            if not isinstance(options, Mapping):
                raise SpecError(f"must be a mapping, not {shown(options)}", path=("options",))
            if name is not None and (not isinstance(name, str) or not name):
                raise SpecError(f"must be text, not {shown(name)}", path=("name",))
            if args is None:
                args = ("x",) if place == "before" else ("x", "y")
            addresses = _check_args(args, match)
            count = _check_expect(expect)
        except SpecError as error:
            raise SpecError(error.finding, path=error.path, where=where) from None
        _set(self, match=match, use=use, place=place, args=addresses, options=dict(options))
        _set(self, expect=count, name=name, where=where)

    def admits(self, count: int) -> bool:
        """Whether `expect` allows this many sites."""
        return _COUNTS[self.expect[0]](count, self.expect[1])


@dataclass(frozen=True)
class Pass:
    """A named list of rules; `params` are the values its parameters got. Raises SpecError.

    `lr`, `weight_decay` and `train` say how the parameters of its blocks are trained. Its `name` is the
    first part of their keys.
    """

    name: str
    rules: Sequence[Rule]
    about: str = ""
    params: Mapping[str, Any] = field(default_factory=dict, hash=False)
    inputs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    networks: Mapping[str, Any] = field(default_factory=dict, hash=False)
    lr: float | None = None
    weight_decay: float | None = None
    train: bool = True
    where: Where = field(default=NOWHERE, compare=False)

    def __post_init__(self) -> None:
        check_common({key: getattr(self, key) for key in COMMON})
        if not isinstance(self.about, str):
            raise SpecError(f"must be text, not {shown(self.about)}", path=("about",))
        if not isinstance(self.rules, (list, tuple)) or not self.rules:
            found = "an empty list" if self.rules in ([], ()) else shown(self.rules)
            raise SpecError(f"must be a list of rules, not {found}", path=("rules",))
        for index, rule in enumerate(self.rules):
            if not isinstance(rule, Rule):
                raise SpecError(f"must be a Rule, not {shown(rule)}", path=("rules", index))
        _set(self, rules=tuple(self.rules))
        for key in ("params", "inputs", "networks"):
            value = getattr(self, key)
            if key == "inputs" and isinstance(value, (list, tuple)):
                value = dict.fromkeys(value)
            if not isinstance(value, Mapping):
                raise SpecError(f"must be a mapping, not {shown(value)}", path=(key,))
            for name in value:
                _check_name(name, key)
            _set(self, **{key: dict(value)})


def check_common(settings: Mapping[str, Any]) -> None:
    """Check those of `name`, `lr`, `weight_decay` and `train` that are given; SpecError names the key."""
    if "name" in settings:
        _check_name(settings["name"], "name")
        if iskeyword(settings["name"]):
            raise SpecError(f"'{settings['name']}' is a word of Python's own", path=("name",))
    for key in ("lr", "weight_decay"):
        value = settings.get(key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and value >= 0):
            raise SpecError(f"must be a number, 0 or more, not {shown(value)}", path=(key,))
    if not isinstance(settings.get("train", True), bool):
        raise SpecError(f"must be true or false, not {shown(settings['train'])}", path=("train",))


def _set(self: object, **values: Any) -> None:
    for key, value in values.items():
        object.__setattr__(self, key, value)


def _many(value: Any, key: str, what: str, also: Any = ()) -> list[Any]:
    """One value or a list of values, each a text or an instance of `also`, as a list."""
    single = isinstance(value, str) or (also and isinstance(value, also))
    items = [value] if single else value
    if not isinstance(items, (list, tuple)):
        raise SpecError(f"must be {what} or a list of them, not {shown(value)}", path=(key,))
    for index, item in enumerate(items):
        if not (isinstance(item, str) or (also and isinstance(item, also))):
            raise SpecError(f"must be {what}, not {shown(item)}", path=(key, index))
    return list(items)


def _check_pattern(pattern: str) -> None:
    if not pattern.startswith("re:"):
        return
    try:
        re.compile(pattern[3:])
    except (re.error, OverflowError, RecursionError) as error:
        at = getattr(error, "pos", None) or 0
        finding = f"'{pattern}' is not a regular expression: {getattr(error, 'msg', error)} at position {at}"
        raise SpecError(f"{finding}\n  {pattern[3:]}\n  {' ' * at}^", path=("path",)) from None


def check_target(text: Any, *path: str) -> None:
    """Raise SpecError, with this path, unless `text` looks like `package.module:Name`."""
    if not isinstance(text, str) or not _TARGET.fullmatch(text):
        raise SpecError(f"must look like 'package.module:Name', not {shown(text)}", path=path)


def _check_name(name: Any, *path: str) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        finding = f"must be a name of letters, digits and '_', not {shown(name)}"
        raise SpecError(finding, path=path)


def _check_args(args: Any, match: Match) -> tuple[str | tuple[str, ...], ...]:
    if not isinstance(args, (list, tuple)):
        raise SpecError(f"must be a list of ports, not {shown(args)}", path=("args",))
    addresses: list[str | tuple[str, ...]] = []
    for index, item in enumerate(args):
        if isinstance(item, str):
            addresses.append(item)
            continue
        if not isinstance(item, (list, tuple)) or not all(isinstance(part, str) for part in item):
            finding = f"must be a port or a list of ports, not {shown(item)}; constants go to 'options'"
            raise SpecError(finding, path=("args", index))
        if len(item) != len(match.patterns):
            finding = f"{len(item)} ports for {len(match.patterns)} path patterns; they pair up in order"
            lists = f"\n  path: {list(match.patterns)}\n  args[{index}]: {list(item)}"
            raise SpecError(finding + lists, path=("args", index))
        addresses.append(tuple(item))
    return tuple(addresses)


def _check_expect(expect: Any) -> tuple[str, int]:
    text = "".join(map(str, expect)) if isinstance(expect, tuple) else str(expect)
    found = re.fullmatch(r"\s*(==|>=|<=|!=|>|<|)\s*(\d+)\s*", text, re.ASCII)
    if not found or isinstance(expect, bool):
        forms = ", ".join(f"{sign}N" for sign in _COUNTS)
        raise SpecError(f"{shown(expect)} is not a count; write one of {forms}", path=("expect",))
    return found[1] or "==", int(found[2])


def folder(kind: str) -> Path:
    """passes/ or configs/: inside the installed package, or beside it in a checkout."""
    return next((p for p in (HERE / kind, HERE.parent / kind) if p.is_dir()), HERE / kind)


def shipped(kind: str) -> dict[str, Path]:
    """The YAML files that come with fxplug by bare name; `kind` is `passes` or `configs`."""
    top = folder(kind)
    return {p.relative_to(top).with_suffix("").as_posix(): p for p in sorted(top.rglob("*.yaml"))}


def find_file(text: str | Path, kind: str, base: Path | None = None) -> Path:
    """The file of a bare shipped name, or of a path relative to `base` (default: the working folder)."""
    one = "pass" if kind == "passes" else "config"
    if str(text).endswith((".yaml", ".yml", ".json")):
        return (base or Path.cwd()) / text
    known = shipped(kind)
    if str(text) in known:
        return known[str(text)]
    beside = (base or Path.cwd()) / f"{text}.yaml"
    hint = f"; for the file here write '{text}.yaml'" if beside.is_file() else did_you_mean(text, known)
    raise SpecError(f"no {one} named '{text}'{hint}")


def load_pass(
    source: str | Path | Mapping[str, Any] | Pass,
    /,
    *,
    base: str | Path | None = None,
    name: str | None = None,
    lr: float | None = None,
    weight_decay: float | None = None,
    train: bool | None = None,
    allow: Sequence[str] | None = None,
    **params: Any,
) -> Pass:
    """Read a pass and give it its parameters.

    `source` is the bare name of a shipped pass, the path of a YAML file (relative to `base`, else to the
    working folder), a mapping with the same keys, or a Pass. `allow` lists the modules, beside fxplug's
    own, whose blocks may be used; None allows all. Raises SpecError for anything unknown, missing or of
    the wrong type.
    """
    given = {"name": name, "lr": lr, "weight_decay": weight_decay, "train": train}
    common: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    check_common(common)
    if isinstance(source, Pass):
        if params:
            raise SpecError(f"pass '{source.name}' has no parameters left to give: {', '.join(params)}")
        for index, rule in enumerate(source.rules):
            _check_allowed(rule.use, allow, rule.where, ("rules", index, "use"))
        return replace(source, **common)
    draft = open_pass(source, base=base)
    try:
        values = draft.bind(params)
    except SpecError as error:
        named = f"parameter '{error.path[0]}' " if error.path else ""
        raise SpecError(named + error.finding, where=Where(draft.source.file)) from None
    return draft.build(values, common, allow)


def open_pass(source: str | Path | Mapping[str, Any], *, base: str | Path | None = None) -> Draft:
    """Read a pass file or mapping and check its keys, without giving it parameters yet."""
    if isinstance(source, Mapping):
        read = Source(source)
    elif isinstance(source, (str, Path)):
        read = read_yaml(find_file(source, "passes", Path(base) if base else None))
    else:
        raise SpecError(f"a pass is a name, a path, a mapping or a Pass, not {shown(source)}")
    read.keys([f.name for f in fields(Pass) if f.name != "where"], ["rules"])
    rules = read.data["rules"]
    if not isinstance(rules, (list, tuple)) or not rules:
        found = "an empty list" if rules in ([], ()) else shown(rules)
        raise read.error(f"must be a list of rules, not {found}", "rules")
    for index in range(len(rules)):
        known = [f.name for f in fields(Rule) if f.name != "where"]
        read.keys(known, ["match", "use"], "rules", index)
        read.keys([f.name for f in fields(Match)], [], "rules", index, "match")
    if not isinstance(read.data.get("params", {}), Mapping):
        raise read.error(f"must be a mapping, not {shown(read.data['params'])}", "params")
    for key in read.data.get("params", {}):
        if key in (*COMMON, "base", "allow"):
            raise read.error(f"parameter '{key}' has the name of a common setting", "params", key=key)
        with read.inside("params"):
            _check_name(key)
    name = re.sub(r"\W", "_", Path(read.file).stem)
    return Draft(read, name if name.isidentifier() and not iskeyword(name) else f"pass_{name}")


@dataclass(frozen=True)
class Draft:
    """A pass that was read but not yet given its parameters; `name` is what its file is called."""

    source: Source
    name: str

    @property
    def params(self) -> dict[str, Any]:
        """The declared parameters with their defaults; `$required` stands where there is none."""
        return dict(self.source.data.get("params", {}))

    def bind(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The defaults with `given` in their place, checked; SpecError's path or key names the parameter."""
        values = self.params
        for key, value in given.items():
            if key not in values:
                listed = f"it has {', '.join(values)}" if values else "it has none"
                raise SpecError(f"no parameter '{key}'{did_you_mean(key, values)}; {listed}", key=key)
            wanted = _wanted(values[key], value)
            if wanted:
                found = f"must be {wanted}, not {shown(value)}"
                raise SpecError(f"{found} (its default is {values[key]!r})", path=(key,))
            values[key] = value
        missing = [f"'{key}'" for key, value in values.items() if value == REQUIRED and key not in given]
        if missing:
            some = "parameters" if len(missing) > 1 else "parameter"
            raise SpecError(f"missing {some} {', '.join(missing)}")
        return values

    def build(
        self, values: Mapping[str, Any], common: Mapping[str, Any], allow: Sequence[str] | None = None
    ) -> Pass:
        """The pass with every `$name` filled in from `values`, and the settings in `common`."""
        source, data, used = self.source, self.source.data, set[str]()
        rules = []
        for index, raw in enumerate(data["rules"]):
            rule = _fill(raw, values, used, source, ("rules", index))
            with source.inside("rules", index, "match"):
                match = Match(**rule.pop("match"))
            with source.inside("rules", index):
                rules.append(Rule(match, **rule, where=source.where("rules", index)))
            at = source.where("rules", index, "use")
            _check_allowed(rules[-1].use, allow, at, ("rules", index, "use"))
        for key in ("inputs", "networks"):
            data = {**data, key: _fill(data.get(key, {}), values, used, source, (key,))}
        unused = [key for key in values if key not in used]
        if unused:
            raise source.error(f"parameter '{unused[0]}' is used nowhere", "params", key=unused[0])
        if not source.file and "name" not in {**data, **common}:
            raise SpecError("a pass without a file needs a 'name'")
        settings = {"name": self.name, **data, **common, "params": values, "rules": rules}
        with source.inside():
            return Pass(**settings, where=Where(source.file))


_REFERENCE = re.compile(r"\$(?:\$|([^\W\d]\w*))")


def _fill(
    value: Any, values: Mapping[str, Any], used: set[str], source: Source, path: tuple[Any, ...]
) -> Any:
    """`value` with each `$name` replaced: alone it keeps the parameter's type, within a text it is text."""
    if isinstance(value, Mapping):
        return {key: _fill(item, values, used, source, (*path, key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_fill(item, values, used, source, (*path, index)) for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def one(found: re.Match[str]) -> Any:
        name = found[1]
        if name is None:
            return "$"
        if name not in values:
            listed = f"; the parameters are {', '.join(values)}" if values else "; the pass has no parameters"
            raise source.error(f"no parameter '${name}'{did_you_mean(name, values)}{listed}", *path)
        used.add(name)
        return values[name]

    whole = _REFERENCE.fullmatch(value)
    return one(whole) if whole else _REFERENCE.sub(lambda found: str(one(found)), value)


def _wanted(default: Any, value: Any) -> str:
    """What `value` should have been to agree with `default`; an empty text when it does."""
    if default is None or default == REQUIRED:
        return ""
    if isinstance(default, bool) or isinstance(value, bool):
        agree = isinstance(default, bool) and isinstance(value, bool)
    elif isinstance(default, (str, list, tuple)):
        agree = isinstance(value, (str, list, tuple))
    elif isinstance(default, float):
        agree = isinstance(value, (int, float))
    else:
        agree = isinstance(value, Mapping if isinstance(default, Mapping) else type(default))
    if agree:
        return ""
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text or a list"}
    return words.get(type(default), "a mapping" if isinstance(default, Mapping) else "a list or text")


def _check_allowed(
    use: str | type, allow: Sequence[str] | None, at: Where, path: Sequence[str | int]
) -> None:
    if allow is None:
        return
    module, _, name = use.partition(":") if isinstance(use, str) else (use.__module__, "", use.__name__)
    roots = ("fxplug", *allow)
    if not any(module == root or module.startswith(f"{root}.") for root in roots):
        listed = ", ".join(roots)
        raise SpecError(f"module '{module}' is not allowed; allowed are {listed}", path=path, where=at)
    if "." in name:  # the modules that an allowed module imports are attributes of it
        raise SpecError(f"'{name}' must be one name: its module is what is allowed", path=path, where=at)


def import_target(text: str, where: Where = NOWHERE) -> object:
    """What `"package.module:Name"` names. Imports the module; SpecError says which part does not exist."""
    try:
        check_target(text)
    except SpecError as error:
        raise SpecError(error.finding, where=where) from None
    module_name, _, attributes = text.partition(":")
    try:
        value: Any = import_module(module_name)
    except Exception as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and f"{module_name}.".startswith(f"{absent}."):
            raise SpecError(f"no module named '{absent}'{_near(absent, where)}", where=where) from None
        finding = f"importing '{module_name}' failed: {type(error).__name__}: {error}"
        raise SpecError(finding, where=where) from error
    for name in attributes.split("."):
        if not hasattr(value, name):
            kind = "module" if isinstance(value, ModuleType) else "class"
            owner = getattr(value, "__name__", value)
            hint = did_you_mean(name, (n for n in dir(value) if not n.startswith("_")))
            raise SpecError(f"{kind} '{owner}' has no attribute '{name}'{hint}", where=where)
        value = getattr(value, name)
    return value


def _near(module: str, where: Where) -> str:
    """A hint about a module that does not exist: the file that would be it, or the nearest name."""
    package, _, leaf = module.rpartition(".")
    beside = Path(where.file).parent / f"{module}.py"
    if where.file and beside.is_file():
        return f"; {beside.name} lies beside {Path(where.file).name}: put that folder on PYTHONPATH"
    search = getattr(import_module(package), "__path__", []) if package else None
    prefix = f"{package}." if package else ""
    return did_you_mean(module, (prefix + found.name for found in pkgutil.iter_modules(search)))
