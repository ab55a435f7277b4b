"""accelerate's offloading of parts, in each form of a module, and layers that no graph calls any more: right, or an error."""

from __future__ import annotations

import copy
import sys
import threading

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook, disk_offload
from accelerate.hooks import remove_hook_from_submodules
from torch import nn
from torch.nn.utils import parametrize, weight_norm

import fxplug
from fxplug.core.errors import SpecError
from fxplug.lowerings.linear import library

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
        self.mixed = nn.Parameter(torch.randn(16, 16))  # the graph reads it; torch's product of it is silent on the meta device

    def forward(self, x):
        return x + self.b(torch.relu(self.a(self.norm(x @ self.mixed))))


def traced():
    torch.manual_seed(0)
    return fxplug.trace(nn.Sequential(*(Block() for _ in range(3))).eval(), (X,))


def adapted(slots=0):
    new = fxplug.apply(traced(), fxplug.load_pass("lora", at="re:.*[ab]$", rank=2, **({"slots": slots} if slots else {})))
    for name, parameter in new.named_parameters():
        if name.startswith("lora.") and not slots:
            nn.init.normal_(parameter, std=0.3)
    if slots:
        new.adapters.load("ink", LAYERS)
        new.adapters.use("ink")
    return new


def layers():
    torch.manual_seed(1)
    found = {}
    for path, outer, inner in (row for n in range(3) for row in ((f"{n}.a", 32, 16), (f"{n}.b", 16, 32))):
        found |= {f"{path}.lora_A.weight": torch.randn(2, inner), f"{path}.lora_B.weight": torch.randn(outer, 2) * 0.3}
    return found


