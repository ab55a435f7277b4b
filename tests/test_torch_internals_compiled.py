"""What we need of torch that it does not promise, where it computes, compiles and packs."""

from __future__ import annotations

import contextvars
import operator
import os
import sys
import types
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import rnn

from fxplug.core.torch_internals import distributed, exporting, modules, tensors


class Doubled(nn.Module):
    def forward(self, x):
        return {"out": x * 2}


# --- symbols


class Plain(torch.SymInt):
    """A number as a trace has it, without the recording."""

    def __init__(self, value, asked):
        self.recorder, self.value, self.asked = types.SimpleNamespace(active=True), value, asked
        self.node = tensors.Node(self)

    def __int__(self):
        self.asked.append(self.value)
        return self.value

    __index__ = __bool__ = __float__ = __int__


def test_torch_asks_the_node_of_a_number_for_its_value():
    for call in (torch.Tensor.softmax, torch.Tensor.unsqueeze, torch.Tensor.chunk):
        asked: list = []
        call(torch.ones(2, 3), Plain(1, asked))
        assert asked == [1], "a number that goes into an operation would leave no guard in the graph"


def test_free_sizes_have_names():
    program = torch.export.export(Doubled(), (torch.ones(4, 3),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    (node,) = [n for n in program.graph.nodes if n.op == "placeholder"]
    free = node.meta["val"].shape[0]
    assert isinstance(free, torch.SymInt) and tensors.size_name(free) == str(free), "a package would not check its sizes"
    assert tensors.size_name(free * 2) is None


# --- kernels


def test_kernels_compute_what_their_names_say():
    a, b, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    assert (tensors.onednn_linear is None) == (not torch.backends.mkldnn.is_available())
    if tensors.onednn_linear is not None:
        torch.testing.assert_close(tensors.onednn_linear(a, b, bias, "none", [], ""), F.linear(a, b, bias))
    v, g = torch.randn(3, 4), torch.rand(3, 1)
    torch.testing.assert_close(tensors.weight_norm(v, g, 0), v * g / v.norm(dim=1, keepdim=True))
    rows, lengths = torch.randn(2, 3, 4), torch.tensor([3, 2])
    data, sizes = tensors.pack_padded_sequence(rows, lengths, True)
    torch.testing.assert_close(data, rnn.pack_padded_sequence(rows, lengths, batch_first=True).data)
    padded, found = tensors.pad_packed_sequence(data, sizes, True, 0.0, 3)
    assert torch.equal(padded[0], rows[0]) and not padded[1, 2].any() and found.tolist() == [3, 2]
    assert tensors.pad_sequence([torch.ones(2), torch.ones(1)], True, 0.0).tolist() == [[1, 1], [1, 0]]


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_attention_gives_its_denominators(device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(1, 2, 8, 16, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    given = q.detach(), k.detach(), v.detach()
    if device == "cpu":
        out, weight = tensors.flash_cpu(*given, scale=0.25)
    else:
        out, weight, *extra = tensors.flash_cuda(*given, scale=0.25)
    near = {"rtol": 1e-4, "atol": 1e-5} if device == "cpu" else {"rtol": 2e-2, "atol": 2e-2}
    said = "parts of a ring would be merged with wrong weights"
    torch.testing.assert_close(weight, (q @ k.mT * 0.25).float().logsumexp(-1), **near, msg=lambda m: f"{said}: {m}")
    wanted = F.scaled_dot_product_attention(q, k, v, scale=0.25)
    torch.testing.assert_close(out, wanted, **near)
    grad = torch.ones_like(out)
    if device == "cpu":
        back = tensors.flash_cpu_backward(grad, *given, out, weight, 0.0, False, attn_mask=None, scale=0.25)
    else:
        firsts, lasts, most, _, state, unused, *_ = extra
        more = firsts, lasts, most, 8, 0.0, False, state, unused
        back = tensors.flash_cuda_backward(grad, *given, out, weight, *more, scale=0.25)
    for mine, other in zip(back[:3], torch.autograd.grad(wanted, (q, k, v), grad), strict=True):
        torch.testing.assert_close(mine, other, **near)


def test_attention_on_a_gpu_is_there():
    found = {a.name for a in tensors.schema(tensors.flash_cuda_backward.default).arguments}
    assert {"logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "scale"} <= found
    assert [r.name for r in tensors.schema(tensors.flash_cuda.default).returns][:2] == ["output", "logsumexp"]


# --- distributed


def test_collectives_by_the_name_of_a_group():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        found = distributed.default_store()
        found.set("a", "b")
        assert found.check(["a"]) and not found.check(["c"]) and found.get("a") == b"b"
        assert found.clone().check(["a"]), "processes could not tell each other which of them died"
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("ring", "ulysses"))
        name = distributed.joined_group(mesh, "sequence")
        assert distributed.group_of_name(name).size() == 1
        x = torch.arange(3.0)
        assert torch.equal(distributed.wait(distributed.all_reduce(x, "sum", name)), x)
        assert torch.equal(distributed.wait(distributed.all_gather(x, 0, name)), x)
        assert torch.equal(distributed.wait(distributed.all_to_all(x, [3], [3], name)), x)
    finally:
        dist.destroy_process_group()


# --- compiling


class Graphs:
    """A backend that counts what it is given."""

    def __init__(self):
        self.seen = []

    def __call__(self, graph, inputs):
        self.seen.append([node.target for node in graph.graph.nodes if node.op in ("call_function", "call_method")])
        return graph.forward


def inner(x):
    return torch.relu(x)


def left(x):
    kept.append(torch.compiler.is_dynamo_compiling())
    return inner(torch.neg(x))


kept: list = []


def test_a_frame_that_is_left_runs_as_it_stands_and_what_it_calls_is_compiled():
    modules.leave_frame(left.__code__)
    torch._dynamo.reset()
    graphs_of = Graphs()
    torch.compile(left, backend=graphs_of)(torch.ones(2))
    assert kept == [False] and graphs_of.seen == [[torch.relu]], (
        "the wrapper around a traced module's forward would be compiled with it, with what keeps its calls in turn: "
        "every change of an adapter would compile again"
    )


def test_a_file_that_is_left_is_not_compiled(tmp_path, monkeypatch):
    (tmp_path / "left_alone.py").write_text("import torch\ndef run(f, x):\n    return f(torch.neg(x))\n")
    monkeypatch.syspath_prepend(tmp_path)
    import left_alone

    modules.leave_module(left_alone)
    torch._dynamo.reset()
    graphs_of = Graphs()
    torch.compile(left_alone.run, backend=graphs_of)(inner, torch.ones(2))
    sys.modules.pop("left_alone")
    assert torch.neg not in sum(graphs_of.seen, []), "a compiler would take our turns apart"


def test_what_is_apart_is_compiled_neither_itself_nor_what_it_calls():
    @modules.without_compiler
    def alone(x):
        said.append(modules.is_listening())
        return inner(torch.neg(x))

    def frame(x):
        return alone(x)

    said = []
    modules.leave_frame(frame.__code__)
    torch._dynamo.reset()
    graphs_of = Graphs()
    torch.compile(frame, backend=graphs_of)(torch.ones(2))
    alone(torch.ones(2))
    assert said == [False, False] and graphs_of.seen == [], "a check of a call would be compiled, and end what is compiled"


def test_what_is_unwatched_is_seen_by_nobody():
    table, seen = torch.zeros(2), []

    class Looking(tensors.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    @modules.unwatched
    def write():
        table.add_(inner(torch.ones(2)))

    def frame(x):
        write()
        return inner(x)

    modules.leave_frame(frame.__code__)
    torch._dynamo.reset()
    graphs_of = Graphs()
    torch.compile(frame, backend=graphs_of)(torch.ones(2))
    torch.func.grad(lambda x: (write(), x.sum())[1])(torch.ones(2))  # it takes no other code that writes what it did not make
    with Looking():
        write()
    assert table.tolist() == [3, 3] and not seen and graphs_of.seen == [[torch.relu]]


def test_a_graph_is_broken_with_a_message():
    def broken(x):
        modules.break_graph("for a reason")
        return inner(x)

    torch._dynamo.reset()
    assert torch.compile(broken, backend="eager")(torch.ones(2)).tolist() == [1, 1]
    torch._dynamo.reset()
    with pytest.raises(Exception, match="for a reason"):
        torch.compile(broken, backend="eager", fullgraph=True)(torch.ones(2))


@pytest.mark.skipif(not modules.CONTEXT_VARIABLES, reason="torch's compiler does not read context variables")
def test_what_compiled_code_reads_of_the_context_is_asked_at_each_call():
    def reads(x):
        return x + 1 if variable.get() is None else x

    torch._dynamo.reset()
    call, found = torch.compile(reads, backend="eager", fullgraph=True), []
    for value in (None, object(), None):
        token = variable.set(value)
        found.append(call(torch.ones(1)).item())
        variable.reset(token)
    assert found == [2, 1, 2]


variable: contextvars.ContextVar = contextvars.ContextVar("variable", default=None)


def test_a_frame_knows_whether_frames_are_compiled():
    said = []

    def frame(x):
        said.append(modules.is_listening())
        return x + 1

    modules.leave_frame(frame.__code__)
    frame(torch.ones(2))
    torch.compile(frame, backend="eager")(torch.ones(2))
    frame(torch.ones(2))
    assert said == [False, True, False]


def test_what_stands_as_it_is_is_compiled_where_it_listens_alone():
    def around(x):
        said.append((modules.is_listening(), modules.is_compiling()))
        return modules.as_listened(inner, torch.neg(x))

    def frame(x):
        return modules.call_uncompiled(3, around, x)

    said = []
    modules.leave_frame(frame.__code__)
    torch._dynamo.reset()
    graphs_of, limit = Graphs(), torch._dynamo.config.recompile_limit
    found = torch.compile(frame, backend=graphs_of)(torch.ones(2))
    assert torch.equal(found, inner(torch.full((2,), -1.0)))
    assert said == [(False, True)] and graphs_of.seen == [[torch.relu]], (
        "what is around outlined regions would be compiled with them, or the regions would not be compiled at all"
    )
    assert not modules.is_compiling() and torch._dynamo.config.recompile_limit == limit
    assert torch.equal(frame(torch.ones(2)), found) and said[1] == (False, False), "outside a compiler all is as it stands"
    with pytest.raises(ZeroDivisionError):
        modules.call_uncompiled(3, lambda x: x / 0, 1)
    assert not modules.is_compiling()


def test_floats_of_layers_can_be_constants_of_a_compiled_program():
    class Scaled(nn.Module):
        eps = 0.3

        def forward(self, x):
            with constants:
                return x * self.eps

    constants = modules.constant_floats()
    torch._dynamo.reset()
    found = []

    def backend(graph, inputs):
        found.extend(node.args for node in graph.graph.nodes if node.target is operator.mul)
        return graph.forward

    torch.compile(Scaled(), backend=backend, fullgraph=True, dynamic=True)(torch.ones(2))
    ((_, factor),) = found
    assert factor == 0.3, "a nested region would get a number as an input, which torch cannot hand on"


# --- packaging


class Guarded(nn.Module):
    def forward(self, x):
        if x.shape[0] > 3:
            return x * 2
        return x


def test_the_guards_of_a_program_are_told():
    program = torch.export.export(Guarded(), (torch.ones(5, 2),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    guards = exporting.guards_of(program)
    assert any("x" in text and "[0]" in text and any(digit in text for digit in "34") for text in guards), (
        f"a program that holds for more than 3 rows says {guards}: a package would take other inputs and compute wrong results"
    )


@pytest.mark.slow
def test_a_program_is_compiled_into_an_archive(tmp_path):
    assert Path(exporting.find_compiler()).name, "export would not say that there is no compiler"
    assert exporting.processor() in (None, "native") or "TORCHINDUCTOR_CPP_MARCH" in os.environ
    from torch._inductor import config

    with config.patch({"cpp.march": "x86-64-v3"}):
        assert exporting.processor() == "x86-64-v3", "a package would be said to run on processors on which it does not"
    program = torch.export.export(Doubled(), (torch.ones(2),))
    file = tmp_path / "doubled.pt2"
    with file.open("wb") as sink:
        exporting.compile_package(program, sink, {"compile_threads": 1})
    with zipfile.ZipFile(file) as archive:
        assert any(name.endswith(".so") for name in archive.namelist())
    loader = exporting.LOADER(str(file), "model", False, 1, -1)
    assert loader.get_constant_fqns() == [] and loader.get_metadata()["AOTI_DEVICE_KEY"] == "cpu"
    assert callable(loader.load_constants) and loader.boxed_run([torch.ones(2)])[0].tolist() == [2, 2]


# --- onnx


class Eigen(nn.Module):
    def forward(self, x):
        return torch.linalg.eigvalsh(x + x.mT)


@pytest.mark.slow
def test_a_program_is_translated_to_onnx():
    assert exporting.DEFAULT in exporting.OPSETS
    program = torch.export.export(Guarded(), (torch.ones(5, 2),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    for opset in (exporting.OPSETS[0], exporting.OPSETS[-1]):
        model = exporting.translated(program, opset)
        assert model.graph.opset_imports[""] == opset, "a model would say that it has another opset than was asked for"
        assert [value.name for value in model.graph.inputs] == ["x"] and len(model.graph.outputs) == 1


@pytest.mark.slow
def test_what_onnx_lacks_is_told_with_its_line():
    program = torch.export.export(Eigen(), (torch.ones(2, 2),))
    with pytest.raises(RuntimeError) as caught:
        exporting.translated(program, exporting.DEFAULT)
    ((operation, stack),), reason = exporting.untranslated(program, exporting.DEFAULT, caught.value)
    assert str(operation) == "aten._linalg_eigh.default" and "eigvalsh" in stack and "No ONNX function" in reason, (
        "an operation that ONNX lacks would be told without its place in the model"
    )
