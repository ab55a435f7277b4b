"""Plugins of EveryDream2trainer around a training run, and the base class that they may have; see `hooks.py`."""

from .hooks import BasePlugin as BasePlugin
