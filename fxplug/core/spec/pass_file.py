"""Passes as files: YAML or mappings become rules; what their import paths name, and the options it takes. Imports no torch."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import extensions
from ..errors import ClashError, SpecError, did_you_mean, format_fields, prefix_path
from .rules import COMMON, Match, Pass, Rule, check_common, check_name, check_numerics, check_target, is_target
from .yaml_source import NOWHERE, Source, Where, check_finite, describe_braces, quote_yaml, read_yaml

# where files that were written by earlier versions have classes of the package, and where these are now
_OLD_BLOCKS = ["adapters", "attending", "conditions", "frequencies", "gates", "merging", "norms", "rotations", "slicing"]
MOVED = {
    **{f"fxplug.{name}": "fxplug.blocks" for name in (*_OLD_BLOCKS, "weights")},
    **{f"fxplug.blocks.{name}": "fxplug.blocks" for name in ("bitfit", "dora", "half_lora", "ssf")},
    **{f"fxplug.parallel.{name}": "fxplug.parallel.runtime" for name in ("attention", "collectives", "shares")},
    **{f"fxplug.parallel.{name}": "fxplug.parallel.runtime" for name in ("moments", "neighbours")},
    "fxplug.rewriter.adapter_passes": "fxplug.adapters.file_passes",
    **{f"fxplug.{name}.widest": "fxplug.adapters.widest" for name in ("rewriter", "core.rewriter")},
    "fxplug.compat.zhijian_pass": "fxplug.compat.zhijian.blitz",
    "fxplug.compat.drivers": "fxplug.compat.hcp.drivers",
    "fxplug.compat.hcp.patch_around": "fxplug.compat.hcp.patch_drivers",
    "fxplug.compat.samples": "fxplug.compat.hcp.sample_plugins",
}


_RENAMED = {
    "fxplug.parallel.runtime": {
        "Same": "Broadcast", "Whole": "GlobalSize", "Sum": "AllReduce", "Mean": "AllReduceMean", "Scale": "RowScale"
    },
    "fxplug.compat.hcp.sample_plugins": {"Skip": "SkipPlugin"},
}  # fmt: skip


def update_path(path: str) -> str:
    """Return the current import path of a class of the package, for one from a file of an earlier version."""
    module, colon, name = path.partition(":")
    module = MOVED.get(module, module)
    return module + colon + _RENAMED.get(module, {}).get(name, name)


def import_target(text: str, where: Where = NOWHERE) -> object:
    """Import the object `"package.module:Name"`. Raises SpecError that says which part does not exist."""
    try:
        check_target(text)
    except SpecError as error:
        raise SpecError(error.finding, where=where) from None
    module_name, _, attributes = update_path(text).partition(":")
    try:
        value: Any = import_module(module_name)
    except Exception as error:  # the imported module's
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and f"{module_name}.".startswith(f"{absent}."):
            raise SpecError(f"no module named '{absent}'{_near(absent, where)}", where=where) from None
        finding = f"importing '{module_name}' failed: {type(error).__name__}: {error}"
        raise SpecError(finding, where=where) from error
    for name in attributes.split("."):
        if not hasattr(value, name):
            kind = "module" if isinstance(value, ModuleType) else "class"
            owner = getattr(value, "__name__", value)
            names = (n for n in dir(value) if not n.startswith("_") and not isinstance(getattr(value, n, None), ModuleType))
            hint = did_you_mean(name, names)
            raise SpecError(f"{kind} '{owner}' has no attribute '{name}'{hint}", where=where)
        value = getattr(value, name)
    return value


def _near(module: str, where: Where) -> str:
    """Return a hint for a module that does not exist: the file that would be it, or the nearest name."""
    package, _, leaf = module.rpartition(".")
    beside = Path(where.file).parent / f"{module}.py"
    if where.file and beside.is_file():
        return f"; {beside.name} is in the folder of {Path(where.file).name}: put that folder on PYTHONPATH"
    search = getattr(import_module(package), "__path__", []) if package else None
    prefix = f"{package}." if package else ""
    return did_you_mean(module, (prefix + found.name for found in pkgutil.iter_modules(search)))


@dataclass(frozen=True)
class AcceptedArguments:
    """What a callable takes by name: `required` has no default, and `free` says that it takes any other name as well."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    free: bool


