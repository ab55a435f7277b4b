"""The closed list of functions that a graph may call, by public name, and checks before those that trust their callers."""

from __future__ import annotations

import builtins
import math
import operator
import re
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import PackedSequence

from ..errors import GuardError, shorten
from ..torch_internals import ATTRIBUTES as ADDRESSES
from ..torch_internals import BACKWARD_HOOKS, TYPED_STORAGE
from ..torch_internals import tensors as kernels
from ..torch_internals.modules import DropoutNd
from ..torch_internals.tensors import DisableTorchFunction, FakeTensor, OpOverload, OpOverloadPacket
from . import ops


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return `v` of any shape with the norms `g` along `dim`; with `dim` -1 it is one norm. Raises GuardError."""
    fits = 0 <= dim < v.dim() and g.numel() == v.shape[dim] or dim == -1 and v.dim() > 0 and g.numel() == 1
    if not fits or g.device != v.device:
        raise GuardError(
            f"weight norm: the magnitude {tuple(g.shape)} on {g.device} does not fit the weight {tuple(v.shape)} on {v.device} "
            f"along dimension {dim}"
        )
    return kernels.weight_norm(v, g, dim)  # type: ignore[no-any-return]


def bind_attention(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of scaled_dot_product_attention by name."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    defaults = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    return {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def pad_packed_sequence(data: Tensor, batch_sizes: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return the padded sequences of a packed one, and their lengths. Raises GuardError."""
    _check_sizes(batch_sizes, data)
    padded, lengths = kernels.pad_packed_sequence(data, batch_sizes, *args, **kwargs)
    return padded, lengths


def make_packed_sequence(data: Tensor, batch_sizes: Tensor | None = None, *args: Any, **kwargs: Any) -> PackedSequence:
    """Return a packed sequence of the rows `data`. Raises GuardError."""
    if batch_sizes is not None:
        _check_sizes(batch_sizes, data)
    return PackedSequence(data, batch_sizes, *args, **kwargs)


