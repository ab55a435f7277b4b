"""Places as people write them: bare names, endings, braces, `all-linear`; what is said where they miss, and what they leave."""

from __future__ import annotations

import re

import pytest
import small
import timm
import torch
import unets

import fxplug
from fxplug.blocks import Lora
from fxplug.config.cli.pages import SMALL
from fxplug.config.run_config import resolve
from fxplug.core.spec.addresses import choose_names, expand_braces
from fxplug.core.spec.yaml_source import parse_yaml

BLOCKS = [f"blocks.{i}" for i in (0, 1)]


def found(at, gm=None, **given):
    return fxplug.find(gm or small.plain_vit().gm, fxplug.load_pass("lora", at=at, **given))


def paths(at, gm=None, **given):
    return [site.path for site in found(at, gm, **given)]


def peft_takes(model, target_modules):
    from peft import LoraConfig, inject_adapter_in_model

    made = inject_adapter_in_model(LoraConfig(target_modules=target_modules), model)
    return [name for name, module in made.named_modules() if hasattr(module, "lora_A")]


@pytest.fixture(scope="module")
def xl():
    """SDXL's UNet at its own size, without memory."""
    return unets.sdxl_full_traced().gm


@pytest.mark.parametrize(
    "at, ends",
    [
        ("qkv", ["attn.qkv"]),
        ("attn.qkv", ["attn.qkv"]),
        (["qkv", "fc1"], ["attn.qkv", "mlp.fc1"]),
        ("attn.{qkv,proj}", ["attn.qkv", "attn.proj"]),
        ("attn.{qkv, proj}", ["attn.qkv", "attn.proj"]),
        ("{qkv,mlp.fc1}", ["attn.qkv", "mlp.fc1"]),
        ("blocks.*.attn.{q*,proj}", ["attn.qkv", "attn.proj"]),
        ("**.{attn,mlp}.{qkv,fc1}", ["attn.qkv", "mlp.fc1"]),
        ("blocks.{0,1}.attn.qkv", ["attn.qkv"]),
        ("blocks.{i}.attn.{qkv,proj}", ["attn.qkv", "attn.proj"]),
        ("blocks.{0:2}.attn.{qkv,proj}", ["attn.qkv", "attn.proj"]),
    ],
    ids=str,
)
def test_names_and_endings(at, ends):
    assert sorted(paths(at)) == sorted(f"{block}.{end}" for block in BLOCKS for end in ends)


def test_a_name_that_is_a_path_means_that_path_alone():
    assert paths("head") == ["head"]
    assert list(choose_names("proj_out", ["proj_out", "blocks.0.proj_out"])) == ["proj_out"]
    assert list(choose_names("proj_out", ["x_proj_out", "blocks.0.proj_out", "proj_out.0"])) == ["blocks.0.proj_out"]
    assert list(choose_names("{proj_out,to_q}", ["proj_out", "a.proj_out", "a.to_q"])) == ["proj_out", "a.to_q"]


@pytest.mark.parametrize("targets", [["to_q", "to_k"], ["to_q", "ff.net.2"], ["to_out.0", "proj_in"], "all-linear"], ids=str)
def test_it_takes_what_peft_takes_of_a_unet(targets):
    case = unets.sd15()
    wanted = peft_takes(unets.sd15_model(), targets)
    assert sorted(paths(targets, case.gm)) == sorted(wanted)


@pytest.mark.slow
def test_all_linear_is_pefts_of_a_classifier_and_of_a_language_model():
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    text = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, vocab_size=40, max_position_embeddings=32)).eval()
    picture = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=16, num_labels=5)).eval()
    plain = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=5).eval()
    calls = [(text, {"input_ids": torch.ones(1, 4, dtype=torch.long), "use_cache": False})]
    calls += [(model, {name: torch.zeros(1, 3, 32, 32)}) for model, name in ((picture, "pixel_values"), (plain, "x"))]
    for model, kwargs in calls:
        taken = paths("all-linear", fxplug.trace(model, (), kwargs))
        assert sorted(taken) == sorted(peft_takes(model, "all-linear"))
        assert "lm_head" not in taken


