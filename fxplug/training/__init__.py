"""Training a rewritten module: data, tasks, plugins and the loop."""

from ..core.extensions import Extension

EXTENSION = Extension(
    name="training",
    extra="train",
    bases=("lowerings", "parallel", "pipelines", "reporting"),
    names={
        "trainable": "fxplug.training.param_groups:trainable",
        "Run": "fxplug.training.run:Run",
        "train": "fxplug.training.run:train",
        "Task": "fxplug.training.tasks.task:Task",
        "Trainer": "fxplug.training.trainer:Trainer",
    },
    sections={"data": "fxplug.training.train_section:DATA", "train": "fxplug.training.train_section:TRAIN"},
    verbs={"train": "fxplug.training.verbs:train"},
)
