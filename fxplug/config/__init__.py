"""A rewrite as a configuration: its model, its passes, its other sections, the run of it, and the command line."""

from ..core.extensions import Extension

EXTENSION = Extension(
    name="config",
    names={
        "Result": "fxplug.config.flow:Result",
        "rewrite": "fxplug.config.flow:rewrite",
        "load_config": "fxplug.config.run_config:load_config",
    },
    verbs={
        "diff": "fxplug.config.verbs:diff",
        "doctor": "fxplug.config.cli.doctor:doctor",
        "passes": "fxplug.config.verbs:passes",
        "rewrite": "fxplug.config.verbs:rewrite",
        "schema": "fxplug.config.verbs:schema",
        "show": "fxplug.config.verbs:show",
        "sites": "fxplug.config.verbs:sites",
    },
)
