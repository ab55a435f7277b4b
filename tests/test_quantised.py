"""Adapters on quantised layers of bitsandbytes and torchao: the base stays as it was packed, and adapters stand beside it."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from functools import cache
from typing import Any

import peft
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from sweeps import sweep
from torch import nn

import fxplug
from fxplug.core import quantised
from fxplug.core.errors import ArtifactError, FxplugError, SpecError, TraceError, VerifyError

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")

from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4  # noqa: E402

LAYERS = ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"]
LIBRARIES = ["bitsandbytes", "torchao"]
PACKS = "support_avx512bf16_for_cpu"  # bitsandbytes' own mark of a Linear4bit that repacks itself in evaluation


def inputs(batch=2):
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def vit():
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 128, "num_heads": 4, "num_classes": 5}
    return timm.models.vision_transformer.VisionTransformer(**options).eval().requires_grad_(False)


def replaced(model, make):
    """The model with `make(layer)` in the place of each linear layer of its blocks."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and path.startswith("blocks."):
            owner, _, key = path.rpartition(".")
            setattr(model.get_submodule(owner), key, make(layer))
    return model.eval().requires_grad_(False)


def linear4bit(layer, **options):
    has_bias = layer.bias is not None
    options = {"compute_dtype": torch.float32, "quant_type": "nf4", **options}
    made = bnb.nn.Linear4bit(layer.in_features, layer.out_features, has_bias, **options)
    made.load_state_dict(layer.state_dict())
    return made.to("cpu")


def linear8bit(layer):
    made = bnb.nn.Linear8bitLt(layer.in_features, layer.out_features, layer.bias is not None, has_fp16_weights=False)
    made.load_state_dict(layer.state_dict())
    return made.to("cpu")


def nf4(layer):
    layer.weight = nn.Parameter(to_nf4(layer.weight.detach()), requires_grad=False)
    return layer


def torchao(config):
    def quantised(model):
        quantization.quantize_(model, config, filter_fn=lambda m, path: isinstance(m, nn.Linear) and path.startswith("blocks."))
        return model.requires_grad_(False)

    return quantised


WAYS = {
    "nf4 of bitsandbytes": lambda m: replaced(m, linear4bit),
    "fp4 of bitsandbytes": lambda m: replaced(m, lambda layer: linear4bit(layer, quant_type="fp4", compress_statistics=False)),
    "int8 of bitsandbytes": lambda m: replaced(m, linear8bit),
    "int8 of torchao": torchao(quantization.Int8WeightOnlyConfig()),
    "float8 of torchao": torchao(quantization.Float8WeightOnlyConfig()),
    "int4 of torchao": torchao(quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4)),
    "nf4 of torchao": lambda m: replaced(m, nf4),
}
BNB = [way for way in WAYS if way.endswith("bitsandbytes")]
each = sweep("way", WAYS, "nf4 of bitsandbytes", "int8 of bitsandbytes", "int8 of torchao", "nf4 of torchao")


@cache
def made(way):
    """A quantised model and its trace."""
    torch.manual_seed(0)  # the same model, whichever test is the first to ask
    model = WAYS[way](vit())
    return model, fxplug.trace(model, inputs())


def lora(way, at="blocks.**", **options):
    return fxplug.apply(made(way)[1], fxplug.load_pass("lora", at=at, rank=4, **options))


def trained(way, seed=3):
    """LoRA whose second halves are no longer zero."""
    new = lora(way)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(new.named_parameters()):
            if name.endswith("up.weight"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return new


def peft_of(way, new):
    """PEFT's LoRA on a copy of the quantised model, with the weights of `new`, and the names of these by PEFT's."""
    base = copy.deepcopy(made(way)[0])
    for layer in base.modules():
        if PACKS in vars(layer):
            setattr(layer, PACKS, False)  # else its weights are rounded anew at the first call in evaluation
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot merge into a layer of torchao
        wrapped = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=4, target_modules=LAYERS))
    ours, names = dict(new.named_parameters()), {}
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".lora_" in name:
                path = name.removeprefix("base_model.model.").partition(".lora_")[0]
                names[name] = f"lora.{path}.Lora.{'down' if 'lora_A' in name else 'up'}.weight"
                parameter.copy_(ours[names[name]])
    return wrapped, names


