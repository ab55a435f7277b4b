"""Rewrites and adapters on the hub: pushed, loaded, pinned, read offline, and refused. A hub on this machine answers."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hub_server
import pipelines
import pytest
import small
import torch
import yaml
from huggingface_hub import constants, hf_hub_download, scan_cache_dir, snapshot_download
from safetensors.torch import load_file, save_file
from torch import nn

import fxplug
from fxplug.core.errors import ArtifactError, SpecError

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
NAME = "user/ink"
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")  # how huggingface_hub calls httpx


class Own(nn.Module):
    """A module that is kept whole."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * 2


def net():
    return small.seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))


def rewritten(*passes, value=0.5):
    """A rewrite whose updates are not zero."""
    new = fxplug.apply(fxplug.trace(net(), X), *(passes or [fxplug.load_pass("lora", rank=2)]))
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if name.partition(".")[0] in ("lora", "ia3", "loha"):
                parameter.fill_(value)
    return new


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with hub_server.serving() as hub:
        url = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        settings = {
            "ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": url, "HF_HUB_CACHE": str(tmp_path / "home" / "hub"),
            "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True,
        }  # fmt: skip
        for key, value in settings.items():
            monkeypatch.setattr(constants, key, value)
        monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
        monkeypatch.chdir(tmp_path)
        yield hub


def offline(code, home, **more):
    """What another process prints that is kept off the network."""
    env = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", **more}
    head = "import torch, fxplug\nX = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))\n"
    done = subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, env=env, check=False)
    assert not done.returncode, done.stderr
    return done.stdout


def peft(folder, value=1.0, config=True, file="adapter_model.safetensors"):
    """An adapter as PEFT saves it."""
    folder.mkdir(exist_ok=True)
    half = {"A": (2, 4), "B": (4, 2)}
    keys = {f"base_model.model.0.lora_{name}.weight": torch.full(shape, value) for name, shape in half.items()}
    save_file(keys, folder / file)
    if config:
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 6}))
    return folder


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- pushed and loaded


def test_what_was_pushed_loads_equal(hub, tmp_path):
    new = rewritten()
    commit = fxplug.push(new, NAME, base="timm/vit", license="apache-2.0")
    assert torch.equal(fxplug.load(NAME)(X), new(X)) and not torch.equal(new(X), net()(X))
    _, files = hub.repos[NAME].at(commit)
    fxplug.save(new, tmp_path / "saved")
    assert files.keys() == {*files_of(tmp_path / "saved"), "README.md", ".gitattributes"}
    assert all(files[name] == data for name, data in files_of(tmp_path / "saved").items())
    assert hub.asked(NAME) == {*files_of(tmp_path / "saved")}


def test_a_folder_and_the_verb_push_the_same(hub, tmp_path):
    new = rewritten()
    fxplug.save(new, tmp_path / "saved", config={"model": "x:y"})
    first = fxplug.push(tmp_path / "saved", "user/one")
    done = small.command("push", tmp_path / "saved", "user/two", "--base", "a/b", "--license", "mit")
    second = hub.repos["user/two"].commits[-1]
    assert f"user/two is at {second[0]}" in done.stdout
    assert {**hub.repos["user/one"].at(first)[1], "README.md": b""} == {**second[1], "README.md": b""}
    assert b"license: mit" in second[1]["README.md"] and b"config.yaml" in second[1]["manifest.json"]


def test_the_card_says_base_license_passes_and_checks(hub, tmp_path):
    config = {"model": {"call": "test_hub:net"}, "inputs": {"input": [2, 4]}, "passes": [{"lora": {"rank": 2}}]}
    fxplug.rewrite(config, out=tmp_path / "out")
    fxplug.push(tmp_path / "out", NAME, base="timm/vit", license="apache-2.0")
    _, front, text = hub.repos[NAME].commits[-1][1]["README.md"].decode().split("---\n", 2)
    data = yaml.safe_load(front)
    assert data["base_model"] == "timm/vit" and data["base_model_relation"] == "adapter"
    assert data["license"] == "apache-2.0" and data["library_name"] == "fxplug"
    assert "### lora" in text and "+lora_0_Lora = " in text and f'fxplug.load("{NAME}")' in text
    assert "| neutral | ok |" in text


