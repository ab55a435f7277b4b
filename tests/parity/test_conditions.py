"""T2I-Adapter, IP-Adapter, FreeU and token merging against the libraries that have them."""

from __future__ import annotations

import copy

import pytest
import small
import tomesd
import torch
import unets
from diffusers import DiTTransformer2DModel, T2IAdapter
from diffusers.models.attention_processor import Attention, IPAdapterAttnProcessor2_0
from diffusers.models.embeddings import ImageProjection, IPAdapterFullImageProjection, IPAdapterPlusImageProjection
from diffusers.utils.torch_utils import fourier_filter
from safetensors.torch import save_file
from sweeps import sweep
from tomesd.merge import bipartite_soft_matching_random2d
from torch import nn
from torch._dynamo.testing import CompileCounter
from unets import error, picture

import fxplug
from fxplug.blocks.control import Add, Gate
from fxplug.blocks.freeu import scale_low
from fxplug.blocks.image_attention import ImageAttention
from fxplug.blocks.token_merging import Merge, matching, merge, unmerge

HOSTS = sweep("base", unets.HOSTS.values(), unets.sd15, ids=list(unets.HOSTS))


def one_graph(new, *calls):
    """The calls compile to one graph, and give what the module gives."""
    counter = CompileCounter()
    compiled = torch.compile(new, fullgraph=True, backend=counter)
    with torch.no_grad():
        for call in calls:
            assert torch.equal(compiled(**call)[0], new(**call)[0])
    assert counter.frame_count == 1
    torch._dynamo.reset()


def tensors(**numbers):
    return {k: torch.tensor(v) for k, v in numbers.items()}


# --- blocks


def test_add_keeps_the_dtype_and_takes_a_strength_for_each_sample():
    value, residual = torch.randn(3, 4, 2, 2).half(), torch.randn(3, 4, 1, 1).half()
    out = Add()(value, residual, torch.tensor([0.0, 0.5, 1.0]))
    assert out.dtype == torch.float16 and torch.equal(out[0], value[0])
    assert torch.equal(out[2], value[2] + residual[2])
    assert torch.equal(Add()(value, residual, torch.tensor(0.0)), value)


def test_the_gate_is_exact_at_its_ends():
    gate = Gate()
    for step in range(1001):
        t, fraction = torch.tensor(1000 - step), torch.tensor(step / 1000)
        assert gate(t, torch.tensor(2.0), fraction, fraction)[1] == 2
        assert gate(t, torch.tensor(2.0), fraction + 5e-4, torch.tensor(1.0))[1] == 0
        assert gate(t, torch.tensor(2.0), torch.tensor(0.0), fraction - 5e-4)[1] == 0
    with pytest.raises(fxplug.SpecError, match="timesteps must be a number above zero, not 0"):
        Gate(0)


@pytest.mark.parametrize("images", [1, 3])
def test_image_attention_is_that_of_diffusers(images):
    attention = Attention(query_dim=24, cross_attention_dim=12, heads=3, dim_head=8)
    processor = IPAdapterAttnProcessor2_0(24, 12, num_tokens=(4,), scale=0.6)
    x, text, image = torch.randn(2, 9, 24), torch.randn(2, 5, 12), torch.randn(2, images, 4, 12)
    block = ImageAttention(24, 12, heads=3, fresh=False)
    block.to_k_ip, block.to_v_ip = processor.to_k_ip[0], processor.to_v_ip[0]
    seen = []
    handle = attention.to_out[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    processor(attention, x, (text, [torch.zeros_like(image)]))
    processor(attention, x, (text, [image]))
    handle.remove()
    assert error(block(seen[0], attention.to_q(x), image, torch.tensor(0.6)), seen[1]) < 1e-6


@pytest.mark.parametrize("size", [(8, 8), (7, 5), (1, 4), (3, 1), (2, 2), (1, 1), (96, 64)])
@pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-6), (torch.float64, 1e-6), (torch.bfloat16, 1e-2)])
def test_the_filter_of_freeu_is_the_fourier_transforms(size, dtype, near):
    x = torch.randn(2, 3, *size).to(dtype)
    ours, theirs = scale_low(x, torch.tensor(0.2)), fourier_filter(x, threshold=1, scale=0.2)
    assert ours.dtype == dtype and error(ours.double(), theirs.double()) < near


