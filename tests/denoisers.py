"""Small random denoisers: on tokens, on patches with a text or without, and of convolutions; each is drawn by a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import unets
from torch import Tensor, nn

import fxplug

WIDTH, CHANNELS, TEXT = 24, 4, 12
AXES = ("batch", "rows", "ring", "ulysses", "tensor", "stages", "ways")  # what counts processes
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Attention(nn.Module):
    """Self-attention, or attention to another sequence, in one of the ways that people write it."""

    def __init__(self, heads: int, how: str, other: int = WIDTH) -> None:
        super().__init__()
        self.heads, self.how, size = heads, how, WIDTH // heads
        self.held = 1 if how == "one key" else heads
        if how == "fused":
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.to_q = nn.Linear(WIDTH, WIDTH)
            self.to_k, self.to_v = (nn.Linear(other, self.held * size, bias=how != "plain") for _ in range(2))
        if how == "normed":
            self.norm_q, self.norm_k = nn.RMSNorm(size), nn.RMSNorm(size)
        self.to_out = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        b, n, _ = x.shape
        other = x if other is None else other
        found = self.qkv(x).chunk(3, -1) if self.how == "fused" else (self.to_q(x), self.to_k(other), self.to_v(other))
        q, k, v = (t.unflatten(-1, (-1, WIDTH // self.heads)).transpose(1, 2) for t in found)
        if self.how == "normed":
            q, k = self.norm_q(q), self.norm_k(k)
        if self.how == "written":
            y = (q @ k.transpose(-2, -1) * (WIDTH // self.heads) ** -0.5).softmax(-1) @ v
        else:
            causal = self.how == "causal" and other is x
            y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=self.held != self.heads)
        return self.to_out[0](y.transpose(1, 2).reshape(b, n, WIDTH))


class FeedForward(nn.Module):
    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH if gated else 2 * WIDTH, WIDTH)
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if not self.gated:
            return self.down(F.gelu(y, approximate="tanh"))
        y, gate = y.chunk(2, -1)
        return self.down(y * F.silu(gate))


class Block(nn.Module):
    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        norm = nn.RMSNorm if drawn.rms else nn.LayerNorm
        self.norm1, self.norm3 = norm(WIDTH), norm(WIDTH)
        self.attn1, self.ff = Attention(drawn.heads, drawn.attention), FeedForward(drawn.gated)
        if drawn.text == "cross":
            self.norm2 = norm(WIDTH)
            self.attn2 = Attention(drawn.heads, "written" if drawn.attention == "written" else "plain", TEXT)
        self.modulation = nn.Linear(WIDTH, 3 * WIDTH) if drawn.modulated else None

    def forward(self, x: Tensor, step: Tensor, text: Tensor | None = None) -> Tensor:
        if self.modulation is None:
            x = x + self.attn1(self.norm1(x) + step[:, None])
        else:
            shift, scale, gate = self.modulation(F.silu(step))[:, None].chunk(3, -1)
            x = x + gate * self.attn1(self.norm1(x) * (1 + scale) + shift)
        if text is not None:
            x = x + self.attn2(self.norm2(x), text)
        return x + self.ff(self.norm3(x))


@dataclass(frozen=True)
class Drawn:
    """What a denoiser is like."""

    image: bool
    text: str  # "", "cross", "joint"
    heads: int
    attention: str
    rms: bool
    gated: bool
    modulated: bool
    position: str
    skips: bool
    depth: int


class Denoiser(nn.Module):
    """Tokens, or an image in patches of 2 x 2, and a time; the blocks may have long skips."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn
        self.patch = nn.Conv2d(CHANNELS, WIDTH, 2, 2) if drawn.image else nn.Linear(CHANNELS, WIDTH)
        self.time = nn.Linear(1, WIDTH)
        if drawn.position == "learned":
            self.position = nn.Parameter(torch.randn(1, 64, WIDTH))
        if drawn.text == "joint":
            self.words = nn.Linear(TEXT, WIDTH)
        self.transformer_blocks = nn.ModuleList(Block(drawn) for _ in range(drawn.depth))
        if drawn.skips:
            self.joins = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(drawn.depth // 2))
        self.norm_out, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHANNELS * 4 if drawn.image else CHANNELS)

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        x, text = self.patch(sample), encoder_hidden_states
        if self.drawn.image:
            x = x.flatten(2).transpose(1, 2)
        n = x.shape[1]
        if self.drawn.position == "learned":
            x = x + self.position[:, :n]
        elif self.drawn.position == "counted":
            x = x + torch.arange(n, device=x.device).to(x.dtype)[:, None].sin()
        step = self.time(timestep[:, None].to(x.dtype) / 1000)
        if self.drawn.text == "joint":
            x, text = torch.cat([self.words(text), x], 1), None
        kept, half = [], self.drawn.depth // 2
        for index, block in enumerate(self.transformer_blocks):
            if self.drawn.skips and index >= self.drawn.depth - half:
                x = self.joins[index - self.drawn.depth + half](torch.cat([x, kept.pop()], -1))
            x = block(x, step, text)
            kept.append(x) if index < half else None
        y = self.head(self.norm_out(x))
        y = y[:, -n:] if self.drawn.text == "joint" else y
        if not self.drawn.image:
            return y
        b, _, h, w = sample.shape
        return y.view(b, h // 2, w // 2, CHANNELS, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(b, CHANNELS, h, w)


class Convolutions(nn.Module):
    """A level down and up again with a skip, norms of groups, a time, and perhaps attention in the middle."""

    def __init__(self, up: str, attention: bool, width: int = 8) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(CHANNELS, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.norm1, self.norm2, self.time = nn.GroupNorm(4, width), nn.GroupNorm(4, 2 * width), nn.Linear(1, 2 * width)
        self.middle, self.attention = nn.Conv2d(2 * width, 2 * width, 3, padding=1), attention
        if attention:
            self.qkv, self.out = nn.Conv2d(2 * width, 6 * width, 1), nn.Conv2d(2 * width, 2 * width, 1)
        wide = 2 * width
        self.up = nn.ConvTranspose2d(wide, width, 2, 2) if up == "transposed" else nn.Conv2d(wide, width, 3, padding=1)
        self.last, self.how = nn.Conv2d(2 * width, CHANNELS, 3, padding=1), up

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        skip = F.silu(self.norm1(self.first(sample)))
        x = self.down(skip) + self.time(timestep[:, None].to(sample.dtype) / 1000)[..., None, None]
        x = x + self.middle(F.silu(self.norm2(x)))
        if self.attention:
            q, k, v = self.qkv(x).flatten(2).transpose(1, 2)[:, None].chunk(3, -1)
            y = F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2)
            x = x + self.out(y.reshape(x.shape))
        x = self.up(x) if self.how == "transposed" else self.up(F.interpolate(x, scale_factor=2, mode=self.how))
        return self.last(torch.cat([x, skip], 1))


@dataclass
class Host:
    """A drawn denoiser, traced, and calls of it of some size."""

    text: str
    gm: fxplug.TracedModule
    image: bool
    words: bool
    dtype: torch.dtype
    convolutional: bool = False
    pictures: bool = False  # for an IP-Adapter
    unet: nn.Module | None = None
    controlled: bool = False

    def call(self, seed: int, batch: int = 4, size: tuple[int, int] = (6, 8), words: int = 5) -> Call:
        """A call of some samples, images of height and width, or so many tokens as these have patches; and words."""
        drawn = torch.Generator().manual_seed(seed)
        shape = (batch, CHANNELS, *size) if self.image else (batch, size[0] * size[1] // 4, CHANNELS)
        times = torch.randint(1, 1000, (batch,), generator=drawn).to(self.dtype)
        args: tuple[Any, ...] = torch.randn(shape, generator=drawn).to(self.dtype), times
        if self.words:
            args = *args, torch.randn(batch, words, TEXT, generator=drawn).to(self.dtype)
        more: dict[str, Any] = {"return_dict": False} if self.unet is not None else {}
        if self.pictures:
            more["image"] = torch.randn(batch, 4, TEXT, generator=drawn).to(self.dtype)
        if self.controlled:
            more["cond"] = torch.rand(batch, 3, *(8 * n for n in size), generator=drawn).to(self.dtype)
        return args, more


def build(rng: random.Random, kind: str, dtype: torch.dtype) -> Host:
    """A denoiser of a kind: tokens, patches, text, convolutions or unet, which is one of diffusers."""
    torch.manual_seed(rng.randrange(2**31))
    unet = None
    if kind == "unet":
        text, model, image, words = "unet", unets.sd15_model(), True, True
        unet = model
    elif kind == "convolutions":
        options: tuple[str, bool] = rng.choice(["nearest", "transposed"]), rng.random() < 0.4
        text, model = f"convolutions {options}", Convolutions(*options)
        image, words = True, False
    else:
        drawn = Drawn(
            kind != "tokens", {"text": rng.choice(["cross", "cross", "joint"])}.get(kind, ""), rng.choice([2, 3, 4]),
            rng.choice(["fused", "plain", "normed", "written", "one key", "causal"]), rng.random() < 0.4, rng.random() < 0.4,
            rng.random() < 0.5, rng.choice(["", "learned", "counted"]), rng.random() < 0.3, rng.choice([2, 3, 4]),
        )  # fmt: skip
        text, model, image, words = str(drawn).replace("Drawn", kind), Denoiser(drawn), drawn.image, bool(drawn.text)
    for parameter in model.parameters() if unet is None else ():
        if parameter.dim() < 2:
            nn.init.normal_(parameter, float(parameter.mean().round()), 0.2)
    host = Host(f"{text} {dtype}", None, image, words, dtype, kind == "convolutions", unet=unet)  # type: ignore[arg-type]
    args, kwargs = host.call(0)
    host.gm = fxplug.trace(model.to(dtype).eval(), args, kwargs).eval()
    return host