def parts(model):
    """The bits of every tensor of a model's quantised layers, however they are held."""
    return [t.clone() for m in model.modules() for t in (*tensors_in(m._parameters.values()), *tensors_in([scales(m)]))]


def scales(layer):
    """Those of a Linear8bitLt, which its first call takes from its weight."""
    own = getattr(layer, "state", None)
    return None if own is None else own.SCB if layer.weight.SCB is None else layer.weight.SCB


def tensors_in(values):
    for value in values:
        if hasattr(value, "__tensor_flatten__"):
            yield from tensors_in(getattr(value, name) for name in value.__tensor_flatten__()[0])
        elif isinstance(value, torch.Tensor):
            yield value.detach().as_subclass(torch.Tensor)
            if getattr(value, "quant_state", None) is not None:
                yield from tensors_in(value.quant_state.as_dict(packed=True).values())


def same(before, model):
    return all(torch.equal(a, b) for a, b in zip(before, parts(model), strict=True))


def close(way):
    """What may differ where sums are in another order: inputs that are rounded to 8 bits make steps of a last bit."""
    return {"rtol": 1e-2, "atol": 1e-2} if way == "int8 of bitsandbytes" else {"rtol": 1e-5, "atol": 1e-5}


@each
def test_a_quantised_layer_is_traced_and_taken_by_rules_for_linear(way):
    model, gm = made(way)
    with torch.no_grad():
        ours = gm(inputs())
    for layer in model.modules():
        if PACKS in vars(layer):
            assert vars(layer)[PACKS] == bnb.nn.modules.has_avx512bf16()  # as it was
    assert torch.equal(ours, gm(inputs()))
    assert len(fxplug.find(gm, fxplug.load_pass("lora", at="blocks.**"))) == 4
    kind = type(model.blocks[0].attn.qkv).__name__
    rule = fxplug.Rule(fxplug.Match(module=[kind, "Conv2d"]), use="fxplug.blocks:Lora")
    assert "blocks.0.attn.qkv" in [site.path for site in fxplug.find(gm, fxplug.Pass("own", rules=[rule]))]


@each
def test_a_new_adapter_is_neutral_to_the_bit_beside_convolutions_too(way):
    model, gm = made(way)
    new = lora(way, at="**")
    before = parts(model)
    report = fxplug.verify(gm, new, (inputs(),), compile=False)
    found = {check.name: (check.status, check.detail) for check in report.checks}
    assert found["neutral"][0] == "ok" and found["saved"][0] == "ok", found
    assert "load needs allow" in found["saved"][1]
    assert same(before, model) and len(new.meta["passes"][0]["sites"]) == 6


@each
@pytest.mark.parametrize("training", [True, False])
def test_results_and_gradients_are_those_of_peft(way, training):
    new = trained(way).train(training)
    wrapped, names = peft_of(way, new)
    wrapped.train(training)
    x = inputs()
    theirs, ours = wrapped(x), new(x)
    theirs.square().sum().backward()
    ours.square().sum().backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    own = dict(new.named_parameters())
    assert len(names) == 8
    for name, parameter in wrapped.named_parameters():
        if name in names:
            assert parameter.grad.abs().max() > 0
            torch.testing.assert_close(own[names[name]].grad, parameter.grad, rtol=1e-5, atol=1e-5)


