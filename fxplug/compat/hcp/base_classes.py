"""The base classes of HCP-Diffusion's model plugins.

`from hcpdiff.models.plugin import X` becomes `from fxplug.compat.hcp import X`. A class written against them is put into a
graph as it is, by the drivers beside this file and the passes in passes/hcp. Nothing of the model is hooked: a plugin is made
with its host, and its methods are run once, while the graph is written. The names and the meaning of every method are those of
`hcpdiff/models/plugin.py` (github.com/IrisRainbowNeko/HCP-Diffusion).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, ClassVar, cast

import torch
from torch import nn

from ...core.errors import FxplugError, SpecError, did_you_mean, quote
from ...core.spec.addresses import compile_expression


class HookParam(FxplugError):
    """What a SinglePluginBlock at a layer of the model changes: the `name` of a parameter, or None for its result."""

    def __init__(self, name: str | None) -> None:
        super().__init__(f"hook_param is {name}")
        self.name = name


class PluginContext:
    """The making of one plugin: `plugins` are all that are made meanwhile.

    With `ask` the base class of a SinglePluginBlock raises HookParam: nothing of the plugin is made then.
    """

    def __init__(self, ask: bool = False) -> None:
        self.ask, self.plugins = ask, list[BasePluginBlock]()


MAKING: ContextVar[PluginContext | None] = ContextVar("making", default=None)


class Ref:
    """Called, it gives a module that it does not keep alive. Unlike a weakref it survives a copy of what holds it."""

    def __init__(self, module: nn.Module) -> None:
        self._of = weakref.ref(module)

    def __call__(self) -> Any:
        return self._of()

    def __deepcopy__(self, memo: dict[int, Any]) -> Ref:
        return self


class BasePluginBlock(nn.Module):
    """What all plugins are: a module with a name, and perhaps more inputs than its host has."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        if (making := MAKING.get()) is not None:
            making.plugins.append(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the last argument of `forward(host, fea_in, fea_out)`, which changes nothing; each plugin overrides it."""
        return args[-1]

    def remove(self) -> None:
        """Raise SpecError: the plugin is part of the graph, and the module it was applied to is still unchanged."""
        raise SpecError(f"plugin '{self.name}' is part of a graph and cannot be removed: use the module it was applied to")

    def feed_input_data(self, data: Any) -> None:
        """Receive the inputs of the pass, a dict by name, before each call."""
        self.input_data = data

    def register_input_feeder_to(self, host_model: nn.Module) -> None:
        """Request that `feed_input_data` be called for this plugin. The host is unchanged."""
        self.takes_inputs = True

    def set_hyper_params(self, **kwargs: Any) -> None:
        """Set attributes of the plugin by name."""
        for key, value in kwargs.items():
            setattr(self, key, value)

    @staticmethod
    def extract_state_without_plugin(model: nn.Module, trainable: bool = False) -> dict[str, torch.Tensor]:
        """Return the weights of a model that belong to no plugin; with `trainable` only those that train."""
        plugins = tuple(f"{name}." for name, m in model.named_modules() if isinstance(m, BasePluginBlock))
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        state = model.state_dict().items()
        return {k: v for k, v in state if not k.startswith(plugins) and (not trainable or k in trained)}

    def get_trainable_parameters(self) -> Iterable[nn.Parameter]:
        """Return the trainable parameters of the plugin: by default all."""
        return self.parameters()


class WrapablePlugin:
    """A plugin that `wrap_model` puts on every layer of `wrapable_classes` in a module."""

    wrapable_classes: ClassVar[Any] = ()

    @classmethod
    def wrap_layer(cls, name: Any, layer: nn.Module, **kwargs: Any) -> Any:
        """Make a plugin for one layer: `cls(name, layer, **kwargs)`."""
        return cast(Any, cls)(name, layer, **kwargs)

    @classmethod
    def named_modules_with_exclude(
        cls,
        self: nn.Module,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
        exclude_key: str | None = None,
        exclude_classes: tuple[type, ...] = (),
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield `named_modules` without those below a path in which `exclude_key` (a regular expression) is found."""
        memo = set() if memo is None else memo
        excluded: set[str] = set()
        if exclude_key is not None:
            paths = [path for path, _ in self.named_modules(prefix=prefix, remove_duplicate=False)]
            key = compile_expression(exclude_key, lambda finding: SpecError(f"exclude_key {quote(exclude_key)} {finding}"))
            excluded = {path for path in paths if key.search(path)}

        def walk(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
            if module in memo or path in excluded or isinstance(module, exclude_classes):
                return
            if remove_duplicate:
                memo.add(module)
            yield path, module
            for name, child in module._modules.items():
                if child is not None:
                    yield from walk(child, f"{path}.{name}" if path else name)

        yield from walk(self, prefix)

    @classmethod
    def wrap_model(
        cls,
        name: Any,
        host: nn.Module,
        exclude_key: str | None = None,
        exclude_classes: tuple[type, ...] = (),
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Make a plugin for the host itself if it is of `wrapable_classes`, else one for each such layer in it, by path."""
        kinds = (*cls.wrapable_classes, *([cls.container_cls] if issubclass(cls, PatchPluginBlock) else []))
        if isinstance(host, kinds):
            return {"": cls.wrap_layer(name, host, **kwargs)}
        modules = dict(cls.named_modules_with_exclude(host, exclude_key=exclude_key, exclude_classes=tuple(exclude_classes)))
        found = {}
        for path, layer in modules.items():
            if isinstance(layer, kinds):
                if "parent_block" in kwargs:
                    parent, _, own = path.rpartition(".")
                    kwargs.update(parent_block=modules[parent], host_name=own)
                found[path] = cls.wrap_layer(name, layer, **kwargs)
        return found


class SinglePluginBlock(BasePluginBlock, WrapablePlugin):
    """A plugin of one layer. `forward(fea_in, fea_out)` gets the tuple of its positional arguments and its result and gives
    the new result; with `hook_param` it is `forward(host_param)`, which gets that parameter and gives what is used instead.
    """

    def __init__(
        self, name: str, host: nn.Module, hook_param: str | None = None, host_model: nn.Module | None = None
    ) -> None:
        super().__init__(name)
        self.host = Ref(host)
        self.target = hook_param
        if (making := MAKING.get()) is not None and making.ask:
            raise HookParam(hook_param)

    def layer_hook(self, host: nn.Module, fea_in: tuple[Any, ...], fea_out: Any) -> Any:
        """Return the layer's new result: `forward(fea_in, fea_out)`."""
        return self(fea_in, fea_out)


class PluginBlock(BasePluginBlock):
    """A plugin between two layers: `forward(fea_from_in, fea_in, fea_out)` gives what the second one's result, or with
    `pre_hook` its input, becomes. Each of `from_layer` and `to_layer` is `{"layer": module, "pre_hook": bool}`.
    """

    def __init__(
        self, name: str, from_layer: dict[str, Any], to_layer: dict[str, Any], host_model: nn.Module | None = None
    ) -> None:
        super().__init__(name)
        self.host_from = Ref(from_layer["layer"])
        self.host_to = Ref(to_layer["layer"])

    def from_layer_hook(self, host: nn.Module, fea_in: tuple[Any, ...], fea_out: Any) -> Any:
        """Keep the input of the from-layer."""
        self.feat_from = fea_in

    def to_layer_hook(self, host: nn.Module, fea_in: tuple[Any, ...], fea_out: Any) -> Any:
        """Return the new result of the to-layer, or its new input with `pre_hook`: `forward` of that and the stored input."""
        return self(self.feat_from, fea_in, fea_out)


class MultiPluginBlock(BasePluginBlock):
    """A plugin between many layers, whose hooks get the number of the layer as `idx`.

    As it is, `forward` gets the list of all inputs of the from-layers once the last is there, and gives one value to add
    to the result of each to-layer.
    """

    def __init__(
        self,
        name: str,
        from_layers: list[dict[str, Any]],
        to_layers: list[dict[str, Any]],
        host_model: nn.Module | None = None,
    ) -> None:
        super().__init__(name)
        if host_model is None:
            raise SpecError(f"plugin '{name}': a MultiPluginBlock needs its host_model: pass it to super().__init__")
        self.host_from = [Ref(layer["layer"]) for layer in from_layers]
        self.host_to = [Ref(layer["layer"]) for layer in to_layers]
        self.host_model = Ref(host_model)
        self.feat_from: list[Any] = [None for _ in from_layers]
        self.feat_to: Any = None
        self.record_count = 0

    def from_layer_hook(self, host: nn.Module, fea_in: tuple[Any, ...], fea_out: Any, idx: int) -> Any:
        """Keep the input of from-layer `idx`; the last of them runs `forward`."""
        self.feat_from[idx] = fea_in
        self.record_count += 1
        if self.record_count == len(self.feat_from):
            self.record_count = 0
            self.feat_to = self(self.feat_from)

    def to_layer_hook(self, host: nn.Module, fea_in: tuple[Any, ...], fea_out: Any, idx: int) -> Any:
        """Return the new result of to-layer `idx`: its sum with its member of the result of `forward`."""
        return self.feat_to[idx] + fea_out


class PatchPluginContainer(nn.Module):
    """What stands in the place of a patched module: its `forward` runs the plugins, and `_host` where it wants to."""

    _host: Any

    def __init__(self, host_name: str, host: nn.Module, parent_block: nn.Module) -> None:
        super().__init__()
        self.__dict__["_host"] = host  # no child: the weights of the host keep their names
        self.host_name = host_name
        if parent_block is not None:
            self.__dict__["parent_block"] = Ref(parent_block)
        self.plugin_names: list[str] = []

    def add_plugin(self, name: str, plugin: PatchPluginBlock) -> None:
        """Add a plugin after the existing ones. Raises SpecError if one has that name."""
        if name in self.plugin_names:
            raise SpecError(f"two plugins are named '{name}' at one place: give each another name")
        setattr(self, name, plugin)
        self.plugin_names.append(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the plugins' `pre_forward` one after the other, the module, and their `post_forward`."""
        for _, plugin in self:
            args, kwargs = plugin.pre_forward(*args, **kwargs)
        output = self._host(*args, **kwargs)
        for _, plugin in self:
            output = plugin.post_forward(output, *args, **kwargs)
        return output

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter([(name, self[name]) for name in self.plugin_names])

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class PatchPluginBlock(BasePluginBlock, WrapablePlugin):
    """A plugin in the place of a module: `container_cls` says how the plugins there and the module work together.

    With the container as it is, `pre_forward` gives what the module gets and `post_forward` what becomes of its result.
    """

    container_cls: ClassVar[type[PatchPluginContainer]] = PatchPluginContainer

    def __init__(
        self,
        name: str,
        host: nn.Module,
        host_model: nn.Module | None = None,
        parent_block: nn.Module | None = None,
        host_name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.host = Ref(host._host if isinstance(host, self.container_cls) else host)
        self.parent_block = Ref(parent_block) if parent_block is not None else None
        self.host_name = host_name
        container = self.get_container(host, host_name or "", parent_block)
        container.add_plugin(name, self)
        self.__dict__["container"] = lambda: container  # no child either: the container has the plugin as one

    def pre_forward(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments `(args, kwargs)` for the module, by default those given."""
        return args, kwargs

    def post_forward(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the module's new result, by default unchanged; the arguments are those it was called with."""
        return output

    def get_container(self, host: nn.Module, host_name: str, parent_block: nn.Module | None) -> Any:
        """Return the container in the place of the host: the host itself if it is one, else a new one around it."""
        if isinstance(host, self.container_cls):
            return host
        return self.container_cls(host_name, host, parent_block)  # type: ignore[arg-type]


class WrapPluginBlock(PatchPluginBlock):
    """What versions 0.3 to 0.5 called a PatchPluginBlock. Raises SpecError for one with a `forward` of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if type(self).forward is not BasePluginBlock.forward:
            raise SpecError(
                f"{type(self).__name__} has its own forward: write what it does before and after its module as pre_forward and "
                "post_forward, or as the forward of a container (container_cls)"
            )


class PluginGroup:
    """Plugins by the path of their host."""

    def __init__(self, plugin_dict: dict[str, BasePluginBlock]) -> None:
        self.plugin_dict = plugin_dict

    def __setitem__(self, key: str, plugin: BasePluginBlock) -> None:
        self.plugin_dict[key] = plugin

    def __getitem__(self, key: str) -> BasePluginBlock:
        return self.plugin_dict[key]

    @property
    def plugin_name(self) -> str | None:
        """Name of the first plugin, None if there is none."""
        return None if self.empty() else next(iter(self.plugin_dict.values())).name

    def remove(self) -> None:
        """Call `remove` of each plugin, which raises SpecError."""
        for plugin in self.plugin_dict.values():
            plugin.remove()

    def state_dict(self, model: nn.Module | None = None) -> dict[str, torch.Tensor]:
        """Return the weights of all plugins under the names of a file, `path.___.name`.

        With `model` they are that model's, such as an average of the weights: it has each plugin at its host, by the plugin's
        name. Raises SpecError for a weight that it does not have.
        """
        found, theirs = {}, None if model is None else model.state_dict()
        for path, plugin in self.plugin_dict.items():
            for key, value in plugin.state_dict().items():
                name = f"{path}.{plugin.name}.{key}".lstrip(".")
                if theirs is not None and name not in theirs:
                    raise SpecError(
                        f"the model has no weight '{name}' of plugin '{plugin.name}'{did_you_mean(name, theirs)}: the weights "
                        "of passes are written by fxplug.compat.hcp.checkpoints.save_checkpoint(module, file)"
                    )
                found[f"{path}.___.{key}"] = value if theirs is None else theirs[name]
        return found

    def empty(self) -> bool:
        """Return whether there is no plugin."""
        return not self.plugin_dict
