"""A LoRA'd graph is trained on real images, and the base keeps every bit."""

from __future__ import annotations

import pytest
import small
import timm
import torch
import torch.nn.functional as F

import fxplug


def train(new, optimizer, loss_of, steps=30):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def bits(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def added(new, name="lora"):
    return [p for k, p in new.named_parameters() if k.startswith(f"{name}.")]


@pytest.fixture(scope="module")
def photos():
    """Pieces of four photographs from scikit-image, and which photograph each is from."""
    from skimage import data

    pieces, labels = [], []
    for label, photo in enumerate((data.astronaut(), data.coffee(), data.chelsea(), data.rocket())):
        whole = torch.tensor(photo, dtype=torch.float32).permute(2, 0, 1) / 127.5 - 1
        cut = whole.unfold(1, 32, 32).unfold(2, 32, 32).permute(1, 2, 0, 3, 4).flatten(0, 1)
        pieces.append(cut[torch.randperm(len(cut), generator=torch.Generator().manual_seed(0))[:100]])
        labels += [label] * len(pieces[-1])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.cat(pieces)[order], torch.tensor(labels)[order]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_thirty_steps_on_photographs(photos, dtype):
    images, labels = photos
    options = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 4, "attn_drop_rate": 0.1}
    model = small.seeded(lambda: timm.create_model("vit_tiny_patch16_224", **options)).to(dtype).eval()
    gm = fxplug.trace(model, images[:2].to(dtype))
    new = fxplug.apply(gm, fxplug.load_pass("lora", rank=8, dropout=0.1))
    assert {p.dtype for p in added(new)} == {dtype}
    before = bits(model)
    optimizer = torch.optim.AdamW(added(new), 5e-3)

    def loss(step):
        rows = torch.arange(48 * step, 48 * step + 48) % 320
        return F.cross_entropy(new(images[rows].to(dtype)).float(), labels[rows])

    losses = train(new.train(), optimizer, loss)
    assert sum(losses[-5:]) / 5 < 0.8 * losses[0]
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    with torch.no_grad():
        unseen = new.eval()(images[320:].to(dtype)).argmax(-1)
        assert (unseen == labels[320:]).float().mean() > 0.4  # 0.25 is chance
        assert torch.equal(gm(images[:4].to(dtype)), model(images[:4].to(dtype)))


@pytest.mark.slow
def test_thirty_denoising_steps_of_a_unet():
    """The noise in a photograph, predicted from the noisy one."""
    from diffusers import DDPMScheduler
    from skimage.data import astronaut

    base = small.unet()
    new = fxplug.apply(base.gm, fxplug.load_pass("lora", rank=4))
    photo = torch.tensor(astronaut(), dtype=torch.float32).permute(2, 0, 1)[None] / 127.5 - 1
    small_photo = F.interpolate(photo, size=(16, 16), mode="area")
    image = torch.cat([small_photo, small_photo.mean(1, keepdim=True)], 1).expand(4, -1, -1, -1)
    noise, times = torch.randn(4, 4, 16, 16), torch.tensor([100, 300, 500, 700])
    noisy = DDPMScheduler().add_noise(image, noise, times)
    words = torch.randn(4, *base.kwargs["encoder_hidden_states"].shape[1:])
    before = bits(base.model)

    def loss(step):
        return F.mse_loss(new(noisy, times, words).sample, noise)

    losses = train(new.train(), torch.optim.AdamW(added(new), 1e-2), loss)
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(before[k], v) for k, v in base.model.state_dict().items())


def test_what_a_loop_of_ones_own_trains():
    gm, args, _ = small.vit()
    new = fxplug.apply(gm, fxplug.load_pass("lora", at="qkv", rank=2, lr=5e-3), fxplug.load_pass("head", classes=3))
    groups = fxplug.trainable(new, "norm")
    optimizer = torch.optim.SGD(groups, lr=1e-2)
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates == {"lora": 5e-3, "new_head": 1e-2, "base": 1e-2}
    before = {name: p.detach().clone() for name, p in new.named_parameters()}
    new(*args).square().sum().backward()
    optimizer.step()
    changed = {name for name, p in new.named_parameters() if not torch.equal(before[name], p)}
    assert changed == {name for name in before if name.startswith(("new_head.", "norm.")) or name.endswith("up.weight")}
    assert {name for name, p in new.named_parameters() if p.grad is not None} >= changed
    assert not any(p.requires_grad for name, p in new.named_parameters() if name.startswith("blocks."))
    frozen = [p.requires_grad for p in new.parameters()]
    for given, error in (([new, "nrm"], "nrm"), ([gm], "nothing trains"), ([fxplug.lower(new, fuse=True)], "lowered")):
        with pytest.raises(fxplug.FxplugError, match=error):
            fxplug.trainable(*given)
    assert frozen == [p.requires_grad for p in new.parameters()]