@each
def test_adapters_learn_and_the_base_stays(way):
    model, _ = made(way)
    new = lora(way).train()
    before = parts(model)
    learning = [p for name, p in new.named_parameters() if name.startswith("lora.")]
    assert all(p.requires_grad for p in learning)
    assert not any(p.requires_grad for name, p in new.named_parameters() if not name.startswith("lora."))
    optimizer = torch.optim.AdamW(learning, 1e-2)
    losses = []
    for _ in range(5):
        loss = F.cross_entropy(new(inputs()), torch.tensor([1, 2]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert same(before, model) and same(before + [t.detach() for t in learning], new)


@each
def test_an_artifact_holds_quantised_layers(way, tmp_path):
    new = trained(way).eval()
    with torch.no_grad():
        expected = new(inputs())
    fxplug.save(new, tmp_path / "a")
    library = way.rpartition(" ")[2]
    with pytest.raises(ArtifactError, match=rf"of {library}.* which is not allowed: load\(folder, allow=\['{library}'\]\)"):
        fxplug.load(tmp_path / "a")
    again = fxplug.load(tmp_path / "a", allow=[library])
    with torch.no_grad():
        assert torch.equal(again(inputs()), expected)
    assert same(parts(new), again)
    fxplug.save(again, tmp_path / "b")
    for name in ("graph.json", "model.safetensors", "lora.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    again.train()(inputs()).sum().backward()
    assert all(p.grad is not None for name, p in again.named_parameters() if name.startswith("lora."))


@each
def test_slots_take_adapters_of_peft_on_quantised_layers(way, tmp_path):
    one = trained(way).eval()
    wrapped, _ = peft_of(way, one)
    wrapped.save_pretrained(tmp_path / "ink")
    new = lora(way, slots=2).eval()
    new.adapters.load("ink", tmp_path / "ink")
    with torch.no_grad():
        base = new(inputs())
        new.adapters.use("ink")
        both = new(inputs())
        new.adapters.use([None, "ink"])
        mixed = new(inputs())
        torch.testing.assert_close(both, one(inputs()), **close(way))
    torch.testing.assert_close(mixed, torch.stack([base[0], both[1]]), **close(way))
    assert (both - base).abs().max() > 0.05
    fxplug.save(new, tmp_path / "saved")
    again = fxplug.load(tmp_path / "saved", allow=LIBRARIES)
    with torch.no_grad():
        assert torch.equal(again(inputs()), mixed)


@each
@pytest.mark.parametrize("merge", ["merge", "fold", "live"])
def test_a_merge_into_quantised_layers_is_refused_by_name(way, merge):
    new = lora(way, slots=2) if merge == "live" else trained(way)
    library = way.rpartition(" ")[2]
    text = rf"Lora at 'blocks.0.attn.qkv' cannot be merged into a weight: the layer is quantised \(\w+ of {library}\)"
    with pytest.raises(SpecError, match=text):
        fxplug.merge(new) if merge == "merge" else fxplug.lower(new, merge=merge)


@each
def test_other_lowerings_leave_quantised_layers_as_they_are(way):
    new = trained(way).eval()
    with torch.no_grad():
        expected = new(inputs())
        for options in ({"fuse": "fused"}, {"merge": "auto"}):
            lowered = fxplug.lower(new, **options)
            torch.testing.assert_close(lowered(inputs()), expected, **close(way))
            assert not [path for path in lowered.meta.get("forms", {}) if path.startswith("blocks.")], options
        banks = lora(way, slots=2).eval()
        torch.testing.assert_close(fxplug.lower(banks, merge="auto")(inputs()), banks(inputs()), **close(way))


@each
@pytest.mark.parametrize("name", ["loha", "dora", "lora_weight", "oft", "weight_norm"])
def test_a_pass_that_changes_weights_is_refused_by_name(way, name):
    with pytest.raises(SpecError, match=r"'blocks.0.mlp.fc1' is quantised \(\w+ of \w+\).* cannot change its 'weight'"):
        fxplug.apply(made(way)[1], fxplug.load_pass(name, at="blocks.0.mlp.fc1"))


@each
@pytest.mark.parametrize("name", ["ia3", "ssf", "adapter", "parallel_adapter", "scale"])
def test_passes_beside_a_layer_stand_at_quantised_ones(way, name):
    gm = made(way)[1]
    new = fxplug.apply(gm, fxplug.load_pass(name, at="blocks.*.mlp.fc1")).train()
    new(inputs()).square().sum().backward()
    grads = [p.grad for key, p in new.named_parameters() if key.startswith(f"{name}.")]
    assert grads and any(grad is not None and grad.abs().max() > 0 for grad in grads)


@each
def test_copies_and_moves_go_on_to_compute_the_same(way):
    if way == "nf4 of torchao" and not _deepcopies(to_nf4(torch.randn(256, 256))):
        pytest.fail("torchao copies its NF4Tensor no more")
    new = trained(way).eval()
    with torch.no_grad():
        expected = new(inputs())
        for other in (copy.deepcopy(new), copy.copy(new), copy.deepcopy(new).to("cpu"), copy.deepcopy(new).float()):
            assert torch.equal(other(inputs()), expected)
    assert new.state_dict().keys() - {k for k in new.state_dict() if k.startswith("lora.")} == made(way)[0].state_dict().keys()


def _deepcopies(tensor: Any) -> bool:
    return torch.equal(copy.deepcopy(tensor).get_original_weight(), tensor.get_original_weight())


@pytest.mark.slow
@each
def test_it_compiles_to_one_graph(way):
    new = trained(way).eval()
    with torch.no_grad():
        expected = new(inputs())
        found = torch.compile(new, backend="eager", fullgraph=True)(inputs())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["nf4 of bitsandbytes", "int8 of torchao", "nf4 of torchao"])  # a class of tensors each
def test_inductor_compiles_it(way):
    new = trained(way).eval()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(new, fullgraph=True)(inputs()), new(inputs()), rtol=1e-4, atol=1e-4)


@each
def test_a_layer_without_a_bias_and_a_convolution_beside_it(way, tmp_path):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 256, 8, 8)
            self.blocks = nn.ModuleList([nn.Linear(256, 256, bias=False), nn.Linear(256, 512)])
            self.head = nn.Linear(512, 5)

        def forward(self, x):
            x = self.conv(x).flatten(2).transpose(1, 2)
            return self.head(self.blocks[1](self.blocks[0](x).relu()).relu()).mean(1)

    torch.manual_seed(0)
    model = WAYS[way](Mixed().eval().requires_grad_(False))
    gm = fxplug.trace(model, inputs())
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="**", rank=2))
    fxplug.verify(gm, new, (inputs(),), compile=way == "fp4 of bitsandbytes")
    fxplug.save(new, tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(fxplug.load(tmp_path / "out", allow=LIBRARIES)(inputs()), new(inputs()))


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if way not in BNB])
def test_torchao_layers_are_exported(way, tmp_path):
    new = trained(way).eval()
    fxplug.export(new, tmp_path / "m.pt2", (inputs(),))
    with torch.no_grad():
        torch.testing.assert_close(torch.export.load(tmp_path / "m.pt2").module()(inputs()), new(inputs()))


