"""Operators that torch's own functions call, and that say more or cost less than these: oneDNN, attention, recurrent layers."""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "flash_cpu",
    "flash_cpu_backward",
    "flash_cuda",
    "flash_cuda_backward",
    "flop_counter",
    "onednn_linear",
    "pack_padded_sequence",
    "pad_packed_sequence",
    "pad_sequence",
    "weight_norm",
]

# a (rows, inner) @ b (columns, inner).T + bias, the activation "none", its scalars and its algorithm; None without oneDNN
onednn_linear: Any = torch.ops.mkldnn._linear_pointwise if torch.backends.mkldnn.is_available() else None  # type: ignore[no-untyped-call]
# attention with the logarithm of its denominators; on a CPU that is 0 for rows that see nothing
flash_cpu: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_cpu_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# the same; with lengths (3), random state and an unused tensor, as its backward wants them
flash_cuda: Any = torch.ops.aten._scaled_dot_product_flash_attention
flash_cuda_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward
# what torch.nn.utils calls and a trace therefore meets; these trust their callers
weight_norm: Any = torch._weight_norm
pack_padded_sequence: Any = torch._pack_padded_sequence
pad_packed_sequence: Any = torch._pad_packed_sequence
pad_sequence: Any = torch._C._nn.pad_sequence


def flop_counter() -> Any:
    """A FlopCounterMode that counts attention on a CPU, which torch's own does from 2.15 on, and torch.nn's fast paths."""
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    def flash(query: Any, key: Any, value: Any, *_: Any, **more: Any) -> int:
        return sdpa_flop_count(query, key, value)  # type: ignore[no-untyped-call, no-any-return]

    def packed(query: Any, key: Any, value: Any, width: int, *_: Any, **more: Any) -> Any:
        batch, rows, columns = query[0], query[1], key[1]
        return 4 * batch * width * (width * (rows + columns) + rows * columns)

    def layer(source: Any, width: int, *given: Any, **more: Any) -> Any:
        hidden = next(shape for shape in given[10:] if shape is not None and len(shape) == 2)[0]
        return packed(source, source, source, width) + 4 * source[0] * source[1] * width * hidden

    fast = {torch.ops.aten._native_multi_head_attention: packed, torch.ops.aten._transformer_encoder_layer_fwd: layer}
    return FlopCounterMode(display=False, custom_mapping={flash_cpu: flash, **fast})