def recurrent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the batch sizes of a recurrent layer's function, which takes rows and batch sizes in place of a padded input
    too."""

    @wraps(function)
    def checked(data: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes = kwargs.get("batch_sizes", args[0] if args else None)
        if isinstance(sizes, Tensor) and not sizes.is_floating_point():
            _check_sizes(sizes, data)
        return function(data, *args, **kwargs)

    return checked


def _check_sizes(sizes: Tensor, data: Tensor) -> None:
    """Raise GuardError unless batch sizes never grow and sum to the number of rows: else memory is read out of bounds."""
    if sizes.dim() != 1 or sizes.dtype != torch.int64 or sizes.device.type != "cpu":
        raise GuardError(
            f"the batch sizes of a packed sequence must be one dimension of int64 on the CPU, not {sizes.dtype} "
            f"{tuple(sizes.shape)}"
        )
    if torch.compiler.is_compiling() or isinstance(sizes, FakeTensor):
        return
    with DisableTorchFunction():
        found = sizes.tolist()
        rows = data.shape[0] if data.dim() else 0
    if not found or found[-1] < 1 or found != sorted(found, reverse=True) or sum(found) != rows:
        raise GuardError(
            f"the batch sizes of a packed sequence, {found[:8]}, must not increase and must sum to its {rows} rows"
        )


# a part of the path of a module or tensor that artifacts can have
PATH_KEY = re.compile(r"^[\w\-+:/@=,]+\Z", re.ASCII)
# functions that torch.overrides does not list, most of them because they take no tensor
UNLISTED = {
    "torch": """arange as_strided as_tensor asarray bartlett_window blackman_window complex empty empty_strided eye fill full
    hamming_window hann_window kaiser_window linspace logspace normal ones rand rand_like randint randint_like randn randn_like
    randperm range scalar_tensor tensor tril_indices triu_indices vander zeros sym_max sym_min sym_float sym_int sym_not sym_ite
    sym_sum broadcast_shapes promote_types result_type finfo iinfo""",
    "torch.nn.functional": "hardsigmoid hardswish",
    "torch.fft": "fftfreq rfftfreq",
}
NAMESPACES = {
    "torch.nn.functional": F,
    "torch": torch,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.special": torch.special,
}
OPERATORS = """add sub mul truediv floordiv mod pow matmul lshift rshift and_ or_ xor neg pos abs invert eq ne lt le gt ge
getitem setitem contains iadd isub imul itruediv""".split()  # noqa: SIM905
OPS = """edge guard check_state autograd_query dtype_of check_constants is_same same_dtype number_of_parts
number_of_distinct structure_of tried check_inputs check_numbers check_members put_members check_generator check_added
input_or_default device_of any_gradients enter_autocast exit_autocast enter_grad exit_grad""".split()  # noqa: SIM905
OLD_OPS = {"asked": "autograd_query", "same": "check_constants", "given": "input_or_default"}  # in earlier versions' artifacts
MATH = "sqrt log log2 log10 exp pow sin cos tan atan ceil floor trunc gcd fabs".split()  # noqa: SIM905
# kept from the import: while a model is traced, `math` itself has functions that record
MATH_FUNCTIONS = {name: getattr(math, name) for name in MATH}
# functions that are in none of these namespaces
PRIVATE: dict[str, Callable[..., Any]] = {
    "torch._C._nn.pad_sequence": kernels.pad_sequence,
    "torch._pack_padded_sequence": kernels.pack_padded_sequence,
    "torch.autograd.grad": torch.autograd.grad,
    "torch.Size": torch.Size,
}
# functions that trust their callers, by public name, with what a graph calls in their place
CHECKED: dict[str, tuple[Any, Callable[..., Any]]] = {
    "torch._weight_norm": (kernels.weight_norm, weight_norm),
    "torch._pad_packed_sequence": (kernels.pad_packed_sequence, pad_packed_sequence),
    "torch.nn.utils.rnn.PackedSequence": (PackedSequence, make_packed_sequence),
    **{f"torch.{f.__name__}": (f, recurrent(f)) for f in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
}
# --- what a run of a model asks of tensors, by the names of methods

CONSTANTS = (torch.tensor, torch.as_tensor, torch.asarray)
SIZES = {"size", "stride", "numel", "nelement", "storage_offset", "__len__"}
VALUES = {"item", "__bool__", "__int__", "__float__", "__index__", "tolist", "__complex__", "is_nonzero"}
# answers about a tensor's kind, which the checks of the inputs hold
KIND_QUESTIONS = {"dim", "ndimension", "get_device", "dense_dim", "sparse_dim", "is_coalesced", "can_cast", "has_names"}
KIND_ANSWERS = (str, torch.dtype, torch.device, torch.layout, torch.finfo, torch.iinfo)
RESHAPING = {"resize_", "squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "resize_as_", "set_"}
# what gives its argument itself where there is nothing to do
SAME_OR_COPY = {"contiguous", "to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "cpu", "cuda"}
SAME_OR_COPY |= {"flatten", "dropout"}
ORDERED = {"gt", "lt", "ge", "le", "greater", "less", "greater_equal", "less_equal"}
# where a tensor's data leaves torch, so that what is done with it there cannot be seen
LEAVING = {"numpy", "__array__", "data_ptr", "storage", "untyped_storage", TYPED_STORAGE, "__dlpack__", "__reduce_ex__"}
LEAVING |= {"apply_", "map_", "map2_", "__cuda_array_interface__"}
# what a graph cannot say of a tensor, as it depends on what was done with it before and after the call
HISTORY = {"grad", "grad_fn", "retains_grad", "output_nr", *ADDRESSES, *BACKWARD_HOOKS}
# what happens later, in the backward pass or in another process
LATER = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward", "share_memory_", "pin_memory"}
# fake tensors take the shape of the first argument here: one value per channel, which training refuses, is none to them
SHAPE_OF_FIRST = {F.batch_norm: torch.empty_like, torch.batch_norm: torch.empty_like}
# what a text shows of a tensor
TEXT = {"__repr__", "__format__", "__str__"}

# --- what a graph of a file may not call

# methods of Tensor that reach beyond its values: memory by address, other libraries, hooks, other processes, Python's calls
OUTSIDE = frozenset(
    """register_hook register_post_accumulate_grad_hook share_memory_ is_shared module_load map_ map2_ apply_ numpy storage
    untyped_storage storage_type data_ptr const_data_ptr mutable_data_ptr backward set_ pin_memory is_pinned dlpack new
    as_subclass record_stream reinforce retain_grad""".split()  # noqa: SIM905
)
# kernels behind other functions, which trust that those have checked the arguments; on odd ones they end the process
UNCHECKED = re.compile(
    r"(fbgemm|quantized|miopen|cudnn|mkldnn)_|to_mkldnn|fused_moving_avg|choose_qparams|index\Z"
    r"|batch_norm_(backward|elemt|gather|stats|update)|sparse_resize|resize_as_sparse"
)
IN_PLACE = ("iadd", "isub", "imul", "itruediv")
REFLECTED = "add sub mul truediv floordiv mod pow matmul lshift rshift and_ or_ xor".split()  # noqa: SIM905

# a method of Tensor with underscores as the public function that computes it; the reflected ones swap their arguments
DUNDERS = {
    **{f"__{n.rstrip('_')}__": (getattr(operator, n), False) for n in OPERATORS if n not in IN_PLACE},
    **{f"__r{n.rstrip('_')}__": (getattr(operator, n), True) for n in REFLECTED},
    "__rdiv__": (operator.truediv, True),
    "__div__": (operator.truediv, False),
    "_is_all_true": (torch.all, False),  # of `torch._check_tensor_all`
}
# attributes of a tensor that are tensors, as the method or function that computes them
ATTRIBUTES: dict[str, Callable[[Any], tuple[str, Any, tuple[Any, ...]]]] = {
    "T": lambda x: ("call_function", torch.permute, (tuple(range(x.dim() - 1, -1, -1)),)),
    "mT": lambda x: ("call_method", "transpose", (-2, -1)),
    "H": lambda x: ("call_method", "adjoint", ()),
    "mH": lambda x: ("call_method", "adjoint", ()),
    "data": lambda x: ("call_method", "detach", ()),
    "real": lambda x: ("call_function", torch.real, ()),
    "imag": lambda x: ("call_function", torch.imag, ()),
}
REGION = "region_graph"  # key in the meta of a node that calls a region: the region's own graph
RANDOM = """bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal normal_ poisson rand rand_like
randint randint_like randn randn_like randperm random_ uniform_ dropout dropout1d dropout2d dropout3d alpha_dropout
feature_alpha_dropout feature_dropout rrelu rrelu_ gumbel_softmax dropout_ native_dropout fractional_max_pool2d
fractional_max_pool3d scaled_dot_product_attention multi_head_attention_forward gru lstm rnn_relu rnn_tanh""".split()  # noqa: SIM905
# those that draw at every call, in evaluation too
DRAWS = {name for name in RANDOM if not any(word in name for word in ("dropout", "rrelu", "attention", "gru", "lstm", "rnn_"))}


# may give their argument itself, which no schema of an operator says
ITSELF = {"getitem", "edge", "float", "half", "bfloat16", "double", "type", "type_as", "as_tensor", "asarray"}
ITSELF |= {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"}


# the operators whose results have dimensions by the sizes of their arguments, as all samples that torch has of its operators
# show: by a rank that one may see, and by more than that
SQUEEZING = {"squeeze", "squeeze_copy", "cov", "corrcoef"}
BY_SIZES = {"linalg_lstsq"}


@cache
def may_alias(name: str) -> bool:
    """Return whether the result of a function or method of this name may share the memory of its first argument."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = () if packet is None else (getattr(packet, overload) for overload in packet.overloads())
    returns = (value.alias_info for overload in overloads for value in kernels.schema(overload).returns)
    return name in ITSELF or any(alias is not None and not alias.is_write for alias in returns)


