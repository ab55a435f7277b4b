"""What a plugin may keep on itself while it is traced, and what it must give back."""

from __future__ import annotations

import copy

import pytest
import small
import torch
from hcp_guide import LoraBlock, PReLUPatch, Skip
from torch import nn

import fxplug
from fxplug.compat.hcp import MultiPluginBlock, PatchPluginBlock, PatchPluginContainer, PluginGroup, SinglePluginBlock, drivers
from fxplug.compat.structures import describe
from fxplug.core.errors import SpecError, TraceError


class Plugin(SinglePluginBlock):
    """Runs a function of (plugin, x, y) as its forward."""

    def __init__(self, function, **attributes):
        super().__init__("plugin", nn.Identity())
        self.function = function
        self.inner = Inner()
        self.__dict__.update(attributes)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, fea_in, fea_out):
        return self.function(self, fea_in[0], fea_out)


class Inner(nn.Module):
    calls = 0

    def forward(self, x):
        return x * 2


def traced(function, **attributes):
    plugin = Plugin(function, **attributes)
    host = nn.Linear(3, 3)
    before = {k: v for k, v in vars(plugin).items() if not k.startswith("_")}
    contents = {k: list(v) for k, v in before.items() if isinstance(v, (list, dict, set))}
    driver = drivers.SinglePlugin(plugin, host)
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    try:
        gm = fxplug.trace(driver, ((x,), y))
    finally:
        after = {k: v for k, v in vars(plugin).items() if not k.startswith("_")}
        assert after.keys() == before.keys() and all(after[k] is before[k] for k in before)
        assert {k: list(after[k]) for k in contents} == contents
        assert type(plugin) is Plugin and type(plugin.inner) is Inner and vars(plugin.inner).get("calls") is None
    return gm((x,), y), x, y


def keeps(self, x, y):
    self.seen = x
    self.found = {"x": self.seen}
    self.found["y"] = y
    return self.found["x"] + self.found["y"]


def writes_members(self, x, y):
    self.slots[0], self.slots[1] = x, y
    self.table["x"] = x
    return sum(self.slots) + self.table["x"] - x


def fills_and_clears(self, x, y):
    self.stack.append(x)
    self.stack.append(y)
    a, b = self.stack.pop(), self.stack.pop()
    return a + b


def counts_and_resets(self, x, y):
    self.count += 1
    self.count = 0
    return x + y


def refills(self, x, y):
    self.slots.clear()
    self.slots.append(x)
    self.slots.append(y)
    return self.slots[0] + self.slots[1]


def in_place_buffer(self, x, y):
    self.total.add_(1)
    return x + y


