"""HCP-Diffusion's plugins and configurations; here the base classes that plugins are written against."""

from .base_classes import (
    BasePluginBlock,
    MultiPluginBlock,
    PatchPluginBlock,
    PatchPluginContainer,
    PluginBlock,
    PluginGroup,
    SinglePluginBlock,
    WrapablePlugin,
    WrapPluginBlock,
)

__all__ = [
    "BasePluginBlock",
    "MultiPluginBlock",
    "PatchPluginBlock",
    "PatchPluginContainer",
    "PluginBlock",
    "PluginGroup",
    "SinglePluginBlock",
    "WrapPluginBlock",
    "WrapablePlugin",
]
