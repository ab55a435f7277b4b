"""Pipelines: their models traced with what one real call gives them, and saved with what was made of these."""

from ..core.extensions import Extension

EXTENSION = Extension(
    name="pipelines",
    bases=("adapters",),
    names={
        "ModelMixin": "fxplug.pipelines.diffusers_types:ModelMixin",
        "controlnet_of": "fxplug.pipelines.control:controlnet_of",
        "pipeline_part": "fxplug.pipelines.diffusers_types:pipeline_part",
        "rewrite_pipeline": "fxplug.pipelines.rewriting:rewrite_pipeline",
        "load_pipeline": "fxplug.pipelines.tracing:load_pipeline",
        "save_pipeline": "fxplug.pipelines.tracing:save_pipeline",
        "trace_pipeline": "fxplug.pipelines.tracing:trace_pipeline",
    },
    verbs={"recipes": "fxplug.pipelines.verbs:show_recipes"},
    hooks={"pipeline_model": "fxplug.pipelines.pipeline_model:build_pipeline_model"},
)
