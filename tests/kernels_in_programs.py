"""What torch's compilers make of the Triton kernels for an H100 that is not there: python kernels_in_programs.py [broken].

CUDA is pretended: tensors have no values, the device's properties are written down here, and compiling ends with the code.
"""

from __future__ import annotations

import re
import sys
import types

import torch
import torch._subclasses.fake_tensor as fake_tensor
import triton
from functorch.compile import make_boxed_func
from kernels_loaded import load
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._guards import TracingContext, tracing
from torch._inductor import compile_fx, config, graph
from torch._inductor.decomposition import select_decomp_table

from fxplug.lowerings.linear import devices, operators

H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", type="cuda", index=0, major=9, minor=0, multi_processor_count=132, total_memory=80 << 30,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32, regs_per_multiprocessor=65536,
    shared_memory_per_multiprocessor=233472, shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    gcnArchName="", L2_cache_size=50 << 20, clock_rate=1980000, memory_clock_rate=2619000, memory_bus_width=5120,
    is_integrated=False,
)  # fmt: skip
ANSWERS = {
    "is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0), "_lazy_init": None,
    "get_device_properties": H100, "get_device_name": H100.name, "is_initialized": True, "synchronize": None,
    "is_bf16_supported": True, "is_current_stream_capturing": False, "current_stream": types.SimpleNamespace(cuda_stream=0),
    "_exchange_device": 0, "_maybe_exchange_device": 0, "_get_device_index": 0,
}  # fmt: skip


FAULTS = {
    "a pass over the result": ("    return y, hidden", "    return y * 2, hidden"),
    "a pass over the weight": ("    return out", "    return out + 1"),
    "kernels that a compiler does not see": ('triton_op("fxplug::triton_l', 'torch.library.custom_op("fxplug::triton_l'),
    "a tile by open rows": ("devices.choose_tile(m, n", "devices.choose_tile(int(m), n"),
    "a pass over what is for gradients": ("inner.t() @ x if needs[3]", "(inner * 2).t() @ x if needs[3]"),
    "a backward that adds the update to the gradient": (
        "gx, inner = torch.ops.fxplug.triton_lora(g, weight.t(), None, up.t(), down.t(), *rest)",
        "inner = torch.ops.fxplug.triton_shrink(g, up.t(), *rest)\n        gx = g @ weight + inner @ down",
    ),
}


def answer(value):
    return lambda *given, **more: value


class Driver:
    """What Triton asks of the driver before it compiles."""

    get_current_target = answer(triton.backends.compiler.GPUTarget("cuda", 90, 32))
    get_active_torch_device, get_device_interface = answer(torch.device("cuda", 0)), answer(torch.cuda)
    get_current_device = get_current_stream = answer(0)


def pretend():
    """A process with an H100, for all that torch and Triton ask before they run something."""
    for name, value in ANSWERS.items():
        setattr(torch.cuda, name, answer(value))
    torch.cuda._utils._get_device_index = torch._C._cuda_getDevice = answer(0)
    torch._C._cuda_getDeviceProperties = answer(H100)
    torch._C._cuda_exchangeDevice = torch._C._cuda_maybeExchangeDevice = torch._C._cuda_setDevice = answer(0)
    torch.cuda.get_rng_state, torch.cuda.set_rng_state = answer(torch.zeros(16, dtype=torch.uint8)), answer(None)
    fake_tensor.init_gpu_context = answer(None)
    for function in vars(torch.utils._triton).values():  # what was asked before
        getattr(function, "cache_clear", answer(None))()
    CudaInterface.Worker.get_device_properties = staticmethod(answer(H100))
    CudaInterface.Worker.current_device = staticmethod(answer(0))
    facts = {"is_available": True, "device_count": 1, "current_device": 0, "get_compute_capability": 90, "synchronize": None}
    facts["get_device_properties"] = H100
    for name, value in {**facts, "is_triton_capable": True, "raise_if_triton_unavailable": None}.items():
        setattr(CudaInterface, name, staticmethod(answer(value)))
    config.compile_threads, config.fx_graph_cache, config.fx_graph_remote_cache = 1, False, False
    graph.GraphLowering.compile_to_module = graph.GraphLowering._compile_to_module = stop


class Stop(Exception):
    """The code of a program, before it is loaded."""


def stop(lowering, *given, **more):
    made = lowering.codegen_with_cpp_wrapper() if lowering.cpp_wrapper else lowering.codegen()
    raise Stop(getattr(made[0], "value", made[0]))


def fakes(device, *shapes):
    """Tensors of bfloat16 without values, numbers and rows of gates of float32; to be made in a FakeTensorMode."""
    kinds = [torch.float32 if shape == () or shape == GATES else torch.bfloat16 for shape in shapes]
    return [torch.empty(shape, dtype=kind, device=device) for shape, kind in zip(shapes, kinds, strict=True)]


GATES = (64, 64)
LAYER = [(64, 197, 1024), (3072, 1024), (3072,), (16, 1024), (3072, 16), ()]
BANK = [*LAYER[:3], (64, 1024), (3072, 64), GATES]


def lora(*given):
    return operators.run_lora_linear(*given, "triton")


def weight(*given):
    return operators.run_lora_linear(*given, "triton:weight")


def bank(*given):
    return operators.run_bank_linear(*given, 4, 0, "triton")


def code_of(function, shapes, cpp):
    """The code of a function that inductor makes, in Python, or in C++ as in a package."""
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = fakes("cuda:0", *shapes)
        with torch.no_grad():
            made = aot_export_joint_simple(
                lambda *a: (function(*a),), tuple(given), trace_joint=False, decompositions=select_decomp_table()
            )
    try:
        with tracing(TracingContext(mode)), torch.no_grad(), config.patch(cpp_wrapper=cpp):
            compile_fx.compile_fx_inner(made, given)
    except Exception as error:
        while error is not None and not isinstance(error, Stop):
            last, error = error, error.__cause__ or error.__context__
        if error is None:
            raise last from None
        return error.args[0]