def test_each_pass_has_its_own_diff(hub):
    fxplug.push(rewritten(fxplug.load_pass("lora", rank=2, at=["0"]), fxplug.load_pass("ia3", at=["2"])), NAME)
    text = hub.repos[NAME].commits[-1][1]["README.md"].decode()
    _, lora, ia3 = text.split("### ")
    assert "+lora_0_Lora" in lora and "+ia3_2_Scale" not in lora
    assert "+ia3_2_Scale" in ia3 and "+lora_0_Lora" not in ia3
    assert "base_model" not in text and "license" not in text


@pytest.mark.slow
def test_an_old_revision_is_pinned(hub):
    old, new = rewritten(), rewritten(value=0.25)
    first, second = fxplug.push(old, NAME), fxplug.push(new, NAME)
    assert first != second
    for found in (fxplug.load(NAME, revision=first), fxplug.load(NAME, first), fxplug.load(f"{NAME}@{first}")):
        assert torch.equal(found(X), old(X))
    assert torch.equal(fxplug.load(NAME)(X), new(X)) and not torch.equal(old(X), new(X))


def test_files_of_the_push_before_go_and_others_stay(hub):
    fxplug.push(rewritten(), NAME)
    hub.add(NAME, {**hub.repos[NAME].commits[-1][1], "notes.txt": b"mine"})
    fxplug.push(rewritten(fxplug.load_pass("ia3", at=["2"])), NAME)
    files = hub.repos[NAME].commits[-1][1]
    assert "lora.safetensors" not in files and files["notes.txt"] == b"mine" and "ia3.safetensors" in files


