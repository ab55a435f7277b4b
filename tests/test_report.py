"""The page about a rewrite: what it says is what the module has, whoever made it, and nothing on it is taken for code."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import time
from dataclasses import asdict

import pytest
import small
import torch
import unets
from torch import nn

import fxplug
from fxplug.config import flow
from fxplug.core.artifacts.value_json import encode
from fxplug.core.errors import ArtifactError, SpecError
from fxplug.reporting import page as pages
from fxplug.reporting.contents import Box
from fxplug.reporting.formats import written
from fxplug.reporting.kinds import runs as periods
from fxplug.reporting.layout import place
from fxplug.reporting.records import find_changes, make_listing, undo_changes
from fxplug.reporting.reports import as_json, report_folder

SIZES = {"img_size": 16, "patch_size": 8, "depth": 5, "num_classes": 10, "embed_dim": 48, "num_heads": 3}
VIT = {"timm": "vit_tiny_patch16_224", "options": SIZES}
PASSES = [{"lora": {"at": "blocks.*.attn.*", "rank": 2}}, {"scale": {"at": "blocks.2.mlp"}}]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A rewrite in a folder, and its page written when it was made."""
    folder = tmp_path_factory.mktemp("report")
    config = folder / "vit.yaml"
    config.write_text(json.dumps({"model": VIT, "passes": PASSES}))
    done = small.command("rewrite", config, "--out", folder / "art", "--report", folder / "made.html")
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def module(saved):
    return fxplug.load(saved / "art")


@pytest.fixture(scope="module")
def page(saved):
    return report_folder(saved / "art")


def boxes(page, kind=None):
    """Every box of the model with its path, repeats unfolded."""
    todo = [("", page.kinds[page.root if kind is None else kind])]
    while todo:
        path, at = todo.pop()
        for box in (each for folded in at.boxes for each in folded.unfolded):
            inner = f"{path}.{box.name}".strip(".")
            yield inner, box
            if box.inner is not None:
                todo.append((inner, page.kinds[box.inner]))


# --- what it says


@pytest.mark.slow
def test_the_page_of_what_is_loaded_is_that_of_what_was_saved(saved):
    done = small.command("report", saved / "art", "--out", saved / "again.html")
    assert done.exit_code == 0, done.output
    assert (saved / "again.html").read_bytes() == (saved / "made.html").read_bytes()


def test_it_counts_what_the_module_has(page, module):
    entries = module.meta["passes"]
    assert [(row.name, row.sites) for row in page.passes] == [(e["name"], len(e["sites"])) for e in entries]
    assert [(s.owner, s.path) for s in page.sites] == [(e["name"], s["path"]) for e in entries for s in e["sites"]]
    assert page.parameters == sum(p.numel() for p in module.parameters())
    assert page.base == page.parameters - sum(row.parameters for row in page.passes)
    assert sum(row.parameters for row in page.passes) == sum(s.parameters for s in page.sites)
    assert sum(n for part in page.depth for n in part["added"].values()) == page.parameters - page.base
    root = page.kinds[page.root]
    assert root.parameters == page.base and root.added == page.parameters - page.base
    assert root.blocks == {row.name: row.sites for row in page.passes}
    assert {c["name"]: c["status"] for c in page.checks}["neutral"] == "ok"


def test_every_region_and_block_is_in_the_picture_once(page, module):
    """What the pictures show, opened level by level, is what the graph has."""
    shown = [(path, box) for path, box in boxes(page) if box.kind in ("region", "layer")]
    ran = {key for node in module.graph.nodes if "pass" not in node.meta for key in list(node.meta["nn_module_stack"])[1:]}
    assert sorted(path for path, _ in shown) == sorted(ran)
    names = {name: type(m).__name__ for name, m in module.named_modules()}
    assert all(box.label == names[path] for path, box in shown if box.kind == "layer")
    assert sum(box.kind == "block" for _, box in boxes(page)) == len(page.sites)


def test_alike_regions_are_one_and_the_one_that_differs_is_told(page):
    stack = next(kind for kind in page.kinds if kind.label == "Sequential")
    (repeat,) = [box for box in stack.boxes if box.kind == "repeat"]
    assert (repeat.name, repeat.label, len(repeat.members)) == ("{0:5}", "Block", 5)
    kinds = [member[0].inner for member in repeat.members]
    assert kinds[0] == kinds[1] == kinds[3] == kinds[4] != kinds[2], "blocks.2 has another pass"
    assert repeat.blocks == {"lora": 10, "scale": 1}


