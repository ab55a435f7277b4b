"""Operations of torch as ONNX models, at other sizes and values than the example's: what eager gives, or refused in words."""

from __future__ import annotations

import functools
import logging
import random
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from exports_made import one_registry
from torch import Tensor, nn

import fxplug
from fxplug.core.errors import FxplugError
from fxplug.core.ir.comparison import WITHIN, measure_difference
from fxplug.exports.size_trial import list_tensors

COST = 40

STRIDE = 7919  # a prime: operations that are alike are far apart
CLOSE = 20  # times what rounding may change
ONE = """
abs acos acosh angle asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 floor frac i0
isfinite isinf isnan isneginf isposinf lgamma log log10 log1p log2 logit nan_to_num neg positive rad2deg reciprocal relu
round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square tan tanh trunc logical_not clone zeros_like ones_like
conj_physical real sum mean prod amax amin max min argmax argmin all any std var count_nonzero median aminmax norm nansum
nanmean var_mean std_mean flatten nonzero softplus selu elu celu gelu silu mish hardtanh hardswish hardsigmoid leaky_relu
relu6 softsign tanhshrink softshrink hardshrink logsigmoid normalize special.entr special.erfcx special.expit special.i0e
special.i1 special.i1e special.log_ndtr special.ndtr special.ndtri special.psi special.round special.bessel_j0
special.bessel_j1
"""  # of one tensor
TWO = """
add sub mul div true_divide floor_divide remainder fmod pow maximum minimum fmax fmin atan2 hypot copysign nextafter
logaddexp logaddexp2 ldexp xlogy heaviside dist eq ne lt le gt ge isclose logical_and logical_or logical_xor rsub
float_power special.xlog1py mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss cosine_similarity pairwise_distance
"""  # of two
WHOLE = """
bitwise_and bitwise_or bitwise_xor add sub mul div floor_divide remainder fmod maximum minimum gcd lcm eq lt
bitwise_left_shift bitwise_right_shift logical_and
"""  # of two of whole numbers
DIMS = """
sum mean amax amin prod std var all any logsumexp norm nansum nanmean
"""  # along a dimension
VALUES = """
max min median mode cummax cummin sort
"""  # along one, with places
# tensors are those of `tensors`, layers those of `LAYERS`, d a dimension and k a boolean
MORE = """
x.softmax(d)  x.log_softmax(d)  F.softmin(x, d)  F.glu(g, 1)  F.prelu(g, torch.ones(1) / 4)  F.threshold(x, 0.1, 20)
x.clamp(-0.5, 0.5)  x.clamp(min=0)  x.clamp(max=y)  x.clamp_min(0.2)  x.clip(b, b + 1)  F.hardtanh(x, -2, 2)  x ** 2  x ** 3
x ** 0.5  x ** -1  2 ** x  x % 2  x // 2  x % -3  x.round(decimals=1)  torch.lerp(x, y, 0.3)  torch.lerp(x, y, p)  -x
torch.addcmul(x, y, b, value=0.5)  torch.addcdiv(x, y, p)  x.add(y, alpha=2)  torch.rsub(x, y, alpha=2)  x.sub(1, alpha=3)
torch.where(m, x, y)  torch.where(m, x, 0.0)  torch.where(x > 0, 1, 0)  x.masked_fill(m, -1)  x.masked_fill(m, -math.inf)
x.masked_fill(m, -math.inf).softmax(-1).nan_to_num()  x.masked_scatter(m, y)  x[m]  m.sum(d)  m.any(d)  m.all(d)  m.cumsum(d)
~m  m & (x > 0)  m | (y > 0)  m ^ (y > 0)  m.float().mean()  m.int()  m.long().argmax(d)
torch.bucketize(x, torch.arange(3.0))  x.nan_to_num(1, 2, 3)  (x / y).nan_to_num()  x.div(y, rounding_mode='floor')
x.div(y, rounding_mode='trunc')  n / 3  n // 3  n % 3  n.div(2, rounding_mode='trunc')  n.float() / 2  n.abs()  n.neg()
n.sum(d)  n.prod(d)  n.cumsum(d)  n.amax(d)  ~n  n << 1  n >> 1  n.clamp(0, 2)  n.sign()  n.bool()
n.to(torch.float16).float()  x.long()  x.int()  x.bool()  x.double().sum()  x.to(torch.int8)  x.half().float()
x.bfloat16().float()  x.type_as(n)  n ** 2  n * 2.5  n + x  n > x  n == 2  n.remainder(4)  torch.gcd(n, n + 2)  x.cumsum(d)
x.cumprod(d)  x.logcumsumexp(d)  x.flip(0).cumsum(0)  x.diff(dim=d)  x.diff(n=2, dim=-1)  x.argmax(d)  x.argmin(d, keepdim=k)
x.argmax(keepdim=False)  x.argsort(d)  x.sort(d, descending=True)[0]  x.sort(dim=d, stable=True)[1]  x.topk(2, d)[0]
x.topk(2, d, largest=False)[0]  x.gather(1, x.argsort(1)[:, :2])  torch.msort(x)  x.aminmax(dim=d)  x.sum((0, 1))
x.mean((0, -1), keepdim=True)  x.amax((0, 1))  x.var((0, 1), correction=0)  x.std(d, correction=0, keepdim=k)
x.var(-1, unbiased=False)  torch.var_mean(x, d, correction=0)  torch.std_mean(x, d)  x.norm(1, d)  x.norm(math.inf, d)
torch.linalg.vector_norm(x, 3, d)  torch.linalg.vector_norm(x, 0, d)  torch.linalg.norm(x)  torch.linalg.matrix_norm(g)
torch.linalg.matrix_norm(g, 1)  F.normalize(x, dim=d)  F.normalize(x, p=1.0, dim=d)  x.renorm(2, 0, 1.0)  x.quantile(0.5, d)
x.nanquantile(0.3, -1)  x.histc(4, -2, 2)  torch.bincount(i.flatten())  x.unique()  torch.count_nonzero(x, d)  x.median()
x.reshape(-1)  x.reshape(x.shape[0], -1)  x.view(x.shape[0], -1)  x.flatten(1)  x.flatten(0, 1)  g.unflatten(1, (2, -1))
x.unsqueeze(d)  x.unsqueeze(d).squeeze(d)  x[:1].squeeze(0)  x.squeeze(d)  x.squeeze((0, 1))  x.transpose(0, d)  x.mT
x.swapaxes(0, 1)  x.movedim(0, d)  g.permute(0, 2, 3, 1)  g.permute(3, 1, 0, 2).contiguous()  x.expand(2, *x.shape)
x[:1].expand_as(x)  x.repeat(2, *[1] * x.dim())  x.tile(2)  x.repeat_interleave(2, d)
x.repeat_interleave(torch.tensor([2]), 0)  torch.cat([x, y], d)  torch.cat([x, x[:1]])  torch.stack([x, y], d)
torch.hstack([x, y])  torch.vstack([x, y])  torch.dstack([x, y])  torch.column_stack([x, y])  x.flip(d)  x.fliplr()
x.flipud()  x.rot90()  x.roll(1, d)  x.roll(-2)  x.roll((1, 2), (0, 1))  x.tril()  x.triu(1)  x.tril(-1)  x.diag_embed()
g.diagonal(dim1=2, dim2=3)  g.diagonal(1, 2, 3)  x.chunk(2, d)  x.chunk(3, d)[0]  x.split(2, d)[0]  x.split(1)[1]
x.tensor_split(2, d)  x.unbind(1)[0]  x.narrow(d, 0, 1)  x.select(d, -1)  x[0]  x[..., -1]  x[:, 1:]  x[:, :-1]  x[::2]
x[:, ::3]  x[:, None]  x[:, -2:]  x[..., :100]  x[1:1]  x[:, x.shape[1] // 2:]  x[:x.shape[0] - 1]  x.unfold(1, 2, 1)
x.unfold(1, 2, 2)  x.as_strided((2, 2), (1, 1))  F.pad(x, (1, 2))  F.pad(x, (-1, 0), value=2.0)
F.pad(g, (1, 1, 2, 0), 'reflect')  F.pad(g, (1, 2, 1, 0), 'replicate')  F.pad(g, (1, 1, 1, 1), 'circular')
F.pad(s, (2, 1), 'reflect')  torch.broadcast_to(b, x.shape)  torch.block_diag(g[0, 0], g[0, 1])
torch.meshgrid(x[0].flatten(), y[0].flatten(), indexing='ij')  torch.cartesian_prod(x.flatten()[:3], y.flatten()[:2])
torch.arange(x.shape[1]) + x.sum()  torch.arange(0, x.shape[0], 2)  torch.linspace(0, 1, x.shape[1])  torch.zeros(x.shape) + x
torch.ones(x.shape[0], 3)  torch.full(x.shape, 2.5)  torch.full_like(x, 3)  torch.eye(x.shape[1])  x.new_zeros(x.shape[:1])
x.new_full((2, x.shape[0]), 7)  torch.tril_indices(x.shape[0], x.shape[1])  torch.scalar_tensor(x.shape[0])
torch.tensor(3) * x  x * x.shape[0]  x / x.shape[1] ** 0.5  torch.logspace(0, 1, x.shape[0])  torch.vander(x.flatten()[:4])
F.one_hot(i.long(), 9)  F.one_hot(i.long())  F.embedding(i, w)  F.embedding(i, w, padding_idx=0)  F.embedding_bag(i, w)
F.embedding_bag(i, w, mode='sum')  F.embedding_bag(i, w, mode='max')  w[i]  w[:, i // 2]  w[i[0]]  w[i, i // 2]
w.index_select(0, i[0])  w.index_select(1, i[0] % 2)  w.take(i)  torch.take_along_dim(x, j, 1)  x.gather(1, j)
x.scatter(1, j, 5.0)  x.scatter(1, j, y)  x.scatter_add(1, j // 2, y)  x.scatter_add(1, j, y)
x.scatter_reduce(1, j // 2, y, 'amax')  x.scatter_reduce(1, j // 2, y, 'sum')  x.scatter_reduce(1, j // 2, y, 'mean')
x.scatter_reduce(1, j // 2, y, 'prod')  x.index_add(0, z // 2, y)  x.index_copy(0, z, y)  x.index_fill(0, z, 2.0)
x.index_put((z,), y)  x.index_put((z // 2,), y, accumulate=True)  x[z]  x[z, 0]  x[:, z % 2]  x[0, z % 2]
x[z[:, None], z % 2]  x[x[:, 0].flatten()[:x.shape[0]] > 0]  x.index_reduce(0, z // 2, y, 'amax')
x.select_scatter(y[0], 0, 1)  x.slice_scatter(y[:1], 0, 0, 1)  x.diagonal_scatter(y.diagonal())  put(x, (slice(None), 0), 1.0)
put(x, (slice(1, None),), y[1:])  put(x, (m,), 0.0)  put(x, (..., -1), y[..., 0])  put(x, (z,), y)  x.clone().fill_(2)
x.clone().zero_() + y  x.clone().add_(y).mul_(2)  x.clone().clamp_(0)  x.clone().masked_fill_(m, 3)  x.clone().copy_(b)
x.clone().fill_diagonal_(1)  torch.isin(i, torch.tensor([1, 3]))  torch.isin(i, i[0])  torch.isin(n, 2)
torch.isin(x, x[0], invert=True)  torch.isin(i, torch.tensor([1]), assume_unique=True)
torch.searchsorted(p.flatten().cumsum(0), p)  torch.nonzero(x > 0)  (x > 0).nonzero().sum()  torch.argwhere(m)
torch.unravel_index(i, (3, 3))  x @ x.mT  r @ w.t()  F.linear(r, w)  F.linear(r, w, w[:, 0])  torch.bmm(r, r.mT)
torch.mm(w, w.t())  torch.mv(w, w[0])  torch.dot(w[0], w[1])  torch.outer(w[0], w[1])  torch.inner(w, w)
torch.addmm(w[:, :1], w, w.t())  torch.baddbmm(r[:, :, :1], r, r.mT, beta=0.5, alpha=2)  torch.addmv(w[:, 0], w, w[0])
torch.addbmm(w[:1, :1], r, r.mT)  torch.matmul(r, w[0])  torch.einsum('bhc,oc->bho', r, w)  torch.einsum('bhc,bkc->bhk', r, r)
torch.einsum('bhc->ch', r)  torch.tensordot(r, w, ([2], [1]))  torch.kron(w, w)  torch.cross(r[..., :3], r[..., 1:4])
torch.linalg.cross(r[..., :3], r[..., 1:4])  torch.cdist(r, r)  torch.cdist(r, r, p=1.0)  torch.pdist(w)  torch.trace(w)
torch.cov(w)  torch.corrcoef(w)  torch.chain_matmul(w, w.t(), w)  torch.linalg.multi_dot([w, w.t(), w])  torch.linalg.det(h)
torch.linalg.slogdet(h)  torch.linalg.inv(h)  torch.linalg.cholesky(h)  torch.linalg.solve(h, r.mT)
torch.linalg.qr(h)[1].abs()  torch.linalg.svdvals(h)  torch.linalg.eigvalsh(h)  torch.linalg.matrix_power(h, 3)
torch.linalg.matrix_exp(h / 9)  torch.linalg.pinv(h)  torch.linalg.lstsq(h, r.mT)[0]  torch.linalg.matrix_rank(h)
torch.linalg.solve_triangular(h.tril(), r.mT, upper=False)  torch.logdet(h)  torch.bilinear(r, r, w.t()[:, :4][None], None)
F.bilinear(r, r, w.t()[None] @ w[None])  torch.fft.fft(x).abs()  torch.fft.rfft(x).real  torch.fft.fft2(g).abs()
torch.fft.irfft(torch.fft.rfft(g))  torch.fft.fftshift(x)  torch.complex(x, y).abs()
torch.view_as_complex(r[..., :2]).angle()  torch.stft(s[:, 0], 8, 4, return_complex=True).abs()  torch.polar(x, y).real
torch.special.logsumexp(x, d)  F.layer_norm(x, x.shape[-1:])  F.layer_norm(r, (4,), w[0], w[1])  F.layer_norm(r, r.shape[1:])
F.rms_norm(r, (4,))  F.rms_norm(r, (4,), w[0], 1e-5)  F.group_norm(g, 2)  F.group_norm(g, 4, w[0], w[1])  F.group_norm(s, 2)
F.instance_norm(g)  F.instance_norm(s, eps=1e-3)  F.local_response_norm(g, 3)  F.batch_norm(g, w[0], w[1].abs())
F.batch_norm(s, w[0], w[1].abs(), w[2], w[3])  batch(g)  F.dropout(x, 0.5, False)  F.conv1d(s, c[:, :, 0])
F.conv1d(s, c[:, :, 0], padding='same')  F.conv1d(s, c[:, :, 0], stride=2, dilation=2)  F.conv2d(g, c)
F.conv2d(g, c, w[:6, 0])  F.conv2d(g, c, padding=1, stride=2)  F.conv2d(g, c[:4, :1], groups=4)
F.conv2d(g, c, padding='same', dilation=2)  F.conv2d(g, c, padding='valid')  F.conv3d(u, c[:, :, None])
F.conv_transpose1d(s, c[:4, :, 0], stride=2)  F.conv_transpose2d(g, c[:4], stride=2, padding=1, output_padding=1)
F.conv_transpose2d(g, c[:4, :1], groups=4)  F.conv_transpose3d(u, c[:4, :, None])  F.unfold(g, 3)
F.unfold(g, 2, stride=2, padding=1)  F.fold(F.unfold(g, 2, stride=2), tuple(n // 2 * 2 for n in g.shape[2:]), 2, stride=2)
F.conv_tbc(r, w.t()[None], w[:, 0])  F.conv2d(g[0], c)  F.avg_pool1d(s, 2)  F.avg_pool1d(s, 3, 2, 1, True)  F.avg_pool2d(g, 2)
F.avg_pool2d(g, 3, 2, 1, count_include_pad=False)  F.avg_pool2d(g, 2, ceil_mode=True)  F.avg_pool2d(g, 2, divisor_override=3)
F.avg_pool3d(u, 2)  F.avg_pool3d(u, 2, ceil_mode=True)  F.max_pool1d(s, 2)  F.max_pool1d(s, 3, 2, 1)  F.max_pool2d(g, 2)
F.max_pool2d(g, 3, 2, 1)  F.max_pool2d(g, 2, ceil_mode=True)  F.max_pool2d(g, 2, dilation=2)
F.max_pool2d(g, 2, return_indices=True)  F.max_pool3d(u, 2)  F.adaptive_avg_pool1d(s, 1)  F.adaptive_avg_pool1d(s, 3)
F.adaptive_avg_pool2d(g, 1)  F.adaptive_avg_pool2d(g, 3)  F.adaptive_avg_pool2d(g, (None, 2))  F.adaptive_avg_pool3d(u, 1)
F.adaptive_max_pool1d(s, 1)  F.adaptive_max_pool1d(s, 2)  F.adaptive_max_pool2d(g, 1)  F.adaptive_max_pool2d(g, 2)
F.adaptive_max_pool3d(u, 1)  F.lp_pool1d(s, 2, 2)  F.lp_pool2d(g, 2, 2)  F.fractional_max_pool2d(g, 2, output_size=2)
F.interpolate(g, scale_factor=2)  F.interpolate(g, (7, 9))  F.interpolate(g, scale_factor=0.5)
F.interpolate(g, scale_factor=1.7, mode='nearest-exact')  F.interpolate(g, scale_factor=2, mode='bilinear')
F.interpolate(g, (7, 9), mode='bilinear', align_corners=True)  F.interpolate(g, scale_factor=0.6, mode='bilinear')
F.interpolate(g, (5, 3), mode='bilinear', antialias=True)  F.interpolate(g, scale_factor=2, mode='bicubic')
F.interpolate(g, (7, 5), mode='bicubic', align_corners=True)  F.interpolate(g, (3, 4), mode='area')
F.interpolate(g, scale_factor=0.5, mode='area')  F.interpolate(s, scale_factor=2, mode='linear')  F.interpolate(s, 9)
F.interpolate(u, scale_factor=2)  F.interpolate(u, scale_factor=2, mode='trilinear')
F.interpolate(g, g.shape[2:], mode='bilinear')  F.interpolate(g, scale_factor=1.5, recompute_scale_factor=True)
F.upsample(g, scale_factor=2)  F.pixel_shuffle(g, 2)  F.pixel_unshuffle(g, 2)  F.channel_shuffle(g, 2)  F.grid_sample(g, e)
F.grid_sample(g, e, 'nearest', 'border')  F.grid_sample(g, e, 'bicubic', 'reflection', True)
F.grid_sample(g, e, padding_mode='border', align_corners=True)  F.affine_grid(g[:, 0, :2, :3], g.shape)
F.cosine_similarity(x, y, d)  F.cross_entropy(r.mT, i.long() % 4)  F.cross_entropy(r.flatten(0, 1), i.flatten() % 4)
F.cross_entropy(r.mT, i.long() % 4, ignore_index=0)  F.cross_entropy(r.mT, i.long() % 4, label_smoothing=0.1)
F.cross_entropy(r.mT, i.long() % 4, reduction='none')  F.cross_entropy(r, r.softmax(1))  F.nll_loss(r.mT, i.long() % 4)
F.cross_entropy(r.mT, i.long() % 4, w[0].abs(), reduction='sum')  F.nll_loss(r.mT, i.long() % 4, reduction='sum')
F.binary_cross_entropy(p, q)  F.binary_cross_entropy_with_logits(x, p)
F.binary_cross_entropy_with_logits(x, p, pos_weight=q, reduction='none')  F.kl_div(x, p)  F.kl_div(x, y, log_target=True)
F.kl_div(x, p, reduction='batchmean')  F.poisson_nll_loss(x, p)  F.gaussian_nll_loss(x, y, p)
F.hinge_embedding_loss(x, y.sign())  F.margin_ranking_loss(x, y, p)  F.triplet_margin_loss(r, r + 1, r - p.mean())
F.multi_margin_loss(w, i[0, :1].expand(w.shape[0]) % 4)  F.multilabel_soft_margin_loss(w, w.sigmoid())
F.multilabel_margin_loss(w, (w > 0).long())  F.cosine_embedding_loss(w, w + 1, w[:, 0].sign())
F.mse_loss(x, y, reduction='none')  F.smooth_l1_loss(x, y, beta=0.5)  F.huber_loss(x, y, delta=0.3)
F.l1_loss(x, y, reduction='sum')
sdpa(Q, K, K)  sdpa(Q, Q, Q, is_causal=True)  sdpa(Q, K, K, M)  sdpa(Q, K, K, A)  sdpa(Q, K, K, scale=0.3)
sdpa(Q, K[:, :2], K[:, :2], enable_gqa=True)  sdpa(Q, Q[:, :1], Q[:, :1], is_causal=True, enable_gqa=True)
sdpa(Q, K[:, :2], K[:, :2], M, enable_gqa=True)  sdpa(Q[:, 0], K[:, 0], K[:, 0])  sdpa(Q[0, 0], K[0, 0], K[0, 0])
sdpa(Q[:, 0], K[:, 0], K[:, 0], M[:, 0])  sdpa(Q[:, 0], Q[:, 0], Q[:, 0], is_causal=True)
sdpa(Q[:, None], K[:, None], K[:, None])  sdpa(Q, K, K, M[:1])  sdpa(Q, K, K, M[0, 0])  sdpa(Q, K, K[..., :5])
sdpa(Q, K, K, M.expand(-1, Q.shape[1], -1, -1))  sdpa(Q.sin().half(), K.sin().half(), K.half()).float()  mha(r, r, r)[0]
mha(r, r, r)[1]  mha(r, r, r, need_weights=False)[0]  mha(r, r, r, key_padding_mask=i > 2, need_weights=False)[0]
mha(r, r, r, average_attn_weights=False)[1]  layer(r)
layer(r, is_causal=True, src_mask=torch.full((r.shape[1],) * 2, -math.inf).triu(1))  layer(r, src_key_padding_mask=i > 2)
lstm(r)[0]  gru(r)[0]  rnn(r)[0]  bi(r)[0]  cell(r[:, 0])  gcell(r[:, 0])  x.sum().item() + x  x.shape[0] + x.sum(0)
torch.atleast_3d(x)  torch.broadcast_tensors(x, b)[1]  x.view_as(y)  x.addcmul(y, y)  x.float_power(2)
torch.addcdiv(x, y, p, value=-1)  torch.clamp(x, b.min(), b.max())  torch.trapezoid(x)  torch.cumulative_trapezoid(x)
torch.combinations(x.flatten()[:4])  torch.gradient(x.flatten()[:5])[0]  torch.nn.utils.rnn.pad_sequence([w[:2], w[:3]])
torch.triu(h)  torch.sigmoid(x) * torch.tanh(y)  x.square().mean(-1, keepdim=True).add(1e-8).rsqrt() * x
(x - x.amax(-1, keepdim=True)).exp()  F.normalize(x, dim=-1, eps=1e-6)  torch.maximum(x, torch.tensor(0.0))
x.relu().add(1e-9).log()  torch._grouped_mm(Q[:, 0].bfloat16(), Q[:, 0].mT.contiguous().mT.mT.bfloat16())
torch.mvlgamma(p + 3, 2)  x.kthvalue(2, d)[0]  x.logsumexp(d)  w.t()  torch.ravel(x)  x.squeeze()  torch.polygamma(1, p)
F.rrelu(x)  torch.special.zeta(p + 2, q + 1)
"""


