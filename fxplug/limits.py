"""Bounds for what strangers' files may ask of a reader: all of them stand here, and each can be raised by argument."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """How much a reader takes before it refuses a file: `load(folder, limits=Limits(nodes=500_000))`.

    Sizes are bytes. A file within them is read in time and memory that its size bounds, but for what torch, onnx and zipfile
    read: `.pt`, `.ckpt`, ONNX and the archive of a package.
    """

    json: int = 64 << 20  # of one JSON file or header
    yaml: int = 1 << 19  # of one YAML file
    entries: int = 10_000  # values of one YAML file, aliases followed
    lines: int = 1 << 30  # of one metadata.jsonl
    caption: int = 1 << 20  # of one caption beside an image
    samples: int = 50_000_000  # of one epoch, repeats counted
    values: int = 2_000_000  # objects, lists and members of one JSON file
    depth: int = 64  # how deep values, modules or archives nest
    nodes: int = 65_536  # of one graph
    modules: int = 65_536  # of one graph
    variants: int = 256  # further graphs of one model, for other forms of call
    tensors: int = 131_072  # of one safetensors file
    digits: int = 4_300  # of one number, as Python's own limit
    update: float = 1e6  # of the most that an adapter changes one weight
    text: int = 4_096  # characters of one name or pattern
    string: int = 65_536  # characters of one text among the values of a graph
    members: int = 65_536  # of one range
    size: int = 1 << 32  # of one whole number among the arguments of a constructor
    bits: int = 65_536  # of one whole number that a graph can come to, whatever it is called with
    conditions: int = 131_072  # characters of all conditions on sizes of one package


DEFAULT = Limits()
