"""What we need of torch that it does not promise: each is there, and does what we need. A new torch fails here first."""

from __future__ import annotations

import ast
import logging
import operator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import fxplug.core.torch_internals as names
from fxplug.core.torch_internals import distributed, exporting, modules, tensors

SUBJECTS = distributed, exporting, modules, names, tensors
CPU = torch.device("cpu")


def test_every_one_has_a_test():
    files = Path(__file__).parent.glob("test_torch_internals*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8")))]
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    imports = [node for node in imports if "torch_internals" in ast.unparse(node)]
    called = {alias.asname or alias.name: alias.name.rpartition(".")[2] for node in imports for alias in node.names}
    used = {(called.get(node.value.id), node.attr) for node in nodes if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)}
    all_of_them = {(subject.__name__.rpartition(".")[2], name) for subject in SUBJECTS for name in subject.__all__}
    files = {file.stem.replace("__init__", "torch_internals") for file in Path(modules.__file__).parent.glob("*.py")}
    assert all_of_them - used == set() and files == {name for name, _ in all_of_them}


# --- kernels: what costs and shares are counted with


def test_attention_on_a_cpu_is_counted():
    query, key = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 16, 4)
    with tensors.flop_counter() as counter:
        torch.nn.functional.scaled_dot_product_attention(query, key, key)
    assert counter.get_total_flops() == 2 * 2 * (2 * 8 * 16 * 4)


# --- fakes: a trace costs no memory


def fake(mode=None, dtype=torch.float16):
    return tensors.fake_of(((2, 3), (3, 1), dtype, torch.device("cuda", 0)), mode or tensors.FakeTensorMode())


def test_a_fake_tensor_made_directly_is_like_one_that_torch_makes():
    made = fake()
    assert type(made) is tensors.FakeTensor, "a trace knows tensors without memory by their class"
    found = tuple(made.shape), made.stride(), made.dtype, made.device, made.fake_device
    assert found == ((2, 3), (3, 1), torch.float16, torch.device("cuda", 0), torch.device("cuda", 0)), (
        "a fake tensor that is made directly has another geometry: a trace would record wrong shapes, dtypes or devices"
    )
    assert made.constant is None
    with made.fake_mode as mode:
        out = made.t() @ fake(mode)
        assert type(out) is tensors.FakeTensor and out.shape == (3, 3) and out.device.type == "cuda", (
            "operations do not take a fake tensor that is made directly: a trace cannot run on fake tensors"
        )
        assert {name for name in vars(out) if not name.startswith("_")} <= tensors.kept_on_fakes(), (
            "torch keeps more on a fake tensor: a trace would take it for what the model's code has put on a weight"
        )
    real = torch.ones(2)
    assert tensors.fake_of(((2,), (1,), real.dtype, CPU), tensors.FakeTensorMode(), real).constant is real, (
        "a fake tensor forgets its constant: numbers that the model makes itself cannot be read in a trace"
    )


def test_real_tensors_can_be_made_and_used_under_fake_tensors():
    with tensors.FakeTensorMode(allow_non_fake_inputs=True):
        assert type(torch.ones(2) + 1) is tensors.FakeTensor, "the mode makes real tensors: a trace would compute the model"
        with tensors.unset_fake_temporarily():
            real = torch.ones(2)
        assert type(real) is torch.Tensor, "constants of a trace would have no values"
        assert type(real + 1) is tensors.FakeTensor, "the mode refuses real tensors, which a trace and verify give it"


def test_fake_tensors_say_that_they_lack_values():
    with tensors.FakeTensorMode():
        with pytest.raises(tensors.DataDependentOutputException):
            torch.ones(2).sum().item()
        with pytest.raises(tensors.DynamicOutputShapeException):
            torch.ones(2).nonzero()


def test_a_failing_operation_on_fake_tensors_logs_by_a_known_name(caplog):
    with tensors.FakeTensorMode(), caplog.at_level(logging.DEBUG, logger=names.FAKE_TENSOR_LOG), pytest.raises(RuntimeError):
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
    assert tensors.is_error_of_dynamo(caught.value), "a model that compiles a part would not be traced on real tensors instead"
    assert not tensors.is_error_of_dynamo(RuntimeError())


# --- dispatch: a trace sees every function, and nothing of its own


class Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.functions, self.listening = [], []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        self.listening.append(self in tensors.function_modes())
        return func(*args, **(kwargs or {}))


def test_modes_of_functions_listen_and_can_be_kept_out():
    x = torch.ones(2)
    with Seen() as seen:
        x.sum()
        assert seen in tensors.function_modes(), "a recording would take itself for one that does not run"
        with tensors.DisableTorchFunction():
            x.mean()
            with torch._C.DisableTorchFunctionSubclass():
                pass
    assert seen not in tensors.function_modes()
    assert seen.functions == [torch.Tensor.sum], "what a trace asks for itself would be recorded in the model's graph"
    assert seen.listening == [False], "what torch does inside a function would be recorded as the model's own"