@pytest.mark.parametrize("height, width, ratio", [(8, 8, 0.5), (7, 9, 0.5), (8, 8, 0.75), (6, 6, 0.95), (5, 5, 0.3)])
@pytest.mark.parametrize("stride", [2, 3])
def test_merging_is_that_of_tomesd(height, width, ratio, stride):
    metric, x = torch.randn(2, height * width, 16), torch.randn(2, height * width, 6)
    count = int(height * width * ratio)
    theirs, back = bipartite_soft_matching_random2d(metric, width, height, stride, stride, count, no_rand=True)
    place, places = matching(metric, height, width, ratio, stride)
    assert places == theirs(x).shape[1] < height * width
    assert error(unmerge(merge(x, place, places), place), back(theirs(x))) < 1e-6


def test_merging_leaves_the_prefix_and_passes_gradients():
    x = torch.randn(2, 1 + 16, 6, requires_grad=True)
    place, places = matching(x, 4, 4, 0.5, prefix=1)
    out = unmerge(merge(x, place, places), place)
    assert places == 1 + 8 and torch.equal(out[:, 0], x[:, 0])
    out.sum().backward()
    assert torch.allclose(x.grad, torch.ones_like(x))  # a mean shares out what its users send back


def test_merge_says_what_does_not_fit():
    for ratio in (1, -0.1, "half", True):
        with pytest.raises(fxplug.SpecError, match="ratio must be at least 0 and below 1"):
            Merge(ratio)
    with pytest.raises(fxplug.SpecError, match="17 tokens are not a grid of patches of an image of 8 x 8"):
        Merge(max_downsample=2).sides(17, 8, 8)


# --- T2I-Adapter


def adapter(kind, unet, seed=1):
    torch.manual_seed(seed)
    channels = list(unet.config.block_out_channels)
    xl, light = kind == "full_adapter_xl", kind == "light_adapter"
    channels = [*channels, channels[-1]] if xl else channels[:-1] if light else channels
    return T2IAdapter(3, channels, num_res_blocks=1, downscale_factor=16 if xl else 8, adapter_type=kind).eval()


@pytest.mark.slow
@sweep("kind", ["full_adapter", "light_adapter", "full_adapter_xl"], "light_adapter")
def test_t2i_adapter_is_that_of_diffusers(kind):
    xl = kind == "full_adapter_xl"
    base = unets.sdxl() if xl else unets.sd15_deep()
    network, cond = adapter(kind, base.model), picture(base)
    new = fxplug.apply(base.gm, fxplug.load_pass("t2i_adapter_xl" if xl else "t2i_adapter", network=network))
    plain = base.model(**base.kwargs)[0]
    with torch.no_grad():
        for strength in (1.0, 0.4):
            features = [f * strength for f in network(cond)]
            theirs = base.model(**base.kwargs, down_intrablock_additional_residuals=features)[0]
            assert not features  # all of them were taken
            ours = new(**base.kwargs, cond=cond, strength=torch.tensor(strength))[0]
            assert error(ours, theirs) < 1e-5 < 1e-3 < error(ours, plain)
        assert torch.equal(new(**base.kwargs, cond=cond, strength=torch.tensor(0.0))[0], plain)
        assert torch.equal(new(**base.kwargs, cond=cond, start=torch.tensor(0.6))[0], plain)


@pytest.mark.slow
def test_t2i_adapter_trains():
    base = unets.sd15()
    network = adapter("full_adapter", base.model)
    new = fxplug.apply(base.gm, fxplug.load_pass("t2i_adapter", network=network))
    found = []
    for run in (lambda cond: new(**base.kwargs, cond=cond), lambda cond: base.model(
        **base.kwargs, down_intrablock_additional_residuals=network(cond))):  # fmt: skip
        cond = picture(base).requires_grad_()
        network.zero_grad()
        run(cond)[0].square().mean().backward()
        found.append([cond.grad, *(p.grad.clone() for p in network.parameters())])
    base.model.zero_grad()
    assert all(error(a, b) < 1e-4 for a, b in zip(*found, strict=True))


