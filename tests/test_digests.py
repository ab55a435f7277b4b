"""Saved folders that are known by a digest, or by a signature."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import small
import torch
from torch import nn

import fxplug
from fxplug.core.errors import ArtifactError, SpecError

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def saved(tmp_path):
    net = small.seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    new = fxplug.apply(fxplug.trace(net, X), fxplug.load_pass("lora", rank=2))
    fxplug.save(new, tmp_path / "it", config={"model": "x:y"})
    return tmp_path / "it"


def rewritten_manifest(folder, name):
    """The manifest of whoever changes a file and its hash as well."""
    import hashlib

    manifest = json.loads((folder / "manifest.json").read_text())
    data = (folder / name).read_bytes()
    manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def test_a_folder_is_loaded_by_its_digest(saved, tmp_path):
    known = fxplug.digest(saved)
    assert re.fullmatch("sha256:[0-9a-f]{64}", known)
    assert small.command("show", saved, "--digest").stdout.strip() == known
    assert fxplug.load(saved, digest=known)(X).shape == (2, 2)
    assert fxplug.digest(shutil.copytree(saved, tmp_path / "copy")) == known
    fxplug.save(fxplug.load(saved), tmp_path / "again", config={"model": "x:y"})
    assert fxplug.digest(tmp_path / "again") == known


FILES = ["model.safetensors", "lora.safetensors", "graph.json", "graph.txt", "config.yaml", "manifest.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("manifest_too", [False, True])
def test_a_changed_byte_is_refused(name, manifest_too, saved):
    known = fxplug.digest(saved)
    data = bytearray((saved / name).read_bytes())
    at = len(data) - 1 if name != "manifest.json" else data.index(b"2.", data.index(b'"torch"'))
    data[at] ^= 1
    (saved / name).write_bytes(bytes(data))
    if manifest_too and name != "manifest.json":
        rewritten_manifest(saved, name)
    with pytest.raises(ArtifactError) as error:
        fxplug.load(saved, digest=known)
    if manifest_too or name == "manifest.json":
        assert re.search(rf"it has the digest sha256:\w{{64}}, not {known}: it was changed or is another f", str(error.value))
    else:
        assert f"{name} has changed since it was saved" in str(error.value)


@pytest.mark.parametrize("wrong", ["", 0, False, "sha256:", "a" * 64, "md5:" + "a" * 32, "sha256:" + "g" * 64, b"sha256:"])
def test_what_is_no_digest_is_an_error(wrong, saved):
    with pytest.raises(SpecError, match="digest must be 'sha256:' and 64 hexadecimal digits, as fxplug.digest gives it"):
        fxplug.load(saved, digest=wrong)


def test_what_is_no_saved_folder_has_no_digest(tmp_path):
    with pytest.raises(ArtifactError, match="is not an artifact: it has no manifest.json"):
        fxplug.digest(tmp_path)
    with pytest.raises(ArtifactError, match="there is no folder"):
        fxplug.digest(tmp_path / "none")


def test_tools_of_the_model_signing_standard_sign_a_folder(saved, tmp_path):
    """OpenSSF's model-signing, where it is installed: a signature beside the folder, and nothing of ours to change for it."""
    signing = pytest.importorskip("model_signing.signing", reason="pip install model-signing")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from model_signing import verifying

    secret = ec.generate_private_key(ec.SECP256R1())
    pem, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    plain = secret.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "key.pem").write_bytes(plain)
    (tmp_path / "public.pem").write_bytes(secret.public_key().public_bytes(pem, form))
    signing.Config().use_elliptic_key_signer(private_key=tmp_path / "key.pem").sign(saved, tmp_path / "it.sig")
    check = verifying.Config().use_elliptic_key_verifier(public_key=tmp_path / "public.pem")
    check.verify(saved, tmp_path / "it.sig")
    assert fxplug.load(saved)(X).shape == (2, 2)
    for name in ("model.safetensors", "graph.json"):
        kept = (saved / name).read_bytes()
        (saved / name).write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        with pytest.raises(ValueError, match="mismatch"):
            check.verify(saved, tmp_path / "it.sig")
        (saved / name).write_bytes(kept)
    (saved / "more.txt").write_text("")
    with pytest.raises(ValueError, match="mismatch"):
        check.verify(saved, tmp_path / "it.sig")