LAYERS = layers()
FORMS = {
    "traced": traced,
    "adapted": adapted,
    "slots": lambda: adapted(2),
    "fused": lambda: fxplug.lower(adapted(), fuse="fused"),
    "blas": lambda: fxplug.lower(adapted(), fuse="blas"),
    "fused slots": lambda: fxplug.lower(adapted(2), fuse="fused"),
    "folded": lambda: fxplug.lower(adapted(), merge=True, fuse="fused"),
    "live": lambda: fxplug.lower(adapted(2), merge="live", fuse="fused"),
    "outlined": lambda: fxplug.lower(adapted(), fuse=None, outline=["*"]),
    "both": lambda: fxplug.lower(adapted(), fuse="fused", outline=["*"]),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_accelerate_offloads_is_loaded_for_a_call(form, tmp_path):
    made = FORMS[form]()
    parts = ["", "1", "1.a", *(["lora"] if hasattr(made, "lora") else [])]
    with torch.no_grad():
        want = made(X)
        for n, (part, disk) in enumerate((part, disk) for part in parts for disk in (False, True)):
            module = copy.deepcopy(made)
            place = module.get_submodule(part)
            disk_offload(place, tmp_path / str(n), CPU) if disk else cpu_offload(place, CPU)
            assert all(p.is_meta for p in place.parameters())
            for _ in range(2):
                torch.testing.assert_close(module(X), want, rtol=1e-5, atol=1e-6, msg=f"'{part}' {disk}")
            remove_hook_from_submodules(module)
            torch.testing.assert_close(module(X), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["fused", "blas", "fused slots"])
def test_fused_layers_refuse_weights_without_values(form):
    for part in ("0.a", "0.b", "lora"):
        module = FORMS[form]()
        module.get_submodule(part).to("meta")
        with pytest.raises(SpecError, match=r"a fused layer reads a tensor \[\d+, \d+\] on the meta device.*input on cpu"):
            module(X)
    whole = copy.deepcopy(FORMS[form]()).to("meta")
    assert whole(X.to("meta")).is_meta


def test_operators_refuse_weights_without_values():
    x, down, up, bias = torch.randn(4, 16), torch.randn(2, 16), torch.randn(8, 2), torch.randn(8)
    weight = torch.empty(8, 16, device="meta")
    ops, scale = torch.ops.fxplug, torch.tensor(1.0)
    calls = {
        "product": lambda x, w: ops.product(x, w, bias.to(w.device)),
        "lora": lambda x, w: ops.lora(x, w, None, down.to(w.device), up.to(w.device), scale),
        "lora_and_hidden": lambda x, w: ops.lora_and_hidden(x, w, None, down.to(w.device), up.to(w.device), scale)[0],
        "bank": lambda x, w: ops.bank(x, w, None, down.to(w.device), up.to(w.device), torch.ones(4, 2), 1, 0),
    }
    for call in calls.values():
        assert call(x.to("meta"), weight).is_meta
        with pytest.raises(SpecError, match=r"a tensor \[8, 16\] on the meta device"):
            call(x, weight)
    assert calls["product"](x, weight.new_ones(8, 16, device="cpu")).shape == (4, 8) and library.ONEDNN is not None


@pytest.mark.parametrize("form", ["slots", "fused slots", "live"])
def test_adapters_are_not_changed_where_it_would_be_lost(form):
    module = FORMS[form]()
    want = module(X)
    cpu_offload(module, CPU)
    with pytest.raises(SpecError, match="the slots are on the meta device .*accelerate has offloaded it"):
        module.adapters.load("ink", {key: value * 2 for key, value in LAYERS.items()}, replace=True)
    remove_hook_from_submodules(module)
    module.adapters.use("ink")
    torch.testing.assert_close(module(X), want)


def test_a_part_of_live_weights_is_not_changed_where_it_would_be_lost():
    module = FORMS["live"]()
    cpu_offload(module[1], CPU)
    with pytest.raises(SpecError, match="on the meta device"):
        module.adapters.use(None)


READING = {  # passes whose graphs read the weights of layers that they do not call
    "dora": {}, "loha": {}, "lokr": {}, "bitfit": {}, "boft": {"block_size": 2}, "vera": {}, "lora": {}, "lora_weight": {},
    "weight_norm": {}, "oft": {"block_size": 4},
}  # fmt: skip


@pytest.mark.parametrize("name", READING)
def test_one_layer_is_offloaded(name):
    torch.manual_seed(3)
    made = fxplug.apply(traced(), fxplug.load_pass(name, at="re:.*[ab]$", **READING[name]))
    for parameter in made.parameters():
        parameter.data += torch.randn(parameter.shape) * 0.1
    want = made(X)
    layers = [path for path, layer in made.named_modules() if path and next(layer.parameters(recurse=False), None) is not None]
    for path in layers:
        module = copy.deepcopy(made)
        cpu_offload(module.get_submodule(path), CPU)
        for _ in range(2):
            torch.testing.assert_close(module(X), want, rtol=1e-5, atol=1e-6, msg=path)
    assert len(layers) > 9


def test_a_layer_that_was_replaced_is_offloaded():
    module = fxplug.apply(traced(), fxplug.load_pass("dora", at="1.a"))
    module(X)
    module[1].a = nn.Linear(16, 32)
    want = module(X)
    cpu_offload(module[1].a, CPU)
    assert torch.equal(module(X), want)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.mix = nn.Embedding(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.mix(self.table(x)) @ self.table.weight.mT


def test_a_layer_whose_weights_are_read_beside_its_call_is_not_offloaded_alone():
    tokens = torch.arange(6).view(1, 6)
    module = fxplug.trace(Twice().eval(), (tokens,))
    want = module(tokens)
    for part in ("", "table"):
        cpu_offload(module.get_submodule(part), CPU)
        with pytest.raises(SpecError, match="'table', which the graph calls and whose weights it reads elsewhere too"):
            module(tokens)  # without that, torch multiplies with memory that nobody has written
        remove_hook_from_submodules(module)
    cpu_offload_with_hook(module, CPU)
    assert torch.equal(module(tokens), want)


MADE = {
    "apply": lambda module: fxplug.apply(module, fxplug.load_pass("lora", at="1.a", rank=2)),
    "remove": lambda module: fxplug.remove(module, "lora"),
    "fold": lambda module: fxplug.lower(module, merge="fold"),
    "auto": lambda module: fxplug.lower(module, merge="auto"),
    "fused": lambda module: fxplug.lower(module, fuse="fused"),
    "features": lambda module: fxplug.features(module, ["1"]),
}


@pytest.mark.parametrize("step", MADE)
@pytest.mark.parametrize("part", ["", "1", "1.a"])
def test_what_is_offloaded_is_not_rewritten(step, part, tmp_path):
    module = adapted() if step in ("remove", "fold", "auto", "fused") else traced()
    want = MADE[step](copy.deepcopy(module))(X)
    cpu_offload(module.get_submodule(part), CPU)
    for call in (MADE[step], lambda module: fxplug.save(module, tmp_path / "folder")):
        with pytest.raises(SpecError, match=r"Hook has set a forward on a traced \w+, which no rewrite.*take it off before"):
            call(module)
    remove_hook_from_submodules(module)
    torch.testing.assert_close(MADE[step](module)(X), want)
    fxplug.save(module, tmp_path / "folder")


COPIED = {**MADE, "deepcopy": copy.deepcopy, "copy": copy.copy}


@pytest.mark.parametrize("step", COPIED)
def test_the_hook_of_a_whole_module_is_not_that_of_what_is_made_of_it(step):
    module = adapted() if step in ("remove", "fold", "auto", "fused") else traced()
    want, before = COPIED[step](copy.deepcopy(module))(X), module(X)
    cpu_offload_with_hook(module, CPU)
    made = COPIED[step](module)
    cpu_offload_with_hook(made, CPU)  # which takes an older hook's forward for the module's, if there is one
    for one in (made, module):
        torch.testing.assert_close(one(X), want if one is made else before)
        remove_hook_from_submodules(one)
        torch.testing.assert_close(one(X), want if one is made else before)


@pytest.mark.parametrize("offload", [cpu_offload, cpu_offload_with_hook])
def test_hooks_that_were_taken_off_leave_nothing_behind(offload):
    module = traced()
    want = module(X)
    offload(module, CPU)
    for hooked in (True, False):
        output = module.graph.output_node()
        with module.graph.inserting_before(output):
            double = module.graph.call_function(torch.mul, (output.args[0], 2))
        if hooked:
            with pytest.raises(SpecError, match="has set a forward on a traced Sequential"):
                module.recompile()
            module.graph.erase_node(double)
            remove_hook_from_submodules(module)
        else:
            output.args = (double,)
            module.recompile()
    assert torch.equal(module(X), want * 2)
    new = fxplug.apply(module, fxplug.load_pass("lora", at="1.a", rank=2))
    new[1].norm.weight = nn.Parameter(torch.zeros(16))
    assert not torch.allclose(new(X), want * 2)  # the new layer's weight, and not the old one's


HOOKS = {
    "forward": lambda layer: layer.register_forward_hook(lambda part, args, out: out * 2),
    "forward pre": lambda layer: layer.register_forward_pre_hook(lambda part, args: args),
    "backward": lambda layer: layer.register_full_backward_hook(lambda *_: None),
    "backward pre": lambda layer: layer.register_full_backward_pre_hook(lambda *_: None),
    "weight norm": lambda layer: weight_norm(layer),
}


@pytest.mark.parametrize("form", FORMS)
def test_hooks_act_or_are_an_error(form):
    module = FORMS[form]()
    want, refused = module(X), 0
    for path, layer in list(module.named_modules()):
        if type(layer).__name__ not in ("Linear", "Lora", "LayerNorm"):
            continue
        try:
            handle = HOOKS["forward"](layer)
        except SpecError as error:
            assert f"a hook on '{path}' has no effect: no graph calls this layer any more" in str(error)
            refused += 1
            continue
        assert form == "slots" and ".Lora." in path or not torch.equal(module(X), want), path
        handle.remove()
    assert bool(refused) == (form in ("fused", "blas", "fused slots", "folded", "live", "both"))


@pytest.mark.parametrize("form", ["fused", "both"])
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_what_no_graph_calls_is_not_hooked(form, copied, hook):
    module = FORMS[form]()
    source, want = module.meta["source"], module(X)
    again = copy.deepcopy(module) if copied else module
    with pytest.raises(SpecError, match=r"a hook on '1\.a' has no effect.*hook it before that"):
        HOOKS[hook](again[1].a)
    if hook != "weight norm":  # which has taken the weight apart by then
        assert torch.equal(again(X), want)
    HOOKS[hook](source[1].a)  # those of the source go on to work


@pytest.mark.parametrize("kind", ["dora", "vera", "ia3"])
def test_hooks_beside_a_pass_that_reads_weights(kind):
    plain = traced()
    new = fxplug.apply(plain, fxplug.load_pass(kind, at="1.a"))
    for module in (new, fxplug.remove(new, kind)):  # which leaves the layer's code in the graph
        calls = any(node.target == "1.a" for node in module.graph.find_nodes(op="call_module"))
        assert calls == (kind != "dora")
        if calls:
            HOOKS["forward"](module[1].a)
            assert not torch.equal(module(X), plain(X))
        else:
            with pytest.raises(SpecError, match=r"a hook on '1\.a' has no effect"):
                HOOKS["forward"](module[1].a)
    HOOKS["forward"](plain[1].a)


def test_what_reads_weights_reads_them_anew():
    module = FORMS["fused"]()
    want = module(X)
    module[1].a.weight = nn.Parameter(module[1].a.weight * 2)
    assert not torch.allclose(module(X), want)
    parametrize.register_parametrization(module[2].a, "weight", nn.Identity())
    again = copy.deepcopy(module)
    assert torch.equal(again(X), module(X))


def test_threads_rewrite_a_module_whose_hooks_were_taken_off():
    faults = []

    def rewrite(module):
        try:
            fxplug.features(module, ["1"])
        except Exception as error:
            faults.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(8):
            module = traced()
            cpu_offload(module, CPU)
            remove_hook_from_submodules(module)
            threads = [threading.Thread(target=rewrite, args=(module,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(before)
    assert faults == []
