"""Lowerings: rewrites that change how fast a module runs, never what it computes."""

from ..core.extensions import Extension

EXTENSION = Extension(
    name="lowerings",
    bases=("adapters", "step_cache"),
    names={
        "fuse": "fxplug.lowerings.linear.fused:fuse",
        "tune": "fxplug.lowerings.linear.measurement:tune",
        "merge": "fxplug.lowerings.merging.fold:merge",
        "unmerge": "fxplug.lowerings.merging.fold:unmerge",
        "lower": "fxplug.lowerings.pipeline:lower",
        "prune": "fxplug.lowerings.pruning:prune",
    },
    hooks={
        "table_of_forms": "fxplug.lowerings.pipeline:table_of_forms",
    },
    accessors={
        "enable_gradient_checkpointing": "fxplug.lowerings.regions.checkpointing:enable",
        "gradient_checkpointing_enable": "fxplug.lowerings.regions.checkpointing:enable",
        "activation_checkpointing_enable": "fxplug.lowerings.regions.checkpointing:enable",
        "activation_checkpointing_disable": "fxplug.lowerings.regions.checkpointing:disable",
        "disable_gradient_checkpointing": "fxplug.lowerings.regions.checkpointing:disable",
        "gradient_checkpointing_disable": "fxplug.lowerings.regions.checkpointing:disable",
        "set_grad_checkpointing": "fxplug.lowerings.regions.checkpointing:switch",
    },
    verbs={"tune": "fxplug.lowerings.verbs:tune"},
)
