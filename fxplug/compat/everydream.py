"""The base class of EveryDream2trainer's plugins, under its name here; see fxplug/training/plugin_base.py."""

from ..training.plugin_base import BasePlugin as BasePlugin