def calls(code):
    """What a program calls, in turn."""
    body = code[code.rindex("def call(") :] if "def call(" in code else code[code.rindex("inductor_entry_impl") :]
    found = re.findall(r"\bextern_kernels\.(\w+)\(|\b(triton_\w+|_\w+?)_\d+\.run\(", body)
    found = [a or b for a, b in found]
    return found or [a or b for a, b in re.findall(r"aoti_torch_\w*?((?:add)?mm)\w*_out\(|call_(\w+?)_\d+\(", body)]


WANTED = {lora: ["_shrink", "_expand"], bank: ["_shrink", "_expand"], weight: ["_merge", "addmm"]}


def check_programs():
    for function, wanted in WANTED.items():
        for cpp in (False, True):
            found = calls(code_of(function, BANK if function is bank else LAYER, cpp))
            assert found == wanted, f"{function.__name__} calls {found} instead of {wanted} {'in C++' * cpp}"
            print(f"{function.__name__} calls {', '.join(found)} {'in C++' * cpp}")
    with torch.no_grad():
        code = code_of(lambda *given: torch.nn.functional.gelu(lora(*given)), LAYER, False)
    assert calls(code)[:2] == WANTED[lora] and len(calls(code)) == 3, calls(code)


class Layer(torch.nn.Module):
    """A layer, for exports."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *given):
        return self.function(*given)


def check_open_batches():
    """An export keeps the kernels where they are compiled, else the stock form; and the batch stays open in both."""
    for function, shapes in ((lora, LAYER), (weight, LAYER), (bank, BANK)):
        with fake_tensor.FakeTensorMode():
            given = fakes("cuda:0", *shapes)
            batch = torch.export.Dim("batch", min=2, max=4096)
            sizes = [{0: batch}, *[None] * 4, {0: batch} if function is bank else None]
            plain = torch.export.export(Layer(function), tuple(given), dynamic_shapes=(tuple(sizes),))
            with operators.keep_kernels():
                kept = torch.export.export(Layer(function), tuple(given), dynamic_shapes=(tuple(sizes),))
        for program, there in ((plain, False), (kept, True)):
            targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
            assert any("fxplug.triton" in target for target in targets) == there, targets
            (bounds,) = program.range_constraints.values()
            assert (bounds.lower, bounds.upper) == (2, 4096), bounds


def check_steps():
    """One program for training steps of all batches, and what it computes beside the kernels: gradients of what trains.

    Of tensors on a CPU, as autograd asks C++ for the stream of others; what a program gives has sizes and no values.
    """
    before, devices._unfit_device = devices._unfit_device, answer(None)
    programs = []

    def record(made, given):
        programs.append([str(node.target) for node in made.graph.nodes if node.op == "call_function"])
        (results,) = (node.args[0] for node in made.graph.nodes if node.op == "output")
        values = [result if result is None else result.meta["val"] for result in results]

        def run(*given):
            batch = next(value for value in given if isinstance(value, int))
            return [with_sizes(value, batch) for value in values]

        return make_boxed_func(run)

    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    for function, trained in ((lora, 3), (bank, 1)):
        torch._dynamo.reset()
        step = torch.compile(function, fullgraph=True, backend=backend)
        for batch in (16, 2, 40):
            banks = [(16, 32), (64, 16), ()] if function is lora else [(64, 32), (64, 64), (batch, 64)]
            given = [torch.empty(shape, dtype=torch.bfloat16) for shape in [(batch, 5, 32), (64, 32), (64,), *banks]]
            given[-1] = given[-1].float()
            for tensor in (given[0], *given[3:5])[:trained]:
                tensor.requires_grad_()
            for tensor in (given[0], given[-1])[: 1 + given[-1].dim()]:
                torch._dynamo.mark_dynamic(tensor, 0)
            step(*given).sum().backward()
        wanted = [[KERNEL] * 2, [KERNEL] * 2 + ["aten.mm.default"] * (trained - 1)]
        found = [[name for name in names if WORK.match(name)] for names in programs]
        assert found == wanted, f"steps of {function.__name__} have {found}"
        print(f"a step of {function.__name__} has {', '.join(found[0])}, and backward {', '.join(found[1])}")
        programs.clear()
    devices._unfit_device = before


def with_sizes(value, batch):
    """A result of a program, zeros for a tensor, with the one size that is open."""
    if isinstance(value, torch.Tensor):
        return torch.zeros([with_sizes(size, batch) for size in value.shape], dtype=value.dtype)
    expression = getattr(getattr(value, "node", None), "expr", None)
    return value if expression is None else int(expression.subs(dict.fromkeys(expression.free_symbols, batch)))


KERNEL = "triton_kernel_wrapper_functional"
WORK = re.compile(r"triton|aten.(mm|bmm|addmm|mul|add|sum|clone|_to_copy|copy)\b")  # what passes over tensors


def main(how=""):
    torch.set_float32_matmul_precision("high")
    triton.runtime.driver.set_active(Driver())
    left = dict(FAULTS) if how == "broken" else {"": ("", "")}
    for checks in ([check_steps], [pretend, check_programs, check_open_batches]):
        for name, (old, new) in list(left.items()):
            load(old, new)
            try:
                for check in checks:
                    check()
            except Exception as error:
                if how != "broken":
                    raise
                print(f"{name}: {str(error)[:200]!r}", flush=True)
                del left[name]
    sys.exit(f"not found: {list(left)}" if how == "broken" and left else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
