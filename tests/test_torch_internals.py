"""What we need of torch that it does not promise: each is there, and does what we need. A new torch fails here first."""

from __future__ import annotations

import ast
import logging
import operator
import sys
import types
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import rnn
from torch.overrides import TorchFunctionMode

from fxplug.torch_internals import (
    compiling,
    dispatch,
    distributed,
    fakes,
    graphs,
    kernels,
    modes,
    modules,
    names,
    packaging,
    pytree,
    symbols,
    tensors,
)

SUBJECTS = (
    compiling, dispatch, distributed, fakes, graphs, kernels, modes, modules, names, packaging, pytree, symbols, tensors
)
CPU = torch.device("cpu")


def test_every_one_has_a_test():
    tree = ast.parse(Path(__file__).read_text("utf-8"))
    used = {(node.value.id, node.attr) for node in ast.walk(tree) if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)}
    all_of_them = {(subject.__name__.rpartition(".")[2], name) for subject in SUBJECTS for name in subject.__all__}
    files = {file.stem for file in Path(compiling.__file__).parent.glob("*.py")} - {"__init__"}
    assert all_of_them - used == set() and files == {name for name, _ in all_of_them}


# --- fakes: a trace costs no memory


def fake(mode=None, dtype=torch.float16):
    return fakes.fake_of(((2, 3), (3, 1), dtype, torch.device("cuda", 0)), mode or fakes.FakeTensorMode())


def test_a_fake_tensor_made_directly_is_like_one_that_torch_makes():
    made = fake()
    assert type(made) is fakes.FakeTensor, "a trace knows tensors without memory by their class"
    found = tuple(made.shape), made.stride(), made.dtype, made.device, made.fake_device
    assert found == ((2, 3), (3, 1), torch.float16, torch.device("cuda", 0), torch.device("cuda", 0)), (
        "a fake tensor that is made directly has another geometry: a trace would record wrong shapes, dtypes or devices"
    )
    assert made.constant is None
    with made.fake_mode as mode:
        out = made.t() @ fake(mode)
        assert type(out) is fakes.FakeTensor and out.shape == (3, 3) and out.device.type == "cuda", (
            "operations do not take a fake tensor that is made directly: a trace cannot run on fake tensors"
        )
    real = torch.ones(2)
    assert fakes.fake_of(((2,), (1,), real.dtype, CPU), fakes.FakeTensorMode(), real).constant is real, (
        "a fake tensor forgets its constant: numbers that the model makes itself cannot be read in a trace"
    )


def test_real_tensors_can_be_made_and_used_under_fake_tensors():
    with fakes.FakeTensorMode(allow_non_fake_inputs=True):
        assert type(torch.ones(2) + 1) is fakes.FakeTensor, "the mode makes real tensors: a trace would compute the model"
        with fakes.unset_fake_temporarily():
            real = torch.ones(2)
        assert type(real) is torch.Tensor, "constants of a trace would have no values"
        assert type(real + 1) is fakes.FakeTensor, "the mode refuses real tensors, which a trace and verify give it"


def test_fake_tensors_say_that_they_lack_values():
    with fakes.FakeTensorMode():
        with pytest.raises(fakes.DataDependentOutputException):
            torch.ones(2).sum().item()
        with pytest.raises(fakes.DynamicOutputShapeException):
            torch.ones(2).nonzero()


def test_a_failing_operation_on_fake_tensors_logs_by_a_known_name(caplog):
    with fakes.FakeTensorMode(), caplog.at_level(logging.DEBUG, logger=names.FAKE_TENSOR_LOG), pytest.raises(RuntimeError):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert {record.name for record in caplog.records} == {names.FAKE_TENSOR_LOG}, (
        "torch logs under another name: users would see its tracebacks beside our errors"
    )


def test_errors_of_dynamo_are_known():
    def forward(x):
        torch._dynamo.graph_break()
        return x

    with pytest.raises(Exception) as caught:
        torch.compile(forward, backend="eager", fullgraph=True)(torch.ones(1))
    assert fakes.is_error_of_dynamo(caught.value), "a model that compiles a part would not be traced on real tensors instead"
    assert not fakes.is_error_of_dynamo(RuntimeError())


# --- dispatch: a trace sees every function, and nothing of its own


class Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.functions, self.listening = [], []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        self.listening.append(self in dispatch.function_modes())
        return func(*args, **(kwargs or {}))