def get_arguments(target: Callable[..., Any], given: int = 0, leave: Collection[str] = ()) -> AcceptedArguments:
    """Return the named parameters of a callable, without its first `given` ones and those in `leave`.

    A class without a signature, as one written in C, has none.
    """
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    free = any(p.kind is p.VAR_KEYWORD for p in parameters)
    ours = [p for p in parameters[given:] if p.name not in leave and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    required = tuple(p.name for p in ours if p.default is p.empty)
    return AcceptedArguments(tuple(p.name for p in ours if p.kind is not p.POSITIONAL_ONLY), required, free)


def check_options(
    accepted: AcceptedArguments, options: Collection[str], name: str, says: str = "has no option", path: tuple[str, ...] = ()
) -> None:
    """Raise SpecError, about `name`, if a callable does not accept the options, or requires more."""
    if not accepted.free:
        check_known(options, accepted.names, f"{name} {says}", path=path)
    missing = [f"'{option}'" for option in accepted.required if option not in options]
    if missing:
        raise SpecError(f"{name} needs the option{'s' * (len(missing) > 1)} {', '.join(missing)}", path=path)


def check_known(
    options: Iterable[str], known: Collection[str], says: str, *, path: tuple[str, ...] = (), where: object = ""
) -> None:
    """Raise SpecError for an option that is not among the known ones, with the nearest: `says` begins it, `Lora has no
    option`."""
    for key in options:
        if key not in known:
            finding = f"{says} '{key}'{did_you_mean(key, known)}; it takes {', '.join(known) or 'none'}"
            raise SpecError(finding, path=path, key=key, where=where)


HERE = Path(__file__).resolve().parents[2]


def folder(kind: str) -> Path:
    """Return passes/ or configs/: inside the installed package, or beside it in a checkout."""
    return next((p for p in (HERE / kind, HERE.parent / kind) if p.is_dir()), HERE / kind)


def list_shipped(kind: str) -> dict[str, Path]:
    """Return the YAML files of fxplug and its extensions by bare name; `kind` is `passes` or `configs`.

    Raises ClashError if an extension's pass has the name of another.
    """
    top = folder(kind)
    found = {p.relative_to(top).with_suffix("").as_posix(): p for p in sorted(top.rglob("*.yaml"))}
    for name, path in extensions.list_parts("passes").items() if kind == "passes" and extensions.has_others() else ():
        if name in found:
            raise ClashError(f"an extension has a pass '{name}' ({path}), and so has fxplug: rename the pass of the extension")
        package, _, file = path.partition(":")
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise SpecError(f"an extension has its pass '{name}' in the package '{package}', which does not exist")
        found[name] = Path(spec.origin).parent / file
    return found


def list_recipes() -> dict[str, Path]:
    """Return the shipped configurations of trainings by bare name, `sd15` for configs/train/sd15.yaml."""
    return {name.removeprefix("train/"): path for name, path in list_shipped("configs").items() if name.startswith("train/")}


def is_file_name(text: str | Path) -> bool:
    """Return whether a text is the path of a pass or configuration, not the bare name of a shipped one."""
    return str(text).endswith((".yaml", ".yml", ".json"))


def find_file(text: str | Path, kind: str, base: Path | None = None) -> Path:
    """Return the file of a bare shipped name, or of a path relative to `base` (default: the working folder)."""
    one = "pass" if kind == "passes" else "config"
    if is_file_name(text):
        return (base or Path.cwd()) / text
    known = list_shipped(kind) if kind == "passes" else {**list_recipes(), **list_shipped(kind)}
    if str(text) in known:
        return known[str(text)]
    beside = (base or Path.cwd()) / f"{text}.yaml"
    hint = f"; for the file in this folder write '{text}.yaml'" if beside.is_file() else did_you_mean(text, known)
    hint += extensions.describe_unusable()
    raise SpecError(f"no {one} named '{text}'{hint}")


REQUIRED = "$required"
PAGE_KEYS = ("help", "example")  # for the page about a pass: what each parameter is, and a model to show it on


def load_pass(
    source: str | Path | Mapping[str, Any] | Pass,
    /,
    *,
    base: str | Path | None = None,
    name: str | None = None,
    lr: float | None = None,
    weight_decay: float | None = None,
    train: bool | None = None,
    expect: str | int | None = None,
    allow: Sequence[str] | None = None,
    **params: Any,
) -> Pass:
    """Read a pass and give it its parameters.

    Args:
        source: The bare name of a shipped pass, the path of a YAML file, a mapping with the same keys, or a Pass.
        base: The folder that paths are relative to; None is the working folder.
        name: The name of the pass in a module; None is that of the file.
        lr: The learning rate of what the pass adds; None is that of the training.
        weight_decay: Its weight decay; None is that of the training.
        train: Whether what it adds trains.
        expect: How many places the pass must find, such as `"==12"` or a number.
        allow: The modules, beside fxplug's own, whose blocks may be used; None allows all.
        **params: The parameters of the pass, such as `rank=8`.

    Returns:
        The pass.

    Raises:
        SpecError: Something is unknown, missing or of the wrong type.
    """
    given = {"name": name, "lr": lr, "weight_decay": weight_decay, "train": train, "expect": expect}
    common: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    check_common(common)
    if isinstance(source, Pass):
        if params:
            raise SpecError(
                f"pass '{source.name}' was loaded with its parameters already, so these cannot be given: {', '.join(params)}"
            )
        for index, rule in enumerate(source.rules):
            _check_allowed(rule.use, allow, rule.where, ("rules", index, "use"))
        return replace(source, **common)
    draft = open_pass(source, base=base)
    if draft.maker:
        return draft.made({**params, **common}, allow, base)
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
        raise SpecError(f"a pass is a name, a path, a mapping or a Pass, not {quote_yaml(source)}")
    data = read.data if isinstance(read.data, Mapping) else {}
    made = ["about", "params", "numerics"]
    kind = _class_of(read, data)
    known = made if "make" in data else [f.name for f in fields(kind or Pass) if f.name != "where"]
    ruled = "make" not in data and kind is not None and not kind.made_for_model
    read.keys([*known, "make", *PAGE_KEYS, *(data if kind is None else ())], ["rules"] if ruled else [])
    rules = read.data.get("rules", [])
    if not isinstance(rules, (list, tuple)) or not rules and ruled:
        found = "an empty list" if rules in ([], ()) else quote_yaml(rules)
        raise read.error(f"must be a list of rules, not {found}", "rules")
    for index in range(len(rules)):
        known = [f.name for f in fields(Rule) if f.name != "where"]
        read.keys(known, ["match"], "rules", index)
        read.keys([f.name for f in fields(Match)], [], "rules", index, "match")
    with read.inside():
        check_numerics(data.get("numerics"))
    if not isinstance(read.data.get("params", {}), Mapping):
        raise read.error(f"must be a mapping, not {quote_yaml(read.data['params'])}", "params")
    for key in read.data.get("params", {}):
        if key in (*COMMON, "base", "allow"):
            raise read.error(f"parameter '{key}' has the name of a setting that every pass has: rename it", "params", key=key)
        with read.inside("params"):
            check_name(key)
    name = re.sub(r"\W", "_", Path(read.file).stem)
    return Draft(read, name if name.isidentifier() and not iskeyword(name) else f"pass_{name}", kind)


def _class_of(read: Source, data: Mapping[str, Any]) -> type[Pass] | None:
    """Return the class of a pass with these keys: an extension's if one of them is not the core's, None where that is missing.

    Raises SpecError for a key that no extension can bring.
    """
    core = ["make", *PAGE_KEYS, *(f.name for f in fields(Pass))]
    others = [key for key in data if key not in core]
    if not others:
        return Pass
    brought = extensions.list_parts("keys")
    if (own := next((key for key in others if key in brought), None)) is not None:
        return extensions.import_part("keys", own)  # type: ignore[no-any-return]
    if extensions.find_unusable():
        return None
    raise read.error(f"unknown key '{others[0]}'{did_you_mean(others[0], [*core, *brought])}", key=others[0])


@dataclass(frozen=True)
class Draft:
    """A pass that was read but not yet given its parameters; `name` is what its file is called.

    `kind` is the class of the pass, None where an extension that cannot be used would bring it.
    """

    source: Source
    name: str
    kind: type[Pass] | None = Pass

    __repr__ = format_fields

    @property
    def params(self) -> dict[str, Any]:
        """Declared parameters with their defaults; `$required` for those without one."""
        return dict(self.source.data.get("params", {}))

    @property
    def maker(self) -> str:
        """Import path of the function that makes the pass, if it has no rules; else ""."""
        return str(self.source.data.get("make", ""))

    def made(self, given: Any, allow: Sequence[str] | None = None, base: str | Path | None = None) -> Pass:
        """Return the pass that `maker` makes of `given`, the mapping below the name of the pass: parameters and common
        settings.

        A maker with a parameter `base` gets the folder that paths are relative to. Raises SpecError, as the maker does: its
        path or key is relative to `given`.
        """
        at = self.source.where("make")
        _check_allowed(self.maker, allow, at, ("make",))
        maker: Any = import_target(self.maker, at)
        located = {"base": base} if "base" in inspect.signature(maker).parameters else {}
        made = maker({"name": self.name, **given} if isinstance(given, Mapping) else given, **located)
        if not isinstance(made, Pass):
            raise SpecError(f"'{self.maker}' gave {quote_yaml(made)}, not a Pass", where=at)
        for index, rule in enumerate(made.rules):
            _check_allowed(rule.use, allow, rule.where, ("rules", index, "use"))
            _check_options(rule.options, allow, rule.where, ("rules", index, "options"))
        return replace(made, numerics=self.source.data.get("numerics", made.numerics))

    def bind(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults overridden by `given`, checked; SpecError's path or key names the parameter."""
        values = self.params
        for key, value in given.items():
            if key not in values:
                listed = f"it has {', '.join(values)}" if values else "it has none"
                raise SpecError(f"no parameter '{key}'{did_you_mean(key, values)}; {listed}", key=key)
            wanted = _wanted(values[key], value)
            if wanted:
                found = f"must be {wanted}, not {quote_yaml(value)}{describe_braces(value)}"
                raise SpecError(f"{found} (its default is {values[key]!r})", path=(key,))
            with prefix_path(key):
                check_finite(value)
            values[key] = value
        missing = [f"'{key}'" for key, value in values.items() if value == REQUIRED and key not in given]
        if missing:
            some = "parameters" if len(missing) > 1 else "parameter"
            raise SpecError(f"missing {some} {', '.join(missing)}")
        return values

    def build(
        self, values: Mapping[str, Any], common: Mapping[str, Any], allow: Sequence[str] | None = None
    ) -> Pass:
        """Return the pass with every `$name` filled in from `values`, and the settings in `common`."""
        source, data, used = self.source, self.source.data, set[str]()
        if self.kind is None:
            unknown = next(key for key in data if key not in (*PAGE_KEYS, *(f.name for f in fields(Pass))))
            raise source.error(f"unknown key '{unknown}'{extensions.describe_unusable()}", key=unknown)
        rules = []
        for index, raw in enumerate(data.get("rules", [])):
            rule = _fill(raw, values, used, source, ("rules", index))
            if rule["match"].get("path") == []:
                continue  # a parameter that names no places leaves its rule out
            with source.inside("rules", index, "match"):
                match = Match(**rule.pop("match"))
            with source.inside("rules", index):
                rules.append(Rule(match, **rule, where=source.where("rules", index)))
            at = source.where("rules", index, "use")
            _check_allowed(rules[-1].use, allow, at, ("rules", index, "use"))
            _check_options(rules[-1].options, allow, source.where("rules", index), ("rules", index, "options"))
        networks = data.get("networks") or {}
        if not isinstance(networks, Mapping):
            raise source.error(f"must be a mapping, not {quote_yaml(networks)}", "networks")
        for name, network in networks.items():
            if isinstance(network, Mapping):
                where, path = source.where("networks", name), ("networks", name)
                given = _fill({k: network.get(k) for k in ("use", "options")}, values, used, source, path)
                if is_target(given["use"]):
                    module, _, attribute = given["use"].partition(":")  # of a classmethod it is the class that must be allowed
                    owner = f"{module}:{attribute.rpartition('.')[0] or attribute}"
                    _check_allowed(owner, None if allow is None else (*allow, "diffusers"), where, path)
                _check_options(given["options"], allow, where, path)
        more: dict[str, Any] = {f.name: {} for f in fields(self.kind)[len(fields(Pass)) :]}
        more |= {"inputs": {}, "networks": {}, "slots": 0, "samples": None, "per_sample": 0, "groups": None, "regions": False}
        for key, nothing in more.items():
            data = {**data, key: _fill(data.get(key, nothing), values, used, source, (key,))}
        if not rules and not self.kind.made_for_model:
            raise source.error("every rule is left out, because the parameters name no places: give one that does", "rules")
        unused = [key for key in values if key not in used]
        if unused:
            raise source.error(f"parameter '{unused[0]}' is not used by any rule: remove it, or write ${unused[0]} where it "
                               "belongs", "params", key=unused[0])
        if not source.file and "name" not in {**data, **common}:
            raise SpecError("a pass without a file needs a 'name'")
        data = {key: value for key, value in data.items() if key not in PAGE_KEYS}
        settings = {"name": self.name, **data, **common, "params": values, "rules": rules}
        with source.inside():
            return self.kind(**settings, where=Where(source.file))


_REFERENCE = re.compile(r"\$(?:\$|([^\W\d]\w*))")


def _fill(
    value: Any, values: Mapping[str, Any], used: set[str], source: Source, path: tuple[Any, ...]
) -> Any:
    """Return `value` with each `$name` replaced: alone it keeps the parameter's type, within a text it is text."""
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
    """Return the type that `value` should have had to agree with `default`; "" if it does."""
    if default is None or default == REQUIRED or (default in ([], {}) and isinstance(value, (Mapping, list, tuple))):
        return ""
    if isinstance(default, str) and is_target(default) and not isinstance(value, (bool, int, float, list, tuple)):
        return ""  # what an import path gives may be given itself
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
    use: str | type | None, allow: Sequence[str] | None, at: Where, path: Sequence[str | int]
) -> None:
    if allow is None or use is None:
        return
    module, _, name = use.partition(":") if isinstance(use, str) else (use.__module__, "", use.__name__)
    roots = ("fxplug", *allow)
    if not any(module == root or module.startswith(f"{root}.") for root in roots):
        listed = ", ".join(roots)
        raise SpecError(f"module '{module}' is not allowed; allowed are {listed}", path=path, where=at)
    if "." in name:  # the modules that an allowed module imports are attributes of it
        raise SpecError(f"'{name}' must be one name without dots: only its module is allowed", path=path, where=at)


def _check_options(value: Any, allow: Sequence[str] | None, at: Where, path: Sequence[str | int]) -> None:
    """Check classes that options name, such as the plugin of a driver, against `allow`."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_options(item, allow, at, path)
    elif allow is not None and is_target(value):
        _check_allowed(value, (*allow, "torch.nn"), at, path)