@pytest.mark.parametrize("way", BNB)
def test_layers_of_bitsandbytes_are_not_exported(way, tmp_path):
    with pytest.raises(FxplugError, match=r"'blocks.0.attn.qkv' is a Linear\w+ of bitsandbytes, whose weight torch.export"):
        fxplug.export(trained(way), tmp_path / "m.pt2", (inputs(),))


@each
def test_a_trace_on_real_tensors_is_the_same(way):
    model, gm = made(way)
    before = parts(model)
    with torch.no_grad():
        assert torch.equal(fxplug.trace(model, inputs(), real=True)(inputs()), gm(inputs()))
    assert same(before, model)


@each
def test_adapters_have_the_dtype_of_what_a_layer_reads(way):
    model = WAYS[way](vit().bfloat16())
    gm = fxplug.trace(model, inputs().bfloat16())
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="blocks.**", rank=2))
    assert {p.dtype for name, p in new.named_parameters() if name.startswith("lora.")} == {torch.bfloat16}
    new.train()(inputs().bfloat16()).sum().backward()
    with torch.no_grad():
        assert torch.equal(new.eval()(inputs().bfloat16()), gm(inputs().bfloat16()))


@pytest.mark.parametrize("way", ["nf4 of bitsandbytes", "int8 of bitsandbytes", "int8 of torchao", "nf4 of torchao"])
def test_a_run_trains_adapters_on_a_quantised_base(way, tmp_path):
    gm = made(way)[1]
    before = parts(gm)
    data = [(image, index % 5) for index, image in enumerate(inputs(8))]
    settings = {"steps": 4, "batch": 4, "lr": 1e-2, "save": {"every": 2}, "log": {"tensorboard": False}, "quiet": True}
    new = lora(way)
    fxplug.Trainer(new, "classify", data, out=tmp_path / "run", device="cpu", **settings).fit()
    assert same([*before], gm) and any(p.abs().max() > 0 for name, p in new.named_parameters() if "up.weight" in name)
    again = fxplug.load(tmp_path / "run" / "module", allow=LIBRARIES).eval()
    with torch.no_grad():
        assert torch.equal(again(inputs()), new.eval()(inputs()))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["nf4 of bitsandbytes", "int8 of torchao"])