log = logging.getLogger(__name__).info  # of what is refused


def put(x: Tensor, place: Any, value: Any) -> Tensor:
    x = x.clone()
    x[place] = value
    return x


sdpa = F.scaled_dot_product_attention
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(4),
    "mha": lambda: nn.MultiheadAttention(4, 2, batch_first=True),
    "layer": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
    "lstm": lambda: nn.LSTM(4, 3, batch_first=True),
    "gru": lambda: nn.GRU(4, 3, batch_first=True),
    "rnn": lambda: nn.RNN(4, 3, batch_first=True),
    "bi": lambda: nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True),
    "cell": lambda: nn.LSTMCell(4, 3),
    "gcell": lambda: nn.GRUCell(4, 3),
}
ONCE = "jz"  # places, each once: what is written twice is what ONNX does not define


@functools.cache
def operations() -> list[str]:
    """Every operation as an expression."""
    found = [f"{_home(name)}.{name}(x)" for name in ONE.split()] + [f"{_home(name)}.{name}(x, y)" for name in TWO.split()]
    found += [f"torch.{name}(n, o)" for name in WHOLE.split()]
    found += [f"torch.{name}(x, dim=d, keepdim=k)" for name in DIMS.split()]
    found += [f"torch.{name}(x, dim=d)[0]" for name in VALUES.split()]
    return found + [each for line in MORE.strip().splitlines() for each in line.split("  ")]