def test_t2i_adapter_for_another_model_is_refused():
    base = unets.sd15()
    with pytest.raises(fxplug.FxplugError, match="(?s)t2i_adapter_xl: .*down_blocks.0.downsamplers.0|paired by order"):
        fxplug.apply(base.gm, fxplug.load_pass("t2i_adapter_xl", network=adapter("full_adapter", base.model)))
    with pytest.raises(fxplug.SpecError, match=r"does not fit .*down_blocks\.0"):
        wide = unets.sd15_model(block_out_channels=(16, 16))
        fxplug.apply(base.gm, fxplug.load_pass("t2i_adapter", network=adapter("full_adapter", wide)))


# --- IP-Adapter


def checkpoint(unet, kind):
    """A checkpoint of IP-Adapter for a UNet in the layout of its releases, and what its image encoder gives."""
    torch.manual_seed(3)
    width, layers = unet.config.cross_attention_dim, {}
    sites = [name for name in unet.attn_processors if "attn2" in name]
    for number, name in enumerate(sites):
        inner = unet.get_submodule(name.removesuffix(".processor")).to_q.out_features
        for half in ("k", "v"):
            layers[f"{2 * number + 1}.to_{half}_ip.weight"] = torch.randn(inner, width) / 2
    if kind == "base":
        made, embeds = ImageProjection(8, width, 4), torch.randn(2, 1, 8)
        proj = {k.replace("image_embeds", "proj"): v for k, v in made.state_dict().items()}
    elif kind == "full":
        made, embeds = IPAdapterFullImageProjection(8, width), torch.randn(2, 1, 6, 8)
        names = {"ff.net.0.proj": "proj.0", "ff.net.2": "proj.2", "norm": "proj.3"}
        state = made.state_dict().items()
        proj = {next(b + k.removeprefix(a) for a, b in names.items() if k.startswith(a)): v for k, v in state}
    else:
        made, embeds = IPAdapterPlusImageProjection(8, width, 16, 4, heads=1, num_queries=3), torch.randn(2, 1, 6, 8)
        proj = plus_layout(made.state_dict())
    return {"image_proj": proj, "ip_adapter": layers}, embeds


def plus_layout(state):
    found = {}
    for key, value in state.items():
        key = key.replace(".ln0.", ".0.norm1.").replace(".ln1.", ".0.norm2.").replace(".attn.to_q", ".0.to_q")
        key = key.replace(".attn.to_out.0", ".0.to_out").replace(".ff.0.", ".1.0.").replace(".ff.1.net.0.proj", ".1.1")
        found[key.replace(".ff.1.net.2", ".1.3")] = value
    for key in [k for k in found if ".attn.to_k" in k]:
        both = [found.pop(key), found.pop(key.replace("to_k", "to_v"))]
        found[key.replace(".attn.to_k", ".0.to_kv")] = torch.cat(both)
    return found


def with_ip_adapter(base, weights):
    unet = copy.deepcopy(base.model)
    unet._load_ip_adapter_weights([weights], low_cpu_mem_usage=False)
    return unet.eval()


@HOSTS
@sweep("kind", ["base", "plus", "full"], "base")
def test_ip_adapter_is_that_of_diffusers(base, kind):
    base = base()
    weights, embeds = checkpoint(base.model, kind)
    unet = with_ip_adapter(base, weights)
    (network,) = unet.encoder_hid_proj.image_projection_layers
    image = embeds.flatten(0, 1)
    params = {"network": network, "image": ["n", *image.shape[1:]], "weights": weights}
    new = fxplug.apply(base.gm, fxplug.load_pass("ip_adapter", **params))
    assert not new.meta["passes"][-1]["neutral"]
    with torch.no_grad():
        for scale in (1.0, 0.35):
            for processor in unet.attn_processors.values():
                if isinstance(processor, IPAdapterAttnProcessor2_0):
                    processor.scale = [scale]
            call = copy.copy(base.kwargs)
            call["added_cond_kwargs"] = {**call.get("added_cond_kwargs", {}), "image_embeds": [embeds]}
            ours = new(**base.kwargs, image=image, strength=torch.tensor(scale))[0]
            assert error(ours, unet(**call)[0]) < 1e-5 < 1e-3 < error(ours, base.model(**base.kwargs)[0])
        off = new(**base.kwargs, image=image, strength=torch.tensor(0.0))[0]
        assert torch.equal(off, base.model(**base.kwargs)[0])