def test_a_plan_for_several_processes_leaves_quantised_layers_whole(way):
    new = trained(way).eval()
    plan = fxplug.parallel_plan(new, (inputs(),), tensor=2)
    par = fxplug.parallelize(new, plan)
    called = {node.target for node in par.graph.nodes if node.op == "call_module"}
    assert {f"blocks.0.{name}" for name in LAYERS} <= called
    assert fxplug.verify(new, par, (inputs(),), compile=False).ok


# --- what only some of the layers do


def int4_kernel(layer):
    opaque = pytest.importorskip("torchao.prototype.quantization.int4.int4_opaque_tensor", reason="torchao has moved it")
    made = opaque.Int4OpaqueTensor.from_hp(layer.weight.detach(), [1, 32])
    layer.weight = nn.Parameter(made, requires_grad=False)
    return layer


@pytest.mark.parametrize("kind", ["Int8Tensor", "Int4OpaqueTensor"])
def test_layers_without_a_gradient_are_for_running(kind, tmp_path):
    """Those that quantise their input too, and torchao's int4 kernel for CPUs."""
    x = inputs()
    if kind == "Int8Tensor":
        model = torchao(quantization.Int8DynamicActivationInt8WeightConfig())(vit())
    else:
        model, x = replaced(vit().bfloat16(), int4_kernel), x.bfloat16()
    gm = fxplug.trace(model, x)
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="blocks.**"))
    with pytest.raises(VerifyError, match=rf"through 'blocks.0.attn.qkv' \({kind} of torchao\).*train: false"):
        fxplug.verify(gm, new, (x,), compile=False)
    for running in ({"train": False}, {"slots": 2}):
        new = fxplug.apply(gm, fxplug.load_pass("lora", at="blocks.**", **running))
        assert fxplug.verify(gm, new, (x,), compile=False).ok
    fxplug.save(new, tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(fxplug.load(tmp_path / "out", allow=LIBRARIES)(x), new(x))


def test_a_layer_that_was_packed_for_evaluation_is_told():
    model = WAYS["nf4 of bitsandbytes"](vit())
    if not model.blocks[0].attn.qkv.support_avx512bf16_for_cpu:
        pytest.skip("bitsandbytes packs nothing on this processor")
    with torch.no_grad():
        model(inputs())
    with pytest.raises(TraceError, match=r"'blocks.0.attn.qkv' \(Linear4bit\) was packed .* unpack it with model"):
        fxplug.trace(model, inputs())
    model.state_dict()
    fxplug.trace(model, inputs())


def test_a_call_of_the_model_does_not_pack_the_weights_of_its_trace():
    model = WAYS["nf4 of bitsandbytes"](vit())
    new = fxplug.apply(fxplug.trace(model, inputs()), fxplug.load_pass("lora", at="blocks.**", rank=2))
    with torch.no_grad():
        expected = new(inputs())
        model(inputs())
        assert torch.equal(new(inputs()), expected)
    new.train()(inputs()).sum().backward()
    first = dict(new.named_parameters())["lora.blocks.0.attn.qkv.Lora.up.weight"]
    assert first.grad.abs().max() > 0


@pytest.mark.parametrize("kind", ["Linear4bit", "Linear8bitLt"])
def test_a_layer_that_is_not_quantised_yet_is_told(kind):
    options = {"has_fp16_weights": False} if kind == "Linear8bitLt" else {}
    model = replaced(vit(), lambda layer: getattr(bnb.nn, kind)(layer.in_features, layer.out_features, **options))
    with pytest.raises(TraceError, match=rf"'blocks.0.attn.qkv' \({kind}\) is not quantised yet: move the model"):
        fxplug.trace(model, inputs())


@pytest.mark.parametrize("kind, options", [
    ("LinearNF4", {"compute_dtype": torch.float32}),
    ("LinearFP4", {}),
    ("Linear4bit", {"quant_type": "nf4", "quant_storage": torch.bfloat16}),
    ("Linear8bitLt", {"has_fp16_weights": True}),
    ("Linear8bitLt", {"has_fp16_weights": False, "threshold": 6.0}),
])  # fmt: skip
def test_other_layers_of_bitsandbytes_go_the_same_way(kind, options, tmp_path):
    def own(layer):
        new = getattr(bnb.nn, kind)(layer.in_features, layer.out_features, **options)
        new.load_state_dict(layer.state_dict())
        return new.to("cpu")

    gm = fxplug.trace(replaced(vit(), own), inputs())
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="blocks.**", rank=2))
    assert fxplug.verify(gm, new, (inputs(),), compile=False).ok
    fxplug.save(new, tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(fxplug.load(tmp_path / "out", allow=LIBRARIES)(inputs()), new(inputs()))


@pytest.mark.parametrize("way", ["nf4 of bitsandbytes", "int8 of bitsandbytes"])
def test_a_hooked_layer_of_bitsandbytes_is_told(way):
    model = WAYS[way](vit())
    hook = model.blocks[0].attn.qkv.register_forward_hook(lambda module, given, out: out * 2)
    with pytest.raises(TraceError, match=r"'blocks.0.attn.qkv' \(Linear\w+\) has hooks .*remove_hook_from_module"):
        fxplug.trace(model, inputs())
    hook.remove()
    fxplug.trace(model, inputs())


@each
def test_a_layer_that_is_called_twice_has_one_adapter(way):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(256, 256)])

        def forward(self, x):
            return self.blocks[0](self.blocks[0](x).relu())

    x = torch.randn(2, 5, 256)
    gm = fxplug.trace(WAYS[way](Twice().eval().requires_grad_(False)), x)
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="blocks.**", rank=2))
    assert fxplug.verify(gm, new, (x,), compile=False).ok
    assert len([name for name, _ in new.named_parameters() if name.startswith("lora.")]) == 2