def test_modes_of_functions_listen_and_can_be_kept_out():
    x = torch.ones(2)
    with Seen() as seen:
        x.sum()
        assert seen in dispatch.function_modes(), "a recording would take itself for one that does not run"
        with dispatch.DisableTorchFunction():
            x.mean()
            with torch._C.DisableTorchFunctionSubclass():
                pass
    assert seen not in dispatch.function_modes()
    assert seen.functions == [torch.Tensor.sum], "what a trace asks for itself would be recorded in the model's graph"
    assert seen.listening == [False], "what torch does inside a function would be recorded as the model's own"


def test_operators_can_be_kept_from_modes_and_tell_what_they_write():
    class Log(dispatch.TorchDispatchMode):
        found: list = []  # noqa: RUF012

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.found.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Log() as log:
        x.add_(1)
        with dispatch.DisableTorchDispatch():
            x.mul_(2)
    (func,) = log.found
    assert isinstance(func, dispatch.OpOverload) and isinstance(torch.ops.aten.add_, dispatch.OpOverloadPacket)
    assert dispatch.name_of(func) == "aten::add_", "the manifest of a package would name operators that are not there"
    schema = dispatch.schema(func)
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == ["self"] and schema.is_mutable, "what a run on real tensors writes would not be given back"
    assert [str(r.type) for r in schema.returns] == ["Tensor"] and schema.arguments[2].default_value == 1


def test_operators_are_found_by_name():
    found = [dispatch.is_operator(name) for name in ("aten::add", "aten::no_such", "no::such")]
    assert found == [True, False, False], "a package would fail at its first call, not when it is loaded"


def test_a_tensor_without_memory_sees_operators_only():
    class Later(torch.Tensor):
        __torch_function__ = dispatch.disabled_torch_function

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return torch.ones(1)

    seen = []
    made = dispatch.wrapper_of(Later, (2, 3), strides=(3, 1), dtype=torch.float16, device=CPU)
    assert type(made) is Later and (tuple(made.shape), made.dtype, made.device) == ((2, 3), torch.float16, CPU)
    assert torch.relu(made).item() == 1 and seen == ["aten::relu"], "patches of a pipeline would not be put off"


def test_c_functions_lie_in_one_module():
    assert vars(dispatch.NATIVE)["is_grad_enabled"] is torch.is_grad_enabled, "a model that asks there would not be recorded"


# --- tensors


def test_writes_are_counted():
    x = torch.ones(2)
    before = tensors.version(x)
    x.detach().add_(1)
    assert tensors.version(x) > before, "weights changed behind our back would not be noticed"
    tensors.set_version(x, before)
    assert tensors.version(x) == before
    w = torch.ones(2, requires_grad=True)
    y = (w * x).sum()
    x.add_(1)
    tensors.set_version(x, before)
    y.backward()  # which raises where autograd counts otherwise


def test_memory_is_told_apart_where_there_is_none():
    x = torch.ones(4, device="meta")
    one, same, other = (tensors.memory_id(t.untyped_storage()) for t in (x, x[1:].detach(), torch.ones(4, device="meta")))
    assert one == same != other, "tensors that share memory would be saved twice, or others taken for one"


def test_a_tensor_can_count_as_a_parameter():
    made = fake()
    assert not isinstance(made, nn.Parameter) and tensors.as_parameter(made) is made and isinstance(made, nn.Parameter), (
        "a model that asks whether its weight is a parameter would get another answer in a trace"
    )


