"""Denoisers that take part of a step from earlier steps."""

from ..core.extensions import Extension

EXTENSION = Extension(
    name="step_cache",
    names={
        "StepCache": "fxplug.step_cache.cache:StepCache",
        "FastAttention": "fxplug.step_cache.fast_attention:FastAttention",
        "Every": "fxplug.step_cache.policies:Every",
        "TeaCache": "fxplug.step_cache.policies:TeaCache",
        "Threshold": "fxplug.step_cache.policies:Threshold",
    },
)
