"""Many requests at once: stock pipelines whose calls of models are made jointly, each sample with adapters of its own."""

from importlib import import_module
from typing import Any

from ..core.extensions import Extension

EXTENSION = Extension(
    name="serving", extra="serve", bases=("adapters", "pipelines"), verbs={"serve": "fxplug.serving.server.verbs:serve"}
)
NAMES = {
    "AdapterInfo": "adapter_index", "AdapterStore": "store", "Cancelled": "parked", "Engine": "engine", "Lease": "store",
    "QueueFull": "tickets", "Region": "requests", "Request": "requests", "Ticket": "tickets",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: whoever reads the table of extensions does not wait for torch."""
    if name not in NAMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f".{NAMES[name]}", __name__), name)
