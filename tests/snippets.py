'''What random models are made of: a few lines of a `forward` each, with what they need in `__init__`, class and module.

    # KIND NAME | choice=a,b other=1,2      KIND is image (N, C, H, W), tokens (N, T, C) or any
    module: a line of the module           {n} is a number of its own
    class: a line of the class
    init: a line of __init__
    x = ...                                 a line of forward: it changes `x` and keeps rank and C

A snippet of one line is `# KIND NAME: LINE`. Methods that begin with `ctx` are static, as autograd has them.

`inp` is what the region was given, `{kept}` an earlier value of the same kind, `{choice}` one of the choices.
'''

ORDINARY = '''
# image conv | k=1,3,5 g=1,2 pm=zeros,reflect,circular,replicate
init: self.conv{n} = nn.Conv2d(C, C, {k}, padding={k} // 2, groups={g}, padding_mode="{pm}")
x = self.conv{n}(x)
# image conv_block | act=SiLU,GELU,ReLU,Mish,Hardswish
init: self.conv{n} = nn.Conv2d(C, C, 3, padding=1, bias=False)
init: self.norm{n} = nn.GroupNorm(2, C)
init: self.act{n} = nn.{act}()
x = x + self.act{n}(self.norm{n}(self.conv{n}(x)))
# image batch_norm | mo=0.1,None affine=True,False track=True,True,False
init: self.bn{n} = nn.BatchNorm2d(C, momentum={mo}, affine={affine}, track_running_stats={track})
x = self.bn{n}(x)
# image batch_norm_functional
init: self.register_buffer("mean{n}", torch.zeros(C))
init: self.register_buffer("var{n}", torch.ones(C))
x = F.batch_norm(x, self.mean{n}, self.var{n}, training=self.training)
# image norms | f=F.instance_norm(x),F.layer_norm(x, x.shape[1:]),F.group_norm(x, 2),F.local_response_norm(x, 2),F.normalize(x, dim=1)
x = {f}
# image layer_norm_last
init: self.ln{n} = nn.LayerNorm(C)
x = self.ln{n}(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
# any activation | f=F.gelu(x),F.silu(x),x.sigmoid() * x,F.leaky_relu(x, 0.2),F.softplus(x),x.tanh(),F.hardtanh(x, -2, 2),torch.erf(x),F.elu(x)
x = {f}
# any inplace_activation | f=F.relu_(x * 1.0),nn.functional.silu(x + 0, inplace=True),torch.relu(x).mul(0.5).add_(1)
x = {f}
# any inplace_module
init: self.relu{n} = nn.ReLU(inplace=True)
x = self.relu{n}(x - 0.1)
# any dropout | d=0.1,0.5
init: self.drop{n} = nn.Dropout({d})
x = self.drop{n}(x)
# any dropout_functional | f=F.dropout(x, 0.2, self.training),F.dropout(x, 0.2, training=self.training),F.alpha_dropout(x, 0.1, self.training)
x = {f}
# image dropout2d: x = F.dropout2d(x, 0.2, self.training)
# image interpolate | f=size=(x.shape[-2] + 1, x.shape[-1]), mode="nearest";scale_factor=1.5, mode="bilinear";size=x.shape[-2:], mode="bicubic", align_corners=True
x = F.interpolate(x, {f})
# image pad_even: x = F.pad(x, (0, x.shape[-1] % 2, 0, x.shape[-2] % 2))
# image pad_modes | m=reflect,replicate,circular
x = F.pad(x, (1, 0, 0, 1), mode="{m}")
# image unfold_fold: x = F.fold(F.unfold(x, 3, padding=1), x.shape[-2:], 3, padding=1) / 9
# image tensor_unfold: x = F.pad(x, (1, 1)).unfold(3, 3, 1).mean(-1)
# image pools | f=F.avg_pool2d(x, 3, 1, 1);F.max_pool2d(x, 3, 1, 1);F.lp_pool2d(x.abs() + 0.1, 2, 1);F.adaptive_avg_pool2d(x, (None, 5));F.adaptive_max_pool2d(x, (x.shape[-2], x.shape[-1]))
x = {f}
# image shrink
if x.shape[-1] >= 6 and x.shape[-2] >= 6:
    x = F.avg_pool2d(x, 2, ceil_mode=True)
# image max_unpool
p{n}, i{n} = F.max_pool2d(x, 2, ceil_mode=True, return_indices=True)
x = x + F.max_unpool2d(p{n}, i{n}, 2, output_size=x.shape[-2:])
# image squeeze_excite
init: self.fc{n} = nn.Linear(C, C)
x = x * torch.sigmoid(self.fc{n}(x.mean((2, 3))))[:, :, None, None]
# image shuffle
if x.shape[-1] % 2 == 0 and x.shape[-2] % 2 == 0:
    x = F.pixel_shuffle(F.pixel_unshuffle(x, 2).flip(1), 2)
# image channel_shuffle
n{n}, c{n}, h{n}, w{n} = x.shape
x = x.view(n{n}, 2, c{n} // 2, h{n}, w{n}).transpose(1, 2).reshape(n{n}, c{n}, h{n}, w{n}) if x.is_floating_point() else x
# image einsum
init: self.w{n} = nn.Parameter(torch.randn(C, C) * 0.3)
x = torch.einsum("nchw,dc->ndhw", x, self.w{n})
# image einsum_spatial
a{n} = torch.einsum("nchw,nkhw->nck", x, x).softmax(-1)
x = x + torch.einsum("nck,nkhw->nchw", a{n}, x)
# any chunk_cat | d=1,-1
if x.shape[{d}] % 2 == 0:
    a{n}, b{n} = x.chunk(2, dim={d})
    x = torch.cat([b{n}, a{n} * 0.5], dim={d})
# image split_cat
a{n}, b{n} = torch.split(x, [3, C - 3], dim=1)
x = torch.cat((a{n} * 2, b{n}.neg()), dim=1)
# image split_in_parts
parts{n} = x.split(3, dim=1)
x = torch.cat([p * (i + 1) for i, p in enumerate(parts{n})], 1)
# any parts_by_operator | d=1,-1 f=split.Tensor(x, 3,unsafe_split.Tensor(x, 3,chunk.default(x, 3,unsafe_chunk.default(x, 3,tensor_split.sections(x, 3
parts{n} = torch.ops.aten.{f}, {d})
x = torch.cat([p * (i + 1) for i, p in enumerate(parts{n})], {d})
# any parts_by_keywords | d=1,-1 f=x.chunk(dim=D, chunks=3);torch.chunk(chunks=3, input=x, dim=D);torch.split(dim=D, split_size_or_sections=3, tensor=x);x.tensor_split(dim=D, sections=3)
D = {d}
parts{n} = {f}
x = torch.cat([p * (i + 1) for i, p in enumerate(parts{n})], D)
# any counted_parts | f=x.chunk(3, -1),x.split(5, -1),torch.unbind_copy(x, -1),x.unsafe_chunk(4, 1),torch.ops.aten.unbind.int(x, 1)
x = x * (1 + 0.1 * len({f}))
# any squeezed_rank | f=torch.ops.aten.squeeze.default(y{n}),torch.squeeze(input=y{n}),torch.squeeze_copy(y{n}),y{n}.squeeze(0)
y{n} = x[:1, :, -1:]
x = x * (1 + 0.1 * {f}.dim())
# any reversed_rows: x = torch.stack([r * (1 + 0.1 * i) for i, r in enumerate(reversed(x))])
# any stack_unbind: x = torch.stack([x, x.flip(1)], 0).mean(0) + torch.stack(x.unbind(1), 1) * 0.1
# image coordinates
h{n}, w{n} = x.shape[-2:]
y{n}, z{n} = torch.meshgrid(torch.linspace(-1, 1, h{n}), torch.arange(w{n}, dtype=x.dtype) / w{n}, indexing="ij")
x = x + y{n}.sin() + z{n}.cos()
# image halves: x = torch.cat([x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)
# image fancy_slices: x = torch.cat([x[:, :1], x[:, 1:-1].flip(-1), x[:, [-1]]], dim=1)[:, :, :, :]
# image strided: x = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
# any roll: x = x + torch.roll(x, shifts=1, dims=1) * 0.5
# image windows | s=2,4
n{n}, c{n}, h{n}, w{n} = x.shape
x = F.pad(x, (0, -w{n} % {s}, 0, -h{n} % {s}))
hh{n}, ww{n} = x.shape[2] // {s}, x.shape[3] // {s}
p{n} = x.view(n{n}, c{n}, hh{n}, {s}, ww{n}, {s}).permute(0, 2, 4, 3, 5, 1).reshape(-1, {s} * {s}, c{n})
p{n} = F.scaled_dot_product_attention(p{n}, p{n}, p{n})
p{n} = p{n}.view(n{n}, hh{n}, ww{n}, {s}, {s}, c{n}).permute(0, 5, 1, 3, 2, 4)
x = p{n}.reshape(n{n}, c{n}, hh{n} * {s}, ww{n} * {s})[..., :h{n}, :w{n}].contiguous()
# any no_grad
with torch.no_grad():
    s{n} = x.std() + 1
x = x / s{n}
# any no_grad_method
class: @torch.no_grad()
class: def mean{n}(self, x):
class:     return x.mean(1, keepdim=True)
x = x - self.mean{n}(x)
# any enable_grad
with torch.enable_grad():
    y{n} = x.sin()
x = x + y{n}
# any set_grad | v=True,False
with torch.set_grad_enabled({v}):
    y{n} = x.cos()
x = x + y{n}
# any detach: x = x + x.detach().sin()
# image autocast
init: self.conv{n} = nn.Conv2d(C, C, 3, padding=1)
with torch.autocast("cpu", dtype=torch.bfloat16):
    y{n} = self.conv{n}(x)
x = x + y{n}.to(x.dtype)
# any autocast_off
init: self.lin{n} = nn.Linear(C, C)
with torch.autocast(device_type=x.device.type, enabled=False):
    y{n} = x.float().mean(tuple(range(2, x.dim()))) if x.dim() == 4 else x.float().mean(1)
    y{n} = self.lin{n}(y{n})
x = x + (y{n}[:, :, None, None] if x.dim() == 4 else y{n}[:, None]).to(x.dtype)
# any casts | t=double,half,bfloat16
x = x + x.{t}().sin().to(x.dtype)
# any casts_by_weight
init: self.w{n} = nn.Parameter(torch.ones(1))
x = (x.to(self.w{n}.dtype) * self.w{n}).type_as(x)
# image grid_sample
g{n} = F.affine_grid(torch.eye(2, 3, dtype=x.dtype).expand(x.shape[0], 2, 3), list(x.shape), align_corners=False)
x = F.grid_sample(x, g{n} * 0.9, align_corners=False)
# any by_size | d=0,-1,-2 k=1,6,8
x = x * 1.5 if x.shape[{d}] > {k} else x - 0.5
# any by_dtype
if x.dtype == torch.float32:
    x = x.sin()
elif x.dtype in (torch.float64, torch.bfloat16):
    x = x.cos()
# any by_dim: x = x.sin() if x.dim() == 4 else x.cos() if x.ndim == 3 else x
# any by_batch
if x.size(0) == 1:
    x = x.sin()
# any by_none: x = x + 1 if self.training is None else x
# any where | f=torch.where(x > 0, x, x * 0.1),x.masked_fill(x < -1, 0.5),x.clamp(-1, 1.5),torch.maximum(x, -x * 0.5),x.clamp_min(0),torch.nan_to_num(x)
x = {f}
# any ordering | f=x.sort(dim=1).values,x.topk(x.shape[1], 1)[0],x.gather(1, x.argsort(1)),x.cumsum(1),x.flip(-1),x.cummax(1).values,x.take_along_dim(x.argsort(-1), -1),x.kthvalue(1, dim=1, keepdim=True)[0] + x
x = {f}
# any inplace_view
x = x.clone()
x[:, ::2] += 1
x[..., 0] = x[..., -1]
# any inplace_chain
x = x + 0
x.mul_(0.5).add_(1).clamp_(-3, 3)
# any inplace_augmented
x = x * 1
x += 0.5
x *= 0.9
x -= x.detach().mean()
# any inplace_alias
y{n} = x.clone()
v{n} = y{n}[:, 1:]
v{n}.zero_()
x = x + y{n}
# any out_arguments
y{n} = torch.empty_like(x.detach())
torch.sin(x.detach(), out=y{n})
x = x + y{n}
# any inplace_copy
y{n} = torch.zeros_like(x)
y{n}[:, 1:].copy_(x[:, :-1])
x = x + y{n}
# image module_list
init: self.convs{n} = nn.ModuleList(nn.Conv2d(C, C, 1) for _ in range(3))
parts{n} = []
for i, conv in enumerate(self.convs{n}):
    parts{n}.append(conv(x) * (i + 1))
x = sum(parts{n}) / len(self.convs{n})
# image module_dict
init: self.named{n} = nn.ModuleDict({"plus": nn.Conv2d(C, C, 1), "minus": nn.Conv2d(C, C, 1)})
for name, conv in self.named{n}.items():
    x = x + conv(x) if name == "plus" else x - conv(x)
# any parameter_list
init: self.steps{n} = nn.ParameterList([nn.Parameter(torch.randn(1)) for _ in range(3)])
for p in self.steps{n}:
    x = x + p
x = x * self.steps{n}[1] + len(self.steps{n})
# any parameter_dict
init: self.bag{n} = nn.ParameterDict({"a": nn.Parameter(torch.ones(1)), "b": nn.Parameter(torch.randn(1))})
x = x * self.bag{n}["a"] + sum(v for k, v in self.bag{n}.items() if k == "b")
# image sequential
init: self.seq{n} = nn.Sequential(nn.Conv2d(C, C, 1), nn.ReLU(), nn.Conv2d(C, C, 1), nn.Tanh())
x = self.seq{n}[:2](x) + self.seq{n}(x)
for layer in reversed(self.seq{n}[2:]):
    x = layer(x)
# image skip: x = x + F.interpolate({kept}, size=x.shape[-2:], mode="nearest")
# tokens skip: x = x + {kept}
# any keep: keep{n} = x
# any sizes_arithmetic | f=x.shape[-1] ** -0.5,1 / math.sqrt(x.shape[1] * x.shape[-1]),math.ceil(x.shape[-1] / 3),int(x.shape[1] * 0.3),max(x.shape[1], x.shape[-1]) / 10,x.numel() // x.shape[0] % 7,math.log(x.shape[-1] + 1),min(x.shape) / 2,divmod(x.shape[-1], 3)[1],round(x.shape[1] / 3, 1)
x = x + (x * ({f})).sin()
# any made_by_sizes | f=torch.zeros(x.shape[0], 1, 1),x.new_ones(x.size(0), *[1] * (x.dim() - 1)),torch.full_like(x, 0.3),torch.ones(x.size(), dtype=x.dtype) * 0.2,torch.eye(x.shape[-1]).sum(),x.new_tensor([0.5]),torch.arange(x.shape[-1]).to(x),torch.tensor(x.shape[-1]) / 9,torch.tensor([x.shape[0], 2.0]).sum(),torch.scalar_tensor(0.5)
y{n} = {f}
x = x + (y{n}[:, None] if x.dim() == 4 and y{n}.dim() == 3 else y{n})
# any noise_in_training
if self.training:
    x = x + 0.1 * torch.randn_like(x)
# any noise | f=torch.rand(x.shape[0], *[1] * (x.dim() - 1)),torch.randn(x.shape[-1]),torch.empty_like(x).uniform_(-1, 1),torch.randn_like(x),torch.rand_like(x, dtype=torch.float32),torch.bernoulli(x.sigmoid()),torch.normal(0.0, 1.0, (1,)),torch.randint(0, 3, (1,))
x = x + {f} * 0.1
# any drop_path
if self.training:
    k{n} = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(0.8).div_(0.8)
    x = x * k{n}
# any permuted: x = x[torch.randperm(x.shape[0])] * 0.1 + x if self.training else x
# any scale_argument: x = x * scale
# any flag_argument: x = x + 0.5 if flag else x.sin()
# any helper
module: def helper{n}(x, *others, power=1, **more):
module:     return x * power + sum(others) + more.get("bias", 0)
x = helper{n}(x, x.sin(), power=2, bias=0.1)
# any closure_here
k{n} = x.shape[-1]
add{n} = lambda t: t + (t * k{n}).sin()
x = add{n}(x)
# image softmax_space: x = x.flatten(2).softmax(-1).view_as(x) + x
# image fourier: x = torch.fft.irfft2(torch.fft.rfft2(x.float()) * 0.9, s=x.shape[-2:]).to(x.dtype)
# image checkpoint
init: self.inner{n} = nn.Sequential(nn.Conv2d(C, C, 1), nn.GELU())
x = torch.utils.checkpoint.checkpoint(self.inner{n}, x, use_reentrant=False) if self.training else self.inner{n}(x)
# image weight_norm
init: self.conv{n} = torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(C, C, 1))
x = self.conv{n}(x)
# image tied
init: self.conv{n} = nn.Conv2d(C, C, 1)
x = F.conv2d(self.conv{n}(x), self.conv{n}.weight.transpose(0, 1))
# image constant_kernel
init: self.register_buffer("kernel{n}", torch.ones(C, 1, 3, 3) / 9, persistent=False)
x = F.conv2d(x, self.kernel{n}.to(x.dtype), padding=1, groups=C)
# any norm_rescale: x = x / x.norm(dim=1, keepdim=True).clamp_min(1e-3)
# any linalg: x = x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + 1)
# image one_hot: x = x + F.one_hot(x.argmax(1), C).permute(0, 3, 1, 2).to(x.dtype)
# image transpose_square: x = x + x.mT.mean(-1, keepdim=True).mean(-2, keepdim=True) + x.transpose(-1, -2).sum() * 0
# image matmul
a{n} = x.flatten(2)
x = (torch.bmm(a{n}, a{n}.transpose(1, 2)).softmax(-1) @ a{n}).reshape(x.shape)
# image expand
n{n}, _, h{n}, w{n} = x.size()
x = x + x.mean((2, 3)).unsqueeze(-1).unsqueeze(-1).expand(-1, -1, h{n}, w{n}) + x[:, :1].repeat(1, C, 1, 1)
# image repeat_interleave: x = x.repeat_interleave(2, dim=-1)[..., : x.shape[-1]]
# image conv_transpose
init: self.up{n} = nn.ConvTranspose2d(C, C, 3, stride=2, padding=1)
x = F.avg_pool2d(self.up{n}(x, output_size=[2 * s for s in x.shape[-2:]]), 2)
# image depth_to_rows: x = x.movedim(1, -1).reshape(-1, C).view(x.shape[0], *x.shape[2:], C).movedim(-1, 1)
# image unflatten: x = x.unflatten(1, (2, C // 2)).flip(2).flatten(1, 2)
# any index_put: x = x.index_put((torch.tensor([0]),), x[:1] * 0.5)
# any constants
x = x + torch.tensor([1.0, 2.0, 3.0]).mean() + torch.as_tensor(0.5) + torch.from_numpy(np.linspace(0, 1, x.shape[-1])).to(x.dtype)
# any returns_tuple
class: def two{n}(self, x, *, more=False):
class:     return (x.sin(), {"cos": x.cos()}) if more else (x, None)
a{n}, b{n} = self.two{n}(x, more=True)
x = a{n} + b{n}["cos"]
# tokens linear | b=True,False
init: self.fc{n} = nn.Linear(C, C, bias={b})
x = self.fc{n}(x)
# tokens mlp | act=gelu,silu,relu
init: self.up{n}, self.down{n} = nn.Linear(C, 2 * C), nn.Linear(2 * C, C)
x = x + self.down{n}(F.{act}(self.up{n}(x)))
# tokens glu
init: self.gate{n} = nn.Linear(C, 2 * C)
x = F.glu(self.gate{n}(x), dim=-1)
# tokens layer_norm | e=1e-5,1e-3
init: self.ln{n} = nn.LayerNorm(C, eps={e})
x = self.ln{n}(x)
# tokens rms_norm
init: self.rms{n} = nn.Parameter(torch.ones(C))
x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.rms{n}
# tokens batch_norm
init: self.bn{n} = nn.BatchNorm1d(C)
x = self.bn{n}(x.transpose(1, 2)).transpose(1, 2)
# tokens sdpa | causal=True,False p=0.0,0.1
init: self.qkv{n} = nn.Linear(C, 3 * C)
b{n}, t{n}, _ = x.shape
q{n}, k{n}, v{n} = self.qkv{n}(x).reshape(b{n}, t{n}, 3, 2, C // 2).permute(2, 0, 3, 1, 4)
y{n} = F.scaled_dot_product_attention(q{n}, k{n}, v{n}, is_causal={causal}, dropout_p={p} if self.training else 0.0)
x = x + y{n}.transpose(1, 2).reshape(b{n}, t{n}, C)
# tokens sdpa_mask
init: self.qkv{n} = nn.Linear(C, 3 * C)
q{n}, k{n}, v{n} = (y.unflatten(-1, (2, C // 2)).transpose(1, 2) for y in self.qkv{n}(x).chunk(3, -1))
m{n} = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
x = x + F.scaled_dot_product_attention(q{n}, k{n}, v{n}, attn_mask=m{n}).transpose(1, 2).flatten(2)
# tokens attention_by_hand
init: self.q{n}, self.kv{n} = nn.Linear(C, C), nn.Linear(C, 2 * C, bias=False)
q{n}, (k{n}, v{n}) = self.q{n}(x), self.kv{n}(x).chunk(2, dim=-1)
a{n} = torch.matmul(q{n}, k{n}.transpose(-2, -1)) / math.sqrt(k{n}.size(-1))
a{n} = a{n}.masked_fill(torch.triu(torch.ones_like(a{n}), 1).bool(), float("-inf")).softmax(-1)
x = x + torch.dropout(a{n}, 0.1, self.training) @ v{n}
# tokens multihead | w=True,False d=0.0,0.1
init: self.mha{n} = nn.MultiheadAttention(C, 2, dropout={d}, batch_first=True)
y{n}, _ = self.mha{n}(x, x, x, need_weights={w})
x = x + y{n}
# tokens cross_attention
init: self.mha{n} = nn.MultiheadAttention(C, 2, batch_first=True)
x = x + self.mha{n}(x, {kept}, {kept} * 0.5, attn_mask=None)[0]
# tokens encoder_layer | nf=True,False
init: self.layer{n} = nn.TransformerEncoderLayer(C, 2, 16, dropout=0.1, batch_first=True, norm_first={nf})
x = self.layer{n}(x)
# tokens gru | kind=GRU,LSTM,RNN bi=True,False
init: self.rnn{n} = nn.{kind}(C, C, batch_first=True, bidirectional={bi})
y{n}, _ = self.rnn{n}(x)
x = x + y{n}[..., :C]
# tokens cell_loop
init: self.cell{n} = nn.GRUCell(C, C)
h{n}, outs{n} = x.new_zeros(x.shape[0], C), []
for t in range(x.shape[1]):
    h{n} = self.cell{n}(x[:, t], h{n})
    outs{n}.append(h{n})
x = torch.stack(outs{n}, dim=1)
# tokens positions
init: self.pos{n} = nn.Embedding(512, C)
x = x + self.pos{n}(torch.arange(x.shape[1], device=x.device))[None]
# tokens table_slice
init: self.pos{n} = nn.Parameter(torch.randn(1, 512, C) * 0.1)
x = x + self.pos{n}[:, : x.size(1)]
# tokens sinusoids
f{n} = torch.exp(torch.arange(0, C, 2).float() * (-math.log(10000.0) / C))
a{n} = torch.arange(x.shape[1]).float()[:, None] * f{n}[None]
x = x + torch.cat([a{n}.sin(), a{n}.cos()], dim=-1).to(x.dtype)
# tokens rotary
f{n} = torch.outer(torch.arange(x.shape[-2], dtype=torch.float32), 1.0 / 100 ** (torch.arange(0, C, 2) / C))
r{n}, i{n} = x[..., ::2], x[..., 1::2]
x = torch.stack((r{n} * f{n}.cos() - i{n} * f{n}.sin(), r{n} * f{n}.sin() + i{n} * f{n}.cos()), -1).flatten(-2).to(x.dtype)
# tokens relative_bias
init: self.table{n} = nn.Parameter(torch.randn(1023))
i{n} = torch.arange(x.shape[1])
b{n} = self.table{n}[i{n}[:, None] - i{n}[None, :] + 511]
x = x + (x @ x.transpose(1, 2) + b{n}).softmax(-1) @ x
# tokens class_token
init: self.cls{n} = nn.Parameter(torch.zeros(1, 1, C))
init: self.mix{n} = nn.Linear(C, C)
y{n} = torch.cat([self.cls{n}.expand(x.shape[0], -1, -1), x], dim=1)
y{n} = (y{n}.transpose(1, 2) @ y{n}).softmax(-1) @ self.mix{n}(y{n}).transpose(1, 2)
x = y{n}.transpose(1, 2)[:, 1:] + y{n}[..., 0].unsqueeze(1)
# tokens conv1d | k=1,3
init: self.conv{n} = nn.Conv1d(C, C, {k}, padding={k} // 2)
x = self.conv{n}(x.transpose(1, 2)).transpose(1, 2)
# tokens prune
k{n} = max(1, x.shape[1] // 2)
i{n} = x.norm(dim=-1).topk(k{n}, dim=1).indices
x = x.scatter_add(1, i{n}[..., None].expand(-1, -1, C), x[:, :k{n}] * 0.5)
# tokens bucketize
init: self.emb{n} = nn.Embedding(4, C)
x = x + self.emb{n}(torch.bucketize(x.mean(-1), torch.tensor([-0.5, 0.0, 0.5])))
# tokens embedding_bag
init: self.bag{n} = nn.EmbeddingBag(8, C)
x = x + self.bag{n}(x.argsort(-1).flatten(0, 1).clamp(max=7)).view_as(x)
# tokens pad_to_multiple
t{n} = x.shape[1]
x = F.pad(x, (0, 0, 0, -t{n} % 4)).unflatten(1, (-1, 4)).softmax(2).flatten(1, 2)[:, :t{n}] + x
# tokens index_add: x = x + torch.zeros_like(x).index_add(1, torch.arange(x.shape[1]).flip(0), x)
# tokens mask_argument
if mask is not None:
    x = x.masked_fill(mask[:, : x.shape[1], None], 0.0)
# tokens baddbmm: x = torch.baddbmm(x, x @ x.transpose(1, 2), x, beta=0.5, alpha=0.1)
# tokens swap_batch: x = x.transpose(0, 1).contiguous().view(x.size(1), -1).view(x.size(1), x.size(0), -1).transpose(0, 1)
# tokens film
init: self.film{n} = nn.Linear(C, 2 * C)
g{n}, b{n} = self.film{n}(x.mean(1, keepdim=True)).tensor_split(2, dim=-1)
x = x * (1 + g{n}) + b{n}
# tokens alibi
d{n} = torch.arange(x.shape[1]).view(1, -1) - torch.arange(x.shape[1]).view(-1, 1)
x = (x @ x.transpose(-1, -2) - d{n}.abs()[None]).softmax(dim=-1) @ x
# tokens split_heads_view: x = x.view(*x.shape[:-1], 2, -1).flip(-1).flatten(-2)
'''