@pytest.mark.parametrize(("given", "gone", "added"), [
    ({"lora": {"at": "blocks.0.mlp.fc1"}}, set(), {"lora: fc1"}),
    ({"replace": {"at": "blocks.0.mlp.act", "module": "GELU", "with": "ReLU"}}, {"act"}, {"replace: act"}),
], ids=["beside", "instead"])  # fmt: skip
def test_before_and_after_are_both_there(given, gone, added):
    base = small.plain_vit()
    ((name, options),) = given.items()
    page = fxplug.report(base.gm, fxplug.apply(base.gm, fxplug.load_pass(name, **options)))
    mlp = next(kind for kind in page.kinds if kind.label == "Mlp" and kind.blocks)
    assert {box.name for box in mlp.boxes if box.state == "gone"} == gone
    assert {box.name for box in mlp.boxes if box.state == "added"} == added
    ways = {state: [(a.source, a.target) for a in mlp.arrows if a.state in ("kept", state)] for state in ("gone", "added")}
    plain = fxplug.report(None, base.gm)
    untouched = next(kind for kind in plain.kinds if kind.label == "Mlp")
    named = {state: {(mlp.boxes[a].name, mlp.boxes[b].name) for a, b in rows} for state, rows in ways.items()}
    assert named["gone"] == {(untouched.boxes[a.source].name, untouched.boxes[a.target].name) for a in untouched.arrows}
    assert all(any(name in pair for pair in named["added"]) for name in added)


def test_what_was_before_is_found_again_from_what_is_kept():
    """With what a saved rewrite keeps of it; where nothing is kept, it is what no pass put in."""
    base = small.plain_vit().gm
    new = fxplug.apply(base, fxplug.load_pass("lora", at="blocks.*.mlp.*"), fxplug.load_pass("scale", at="norm"))
    after, true = make_listing(new), make_listing(base).records
    kept = json.loads(json.dumps(find_changes(base, new)))
    found = undo_changes(after, kept)
    assert {n: r.reads for n, r in found.items()} == {n: r.reads for n, r in true.items()}
    left = undo_changes(after, None)
    assert left.keys() == true.keys() and all(set(r.reads) <= true.keys() for r in left.values())


def test_what_a_network_of_a_pass_adds_is_counted_where_it_stands():
    base = unets.sd15()
    page = fxplug.report(base.gm, fxplug.apply(base.gm, fxplug.load_pass("controlnet", network=unets.control(base.model))))
    gained = page.parameters - page.base
    assert page.passes[0].parameters == gained == sum(n for part in page.depth for n in part["added"].values())
    assert page.kinds[page.root].added == gained
    (network,) = [box for box in page.kinds[page.root].boxes if box.label == "ControlNetModel"]
    assert (network.state, network.owner, network.added) == ("added", "controlnet", gained)


def test_a_module_without_passes_is_a_plain_picture():
    page = fxplug.report(None, small.plain_vit().gm)
    assert not page.passes and not page.sites and page.known_before
    assert {box.state for _, box in boxes(page)} == {"kept"}
    assert "without a pass" in pages.lead(page)


def test_a_second_pass_beside_what_is_known_is_not_said_to_be_checked(saved, module):
    new = fxplug.apply(module, fxplug.load_pass("scale", at="norm", name="late"))
    page = fxplug.report(None, new)
    assert page.checks is None and not page.known_before


@pytest.mark.parametrize(("keys", "found"), [
    ("", []), ("ab", []), ("aa", []), ("aaa", [(0, 1, 3)]), ("xaaab", [(1, 1, 3)]), ("ababab", [(0, 2, 3)]),
    ("abababa", [(0, 2, 3)]), ("xababab" + "ccc", [(1, 2, 3), (7, 1, 3)]), ("aab" * 3, [(0, 3, 3)]),
    ([None] * 5, []), (["a", None] * 4, []),
], ids=str)  # fmt: skip
def test_runs_of_a_period_are_found(keys, found):
    assert periods(list(keys)) == found


