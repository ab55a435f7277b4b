"""Saved rewrites and adapters on the Hugging Face Hub: pushed with a card, and fetched without code."""

from ..core.extensions import Extension

EXTENSION = Extension(
    name="hub",
    bases=("adapters",),
    names={"push": "fxplug.hub.pushing:push"},
    verbs={"push": "fxplug.hub.verbs:push"},
    hooks={
        "hub_artifact": "fxplug.hub.fetching:fetch_artifact",
        "hub_adapter": "fxplug.hub.fetching:fetch_adapter",
        "hub_cached": "fxplug.hub.fetching:cached_file",
    },
)