# the effect of a hostile line must not be undone by a norm that follows, hence sin and cos
HOSTILE = '''
# any grad_mode: x = x.sin() if torch.is_grad_enabled() else x.cos()
# any grad_mode_in_no_grad
with torch.no_grad():
    k{n} = 1 if torch.is_grad_enabled() else 2
x = x + (x * k{n}).sin()
# any grad_mode_toggled
with torch.set_grad_enabled(not torch.is_grad_enabled()):
    y{n} = x.sin()
x = x + y{n}
# any requires_grad_input: x = x.sin() if inp.requires_grad else x.cos()
# any requires_grad_value: x = x.sin() if x.requires_grad else x.cos()
# any requires_grad_weight
init: self.w{n} = nn.Parameter(torch.ones(1))
x = (x * self.w{n}).sin() if self.w{n}.requires_grad else x.cos()
# any grad_fn: x = x.sin() if x.grad_fn is None else x.cos()
# any is_leaf: x = x.sin() if inp.is_leaf else x.cos()
# any inference_mode: x = x.sin() if torch.is_inference_mode_enabled() else x.cos()
# any is_inference: x = x.sin() if x.is_inference() else x.cos()
# any inference_region
with torch.inference_mode():
    y{n} = x.mean()
    k{n} = 1 if torch.is_grad_enabled() else 2
x = x + y{n}.clone() * k{n}
# any grad_attribute: x = x.sin() if (inp.grad if inp.is_leaf else None) is None else x.cos()
# any version_counter: x = x + (x * (1 + inp._version)).sin()
# any retain_grad
if x.requires_grad:
    x.retain_grad()
x = x.sin()
# any requires_grad_set
y{n} = x.detach().clone()
y{n}.requires_grad_(True)
x = x + y{n}.sin()
# any freeze_in_forward
init: self.w{n} = nn.Parameter(torch.ones(1))
self.w{n}.requires_grad_(False)
x = (x * self.w{n}).sin()
# any autograd_grad
with torch.enable_grad():
    y{n} = x.detach().clone().requires_grad_(True)
    (g{n},) = torch.autograd.grad(y{n}.sin().sum(), y{n})
x = x + g{n}
# any autograd_backward
with torch.enable_grad():
    y{n} = x.detach().clone().requires_grad_(True)
    y{n}.sin().sum().backward()
x = x + y{n}.grad
# any autocast_enabled: x = x.sin() if torch.is_autocast_enabled("cpu") else x.cos()
# any autocast_dtype
x = x.to(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype).sin().to(x.dtype)
# any autocast_same
with torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu"), dtype=torch.bfloat16):
    x = x + (x.flatten(1) @ x.flatten(1).t()).sum().to(x.dtype).sin()
# any default_dtype: x = x.sin() if torch.get_default_dtype() == torch.float32 else x.cos()
# any set_default_dtype
old{n} = torch.get_default_dtype()
torch.set_default_dtype(torch.float64)
y{n} = torch.zeros(1) + 1 / 3
torch.set_default_dtype(old{n})
x = x + y{n}.to(x.dtype) + (1 if y{n}.dtype == torch.float64 else 2)
# any contiguous: x = x.sin() if inp.is_contiguous() else x.cos()
# image channels_last: x = x.sin() if inp.is_contiguous(memory_format=torch.channels_last) else x.cos()
# any stride: x = x + (x / inp.stride(1)).sin()
# any strides_compared: x = x.sin() if inp.stride()[0] > inp.stride()[-1] and inp.stride(-1) == 1 else x.cos()
# any storage_offset: x = x.sin() if inp.storage_offset() == 0 else x.cos()
# any storage_size: x = x + (x / inp.untyped_storage().nbytes()).sin()
# any data_ptr: x = x.sin() if inp.data_ptr() == x.data_ptr() else x.cos()
# any is_view: x = x.sin() if inp._base is None else x.cos()
# any suggested_format
y{n} = torch.empty_like(inp)
x = x.sin() if y{n}.stride() == inp.stride() else x.cos()
# any view_or_reshape
try:
    y{n} = inp.view(-1)
    x = x.sin()
except RuntimeError:
    x = x.cos()
# any non_overlapping: x = x.sin() if torch.ops.aten.is_non_overlapping_and_dense(inp) else x.cos()
# any as_strided: x = x + inp.as_strided((1,), (1,)).sin()
# any is_same_storage
y{n} = inp.contiguous()
x = x.sin() if y{n} is inp else x.cos()
# any same_object
y{n} = inp.to(torch.float32)
x = x.sin() if y{n} is inp else x.cos()
# any text_f: x = x.sin() if f"{inp.shape[1]}x{inp.shape[-1]}" == f"{8}x{8}" else x.cos()
# any text_key
k{n} = {"8": 1.0, "10": 2.0, "12": 3.0}.get(str(inp.shape[-2]), 4.0)
x = x + (x * k{n}).sin()
# any text_format: x = x + (x * int("{:03d}".format(inp.shape[-2]))).sin()
# any text_json_loads: x = x + (x * json.loads(json.dumps(inp.shape[-2]))).sin()
# any text_print
s{n} = io.StringIO()
print(inp.shape[0], *inp.shape[2:], file=s{n})
x = x + (x * sum(map(ord, s{n}.getvalue()))).sin()
# any text_of_tensor: x = x + (x * len(repr(inp))).sin()
# any text_of_tensor_kind: x = x.sin() if "float32" in str(x.dtype) and str(x.device) == "cpu" else x.cos()
# any text_log
s{n} = io.StringIO()
h{n} = logging.StreamHandler(s{n})
logging.getLogger("fuzz{n}").addHandler(h{n})
logging.getLogger("fuzz{n}").warning("size %d", inp.shape[-2])
logging.getLogger("fuzz{n}").removeHandler(h{n})
x = x + (x * sum(map(ord, s{n}.getvalue()))).sin()
# any text_error
try:
    raise ValueError(f"size {inp.shape[-2]}")
except ValueError as error:
    x = x + (x * sum(map(ord, str(error)))).sin()
# any text_getattr
init: self.scale_8, self.scale_12 = 1.0, 2.0
x = x + (x * getattr(self, f"scale_{inp.shape[-2]}", 3.0)).sin()
# any size_key
k{n} = {8: 1.0, 10: 2.0, 12: 3.0}.get(inp.shape[-2], 4.0)
x = x + (x * k{n}).sin()
# any size_in_set: x = x.sin() if inp.shape[-2] in {8, 12} else x.cos()
# any shape_compared: x = x.sin() if inp.shape == (2, *inp.shape[1:-2], 8, inp.shape[-1]) else x.cos()
# any shape_as_key: x = x + (x * {torch.Size([2, 8, 8, 8]): 1, torch.Size([2, 8, 8]): 2}.get(inp.shape, 3)).sin()
# any shape_index: x = x + (x * [8, 9, 10, 12, 16, 24].index(inp.shape[-2] if inp.shape[-2] in (8, 9, 10, 12) else 24)).sin()
# any shape_count: x = x + (x * inp.shape.count(8)).sin()
# any size_gcd: x = x + (x * math.gcd(inp.shape[-2], 12) + math.isqrt(inp.shape[-2])).sin()
# any size_range: x = x + (x * sum(range(inp.shape[-2]))).sin()
# any size_repeat: x = x + (x * len("a" * inp.shape[-2]) + len([0] * inp.shape[0])).sin()
# any size_pickled: x = x + (x * pickle.loads(pickle.dumps(inp.shape[-2]))).sin()
# any size_copied: x = x + (x * copy.deepcopy(inp.shape)[-2] + copy.copy(inp.shape[0])).sin()
# any size_type: x = x.sin() if type(inp.shape[-2]) is int and isinstance(inp.shape[0], int) else x.cos()
# any size_index: x = x + (x * operator.index(inp.shape[-2])).sin()
# any size_numpy: x = x + (x * float(np.prod(inp.shape) / np.array(inp.shape).max())).sin()
# any size_random: x = x + (x * random.Random(inp.shape[-2]).random()).sin()
# any size_match
match inp.shape[-2]:
    case 8:
        x = x.sin()
    case 12:
        x = x.tan().clamp(-1, 1)
    case _:
        x = x.cos()
# any size_lru_method
class: @functools.lru_cache(maxsize=4)
class: def table{n}(self, size, other=1):
class:     return torch.arange(size).float().mean() + other
x = x + (x * self.table{n}(inp.shape[-2])).sin()
# any size_divmod
q{n}, r{n} = divmod(inp.shape[-2], 3)
x = x + (x * r{n}).sin() if q{n} < 3 else x.cos()
# any size_bits: x = x + (x * (inp.shape[-2].bit_length() + (inp.shape[-2] & 3) + (inp.shape[0] << 2))).sin()
# any size_complex: x = x + (x * abs(complex(inp.shape[-2], inp.shape[0]))).sin()
# any size_index_list: x = x + (x * [0.1 * i for i in range(64)][inp.shape[-2]]).sin()
# any size_recursion
class: def deep{n}(self, x, depth):
class:     return x if depth <= 0 else self.deep{n}(x.sin() + 0.1, depth - 3)
x = self.deep{n}(x, inp.shape[-2])
# any len_tensor: x = x + (x * len(inp)).sin()
# any iterate_tensor: x = x + sum(row.mean() for row in inp) * 0.3
# any counter
init: self.calls{n} = 0
self.calls{n} += 1
x = x + (x * self.calls{n}).sin()
# any counter_after
init: self.calls{n} = 0
x = x + (x * self.calls{n}).sin()
self.calls{n} = self.calls{n} + 1
# any counter_tensor
init: self.calls{n} = torch.zeros(1)
self.calls{n} += 1
x = x + (x * self.calls{n}).sin()
# any counter_child
module: class Counted{n}(nn.Module):
module:     def __init__(self):
module:         super().__init__()
module:         self.calls = 0
module:     def forward(self, x):
module:         self.calls += 1
module:         return x + (x * self.calls).sin()
init: self.counted{n} = Counted{n}()
x = self.counted{n}(x)
# any counter_parent
module: class Child{n}(nn.Module):
module:     def __init__(self, parent):
module:         super().__init__()
module:         self.parent = weakref.ref(parent)
module:     def forward(self, x):
module:         self.parent().calls += 1
module:         return x + (x * self.parent().calls).sin()
init: self.calls = 0
init: self.child{n} = Child{n}(self)
x = self.child{n}(x)
# any list_of_sizes
init: self.seen{n} = []
self.seen{n}.append(inp.shape[-2])
x = x + (x * self.seen{n}[0]).sin()
# any deque_state
init: self.seen{n} = collections.deque([0.0, 1.0, 2.0])
self.seen{n}.rotate(1)
x = x + (x * self.seen{n}[0]).sin()
# any kept_output_public
init: self.features{n} = None
self.features{n} = x.detach().mean()
# any kept_size
init: self.size{n} = 0
self.size{n} = inp.shape[-2]
x = x + (x * self.size{n}).sin()
# any swapped_attribute
init: self.factor{n} = 1.0
old{n}, self.factor{n} = self.factor{n}, 2.0
try:
    x = x + (x * self.factor{n}).sin()
finally:
    self.factor{n} = old{n}
# any buffer_anew_training
init: self.register_buffer("ema{n}", torch.zeros(1))
if self.training:
    self.ema{n} = self.ema{n} * 0.9 + x.detach().mean() * 0.1
x = x + self.ema{n}
# any buffer_data
init: self.register_buffer("ema{n}", torch.zeros(1))
self.ema{n}.data = self.ema{n}.data + 1
x = x + self.ema{n}
# any buffer_copy
init: self.register_buffer("ema{n}", torch.zeros(1))
with torch.no_grad():
    self.ema{n}.copy_(self.ema{n} * 0.5 + x.mean())
x = x + self.ema{n}
# any buffer_index
init: self.register_buffer("ema{n}", torch.zeros(3))
self.ema{n}[1] = x.detach().mean()
x = x + self.ema{n}.sum()
# any buffer_counts_item
init: self.register_buffer("calls{n}", torch.zeros(1, dtype=torch.long))
self.calls{n} += 1
x = x + (x * int(self.calls{n})).sin()
# any buffer_ring
init: self.register_buffer("ring{n}", torch.zeros(4))
init: self.register_buffer("at{n}", torch.zeros((), dtype=torch.long))
self.ring{n}.index_copy_(0, self.at{n}.view(1), x.detach().mean().to(self.ring{n}.dtype).view(1))
self.at{n}.copy_((self.at{n} + 1) % 4)
x = x + self.ring{n}.sum()
# any parameter_renormed
init: self.w{n} = nn.Parameter(torch.ones(4, 4))
with torch.no_grad():
    self.w{n}.renorm_(2, 0, 1.0)
x = x + self.w{n}.sum().sin()
# any embedding_max_norm
init: self.e{n} = nn.Embedding(4, C, max_norm=0.5)
x = x + self.e{n}(torch.tensor([1, 2])).sum().sin()
# any lazy_linear
init: self.lazy{n} = nn.LazyLinear(1)
x = x + self.lazy{n}(x.flatten(2).mean(-1)).sum().sin()
# any lazy_module
init: self.head{n} = None
if self.head{n} is None:
    self.head{n} = nn.Identity()
x = self.head{n}(x).sin()
# any module_swapped
init: self.a{n}, self.b{n} = nn.Tanh(), nn.Sigmoid()
self.a{n}, self.b{n} = self.b{n}, self.a{n}
x = x + self.a{n}(x)
# any module_option
init: self.drop{n} = nn.Dropout(0.1)
self.drop{n}.p = min(0.9, self.drop{n}.p + 0.1)
x = self.drop{n}(x)
# any module_mode
init: self.drop{n} = nn.Dropout(0.5)
self.drop{n}.train()
x = self.drop{n}(x)
# any module_eval
init: self.drop{n} = nn.Dropout(0.5)
self.drop{n}.eval()
x = self.drop{n}(x)
# any self_mode
self.training = not self.training
x = x + F.dropout(x, 0.5, self.training)
self.training = not self.training
# any self_eval
was{n} = self.training
self.eval()
x = x + F.dropout(x, 0.5, self.training)
self.train(was{n})
# any mode_of_child
init: self.drop{n} = nn.Dropout(0.5)
x = x.sin() if self.drop{n}.training else x.cos()
# any mode_of_other
init: self.sub{n} = nn.Sequential(nn.Dropout(0.5))
x = x.sin() if all(m.training for m in self.modules()) else x.cos()
# any batch_norm_unused
init: self.register_buffer("mean{n}", torch.zeros(C))
init: self.register_buffer("var{n}", torch.ones(C))
F.batch_norm(x if x.dim() == 4 else x.transpose(1, 2), self.mean{n}, self.var{n}, training=True)
x = x + self.mean{n}.sum().sin()
# any batch_norm_unused_module
init: self.bn{n} = nn.BatchNorm1d(C)
self.bn{n}(x.flatten(2) if x.dim() == 4 else x.transpose(1, 2))
# any batch_norm_torch
init: self.register_buffer("mean{n}", torch.zeros(C))
init: self.register_buffer("var{n}", torch.ones(C))
y{n} = x if x.dim() == 4 else x.transpose(1, 2)
torch.batch_norm(y{n}, None, None, self.mean{n}, self.var{n}, True, 0.1, 1e-5, False)
# any instance_norm_unused
init: self.register_buffer("mean{n}", torch.zeros(C))
init: self.register_buffer("var{n}", torch.ones(C))
F.instance_norm(x if x.dim() == 4 else x.transpose(1, 2), self.mean{n}, self.var{n}, use_input_stats=True)
x = x + self.mean{n}.sum().sin()
# any unused_random
torch.rand(3)
x = x + torch.rand(1)
# any unused_dropout
F.dropout(x, 0.5, self.training)
x = x + torch.rand(1)
# any unused_module_dropout
init: self.drop{n} = nn.Dropout(0.5)
self.drop{n}(x)
x = x + torch.rand(1)
# any cache_by_size
init: self.cache{n} = None
if self.cache{n} is None or self.cache{n}.shape[0] != inp.shape[-2]:
    self.cache{n} = torch.arange(inp.shape[-2]).float()
x = x + self.cache{n}.sum().sin()
# any cache_dict
init: self.cache{n} = {}
if inp.shape[-2] not in self.cache{n}:
    self.cache{n}[inp.shape[-2]] = torch.arange(inp.shape[-2]).float()
x = x + self.cache{n}[inp.shape[-2]].sum().sin()
# any cache_buffer
init: self.register_buffer("cache{n}", torch.zeros(0), persistent=False)
if self.cache{n}.shape[0] < inp.shape[-2]:
    self.cache{n} = torch.arange(inp.shape[-2]).float()
x = x + self.cache{n}[: inp.shape[-2]].sum().sin()
# any cache_batch
init: self.cache{n} = {}
k{n} = self.cache{n}.setdefault(inp.shape[0], len(self.cache{n}))
x = x + (x * k{n}).sin()
# any cache_first
init: self.first{n} = None
if self.first{n} is None:
    self.first{n} = x.detach().mean()
x = x + self.first{n}
# any cache_growing
init: self.past{n} = None
y{n} = x.detach().mean().view(1)
self.past{n} = y{n} if self.past{n} is None else torch.cat([self.past{n}, y{n}])
x = x + self.past{n}.mean()
# any cache_weak
init: self.weak{n} = weakref.WeakKeyDictionary()
k{n} = self.weak{n}.setdefault(self, len(self.weak{n}))
x = x + (x * k{n}).sin()
# any cached_property
class: @functools.cached_property
class: def table{n}(self):
class:     return torch.linspace(0, 1, 5).sum()
x = x + self.table{n}
# any cached_global
module: @functools.cache
module: def grid{n}(size):
module:     return torch.linspace(0, 1, size)
x = x + grid{n}(inp.shape[-2]).sum().sin()
# any seed
torch.manual_seed(3)
x = x + torch.rand(1)
# any seed_random
torch.random.manual_seed(5)
x = F.dropout(x, 0.5, True)
# any fork_rng
with torch.random.fork_rng(devices=[]):
    y{n} = torch.rand(1)
x = x + y{n} + torch.rand(1)
# any fork_rng_seeded
with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)
    y{n} = torch.rand(1)
x = x + y{n}
# any rng_state
s{n} = torch.get_rng_state()
y{n} = torch.rand(1)
torch.set_rng_state(s{n})
x = x + y{n} + torch.rand(1)
# any rng_state_default
s{n} = torch.default_generator.get_state()
y{n} = torch.rand(1)
torch.default_generator.set_state(s{n})
x = x + y{n}
# any rng_state_read: x = x + torch.get_rng_state().float().mean().sin()
# any initial_seed: x = x + (x * (torch.initial_seed() % 7)).sin()
# any reseed
torch.seed()
x = x + torch.rand(1) * 0.1
# any generator_seeded: x = x + torch.rand(1, generator=torch.Generator().manual_seed(7))
# any generator_kept
init: self.gen{n} = torch.Generator().manual_seed(7)
x = x + torch.rand(1, generator=self.gen{n})
# any generator_default: x = x + torch.rand(1, generator=torch.default_generator)
# any generator_by_size: x = x + torch.rand(1, generator=torch.Generator().manual_seed(inp.shape[-2]))
# any python_random: x = x + (x * random.random()).sin()
# any python_random_seeded
random.seed(4)
x = x + (x * random.random()).sin()
# any python_random_kept
init: self.rng{n} = random.Random(1)
x = x + (x * self.rng{n}.random()).sin()
# any numpy_random: x = x + (x * float(np.random.rand())).sin()
# any numpy_rng_kept
init: self.rng{n} = np.random.default_rng(3)
x = x + (x * self.rng{n}.random()).sin()
# any layer_drop
if self.training and torch.rand(()) < 0.5:
    x = x.sin()
# any layer_drop_python
if not self.training or random.uniform(0, 1) > 0.5:
    x = x.sin()
# any random_size
k{n} = int(torch.randint(1, 4, ()))
x = x + (x * k{n}).sin()
# any random_item: x = x + (x * torch.rand(()).item()).sin()
# any register_hook
y{n} = x * 1.0
if y{n}.requires_grad:
    y{n}.register_hook(lambda g: g * 2)
x = y{n}
# any register_hook_always
init: self.w{n} = nn.Parameter(torch.ones(1))
y{n} = x * self.w{n}
h{n} = y{n}.register_hook(lambda g: g * 3) if torch.is_grad_enabled() else None
x = y{n}
# any register_hook_parameter
init: self.w{n} = nn.Parameter(torch.ones(1))
if self.w{n}.requires_grad:
    self.w{n}.register_hook(lambda g: g * 2)
x = (x * self.w{n}).sin()
# any hook_in_init
init: self.w{n} = nn.Parameter(torch.ones(1))
init: self.w{n}.register_hook(lambda g: g * 2)
x = (x * self.w{n}).sin()
# any forward_hook_in_init
init: self.act{n} = nn.Tanh()
init: self.act{n}.register_forward_hook(lambda m, a, y: y + 0.5)
x = x + self.act{n}(x)
# any pre_hook_in_init
init: self.act{n} = nn.Tanh()
init: self.act{n}.register_forward_pre_hook(lambda m, a: (a[0] * 0.5,))
x = x + self.act{n}(x)
# any backward_hook_in_init
init: self.act{n} = nn.Tanh()
init: self.act{n}.register_full_backward_hook(lambda m, gi, go: tuple(g * 2 for g in gi))
x = x + self.act{n}(x)
# any backward_pre_hook_in_init
init: self.act{n} = nn.Tanh()
init: self.act{n}.register_full_backward_pre_hook(lambda m, go: tuple(g * 2 for g in go))
x = x + self.act{n}(x)
# any hook_counts
init: self.act{n} = nn.Tanh()
init: self.calls{n} = 0
class: def told{n}(self, m, a, y):
class:     self.calls{n} += 1
class:     return y * self.calls{n}
init: self.act{n}.register_forward_hook(self.told{n})
x = x + self.act{n}(x)
# any hook_in_forward
init: self.act{n} = nn.Tanh()
h{n} = self.act{n}.register_forward_hook(lambda m, a, y: y + 0.5)
x = x + self.act{n}(x)
h{n}.remove()
# any hook_left
init: self.act{n} = nn.Tanh()
self.act{n}.register_forward_hook(lambda m, a, y: y + 0.5)
x = x + self.act{n}(x)
# any saved_tensors_hooks
with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
    y{n} = x * x
x = x + y{n}
# any gradient_scale
module: class Twice{n}(torch.autograd.Function):
module:     def forward(ctx, x):
module:         return x.clone()
module:     def backward(ctx, g):
module:         return g * 2
x = Twice{n}.apply(x)
# any input_inplace
inp.mul_(0.5)
x = x + 1
# any input_index
inp[:, 0] = 0.25
x = x.sin()
# any input_zero_view
inp[:, :1].zero_()
x = x.sin()
# any input_relu: x = F.relu(inp, inplace=True).mean() + x
# any input_relu_module
init: self.relu{n} = nn.ReLU(inplace=True)
x = self.relu{n}(inp).mean() + x
# any input_data
inp.data.add_(0.5)
x = x.sin()
# any input_detached
inp.detach().mul_(0.5)
x = x.sin()
# any input_reshaped
inp.unsqueeze_(0)
x = x + inp.dim()
inp.squeeze_(0)
# any input_requires_grad
y{n} = inp.detach()
x = x + (y{n}.requires_grad_() * 2).sin().mean()
# any input_set_data
inp.data = inp.data + 1
x = x.sin()
# any input_dict
extra["made"] = x.mean()
x = x + extra["made"] + extra["bias"]
# any input_dict_popped: x = x + extra.pop("bias")
# any input_dict_number: x = x + extra["bias"] * extra["gain"] + len(extra)
# any branch_sum: x = x.sin() if x.sum() > 0 else x.cos()
# any branch_item: x = x + (x * (x.abs().max().item() > 2)).sin()
# any branch_any: x = x.sin() if (x > 1.5).any() else x.cos()
# any branch_equal: x = x.sin() if torch.equal(inp, inp.abs()) else x.cos()
# any branch_allclose: x = x.sin() if torch.allclose(inp[:1], inp[-1:]) else x.cos()
# any branch_argmax: x = x + (x * int(x.flatten().argmax())).sin()
# any branch_while
k{n} = x.abs().mean()
while k{n} > 0.1:
    k{n} = k{n} * 0.3
    x = x.sin() + 0.1
# any branch_tolist: x = x + (x * sum(1 for v in x.flatten()[:3].tolist() if v > 0)).sin()
# any branch_float: x = x + (x * float(x.mean())).sin()
# any branch_format: x = x + (x * len(f"{x.mean():.3f}")).sin()
# any branch_min_python: x = x * min(2.0, x.abs().max())
# any masked_select
y{n} = x[x > 0]
x = x + y{n}.mean() if y{n}.numel() else x
# any nonzero: x = x + len((x > 0.5).nonzero()) * 0.01
# any unique: x = x + x.round().unique().numel() * 0.01
# any masked_assign
x = x.clone()
x[x < 0] = 0.1
# any boolean_count: x = x + (x * int((x > 0).sum())).sin()
# any assert_finite
assert torch.isfinite(x).all(), "not finite"
x = x.sin()
# any numpy_out: x = x + float(x.detach().numpy().mean())
# any numpy_function: x = x + torch.from_numpy(np.sin(x.detach().numpy())).to(x.dtype)
# any to_list_and_back: x = x + torch.tensor(x.detach().mean().tolist())
# any early_return
class: def early{n}(self, x, inp):
class:     if inp.shape[0] > 2:
class:         return x.sin()
class:     if inp.shape[-2] < 9:
class:         return x.cos()
class:     return x.tanh()
x = self.early{n}(x, inp)
# any early_return_value
class: def early{n}(self, x):
class:     if x.mean() > 0:
class:         return x.sin()
class:     return x.cos()
x = self.early{n}(x)
# any try_shape
try:
    x = x + torch.zeros(x.shape[0] + 1, 8, *[8] * (x.dim() - 2))
except RuntimeError:
    x = x.cos()
# any try_size
try:
    y{n} = x.view(2, -1)
    x = x.sin()
except RuntimeError:
    x = x.cos()
# any try_value
try:
    torch.linalg.inv(x.detach().flatten()[:4].view(2, 2) * 0)
    x = x.sin()
except torch.linalg.LinAlgError:
    x = x.cos()
# any try_python
try:
    k{n} = 1 / (inp.shape[-2] - 8)
except ZeroDivisionError:
    k{n} = 5.0
x = x + (x * k{n}).sin()
# any try_index
try:
    x = x + inp[2].mean()
except IndexError:
    x = x.cos()
# any try_key
try:
    x = x + (x * {8: 1.0, 12: 2.0}[inp.shape[-2]]).sin()
except KeyError:
    x = x.cos()
# any raise_size
if inp.shape[-2] > 11:
    raise ValueError("too large")
x = x.sin()
# any generator_function
module: def parts{n}(x):
module:     for i in range(x.shape[0]):
module:         yield x[i].mean()
x = x + sum(parts{n}(x)) * 0.3
# any generator_send
module: def talk{n}(x):
module:     k = yield x.sin()
module:     yield x.cos() * k
g{n} = talk{n}(x)
x = next(g{n}) + g{n}.send(x.shape[0])
# any context_manager
module: @contextlib.contextmanager
module: def flagged{n}(module):
module:     module.flag{n} = True
module:     try:
module:         yield
module:     finally:
module:         module.flag{n} = False
init: self.flag{n} = False
with flagged{n}(self):
    x = x.sin() if self.flag{n} else x.cos()
# any dynamic_getattr
class: def __getattr__(self, name):
class:     if name.startswith("magic"):
class:         return float(len(name))
class:     return super().__getattr__(name)
x = x + (x * self.magic{n}).sin()
# any dynamic_setattr
class: def __setattr__(self, name, value):
class:     if name == "odd":
class:         self.__dict__["odd_count"] = self.__dict__.get("odd_count", 0) + 1
class:     super().__setattr__(name, value)
self.odd = 1.0
x = x + (x * self.odd_count).sin()
# any slots_object
module: class Slotted{n}:
module:     __slots__ = ("k",)
init: self.slotted{n} = Slotted{n}()
init: self.slotted{n}.k = 0
self.slotted{n}.k += 1
x = x + (x * self.slotted{n}.k).sin()
# any partial
init: self.act{n} = functools.partial(F.leaky_relu, negative_slope=0.3)
x = self.act{n}(x)
# any partial_state
module: def bump{n}(state, x):
module:     state["k"] += 1
module:     return x + (x * state["k"]).sin()
init: self.bump{n} = functools.partial(bump{n}, {"k": 0})
x = self.bump{n}(x)
# any singledispatch
module: @functools.singledispatch
module: def kind{n}(v):
module:     return 3.0
module: @kind{n}.register
module: def _(v: int):
module:     return 1.0
x = x + (x * kind{n}(inp.shape[-2])).sin()
# any asyncio
module: async def later{n}(x):
module:     await asyncio.sleep(0)
module:     return x.sin()
x = x + asyncio.run(later{n}(x))
# any weak_reference
init: self.weak{n} = weakref.ref(self)
x = x.sin() if self.weak{n}() is self else x.cos()
# any forward_replaced
init: self.act{n} = nn.Tanh()
init: self.act{n}.forward = lambda y: y.sin() + 0.1
x = x + self.act{n}(x)
# any call_overridden
module: class Called{n}(nn.Module):
module:     def forward(self, x):
module:         return x.sin()
module:     def __call__(self, x):
module:         return super().__call__(x) + 0.5
init: self.called{n} = Called{n}()
x = self.called{n}(x)
# any decorated
module: def doubled{n}(f):
module:     @functools.wraps(f)
module:     def g(*a, **k):
module:         return f(*a, **k) * 2
module:     return g
class: @doubled{n}
class: def inner{n}(self, x):
class:     return x.sin()
x = self.inner{n}(x)
# any eval_text: x = eval("x.sin() + k", {"x": x, "k": inp.shape[-2]})
# any exec_text
d{n} = {"x": x}
exec("y = x.sin() if x.shape[-2] > 8 else x.cos()", d{n})
x = d{n}["y"]
# any warnings_caught
with warnings.catch_warnings(record=True) as w{n}:
    warnings.simplefilter("always")
    warnings.warn(f"size {inp.shape[-2]}")
x = x + (x * len(str(w{n}[0].message))).sin()
# any subclass
module: class Marked{n}(torch.Tensor):
module:     pass
x = x.as_subclass(Marked{n}).sin().as_subclass(torch.Tensor)
# any scripted
module: class Inner{n}(nn.Module):
module:     def forward(self, x):
module:         return x.sin() + 1
init: self.scripted{n} = scripted(Inner{n}())
x = x + self.scripted{n}(x)
# any scripted_function
module: @scripted
module: def script{n}(x):
module:     return x.sin() + 1
x = x + script{n}(x)
# any scripting_question: x = x.sin() if torch.jit.is_scripting() or torch.jit.is_tracing() else x.cos()
# any compiling_question: x = x.sin() if torch.compiler.is_compiling() else x.cos()
# any packed_sequence
init: self.gru{n} = nn.GRU(C, C, batch_first=True)
y{n} = x if x.dim() == 3 else x.flatten(2).transpose(1, 2)
p{n} = nn.utils.rnn.pack_padded_sequence(y{n}, torch.full((y{n}.shape[0],), y{n}.shape[1]), batch_first=True)
o{n}, _ = nn.utils.rnn.pad_packed_sequence(self.gru{n}(p{n})[0], batch_first=True)
x = x + o{n}.mean()
# tokens is_causal
q{n} = x.unsqueeze(1)
x = x + F.scaled_dot_product_attention(q{n}, q{n}, q{n}, is_causal=x.shape[1] > 8)[:, 0]
# tokens sdpa_kernel
with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
    x = x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
# any functional_call
init: self.inner{n} = nn.Linear(1, 1)
y{n} = torch.func.functional_call(self.inner{n}, {k: v * 2 for k, v in self.inner{n}.named_parameters()}, x[..., :1])
x = x + y{n}
# any vmap: x = x + torch.vmap(lambda row: row.sin() * 2)(x)
# any func_grad: x = x + torch.func.grad(lambda t: t.sin().sum())(x.detach())
# any jvp: x = x + torch.func.jvp(torch.sin, (x.detach(),), (torch.ones_like(x),))[1]
# any deepcopied_module
init: self.inner{n} = nn.Linear(1, 1)
x = x + copy.deepcopy(self.inner{n})(x[..., :1])
# any module_made: x = x + nn.Hardtanh(-0.5, 0.5)(x)
# any module_made_random: x = x + nn.Linear(1, 1)(x[..., :1])
# any aten: x = x + torch.ops.aten.sin(x) + torch.ops.aten.add.Tensor(x, x, alpha=2)
# any unbound_method: x = torch.Tensor.add(x, torch.Tensor.sin(x))
# any data_attribute: x = x + x.data.sin()
# any class_attribute: x = x.sin() if type(x) is torch.Tensor and x.__class__ is torch.Tensor else x.cos()
# any isinstance_parameter: x = x.sin() if isinstance(inp, nn.Parameter) else x.cos()
# any tensor_attribute
x.mark = 3.0
x = x + (x * getattr(x, "mark", 1.0)).sin()
# any input_attribute: x = x + (x * getattr(inp, "mark", 1.0)).sin()
# any weight_attribute
init: self.w{n} = nn.Parameter(torch.ones(1))
init: self.w{n}.tag = 2.0
x = x + (x * self.w{n} * self.w{n}.tag).sin()
# any tensor_in_set
s{n} = {inp, x}
x = x.sin() if x in s{n} and len(s{n}) == 2 else x.cos()
# any same_tensor: x = x.sin() if x is inp else x.cos()
# any state_dict_read
init: self.w{n} = nn.Parameter(torch.full((1,), 0.5))
x = (x * self.state_dict()["w{n}"]).sin()
# any named_parameters_read
init: self.w{n} = nn.Parameter(torch.full((1,), 0.5))
x = (x * dict(self.named_parameters())["w{n}"]).sin()
# any parameters_count
init: self.w{n} = nn.Parameter(torch.full((1,), 0.5))
x = x + (x * sum(p.numel() for p in self.parameters())).sin()
# any parameter_dtype
init: self.w{n} = nn.Parameter(torch.full((1,), 0.5))
x = x.sin() if self.w{n}.dtype == torch.float32 else x.cos()
# any parameter_dtype_cast
init: self.w{n} = nn.Parameter(torch.full((1,), 0.5))
x = x + x.to(self.w{n}.dtype).sin().to(x.dtype) + torch.zeros(1, dtype=self.w{n}.dtype)
# any parameter_device
init: self.w{n} = nn.Parameter(torch.full((1,), 0.5))
x = x + torch.ones(1, device=next(self.parameters()).device) * self.w{n}.item()
# any parameter_value
init: self.w{n} = nn.Parameter(torch.full((1,), 0.5))
x = x.sin() if self.w{n} > 0 else x.cos()
# any parameter_grad
init: self.w{n} = nn.Parameter(torch.full((1,), 0.5))
x = (x * self.w{n}).sin() if self.w{n}.grad is None else x.cos()
# any buffer_value
init: self.register_buffer("on{n}", torch.tensor(True))
x = x.sin() if self.on{n} else x.cos()
# any object_returned
module: @dataclasses.dataclass
module: class Held{n}:
module:     a: torch.Tensor
module:     k: int = 0
h{n} = Held{n}(x.sin())
h{n}.k += inp.shape[-2]
x = h{n}.a + (x * h{n}.k).sin()
# any regular_expression: x = x + (x * len(re.findall("[0-4]", str(tuple(inp.shape))))).sin()
# any isqrt_branch: x = x.sin() if math.isqrt(inp.shape[-2]) ** 2 == inp.shape[-2] else x.cos()
# any float_is_integer: x = x.sin() if (inp.shape[-2] / 4).is_integer() else x.cos()
# any zip_strict: x = x + (x * sum(a * b for a, b in zip(inp.shape, itertools.count(1)))).sin()
# any permutation_of_sizes: x = x + (x * len(list(itertools.permutations(range(min(inp.shape[0], 3)))))).sin()
# any dtype_promoted: x = x + (x * torch.result_type(x, 1.0).itemsize).sin()
# any element_size: x = x + (x * x.element_size()).sin()
# any finfo: x = x.sin() + torch.finfo(x.dtype).eps * 1e5
# any iinfo_masked: x = x.masked_fill(x > 2, torch.finfo(x.dtype).min).clamp_min(-3).sin()
# any nbytes: x = x + (x * inp.nbytes).sin()
# any module_text: x = x + (x * (len(str(self)) % 13)).sin()
# any complex_view
y{n} = torch.view_as_complex(x.float().contiguous().unflatten(-1, (-1, 2)) if x.shape[-1] % 2 == 0 else torch.zeros(1, 2))
x = x + y{n}.abs().mean().to(x.dtype)
# any sparse: x = x + x.detach().flatten(1).to_sparse().to_dense().sum()
# any nested
y{n} = torch.nested.nested_tensor([r.detach().flatten() for r in x])
x = x + y{n}.to_padded_tensor(0.0).mean()
# any quantile: x = x + x.detach().float().flatten(1).quantile(0.5, dim=1).sum().to(x.dtype)
# any histc: x = x + torch.histc(x.detach().float(), 4)[0].to(x.dtype) * 0.01
# any stft
x = x + torch.stft(x.float().flatten()[:64], 16, window=torch.hann_window(16), return_complex=True).abs().mean().to(x.dtype)
# any svd: x = x + torch.linalg.svdvals(x.detach().float().flatten(1)).sum().to(x.dtype) * 0.01
# any state_mean
init: self.register_buffer("running{n}", torch.zeros(()))
if self.training:
    with torch.no_grad():
        self.running{n}.lerp_(x.mean().to(self.running{n}.dtype), 0.1)
x = x - self.running{n}
'''