def test_boxes_of_a_picture_do_not_touch():
    generator = torch.Generator().manual_seed(3)
    for count in (1, 2, 9, 40):
        pairs = torch.randint(0, count, (2 * count, 2), generator=generator).tolist()
        arrows = [(min(p), max(p)) for p in pairs if p[0] != p[1]]
        found = place(count, arrows)
        assert found == place(count, arrows)
        for i, (x, y) in enumerate(found.boxes):
            assert x >= -0.01 and y >= -0.01 and x + 176 <= found.width + 0.01 and y + 54 <= found.height + 0.01
            assert all(abs(x - a) >= 176 or abs(y - b) >= 54 for a, b in found.boxes[:i])
        for (a, b), line in zip(arrows, found.arrows, strict=True):
            assert line[0][1] == pytest.approx(found.boxes[a][1] + 54) and line[-1][1] == pytest.approx(found.boxes[b][1])


def test_a_tangle_is_placed_soon():
    """Finding an order with few crossings would take minutes; arrows that go round are placed all the same."""
    generator = torch.Generator().manual_seed(1)
    for count, many in ((250, 4000), (60, 400), (3, 9)):
        arrows = [(a, b) for a, b in torch.randint(0, count, (many, 2), generator=generator).tolist() if a != b]
        start = time.process_time()
        found = place(count, arrows)
        assert time.process_time() - start < 3 and len(found.boxes) == count and len(found.arrows) == len(arrows)


def strange():
    """Layers with names as only a stranger gives them."""
    names = ("<img src=x onerror=alert(1)>", "</script>", "'&", "a/b c", "{{ 7 * 7 }}", "é%41")

    def forward(self, x):
        for part in self.parts.values():
            x = part(x)
        return x

    return small.net(forward, parts=nn.ModuleDict({name: nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for name in names}))


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """The page of such a model; its artifact would not be read."""
    folder = tmp_path_factory.mktemp("named")
    with pytest.warns(UserWarning, match="cannot be in an artifact"):
        gm = fxplug.trace(strange(), torch.randn(2, 4))
    fxplug.report(None, fxplug.apply(gm, fxplug.load_pass("lora", at="**")), folder / "x.html")
    return folder


def test_names_of_any_kind_are_shown(named):
    text = (named / "x.html").read_text()
    assert "<img" not in text and text.count("</script") == 2 and html.escape("<img src=x onerror=alert(1)>") in text


@pytest.mark.parametrize("said", [
    {"diff": {"passes": ["lora", "scale"], "text": [], "changes": {"gone": [{}], "was": {}, "classes": {}}}},
    {"diff": {"passes": ["lora", "scale"], "changes": 3, "checks": 5}}, {"diff": {"passes": ["lora", "scale"], "checks": [{}]}},
    {"passes": 3}, {"passes": [{}]}, {"passes": [{"name": "lora", "sites": [{"path": 3, "block": []}]}]},
    {"plan": "x", "forms": 3},
], ids=range(7))  # fmt: skip
def test_what_an_artifact_says_of_itself_may_be_anything(saved, tmp_path, said):
    """Its page is written all the same, and says what is wrong."""
    art = shutil.copytree(saved / "art", tmp_path / "art")
    document = json.loads((art / "graph.json").read_text())
    document["meta"] |= {key: encode(value) for key, value in said.items()}
    (art / "graph.json").write_text(json.dumps(document))
    manifest = json.loads((art / "manifest.json").read_text())
    data = (art / "graph.json").read_bytes()
    manifest["files"]["graph.json"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    (art / "manifest.json").write_text(json.dumps(manifest))
    page = report_folder(art, tmp_path / "x.html")
    assert page.trouble or page.sites
    assert (tmp_path / "x.html").stat().st_size > 5000


# --- what else there is about a module


def table(page, title):
    return next(t for t in page.tables if t.title.startswith(title))


def test_lowered_layers_tell_their_forms():
    base = small.plain_vit().gm
    lowered = fxplug.lower(fxplug.apply(base, fxplug.load_pass("lora", at="blocks.*.attn.*")), merge="fold")
    rows = table(fxplug.report(None, lowered), "Forms").rows
    assert dict(rows) == lowered.meta["forms"] and all("merged" in form for _, form in rows)


def test_slots_tell_their_adapters():
    new = fxplug.apply(small.plain_vit().gm, fxplug.load_pass("lora", at="blocks.*.attn.qkv", rank=4, slots=3))
    assert "none of them" in table(fxplug.report(None, new), "Adapters").about
    state = {f"blocks.0.attn.qkv.lora_{k}.weight": torch.ones(s) for k, s in (("A", (2, 96)), ("B", (288, 2)))}
    new.adapters.load("ink", state)
    new.adapters.use({"ink": 0.5})
    assert table(fxplug.report(None, new), "Adapters").rows == [["ink", "lora", "0", "0.5", "4"]]


def test_a_plan_tells_where_it_splits():
    vit = small.plain_vit()
    plan = fxplug.parallel_plan(vit.gm, vit.args, batch=2, check=False)
    page = fxplug.report(vit.gm, fxplug.parallelize(vit.gm, plan))
    rows = table(page, "Parallel").rows
    assert len(rows) == len(page.sites) and {row[0] for row in rows} == {s.block.rpartition(".")[2] for s in page.sites}


def test_marks_tell_what_a_step_cache_keeps():
    new = fxplug.apply(small.plain_vit().gm, fxplug.load_pass("first_block_cache", first="blocks.0", last="blocks.{-1}"))
    found = table(fxplug.report(None, new), "Step cache")
    cache = fxplug.StepCache(new, fxplug.Every(2), clock=None)
    kept = cache.full(*small.plain_vit().args)[1]
    assert [row[0] for row in found.rows if "gauge" not in row[3]] == list(kept)


# --- runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    import runs

    out = tmp_path_factory.mktemp("run")
    runs.run(out, drawn=True, verify=True, train__steps=12, data__test={"call": "runs:Digits"})
    return out


def test_a_run_leaves_its_page(run):
    page = report_folder(run, run.parent / "again.html")
    assert (run / "report.html").read_bytes() == (run.parent / "again.html").read_bytes()
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in log if "loss" in record]
    assert page.run["facts"]["steps"] == "12" and page.run["facts"]["last loss"] == f"{losses[-1]:.4g}"
    assert [row["steps"] for row in page.run["epochs"]] == ["6", "6"]
    assert page.run["epochs"][0]["loss"] == f"{sum(losses[:6]) / 6:.4g}"
    assert page.run["curves"]["data"] in (run / "report.html").read_text() and page.run["curves"]["width"] > 600
    assert page.run["epochs"][-1]["test acc1"] == page.run["facts"]["test acc1"]
    assert page.checks, "what verification found before the training is kept"


