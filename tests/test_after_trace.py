"""What is changed on a traced module after the trace: it does what it does to the model, or it is an error at that moment."""

from __future__ import annotations

import copy

import pipelines
import pytest
import timm
import torch
import torch.nn.functional as F
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_submodules
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune

import fxplug


def double(x):
    return x * 2


def helper(part, x):
    return x + part.shift


class Processor:
    def __call__(self, part, x):
        return x * part.gain


class Block(nn.Module):
    """Reads an attribute of each kind: its own, a private one, one of its class, by name, through others, and a function."""

    slope = 0.5

    def __init__(self):
        super().__init__()
        self.inner, self.read = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.register_parameter("offset", None)
        self.p, self._power, self.shift, self.gain, self.mask = 0.5, 2.0, 1.0, 3.0, None
        self.function, self.processor = double, Processor()

    @property
    def power(self):
        return self._power

    def method(self, x):
        return x.abs() ** self.power

    def forward(self, x):
        x = self.processor(self, helper(self, self.function(self.method(self.inner(x)))))
        x = F.linear(F.dropout(x, self.p, self.training) * self.slope, self.read.weight, self.read.bias)
        if getattr(self, "late", False) or self.mask is not None or self.offset is not None:
            x = -x
        return x * self.weight + self.bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.seq = nn.Sequential(nn.Linear(4, 4), nn.SiLU())
        self.scale, self.names = 2.0, ["a", "b"]  # the second is for whoever uses the model

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.seq(x) * self.scale