@pytest.mark.parametrize("layout", ["bin", "safetensors"])
def test_ip_adapter_takes_a_file_and_tokens(layout, tmp_path):
    base = unets.sd15()
    weights, embeds = checkpoint(base.model, "base")
    if layout == "bin":
        torch.save(weights, tmp_path / "ip.bin")
    else:
        flat = {f"{half}.{k}": v for half, part in weights.items() for k, v in part.items()}
        save_file(flat, tmp_path / "ip.safetensors")
    (network,) = with_ip_adapter(base, weights).encoder_hid_proj.image_projection_layers
    params = {"weights": str(tmp_path / f"ip.{layout}"), "image": ["n", 4, 12]}
    given = fxplug.apply(base.gm, fxplug.load_pass("ip_adapter", **params))
    whole = fxplug.apply(base.gm, fxplug.load_pass("ip_adapter", network=network, image=["n", 8], weights=weights))
    image = embeds[:, 0]
    with torch.no_grad():
        assert torch.equal(given(**base.kwargs, image=network(image))[0], whole(**base.kwargs, image=image)[0])


def test_a_new_ip_adapter_is_neutral_and_trains():
    base = unets.sd15()
    torch.manual_seed(0)
    new = fxplug.apply(base.gm, fxplug.load_pass("ip_adapter", image=["n", 4, 12]))
    image = torch.randn(2, 4, 12)
    assert new.meta["passes"][-1]["neutral"]
    assert torch.equal(new(**base.kwargs, image=image)[0], base.model(**base.kwargs)[0])
    values = {k: p for k, p in new.named_parameters() if k.endswith("to_v_ip.weight")}
    assert len(values) == 4
    new(**base.kwargs, image=image)[0].square().mean().backward()
    base.model.zero_grad()
    assert all(p.grad.any() for p in values.values())


def test_ip_adapter_refuses_what_does_not_fit(tmp_path):
    base = unets.sd15()
    other, _ = checkpoint(unets.sdxl().model, "base")
    weights, _ = checkpoint(base.model, "base")
    narrow = {**weights, "ip_adapter": {k: v[:, :6] for k, v in weights["ip_adapter"].items()}}
    for wrong, found in [
        (other, "has weights for 11 layers, and this model has 4 cross-attentions"),
        (narrow, r"'ip_adapter.1.to_k_ip.weight' is \[8, 6\] in the checkpoint, and this layer takes \[8, 12\]"),
        ({"up.weight": torch.zeros(1)}, "not a checkpoint of IP-Adapter.* it has up.weight"),
        (str(tmp_path / "none.bin"), "no such checkpoint: '.*none.bin'"),
    ]:
        with pytest.raises(fxplug.SpecError, match=f"ip_adapter: .*attn2.to_out.0.*{found}"):
            fxplug.apply(base.gm, fxplug.load_pass("ip_adapter", image=["n", 4, 12], weights=wrong))


# --- FreeU


@HOSTS
def test_freeu_is_that_of_diffusers(base):
    base = base()
    unet, new = copy.deepcopy(base.model), fxplug.apply(base.gm, fxplug.load_pass("freeu"))
    plain = base.model(**base.kwargs)[0]
    with torch.no_grad():
        for scales in ({"s1": 0.9, "s2": 0.2, "b1": 1.5, "b2": 1.6}, {"s1": 0.3, "s2": 0.7, "b1": 0.8, "b2": 1.1}):
            unet.enable_freeu(**scales)
            ours = new(**base.kwargs, **tensors(**scales))[0]
            assert error(ours, unet(**base.kwargs)[0]) < 1e-5 < 1e-3 < error(ours, plain)
        defaults = new(**base.kwargs, **tensors(s1=0.9, s2=0.2, b1=1.5, b2=1.6))[0]
        assert error(new(**base.kwargs)[0], defaults) < 1e-6  # the defaults are those of Stable Diffusion 1.5
        assert error(new(**base.kwargs, **tensors(s1=1.0, s2=1.0, b1=1.0, b2=1.0))[0], plain) < 1e-6


# --- token merging


def merged_by_tomesd(base, **options):
    unet = copy.deepcopy(base.model)
    tomesd.apply_patch(unet, use_rand=False, **options)
    call = dict(base.kwargs)
    with torch.no_grad():
        return unet(call.pop("sample"), **call)[0]


LAYERS = r"re:(?P<site>(?P<block>.*transformer_blocks\.\d+)\.({}))$"