@pytest.mark.parametrize("log", [
    b"", b"\0\xff\n{", b"[]\n3\nnull\n", b'{"step": [1], "loss": 1}\n{"step": 1, "loss": "nan"}\n{"step": 1e999, "loss": 1}\n',
    b'{"step": 1, "loss": 1, "epoch": {}, "lr": {"a": "b"}}\n{"step": 2, "test": {"x": [], "y": null}}\n{"test": 1}\n',
    b'{"step": 1, "loss": 1e308}\n{"step": 2, "loss": -1e308, "lr": NaN}\n{"step": 3, "loss": 2, "seconds": "x"}\n',
    b'{"step": 1, "loss": 1' + b"1" * 9999 + b"}\n" + b"[" * 100_000,
], ids=range(7))  # fmt: skip
def test_a_log_of_anything_is_a_page(tmp_path, log):
    (tmp_path / "log.jsonl").write_bytes(log)
    (tmp_path / "samples").mkdir()
    for picture in ("samples/step-00000001.png", "loss.png"):
        (tmp_path / picture).write_bytes(b"\x89PNG\r\n\x1a\nno")
    page = report_folder(tmp_path, tmp_path / "x.html")
    assert page.run["curves"] is None and page.run["pictures"] == []
    assert "nan" not in json.dumps(page.run).lower().replace("learning", "")


def test_a_run_without_a_log_says_so(run, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "module").symlink_to(run / "module")
    page = report_folder(tmp_path)
    assert page.run["note"] == "This run has no log." and page.sites


# --- bad input


@pytest.mark.parametrize(("subject", "options", "told"), [
    ("nothing", [], "no configuration 'nothing'|no such|nothing"),
    ("empty", [], "has no manifest.json and no log.jsonl: give"),
    ("art", ["--out", "{art}"], "is a folder, and the page is one file: write --out"),
    ("art", ["--out", "/proc/no/x.html"], "cannot be written"),
    ("art", ["--set", "a=1"], "--set changes a configuration"),
], ids=["nothing", "empty", "folder", "unwritable", "set"])  # fmt: skip
def test_what_cannot_be_is_told(saved, tmp_path, monkeypatch, subject, options, told):
    (tmp_path / "empty").mkdir()
    (tmp_path / "art").symlink_to(saved / "art")
    monkeypatch.chdir(tmp_path)
    done = small.command("report", subject, *(o.format(art=tmp_path / "empty") for o in options))
    assert done.exit_code != 0 and re.search(told, " ".join(done.output.split())), done.output
    assert not list(tmp_path.glob("*.html"))


