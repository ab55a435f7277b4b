"""Plugins around a training run: checked before it, called in the written order, timed, and what they return checked."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ...core.errors import SpecError, TrainError, did_you_mean, prefix_path
from ...core.spec.yaml_source import quote_yaml
from ...training.plugins import Plugins, RunStart
from .hooks import OFFERED
from .loader import CHAINED, LocalModules, list_hook_methods, load
from .state import Optimizers, TrainBatch, TrainingState, describe_optimizer, make_plugin_batch

LIMITS = {"on_epoch_": 5.0, "on_training_": 20.0, "on_model_": 20.0, "": 0.5}  # seconds of one call, as in EveryDream2trainer
SHARE = 0.01  # of the run: a plugin that takes more is named at its end
SECONDS, CALLS, LONGEST, FAILURES = range(4)  # columns of the tally

Value = TypeVar("Value")
Array = np.ndarray[Any, Any]


class PluginError(TrainError):
    """A plugin raised: the run stops."""


class LoadedPlugins(Plugins):
    """The plugins of a run, in the written order.

    `specs`: for each an import path (`package.module.Class` or `package.module:Class`), `{path: options}`, a `settings.Use`, a
    class or an object. Modules are looked for in `base` (the folder of the configuration), in the working folder, then on the
    Python path. `on_error`: whether a plugin that raises stops the run. What all hooks get goes into `common`; `note` is told
    in a line of text what goes wrong while a run goes on; `sample` is the one that is transformed.

    Raises SpecError, at the place in `specs`, for a path that does not import, a class that is no plugin or
    cannot be made, a hook that does not exist, and an argument that a hook does not offer. May be pickled into worker
    processes, where only the plugins that transform are there.
    """

    def __init__(
        self, specs: Sequence[Any] = (), *, base: str | Path | None = None, on_error: Literal["stop", "continue"] = "stop"
    ) -> None:
        super().__init__()
        self.on_error = on_error
        self.common: dict[str, Any] = {}
        self.state = TrainingState()
        self._local = LocalModules([base or Path.cwd(), Path.cwd()])
        self._plugins: dict[str, object] = {}
        if not isinstance(specs, (list, tuple)):
            raise SpecError(f"must be a list of plugins, not {quote_yaml(specs)}", path=("train", "plugins"))
        for index, spec in enumerate(specs):
            with prefix_path("train", "plugins", index):
                plugin = load(spec, self._local)
            name, count = type(plugin).__name__, sum(type(p).__name__ == type(plugin).__name__ for p in self._plugins.values())
            self._plugins[f"{name}@{count}" if count else name] = plugin
        self._places = [(name, hook) for name, plugin in self._plugins.items() for hook in list_hook_methods(plugin)]
        self._tally = torch.zeros(len(self._places), 4, dtype=torch.float64)
        if any(hook.startswith(CHAINED) for _, hook in self._places):
            self._tally.share_memory_()  # type: ignore[no-untyped-call]  # what happens in worker processes counts too
        self._register()

    def _register(self) -> None:
        rows = dict(zip(self._places, self._tally.numpy(), strict=True))
        self._at: tuple[Any, Any] = (None, None)  # epoch and step, for messages
        self._calls: dict[str, list[Callable[[Any], Any]]] = {hook: [] for hook in OFFERED}
        for name, plugin in self._plugins.items():
            for hook, (method, wanted) in list_hook_methods(plugin).items():
                self._calls[hook].append(self._guarded(name, hook, method, wanted, rows[name, hook]))

    def has(self, hook: str) -> bool:
        """Return whether a plugin has this hook, so that unused data need not be made."""
        return bool(self._calls[hook])

    @property
    def transforms(self) -> bool:  # type: ignore[override]
        """Return whether any plugin changes the loaded data; a loader does not need the other plugins."""
        return any(calls for hook, calls in self._calls.items() if hook.startswith("transform_"))

    def begin(self, run: RunStart) -> None:
        """Prepare the data of all hooks, and call the first."""
        folder, task = run.out or Path.cwd(), run.task
        self._task = task
        self.state = TrainingState(
            train_batch=TrainBatch(run.data, task),
            unet=run.module,
            write_checkpoint=run.keep_at,
            **task.parts(),
        )
        self.common = {
            "module": run.module,
            "project_name": folder.absolute().name,
            "log_folder": str(folder),
            "data_root": run.data.root,
            "ed_state": self.state,
        }
        self.call(
            "on_model_load",
            config=run.config,
            optimizer_config=describe_optimizer(task, run.settings),
            resume_ckpt=task.encoder and task.encoder.source,
            disable_unet_training=not run.trains,
            disable_textenc_training=not task.trains,
        )

    def begin_steps(self, optimizer: Any) -> None:
        """Receive the optimizer, once it is made."""
        self.state.optimizer = Optimizers(optimizer, self.state.text_encoder)

    def see_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch on the device, with the entries of EveryDream2trainer's batch if a plugin sees it."""
        seen = any(self.has(hook) for hook in ("on_step_start", "on_backpropagation", "on_step_end"))
        return make_plugin_batch(batch, self._task) if seen else batch

    def call(self, hook: str, **data: Any) -> None:
        """Call the hook of every plugin that has it, in the order of the configuration.

        `data` and `common` together must have all that the specification names. Raises PluginError when a plugin raises and
        `on_error` is `stop`.
        """
        if "global_step" in data:
            self._at = data.get("epoch"), data["global_step"]
        for one in self._calls[hook]:
            one({**self.common, **data})

    def transform_caption(self, caption: str) -> str:
        """Return the caption after every plugin's `transform_caption`, each given the result of the one before."""
        return self.transform("transform_caption", caption)

    def modify_sample_prompt(self, prompt: str) -> str:
        """Return the caption of a sample image after every plugin's `modify_sample_prompt`."""
        return self.transform("modify_sample_prompt", prompt)

    def transform_pil_image(self, img: Image.Image) -> Image.Image:
        """Return the image after every plugin's `transform_pil_image`, which take an array and may return any size."""
        if not self._calls["transform_pil_image"]:
            return img
        return Image.fromarray(self.transform("transform_pil_image", np.array(img)))

    def transform(self, hook: str, value: Value) -> Value:
        """Pass `value` through the chain of a hook. Raises PluginError when a plugin raises or returns None, and errors
        stop."""
        for one in self._calls[hook]:
            value = one(value)
        return value

    def _guarded(
        self, plugin: str, hook: str, method: Callable[..., Any], wanted: tuple[str, ...], row: Array
    ) -> Callable[[Any], Any]:
        """Wrap a hook so that it takes a mapping with its data, or the value that it transforms."""
        checked = checked_image if hook == "transform_pil_image" else as_text
        positional, by_name = wanted[:1] == OFFERED[hook][:1], "pil" in wanted

        def notify(data: Mapping[str, Any]) -> None:
            result = method(**{name: data[name] for name in wanted})
            if result is not None and hook == "on_backpropagation":
                put_gradients(data["module"], result)

        def transform(value: Any) -> Any:
            beside = {"pil": Image.fromarray(value)} if by_name else {}
            return checked(method(*[value][:positional], **beside), value)

        act = transform if hook.startswith(CHAINED) else notify

        def run(given: Any) -> Any:
            start = perf_counter()
            try:
                return act(given)
            except Exception as error:  # the plugin's
                self._failed(plugin, hook, row, error, given)
                return given
            finally:
                seconds = perf_counter() - start
                row[SECONDS] += seconds
                row[CALLS] += 1
                row[LONGEST] = max(row[LONGEST], seconds)

        return run

    def _failed(self, plugin: str, hook: str, row: Array, error: Exception, given: Any) -> None:
        row[FAILURES] += 1
        if self.on_error == "continue" and row[FAILURES] > 1:
            return
        epoch, step = self._at
        at = "" if step is None else f" (global_step {step})" if epoch is None else f" (epoch {epoch}, global_step {step})"
        if hook.startswith("transform_"):
            at = f" ({self.sample})" if self.sample else ""
        text = f"plugin {plugin} raised in {hook}{at}: {type(error).__name__}: {error}"
        if isinstance(error, KeyError) and error.args and hook.startswith("on_"):
            batch = given["batch"] if isinstance(given.get("batch"), Mapping) else {}
            text += f"{did_you_mean(error.args[0], [*OFFERED[hook], *batch])}; the hook gets {', '.join(OFFERED[hook])}"
            text += f", and its batch has {', '.join(batch)}" if batch else ""
        if hook == "transform_pil_image" and isinstance(error, (AttributeError, TypeError)) and "numpy" in str(error):
            text += "; img is a numpy array [h, w, 3], an argument named 'pil' is the PIL image"
        if self.on_error == "stop":
            raise PluginError(text) from error
        self.note(f"{text}; the run continues")

    def summary(self, total: float) -> list[str]:
        """List the plugins that were slow or raised errors, for the end of a run of `total` seconds.

        The seconds of transforms are summed over worker processes, which run beside the training.
        """
        lines = []
        for (plugin, hook), (seconds, calls, longest, failures) in zip(self._places, self._tally.tolist(), strict=True):
            limit = next(limit for start, limit in LIMITS.items() if hook.startswith(start))
            over = f", the longest {longest:.3g} s, above {limit:g} s" if longest > limit else ""
            if over or seconds / max(total, 1e-9) > SHARE:
                took = f"{seconds:.3g} s, {seconds / max(total, 1e-9):.1%} of the run"
                lines.append(f"slow plugin: {plugin}.{hook} took {took} ({calls:.0f} calls{over})")
            if failures:
                lines.append(f"plugin {plugin} raised {failures:.0f} times in {calls:.0f} calls of {hook}")
        return lines

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: self._plugins[name] for name, hook in self._places if hook.startswith("transform_")}
        for name, plugin in kept.items():
            try:
                pickle.dumps(plugin)
            except Exception as error:  # the plugin's: what it holds is pickled
                text = f"plugin {name} cannot be sent to worker processes: {type(error).__name__}: {error}"
                raise TrainError(f"{text}; set 'workers' of the data to 0, or do not store that in the plugin") from error
        # in this order: the modules are there before the objects of their classes are read
        return {"local": self._local, "on_error": self.on_error, "plugins": kept, "places": self._places, "tally": self._tally}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._local, self.on_error, self._plugins = state["local"], state["on_error"], state["plugins"]
        self._places, self._tally = state["places"], state["tally"]
        self.common, self.state, self.note = {}, TrainingState(), logging.getLogger(__name__).warning
        self._register()


