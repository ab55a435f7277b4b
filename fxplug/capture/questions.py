"""What code asks of tensors, by the names of torch's methods: sizes, values, kinds, and what leaves torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..torch_internals.names import ATTRIBUTES, BACKWARD_HOOKS, TYPED_STORAGE

CONSTANTS = (torch.tensor, torch.as_tensor, torch.asarray)
SIZES = {"size", "stride", "numel", "nelement", "storage_offset", "__len__"}
VALUES = {"item", "__bool__", "__int__", "__float__", "__index__", "tolist", "__complex__", "is_nonzero"}
# answers about a tensor's kind, which the checks of the inputs hold
KIND_QUESTIONS = {"dim", "ndimension", "get_device", "dense_dim", "sparse_dim"}
KIND_TESTS = {"is_coalesced", "can_cast", "has_names"}
KIND_ANSWERS = (str, torch.dtype, torch.device, torch.layout, torch.finfo, torch.iinfo)
RESHAPING = {"resize_", "squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "resize_as_", "set_"}
# what gives its argument itself where there is nothing to do
ITSELF = {"contiguous", "to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "cpu", "cuda"}
ITSELF |= {"flatten", "dropout"}
ORDERED = {"gt", "lt", "ge", "le", "greater", "less", "greater_equal", "less_equal"}
MANY = 256  # so many numbers that go to numpy are held by one guard
# where a tensor's data leaves torch, so that what is done with it there cannot be seen
LEAVING = {"numpy", "__array__", "data_ptr", "storage", "untyped_storage", TYPED_STORAGE, "__dlpack__", "__reduce_ex__"}
# what a graph cannot say of a tensor, as it depends on what was done with it before and after the call
OUTSIDE = {"grad", "retains_grad", "output_nr", *ATTRIBUTES, *BACKWARD_HOOKS}
# what happens later, in the backward pass or in another process
LATER = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward", "share_memory_", "pin_memory"}
# fake tensors take the shape of the first argument here: one value per channel, which training refuses, is none to them
SHAPE_OF_FIRST = {F.batch_norm: torch.empty_like, torch.batch_norm: torch.empty_like}
# what a text shows of a tensor
TEXT = {"__repr__", "__format__", "__str__"}
