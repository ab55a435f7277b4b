"""The modules that passes put in, a file a method. A pass names them `fxplug.blocks:Lora`, whichever file they are in."""

from .base import Block
from .bitfit import Delta
from .bottleneck import Adapter
from .control import Add, Gate
from .dora import Dora
from .freeu import FreeU
from .half_lora import HalfLora
from .head import Head
from .image_attention import ImageAttention, as_tokens
from .loha import Loha
from .lokr import Lokr
from .lora import Lora
from .lora_weight import LoraWeight
from .orthogonal import Boft, Oft
from .prompts import Drop, Prompt
from .replace import Replace
from .scale import Scale
from .skip import Skip
from .slot_gates import Gates, Table
from .ssf import Ssf
from .step_marks import Gauge, Join, Keep, Mark
from .token_merging import Merge, Unmerge
from .vera import Projections, Vera
from .weight_norms import SpectralNorm, WeightNorm
from .weight_update import Update
from .windowed_attention import Attend, Half, Window

__all__ = [
    "Adapter",
    "Add",
    "Attend",
    "Block",
    "Boft",
    "Delta",
    "Dora",
    "Drop",
    "FreeU",
    "Gate",
    "Gates",
    "Gauge",
    "Half",
    "HalfLora",
    "Head",
    "ImageAttention",
    "Join",
    "Keep",
    "Loha",
    "Lokr",
    "Lora",
    "LoraWeight",
    "Mark",
    "Merge",
    "Oft",
    "Projections",
    "Prompt",
    "Replace",
    "Scale",
    "Skip",
    "SpectralNorm",
    "Ssf",
    "Table",
    "Unmerge",
    "Update",
    "Vera",
    "WeightNorm",
    "Window",
    "as_tokens",
]