def test_an_artifact_that_does_not_load_has_a_page_that_says_why(saved, tmp_path):
    art = shutil.copytree(saved / "art", tmp_path / "art")
    (art / "graph.json").write_bytes(b"{}")
    out = tmp_path / "x.html"
    done = small.command("report", art, "--out", out)
    with pytest.raises(ArtifactError) as error:
        fxplug.load(art)
    assert done.exit_code == 0 and str(error.value) in " ".join(done.output.split())
    text = out.read_text()
    assert html.escape(str(error.value)) in text.replace("&#39;", "&#x27;")
    assert all(entry["sha256"] in text for entry in json.loads((art / "manifest.json").read_text())["files"].values())
    odd = {"a": {}, "b": 3, "<b>": {"size": None}}
    (art / "manifest.json").write_text(json.dumps({"format": 9, "torch": [], "files": odd}))
    assert list(report_folder(art, out).files) == ["a", "<b>"] and "&lt;b&gt;" in out.read_text()
    (art / "manifest.json").write_bytes(b"{")
    assert "manifest.json is not JSON" in report_folder(art, out).trouble


@pytest.mark.parametrize("wrong", [nn.Linear(2, 2), None, "x"])
def test_what_is_no_traced_module_is_refused(wrong):
    with pytest.raises(SpecError, match=r"report takes traced modules, and new is a \w+"):
        fxplug.report(None, wrong)


# --- safety

def test_every_text_of_a_stranger_is_escaped():
    """All of a page comes through templates that escape each value; none says that a value is safe."""
    assert pages.environment().autoescape is True
    texts = "".join(file.read_text() for file in pages.TEMPLATES.glob("*.j2"))
    marked = re.findall(r"{{ *([^}|]*?) *\| *safe", texts)
    assert set(marked) == {"style", "script", "' class=\"number\"'"}  # which are our own


def test_the_policy_lets_its_own_script_run_and_nothing_else(saved):
    text = (saved / "made.html").read_text()
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1])
    for kind in ("script", "style"):
        said = re.search(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)[1]
        assert f"{kind}-src 'sha256-{base64.b64encode(hashlib.sha256(said.encode()).digest()).decode()}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy.replace("https", "")
    assert not re.search(r"(src|href)=\"(?!#|data:)", text.replace('xmlns="http', "")), "nothing is fetched"
    assert " style=" not in text and not re.search(r" on\w+=", text)


# --- other writers


def test_model_explorer_gets_every_node_and_edge(module):
    after = make_listing(module)
    page = fxplug.report(None, module)
    (graph,) = json.loads(written(page, after, "model-explorer"))["graphs"]
    nodes = {node["id"]: node for node in graph["nodes"]}
    shown = {name: record for name, record in after.records.items() if record.kind != "note"}
    assert nodes.keys() == shown.keys()
    for name, record in shown.items():
        assert [e["sourceNodeId"] for e in nodes[name]["incomingEdges"]] == [r for r in record.reads if r in shown]
    qkv = nodes["blocks_0_attn_qkv"]
    assert qkv["namespace"] == "blocks (Sequential)/0 (Block)/attn (Attention)" and qkv["label"] == "Linear"
    lora = nodes["lora_blocks_0_attn_qkv_Lora"]
    assert lora["namespace"] == qkv["namespace"] and {"key": "pass", "value": "lora"} in lora["attrs"]


@pytest.mark.slow
def test_dot_and_svg_are_of_one_region(saved, tmp_path):
    import xml.etree.ElementTree as ET

    show = ["show", saved / "art", "--region", "blocks.0.attn", "--to"]
    text = small.command(*show, "dot").output
    assert text.startswith('digraph "blocks.0.attn"') and "lora: qkv" in text and text.count("->") > 5
    done = small.command(*show, "svg", "--out", tmp_path / "x.svg")
    assert done.exit_code == 0, done.output
    root = ET.parse(tmp_path / "x.svg").getroot()
    assert "lora: qkv" in "".join(root.itertext()) and not root.findall(".//{*}a")
    wrong = small.command("show", saved / "art", "--to", "svgg")
    assert "no format 'svgg' (did you mean 'svg'?)" in wrong.output
    wrong = small.command("show", saved / "art", "--to", "dot", "--region", "blocks.0.atn")
    assert "there is no region 'blocks.0.atn' (did you mean 'blocks.0.attn'?)" in wrong.output