def test_checks_hold_in_eager_and_in_exported_programs():
    with pytest.raises(RuntimeError):
        tensors.check(False)
    with pytest.raises(RuntimeError, match="said so"):
        tensors.assert_later(torch.tensor(False), "said so")
    tensors.assert_later(torch.tensor(True), "said so")

    class Checked(nn.Module):
        def forward(self, x):
            tensors.check(x.shape[0] < 9)
            return x * 2

    size = {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(Checked(), (torch.ones(4),), dynamic_shapes=(size,))
    with pytest.raises((AssertionError, RuntimeError)):  # guards would be lost in exported programs
        program.module()(torch.ones(20))


def test_a_list_moves_towards_another():
    x = [torch.zeros(2), torch.ones(1)]
    tensors.lerp_all(x, [torch.ones(2), torch.zeros(1)], 0.25)
    assert [t.tolist() for t in x] == [[0.25, 0.25], [0.75]], "the average of weights would be wrong"


def test_names_of_attributes_and_functions_are_torchs():
    x = torch.ones(1)
    for name in names.ATTRIBUTES | names.BACKWARD_HOOKS | {names.TYPED_STORAGE}:
        assert hasattr(torch.Tensor, name) and (name == "_grad_fn" or hasattr(x, name)), f"{name}: a model may ask it unseen"
    for name in names.ATTRIBUTES | names.BACKWARD_HOOKS:
        with Seen() as seen:
            getattr(x, name, None)
        shown = name.removeprefix("_") if "_grad" in name[:5] else name  # torch answers both names by one
        assert [f.__self__.__name__ for f in seen.functions] == [shown], f"a trace does not see that a model reads {name}"
    for name in names.CHECKS - {"_assert"}:
        assert getattr(torch, name).__code__.co_name == name, f"{name}: text for people would count as read by the model"
    assert torch._assert.__code__.co_name in names.CHECKS


# --- modes


def test_modes_are_switched_by_functions():
    with Seen() as seen, torch.enable_grad():
        seen.functions.clear()
        modes.set_grad_enabled(False)
        assert not torch.is_grad_enabled()
        assert seen.functions == [modes.set_grad_enabled], "a mode that code in forward sets would not be recorded"
    state = modes.enter_autocast("cpu", torch.bfloat16, True, False)
    try:
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
        assert not torch.is_autocast_cache_enabled(), "the order of the arguments is another"
    finally:
        modes.exit_autocast(state)
    assert not torch.is_autocast_enabled("cpu"), "a graph would leave autocast on"
    for enabled, cache in ((True, False), (False, True)):
        context = torch.autocast("cpu", torch.bfloat16, enabled=enabled, cache_enabled=cache)
        assert modes.autocast_settings(context) == (enabled, cache), "a graph would enter another autocast region"


# --- modules


def test_a_module_keeps_its_state_in_tables():
    layer = nn.BatchNorm1d(3)
    layer.child = nn.Identity()
    layer.register_buffer("own", torch.ones(1), persistent=False)
    found = {name: set(getattr(layer, name)) for name in modules.TABLES}
    assert found == {
        "_modules": {"child"},
        "_parameters": {"weight", "bias"},
        "_buffers": {"running_mean", "running_var", "num_batches_tracked", "own"},
        "_non_persistent_buffers_set": {"own"},
    }, "every file of ours that moves modules or weights reads and writes these"
    layer._parameters["weight"] = new = nn.Parameter(torch.ones(3))
    assert layer.weight is new and layer.state_dict()["weight"].data_ptr() == new.data_ptr()
    others = set(vars(nn.Module())) - {*modules.TABLES, "training"}
    assert others and all("hook" in name or name.startswith("_is_full") for name in others), (
        f"a module keeps more than state and hooks: {others}; would a trace give that back?"
    )


HOOKS = [name for name in dir(nn.Module) if name.startswith("register_forward") or name.startswith("register_full_backward")]


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_are_seen(name):
    layer = nn.Linear(1, 1)
    assert not modules.is_hooked(layer) and not any(modules.forward_hooks(layer))
    handle = getattr(layer, name)(lambda *_: None)
    assert modules.is_hooked(layer), f"what {name} put there would be lost where layers are joined"
    assert any(modules.forward_hooks(layer)) == ("forward" in name), "an artifact would lose hooks without a word"
    handle.remove()


def test_hooks_of_all_modules_are_seen():
    before = {name: dict(value) for name, value in modules.GLOBAL_HOOKS.items()}
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert any(dict(value) != before[name] for name, value in modules.GLOBAL_HOOKS.items()), (
            "hooks that a model registers for all modules would outlive a trace"
        )
    finally:
        handle.remove()


def test_a_call_with_hooks_is_not_a_compiled_one():
    layer, seen = nn.Linear(2, 2), []
    layer.register_forward_hook(lambda *_: seen.append("hook"))
    layer.compile(backend=lambda graph, _: seen.append("compiled") or graph.forward)
    modules.call_with_hooks(layer, torch.ones(1, 2))
    assert seen == ["hook"], "a trace would run the compiled forward of a module, of which it sees nothing"


def test_bases_of_torchs_layers():
    kinds = {
        modules.BatchNorm: (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
        modules.InstanceNorm: (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
        modules.NormBase: (nn.BatchNorm2d, nn.InstanceNorm2d),
        modules.ConvNd: (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d),
        modules.DropoutNd: (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout),
    }
    for base, derived in kinds.items():
        assert [kind for kind in derived if not issubclass(kind, base)] == [], "a lowering would not know these layers"
    assert isinstance(torch.no_grad(), modules.DecoratorContextManager), "a trace would copy what a decorator holds"


def test_a_convolutions_forward_is_one_method():
    class Other(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return x + 7

    assert modules.conv_forward(Other) is not modules.conv_forward(nn.Conv2d)
    assert Other(1, 1, 1)(torch.zeros(1, 1, 1, 1)).item() == 7, "folding a convolution would take no notice of its own forward"


def test_a_recurrent_layer_keeps_its_weights_in_lists():
    layer = nn.LSTM(2, 3)
    assert {n for n in vars(layer) if "weight" in n} == set(modules.WEIGHT_LISTS), "a file could bring weights of its own"
    for name in layer._parameters:
        layer._parameters[name] = nn.Parameter(torch.zeros_like(layer._parameters[name]))
    modules.list_weights(layer)
    assert layer(torch.ones(1, 2))[0].abs().sum() == 0, "a loaded recurrent layer would compute with other weights"


# --- graphs


def test_nodes_and_names_of_functions():
    graph = fx.Graph()
    x = graph.placeholder("x")
    y, z = graph.call_function(operator.neg, (x,)), graph.call_function(operator.pos, (x,))
    graphs.rename(y, "mine")
    graphs.rename(z, "mine")
    assert (y.name, z.name) == ("mine", "mine_1"), "two nodes would have one name"
    graph.erase_node(z)
    assert graphs.is_erased(z) and not graphs.is_erased(y), "an edit would start from a node that is gone"
    found = [graphs.qualified_name(f) for f in (F.relu, torch.add, operator.add, torch.ops.aten.add.Tensor)]
    assert found == ["torch.nn.functional.relu", "torch.add", "_operator.add", "torch.ops.aten.add.Tensor"], (
        "artifacts name the functions of a graph so"
    )


def test_a_graph_module_keeps_one_graph_and_one_code():
    gm = fx.GraphModule(nn.Module(), fx.symbolic_trace(nn.ReLU()).graph)
    assert gm.graph is gm._graph and gm.code is gm._code, "a traced module sets these when it changes its mode"
    assert "__call__" in vars(type(gm)), "torch.fx makes no class of its own for each module; a traced module changes it"
    assert "forward" in vars(type(gm))
    other = fx.Graph()
    gm._graph = other
    assert gm.graph is other
    assert callable(nn.Module._apply) and callable(nn.Module._load_from_state_dict)
    seen = []

    class Watched(nn.Linear):
        def _apply(self, fn, recurse=True):
            seen.append("apply")
            return super()._apply(fn, recurse)

        def _load_from_state_dict(self, *args):
            seen.append("load")
            return super()._load_from_state_dict(*args)

    whole = nn.Sequential(Watched(1, 1)).double()
    whole.load_state_dict(whole.state_dict())
    assert seen == ["apply", "load"], "moving a module or loading it would go past ours"


def test_structures_are_those_of_export():
    value = {"a": [torch.ones(1), 2], "b": (None, 3)}
    flat, spec = pytree.tree_flatten(value)
    assert len(flat) == len(pytree.tree_leaves(value)) == 4 and flat[2] is None
    assert pytree.tree_structure(value) == spec == pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert pytree.tree_unflatten(flat, spec) == value and pytree.tree_map(str, {"a": [1]}) == {"a": ["1"]}
    program = torch.export.export(Doubled(), (torch.ones(2),))
    assert type(program.call_spec.out_spec) is type(spec), "the results of a package could not be put together"


class Doubled(nn.Module):
    def forward(self, x):
        return {"out": x * 2}


# --- symbols


class Plain(torch.SymInt):
    """A number as a trace has it, without the recording."""

    def __init__(self, value, asked):
        self.recorder, self.value, self.asked = types.SimpleNamespace(active=True), value, asked
        self.node = symbols.Node(self)

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
    assert isinstance(free, torch.SymInt) and symbols.size_name(free) == str(free), "a package would not check its sizes"
    assert symbols.size_name(free * 2) is None


# --- kernels


def test_kernels_compute_what_their_names_say():
    a, b, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    assert (kernels.onednn_linear is None) == (not torch.backends.mkldnn.is_available())
    if kernels.onednn_linear is not None:
        torch.testing.assert_close(kernels.onednn_linear(a, b, bias, "none", [], ""), F.linear(a, b, bias))
    v, g = torch.randn(3, 4), torch.rand(3, 1)
    torch.testing.assert_close(kernels.weight_norm(v, g, 0), v * g / v.norm(dim=1, keepdim=True))
    rows, lengths = torch.randn(2, 3, 4), torch.tensor([3, 2])
    data, sizes = kernels.pack_padded_sequence(rows, lengths, True)
    torch.testing.assert_close(data, rnn.pack_padded_sequence(rows, lengths, batch_first=True).data)
    padded, found = kernels.pad_packed_sequence(data, sizes, True, 0.0, 3)
    assert torch.equal(padded[0], rows[0]) and not padded[1, 2].any() and found.tolist() == [3, 2]
    assert kernels.pad_sequence([torch.ones(2), torch.ones(1)], True, 0.0).tolist() == [[1, 1], [1, 0]]


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_attention_gives_its_denominators(device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(1, 2, 8, 16, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    given = q.detach(), k.detach(), v.detach()
    if device == "cpu":
        out, weight = kernels.flash_cpu(*given, scale=0.25)
    else:
        out, weight, *extra = kernels.flash_cuda(*given, scale=0.25)
    near = {"rtol": 1e-4, "atol": 1e-5} if device == "cpu" else {"rtol": 2e-2, "atol": 2e-2}
    said = "parts of a ring would be merged with wrong weights"
    torch.testing.assert_close(weight, (q @ k.mT * 0.25).float().logsumexp(-1), **near, msg=lambda m: f"{said}: {m}")
    wanted = F.scaled_dot_product_attention(q, k, v, scale=0.25)
    torch.testing.assert_close(out, wanted, **near)
    grad = torch.ones_like(out)
    if device == "cpu":
        back = kernels.flash_cpu_backward(grad, *given, out, weight, 0.0, False, attn_mask=None, scale=0.25)
    else:
        firsts, lasts, most, _, state, unused, *_ = extra
        more = firsts, lasts, most, 8, 0.0, False, state, unused
        back = kernels.flash_cuda_backward(grad, *given, out, weight, *more, scale=0.25)
    for mine, other in zip(back[:3], torch.autograd.grad(wanted, (q, k, v), grad), strict=True):
        torch.testing.assert_close(mine, other, **near)


def test_attention_on_a_gpu_is_there():
    found = {a.name for a in dispatch.schema(kernels.flash_cuda_backward.default).arguments}
    assert {"logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "scale"} <= found
    assert [r.name for r in dispatch.schema(kernels.flash_cuda.default).returns][:2] == ["output", "logsumexp"]


# --- distributed


def test_collectives_by_the_name_of_a_group():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        found = distributed.default_store()
        found.set("a", "b")
        assert found.check(["a"]) and not found.check(["c"]) and found.get("a") == b"b" and found.add("n", 2) == 2
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
    compiling.leave_frame(left.__code__)
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
    compiling.leave_module("left_alone")
    torch._dynamo.reset()
    import left_alone

    graphs_of = Graphs()
    torch.compile(left_alone.run, backend=graphs_of)(inner, torch.ones(2))
    sys.modules.pop("left_alone")
    assert torch.neg not in sum(graphs_of.seen, []), "a compiler would take our turns apart"


def test_floats_of_layers_can_be_constants_of_a_compiled_program():
    class Scaled(nn.Module):
        eps = 0.3

        def forward(self, x):
            with constants:
                return x * self.eps

    constants = compiling.constant_floats()
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
    guards = packaging.guards_of(program)
    assert any("x" in text and "[0]" in text and any(digit in text for digit in "34") for text in guards), (
        f"a program that holds for more than 3 rows says {guards}: a package would take other inputs and compute wrong results"
    )


def test_a_program_is_compiled_into_an_archive(tmp_path):
    assert Path(packaging.find_compiler()).name, "export would not say that there is no compiler"
    assert packaging.processor() in (None, "native") or "TORCHINDUCTOR_CPP_MARCH" in __import__("os").environ
    from torch._inductor import config

    with config.patch({"cpp.march": "x86-64-v3"}):
        assert packaging.processor() == "x86-64-v3", "a package would be said to run on processors on which it does not"
    program = torch.export.export(Doubled(), (torch.ones(2),))
    file = tmp_path / "doubled.pt2"
    with file.open("wb") as sink:
        packaging.compile_package(program, sink, {"compile_threads": 1})
    with zipfile.ZipFile(file) as archive:
        assert any(name.endswith(".so") for name in archive.namelist())
    loader = packaging.LOADER(str(file), "model", False, 1, -1)
    assert loader.get_constant_fqns() == [] and loader.get_metadata()["AOTI_DEVICE_KEY"] == "cpu"
    assert callable(loader.load_constants) and loader.boxed_run([torch.ones(2)])[0].tolist() == [2, 2]
