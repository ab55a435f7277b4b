"""A pass out of lines of ZhiJian's syntax and the add-ins that they name. Imports no torch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...core.errors import SpecError, did_you_mean, prefix_path
from ...core.spec.rules import COMMON, Match, Pass, Rule, check_common, check_target
from ...core.spec.yaml_source import NOWHERE, Source, Where, quote_yaml
from .line import Insertion, Line, ModuleSide, parse
from .lists import AddinEntry, make_rules, read_entry

USE = "fxplug.compat.zhijian:Addin"
KEYS = ("line", "addin")


def blitz(
    line: str | Sequence[str | Mapping[str, Any]],
    addin: Any,
    *,
    name: str = "blitz",
    lr: float | None = None,
    weight_decay: float | None = None,
    train: bool = True,
    where: Where = NOWHERE,
) -> Pass:
    """Make a pass of one or more lines of ZhiJian's syntax, such as `(MLPAddin.adapt_input): ...->{inout1}(fc2)->...`.

    `{inout1}` before or behind a module is where the add-in's method changes a value; the value at `{in1}` is its
    `inputs_cache`, and its result goes to `{out1}`. `blocks[0:12].mlp` are several modules, `blocks[i].mlp` all of them; both
    ends of a range pair up by their index. Nothing is hooked: the method is traced, and its operations are put into the graph,
    where it may call any of the add-in's layers. A warning says where a line is not read as it is written: two in points and no
    out point, which ZhiJian's manual has where it means an in and an out.

    Args:
        line: A line or several. An item that is a mapping is an entry of an `addins:` list of ZhiJian's configurations, `{name,
            location, hook, kwargs}`: one add-in with all its places. Its parameters are there once, and what a method keeps in
            the add-in's attributes the methods that run later in the same call of the model find there.
        addin: The add-in, or a mapping of class names to add-ins. An add-in is an nn.Module (each place gets a copy of its
            own), or what makes one anew for each place, as ZhiJian does: a class or functools.partial that is called without
            arguments, or a mapping `{use: "package.module:Class", options: {...}}`.
        name: The name of the pass.
        lr: The learning rate of its parameters; None is that of the training.
        weight_decay: Their weight decay; None is that of the training.
        train: Whether they train.
        where: The file and line of the pass, for errors.

    Returns:
        The pass.

    Raises:
        SpecError: A line cannot be read; the error points at the place in it.
    """
    lines = [one for at, given in enumerate([line] if isinstance(line, (str, Mapping)) else line) for one in _read(given, at)]
    if not lines:
        raise SpecError("needs at least one line", path=("line",))
    addins = _by_class(addin, lines)
    rules = []
    for number, one in enumerate(lines):
        made = _chosen(addins, one)
        if isinstance(one, AddinEntry):
            rules += make_rules(one, number, made, USE, where)
            continue
        for note in one.notes:
            warnings.warn(f"{one.text}: {note}", UserWarning, stacklevel=2)
        rules += [_rule(one, insertion, made, where if str(where) else Where(one.text)) for insertion in one.insertions]
    settings: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "train": train}
    about = "\n".join(one.text for one in lines)
    return Pass(name, rules, about=about, params={"line": [one.text for one in lines]}, where=where, **settings)


def blitz_entry(given: Any) -> Pass:
    """Make a pass of the mapping below `blitz:` in a list of passes: `line`, `addin`, and the settings of every pass. `line`,
    `addin`, and the settings of every pass.

    `line` is one text or a list of them. `addin` is `package.module:Class`, or a mapping with `use` and `options`, or a mapping
    of class names to either. Raises SpecError whose path is below the entry.
    """
    if not isinstance(given, Mapping):
        raise SpecError(f"must be a mapping with 'line' and 'addin', not {quote_yaml(given)}")
    Source(given).keys((*KEYS, *COMMON), KEYS)
    line, common = given["line"], {key: given[key] for key in COMMON if key in given}
    texts = [line] if isinstance(line, str) else line
    if not isinstance(texts, (list, tuple)) or not texts or not all(isinstance(text, (str, Mapping)) for text in texts):
        raise SpecError(f"must be a line or a list of lines, not {quote_yaml(line)}", path=("line",))
    check_common(common)
    expect = common.pop("expect", None)
    try:
        made = blitz(list(texts), given["addin"], **common)
    except SpecError as error:
        raise SpecError(error.finding, path=error.path or ("line",), key=error.key) from None
    return replace(made, params={key: given[key] for key in KEYS}, expect=expect)


def _read(given: Any, number: int) -> list[Line | AddinEntry]:
    """Return the lines of a text, or an entry of a list of add-ins."""
    return [read_entry(given, ("line", number))] if isinstance(given, Mapping) else [*parse(given)]


def _by_class(addin: Any, lines: Sequence[Line | AddinEntry]) -> dict[str, Any]:
    """Return add-ins by the name of their class."""
    wanted = sorted({line.addin for line in lines})
    if isinstance(addin, str):
        addin = {"use": addin}
    if not isinstance(addin, Mapping) or "use" in addin:
        return {_class_name(addin, ("addin",)): addin}
    if not addin or not all(isinstance(key, str) for key in addin):
        raise SpecError(f"must have an add-in for each of {', '.join(wanted)}, not {quote_yaml(addin)}", path=("addin",))
    for key, value in addin.items():
        if key not in wanted:
            raise SpecError(f"no line names '{key}'{did_you_mean(key, wanted)}", path=("addin",), key=key)
        _class_name(value, ("addin", key))
    return {key: {"use": value} if isinstance(value, str) else value for key, value in addin.items()}


def _class_name(addin: Any, path: tuple[str, ...]) -> str:
    """Return the name of an add-in's class. Raises SpecError for what is no add-in."""
    if isinstance(addin, str):
        addin = {"use": addin}
    if isinstance(addin, Mapping):
        with prefix_path(*path):
            Source(addin).keys(("use", "options"), ())
        check_target(addin.get("use"), *path, "use")
        if not isinstance(addin.get("options", {}), Mapping):
            raise SpecError(f"must be a mapping, not {quote_yaml(addin['options'])}", path=(*path, "options"))
        return str(addin["use"]).rpartition(":")[2].rpartition(".")[2]
    made = getattr(addin, "func", addin)  # of a functools.partial
    kind = made if isinstance(made, type) else type(made)
    if not callable(getattr(kind, "forward", None)):
        finding = f"must be an add-in (an nn.Module), its class, or a mapping with 'use', not {quote_yaml(addin)}"
        raise SpecError(finding, path=path)
    return kind.__name__


def _chosen(addins: Mapping[str, Any], line: Line | AddinEntry) -> Any:
    if line.addin not in addins:
        hint = did_you_mean(line.addin, addins) or f"; there is {', '.join(addins)}"
        raise SpecError(f"no add-in '{line.addin}'{hint}\n  {line.text}", path=("addin",))
    addin = addins[line.addin]
    if hasattr(addin, "named_parameters") and not isinstance(addin, type):  # a class may make its methods when it is called
        for method in [line.method] if isinstance(line, Line) else [hook.method for hook in line.hooks]:
            check_method(addin, method, f"\n  {line.text}")
    return addin


def check_method(addin: Any, method: str, text: str = "") -> None:
    """Raise SpecError unless an add-in has the method that a line names."""
    if callable(getattr(addin, method, None)):
        return
    known = methods(addin)
    hint, listed = did_you_mean(method, known), ", ".join(known) or "none"
    raise SpecError(f"{type(addin).__name__} has no method '{method}'{hint}; it has {listed}{text}")


def methods(addin: Any) -> list[str]:
    """Return the methods of an add-in that a line may name: its own and its constructor's, and the base's `add_...`."""
    known = {name for kind in type(addin).__mro__ if kind.__module__.startswith("torch.") for name in vars(kind)}
    known |= {"get_log_str", "get_pre", "get_post", "forward"}
    names = [name for name in dir(addin) if not name.startswith("_") and name not in known]
    return [name for name in names if callable(value := getattr(addin, name, None)) and not hasattr(value, "named_parameters")]


def _rule(line: Line, insertion: Insertion, addin: Any, where: Where) -> Rule:
    end, start = insertion.end, insertion.start
    args = ["x[:]"] if end.side == "in" else ["x[:]", "y[:]"]
    names: dict[int, str] = {}
    if start is not None:
        address, names = _source(start, end)
        args.append(address)
    options = {
        "addin": addin,
        "method": line.method,
        "point": end.side,
        "across": start is not None,
        "modules": [place.pattern() for place in line.named],
    }
    return Rule(
        Match(end.pattern(names)),
        USE,
        place="before" if end.side == "in" else "after",
        port="x[:]" if end.side == "in" else "y[:]",
        args=args,
        options=options,
        expect=f">={math.prod(index.count or 1 for index in end.indices)}",
        where=where,
    )


def _source(start: ModuleSide, end: ModuleSide) -> tuple[str, dict[int, str]]:
    """Return the address of the value for `inputs_cache`, and names for the indices of `end` that it needs.

    If the indices differ from those at the end it is a pattern, whose matches pair up with those of the end by order.
    """
    filled: list[str] = []
    names: dict[int, str] = {}
    for index in start.indices:
        same = [n for n, other in enumerate(end.indices) if other.text == index.text and (index.variable or n not in names)]
        if not same:
            break
        if not index.variable:
            names[same[0]] = f"range{same[0]}"
        filled.append(index.text if index.variable else names[same[0]])
    keys = ":in" if start.side == "in" else ":out[:]"
    if len(filled) < len(start.indices):
        return start.pattern() + keys, {}
    parts = iter(filled)
    return ".".join(part if isinstance(part, str) else f"{{{next(parts)}}}" for part in start.parts) + keys, names
