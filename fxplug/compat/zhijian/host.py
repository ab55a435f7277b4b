"""What the method of an add-in gets for the module that it stands at: the module itself, to be read."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...core.errors import SpecError


class ModuleView:
    """The module at a point, for the method to read: its settings and its weights, which stay the base model's.

    `forward` of a layer, a module without others in it, runs it once more on the weights that it has; as no hook of
    ZhiJian's, nothing that stands at the layer is run by that.
    """

    __slots__ = ("_module", "_path")

    def __init__(self, module: nn.Module, path: str) -> None:
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_path", path)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(object.__getattribute__(self, "_module"))

    def __getattr__(self, name: str) -> Any:
        module, path = (object.__getattribute__(self, slot) for slot in ModuleView.__slots__)
        layer = not module._modules and type(module).__module__.startswith("torch.nn.")
        if name in ("parameters", "named_parameters", "buffers", "named_buffers", "state_dict") or (
            name == "forward" and not layer
        ):
            raise self._refused(f"uses '{name}' of '{path}'")
        value = getattr(module, name)
        return ModuleView(value, f"{path}.{name}") if isinstance(value, nn.Module) else value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._refused(f"calls '{object.__getattribute__(self, '_path')}'")

    def __setattr__(self, name: str, value: Any) -> None:
        raise self._refused(f"sets '{name}' of '{object.__getattribute__(self, '_path')}'")

    def __repr__(self) -> str:
        return repr(object.__getattribute__(self, "_module"))

    def __deepcopy__(self, memo: Any) -> ModuleView:
        return self

    @staticmethod
    def _refused(what: str) -> SpecError:
        return SpecError(
            f"the add-in {what}, and it may only read that module of the base model: its settings, its weights by name, and "
            "'forward' of a single layer; to run a module again, write your own block"
        )
