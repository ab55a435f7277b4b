"""How large the whole numbers of a graph can become: Python's have no end, and nothing interrupts `9 ** 9 ** 9`."""

from __future__ import annotations

import builtins
import math
import operator
from typing import Any

from torch import fx
from torch.overrides import TorchFunctionMode

from ..errors import ArtifactError, shown
from ..ir import functions, ops
from ..limits import DEFAULT, Limits

READ = 64  # bits of a size, and of a number that the caller gives
FLOAT = 1024  # bits of a number that was a float
# what of torch gives numbers of Python; all else gives tensors or what holds them
NUMBERS = """size dim ndimension numel nelement item tolist stride storage_offset element_size get_device sparse_dim dense_dim
q_scale q_zero_point q_per_channel_axis dim_order is_nonzero equal allclose broadcast_shapes finfo iinfo sym_max sym_min
sym_float sym_int sym_not sym_ite sym_sum sym_sqrt""".split()  # noqa: SIM905
ARITHMETIC = {getattr(operator, name) for name in functions.OPERATORS} - {
    operator.getitem, operator.setitem, operator.contains, operator.eq, operator.ne
}  # fmt: skip
COMPARING = {operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, operator.contains}
POWERS = {operator.pow, builtins.pow}
MATH = {function: name for name, function in functions.MATH_FUNCTIONS.items()}

Bits = float | None  # of the largest number that a value can be or hold; None for a tensor


def check_numbers(graph: fx.Graph, limits: Limits = DEFAULT) -> None:
    """Refuse a graph in which a number could become longer than `limits.bits`, whatever it is called with.

    What a call may spend on tensors is not bounded: a graph that asks for a large one gets it, as any model does.

    Raises ArtifactError.
    """
    known: dict[fx.Node, Bits] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in ARITHMETIC | POWERS:
            _check_operands(node)
        found = _bits(node, known)
        if found is not None and found > limits.bits:
            raise ArtifactError(
                f"graph.json: the number '{node.name}' could have more than {limits.bits} bits: load(folder, "
                "limits=Limits(bits=...)) allows more"
            )
        known[node] = found
        if node.target is ops.check_inputs and node.args:  # what comes after it has tensors there
            known.update(dict.fromkeys(node.all_input_nodes))


def _check_operands(node: fx.Node) -> None:
    for operand in node.args:
        repeated = isinstance(operand, (list, tuple)) and node.target in (operator.mul, operator.imul)
        if isinstance(operand, (str, bytes)) or repeated or node.kwargs or len(node.args) > 2:
            raise ArtifactError(f"graph.json: '{node.name}' calculates with something that is no number")


def _bits(node: fx.Node, known: dict[fx.Node, Bits]) -> Bits:
    values = [_of(value, known) for value in (*node.args, *node.kwargs.values())]
    largest = max((v for v in values if v is not None), default=0)
    if node.op == "placeholder":
        return READ
    if node.op == "call_method":
        if node.target not in NUMBERS:
            return None
        return FLOAT if node.target in ("item", "tolist") else READ
    if node.op != "call_function":
        return None if node.op in ("get_attr", "call_module") else 0
    if node.target in MATH:
        return _of_math(MATH[node.target], FLOAT if None in values else largest)
    if node.target in COMPARING:
        return None if None in values else 1
    if node.target in ARITHMETIC or node.target in POWERS:
        return None if None in values else _of_arithmetic(node, [v for v in values if v is not None])
    if node.target is operator.getitem:
        return None if values[:1] == [None] else max(largest, READ)
    name = functions.names().get(node.target, "")
    if name.startswith("torch.") and name.rpartition(".")[2] not in NUMBERS:
        return None
    if node.target is ops.edge and values == [None]:
        return None
    return max(largest, FLOAT if None in values else READ)


def _of_arithmetic(node: fx.Node, values: list[float]) -> Bits:
    target, first, last = node.target, values[0] if values else 0.0, values[-1] if values else 0.0
    if target in (operator.mul, operator.imul):
        return first + last
    if target in (operator.truediv, operator.itruediv):
        return FLOAT
    if target in POWERS or target is operator.lshift:
        exponent = node.args[1] if len(node.args) == 2 else 0
        if isinstance(exponent, float):
            return FLOAT
        times = max(exponent, 0) if isinstance(exponent, int) else 2.0**last if last < FLOAT else math.inf
        if target is operator.lshift:
            return first + times
        return first * times if times < 2**53 else math.inf if first > 1 else 1
    return max(first, last) + 1


def _of_math(name: str, bits: float) -> Bits:
    if name.startswith("log"):
        return math.log2(max(bits, 2)) + 1
    if name in ("exp", "pow", "tan"):
        return FLOAT
    return bits + 1


def _of(value: Any, known: dict[fx.Node, Bits]) -> Bits:
    if isinstance(value, fx.Node):
        return known[value]
    if isinstance(value, int):
        return int(value).bit_length()
    if isinstance(value, (float, complex)):
        size = abs(value)
        return max(abs(math.frexp(size)[1]), 1) if math.isfinite(size) else FLOAT
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, (list, tuple)):
        return max((bits for bits in (_of(v, known) for v in value) if bits is not None), default=0)
    return 0


class Budget(TorchFunctionMode):
    """Ends a constructor that makes more than its file says."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls -= 1
        if self.calls < 0:
            raise ArtifactError("it makes more than the tensors that the file has for it")
        return func(*args, **(kwargs or {}))


def check_size(value: Any, limit: int, what: str) -> None:
    """Refuse a whole number beyond `limit` among the values of an argument. Raises ArtifactError."""
    if isinstance(value, int) and abs(value) > limit:
        raise ArtifactError(f"graph.json: {what} is {shown(value)}; more than {limit} is not read")
    for member in value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else ():
        check_size(member, limit, what)
