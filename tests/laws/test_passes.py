"""The laws that every file in passes/ is held to. A new pass is tested by being there.

A pass whose parameters have defaults needs no entry in CASES: it is applied to the ViT as it is.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from functools import cache

import pytest
import small
import torch
from torch import nn

import fxplug
from fxplug.core.ir.containers import list_leaves
from fxplug.core.spec.pass_file import open_pass
from fxplug.core.verifier import _one_graph

TOME_ON_VIT = {"at": r"re:(?P<site>(?P<block>blocks\.\d+)\.attn)$", "grid": ":in.x", "max_downsample": 16, "prefix": 1}
CASES = {
    "head": [("vit", {"classes": 10})],  # as many as it had, as the losses compare with the old result
    "ia3": [("vit", {"at": "blocks.*.attn.qkv", "feedforward": "blocks.*.mlp.fc2"})],
    "lora": [
        ("vit", {"at": "blocks.{i}.attn.qkv", "rank": 2}),
        ("unet", {"at": ["re:mid_block.*attn1.to_[qk]$", "conv_in", "conv_out"], "rank": 2}),
        ("layers", {"rank": 2, "alpha": 3}),
        ("lite", {"at": ["conv_stem", "blocks.1.0.conv_dw", "classifier"], "rank": 2}),
        ("layers", {"rank": 2, "alpha": 3, "bias": True, "rslora": True}),
    ],
    "lora_weight": [
        ("vit", {"at": "blocks.*.attn.*", "rank": 2}),
        ("layers", {"rank": 2, "alpha": 3}),
    ],
    "dora": [
        ("vit", {"at": "blocks.*.attn.*", "rank": 2}),
        ("layers", {"rank": 2, "alpha": 3}),
    ],
    "vera": [("vit", {"at": "blocks.*.mlp.*", "rank": 2}), ("layers", {"at": "out", "rank": 2})],
    "loha": [
        ("vit", {"at": "blocks.*.attn.*", "rank": 2}),
        ("layers", {"rank": 2, "tucker": True}),
    ],
    "lokr": [
        ("vit", {"at": "blocks.*.attn.*", "rank": 2, "factor": 4, "decompose_both": True}),
        ("layers", {"rank": 1, "tucker": True}),
    ],
    "oft": [
        ("vit", {}),
        ("layers", {"at": ["re:conv[12]", "grouped", "out"], "block_size": 2, "terms": 0}),
    ],
    "boft": [
        ("vit", {"at": "blocks.*.attn.*", "levels": 2}),
        ("layers", {"at": ["re:conv[12]", "grouped", "out"], "block_size": 2}),
    ],
    "bitfit": [
        ("vit", {}),
        ("layers", {}),
    ],
    "weight_norm": [
        ("vit", {"at": "blocks.*.mlp.*"}),
        ("layers", {"dim": 1}),
    ],
    "spectral_norm": [
        ("vit", {"at": "blocks.*.mlp.*"}),
        ("layers", {}),
    ],
    "ssf": [
        ("vit", {}),
        ("layers", {"at": ["conv*", "grouped", "out"]}),
    ],
    "bottleneck": [
        ("vit", {"bottleneck": 4}),
    ],
    "parallel_adapter": [
        ("vit", {"bottleneck": 4}),
        ("unet", {"at": ["**.ff", "mid_block.resnets.0.conv1"], "bottleneck": 4}),
    ],
    "vpt": [
        ("vit", {}),
        ("vit", {"from": "blocks.*", "until": "blocks.*", "tokens": 3}),
    ],
    "controlnet": [
        ("unet", {"options": {"conditioning_embedding_out_channels": [4, 4, 4, 8]}}),
    ],
    "t2i_adapter": [
        ("unet", {"network": "small:features"}),
    ],
    "t2i_adapter_xl": [
        ("unet_xl", {"network": "small:features", "options": {"adapter_type": "full_adapter_xl"}}),
    ],
    "ip_adapter": [
        ("unet", {"image": ["n", 4, 8]}),
    ],
    "freeu": [
        ("unet", {}),
    ],
    "deepcache": [
        ("unet", {}),
    ],
    "tome": [
        ("unet", {}),
        ("vit", TOME_ON_VIT),
    ],
    "replace": [
        ("vit", {"module": "GELU", "with": "PReLU"}),
        ("unet", {"at": "mid_block.**", "module": "SiLU", "with": "PReLU"}),
        ("lite", {"at": "blocks.0.0.bn1.act", "module": "ReLU6", "with": "PReLU"}),
    ],
    "scale": [
        ("vit", {"at": "blocks.*.mlp"}),
        ("unet", {"at": "mid_block.**.conv1"}),
    ],
    "skip": [
        ("vit", {"from": "blocks.0", "to": "blocks.1.mlp"}),
        ("vit", {"from": "blocks.0.mlp", "to": "blocks.1:in", "place": "before"}),
        ("unet", {"from": "conv_in", "to": "up_blocks.1.resnets.0.conv1"}),
    ],
}
# Both on one ViT, where their places meet. A pass without an entry takes its defaults.
QUICK_ON_A_UNET = ("t2i_adapter", "freeu")  # a network, and an edit of what is there; the rest is slow
LIKE_OTHERS = [f"hcp/{name}" for name in ("half_lora", "loha", "pair_before", "param", "patch_after", "patch_before", "single")]
NO_PARAMETERS = {"spectral_norm", "freeu", "tome", "deepcache", "first_block_cache", "teacache", "ditfastattn"}

# whose blocks or networks are other libraries' classes, or plugins
FOREIGN = ("controlnet", "t2i_adapter", "hcp/multi", "hcp/pa", "hcp/single")

# what is expected of each, so that no pass comes round the comparison by calling itself loud
LOUD = {"vpt", "freeu", "tome", "replace", "spectral_norm"}
NEUTRAL = set(
    "lora lora_weight dora loha lokr oft boft bitfit weight_norm ssf bottleneck parallel_adapter scale skip ia3".split()
)


@dataclass(frozen=True)
class Case:
    """A pass applied to a model."""

    name: str
    base: small.Traced
    made: fxplug.Pass | None  # None: several
    new: nn.Module

    @property
    def added(self):
        names = tuple(f"{entry['name']}." for entry in self.new.meta["passes"])
        return {k: p for k, p in self.new.named_parameters() if k.startswith(names)}

    @property
    def call(self):
        return self.base.args, {**self.base.kwargs, **needed(self.new)}


def needed(module):
    """The inputs that a module has to be given since a pass was applied, by name."""
    graph = getattr(module, "graph", None)
    added = [n for n in graph.nodes if n.op == "placeholder" and "pass" in n.meta and n.args == (None,)] if graph else []
    random = torch.Generator().manual_seed(9)
    return {n.target: torch.rand(n.meta["shape"], generator=random) for n in added}


def rows():
    for name in small.PASSES:
        for index, (model, _) in enumerate(cases_of(name)):
            first = index == 0 and model not in ("lite", "layers") and name not in LIKE_OTHERS
            quick = name in QUICK_ON_A_UNET if model.startswith("unet") else first or (name, model) == ("lora", "layers")
            marks = () if quick else pytest.mark.slow
            yield pytest.param((name, index), id=f"{name}-{model}" + f"-{index}" * (index > 0), marks=marks)


def cases_of(name):
    example = open_pass(name).source.data.get("example") or {}
    return CASES.get(name, [("vit", example.get("with") or {})])


@cache
def made_once(name, index):
    model, params = cases_of(name)[index]
    base, made = getattr(small, model)(), fxplug.load_pass(name, **params)
    torch.manual_seed(1)
    return Case(name, base, made, fxplug.apply(base.gm, made))


@pytest.fixture(params=list(rows()))
def case(request):
    """A case to look at: tests that train it, or change its mode, take `fresh`."""
    return made_once(*request.param)


@pytest.fixture
def fresh(case):
    torch.manual_seed(1)
    return Case(case.name, case.base, case.made, fxplug.apply(case.base.gm, case.made))


def run(module, base, seed=3):
    torch.manual_seed(seed)
    with torch.no_grad():
        return list_leaves(module(*base.args, **base.kwargs, **needed(module)))


def same(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def steps(case, optimizer, count):
    """Train what the pass added; the losses on the way."""
    torch.manual_seed(5)
    goal = [t + 0.1 * torch.randn_like(t) for t in run(case.base.gm, case.base)]
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        out = list_leaves(case.new(*case.call[0], **case.call[1]))
        loss = sum((a - b).square().mean() for a, b in zip(out, goal, strict=True))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    case.base.model.zero_grad()
    return losses


@pytest.fixture(params=[row for row in rows() if row.values[0][0] not in NO_PARAMETERS])
def learner(request):
    """A case of a pass that adds parameters, to train."""
    torch.manual_seed(1)
    case = made_once(*request.param)
    return Case(case.name, case.base, case.made, fxplug.apply(case.base.gm, case.made))


def test_which_passes_add_no_parameters(case):
    assert (not case.added) == (case.name in NO_PARAMETERS)


def test_the_edit_is_the_one_we_read(case, golden, request):
    text = fxplug.diff(case.base.gm, case.new)
    golden(request.node.callspec.id.replace("/", "-"), re.sub("^@@.*", "@@", text, flags=re.M))  # without line numbers


def test_its_sites_can_be_read(case):
    sites = fxplug.find(case.base.gm, case.made)
    assert sites
    for site in sites:
        assert (site.node or site.path) in str(site) and site.classes[0] in str(site) and "->" in str(site)


def test_a_neutral_pass_changes_no_output_and_another_does(case):
    assert same(run(case.new, case.base), run(case.base.gm, case.base)) == case.new.meta["passes"][-1]["neutral"]


def test_both_modes_are_rewritten(case):
    assert set(case.new.graphs) == set(case.base.gm.graphs)
    for graph in case.new.graphs.values():
        assert sum("pass" in n.meta for n in graph.nodes) >= len(case.new.meta["passes"][-1]["sites"])


def test_a_neutral_pass_changes_no_output_in_training_and_another_does(fresh):
    buffers = {k: b.clone() for k, b in fresh.base.gm.named_buffers()}
    results = []
    for module in (fresh.base.gm, fresh.new):
        for k, b in fresh.base.gm.named_buffers():
            b.copy_(buffers[k])  # running statistics are shared
        results.append(run(module.train(), fresh.base))
        module.eval()
    for k, b in fresh.base.gm.named_buffers():
        b.copy_(buffers[k])
    assert same(*results) == fresh.new.meta["passes"][-1]["neutral"]


def test_the_given_graph_is_not_touched(case):
    base = case.base
    before, out, keys = fxplug.show(base.gm), run(base.gm, base), list(base.gm.state_dict())
    fxplug.apply(base.gm, case.made)
    assert fxplug.show(base.gm) == before and same(run(base.gm, base), out)
    assert list(base.gm.state_dict()) == keys
    assert same(out, run(base.model, base))


@pytest.mark.slow
def test_every_new_parameter_moves_the_loss_falls_the_base_stays_and_what_is_learned_round_trips(learner):
    base = dict(learner.base.model.state_dict(keep_vars=True))
    ours = dict(learner.new.state_dict(keep_vars=True))
    assert all(ours[k] is v for k, v in base.items())
    assert all(k.startswith(f"{learner.made.name}.") for k in ours if k not in base)
    before = {k: v.detach().clone() for k, v in base.items()}
    start = {k: p.detach().clone() for k, p in learner.added.items()}
    losses = steps(learner, torch.optim.Adam(learner.added.values(), 1e-3), 8)
    assert all(torch.equal(before[k], v) for k, v in base.items())
    assert losses[-1] < losses[0]
    assert [k for k, p in learner.added.items() if torch.equal(p, start[k])] == []
    with torch.no_grad():
        for p in learner.added.values():
            p.add_(0.1 * torch.randn_like(p))
    weights = {k: v for k, v in learner.new.state_dict().items() if k.startswith(f"{learner.made.name}.")}
    again = fxplug.apply(learner.base.gm, learner.made)
    missing, unexpected = again.load_state_dict(weights, strict=False)
    assert not unexpected and not [k for k in missing if k.startswith(f"{learner.made.name}.")]
    assert same(run(again, learner.base), run(learner.new, learner.base))


@pytest.mark.slow
def test_what_is_learned_is_saved_alone_and_loaded_into_the_pass_or_into_what_the_file_says(learner, tmp_path):
    with torch.no_grad():
        for p in learner.added.values():
            p.add_(0.1 * torch.randn_like(p))
    saved = fxplug.save_adapter(learner.new, tmp_path / "own.safetensors", as_="fxplug")
    assert saved.path.stat().st_size < 2_000_000 and not saved.left_out
    again = fxplug.apply(learner.base.gm, learner.made)
    fxplug.load_adapter(again, saved.path)
    assert same(run(again, learner.base), run(learner.new, learner.base))
    try:
        made = fxplug.pass_for(saved.path, learner.base.gm, slots=0)
    except fxplug.ArtifactError as error:
        assert learner.name.startswith(FOREIGN) and "is not one of fxplug's own" in str(error)
        return
    again = fxplug.apply(learner.base.gm, made)
    fxplug.load_adapter(again, saved.path)
    assert not learner.name.startswith(FOREIGN)  # of an update of low rank it may be another pass that adds the same
    torch.testing.assert_close(run(again, learner.base), run(learner.new, learner.base), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_it_is_taken_out_again_also_of_a_loaded_module(case, tmp_path):
    if any(site["place"] == "replace" for site in case.new.meta["passes"][-1]["sites"]):
        with pytest.raises(fxplug.SpecError, match="has replaced '.*', which is no longer in the graph"):
            fxplug.remove(case.new, case.made.name)
        return
    opened = any(site["place"] == "param" for site in case.new.meta["passes"][-1]["sites"])
    for module in (case.new, fxplug.load(fxplug.save(case.new, tmp_path / "it"))):
        again = fxplug.remove(module, case.made.name)
        assert list(again.state_dict()) == list(case.base.gm.state_dict()) and again.meta["passes"] == []
        assert opened or fxplug.diff(case.base.gm, again).strip() == ""
        torch.testing.assert_close(
            run(again, case.base), run(case.base.gm, case.base), **({} if opened else {"rtol": 0, "atol": 0})
        )
        assert fxplug.apply(again, case.made).meta["passes"][0]["name"] == case.made.name


@pytest.mark.slow
def test_verify_finds_nothing(case):
    report = fxplug.verify(case.base.gm, case.new, *case.call, compile=False)
    status = {c.name: c.status for c in report.checks}
    reason = next(c.detail for c in report.checks if c.name == "neutral")
    neutral = "ok" if case.new.meta["passes"][-1]["neutral"] else "skipped"
    able = dict.fromkeys(("lint", "base", "shapes", "saved", "exported"), "ok")
    assert status == {**able, "neutral": neutral}
    name = case.made.name
    assert reason.startswith({"ok": f"outputs are torch.equal ({name})", "skipped": f"{name} changes the output"}[neutral])
    assert not (case.name in LOUD and neutral == "ok") and not (case.name in NEUTRAL and neutral != "ok")


@cache
def together(model, *without, on=None):
    """Every pass that has a case on a model, on as few copies of it as they fit on: capture and export take seconds each."""
    base, groups = getattr(small, on or model)(), []
    for name, index in (row.values[0] for row in rows()):
        if cases_of(name)[index][0] != model or name in without:
            continue
        made = fxplug.load_pass(name, name=name.replace("/", "_") + str(index), **cases_of(name)[index][1])
        for number, (names, gm) in enumerate(groups):
            try:
                groups[number] = [*names, made.name], fxplug.apply(gm, made)
                break
            except fxplug.FxplugError:  # they do not go together
                continue
        else:
            groups.append(([made.name], fxplug.apply(base.gm, made)))
    return [Case(" ".join(names), base, None, gm) for names, gm in groups]


def captured(case):
    assert "captures one graph" in _one_graph(case.base.gm, case.new, case.call), case.name


@cache
def all_on_a_vit():
    """More tokens are no grid, which others need: the passes that add some stand alone."""
    base, groups = small.plain_vit(), together("vit", "vpt", on="plain_vit")
    assert len(groups) < 4
    vpt = [fxplug.load_pass("vpt", name=f"vpt{index}", **params) for index, (_, params) in enumerate(CASES["vpt"])]
    return [*groups, Case("vpt", base, None, fxplug.apply(base.gm, *vpt))]


@pytest.mark.slow
def test_one_graph_is_captured_in_both_modes():
    captured(made_once("scale", 0))


@pytest.mark.slow
def test_one_graph_is_captured_of_all_passes():
    for case in [*all_on_a_vit(), *together("unet"), *together("unet_xl"), *together("lite")]:
        captured(case)


@pytest.mark.slow
def test_one_graph_is_captured_of_layers_of_each_kind():
    for case in together("layers"):
        captured(case)


@pytest.mark.slow
def test_layers_of_each_kind_export():
    for case in together("layers"):
        exports(case)


@pytest.mark.slow
def test_all_passes_export():
    groups = together("unet")
    assert len(groups) < 5
    for case in [*all_on_a_vit(), *groups, *together("unet_xl"), *together("lite")]:
        exports(case)


def exports(case):
    bound = inspect.signature(case.new.forward).bind(*case.call[0], **case.call[1])
    bound.apply_defaults()  # torch.export reads the keyword arguments of a GraphModule by position
    program = torch.export.export(case.new, bound.args, bound.kwargs, strict=False)
    with torch.no_grad():
        ours = list_leaves(program.module(check_guards=False)(*bound.args, **bound.kwargs))
    for a, b in zip(ours, run(case.new, case.base), strict=True):
        torch.testing.assert_close(a, b)
    if case.added:
        assert set(case.added) <= {k for k, _ in program.named_parameters()}


def test_applying_it_twice_is_refused_but_under_another_name(case):
    with pytest.raises(fxplug.ClashError, match=f"'{case.made.name}' is already applied here"):
        fxplug.apply(case.new, case.made)
    if case.new.meta["passes"][-1]["neutral"]:
        second = fxplug.load_pass(case.made, name="second")
        both = fxplug.apply(case.new, second)
        assert same(run(both, case.base), run(case.new, case.base))
        assert [entry["name"] for entry in both.meta["passes"]] == [case.made.name, "second"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A base that was saved, loaded again."""

    @cache
    def again(base):
        folder = tmp_path_factory.mktemp("base")
        fxplug.save(base, folder / "base")
        return fxplug.load(folder / "base")

    return again


def test_it_applies_to_a_module_loaded_from_an_artifact(case, loaded):
    loaded = loaded(case.base.gm)
    new = fxplug.apply(loaded, case.made)
    assert fxplug.diff(loaded, new).replace("Record(", "UNet2DConditionOutput(") == fxplug.diff(case.base.gm, case.new)
    new.load_state_dict(case.new.state_dict())
    assert same(run(new, case.base), run(case.new, case.base))