@HOSTS
@sweep(
    "at, theirs",
    [
        ("attn1", {}),
        ("attn1|attn2", {"merge_crossattn": True}),
        ("attn1|attn2|ff", {"merge_crossattn": True, "merge_mlp": True}),
    ], 2,
)
@pytest.mark.parametrize("ratio, down", [(0.5, 1), (0.3, 2), (0.7, 4)])
def test_tome_is_that_of_tomesd(base, at, theirs, ratio, down):
    base = base()
    params = {"at": LAYERS.format(at), "ratio": ratio, "max_downsample": down}
    new = fxplug.apply(base.gm, fxplug.load_pass("tome", **params))
    with torch.no_grad():
        ours, plain = new(**base.kwargs)[0], base.model(**base.kwargs)[0]
    assert error(ours, merged_by_tomesd(base, ratio=ratio, max_downsample=down, **theirs)) < 1e-5
    first = {"sd15": 1, "sdxl": 2}  # the finest level that has attention
    coarse = down < first["sdxl" if base.model.config.addition_embed_type else "sd15"]
    assert torch.equal(ours, plain) if coarse else error(ours, plain) > 1e-4


def test_tome_trains_and_takes_other_sizes():
    base = unets.sd15()
    new = fxplug.apply(base.gm, fxplug.load_pass("tome"))
    assert not new.meta["passes"][-1]["neutral"]
    sample = torch.randn(1, 4, 24, 16)
    call = {**base.kwargs, "sample": sample, "encoder_hidden_states": base.kwargs["encoder_hidden_states"][:1]}
    unet = copy.deepcopy(base.model)
    tomesd.apply_patch(unet, use_rand=False)
    with torch.no_grad():
        assert error(new(**call)[0], unet(sample, **{k: v for k, v in call.items() if k != "sample"})[0]) < 1e-5
    new(**base.kwargs)[0].square().mean().backward()
    assert base.model.conv_in.weight.grad.any()
    base.model.zero_grad()


def test_tome_on_a_vision_transformer():
    base = small.vit()  # 4 tokens and the class token, which is left out
    new = fxplug.apply(base.gm, fxplug.load_pass(
        "tome", at=r"re:(?P<site>(?P<block>blocks\.\d+)\.attn)$", grid=":in.x", max_downsample=16, prefix=1, ratio=0.5
    ))  # fmt: skip
    seen = []
    handle = base.model.blocks[0].attn.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        plain = base.model(*base.args)
        handle.remove()
        assert error(new(*base.args), plain) > 1e-5
        unused, place = new.get_submodule("tome.blocks.0.attn.Merge")(seen[0], seen[0], base.args[0])
    assert unused.shape[1] == 3 and place.shape == (2, 5)


# --- together, and saved


@pytest.mark.slow
@pytest.mark.parametrize("first", ["lora", "tome"])
def test_tome_and_lora_on_one_unet(first):
    base, names = unets.sd15(), ["tome", "lora"]
    passes = [fxplug.load_pass(name, **({"at": "**.attn1.to_q", "rank": 2} if name == "lora" else {})) for name in names]
    new = fxplug.apply(base.gm, *sorted(passes, key=lambda p: p.name != first))
    alone = fxplug.apply(base.gm, passes[0])
    ups = [p for k, p in new.named_parameters() if k.endswith("Lora.up.weight")]
    with torch.no_grad():
        assert len(ups) == 4 and torch.equal(new(**base.kwargs)[0], alone(**base.kwargs)[0])
    new(**base.kwargs)[0].square().mean().backward()
    base.model.zero_grad()
    assert all(p.grad.any() for p in ups)
    report = fxplug.verify(base.gm, new, (), base.kwargs, compile=False)
    assert report.ok


def test_tome_says_when_another_pass_adds_tokens():
    base = small.vit()
    at = r"re:(?P<site>(?P<block>blocks\.\d+)\.attn)$"
    tome = fxplug.load_pass("tome", at=at, grid=":in.x", max_downsample=16, prefix=1)
    new = fxplug.apply(base.gm, fxplug.load_pass("vpt", tokens=3), tome)
    with pytest.raises(fxplug.VerifyError, match="7 tokens are not a grid of patches of an image of 32 x 32: check 'prefix'"):
        fxplug.verify(base.gm, new, base.args, compile=False)
    right = fxplug.apply(
        base.gm,
        fxplug.load_pass("vpt", tokens=3),
        fxplug.load_pass("tome", at=at, grid=":in.x", max_downsample=16, prefix=4),
    )
    assert fxplug.verify(base.gm, right, base.args, compile=False).ok