def _home(name: str) -> str:
    return "torch" if name.startswith("special.") or hasattr(torch, name) else "F"


def tensors(sizes: dict[str, int], rank: int, whole: torch.dtype, seed: int) -> dict[str, Tensor]:
    """What the expressions take, of these sizes."""
    g = torch.Generator().manual_seed(seed)
    B, C, H, W, D, N = (sizes[name] for name in "BCHWDN")
    shape = (B, C, H, W)[:rank]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    def below(number: int, *shape: int) -> Tensor:
        return torch.randint(0, max(number, 1), shape, generator=g).to(whole)

    square = normal(B, C, C)
    return {
        "x": normal(*shape), "y": normal(*shape), "b": normal(1, *shape[1:-1], 1), "p": normal(*shape).sigmoid(),
        "q": normal(*shape).sigmoid(), "m": normal(*shape) > 0, "n": below(9, *shape) - 4, "o": below(4, *shape) + 1,
        "i": below(5, B, H), "j": torch.rand(shape, generator=g).argsort(1),
        "z": torch.randperm(B, generator=g), "g": normal(B, C, H, W), "s": normal(B, C, W), "u": normal(B, C, D, H, W),
        "r": normal(B, H, C), "w": normal(N, C), "c": normal(6, C, 3, 3), "h": square @ square.mT + torch.eye(C),
        "e": torch.rand(B, H, W, 2, generator=g) * 2.2 - 1.1, "Q": normal(B, 4, H, 8), "K": normal(B, 4, W, 8),
        "M": normal(B, 1, H, W) > -1, "A": normal(B, 1, H, W),
    }  # fmt: skip