def test_a_push_leaves_what_the_cache_has_for_offline(hub, monkeypatch):
    old = rewritten()
    fxplug.push(old, NAME)
    fxplug.load(NAME)
    fxplug.push(rewritten(value=0.25), NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert torch.equal(fxplug.load(NAME)(X), old(X))


def test_a_folder_of_that_name_goes_first(hub, tmp_path):
    fxplug.push(rewritten(), NAME)
    here = rewritten(value=0.25)
    fxplug.save(here, tmp_path / "user" / "ink")
    hub.log.clear()
    assert torch.equal(fxplug.load(NAME)(X), here(X)) and hub.log == []
    with pytest.raises(SpecError, match="revision is for a repository on the hub"):
        fxplug.load(NAME, revision="main")


@pytest.mark.slow
def test_another_process_loads_it_offline(hub, tmp_path):
    old, new = rewritten(), rewritten(value=0.25)
    first = fxplug.push(old, NAME)
    fxplug.load(NAME)
    fxplug.push(new, NAME)
    fxplug.load(NAME)
    hub.add("user/peft", files_of(peft(tmp_path / "peft")))
    fxplug.load_adapter(rewritten(), "user/peft")
    hub.log.clear()
    code = f"print(fxplug.load('{NAME}')(X).tolist(), fxplug.load('{NAME}', revision='{first}')(X).tolist())\n"
    code += "print(fxplug.inspect_adapter('user/peft').file.entries[0].scale)"
    out = offline(code, tmp_path / "home", HF_ENDPOINT=hub.url)
    assert out == f"{new(X).tolist()} {old(X).tolist()}\n3.0\n" and hub.log == []


@pytest.mark.slow
def test_a_snapshot_of_the_cache_and_a_class_of_ones_own_are_pushed(hub):
    fxplug.push(rewritten(), NAME)
    fxplug.load(NAME)
    fxplug.push(snapshot_download(NAME, local_files_only=True), "user/copy")
    assert torch.equal(fxplug.load("user/copy")(X), rewritten()(X))
    kept = fxplug.trace(small.seeded(lambda: nn.Sequential(Own(), nn.Linear(4, 2))), X, leaf=["0"])
    fxplug.push(kept, "user/own")
    assert torch.equal(fxplug.load("user/own", allow=["test_hub"])(X), kept(X))
    with pytest.raises(ArtifactError, match="allow=\\['test_hub'\\]"):
        fxplug.push(snapshot_download("user/own", local_files_only=True), "user/more")
    fxplug.push(snapshot_download("user/own", local_files_only=True), "user/more", allow=["test_hub"])


@pytest.mark.slow
def test_many_push_and_load_at_once(hub):
    """As the hub does it: the last commit stands, and each load gets one of them whole."""
    modules = [rewritten(value=n / 8) for n in range(4)]
    fxplug.push(modules[0], NAME)
    expected = [module(X) for module in modules]
    with ThreadPoolExecutor(8) as pool:
        pushes = [pool.submit(fxplug.push, module, NAME) for module in modules]
        loads = [pool.submit(fxplug.load, NAME) for _ in range(4)]
        commits, loaded = [push.result() for push in pushes], [load.result() for load in loads]
    assert all(any(torch.equal(one(X), value) for value in expected) for one in loaded)
    for commit, value in zip(commits, expected, strict=True):
        assert torch.equal(fxplug.load(NAME, revision=commit)(X), value)


def push_after_each_head(hub, name, versions, monkeypatch):
    """Let the main branch become the next version each time that it was asked which commit it is."""
    plain, left = hub_server.Handler.do_HEAD, list(versions)

    def do_head(self):
        plain(self)
        if self.path.startswith(f"/{name}/resolve/main/") and left:
            hub.add(name, left.pop(0))

    monkeypatch.setattr(hub_server.Handler, "do_HEAD", do_head)


def adapted(source):
    """A rewrite with an adapter loaded."""
    module = rewritten()
    fxplug.load_adapter(module, source)
    return module


def check_cache():
    """Each file of the cache has the digest that it is kept under, and huggingface_hub reads it."""
    blobs = list(Path(constants.HF_HUB_CACHE).glob("*/blobs/*"))
    assert blobs and all(hashlib.sha256(path.read_bytes()).hexdigest() == path.name for path in blobs)
    report = scan_cache_dir(constants.HF_HUB_CACHE)
    assert not report.warnings and all("main" in repo.refs for repo in report.repos)


def test_a_branch_that_moves_while_it_is_read_is_one_commit_whole(hub, monkeypatch):
    modules = [rewritten(value=n / 8) for n in range(6)]
    commits = [fxplug.push(module, NAME) for module in modules]
    versions = [hub.repos[NAME].at(commit)[1] for commit in commits]
    hub.repos[NAME].commits = hub.repos[NAME].commits[:2]
    push_after_each_head(hub, NAME, versions[1:], monkeypatch)
    assert torch.equal(fxplug.load(NAME)(X), modules[0](X))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert torch.equal(fxplug.load(NAME)(X), modules[0](X))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.repos[NAME].commits.extend(zip(commits, versions, strict=True))
    for commit, module in zip(commits, modules, strict=True):
        assert torch.equal(fxplug.load(NAME, revision=commit)(X), module(X))
    check_cache()


@pytest.mark.parametrize(("revision", "kept"), [("refs/pr/1", True), ("a/../../../../x", False), ("{}/x", False)])
def test_a_revision_is_written_below_the_refs_of_the_cache_alone(revision, kept, hub, tmp_path, monkeypatch):
    fxplug.push(rewritten(), NAME)
    revision, at = revision.format(tmp_path), hub_server.Repo.at
    monkeypatch.setattr(hub_server.Repo, "at", lambda repo, asked: at(repo, "main" if asked == revision else asked))
    pattern = hub_server.PATH.pattern.replace("(?P<rev>", f"(?P<rev>{re.escape(revision)}|")
    monkeypatch.setattr(hub_server, "PATH", re.compile(pattern))
    assert torch.equal(fxplug.load(NAME, revision=revision)(X), rewritten()(X))
    refs = Path(constants.HF_HUB_CACHE, "models--user--ink", "refs")
    assert (refs / revision).is_file() == kept and not any(path.name == "x" for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("source", ["user/peft", "user/peft/adapter_model.safetensors", "user/peft@main"])
def test_an_adapter_of_a_branch_that_moves_has_the_configuration_of_its_weights(source, hub, tmp_path, monkeypatch):
    versions, expected = [], []
    for n in range(8):
        folder = peft(tmp_path / f"peft{n}", value=1.0 + n)
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2 + n}))
        versions.append(files_of(folder))
        expected.append(adapted(folder)(X))
    hub.add("user/peft", versions[0])
    push_after_each_head(hub, "user/peft", versions[1:], monkeypatch)
    for _ in range(2):
        found = adapted(source)(X)
        assert any(torch.equal(found, one) for one in expected)
    check_cache()


