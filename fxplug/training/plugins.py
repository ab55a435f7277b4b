"""Plugins around a training run: checked before it, called in the written order, timed.

pluggy holds the specification (hooks.py) and who is registered for which hook. The calls themselves are made here: pluggy's
begin with the last plugin, hand no `**kwargs` on and do not chain what transforms return.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, TypeVar

import numpy as np
import pluggy
import torch
from PIL import Image

from ..errors import SpecError, TrainError, did_you_mean
from .plugin_hooks import PROJECT, Hooks
from .plugin_loader import CHAINED, OFFERED, hook_methods, load
from .plugin_modules import Local, StandIn
from .plugin_results import as_text, checked_image, put_gradients
from .plugin_state import NoSuchKey

STAND_INS = {
    "plugins.plugins": StandIn("fxplug.training.plugin_base", ("class BasePlugin", "class PluginRunner")),
    "train": StandIn("fxplug.training.plugin_state", ("TrainingState:", "def save_model(")),
    "utils.sample_generator": StandIn("fxplug.training.plugin_state", ("def clean_filename(", "class SampleGenerator")),
    "colorama": StandIn("fxplug.training.terminal_colours"),
}
LIMITS = {"on_epoch_": 5.0, "on_training_": 20.0, "on_model_": 20.0, "": 0.5}  # seconds of one call, as in EveryDream2trainer
SHARE = 0.01  # of the run: a plugin that takes more is named at its end
SECONDS, CALLS, LONGEST, FAILURES = range(4)  # columns of the tally

Value = TypeVar("Value")
implements = pluggy.HookimplMarker(PROJECT)


class PluginError(TrainError):
    """A plugin raised: the run stops."""


class _Methods:
    """What pluggy registers for a plugin: its hooks, each timed and guarded."""

    def __init__(self, calls: dict[str, Any]) -> None:
        vars(self).update(calls)


class Plugins:
    """The plugins of a run, in the written order.

    `specs`: for each an import path (`package.module.Class` or `package.module:Class`), `{path: options}`, a `settings.Use`, a
    class or an object. Modules are looked for in `base` (the folder of the configuration), in the working folder, then on the
    Python path. `on_error`: whether a plugin that raises stops the run. What all hooks get goes into `common`; `note` is told
    in a line of text what goes wrong while a run goes on; `sample` is the one that is transformed.

    Raises SpecError (its path begins with the place in `specs`) for a path that does not import, a class that is no plugin or
    cannot be made, a hook that does not exist, and an argument that a hook does not offer. May be pickled into worker
    processes, where only the plugins that transform are there.
    """

    def __init__(
        self, specs: Sequence[Any] = (), *, base: str | Path | None = None, on_error: Literal["stop", "continue"] = "stop"
    ) -> None:
        self.on_error = on_error
        self.common: dict[str, Any] = {}
        self.note: Callable[[str], object] = logging.getLogger(__name__).warning
        self._local = Local.of([base or Path.cwd(), Path.cwd()], STAND_INS)
        self.sample = ""
        self._plugins: dict[str, object] = {}
        for index, spec in enumerate(specs):
            try:
                plugin = load(spec, self._local)
            except SpecError as error:
                raise SpecError(error.finding, path=(index, *error.path), key=error.key) from error.__cause__
            name, count = type(plugin).__name__, sum(type(p).__name__ == type(plugin).__name__ for p in self._plugins.values())
            self._plugins[f"{name}@{count}" if count else name] = plugin
        self._places = [(name, hook) for name, plugin in self._plugins.items() for hook in hook_methods(plugin)]
        self._tally = torch.zeros(len(self._places), 4, dtype=torch.float64)
        if any(hook.startswith(CHAINED) for _, hook in self._places):
            self._tally.share_memory_()  # type: ignore[no-untyped-call]  # what happens in worker processes counts too
        self._register()

    def _register(self) -> None:
        rows = dict(zip(self._places, self._tally.numpy(), strict=True))
        self._at: tuple[Any, Any] = (None, None)  # epoch and step, for messages
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(Hooks)
        for name, plugin in self._plugins.items():
            calls = {}
            for hook, (method, wanted) in hook_methods(plugin).items():
                make = self._transform if hook.startswith(CHAINED) else self._notify
                calls[hook] = implements(make(name, hook, method, wanted, rows[name, hook]))
            manager.register(_Methods(calls), name)
        self._calls = {hook: [one.function for one in getattr(manager.hook, hook).get_hookimpls()] for hook in OFFERED}
        self._offered = {hook: frozenset(names) for hook, names in OFFERED.items()}

    def __bool__(self) -> bool:
        return bool(self._plugins)

    def has(self, hook: str) -> bool:
        """Whether a plugin has this hook, so that its data need not be made for nobody."""
        return bool(self._calls[hook])

    @property
    def transforms(self) -> bool:
        """Whether any plugin changes what is loaded; a loader needs the others not."""
        return any(calls for hook, calls in self._calls.items() if hook.startswith("transform_"))

    def call(self, hook: str, **data: Any) -> None:
        """Tell every plugin that has the hook, in the written order.

        `data` and `common` together must have all that the specification names. Raises PluginError when a plugin raises and
        `on_error` is `stop`.
        """
        if "global_step" in data:
            self._at = data.get("epoch"), data["global_step"]
        calls = self._calls[hook]
        if not calls:
            return
        offered, given = self._offered[hook], {**self.common, **data}
        if not offered <= given.keys() or not data.keys() <= offered:
            raise TypeError(f"{hook} is called with {', '.join(given)}, but its data are {', '.join(OFFERED[hook])}")
        for one in calls:
            one(**given)

    def transform_caption(self, caption: str) -> str:
        """The caption after every plugin's `transform_caption`, each given what the one before it returned."""
        return self.transform("transform_caption", caption)

    def modify_sample_prompt(self, prompt: str) -> str:
        """The caption of a sample image after every plugin's `modify_sample_prompt`."""
        return self.transform("modify_sample_prompt", prompt)

    def transform_pil_image(self, img: Image.Image) -> Image.Image:
        """The image after every plugin's `transform_pil_image`, which are given it as an array and may give any size back."""
        if not self._calls["transform_pil_image"]:
            return img
        return Image.fromarray(self.transform("transform_pil_image", np.array(img)))

    def transform(self, hook: str, value: Value) -> Value:
        """`value` through the chain of a hook. Raises PluginError when a plugin raises or returns None, and errors stop."""
        for one in self._calls[hook]:
            value = one(value=value)
        return value

    def _notify(
        self, plugin: str, hook: str, method: Callable[..., Any], wanted: tuple[str, ...], row: np.ndarray[Any, Any]
    ) -> Callable[..., None]:
        def run(**data: Any) -> None:
            start = perf_counter()
            try:
                result = method(**{name: data[name] for name in wanted})
                if result is not None and hook == "on_backpropagation":
                    put_gradients(data["module"], result)
            except Exception as error:  # the plugin's
                self._failed(plugin, hook, row, error)
            finally:
                _count(row, perf_counter() - start)

        return run

    def _transform(
        self, plugin: str, hook: str, method: Callable[..., Any], wanted: tuple[str, ...], row: np.ndarray[Any, Any]
    ) -> Callable[..., Any]:
        checked = checked_image if hook == "transform_pil_image" else as_text
        positional, by_name = wanted[:1] == OFFERED[hook][:1], "pil" in wanted

        def run(*, value: Any) -> Any:
            start = perf_counter()
            try:
                beside = {"pil": Image.fromarray(value)} if by_name else {}
                return checked(method(*[value][:positional], **beside), value)
            except Exception as error:  # the plugin's
                self._failed(plugin, hook, row, error)
                return value
            finally:
                _count(row, perf_counter() - start)

        return run

    def _failed(self, plugin: str, hook: str, row: np.ndarray[Any, Any], error: Exception) -> None:
        row[FAILURES] += 1
        if self.on_error == "continue" and row[FAILURES] > 1:
            return
        epoch, step = self._at
        at = "" if step is None else f" (global_step {step})" if epoch is None else f" (epoch {epoch}, global_step {step})"
        if hook.startswith("transform_"):
            at = f" ({self.sample})" if self.sample else ""
        text = f"plugin {plugin} raised in {hook}{at}: {type(error).__name__}: {error}"
        if isinstance(error, KeyError) and error.args and hook.startswith("on_") and not isinstance(error, NoSuchKey):
            text += f"{did_you_mean(error.args[0], OFFERED[hook])}; the hook offers {', '.join(OFFERED[hook])}"
        if hook == "transform_pil_image" and isinstance(error, (AttributeError, TypeError)) and "numpy" in str(error):
            text += "; img is a numpy array [h, w, 3], an argument named 'pil' is the PIL image"
        if self.on_error == "stop":
            raise PluginError(text) from error
        self.note(f"{text}; the run goes on")

    def shares(self, total: float) -> list[tuple[str, str, float, float]]:
        """(plugin, hook, seconds, share of `total` seconds) of every hook that was called, the slowest first.

        The seconds of transforms are summed over worker processes, which run beside the training.
        """
        rows = [(plugin, hook, row[SECONDS], row[SECONDS] / max(total, 1e-9)) for (plugin, hook), row in self._called()]
        return sorted(rows, key=lambda row: -row[2])

    def _called(self) -> list[tuple[tuple[str, str], list[float]]]:
        return [(place, row) for place, row in zip(self._places, self._tally.tolist(), strict=True) if row[CALLS]]

    def summary(self, total: float) -> list[str]:
        """What is to be said at the end of a run of `total` seconds: which plugins were slow, and which raised how often."""
        lines = []
        for (plugin, hook), (seconds, calls, longest, failures) in self._called():
            limit = next(limit for start, limit in LIMITS.items() if hook.startswith(start))
            over = f", the longest {longest:.3g} s where {limit:g} s is much" if longest > limit else ""
            if over or seconds / max(total, 1e-9) > SHARE:
                took = f"{seconds:.3g} s, {seconds / max(total, 1e-9):.1%} of the run"
                lines.append(f"slow plugin: {plugin}.{hook} took {took} ({calls:.0f} calls{over})")
            if failures:
                lines.append(f"plugin {plugin} raised {failures:.0f} times in {calls:.0f} calls of {hook}")
        return lines

    def __getstate__(self) -> dict[str, Any]:
        self._local.activate()  # pickle looks classes up in sys.modules
        kept = {name: self._plugins[name] for name, hook in self._places if hook.startswith("transform_")}
        for name, plugin in kept.items():
            try:
                pickle.dumps(plugin)
            except Exception as error:  # the plugin's: what it holds is pickled
                text = f"plugin {name} cannot be sent to worker processes: {type(error).__name__}: {error}"
                raise TrainError(f"{text}; set 'workers' of the data to 0, or keep what it holds out of it") from error
        # in this order: the modules are there before the objects of their classes are read
        return {"local": self._local, "on_error": self.on_error, "plugins": kept, "places": self._places, "tally": self._tally}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._local, self.on_error, self._plugins = state["local"], state["on_error"], state["plugins"]
        self._places, self._tally = state["places"], state["tally"]
        self.common, self.note, self.sample = {}, logging.getLogger(__name__).warning, ""
        self._register()


def open_plugins(specs: Sequence[Any], on_error: Literal["stop", "continue"], base: str | Path | None = None) -> Plugins:
    """The plugins of a run. Raises SpecError with the way to the one that is wrong."""
    try:
        return Plugins(specs, base=base, on_error=on_error)
    except SpecError as error:
        raise SpecError(error.finding, path=("train", "plugins", *error.path), key=error.key) from error.__cause__


def _count(row: np.ndarray[Any, Any], seconds: float) -> None:
    row[SECONDS] += seconds
    row[CALLS] += 1
    if seconds > row[LONGEST]:
        row[LONGEST] = seconds