def test_json_has_all_that_the_page_has(saved, page):
    done = small.command("report", saved / "art", "--out", saved / "x.json")
    assert done.exit_code == 0, done.output
    assert json.loads((saved / "x.json").read_text()) == json.loads(as_json(page)) == json.loads(json.dumps(asdict(page)))


# --- size


def test_a_rewrite_with_a_long_diff_is_loaded_again(tmp_path, monkeypatch):
    """A diff is as long as there are sites, and a text of an artifact has an end: it is kept in pieces."""
    base = small.plain_vit()
    new = fxplug.apply(base.gm, fxplug.load_pass("lora", at="**"))
    monkeypatch.setattr(flow, "DEFAULT", fxplug.Limits(string=500))
    flow.save_run_record(flow.Result(new, base.gm, None, (base.args, {})))
    text = fxplug.diff(base.gm, new)
    assert max(map(len, new.meta["diff"]["text"])) <= 500 < len(text)
    assert flow.read_saved_diff("art", fxplug.load(fxplug.save(new, tmp_path / "art"))) == text


def test_what_would_not_be_read_again_is_not_saved(tmp_path):
    gm = fxplug.apply(small.plain_vit().gm, fxplug.load_pass("scale", at="norm"))
    gm.meta["said"] = "x" * (fxplug.Limits().string + 1)
    with pytest.raises(ArtifactError, match="a text of 65537 characters"):
        fxplug.save(gm, tmp_path / "art")
    assert not (tmp_path / "art").exists()


@pytest.mark.slow
def test_the_page_of_sdxl_is_small_and_soon_there(tmp_path):
    gm, *_ = unets.sdxl_full_traced()
    new = fxplug.apply(gm, fxplug.load_pass("lora", rank=16))
    start = time.process_time()
    page = fxplug.report(gm, new, tmp_path / "x.html")
    took = time.process_time() - start
    assert len(page.sites) == 794 and (tmp_path / "x.html").stat().st_size < 1 << 20 and took < 10
    assert len(page.kinds) < 60, "blocks that are alike are one"


def test_a_repeat_stands_for_its_members():
    one = Box("0", "region", "Block", inner=3)
    assert Box("{0:2}", "repeat", "Block", members=[[one], [one]]).unfolded == [one, one]
    assert one.unfolded == [one]


@pytest.mark.parametrize("name", ["page.pdf", "page.PDF", "page.png", "page.md", "page.htm.gz", "run.yaml"])
def test_a_page_is_html_or_json(name, tmp_path):
    """No file of another kind is written, and nothing is worked out for it."""
    for out in (tmp_path / name, str(tmp_path / name)):
        with pytest.raises(SpecError, match=r"ends with \.\w+, and a page is HTML or JSON: write .*\.html"):
            fxplug.report(None, fxplug.trace(nn.Linear(2, 2), torch.ones(1, 2)), out)
    done = small.command("report", tmp_path, "--out", tmp_path / name)
    assert done.exit_code == 1 and "a page is HTML or JSON" in done.stderr and not (tmp_path / name).exists()


MULTI = {"plugin": "fxplug.compat.hcp.sample_plugins:Mean", "from_layers": ["pre_hook:blocks.0"], "name": "p"}


TO = ["blocks.1.attn", "blocks.1", "head", "pre_hook:blocks.1.mlp", "pre_hook:blocks.1", "pre_hook:norm"]


@pytest.mark.parametrize("to", TO)
def test_a_plugin_between_layers_changes_what_reads_its_values(to):
    """Its pass puts an edge between two of its own values, which is no port of the model."""
    base = small.plain_vit().gm
    path = to.removeprefix("pre_hook:")
    side = "before" if to != path else "after"
    values = ["blocks.0:in[:]", f"{path}:in[:]", *([f"{path}:out[:]"] if side == "after" else [])]
    own = {**MULTI, "to_layers": [to], "values": values, side: [path], f"{side}_values": ["plugin:out[0][:]"]}
    new = fxplug.apply(base, fxplug.load_pass("hcp/multi", **own))
    found, after = find_changes(base, new), make_listing(new)
    assert not found["gone"] and found["was"]
    added = {name for name, record in after.records.items() if record.owner}
    assert added and all(set(after.records[name].reads) & added for name in found["was"])
    true = {name: record.reads for name, record in make_listing(base).records.items()}
    assert {name: record.reads for name, record in undo_changes(after, found).items()} == true