class Of(nn.Module):
    """An expression as a module."""

    def __init__(self, text: str, names: list[str], layers: list[str], known: dict[str, Any]) -> None:
        super().__init__()
        self.function = eval(f"lambda {', '.join(names + layers)}: {text}", {**globals(), **known})
        self.layers = nn.ModuleList(LAYERS[name]() for name in layers)

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors, *self.layers)


def low(t: Tensor) -> Tensor:
    return t if t.dtype == torch.bool else -t.abs() if t.is_floating_point() else t.amin().expand_as(t)


def high(t: Tensor) -> Tensor:
    return torch.ones_like(t) if t.dtype == torch.bool else t * 20 + 0.5 if t.is_floating_point() else t.amax().expand_as(t)


def calls(names: list[str], made: Callable[..., dict[str, Tensor]], sizes: dict[str, int], rng: random.Random) -> Iterator[Any]:
    """Other values than the example's, then other sizes."""
    example = made(sizes, rng.randrange(1 << 30))
    for change in (torch.zeros_like, low, high):
        yield [example[name] if name in ONCE else change(example[name]) for name in names]
    for _ in range(4):
        new = {name: rng.choice([size, size, 1, size - 1, size + 1, 2 * size, 7]) for name, size in sizes.items()}
        changed = rng.sample(list(sizes), rng.choice([1, 1, 2, len(sizes)]))
        found = made({name: new[name] if name in changed else size for name, size in sizes.items()}, rng.randrange(1 << 30))
        yield [found[name] for name in names]
    yield [made({**sizes, "B": 0}, 0)[name] for name in names]


