"""Plugins and configurations written for other systems, used in graphs without a change to their classes."""

from ..core.extensions import Extension

HCP = Extension(name="hcp", bases=("config",), verbs={"convert": "fxplug.compat.verbs:convert"})
ZHIJIAN = Extension(name="zhijian", bases=("config",), names={"blitz": "fxplug.compat.zhijian.blitz:blitz"})
EVERYDREAM = Extension(
    name="everydream", bases=("training",), hooks={"training_plugins": "fxplug.compat.everydream.plugins:LoadedPlugins"}
)