# --- artifacts of strangers


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folders = {}
    for way in ("nf4 of bitsandbytes", "int8 of bitsandbytes", "int8 of torchao", "nf4 of torchao"):
        folders[way] = tmp_path_factory.mktemp("saved") / "a"
        fxplug.save(lora(way), folders[way])
    return folders


def changed(folder, target, document=None, tensors=None):
    """A copy of an artifact with changes in its graph.json or its weights, and hashes that fit."""
    import hashlib

    shutil.copytree(folder, target)
    manifest = json.loads((target / "manifest.json").read_text())
    if document is not None:
        data = json.loads((target / "graph.json").read_text())
        document(data)
        (target / "graph.json").write_text(json.dumps(data))
    if tensors is not None:
        held = load_file(target / "model.safetensors")
        tensors(held)
        save_file(held, target / "model.safetensors")
    for name, entry in manifest["files"].items():
        raw = (target / name).read_bytes()
        entry.update(sha256=hashlib.sha256(raw).hexdigest(), size=len(raw))
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target


WEIGHT = "blocks.0.attn.qkv.weight"
STATE = f"{WEIGHT}.quant_state.bitsandbytes__nf4"


def lying_state(**facts):
    """Changes of the facts that bitsandbytes keeps as text among its tensors."""

    def change(tensors):
        held = json.loads(bytes(tensors[STATE].tolist()).decode())
        held.update(facts)
        tensors[STATE] = torch.tensor(list(json.dumps(held).encode()), dtype=torch.uint8)

    def fit(document):
        pass

    return change, fit


def shape_of(part, size, way):
    return lambda d: d["tensors"][WEIGHT]["parts"][part].update(shape=size)