def get_operator_name(function: Any, name: str) -> str:
    """Return the name of the operator of a function or method of this name, or of one of its overloads."""
    packet = function.overloadpacket if isinstance(function, OpOverload) else function
    return str(packet.__name__) if isinstance(packet, OpOverloadPacket) else name.strip("_")


@cache
def is_splitting(name: str) -> bool:
    """Return whether a function returns as many tensors as one input's sizes imply: a list, without a list among its
    arguments."""
    packet: Any = getattr(torch.ops.aten, name, None)
    for overload in packet.overloads() if isinstance(packet, OpOverloadPacket) else ():  # type: ignore[no-untyped-call]
        schema = kernels.schema(getattr(packet, overload))
        given, gives = ([str(value.type) for value in values] for values in (schema.arguments, schema.returns))
        if "List[Tensor]" in gives and "List[Tensor]" not in given:
            return True
    return False


def is_random_layer(layer: nn.Module, training: bool) -> bool:
    """Return whether a layer of torch draws random numbers."""
    if isinstance(layer, (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)):
        return True
    # attention and recurrent layers have the probability of a dropout of their own
    return training and (isinstance(layer, (DropoutNd, nn.RReLU)) or bool(getattr(layer, "dropout", 0)))


@cache
def list_functions() -> dict[str, Callable[..., Any]]:
    """Return every function a graph may call, by public dotted name."""
    known: set[Any] = set()
    for listed in torch.overrides.get_overridable_functions().values():
        known.update(f for f in listed if callable(f) and getattr(f, "__hash__", None))
    table: dict[str, Callable[..., Any]] = {}
    for space, module in NAMESPACES.items():
        for name in dir(module):
            value = getattr(module, name)
            if name.startswith("_") or not callable(value) or isinstance(value, type) or UNCHECKED.match(name):
                continue
            if value in known or (name.endswith("_") and getattr(module, name[:-1], None) in known):
                table[f"{space}.{name}"] = value
        table.update({f"{space}.{n}": getattr(module, n) for n in UNLISTED.get(space, "").split() if hasattr(module, n)})
    table.update({f"operator.{n}": getattr(operator, n) for n in OPERATORS})
    table.update({f"math.{n}": function for n, function in MATH_FUNCTIONS.items()})
    table.update(PRIVATE)
    table.update({name: function for name, (_, function) in CHECKED.items()})
    table["builtins.round"] = builtins.round
    table["builtins.pow"] = builtins.pow
    table["builtins.max"], table["builtins.min"] = builtins.max, builtins.min
    table.update({f"fxplug.ops.{n}": getattr(ops, n) for n in OPS})
    table.update({f"fxplug.ops.{old}": getattr(ops, n) for old, n in OLD_OPS.items()})
    return table


