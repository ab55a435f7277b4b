"""Saved rewrites and adapters on the Hugging Face Hub: pushed with a card, and fetched without code."""

from ..core.extensions import Extension

EXTENSION = Extension(
    name="hub",
    bases=("config",),
    names={"push": "fxplug.hub.pushing:push"},
    verbs={"push": "fxplug.hub.verbs:push"},
    hooks={"hub": "fxplug.hub.fetching:HUB"},
)
