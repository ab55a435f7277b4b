"""The base class of EveryDream2trainer's plugins, under its name here; see fxplug/training/plugin_hooks.py."""

from ..training.plugin_hooks import BasePlugin as BasePlugin