@cache
def name_functions() -> dict[Any, str]:
    """Return the public dotted name of every function in `list_functions()`, and of those whose arguments some check."""
    table: dict[Any, str] = {function: name for name, (function, _) in CHECKED.items()}
    for name, function in list_functions().items():
        table.setdefault(function, name)
    return table


def find_allowed(function: Any) -> Callable[..., Any] | None:
    """Return the function that a graph calls for this one, or None if it may not."""
    name = name_functions().get(function)
    return list_functions()[name] if name is not None else None


@cache
def list_methods() -> frozenset[str]:
    """Return the methods of Tensor that a graph may call: public ones, neither OUTSIDE nor UNCHECKED."""
    known = (n for n in dir(torch.Tensor) if not n.startswith("_") and callable(getattr(torch.Tensor, n)))
    return frozenset(n for n in known if n not in OUTSIDE and not UNCHECKED.match(n))


@cache
def list_method_names() -> dict[Any, str]:
    """Return the name of each method of Tensor by the object that `__torch_function__` receives."""
    table: dict[Any, str] = {}
    for name in sorted(dir(torch.Tensor), key=lambda n: n.startswith("_")):
        value = getattr(torch.Tensor, name)
        if callable(value):
            try:
                table.setdefault(value, name)
            except TypeError:
                continue
    return table


def get_short_name(target: Any) -> str:
    """Return the last part of a target's name, as used for node names."""
    if isinstance(target, str):
        return target.rsplit(".", 1)[-1]
    return getattr(target, "__name__", type(target).__name__).strip("_")


def visit_sources(node: fx.Node, look: Callable[[fx.Node, str], list[fx.Node]]) -> None:
    """Visit the nodes that a value is computed from, sizes apart, as far back as `look` returns them: it gets a node and its
    short name."""
    seen, todo = set(), [node]
    while todo:
        current = todo.pop()
        if current not in seen and not (current.op == "call_method" and current.target in ("size", "numel", "stride")):
            seen.add(current)
            todo += look(current, get_short_name(current.target) if current.op != "placeholder" else "")


def is_random(node: fx.Node, root: nn.Module) -> bool:
    """Return whether a node may draw random numbers."""
    if REGION in node.meta:
        return any(is_random(n, root) for n in node.meta[REGION].nodes)
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return any(is_random_layer(m, True) or getattr(m, "is_block", False) for m in module.modules())
    return get_short_name(node.target) in RANDOM


# --- nodes in few words, as messages about guards have them

SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "eq": "==", "ne": "!=",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "and_": "and", "or_": "or",
}  # fmt: skip


def describe(node: fx.Node) -> str:
    """Describe what a number's node computes, in few words: `sample.size(2) % 8 != 0`."""
    return shorten(_describe_expression(node, 5), 90)


def _describe_expression(node: Any, depth: int) -> str:
    if not isinstance(node, fx.Node):
        return repr(node)
    if "value" not in node.meta:
        return _describe_tensor(node)
    short = get_short_name(node.target)
    if depth == 0:
        return "..."
    args = [_describe_expression(a, depth - 1) for a in node.args]
    if short in SIGNS and len(args) == 2:
        # an operand that is a sum or quotient itself stands in brackets
        args = [
            f"({text})" if isinstance(a, fx.Node) and get_short_name(a.target) in SIGNS else text
            for a, text in zip(node.args, args, strict=True)
        ]
        return f"{args[0]} {SIGNS[short]} {args[1]}"
    if short == "autograd_query":
        return f"{args[0]}.{node.args[1]}"
    if node.op == "call_method":
        return f"{args[0]}.{short}({', '.join(args[1:])})"
    return f"{short}({', '.join(args)})"


def _describe_tensor(node: fx.Node) -> str:
    """Describe a tensor: the port it is at, else the operation that computes it and its region."""
    port = node.meta.get("port")
    if port is not None:
        return ".".join(map(str, port.keys)) if not port.path and port.side == "in" else str(port)
    if node.op in ("placeholder", "get_attr"):
        return str(node.target)
    region = [*node.meta.get("nn_module_stack", {"": None})][-1]
    short = get_short_name(node.target)
    return f"{short} in {region}" if region else short
