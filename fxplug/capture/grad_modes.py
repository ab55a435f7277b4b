"""Autocast and gradient regions that the model's own code opens, as nodes in pairs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from ..ir import ops
from ..torch_internals.modes import autocast_settings, set_grad_enabled
from .recorder import Recording, is_inlined_forward

Patch = tuple[type, str, Callable[..., Any]]


def patches(recording: Recording) -> Iterator[Patch]:
    """What stands for the methods of torch's context managers during one run: class, name and function."""
    yield torch.autocast, "__enter__", _enter_autocast(recording, torch.autocast.__enter__)
    yield torch.autocast, "__exit__", _exit(recording, torch.autocast.__exit__, ops.exit_autocast)
    grad = torch.autograd.grad_mode
    # the last one switches when it is made, and stays so if nobody enters it
    for kind, method in ((grad.no_grad, "__enter__"), (grad.enable_grad, "__enter__"), (grad.set_grad_enabled, "__init__")):
        yield kind, method, _enter_grad(recording, getattr(kind, method))
    for kind in (grad.no_grad, grad.enable_grad, grad.set_grad_enabled):
        yield kind, "__exit__", _exit(recording, kind.__exit__, ops.exit_grad)
    # the graph's results must be usable outside it, so inference mode in it means no gradients
    yield grad.inference_mode, "__enter__", _enter_inference(recording, grad.inference_mode.__enter__)
    yield grad.inference_mode, "__exit__", _exit_inference(recording, grad.inference_mode.__exit__)


def _enter_autocast(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def enter(context: Any) -> Any:
        out = original(context)
        if recording.recording_here():
            device = recording.dynamic_device(torch.device(context.device))
            kind = device if isinstance(device, fx.Node) else context.device
            args = (kind, context.fast_dtype, *autocast_settings(context))
            _open(recording, context, ops.enter_autocast, args)
        return out

    return enter


def _enter_grad(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def enter(context: Any, *args: Any, **kwargs: Any) -> Any:
        if not recording.recording_here():
            return original(context, *args, **kwargs)
        # one manager switches by making another, which is no switch of its own
        recording.paused, before = True, torch.is_grad_enabled()
        try:
            out = original(context, *args, **kwargs)
        finally:
            recording.paused = False
        if is_inlined_forward(sys._getframe(1)):
            set_grad_enabled(before)
            return out
        _open(recording, context, ops.enter_grad, (torch.is_grad_enabled(),))
        return out

    return enter


def _exit(recording: Recording, original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def leave(context: Any, *error: Any) -> Any:
        if not recording.recording_here():
            return original(context, *error)
        _close(recording, context, function)
        recording.paused = True
        try:
            return original(context, *error)
        finally:
            recording.paused = False

    return leave


def _enter_inference(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def enter(context: Any) -> Any:
        if not recording.recording_here():
            return original(context)
        recording.inference.append(bool(context.mode))
        if context.mode:
            context._fxplug_before = torch.is_grad_enabled()
            set_grad_enabled(False)
            _open(recording, context, ops.enter_grad, (False,))
        return None

    return enter


def _exit_inference(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def leave(context: Any, *error: Any) -> Any:
        if not recording.recording_here():
            return original(context, *error)
        recording.inference.pop()
        if context.mode:
            _close(recording, context, ops.exit_grad)
            set_grad_enabled(context._fxplug_before)
        return None

    return leave


def _open(recording: Recording, context: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    node = recording.node("call_function", function, args, {}, recording.named(function.__name__), effect=True)
    context.__dict__.setdefault("_fxplug", []).append(node)
    recording.switched += 1


def _close(recording: Recording, context: Any, function: Callable[..., Any]) -> None:
    opened = context.__dict__.get("_fxplug")
    if opened:
        name = recording.named(function.__name__)
        recording.node("call_function", function, (opened.pop(),), {}, name, effect=True)
        recording.switched += 1