# --- what is never fetched, and what is refused


def test_a_file_outside_the_manifest_is_never_asked_for(hub):
    fxplug.push(rewritten(), NAME)
    listed = {*json.loads(hub.repos[NAME].commits[-1][1]["manifest.json"])["files"], "manifest.json"}
    hub.add(NAME, {**hub.repos[NAME].commits[-1][1], "evil.py": b"x", "model.bin": b"x", "more.safetensors": b"x"})
    hub.log.clear()
    assert torch.equal(fxplug.load(NAME)(X), rewritten()(X))
    assert hub.asked(NAME) == listed


def test_what_others_fetched_into_the_cache_does_not_matter(hub):
    fxplug.push(rewritten(), NAME)
    hub.add(NAME, {**hub.repos[NAME].commits[-1][1], "evil.py": b"x", "model.bin": b"x"})
    folder = snapshot_download(NAME)
    assert "evil.py" in os.listdir(folder)
    assert torch.equal(fxplug.load(NAME)(X), rewritten()(X))
    assert torch.equal(fxplug.load(folder)(X), rewritten()(X)) and torch.equal(fxplug.load(Path(folder))(X), rewritten()(X))


def test_a_link_out_of_the_cache_is_refused(hub, tmp_path):
    fxplug.push(rewritten(), NAME)
    fxplug.load(NAME)
    folder = Path(snapshot_download(NAME))
    secret = tmp_path / "secret"
    blob = (folder / "graph.txt").resolve()
    shutil.copy(blob, secret)
    blob.unlink()
    blob.symlink_to(secret)
    for source in (NAME, folder):
        with pytest.raises(ArtifactError, match=r"graph.txt .*is a link"):
            fxplug.load(source)
    blob.unlink()
    blob.symlink_to("../../models--user--ink/blobs/twin")  # a chain of links within it, as of blobs that are shared
    shutil.move(secret, blob.with_name("twin"))
    assert torch.equal(fxplug.load(folder)(X), rewritten()(X))


def test_a_link_into_the_cache_from_elsewhere_is_refused(hub, tmp_path):
    fxplug.push(rewritten(), NAME)
    fxplug.load(NAME)
    folder = Path(snapshot_download(NAME))
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert torch.equal(fxplug.load(copy)(X), rewritten()(X))
    (copy / "graph.txt").unlink()
    (copy / "graph.txt").symlink_to((folder / "graph.txt").resolve())
    with pytest.raises(ArtifactError, match="graph.txt cannot be read: it is a link"):
        fxplug.load(copy)


def test_an_adapter_that_is_a_link_out_of_the_cache_is_refused(hub, tmp_path):
    hub.add("user/peft", files_of(peft(tmp_path / "peft")))
    path = Path(hf_hub_download("user/peft", "adapter_model.safetensors"))
    blob = path.resolve()
    shutil.move(blob, tmp_path / "out.safetensors")
    blob.symlink_to(tmp_path / "out.safetensors")
    with pytest.raises(ArtifactError, match="is a link out of the hub's cache"):
        fxplug.load_adapter(rewritten(), "user/peft")