@pytest.mark.filterwarnings("ignore:.*jit.trace")
def test_whatever_looks_on_is_seen():
    found = {}

    def ask(name):
        def function(x):
            found[name] = tensors.is_watched()
            return x * 2

        return function

    class Passing(tensors.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    torch.vmap(ask("vmap"))(x)
    torch.func.grad(lambda x: ask("grad")(x).sum())(x)
    make_fx(ask("make_fx"))(x)
    torch.jit.trace(ask("jit"), (x,), check_trace=False)
    torch.compile(ask("compile"), backend="eager")(x)
    for mode in (Passing(), Seen(), tensors.FakeTensorMode()):
        with mode:
            ask(type(mode).__name__)(torch.ones(2))
    with torch.no_grad(), torch.autocast("cpu"):
        ask("nothing")(x)
    assert len(found) == 9 and [name for name, seen in found.items() if not seen] == ["nothing"]


def test_operators_can_be_kept_from_modes_and_tell_what_they_write():
    class Log(tensors.TorchDispatchMode):
        found: list = []  # noqa: RUF012

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.found.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Log() as log:
        x.add_(1)
        with tensors.DisableTorchDispatch():
            x.mul_(2)
    (func,) = log.found
    assert isinstance(func, tensors.OpOverload) and isinstance(torch.ops.aten.add_, tensors.OpOverloadPacket)
    assert tensors.name_of(func) == "aten::add_", "the manifest of a package would name operators that are not there"
    schema = tensors.schema(func)
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == ["self"] and schema.is_mutable, "what a run on real tensors writes would not be given back"
    assert [str(r.type) for r in schema.returns] == ["Tensor"] and schema.arguments[2].default_value == 1


def test_operators_are_found_by_name():
    found = [tensors.is_operator(name) for name in ("aten::add", "aten::no_such", "no::such")]
    assert found == [True, False, False], "a package would fail at its first call, not when it is loaded"


def test_a_tensor_without_memory_sees_operators_only():
    class Later(torch.Tensor):
        __torch_function__ = tensors.disabled_torch_function

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return torch.ones(1)

    seen = []
    made = tensors.wrapper_of(Later, (2, 3), strides=(3, 1), dtype=torch.float16, device=CPU)
    assert type(made) is Later and (tuple(made.shape), made.dtype, made.device) == ((2, 3), torch.float16, CPU)
    assert torch.relu(made).item() == 1 and seen == ["aten::relu"], "patches of a pipeline would not be put off"


def test_c_functions_lie_in_one_module():
    assert vars(tensors.NATIVE)["is_grad_enabled"] is torch.is_grad_enabled, "a model that asks there would not be recorded"


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


def test_hooks_of_a_gradient_are_seen_and_taken_away():
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: grad * 2)
    before = tensors.gradient_hooks(x)
    x.register_hook(lambda grad: grad * 5)
    assert len(before) == 1 and len(tensors.gradient_hooks(x)) == 2, "a block could change a model's gradients unseen"
    tensors.set_gradient_hooks(x, before)
    x.sum().backward()
    assert tensors.gradient_hooks(x) == before and torch.equal(x.grad, torch.full((2,), 2.0))


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
        modules.set_grad_enabled(False)
        assert not torch.is_grad_enabled()
        assert seen.functions == [modules.set_grad_enabled], "a mode that code in forward sets would not be recorded"
    state = modules.enter_autocast("cpu", torch.bfloat16, True, False)
    try:
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
        assert not torch.is_autocast_cache_enabled(), "the order of the arguments is another"
    finally:
        modules.exit_autocast(state)
    assert not torch.is_autocast_enabled("cpu"), "a graph would leave autocast on"
    for enabled, cache in ((True, False), (False, True)):
        context = torch.autocast("cpu", torch.bfloat16, enabled=enabled, cache_enabled=cache)
        assert modules.autocast_settings(context) == (enabled, cache), "a graph would enter another autocast region"


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


def test_every_call_of_a_module_asks_its_class_for_one_method(monkeypatch):
    layer, seen = nn.Linear(2, 2), []
    monkeypatch.setattr(nn.Module, modules.CALL, lambda module, x: seen.append(module) or x)
    assert type(layer(torch.ones(1, 2))) is torch.Tensor and seen == [layer], "a trace would not see the calls of modules"
    layer.compile(backend="eager")
    assert callable(vars(layer).pop(modules.COMPILED)), "a compiled module in a model would be no part of its graph"
    layer(torch.ones(1, 2))
    assert seen == [layer, layer]


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
    graph.erase_node(z)
    assert modules.is_erased(z) and not modules.is_erased(y), "an edit would start from a node that is gone"
    found = [modules.qualified_name(f) for f in (F.relu, torch.add, operator.add, torch.ops.aten.add.Tensor)]
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


class Doubled(nn.Module):
    def forward(self, x):
        return {"out": x * 2}


def test_structures_are_those_of_export():
    value = {"a": [torch.ones(1), 2], "b": (None, 3)}
    flat, spec = modules.tree_flatten(value)
    assert len(flat) == len(modules.tree_leaves(value)) == 4 and flat[2] is None
    assert modules.tree_structure(value) == spec == modules.treespec_loads(modules.treespec_dumps(spec))
    assert modules.tree_unflatten(flat, spec) == value and modules.tree_map(str, {"a": [1]}) == {"a": ["1"]}
    program = torch.export.export(Doubled(), (torch.ones(2),))
    assert type(program.call_spec.out_spec) is type(spec), "the results of a package could not be put together"


def test_a_checkpoint_that_is_not_reentrant_is_run_by_a_function_that_is_looked_up(monkeypatch):
    from torch.utils import checkpoint

    calls = []
    for name in set(names.CHECKPOINTS) & vars(checkpoint).keys():
        original = getattr(checkpoint, name)
        monkeypatch.setattr(checkpoint, name, lambda *a, original=original, **k: calls.append(1) or original(*a, **k))
    checkpoint.checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False)
    assert calls, "a trace would not see the checkpoint, nor compare what its backward does again"