def as_text(result: Any, given: Any) -> Any:
    """Return a plugin's result for a caption. Raises TypeError for a result of another type than `given`."""
    kind = str if isinstance(given, str) else object
    if result is None or not isinstance(result, kind):
        raise _wrong(result, f"a {kind.__name__}: the value, changed or not")
    return result


def checked_image(result: Any, given: Array) -> Array:
    """Return a plugin's result for an image uint8 [h, w, c] or [h, w], in that form.

    It may be an array, also with floats from 0 to 1, or a PIL image. Raises TypeError for anything else.
    """
    if isinstance(result, Image.Image):
        return np.array(result.convert("L" if given.ndim == 2 else "RGB"))
    if not isinstance(result, np.ndarray):
        raise _wrong(result, "an image: an array or a PIL image")
    if result.ndim != given.ndim or result.shape[2:] != given.shape[2:]:
        raise TypeError(f"it returned an array of shape {list(result.shape)} for one of shape {list(given.shape)}")
    if np.issubdtype(result.dtype, np.floating):
        low, high = float(result.min()), float(result.max())
        if not 0 <= low <= high <= 1:
            raise TypeError(f"it returned floats from {low:.4g} to {high:.4g}; floats go from 0 to 1, uint8 to 255")
        scaled: Array = np.rint(result * 255).astype(np.uint8)
        return scaled
    if result.dtype != np.uint8:
        raise TypeError(f"it returned an array of {result.dtype}; an image is uint8, or floats from 0 to 1")
    return result


def put_gradients(module: nn.Module, result: Any) -> None:
    """Set the gradients that a plugin returned by the names of their parameters. Raises TypeError for anything else."""
    if not isinstance(result, Mapping):
        raise _wrong(result, "nothing, or gradients by the names of their parameters")
    named = dict(module.named_parameters())
    for name, gradient in result.items():
        if name not in named:
            raise TypeError(f"it returned a gradient of '{name}', which is not a parameter{did_you_mean(name, named)}")
        if gradient is not None and not (isinstance(gradient, Tensor) and gradient.shape == named[name].shape):
            found = list(gradient.shape) if isinstance(gradient, Tensor) else type(gradient).__name__
            raise TypeError(f"it returned {found} as the gradient of '{name}', which has the shape {list(named[name].shape)}")
    for name, gradient in result.items():
        named[name].grad = gradient


def _wrong(result: Any, wanted: str) -> TypeError:
    found = "nothing" if result is None else f"a {type(result).__name__}"
    return TypeError(f"it returned {found}, but must return {wanted}")