@pytest.mark.parametrize(
    "at, says",
    [
        ("qvk", "no region 'qvk', and none ends with '.qvk' (did you mean 'qkv'?)"),
        ("attn.qvk", "none ends with '.attn.qvk' (did you mean 'attn.qkv'?)"),
        ("attn.*", "a pattern must match the whole path: '**.attn.*' matches 4 places"),
        ("re:attn.qkv", "a regular expression must match from the start of a path: 're:.*attn.qkv' matches 2 places"),
        ("re:^attn.(qkv|proj)$", "'re:.*(?:attn.(qkv|proj)$)' matches 4 places"),
        ("re:qkv|fc1", "'re:.*(?:qkv|fc1)' matches 4 places"),
        ("attn.{qkv,prj}", "'prj' of the braces in 'attn.{qkv,prj}' matched 0 places"),
        ("**.attn.{qkv,prj}", "'prj' of the braces in '**.attn.{qkv,prj}' matched 0 places"),
        ("{qvk,prj}", "(did you mean 'qkv'?)\n  no region 'prj'"),
        (["qkv", "{fc1,fc3}"], "'fc3' of the braces in '{fc1,fc3}' matched 0 places"),
        ("{attn,{mlp,head}}", "braces that are not closed, or are nested"),
        ("**.{qkv", "braces that are not closed"),
        ("blocks.{0:1,1}.attn.qkv", "a slice must be alone in its braces"),
        ("{a,b}" * 12, "expands to more than 1000 patterns"),
    ],
)
def test_what_misses_says_what_was_meant(at, says):
    with pytest.raises(fxplug.FxplugError, match=re.escape(says)):
        found(at)


def test_a_name_of_several_may_miss_where_that_is_said():
    assert len(paths("attn.{qkv,prj}", expect=">=0")) == len(paths(["qkv", "nope"], expect=">=0")) == 2


def test_names_in_braces_are_bounded():
    assert expand_braces("a.{b,c}.{d,e}") == ["a.b.d", "a.b.e", "a.c.d", "a.c.e"]
    assert expand_braces("re:a{1,2}") == ["re:a{1,2}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "at, count, left, pattern",
    [
        ("re:.*attn.*to_[qkv]$", 420, 140, ["**.to_out.0"]),
        ("to_q", 140, 420, ["**.to_k", "**.to_v", "**.to_out.0"]),
        (["to_q", "to_k", "to_v", "to_out.0"], 560, 0, []),
        ("**.attn*.to_*", 560, 0, []),
        ("all-linear", 743, 0, []),
        ("conv_in", 1, 1, ["conv_out"]),
    ],
    ids=str,
)
def test_a_match_ends_with_what_it_left(xl, at, count, left, pattern):
    sites = found(at, xl)
    assert len(sites) == count
    if not left:
        assert sites.left == "" and sites.summary == f"{count} site{'s' * (count > 1)}"
        return
    assert re.match(rf"{left} similar layers? w(as|ere) not matched: {re.escape(', '.join(pattern))} ", sites.left)
    given = re.search(r"at: (\[.*\])\)$", sites.left)
    again = found(parse_yaml(given[1]).data, xl)  # as it stands, it goes into a configuration
    assert len(again) == count + left and again.left == ""
    assert str(sites).endswith(sites.summary) and len(str(sites)) < 2000 and len(repr(sites)) < 2000


def test_what_is_left_is_of_the_same_class_in_the_same_modules_or_of_the_same_name():
    left = found("blocks.0.attn.qkv").left
    assert left.startswith("2 similar layers were not matched: blocks.0.attn.proj, blocks.1.attn.qkv (")
    assert found("blocks.*.attn.*").left == ""  # the layers of the mlp are other ones
    assert found("head").left == found("patch_embed.proj").left == ""
    gates = fxplug.find(small.plain_vit().gm, fxplug.load_pass("scale", at="blocks.0.mlp"))
    assert gates.left.startswith("1 similar layer was not matched: blocks.1.mlp (a pattern that matches them too: at: [")