class Twice(nn.Module):
    """Weights that are two names of one: the head reads them without being called; and a layer with two names."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.table.weight
        self.a = self.b = nn.Linear(4, 4)

    def forward(self, x):
        return F.linear(self.b(self.a(self.table(x))), self.head.weight)


class Doubling(nn.Module):
    def forward(self, x):
        return x * 2


class Around(nn.Module):
    def __init__(self, module, tensors):
        super().__init__()
        self.module, self.tensors = module, tensors

    def forward(self, x):
        return functional_call(self.module, self.tensors, x)


def net():
    torch.manual_seed(0)
    return Net().eval()


X = torch.randn(3, 4)
REFUSED = {
    "attribute": lambda m: setattr(m.blocks[1], "p", 0.25),
    "attribute of the root": lambda m: setattr(m, "scale", 3.0),
    "of another type": lambda m: setattr(m, "scale", 2),
    "deleted": lambda m: delattr(m, "scale"),
    "private": lambda m: setattr(m.blocks[0], "_power", 3.0),
    "of the class": lambda m: setattr(m.blocks[0], "slope", 3.0),
    "by name": lambda m: setattr(m.blocks[0], "late", True),
    "read by a function beside": lambda m: setattr(m.blocks[0], "shift", 2.0),
    "read by a processor": lambda m: setattr(m.blocks[0], "gain", 2.0),
    "a function": lambda m: setattr(m.blocks[0], "function", torch.relu),
    "a processor": lambda m: setattr(m.blocks[0], "processor", lambda part, x: x),
    "a method": lambda m: setattr(m.blocks[0], "method", torch.relu),
    "None to a number": lambda m: setattr(m.blocks[0], "mask", 1),
    "None to a parameter": lambda m: setattr(m.blocks[0], "offset", nn.Parameter(torch.ones(4))),
    "None to a module": lambda m: setattr(m.blocks[0], "mask", nn.ReLU()),
    "forward": lambda m: setattr(m.blocks[0], "forward", lambda x: x),
    "part": lambda m: setattr(m, "seq", nn.Identity()),
    "part by key": lambda m: m.blocks.__setitem__(0, nn.Identity()),
    "part by path": lambda m: m.set_submodule("blocks.0", nn.Identity()),
    "part by add_module": lambda m: m.blocks.add_module("0", nn.Identity()),
    "part of another module": lambda m: setattr(m.blocks[0], "inner", m.seq),
    "layer that is read": lambda m: setattr(m.blocks[0], "read", nn.Linear(4, 4)),
    "layer to None": lambda m: setattr(m.blocks[0], "inner", None),
    "layer in a list": lambda m: m.seq.add_module("2", nn.ReLU()),
    "part deleted": lambda m: m.blocks.__delitem__(1),
    "forward hook": lambda m: m.blocks[0].register_forward_hook(lambda *a: None),
    "forward hook of a list": lambda m: m.seq.register_forward_hook(lambda *a: None),
    "forward pre-hook": lambda m: m.blocks[0].register_forward_pre_hook(lambda *a: None, with_kwargs=True),
    "backward hook": lambda m: m.blocks[0].register_full_backward_hook(lambda *a: None),
    "backward pre-hook": lambda m: m.blocks[0].register_full_backward_pre_hook(lambda *a: None),
    "hook of a layer that is read": lambda m: m.blocks[0].read.register_forward_hook(lambda *a: None),
    "prune": lambda m: prune.l1_unstructured(m.blocks[0], "weight", 0.5),
    "prune a layer that is read": lambda m: prune.l1_unstructured(m.blocks[0].read, "weight", 0.5),
    "weight_norm": lambda m: torch.nn.utils.weight_norm(m.blocks[0].read),
    "spectral_norm": lambda m: torch.nn.utils.spectral_norm(m.blocks[0].read),
    "compile": lambda m: m.blocks[0].compile(),
    "checkpoint wrappers": lambda m: apply_activation_checkpointing(m, check_fn=lambda part: part is m.blocks[0]),
    "hook of accelerate": lambda m: add_hook_to_module(m.blocks[0], ModelHook()),
}
LEAVES_WEIGHTS_OUT = ("weight_norm", "spectral_norm")  # torch takes the weight out before it registers anything


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", ["trace", "adapted", "copied", "loaded"])
def test_what_has_no_effect_is_an_error_at_that_moment(kind, tmp_path):
    gm = fxplug.trace(net(), X)
    if kind == "adapted":
        gm = fxplug.apply(gm, fxplug.load_pass("lora", at="blocks.*.inner", rank=2))
    elif kind == "loaded":
        fxplug.save(gm, tmp_path / "saved")
        gm = fxplug.load(tmp_path / "saved")
    want = gm(X)
    for name, change in REFUSED.items():
        module = copy.deepcopy(gm) if kind == "copied" or name in LEAVES_WEIGHTS_OUT else gm
        with pytest.raises(fxplug.SpecError, match=r"of a traced \w+ .*(trace|pass)"):
            change(module)
            pytest.fail(name)
        if name not in LEAVES_WEIGHTS_OUT:
            assert torch.equal(module(X), want), name


ALLOWED = {
    "equal value": lambda m: (setattr(m, "scale", 2.0), setattr(m.blocks[0], "p", 0.5)),
    "new attributes": lambda m: (setattr(m, "peft_config", {}), setattr(m.blocks[0], "qconfig", None)),
    "what forward does not read": lambda m: setattr(m, "names", ["c"]),
    "notes of pipelines": lambda m: [setattr(m, name, {}) for name in ("_internal_dict", "hf_device_map", "_hf_peft_config")],
    "parameter": lambda m: setattr(m.blocks[0], "weight", nn.Parameter(torch.full((4,), 3.0))),
    "layer": lambda m: setattr(m.blocks[0], "inner", nn.Linear(4, 4)),
    "layer by key": lambda m: m.seq.__setitem__(0, nn.Linear(4, 4)),
    "layer by path": lambda m: m.set_submodule("blocks.1.inner", nn.Sequential(nn.Linear(4, 4), nn.Tanh())),
    "hook of a layer": lambda m: m.blocks[0].inner.register_forward_hook(lambda part, args, out: out * 2),
    "hook of the root": lambda m: m.register_forward_hook(lambda part, args, out: out * 2),
    "pre-hook of the root": lambda m: m.register_forward_pre_hook(lambda part, args: (args[0] * 2,)),
    "forward of the root": lambda m: setattr(m, "forward", lambda x, old=m.forward: old(x) * 3),
    "prune": lambda m: (prune.l1_unstructured(m.seq[0], "weight", 0.5), m.seq[0].weight_orig.data.mul_(3)),
    "parametrize": lambda m: parametrize.register_parametrization(m.seq[0], "weight", Doubling()),
    "parametrize a part": lambda m: parametrize.register_parametrization(m.blocks[0], "weight", Doubling()),
    "parametrize what is read": lambda m: parametrize.register_parametrization(m.blocks[0].read, "weight", Doubling()),
    "weight_norm": lambda m: (torch.nn.utils.weight_norm(m.seq[0]), m.seq[0].weight_g.data.mul_(2)),
    "new weight_norm": lambda m: parametrizations.weight_norm(m.blocks[0].inner),
    "spectral_norm": lambda m: torch.nn.utils.spectral_norm(m.seq[0]),
    "checkpoint wrappers": lambda m: apply_activation_checkpointing(m, check_fn=lambda part: part is m.seq[0]),
    "share_memory": lambda m: m.share_memory(),
    "compile": lambda m: m.compile(backend="eager", fullgraph=True),
    "assign": lambda m: m.load_state_dict({name: t * 2 for name, t in m.state_dict().items()}, assign=True),
    "copy": copy.deepcopy,
    "average": torch.optim.swa_utils.AveragedModel,
    "functional_call": lambda m: Around(m, {"blocks.0.weight": torch.full((4,), 5.0)}),
    "hook of a copy": lambda m: (m.seq[0].register_forward_hook(lambda part, args, out: -out), copy.deepcopy(m))[1],
}


MAKES_ANOTHER = ("copy", "average", "functional_call", "hook of a copy")


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("name", ALLOWED)
def test_what_the_graph_follows_acts_as_on_the_model(name):
    model = net()
    results = []
    for module in (model, fxplug.trace(model, X)):
        module = module if module is not model else copy.deepcopy(model)
        torch.manual_seed(1)
        made = ALLOWED[name](module)
        results.append((made if name in MAKES_ANOTHER else module)(X))
    torch.testing.assert_close(*results)


def test_hooks_of_the_root_and_of_the_process_are_called():
    gm, seen = fxplug.trace(net(), X), []
    gm.register_full_backward_hook(lambda *_: seen.append("backward"))
    gm.register_full_backward_pre_hook(lambda *_: seen.append("before backward"))
    handle = nn.modules.module.register_module_forward_hook(lambda part, *_: seen.append(type(part).__name__))
    try:
        gm(X.clone().requires_grad_()).sum().backward()
    finally:
        handle.remove()
    assert seen == ["Linear", "Linear", "Linear", "SiLU", "TracedModule", "before backward", "backward"]  # no parts


def test_weights_that_are_one_stay_one(tmp_path):
    torch.manual_seed(0)
    x, model = torch.tensor([1, 2]), Twice()
    gm = fxplug.trace(model, x)
    fxplug.save(gm, tmp_path / "saved")
    two = {name: torch.full_like(t, float(n)) for n, (name, t) in enumerate(gm.state_dict().items())}
    adapted = fxplug.apply(gm, fxplug.load_pass("lora", at="a", rank=2))
    for module in (gm, adapted, fxplug.load(tmp_path / "saved")):
        want = module(x)
        for state in (two, {"table.weight": two["table.weight"]}, {"head.weight": two["head.weight"]}):
            with pytest.raises(fxplug.SpecError, match="loads nothing: 'table.weight' and 'head.weight' were"):
                module.load_state_dict(state, strict=False, assign=True)
            assert torch.equal(module(x), want)
        for path in ("a", "b"):
            other = copy.deepcopy(module)
            setattr(other, path, nn.Linear(4, 4))
            with pytest.raises(fxplug.GuardError, match="'a' and 'b' were one"):
                other(x)
            other.a = other.b = nn.Linear(4, 4)
            other(x)
        other = copy.deepcopy(module)
        other.table.weight = nn.Parameter(torch.ones(9, 4))
        with pytest.raises(fxplug.GuardError, match="'table.weight' and 'head.weight' were one"):
            other(x)
    one = nn.Parameter(torch.ones(9, 4))
    for module in (gm, model):
        module.load_state_dict({"table.weight": one, "head.weight": one}, strict=False, assign=True)
    assert torch.equal(gm(x), model(x)) and gm.head.weight is gm.table.weight
    both = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9, bias=False))  # both are called: two weights are right
    both[1].weight = both[0].weight
    called = fxplug.trace(both, x)
    for module in (both, called):
        module.load_state_dict({"0.weight": torch.ones(9, 4), "1.weight": torch.full((9, 4), 2.0)}, assign=True)
    assert torch.equal(called(x), both(x)) and both(x).max() == 8


CPU = torch.device("cpu")
OFFLOADS = {
    "cpu": lambda m, path: cpu_offload(m, CPU),
    "buffers": lambda m, path: cpu_offload(m, CPU, offload_buffers=True),
    "disk": lambda m, path: disk_offload(m, path, CPU),
    "dispatch": lambda m, path: dispatch_model(
        m, {name: ("disk", "cpu")[n % 2] for n, (name, p) in enumerate(m.named_children()) if list(p.parameters())}
        | {name: "cpu" for name, _ in m.named_parameters(recurse=False)}, "cpu", offload_dir=path, force_hooks=True
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The following device_map keys")
@pytest.mark.parametrize("how", OFFLOADS)
@pytest.mark.parametrize("name", ["vit", "convnext", "net"])
def test_accelerate_offloads_a_traced_module(name, how, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 32) if name != "net" else X
    if name == "vit":
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=48, num_classes=5)
    elif name == "convnext":
        model = timm.create_model("test_convnext", num_classes=5)
    model = net() if name == "net" else model.eval()
    gm = fxplug.trace(model, x)
    adapted = fxplug.apply(gm, fxplug.load_pass("lora", rank=2))
    with torch.no_grad():
        want = model(x)
        for n, module in enumerate((gm, adapted, fxplug.lower(adapted, fuse="fused"))):
            near = torch.equal if n < 2 else torch.allclose
            OFFLOADS[how](module, tmp_path / str(n))
            assert near(module(x), want) and near(module(x), want)
            if how in ("cpu", "disk"):
                assert all(p.is_meta for p in module.parameters())
            with pytest.raises((RuntimeError, fxplug.GuardError)):  # nothing stays loaded after an error
                module(x[:, :2])
            remove_hook_from_submodules(module)


def test_a_graph_is_computed_on_one_device():
    gm = fxplug.trace(net(), X)
    for part, device in ((gm, CPU), (gm.blocks[0], CPU), (gm.blocks[1], torch.device("meta"))):
        add_hook_to_module(part, AlignDevicesHook(execution_device=device))
    with pytest.raises(fxplug.SpecError, match="several devices"):
        gm(X)


def test_backward_hooks_are_kept_or_refused(tmp_path):
    model = nn.Sequential(Block(), nn.Linear(4, 4))
    model[1].register_full_backward_hook(lambda part, grads, out: (grads[0] * 2,))
    gm, results = fxplug.trace(model, X), []
    for module in (model, gm):
        x = X.clone().requires_grad_()
        module.eval()(x).sum().backward()
        results.append(x.grad)
    assert torch.equal(*results)
    with pytest.raises(fxplug.ArtifactError, match="'1' has hooks"):
        fxplug.save(gm, tmp_path / "layer")
    plain = fxplug.trace(nn.Sequential(nn.Linear(4, 4)), X)
    plain.register_forward_hook(lambda *_: None)
    with pytest.raises(fxplug.ArtifactError, match="the module has hooks"):
        fxplug.save(plain, tmp_path / "root")
    model[0].register_full_backward_pre_hook(lambda part, out: None)
    with pytest.raises(fxplug.TraceError, match=r"'0' \(Block\) has backward hooks"):
        fxplug.trace(model, X)
    fxplug.trace(model, X, leaf=["0"])


def test_a_part_of_a_pipeline_is_offloaded():
    case = pipelines.flux()
    want = case()
    case.pipe.transformer = fxplug.trace(case.pipe.transformer, *case.called_with())
    case.pipe.enable_model_cpu_offload(device="cpu")
    assert torch.equal(case(), want) and torch.equal(case(), want)
