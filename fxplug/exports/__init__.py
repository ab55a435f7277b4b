"""A traced module as one file that runs without Python code of anybody's."""

from ..core.extensions import Extension

EXTENSION = Extension(
    name="exports",
    extra="onnx",
    bases=("adapters", "lowerings"),
    names={
        "save_checkpoint": "fxplug.exports.checkpoints:save_checkpoint",
        "export": "fxplug.exports.exporter:export",
        "OnnxModel": "fxplug.exports.onnx_model:OnnxModel",
        "load_onnx": "fxplug.exports.onnx_model:load_onnx",
        "Package": "fxplug.exports.package:Package",
        "load_package": "fxplug.exports.package:load_package",
    },
    checks={"exported": "fxplug.exports.blockers:check_export"},
    sections={"export": "fxplug.exports.export_section:EXPORT"},
    verbs={"export": "fxplug.exports.verbs:export"},
)
