"""Adapters at run time: files read, placed on a graph's layers, and switched in its slots."""

from ..core.extensions import Extension

EXTENSION = Extension(
    name="adapters",
    bases=("config",),
    names={
        "load_adapted": "fxplug.adapters.adapted:load_adapted",
        "extract": "fxplug.adapters.extraction:extract",
        "pass_for": "fxplug.adapters.file_passes:pass_for",
        "convert_adapter": "fxplug.adapters.file_tools:convert_adapter",
        "merge_adapters": "fxplug.adapters.file_tools:merge_adapters",
        "resize_adapter": "fxplug.adapters.file_tools:resize_adapter",
        "inspect_adapter": "fxplug.adapters.inspection:inspect_adapter",
        "load_adapter": "fxplug.adapters.loading:load_adapter",
        "Prepared": "fxplug.adapters.state:Prepared",
        "Schedule": "fxplug.adapters.strengths:Schedule",
        "Strength": "fxplug.adapters.strengths:Strength",
        "Rows": "fxplug.adapters.rows:Rows",
        "Adapters": "fxplug.adapters.slots:Adapters",
        "save_adapter": "fxplug.adapters.writing:save_adapter",
    },
    verbs={
        "adapters": "fxplug.adapters.verbs:adapters",
    },
    accessors={"adapters": "fxplug.adapters.slots:Adapters"},
)
