"""HCP-Diffusion's plugins and configurations; here the base classes that plugins are written against."""

from .base_classes import BasePluginBlock as BasePluginBlock
from .base_classes import MultiPluginBlock as MultiPluginBlock
from .base_classes import PatchPluginBlock as PatchPluginBlock
from .base_classes import PatchPluginContainer as PatchPluginContainer
from .base_classes import PluginBlock as PluginBlock
from .base_classes import PluginGroup as PluginGroup
from .base_classes import SinglePluginBlock as SinglePluginBlock
from .base_classes import WrapablePlugin as WrapablePlugin
from .base_classes import WrapPluginBlock as WrapPluginBlock