HASH = "0" * 64
HUGE = {"graph.json": {"size": 10**4000, "sha256": HASH}, "model.safetensors": {"size": 1, "sha256": HASH}}
MANIFESTS = {
    "up": ({"../../../x.safetensors": {"size": 1, "sha256": HASH}}, "outside the folder"),
    "absolute": ({"/etc/passwd": {"size": 1, "sha256": HASH}}, "outside the folder"),
    "another host": ({"https://evil.example/model.safetensors": {"size": 1, "sha256": HASH}}, "outside the folder"),
    "code": ({"evil.py": {"size": 1, "sha256": HASH}}, "a kind of file that an artifact does not have"),
    "pickled": ({"model.bin": {"size": 1, "sha256": HASH}}, "a kind of file that an artifact does not have"),
    "huge": (HUGE, "graph.json has 2 bytes instead of a number of about 3986 digits"),
    "negative": ({**HUGE, "graph.json": {"size": -1, "sha256": HASH}}, "graph.json has 2 bytes instead of -1"),
    "many": ({f"a{n}.safetensors": {"size": 1, "sha256": HASH} for n in range(70_000)} | HUGE, "lists 70002 files"),
    "not there": ({**HUGE, "graph.json": {"size": 2, "sha256": HASH}, "lora.safetensors": {"size": 1, "sha256": HASH}},
                  "lora.safetensors, which is missing"),
    "no record": ({"graph.json": 3, "model.safetensors": None}, "manifest.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_lists_something_else_is_refused(case, hub):
    files, finding = MANIFESTS[case]
    hub.add(NAME, {"manifest.json": json.dumps({"format": 1, "files": files}).encode(), "graph.json": b"{}",
                   "model.safetensors": b"x", "evil.py": b"x", "model.bin": b"x"})  # fmt: skip
    with pytest.raises(ArtifactError, match=finding) as error:
        fxplug.load(NAME)
    assert NAME in str(error.value) and len(str(error.value)) < 600
    assert ("GET", f"/{NAME}/resolve/{hub.repos[NAME].commits[-1][0]}/model.safetensors") not in hub.log
    assert not hub.asked(NAME) & {"evil.py", "model.bin"}
    assert all(path.startswith(f"/{NAME}/") for _, path in hub.log if path != "/api/agent-harnesses")


def test_a_huge_manifest_is_not_fetched(hub):
    hub.add(NAME, {"manifest.json": b" " * 5000})
    with pytest.raises(ArtifactError, match=r"user/ink.* has 5000 bytes; the limit is 4096"):
        fxplug.load(NAME, limits=fxplug.Limits(json=4096))
    assert [method for method, path in hub.log if path.endswith("manifest.json")] == ["HEAD"]


# --- adapters of other tools


def test_an_adapter_of_another_tool_is_taken_by_name_wherever_a_file_is(hub, tmp_path):
    folder = peft(tmp_path / "peft")
    junk = {"adapter_model.bin": b"x", "README.md": b"x", "handler.py": b"x", "optimizer.pt": b"x"}
    hub.add("user/peft", {**files_of(folder), **junk})
    here, there = rewritten(), rewritten()
    fxplug.load_adapter(here, folder)
    fxplug.load_adapter(there, "user/peft")
    assert torch.equal(here(X), there(X)) and not torch.equal(here(X), rewritten()(X))
    with_slots = fxplug.apply(fxplug.trace(net(), X), fxplug.load_pass("lora", rank=2, slots=1))
    with_slots.adapters.load("ink", "user/peft")
    with_slots.adapters.use({"ink": 1.0})
    by_pass = fxplug.apply(fxplug.trace(net(), X), fxplug.load_pass("adapter", file="user/peft"))
    expected = net()
    with torch.no_grad():
        expected[0].weight += 3 * torch.full((4, 4), 2.0)
    for module in (with_slots, by_pass, there):
        torch.testing.assert_close(module(X), expected(X))
    fxplug.convert_adapter("user/peft", tmp_path / "new.safetensors", as_="fxplug")
    assert load_file(tmp_path / "new.safetensors")
    assert fxplug.inspect_adapter("user/peft").ranks == {2: 1}
    assert hub.asked("user/peft") == {"manifest.json", "adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.slow
def test_a_configuration_names_an_adapter_on_the_hub(hub, tmp_path):
    hub.add("user/peft", files_of(peft(tmp_path / "peft")))
    commit = hub.repos["user/peft"].commits[0][0]
    hub.add("user/peft", files_of(peft(tmp_path / "peft", value=0.25)))
    (tmp_path / "configs").mkdir()
    (tmp_path / "nets.py").write_text("from torch import nn\ndef net(): return nn.Sequential(nn.Linear(4, 4))\n")
    text = f"model: nets:net\ninputs: {{input: [2, 4]}}\npasses: [adapter: {{file: user/peft@{commit}}}]\n"
    (tmp_path / "configs" / "it.yaml").write_text(text)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); fxplug.rewrite('configs/it.yaml', out='out')"
    offline(code, tmp_path / "home", HF_HUB_OFFLINE="0", HF_ENDPOINT=hub.url, HF_HUB_DISABLE_XET="1")
    new = fxplug.load(tmp_path / "out")
    downs = [value for name, value in new.named_parameters() if name.startswith("adapter") and "down" in name]
    assert [value.max().item() for value in downs] == [1.0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_pipeline_is_rewritten_with_an_adapter_by_name(hub, tmp_path):
    (tmp_path / "words").mkdir()
    pipe = pipelines.stable_diffusion(tmp_path / "words")
    layer = next(name for name, one in pipe.unet.named_modules() if name.endswith("to_q"))
    weight = pipe.unet.get_submodule(layer).weight
    half = {"A": torch.ones(2, weight.shape[1]), "B": torch.ones(weight.shape[0], 2)}
    save_file({f"unet.{layer}.lora_{key}.weight": value for key, value in half.items()}, tmp_path / "w.safetensors")
    hub.add("user/lora", {"pytorch_lora_weights.safetensors": (tmp_path / "w.safetensors").read_bytes(), "x.bin": b"x"})
    fxplug.rewrite_pipeline(pipe, adapters={"ink": "user/lora"}, prompt="a cat", num_inference_steps=1, height=64, width=64)
    assert pipe.unet.adapters.active == {"ink": 1.0} and pipe.unet.meta["passes"][0]["sites"][0]["path"] == layer
    assert hub.asked("user/lora") == {"manifest.json", "adapter_config.json", "pytorch_lora_weights.safetensors"}


def test_a_file_of_several_is_named(hub, tmp_path):
    folder = peft(tmp_path / "one", file="one.safetensors")
    hub.add("user/many", {**files_of(folder), "two.safetensors": b"x", "sub/three.safetensors": b"x"})
    with pytest.raises(ArtifactError, match=r"2 files of weights: give one, as 'user/many/one.safetensors'"):
        fxplug.inspect_adapter("user/many")
    assert hub.asked("user/many") <= {"manifest.json", "adapter_config.json", "pytorch_lora_weights.safetensors",
                                      "adapter_model.safetensors"}  # fmt: skip
    assert fxplug.inspect_adapter("user/many/one.safetensors").file.entries[0].scale == 3.0
    assert "two.safetensors" not in hub.asked("user/many")


def test_a_mirror_that_does_not_say_what_is_missing(hub, tmp_path, monkeypatch):
    plain = hub_server.Handler.answer

    def answer(self, status=200, body=None, **headers):
        plain(self, status, body, **({} if status == 404 else headers))

    monkeypatch.setattr(hub_server.Handler, "answer", answer)
    hub.add("user/peft", files_of(peft(tmp_path / "peft")))
    assert fxplug.inspect_adapter("user/peft").file.entries[0].scale == 3.0
    fxplug.push(rewritten(), NAME)
    assert torch.equal(fxplug.load(NAME)(X), rewritten()(X))


def test_a_pickled_adapter_is_never_fetched(hub):
    hub.add("user/old", {"adapter_config.json": b"{}", "adapter_model.bin": b"x", "pytorch_model.bin": b"x"})
    with pytest.raises(ArtifactError, match=r"'user/old' has no .safetensors file .*adapter_model.bin is pickled"):
        fxplug.load_adapter(rewritten(), "user/old")
    assert not any(name.endswith(".bin") for name in hub.asked("user/old"))


def test_a_pushed_rewrite_is_an_adapter(hub):
    fxplug.push(rewritten(), NAME)
    module = fxplug.apply(fxplug.trace(net(), X), fxplug.load_pass("lora", rank=2))
    fxplug.load_adapter(module, NAME)
    assert torch.equal(module(X), rewritten()(X))


def test_an_adapter_is_no_rewrite(hub, tmp_path):
    hub.add("user/peft", files_of(peft(tmp_path / "peft")))
    with pytest.raises(ArtifactError, match=r"'user/peft' on the hub is not an artifact: .*load_adapter"):
        fxplug.load("user/peft")
    assert hub.asked("user/peft") == {"manifest.json"}


def test_weights_in_the_cache_without_their_configuration_are_refused(hub, tmp_path, monkeypatch):
    hub.add("user/peft", files_of(peft(tmp_path / "peft")))
    hf_hub_download("user/peft", "adapter_model.safetensors")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ArtifactError, match=r"user/peft.* not in the cache.* or not all of it"):
        fxplug.load_adapter(rewritten(), "user/peft")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hf_hub_download("user/peft", "adapter_config.json")  # as PEFT does, which knows no manifest
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fxplug.inspect_adapter("user/peft").file.entries[0].scale == 3.0


# --- what goes wrong


def test_no_such_repository(hub):
    with pytest.raises(ArtifactError, match=r"'user/none' on 127.* none of this name, or it is private.*hf auth login"):
        fxplug.load("user/none")
    with pytest.raises(ArtifactError, match="'user/none' on 127"):
        fxplug.load_adapter(rewritten(), "user/none")


def test_a_near_name_here_is_told(hub, tmp_path):
    fxplug.save(rewritten(), tmp_path / "out" / "module")
    with pytest.raises(ArtifactError, match=r"'out/modul' on .*no file or folder 'out/modul' exists .*\(did you mean 'module'"):
        fxplug.load("out/modul")


@pytest.mark.parametrize("name", ["out/ink.safetensors", "./user/ink", "user", "a/b/c", "/user/ink", "user/../x.safetensors"])
def test_paths_are_no_names(name, hub):
    with pytest.raises(ArtifactError):
        fxplug.load(name)
    with pytest.raises(ArtifactError):
        fxplug.load_adapter(rewritten(), name)
    assert hub.log == []


@pytest.mark.slow
@pytest.mark.parametrize(("how", "finding"), [
    ({"private": True}, "private"), ({"gated": True}, "access on request"), ({"status": 503}, "status 503: try again later"),
    ({"status": 401}, "private|requires a login"), ({"status": 418}, "status 418"),
])  # fmt: skip
def test_what_the_hub_refuses_names_the_repository(how, finding, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download._ETAG_RETRY_TIMEOUT", 1)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    fxplug.push(rewritten(), NAME)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    vars(hub.repos[NAME]).update(how)
    with pytest.raises(ArtifactError, match=f"'{NAME}' on .*({finding})"):
        fxplug.load(NAME)
    with pytest.raises(ArtifactError, match=f"'{NAME}' on .* cannot be pushed to: "):
        fxplug.push(rewritten(), NAME)


def test_no_such_revision(hub):
    fxplug.push(rewritten(), NAME)
    with pytest.raises(ArtifactError, match=f"'{NAME}' .*it has no revision 'v2': give a branch, a tag or a full commit"):
        fxplug.load(NAME, revision="v2")
    with pytest.raises(ArtifactError, match="give one of them"):
        fxplug.load(f"{NAME}@v2", revision="main")


@pytest.mark.slow
def test_a_transfer_that_breaks_off_leaves_nothing_half(hub, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    old, new = rewritten(), rewritten(value=0.25)
    fxplug.push(old, NAME)
    fxplug.load(NAME)
    fxplug.push(new, NAME)
    hub.repos[NAME].broken.add("lora.safetensors")
    with pytest.raises(ArtifactError, match=f"'{NAME}' on .* cannot be fetched: the transfer broke off: try again"):
        fxplug.load(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert torch.equal(fxplug.load(NAME)(X), old(X))  # what was whole before
    with pytest.raises(ArtifactError, match="or not all of it"):
        fxplug.load(NAME, revision=hub.repos[NAME].commits[-1][0])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.repos[NAME].broken.clear()
    assert torch.equal(fxplug.load(NAME)(X), new(X))


@pytest.mark.parametrize("body", [{"commitUrl": 3}, ["x"]])
def test_a_hub_that_answers_something_else(body, hub, monkeypatch):
    monkeypatch.setattr(hub_server.Handler, "commit", lambda self, name, rows: self.answer(body=body))
    with pytest.raises(ArtifactError, match=f"'{NAME}' on .* cannot be pushed to: the hub's answer could not be read"):
        fxplug.push(rewritten(), NAME)


def test_a_changed_file_is_refused(hub):
    fxplug.push(rewritten(), NAME)
    files = dict(hub.repos[NAME].commits[-1][1])
    files["model.safetensors"] = files["model.safetensors"][:-1] + b"?"
    hub.add(NAME, files)
    with pytest.raises(ArtifactError, match=f"'{NAME}': model.safetensors has changed since.* remove the repository"):
        fxplug.load(NAME)


def test_offline_and_not_in_the_cache(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for call in (lambda: fxplug.load(NAME), lambda: fxplug.load_adapter(rewritten(), NAME)):
        with pytest.raises(ArtifactError, match=f"'{NAME}' on .* not in the cache.*HF_HUB_OFFLINE"):
            call()
    with pytest.raises(ArtifactError, match=f"'{NAME}' on .* cannot be pushed to: .*HF_HUB_OFFLINE"):
        fxplug.push(rewritten(), NAME)


def test_a_hub_that_is_out_of_reach(hub, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:1/{repo_id}/resolve/{revision}/{filename}")
    with pytest.raises(ArtifactError, match=f"'{NAME}' on 127.0.0.1:1 .*out of reach"):
        fxplug.load(NAME)


@pytest.mark.slow
def test_a_full_disk(hub, tmp_path):
    fxplug.push(rewritten(), NAME)
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))\n"
        f"try: fxplug.load('{NAME}')\nexcept fxplug.ArtifactError as error: print(error)"
    )
    out = offline(code, tmp_path / "full", HF_HUB_OFFLINE="0", HF_ENDPOINT=hub.url, HF_HUB_DISABLE_XET="1")
    assert f"'{NAME}' on" in out and "the file would be too large" in out


@pytest.mark.parametrize(("name", "finding"), [
    ("ink", "write 'user/name'"), ("a/b/c", "write 'user/name'"), ("user/in k", "write 'user/name'"),
    ("user/a--b", "not the name of a repository"), ("user/..", "not the name of a repository"), ("", "write 'user/name'"),
])  # fmt: skip
def test_what_is_no_name_is_not_pushed_to(name, finding, hub):
    with pytest.raises(ArtifactError, match=finding):
        fxplug.push(rewritten(), name)
    assert not [path for _, path in hub.log if path != "/api/agent-harnesses"]


def test_what_is_no_rewrite_is_not_pushed(hub, tmp_path):
    fxplug.save(rewritten(), tmp_path / "run" / "module")
    for wrong, finding in ((net(), "not a Sequential"), (tmp_path, "no manifest.json"), (tmp_path / "none", "no folder"),
                           (tmp_path / "run", "push its module")):  # fmt: skip
        with pytest.raises(ArtifactError, match=finding):
            fxplug.push(wrong, NAME)
    (tmp_path / "run" / "module" / "graph.txt").write_text("x")
    with pytest.raises(ArtifactError, match="graph.txt"):
        fxplug.push(tmp_path / "run" / "module", NAME)
    for settings in ({"base": 3}, {"license": 3}, {"base": "not a name"}):
        with pytest.raises(SpecError):
            fxplug.push(rewritten(), NAME, **settings)
    assert NAME not in hub.repos


def test_hashes_of_the_pushed_files_are_those_of_the_manifest(hub):
    fxplug.push(rewritten(), NAME)
    files = hub.repos[NAME].commits[-1][1]
    for name, record in json.loads(files["manifest.json"])["files"].items():
        assert hashlib.sha256(files[name]).hexdigest() == record["sha256"]