def test_a_count_silences_what_is_left_and_holds():
    assert found("qkv").left
    assert found("qkv", expect=2).left == found("qkv", expect="==2").left == found("qkv", expect="<=2").left == ""
    with pytest.raises(fxplug.MatchError, match="matched 2 places, expected ==3"):
        found("qkv", expect=3)
    rule = fxplug.Rule(fxplug.Match("**.qkv"), Lora, options={"rank": 1}, expect="==2")
    assert fxplug.find(small.plain_vit().gm, fxplug.Pass("p", [rule])).left == ""
    two = fxplug.load_pass("ia3", at="**.attn.qkv", feedforward="**.mlp.fc2", expect=5)
    with pytest.raises(fxplug.MatchError, match="its 2 rules matched 4 places, expected ==5"):
        fxplug.find(small.plain_vit().gm, two)
    for wrong in ("many", True, -1):
        with pytest.raises(fxplug.SpecError, match="expect: .* is not a count"):
            fxplug.load_pass("lora", expect=wrong)


def test_the_count_of_a_configuration_is_kept_with_it():
    config = fxplug.load_config({"model": "vit_tiny_patch16_224", "passes": [{"lora": {"at": "qkv", "expect": 12}}]})
    assert resolve(config)["passes"][0]["lora"]["expect"] == "==12"


def test_the_command_line_says_what_was_left():
    config = {"model": SMALL, "passes": [{"lora": {"at": "qkv"}}]}
    text = str(fxplug.rewrite(config, dry_run=True))
    assert "lora: 2 sites, " in text and "lora: 2 similar layers were not matched: **.proj (a pattern" in text


@pytest.mark.parametrize(
    "item, says",
    [
        ("at=**.qkv", "to give text, quote it: --set 'passes.0.lora.at=\"**.qkv\"'"),
        ("at=*qkv", "to give text, quote it"),
        ("at=[**.qkv]", "quote a text that begins with * or {, or has braces within [ ] or { }"),
        ("at={qkv,proj}", 'quote it in YAML to make it text: "{qkv,proj}"'),
        ("at=[head, {qkv,proj}]", 'quote it in YAML to make it text: "{qkv,proj}"'),
    ],
)
def test_a_value_that_needs_quotes_says_so(item, says):
    with pytest.raises(fxplug.SpecError, match=re.escape(says)):
        fxplug.load_config("vit_lora", [f"passes.0.lora.{item}"])


def test_a_line_of_a_file_that_needs_quotes_says_so(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: resnet18\npasses:\n  - lora: {at: **.conv1}\n")
    with pytest.raises(fxplug.SpecError, match=r"c.yaml:3: .* quote"):
        fxplug.load_config(file)


def test_a_hint_takes_bounded_time():
    with pytest.raises(fxplug.MatchError, match="the path does not match"):  # at the start it ends at once
        found("re:x(([a-z0-9]+)+[.]*)+Z$")


def test_what_a_hint_says_to_write_finds_what_it_says():
    for expression in ("attn.qkv", "qkv|fc1", "^mlp", "(fc1|fc2)$"):
        with pytest.raises(fxplug.MatchError) as caught:
            found(f"re:{expression}")
        text, count = re.search(r"'(re:.*)' matches (\d+) places?$", str(caught.value)).groups()
        assert len(found(text)) == int(count)


def test_a_glob_of_many_parts_takes_bounded_time():
    names = [".".join(f"part{i}" for i in range(40))] * 50
    assert choose_names("**." * 60 + "x", names) == {} and len(choose_names("**." * 60 + "part39", names)) == 1
    assert list(choose_names("****", ["a.b"])) == list(choose_names("**.**", ["a.b"])) == ["a.b"]