def fuzz_exports(cases: int, seed: int, counts: Counter[str] | None = None, of: str = "") -> list[str]:
    """An operation for each case, of those with the text `of`; `counts` gets how many exports and calls were refused."""
    found = []
    counts = Counter() if counts is None else counts
    known = [text for text in operations() if of in text]
    with one_registry(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(seed, seed + cases):
            rng = random.Random(n)
            text = known[n * STRIDE % len(known)]
            with tempfile.TemporaryDirectory() as folder:
                found += [f"case {n}: {text}: {line}" for line in _attack(text, rng, Path(folder), counts)]
    return found


def made_of(text: str, rng: random.Random) -> tuple[Of, list[str], Callable[..., dict[str, Tensor]], dict[str, int], Any, Any]:
    """The module of an expression, names of its inputs, what makes tensors of sizes, the sizes, `rng`, and example inputs."""
    used = set(re.findall(r"(?<![.\w'])[A-Za-z]\w*", re.sub(r"\b\w+=", "", text)))
    sizes = {"B": rng.choice([2, 3]), "C": 4, "H": rng.randint(5, 8), "W": rng.randint(9, 12), "D": 6, "N": 13}
    rank, whole, number = rng.randint(2, 4), rng.choice([torch.int64, torch.int64, torch.int32]), rng.randrange(1 << 30)

    def made(sizes: dict[str, int], seed: int) -> dict[str, Tensor]:
        return tensors(sizes, rank, whole, seed)

    example = made(sizes, number)
    names, layers = [name for name in example if name in used], [name for name in LAYERS if name in used]
    torch.manual_seed(number)
    module = Of(text, names, layers, {"d": rng.choice([0, 1, -1]), "k": rng.random() < 0.5}).eval().requires_grad_(False)
    return module, names, made, sizes, rng, tuple(example[name] for name in names)


def _attack(text: str, rng: random.Random, folder: Path, counts: Counter[str]) -> list[str]:
    module, names, made, sizes, rng, inputs = made_of(text, rng)
    try:
        module(*inputs)
        gm = fxplug.trace(module, inputs)
    except Exception:  # no call of this operation, or no graph of it
        counts["not traced"] += 1
        return []
    options = {"opset": rng.choice([18, 20, 23])}
    try:
        model = fxplug.load_onnx(fxplug.export(gm, folder, inputs, to="onnx", options=options).path)
    except FxplugError as error:
        counts["exports refused"] += 1
        log(f"{text}: {error}")
        return []
    except Exception as error:
        return [f"the export ends in {type(error).__name__}: {str(error)[:200]}"]
    counts["exported"] += 1
    for given in [list(inputs), *calls(names, made, sizes, rng)]:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in zip(names, given, strict=True))
        try:
            wanted = module(*given)
        except Exception:  # no call of this operation
            counts["no call"] += 1
            continue
        try:
            got = model(*given)
        except FxplugError as error:
            counts["calls refused"] += 1
            log(f"{text} at {shapes}: {error}")
            continue
        except Exception as error:
            return [f"the call ends in {type(error).__name__} at {shapes}: {str(error)[:200]}"]
        counts["calls"] += 1
        wants, gots = list_tensors(wanted), list_tensors(got)
        if [t.shape for t in wants] == [t.shape for t in gots]:  # what is no number to torch may be one to ONNX
            gots = [torch.where(a.isnan(), a, b) if a.dtype == b.dtype else b for a, b in zip(wants, gots, strict=True)]
        gap = measure_difference(wants, gots, WITHIN)
        if gap.times > CLOSE:
            ends = [tuple(round(float(end), 2) for end in t.float().aminmax()) for t in given]
            return [f"{gap.distance:.1e} off at {shapes}, from and to {ends}, opset {options['opset']}"]
    return []