@pytest.mark.slow
def test_all_conditions_on_one_unet_are_one_graph():
    base = unets.sd15()
    network, (weights, embeds) = unets.control(base.model), checkpoint(base.model, "base")
    unet = with_ip_adapter(base, weights)
    unet.enable_freeu(0.9, 0.2, 1.5, 1.6)
    (proj,) = unet.encoder_hid_proj.image_projection_layers
    passes = {
        "controlnet": {"network": network},
        "ip_adapter": {"network": proj, "image": ["n", 8], "weights": weights},
        "freeu": {},
    }
    cond, call = picture(base), dict(base.kwargs)
    down, middle = network(**call, controlnet_cond=cond, conditioning_scale=0.8)
    call["added_cond_kwargs"] = {"image_embeds": [embeds]}
    with torch.no_grad():
        theirs = unet(**call, down_block_additional_residuals=down, mid_block_additional_residual=middle)[0]
        for order in (tuple(passes), tuple(passes)[::-1]):
            new = fxplug.apply(base.gm, *(fxplug.load_pass(name, **passes[name]) for name in order))
            scale = "strength" if order.index("controlnet") < order.index("ip_adapter") else "controlnet_strength"
            call = {**base.kwargs, "cond": cond, "image": embeds[:, 0]}
            assert error(new(**call, **tensors(**{scale: 0.8}))[0], theirs) < 1e-5
    knobs = tensors(strength=0.3, start=0.2, end=0.6, controlnet_strength=0.1, b1=0.8, b2=1.1, s1=0.3, s2=0.7)
    others = tensors(strength=1.0, start=0.0, end=1.0, controlnet_strength=0.0, b1=1.5, b2=1.6, s1=0.9, s2=0.2)
    t2i = fxplug.load_pass("t2i_adapter", network=adapter("full_adapter", base.model))
    new = fxplug.apply(new, t2i, fxplug.load_pass("tome"))
    call |= {"t2i_adapter_cond": picture(base)}
    knobs |= tensors(t2i_adapter_strength=1.0, t2i_adapter_end=1.0)
    others |= tensors(t2i_adapter_strength=0.2, t2i_adapter_end=0.3)
    one_graph(new, call | knobs, call | others | {"cond": 1 - cond, "timestep": torch.tensor(10)})


@pytest.mark.slow
def test_they_are_saved_and_apply_to_what_was_loaded(tmp_path):
    base = unets.sd15()
    weights, _ = checkpoint(base.model, "base")
    passes = {"tome": {}, "freeu": {}, "ip_adapter": {"image": ["n", 4, 12], "weights": weights}}
    image = torch.randn(2, 4, 12)
    fxplug.save(base.gm, tmp_path / "base")
    loaded = fxplug.load(tmp_path / "base")
    made = [fxplug.load_pass(name, **params) for name, params in passes.items()]
    new, later = fxplug.apply(base.gm, *made), fxplug.apply(loaded, *made)
    fxplug.save(new, tmp_path / "new")
    with torch.no_grad():
        expected = new(**base.kwargs, image=image)[0]
        assert torch.equal(later(**base.kwargs, image=image)[0], expected)
        assert torch.equal(fxplug.load(tmp_path / "new")(**base.kwargs, image=image)[0], expected)


def test_tome_on_a_transformer_by_path():
    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=16, norm_num_groups=4
    ).eval()  # fmt: skip
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    call = {"hidden_states": torch.randn(2, 4, 16, 16), "timestep": torch.tensor([3, 9]), "class_labels": torch.tensor([1, 2])}
    base = small.traced(model, **call)
    outputs = {}
    for ratio in (0.0, 0.5):
        params = {"grid": ":in.hidden_states", "max_downsample": 2, "ratio": ratio}
        new = fxplug.apply(base.gm, fxplug.load_pass("tome", **params))
        with torch.no_grad():
            outputs[ratio] = new(**call)[0]
    assert torch.equal(outputs[0.0], model(**call)[0])
    assert 1e-4 < error(outputs[0.5], outputs[0.0]) < 0.5