# the graph of a model has these as the model has them, or the trace says that it cannot
FAMILIES = '''
# any checkpoint_plain | r=True,False
init: self.inner{n} = nn.Sequential(nn.Linear(1, 4), nn.GELU(), nn.Linear(4, 1))
x = x + torch.utils.checkpoint.checkpoint(self.inner{n}, x.mean(-1, keepdim=True), use_reentrant={r})
# any checkpoint_in_training | r=True,False
init: self.inner{n} = nn.Linear(1, 1)
class: def wide{n}(self, x):
class:     return (x + self.inner{n}(x.mean(-1, keepdim=True))).sin()
x = torch.utils.checkpoint.checkpoint(self.wide{n}, x, use_reentrant={r}) if self.training else self.wide{n}(x)
# any checkpoint_when_gradients | r=True,False
init: self.w{n} = nn.Parameter(torch.full((1,), 0.7))
run{n} = lambda t: (t * self.w{n}).sin()
x = torch.utils.checkpoint.checkpoint(run{n}, x, use_reentrant={r}) if torch.is_grad_enabled() and self.training else run{n}(x)
# any checkpoint_nested | r=True,False q=True,False
init: self.w{n} = nn.Parameter(torch.full((1,), 0.7))
class: def low{n}(self, x):
class:     return (x * self.w{n}).sin()
class: def high{n}(self, x):
class:     return torch.utils.checkpoint.checkpoint(self.low{n}, x.cos(), use_reentrant={q}) * self.w{n}
x = x + torch.utils.checkpoint.checkpoint(self.high{n}, x, use_reentrant={r})
# any checkpoint_dropout | r=True,False s=True,False
init: self.drop{n} = nn.Dropout(0.3)
x = torch.utils.checkpoint.checkpoint(lambda t: self.drop{n}(t.sin()) + t, x, use_reentrant={r}, preserve_rng_state={s})
# any checkpoint_noise | r=True,False
x = torch.utils.checkpoint.checkpoint(lambda t: t * torch.rand_like(t), x, use_reentrant={r}) + torch.rand(1)
# any checkpoint_kwargs
class: def scaled{n}(self, x, *, by=1.0, shift=None):
class:     return (x * by).sin() + (0 if shift is None else shift)
x = torch.utils.checkpoint.checkpoint(self.scaled{n}, x, by=0.5, shift=x.mean(), use_reentrant=False)
# any checkpoint_outputs | r=True,False
class: def parts{n}(self, x, k):
class:     return x.sin(), x.detach() * k, None, (x > 0)
a{n}, b{n}, _, m{n} = torch.utils.checkpoint.checkpoint(self.parts{n}, x, 2.0, use_reentrant={r})
x = a{n} + b{n} * m{n}
# any checkpoint_dict_output | r=True,False
d{n} = torch.utils.checkpoint.checkpoint(lambda t: {"a": t.sin(), "b": [t.cos()]}, x, use_reentrant={r})
x = d{n}["a"] + d{n}["b"][0]
# any checkpoint_nested_input | r=True,False
init: self.w{n} = nn.Parameter(torch.full((1,), 0.7))
x = torch.utils.checkpoint.checkpoint(lambda t, more: (t * more[0] * self.w{n}).sin(), x.detach(), (x, 1), use_reentrant={r})
# any checkpoint_no_gradient_input | r=True,False
init: self.w{n} = nn.Parameter(torch.full((1,), 0.7))
x = x + torch.utils.checkpoint.checkpoint(lambda t: (t * self.w{n}).sin(), x.detach(), use_reentrant={r})
# any checkpoint_closure | r=True,False
y{n} = x.sin()
x = torch.utils.checkpoint.checkpoint(lambda t: t * y{n}.detach() + y{n}.mean(), x, use_reentrant={r})
# any checkpoint_parameter_argument | r=True,False
init: self.w{n} = nn.Parameter(torch.full((1,), 0.7))
x = torch.utils.checkpoint.checkpoint(torch.mul, x, self.w{n}, use_reentrant={r}).sin()
# any checkpoint_sequential | r=True,False
init: self.seq{n} = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1), nn.Sigmoid())
x = x + torch.utils.checkpoint.checkpoint_sequential(self.seq{n}, 2, x.mean(-1, keepdim=True), use_reentrant={r})
# any checkpoint_batch_norm | r=True,False
init: self.bn{n} = nn.BatchNorm1d(C)
x = x + torch.utils.checkpoint.checkpoint(self.bn{n}, x.flatten(2) if x.dim() == 4 else x.mT, use_reentrant={r}).mean()
# any checkpoint_buffer | r=True,False
init: self.register_buffer("calls{n}", torch.zeros(1))
class: def counted{n}(self, x):
class:     self.calls{n} += 1
class:     return (x * 0.5).sin()
x = torch.utils.checkpoint.checkpoint(self.counted{n}, x, use_reentrant={r})
# any checkpoint_counter | r=True,False
init: self.calls{n} = 0
class: def counted{n}(self, x):
class:     self.calls{n} += 1
class:     return (x * 0.5).sin()
x = torch.utils.checkpoint.checkpoint(self.counted{n}, x, use_reentrant={r})
# any checkpoint_kept_output | r=True,False
init: self.last{n} = None
class: def keeping{n}(self, x):
class:     self.last{n} = x.detach().mean()
class:     return x.sin()
x = torch.utils.checkpoint.checkpoint(self.keeping{n}, x, use_reentrant={r}) + self.last{n}
# any checkpoint_inplace | r=True,False
x = torch.utils.checkpoint.checkpoint(lambda t: t.mul_(0.5).sin(), x + 0, use_reentrant={r})
# any checkpoint_grad_mode | r=True,False
x = torch.utils.checkpoint.checkpoint(lambda t: t.sin() if torch.is_grad_enabled() else t.cos(), x, use_reentrant={r})
# any checkpoint_no_grad_inside | r=True,False
class: def part{n}(self, x):
class:     with torch.no_grad():
class:         y = x.mean()
class:     return (x * y).sin()
x = torch.utils.checkpoint.checkpoint(self.part{n}, x, use_reentrant={r})
# any checkpoint_in_no_grad | r=True,False
with torch.no_grad():
    y{n} = torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant={r})
x = x + y{n}
# any checkpoint_autocast | r=True,False
init: self.fc{n} = nn.Linear(1, 1)
with torch.autocast("cpu", dtype=torch.bfloat16):
    y{n} = torch.utils.checkpoint.checkpoint(self.fc{n}, x.mean(-1, keepdim=True), use_reentrant={r})
x = x + y{n}.to(x.dtype)
# any checkpoint_early_stop
with torch.utils.checkpoint.set_checkpoint_early_stop(False):
    x = torch.utils.checkpoint.checkpoint(lambda t: t.sin() * 2, x, use_reentrant=False)
# any checkpoint_contexts
c{n} = lambda: (contextlib.nullcontext(), contextlib.nullcontext())
x = torch.utils.checkpoint.checkpoint(lambda t: t.sin().cos(), x, use_reentrant=False, context_fn=c{n})
# any checkpoint_function | r=True,False
module: class Twice{n}(torch.autograd.Function):
module:     def forward(ctx, x):
module:         return x * 1.0
module:     def backward(ctx, g):
module:         return g * 2
x = torch.utils.checkpoint.checkpoint(lambda t: Twice{n}.apply(t).sin(), x, use_reentrant={r})
# any checkpoint_own
module: class Again{n}(torch.autograd.Function):
module:     def forward(ctx, run, x):
module:         ctx.run = run
module:         ctx.save_for_backward(x.detach())
module:         with torch.no_grad():
module:             return run(x)
module:     def backward(ctx, g):
module:         x = ctx.saved_tensors[0].requires_grad_()
module:         with torch.enable_grad():
module:             y = ctx.run(x)
module:         torch.autograd.backward(y, g)
module:         return None, x.grad
init: self.w{n} = nn.Parameter(torch.full((1,), 0.7))
x = Again{n}.apply(lambda t: (t * self.w{n}).sin(), x)
# any high_water_mark
init: self.most{n} = 0
self.most{n} = max(self.most{n}, inp.shape[-2])
x = x + (x * self.most{n}).sin()
# any cached_property_of_weights
init: self.w{n} = nn.Parameter(torch.full((3,), 0.5))
class: @functools.cached_property
class: def norm{n}(self):
class:     return self.w{n}.detach().square().sum()
x = x + self.norm{n}
# any cached_property_with_gradient
init: self.w{n} = nn.Parameter(torch.full((3,), 0.5))
class: @functools.cached_property
class: def total{n}(self):
class:     return self.w{n}.sin().sum()
x = x * self.total{n} if not torch.is_grad_enabled() else x * self.w{n}.sin().sum()
# any cached_property_number
init: self.w{n} = nn.Parameter(torch.full((3,), 0.5))
class: @functools.cached_property
class: def size{n}(self):
class:     return self.w{n}.numel()
x = x + (x * self.size{n}).sin()
# any cached_property_item
init: self.w{n} = nn.Parameter(torch.full((3,), 0.5))
class: @functools.cached_property
class: def total{n}(self):
class:     return float(self.w{n}.sum())
x = x + (x * self.total{n}).sin()
# any first_call_of_weights
init: self.k{n} = None
init: self.w{n} = nn.Parameter(torch.full((3,), 0.5))
if self.k{n} is None:
    self.k{n} = (self.w{n} * 2).detach()
x = x + self.k{n}.sum().sin()
# any first_call_of_weights_merged
init: self.k{n} = None
init: self.w{n}, self.u{n} = nn.Parameter(torch.full((3,), 0.5)), nn.Parameter(torch.ones(3))
if self.k{n} is None or self.training:
    self.k{n} = self.w{n} + self.u{n}
x = x + self.k{n}.sum().sin()
# any first_call_mode
init: self.k{n} = None
if self.k{n} is None:
    self.k{n} = 1.0 if self.training else 2.0
x = x + (x * self.k{n}).sin()
# any first_call_child
module: class Lazy{n}(nn.Module):
module:     def __init__(self):
module:         super().__init__()
module:         self.k = None
module:         self.w = nn.Parameter(torch.full((3,), 0.5))
module:     def forward(self, x):
module:         if self.k is None:
module:             self.k = self.w.detach() * 3
module:         return x + self.k.sum().sin()
init: self.lazy{n} = Lazy{n}()
x = self.lazy{n}(x)
# any dict_by_shape
init: self.by{n} = {}
k{n} = tuple(inp.shape[-2:])
if k{n} not in self.by{n}:
    self.by{n}[k{n}] = torch.arange(math.prod(k{n})).float()
x = x + self.by{n}[k{n}].mean().sin()
# any dict_by_shape_of_weights
init: self.by{n} = {}
init: self.w{n} = nn.Parameter(torch.linspace(0, 1, 32))
k{n} = inp.shape[-2]
if k{n} not in self.by{n}:
    self.by{n}[k{n}] = self.w{n}[:k{n}].detach().cumsum(0)
x = x + self.by{n}[k{n}].mean().sin()
# any dict_by_dtype
init: self.by{n} = {}
if x.dtype not in self.by{n}:
    self.by{n}[x.dtype] = torch.ones(2, dtype=x.dtype)
x = x + self.by{n}[x.dtype].sum()
# any list_bounded
init: self.seen{n} = collections.deque(maxlen=1)
self.seen{n}.append(x.detach().mean())
x = x + sum(self.seen{n})
# any counter_every_second
init: self.calls{n} = 0
self.calls{n} = (self.calls{n} + 1) % 2
x = x.sin() if self.calls{n} else x.cos()
# any counter_in_training
init: self.calls{n} = 0
if self.training:
    self.calls{n} += 1
x = x + (x * self.calls{n}).sin()
# any counter_of_images
init: self.images{n} = 0
self.images{n} += inp.shape[0]
x = x.sin() if self.images{n} > 6 else x.cos()
# any state_of_child_tensor
init: self.sub{n} = nn.Identity()
init: self.sub{n}.last = torch.zeros(())
x = x + self.sub{n}.last
self.sub{n}.last = x.detach().mean()
# any state_of_child_buffer
init: self.sub{n} = nn.Identity()
init: self.sub{n}.register_buffer("last", torch.zeros(()))
x = x + self.sub{n}.last
self.sub{n}.last = x.detach().mean()
# any reset_each_call
init: self.parts{n} = []
self.parts{n}.clear()
for k in range(3):
    self.parts{n}.append(x.sin() * k)
x = x + sum(self.parts{n})
self.parts{n} = []
# any set_each_call
init: self.h{n} = None
self.h{n} = x.sin()
x = x + self.h{n}
self.h{n} = None
# any reversal
module: class Reverse{n}(torch.autograd.Function):
module:     def forward(ctx, x, k):
module:         ctx.k = k
module:         return x.view_as(x)
module:     def backward(ctx, g):
module:         return -ctx.k * g, None
x = x + Reverse{n}.apply(x.sin(), 0.5)
# any reversal_by_size
module: class Reverse{n}(torch.autograd.Function):
module:     def forward(ctx, x, k):
module:         ctx.k = k
module:         return x.clone()
module:     def backward(ctx, g):
module:         return -ctx.k * g, None
x = x + Reverse{n}.apply(x.sin(), inp.shape[-2] / 4)
# any reversal_attribute
module: class Reverse{n}(torch.autograd.Function):
module:     def forward(ctx, x, k):
module:         ctx.k = k
module:         return x * 1.0
module:     def backward(ctx, g):
module:         return -ctx.k * g, None
init: self.k{n} = 0.3
x = Reverse{n}.apply(x, self.k{n}).sin()
# any straight_through | f=round,sign,floor
module: class Through{n}(torch.autograd.Function):
module:     def forward(ctx, x):
module:         return x.{f}()
module:     def backward(ctx, g):
module:         return g
x = x + Through{n}.apply(x)
# any straight_through_clipped
module: class Clip{n}(torch.autograd.Function):
module:     def forward(ctx, x, low, high):
module:         ctx.save_for_backward((x > low) & (x < high))
module:         return x.clamp(low, high)
module:     def backward(ctx, g):
module:         return g * ctx.saved_tensors[0], None, None
x = Clip{n}.apply(x, -1.0, 1.0).sin()
# any straight_through_detach: x = x + (x.round() - x).detach()
# any straight_through_weight
module: class Sign{n}(torch.autograd.Function):
module:     def forward(ctx, w):
module:         return w.sign()
module:     def backward(ctx, g):
module:         return g
init: self.w{n} = nn.Parameter(torch.tensor([0.3, -0.2]))
x = x * Sign{n}.apply(self.w{n}).sum() + Sign{n}.apply(self.w{n} * 2)[0]
# any function_outputs
module: class Two{n}(torch.autograd.Function):
module:     def forward(ctx, x, y):
module:         ctx.save_for_backward(x, y)
module:         return x * y, x + y
module:     def backward(ctx, g, h):
module:         x, y = ctx.saved_tensors
module:         return g * y + 2 * h, g * x - h
a{n}, b{n} = Two{n}.apply(x.sin(), x.cos())
x = a{n} + b{n}
# any function_output_unused
module: class Two{n}(torch.autograd.Function):
module:     def forward(ctx, x):
module:         return x.sin(), x.cos()
module:     def backward(ctx, g, h):
module:         return g * 2 + h
a{n}, _ = Two{n}.apply(x)
x = x + a{n}
# any function_output_unused_not_materialized
module: class Two{n}(torch.autograd.Function):
module:     def forward(ctx, x):
module:         ctx.set_materialize_grads(False)
module:         return x.sin(), x.cos()
module:     def backward(ctx, g, h):
module:         return g * (2 if h is None else 3)
a{n}, _ = Two{n}.apply(x)
x = x + a{n}
# any function_non_differentiable
module: class Sorted{n}(torch.autograd.Function):
module:     def forward(ctx, x):
module:         y, i = x.sort(1)
module:         ctx.mark_non_differentiable(i)
module:         ctx.save_for_backward(i)
module:         return y, i
module:     def backward(ctx, g, _):
module:         (i,) = ctx.saved_tensors
module:         return torch.zeros_like(g).scatter(1, i, g) * 2
a{n}, i{n} = Sorted{n}.apply(x)
x = a{n} + i{n}.to(x.dtype).mean()
# any function_non_differentiable_float
module: class Mean{n}(torch.autograd.Function):
module:     def forward(ctx, x):
module:         m = x.mean()
module:         ctx.mark_non_differentiable(m)
module:         return x.sin(), m
module:     def backward(ctx, g, _):
module:         return g
a{n}, m{n} = Mean{n}.apply(x)
x = a{n} * m{n}
# any function_saved_output
module: class Exp{n}(torch.autograd.Function):
module:     def forward(ctx, x):
module:         y = x.tanh().exp()
module:         ctx.save_for_backward(y)
module:         return y
module:     def backward(ctx, g):
module:         return g * ctx.saved_tensors[0]
x = Exp{n}.apply(x)
# any function_setup_context
module: class Cube{n}(torch.autograd.Function):
module:     @staticmethod
module:     def forward(x):
module:         return x.sin() ** 3
module:     def setup_context(ctx, inputs, output):
module:         ctx.save_for_backward(*inputs)
module:     def backward(ctx, g):
module:         return g * 3 * ctx.saved_tensors[0]
x = Cube{n}.apply(x)
# any function_dirty
module: class Halve{n}(torch.autograd.Function):
module:     def forward(ctx, x):
module:         ctx.mark_dirty(x)
module:         return x.mul_(0.5)
module:     def backward(ctx, g):
module:         return g * 3
x = Halve{n}.apply(x * 1.0)
# any function_dirty_input
module: class Halve{n}(torch.autograd.Function):
module:     def forward(ctx, x):
module:         ctx.mark_dirty(x)
module:         return x.mul_(0.5)
module:     def backward(ctx, g):
module:         return g * 3
y{n} = x * 1.0
Halve{n}.apply(y{n}[:, :1].detach())
x = y{n}.sin()
# any function_identity
module: class Same{n}(torch.autograd.Function):
module:     def forward(ctx, x):
module:         return x
module:     def backward(ctx, g):
module:         return g * 2
x = Same{n}.apply(x).sin()
# any function_view
module: class Flat{n}(torch.autograd.Function):
module:     def forward(ctx, x):
module:         ctx.shape = x.shape
module:         return x.flatten(1)
module:     def backward(ctx, g):
module:         return g.reshape(ctx.shape) * 2
x = Flat{n}.apply(x).view(x.shape)
# any function_needs_input_grad
module: class Asks{n}(torch.autograd.Function):
module:     def forward(ctx, x, y):
module:         return x * (2 if ctx.needs_input_grad[1] else 3) + y
module:     def backward(ctx, g):
module:         return g if ctx.needs_input_grad[0] else None, g
x = Asks{n}.apply(x, x.detach()).sin()
# any function_tensor_list
module: class Sum{n}(torch.autograd.Function):
module:     def forward(ctx, *xs):
module:         ctx.k = len(xs)
module:         return sum(xs)
module:     def backward(ctx, g):
module:         return tuple(g * i for i in range(ctx.k))
x = Sum{n}.apply(x, x.sin(), x.cos())
# any function_module_argument
module: class Run{n}(torch.autograd.Function):
module:     def forward(ctx, x, layer):
module:         ctx.layer = layer
module:         return layer(x)
module:     def backward(ctx, g):
module:         return g * 2, None
init: self.act{n} = nn.Tanh()
x = x + Run{n}.apply(x, self.act{n})
# any function_no_gradient
module: class Noisy{n}(torch.autograd.Function):
module:     def forward(ctx, x, k=0.1):
module:         return x + torch.rand_like(x) * k
module:     def backward(ctx, g):
module:         return g + torch.rand_like(g), None
x = Noisy{n}.apply(x, 0.1)
# any function_grad_mode
module: class Mode{n}(torch.autograd.Function):
module:     def forward(ctx, x):
module:         return x.sin() if torch.is_grad_enabled() else x.cos()
module:     def backward(ctx, g):
module:         return g
x = Mode{n}.apply(x)
# any function_python_branch
module: class Branch{n}(torch.autograd.Function):
module:     def forward(ctx, x):
module:         ctx.big = bool(x.mean() > 0)
module:         return x.sin() if ctx.big else x.cos()
module:     def backward(ctx, g):
module:         return g * 2 if ctx.big else g
x = Branch{n}.apply(x)
# any function_in_function
module: class Inner{n}(torch.autograd.Function):
module:     def forward(ctx, x):
module:         return x.sin()
module:     def backward(ctx, g):
module:         return g * 2
module: class Outer{n}(torch.autograd.Function):
module:     def forward(ctx, x):
module:         return Inner{n}.apply(x) * 2
module:     def backward(ctx, g):
module:         return g * 3
x = Outer{n}.apply(x) + Inner{n}.apply(x)
# any function_counts
module: class Counts{n}(torch.autograd.Function):
module:     def forward(ctx, x, state):
module:         state["calls"] = state.get("calls", 0) + 1
module:         return x * state["calls"]
module:     def backward(ctx, g):
module:         return g, None
init: self.state{n} = {}
x = x + Counts{n}.apply(x, self.state{n}).sin()
# any function_once_differentiable
module: class Once{n}(torch.autograd.Function):
module:     def forward(ctx, x):
module:         ctx.save_for_backward(x)
module:         return x.sin()
module:     @staticmethod
module:     @torch.autograd.function.once_differentiable
module:     def backward(ctx, g):
module:         return g * ctx.saved_tensors[0].cos() * 0.5
x = Once{n}.apply(x)
# any function_autocast
module: class Cast{n}(torch.autograd.Function):
module:     @staticmethod
module:     @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
module:     def forward(ctx, x):
module:         return x.sin()
module:     @staticmethod
module:     @torch.amp.custom_bwd(device_type="cpu")
module:     def backward(ctx, g):
module:         return g * 2
x = Cast{n}.apply(x)
# any shared_is: x = x.sin() if inp is extra["other"] else x.cos()
# any shared_is_not_number: x = x + (x * (1 + (extra["other"] is not inp))).sin()
# any shared_storage: x = x.sin() if inp.untyped_storage()._cdata == extra["other"].untyped_storage()._cdata else x.cos()
# any shared_base: x = x.sin() if inp._base is extra["other"]._base else x.cos()
# any shared_written
inp.mul_(0.5)
x = x + extra["other"].mean()
# any shared_other_written
extra["other"].add_(0.5)
x = x + inp.mean()
# any shared_written_twice
inp.detach().mul_(0.5)
extra["other"].detach()[:1].add_(1)
x = x + inp.mean() * extra["other"].mean()
# any shared_gradient: x = x + (inp * extra["other"].sin()).mean()
# any shared_cat: x = x + torch.cat([inp, extra["other"]]).std()
# any shared_resized
extra["other"].unsqueeze_(0)
x = x + inp.dim()
extra["other"].squeeze_(0)
# any shared_returned
extra["kept"] = extra["other"]
x = x + 1
# any shared_flags: x = x.sin() if extra["other"].requires_grad else x.cos()
# any shared_by_child
module: class Pair{n}(nn.Module):
module:     def forward(self, a, b):
module:         return a.sin() if a is b else a.cos() + b.mean()
init: self.pair{n} = Pair{n}()
x = x + self.pair{n}(inp, extra["other"]).mean() + self.pair{n}(x, x)
# any sparse_input: x = x.sin() if inp.is_sparse else x.cos()
# any sparse_made_dense
y{n} = inp.to_dense() if inp.is_sparse else inp
x = x + y{n}.mean()
# any sparse_value: x = x.cos() if x.is_sparse or x.is_sparse_csr or x.is_quantized or x.is_mkldnn else x.sin()
# any layout: x = x.sin() if inp.layout == torch.strided else x.cos()
# any layout_key: x = x + (x * {torch.strided: 1.0}.get(x.layout, 2.0)).sin()
# any layout_weight
init: self.w{n} = nn.Parameter(torch.full((1,), 0.5))
x = (x * self.w{n}).sin() if self.w{n}.layout == torch.strided else x.cos()
# any sparse_product
init: self.register_buffer("eye{n}", torch.eye(4).to_sparse())
x = x + torch.sparse.mm(self.eye{n}, x.detach().flatten()[:4, None]).sum()
# any sparse_made
y{n} = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), x.detach().flatten()[:2], (4,))
x = x + y{n}.to_dense().sum() + y{n}.is_sparse
# any sparse_kept
init: self.eye{n} = torch.eye(3).to_sparse()
x = x + self.eye{n}.to_dense().sum()
# any nested_jagged
y{n} = torch.nested.nested_tensor([r.detach().flatten() for r in x], layout=torch.jagged)
x = x + y{n}.to_padded_tensor(0.0).mean()
# any nested_unbound
y{n} = torch.nested.as_nested_tensor([r.flatten() for r in x])
x = x + sum(r.mean() for r in y{n}.unbind())
# any nested_arithmetic
y{n} = torch.nested.nested_tensor([r.detach().flatten() for r in x]) * 2
x = x + y{n}.to_padded_tensor(0.0).sum().sin()
'''