@pytest.mark.slow
@pytest.mark.parametrize("facts", [
    {"shape": [1 << 20, 128]}, {"shape": [384, 64]}, {"blocksize": 4096}, {"blocksize": 3}, {"nested_blocksize": 64},
    {"quant_type": "int8"}, {"shape": None},
])  # fmt: skip
def test_a_4_bit_weight_that_lies_about_itself_is_refused(saved, facts, tmp_path):
    change, _ = lying_state(**facts)
    folder = changed(saved["nf4 of bitsandbytes"], tmp_path / "b", tensors=change)
    data = json.loads((folder / "graph.json").read_text())
    size = load_file(folder / "model.safetensors")[STATE].shape
    data["tensors"][WEIGHT]["parts"]["quant_state.bitsandbytes__nf4"]["shape"] = list(size)
    folder = changed(folder, tmp_path / "c", document=lambda d: d.update(data))
    with pytest.raises(ArtifactError):
        fxplug.load(folder, allow=LIBRARIES)


@pytest.mark.parametrize("way, change", [
    ("int8 of torchao", lambda t: t.update({"class": "os:PathLike"})),
    ("int8 of torchao", lambda t: t.update({"class": "torchao.quantization.quant_api:Int8WeightOnlyConfig"})),
    ("int8 of torchao", lambda t: t.update({"class": "torch:Tensor"})),
    ("int8 of torchao", lambda t: t.pop("class")),
    ("int8 of torchao", lambda t: t.pop("context")),
    ("int8 of torchao", lambda t: t.update({"context": 3})),
    ("int8 of torchao", lambda t: t.update({"context": {"record": ["os:PathLike", {"dict": []}]}})),
    ("int8 of torchao", lambda t: t.update({"context": {"member": ["os:PathLike", "x"]}})),
    ("int8 of torchao", lambda t: t.update({"context": {"member": []}})),
    ("int8 of torchao", lambda t: t.update({"parts": {}})),
    ("int8 of torchao", lambda t: t.update({"parts": 1})),
    ("int8 of torchao", lambda t: t["parts"].pop("scale")),
    ("int8 of torchao", lambda t: t["parts"]["qdata"].update(dtype="float32")),
    ("int8 of torchao", lambda t: t["parts"]["qdata"].update({"class": "x"})),
    ("int8 of torchao", lambda t: t.update(shape=[1, 2])),
    ("nf4 of torchao", lambda t: t["context"]["dict"].pop()),
    ("nf4 of bitsandbytes", lambda t: t.update({"class": "bitsandbytes.nn.modules:Int8Params"})),
    ("int8 of bitsandbytes", lambda t: t.update({"class": "bitsandbytes.nn.modules:Params4bit"})),
    ("int8 of bitsandbytes", lambda t: t.update({"class": "bitsandbytes.nn.modules:Linear4bit"})),
    ("int8 of bitsandbytes", lambda t: t["parts"].pop("SCB")),
])  # fmt: skip
def test_a_record_of_a_packed_tensor_that_lies_is_refused(saved, way, change, tmp_path):
    folder = changed(saved[way], tmp_path / "b", document=lambda d: change(d["tensors"][WEIGHT]))
    with pytest.raises(ArtifactError):
        fxplug.load(folder, allow=LIBRARIES)


def test_scales_of_another_number_are_refused(saved, tmp_path):
    def fewer(tensors):
        tensors[f"{WEIGHT}.SCB"] = tensors[f"{WEIGHT}.SCB"][:7].clone()

    folder = changed(saved["int8 of bitsandbytes"], tmp_path / "b", shape_of("SCB", [7], ""), fewer)
    with pytest.raises(ArtifactError, match=r"the weight of 'blocks.0.attn.qkv' do not fit a layer of shape \[384, 128\]"):
        fxplug.load(folder, allow=LIBRARIES)


def test_packed_weights_are_not_among_what_trains_of_the_base():
    gm = fxplug.trace(WAYS["int8 of torchao"](vit()), inputs())
    (group,) = fxplug.trainable(gm, "**")
    assert group["params"] and not any(quantised.is_packed(parameter) for parameter in group["params"])
    gm(inputs()).square().mean().backward()
    assert all(parameter.grad is not None for parameter in group["params"])
