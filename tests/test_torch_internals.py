"""What we need of torch that it does not promise: what a change of would show nowhere else, or late."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import fxplug.core.torch_internals as names
from fxplug.core.torch_internals import modules, tensors, trees

CPU = torch.device("cpu")


# --- fakes: a trace costs no memory


def fake(mode=None, dtype=torch.float16):
    return tensors.make_fake_tensor(((2, 3), (3, 1), dtype, torch.device("cuda", 0)), mode or tensors.FakeTensorMode())


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
        assert {name for name in vars(out) if not name.startswith("_")} <= tensors.list_fake_attributes(), (
            "torch keeps more on a fake tensor: a trace would take it for what the model's code has put on a weight"
        )
    real = torch.ones(2)
    assert tensors.make_fake_tensor(((2,), (1,), real.dtype, CPU), tensors.FakeTensorMode(), real).constant is real, (
        "a fake tensor forgets its constant: numbers that the model makes itself cannot be read in a trace"
    )


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


def test_operators_are_found_by_name():
    found = [tensors.is_operator(name) for name in ("aten::add", "aten::no_such", "no::such")]
    assert found == [True, False, False], "a package would fail at its first call, not when it is loaded"


def test_c_functions_lie_in_one_module():
    assert vars(tensors.NATIVE)["is_grad_enabled"] is torch.is_grad_enabled, "a model that asks there would not be recorded"


# --- tensors


def test_hooks_of_a_gradient_are_seen_and_taken_away():
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: grad * 2)
    before = tensors.get_gradient_hooks(x)
    x.register_hook(lambda grad: grad * 5)
    assert len(before) == 1 and len(tensors.get_gradient_hooks(x)) == 2, "a block could change a model's gradients unseen"
    tensors.set_gradient_hooks(x, before)
    x.sum().backward()
    assert tensors.get_gradient_hooks(x) == before and torch.equal(x.grad, torch.full((2,), 2.0))


def test_memory_is_told_apart_where_there_is_none():
    x = torch.ones(4, device="meta")
    one, same, other = (tensors.memory_id(t.untyped_storage()) for t in (x, x[1:].detach(), torch.ones(4, device="meta")))
    assert one == same != other, "tensors that share memory would be saved twice, or others taken for one"


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


def test_a_recurrent_layer_keeps_its_weights_in_lists():
    layer = nn.LSTM(2, 3)
    assert {n for n in vars(layer) if "weight" in n} == set(modules.WEIGHT_LISTS), "a file could bring weights of its own"
    for name in layer._parameters:
        layer._parameters[name] = nn.Parameter(torch.zeros_like(layer._parameters[name]))
    modules.list_weights(layer)
    assert layer(torch.ones(1, 2))[0].abs().sum() == 0, "a loaded recurrent layer would compute with other weights"


# --- graphs


def test_paths_of_a_structure_lead_to_its_leaves():
    call = {"a": [torch.zeros(1), 2], "b": {"c": None}}
    rows, form = trees.tree_flatten_with_path(call)
    assert [trees.keystr(path) for path, _ in rows] == ["['a'][0]", "['a'][1]", "['b']['c']"]
    assert trees.tree_unflatten([leaf for _, leaf in rows], form) == call
    assert trees.tree_leaves(trees.tree_map_only(int, lambda n: n + 1, call))[1] == 3