KEPT = {
    "attributes of this call": (keeps, {}),
    "members of a list and a dict that are written first": (writes_members, {"slots": [None, None], "table": {}}),
    "a list that is empty again": (fills_and_clears, {"stack": []}),
    "a counter that is back where it was": (counts_and_resets, {"count": 0}),
    "a list that is filled anew": (refills, {"slots": [None, None]}),
    "a buffer that is changed in place": (in_place_buffer, {}),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_one_call_keeps_for_itself_is_plain_dataflow(case):
    function, attributes = KEPT[case]
    result, x, y = traced(function, **attributes)
    assert torch.allclose(result, x + y, rtol=0, atol=1e-6)


def counts(self, x, y):
    self.count += 1
    return x * self.count + y


def counts_by_class(self, x, y):
    self.inner.calls += 1
    return x + y


def remembers(self, x, y):
    if not hasattr(self, "cache"):
        self.cache = x
    return self.cache + y


def remembers_or(self, x, y):
    self.cache = x if self.cache is None else self.cache
    return self.cache + y


def grows(self, x, y):
    self.history.append(x)
    return y


def last_member(self, x, y):
    old = self.slots[0]
    self.slots[0] = x
    return y if old is None else y + old


def asks_the_table(self, x, y):
    if "x" not in self.table:
        self.table["x"] = x
    return self.table["x"] + y


def adds_to_a_set(self, x, y):
    self.names.add("x")
    return x + y


def nests(self, x, y):
    self.slots[0].append(x)
    return y


def assigns_a_buffer(self, x, y):
    self.total = self.total + 1
    return x + y


def makes_a_module(self, x, y):
    self.late = nn.Linear(3, 3)
    return self.late(x)


STATE = {
    "self.count": (counts, {"count": 0}),
    "plugin.inner: the attribute 'self.calls": (counts_by_class, {}),
    "self.cache' is read": (remembers, {}),
    "self.cache": (remembers_or, {"cache": None}),
    "self.history": (grows, {"history": []}),
    "self.slots[0]' is read": (last_member, {"slots": [None]}),
    "self.table['x']": (asks_the_table, {"table": {}}),
    "self.names": (adds_to_a_set, {"names": set()}),
    "self.slots": (nests, {"slots": [[]]}),
    "self.total": (assigns_a_buffer, {}),
    "self.late": (makes_a_module, {}),
}


@pytest.mark.parametrize("case", STATE)
def test_what_lasts_from_call_to_call_is_an_error(case):
    function, attributes = STATE[case]
    with pytest.raises(TraceError) as error:
        traced(function, **attributes)
    text = str(error.value)
    # weights that are made in forward are refused where they are made, before what lasts is asked for
    made = case == "self.late" and "plugin" in text and "keep that module whole" in text
    assert case in text and (made or "inputs of the pass" in text and "register_buffer" in text)


def test_a_plain_tensor_that_is_changed_in_place_is_refused():
    def sums(self, x, y):
        self.sum += 1.0
        return x + self.sum

    with pytest.raises(TraceError, match="self.sum"):
        traced(sums, sum=torch.zeros(3))


def test_results_have_the_structure_of_what_they_replace():
    assert describe((torch.zeros(1), [None, {"a": 3}])) == "(tensor, [None, {a: 3}])"
    with pytest.raises(TraceError, match=r"returns \(tensor, tensor\), and its layer's result is tensor"):
        traced(lambda self, x, y: (x, y))
    with pytest.raises(TraceError, match=r"returns \[tensor\], and its layer's result is tensor"):
        traced(lambda self, x, y: [y])
    result, _, y = traced(lambda self, x, y: None)
    assert torch.equal(result, y)


def test_a_pair_that_wants_a_result_before_its_layer_is_told_so():
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    skip = Skip("skip", {"layer": a, "pre_hook": False}, {"layer": b, "pre_hook": True})
    x, y, z = (torch.randn(2, 3) for _ in range(3))
    with pytest.raises(TraceError, match=r"fea_out is None.*drop the prefix"):
        fxplug.trace(drivers.PairPlugin(skip, b, a, to_pre=True), ((x,), y, (z,)))
    skip.to_layer_hook = lambda host, fea_in, fea_out: fea_in[0] + skip.layer(skip.feat_from[0])
    out = fxplug.trace(drivers.PairPlugin(skip, b, a, to_pre=True), ((x,), y, (z,)))((x,), y, (z,))
    assert type(out) is tuple and torch.equal(out[0], z + skip.layer(x))
    skip.from_layer_hook = lambda host, fea_in, fea_out: fea_out
    with pytest.raises(TraceError, match="from_layer_hook returns tensor"):
        fxplug.trace(drivers.PairPlugin(skip, b, a), ((x,), y, (z,), z))


class Sum(MultiPluginBlock):
    """Uses the hooks of the base class as they are."""

    def forward(self, feat):
        return [sum(x for (x,) in feat), feat[0][0]]


def test_the_default_hooks_of_a_multi_plugin():
    hosts = [nn.Identity() for _ in range(4)]
    layers = [{"layer": host, "pre_hook": index < 2} for index, host in enumerate(hosts)]
    plugin = Sum("sum", layers[:2], layers[2:], host_model=nn.Sequential(*hosts))
    names = [("0", True), ("1", True), ("2", False), ("3", False)]
    driver = drivers.MultiPlugin(plugin, names, hosts, 2, [0, 1, 2, 3])
    a, b, c, d = (torch.randn(2) for _ in range(4))
    values = ((a,), (b,), (c,), c, (d,), d)
    gm = fxplug.trace(driver, values)
    assert all(torch.equal(p, q) for p, q in zip(gm(*values), (a + b + c, a + d), strict=True))
    assert plugin.feat_from == [None, None] and plugin.feat_to is None
    with pytest.raises(SpecError, match="host_model"):
        Sum("sum", layers[:2], layers[2:])


def test_inputs_are_fed_before_the_hooks():
    class Fed(LoraBlock):
        def feed_input_data(self, data):
            self.cond = data["cond"]

        def forward(self, fea_in, fea_out):
            return fea_out * self.cond

    x, y, cond = torch.randn(2, 3), torch.randn(2, 4), torch.randn(2, 4)
    driver = drivers.SinglePlugin(Fed("fed", nn.Linear(3, 4), 2), nn.Linear(3, 4), feeds=["cond"])
    gm = fxplug.trace(driver, ((x,), y, cond))
    assert torch.equal(gm((x,), y, cond), y * cond)
    with pytest.raises(TraceError, match=r"asks for 'cond', which is not an input of the pass \(did you mean 'conds'"):
        fxplug.trace(drivers.SinglePlugin(driver.plugin, nn.Linear(3, 4), feeds=["conds"]), ((x,), y, cond))
    plain = LoraBlock("plain", nn.Linear(3, 4), 2)
    with pytest.raises(TraceError, match="takes no inputs"):
        fxplug.trace(drivers.SinglePlugin(plain, nn.Linear(3, 4), feeds=["cond"]), ((x,), y, cond))


def test_a_plugin_is_made_with_what_it_takes():
    with pytest.raises(SpecError, match="is part of a graph"):
        LoraBlock("a", nn.Linear(2, 2), 1).remove()
    host, root = nn.SiLU(), nn.Sequential()
    patch = PReLUPatch("a", host, parent_block=root, host_name="act")
    second = PReLUPatch("b", patch.container(), parent_block=root, host_name="act")
    assert second.container() is patch.container() and patch.container().plugin_names == ["a", "b"]
    assert second.host() is host and list(dict(patch.container().named_children())) == ["a", "b"]
    with pytest.raises(SpecError, match="two plugins are named 'a'"):
        PReLUPatch("a", patch.container(), parent_block=root, host_name="act")
    assert vars(host).get("a") is None and not root._modules


def test_wrap_model_as_the_base_classes_have_it():
    net = nn.ModuleDict({"a": nn.Linear(2, 2), "skip_me": nn.Linear(2, 2), "act": nn.SiLU()})
    made = LoraBlock.wrap_model("x", net, rank=1)
    assert list(made) == ["a", "skip_me"] and isinstance(made["a"], LoraBlock)
    narrowed = super(LoraBlock, LoraBlock).wrap_model("x", net, exclude_key="skip", rank=1)
    assert list(narrowed) == ["a"]
    assert list(LoraBlock.wrap_model("x", net["a"], rank=1)) == [""]
    patched = PReLUPatch.wrap_model("x", net, parent_block=None, host_name=None)
    assert list(patched) == ["act"] and patched["act"].host_name == "act" and patched["act"].parent_block() is net
    assert isinstance(patched["act"].container(), PatchPluginContainer)


class ByParent(PatchPluginContainer):
    """Reads the block that its module is in."""

    def forward(self, *args, **kwargs):
        return self._host(*args, **kwargs) * len(self.parent_block()._modules)


class ReadsParent(PatchPluginBlock):
    container_cls = ByParent


@pytest.mark.parametrize("path, count", [("a", 2), ("b.a", 3), ("b.b", 3), ("b.c.a", 1), ("b", 2)])
def test_a_container_knows_the_block_that_it_is_in(path, count):
    inner = nn.ModuleDict({"a": nn.Linear(4, 4)})
    body = small.net(lambda self, x: self.c["a"](self.b(self.a(x))), a=nn.Linear(4, 4), b=nn.Tanh(), c=inner)
    net = small.net(lambda self, x: self.b(self.a(x)), a=nn.Linear(4, 4), b=body).eval()
    x, own = torch.randn(2, 4), net.get_submodule(path)
    gm = fxplug.trace(net, x, leaf=["b"] if path == "b" else [])
    new = fxplug.apply(gm, fxplug.load_pass("hcp/patch", name="p", plugin=ReadsParent, layers=path))
    own.register_forward_hook(lambda module, args, out: out * count)
    assert torch.equal(new(x), net(x))


def test_a_group_has_the_weights_of_its_plugins_as_a_file_names_them():
    made = {path: LoraBlock(path[-1], nn.Linear(2, 2), 1) for path in ("a", "b.c")}
    group = PluginGroup(made)
    own = [f"{path}.___.{key}" for path, plugin in made.items() for key in plugin.state_dict()]
    assert list(group.state_dict()) == own and group.plugin_name == "lora_block_a" and not group.empty()
    with pytest.raises(SpecError, match="plugin 'lora_block_a' is part of a graph and cannot be removed"):
        group.remove()
    assert PluginGroup({}).state_dict() == {} and PluginGroup({}).plugin_name is None


def test_a_group_has_the_weights_that_a_model_has_of_it():
    net = nn.ModuleDict({"a": nn.Linear(2, 2)})
    group = PluginGroup(LoraBlock.wrap_model("x", net, rank=1))
    net["a"].add_module(group.plugin_name, group["a"])
    average = copy.deepcopy(net)
    with torch.no_grad():
        [parameter.add_(1) for parameter in average.parameters()]
    own, found = group.state_dict(), group.state_dict(model=average)
    trained = [f"a.___.{key}" for key, _ in group["a"].named_parameters()]
    assert list(found) == list(own) and trained and all(torch.equal(found[key], own[key] + 1) for key in trained)
    traced = fxplug.trace(nn.Sequential(nn.Linear(2, 2)), torch.randn(1, 2))
    with pytest.raises(SpecError, match=r"no weight 'a\.lora_block_x\.\S+' of plugin 'lora_block_x'.*save_checkpoint"):
        group.state_dict(traced)
