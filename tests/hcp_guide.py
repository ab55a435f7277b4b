"""The plugins of HCP-Diffusion's guide as its readers wrote them; only the import of the base classes is another.

Where the guide leaves a piece out (`...`), it is filled in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxplug.compat.hcp import MultiPluginBlock, PatchPluginBlock, PatchPluginContainer, PluginBlock, SinglePluginBlock


class LowRank(nn.Module):
    """up(down(x)), which the guide names `self.LinearLayer` and `self.Conv2dLayer` and leaves out."""

    def __init__(self, host, rank, bias, dropout, block):
        super().__init__()
        self.rank = rank
        if isinstance(host, nn.Linear):
            self.lora_down = nn.Linear(host.in_features, rank, bias=False)
            self.lora_up = nn.Linear(rank, host.out_features, bias=bias)
        else:
            geometry = {k: getattr(host, k) for k in ("kernel_size", "stride", "padding", "dilation")}
            self.lora_down = nn.Conv2d(host.in_channels, rank, bias=False, **geometry)
            self.lora_up = nn.Conv2d(rank, host.out_channels, 1, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.lora_up(self.lora_down(x)))


class LoraBlock(SinglePluginBlock):
    wrapable_classes = [nn.Linear, nn.Conv2d]  # noqa: RUF012
    LinearLayer = Conv2dLayer = LowRank

    def __init__(self, lora_id:int, host, rank, dropout=0.1, alpha=1.0, bias=False,
                 inplace=True, hook_param=None, alpha_auto_scale=True, **kwargs):  # fmt: skip
        super().__init__(f"lora_block_{lora_id}", host, hook_param)

        self.mask_range = None
        self.inplace = inplace
        self.bias = bias

        if isinstance(host, nn.Linear):
            self.host_type = "linear"
            self.layer = self.LinearLayer(host, rank, bias, dropout, self)
        elif isinstance(host, nn.Conv2d):
            self.host_type = "conv"
            self.layer = self.Conv2dLayer(host, rank, bias, dropout, self)
        else:
            raise NotImplementedError(f"No lora for {type(host)}")
        self.rank = self.layer.rank

        self.register_buffer("alpha", torch.tensor(alpha / self.rank if alpha_auto_scale else alpha))

    def forward(self, fea_in, fea_out):
        return fea_out + self.layer(fea_in[0]) * self.alpha

    @classmethod
    def wrap_model(cls, lora_id, model, **kwargs):
        return super(LoraBlock, cls).wrap_model(lora_id, model, exclude_key="lora_block_", **kwargs)  # noqa: UP008


class HadamardWeight(nn.Module):
    """The product of `rank_groups` low-rank matrices, in the shape of the host's weight."""

    def __init__(self, host, rank, bias, dropout, block):
        super().__init__()
        self.rank = rank
        groups, out = block.rank_groups_raw, host.weight.shape[0]
        self.W_up = nn.Parameter(torch.randn(groups, out, rank // groups))
        self.W_down = nn.Parameter(torch.randn(groups, rank // groups, host.weight[0].numel()))

    def forward(self, weight):
        return torch.prod(self.W_up @ self.W_down, dim=0).reshape(weight.shape)


class LohaLayer(LoraBlock):
    LinearLayer = Conv2dLayer = HadamardWeight

    def __init__(self, lora_id:int, host, rank=1, dropout=0.1, alpha=1.0, bias=False, inplace=True, rank_groups=2, alpha_auto_scale=True, **kwargs):  # noqa: E501  # fmt: skip
        self.rank_groups_raw = rank_groups
        super().__init__(lora_id, host, rank, dropout, alpha, bias, inplace, hook_param="weight", alpha_auto_scale=alpha_auto_scale)  # noqa: E501

    def forward(self, host_param: nn.Parameter):
        return host_param + self.layer(host_param) * self.alpha


class Skip(PluginBlock):

    def __init__(self, name, from_layer:dict[str, Any], to_layer:dict[str, Any], **kwargs):  # fmt: skip
        super().__init__(name, from_layer, to_layer)
        self.layer = nn.Linear(from_layer["layer"].in_features, to_layer["layer"].out_features)

    def forward(self, fea_from_in, fea_in, fea_out):
        return fea_out + self.layer(fea_from_in[0])


class PreSkip(Skip):
    """The same before the to-layer: with `pre_hook:` there is no result, and what is given is the input."""

    def forward(self, fea_from_in, fea_in, fea_out):
        assert fea_out is None
        return (fea_in[0] + self.layer(fea_from_in[0]),)


class ControlNetPlugin(MultiPluginBlock):

    def __init__(self, name:str, from_layers, to_layers, host_model=None,
                 cond_block_channels=(3, 16, 32, 96, 256, 320),
                 layers_per_block=2, block_out_channels=(320, 640, 1280, 1280)):  # fmt: skip
        super().__init__(name, from_layers, to_layers, host_model=host_model)

        # recive the condition image
        self.register_input_feeder_to(host_model)

        # Define model
        from diffusers import UNet2DConditionModel

        encoder = UNet2DConditionModel.from_config(host_model.config)
        encoder.load_state_dict(host_model.state_dict())
        self.conv_in, self.time_proj, self.time_embedding = encoder.conv_in, encoder.time_proj, encoder.time_embedding
        self.down_blocks, self.mid_block = encoder.down_blocks, encoder.mid_block
        head = [nn.Conv2d(cond_block_channels[0], cond_block_channels[1], 3, padding=1), nn.SiLU()]
        for a, b in zip(cond_block_channels[1:-2], cond_block_channels[2:-1], strict=True):
            head += [nn.Conv2d(a, a, 3, padding=1), nn.SiLU(), nn.Conv2d(a, b, 3, padding=1, stride=2), nn.SiLU()]
        self.cond_head = nn.Sequential(*head, nn.Conv2d(*cond_block_channels[-2:], 3, padding=1))
        widths = [block_out_channels[0]]
        for level, width in enumerate(block_out_channels):
            widths += [width] * (layers_per_block + (level < len(block_out_channels) - 1))
        self.controlnet_down_blocks = nn.ModuleList([nn.Conv2d(width, width, 1) for width in widths])
        self.controlnet_mid_block = nn.Conv2d(block_out_channels[-1], block_out_channels[-1], 1)

    def feed_input_data(self, data):  # get the condition image
        if isinstance(data, dict):
            self.cond = data["cond"]

    # Rewriting Input and Output Data Processing for ControlNet
    def from_layer_hook(self, host, fea_in, fea_out, idx: int):
        if idx==0:  # fmt: skip
            self.data_input = fea_in
        elif idx==1:  # fmt: skip
            self.feat_to = self(*self.data_input)

    def to_layer_hook(self, host, fea_in, fea_out, idx: int):
        if idx == 5:
            sp = fea_in[0].shape[1]//2  # fmt: skip
            new_feat = fea_in[0].clone()
            new_feat[:, sp:, ...] = fea_in[0][:, sp:, ...] + self.feat_to[0]
            return (new_feat, fea_in[1])
        elif idx == 3:
            return (fea_out[0], tuple(fea_out[1][i] + self.feat_to[(idx) * 3 + i+1] for i in range(2)))  # fmt: skip
        elif idx == 4:
            return fea_out + self.feat_to[11+1]  # fmt: skip
        else:
            return (fea_out[0], tuple(fea_out[1][i]+self.feat_to[(idx)*3+i+1] for i in range(3)))  # fmt: skip

    # ControlNet forward
    def forward(
        self,
        sample: torch.FloatTensor,
        timestep,
        encoder_hidden_states: torch.Tensor,
        class_labels=None,
        timestep_cond=None,
        attention_mask=None,
        cross_attention_kwargs=None,
    ):
        timestep = timestep.expand(sample.shape[0])
        emb = self.time_embedding(self.time_proj(timestep).to(sample.dtype), timestep_cond)
        sample = self.conv_in(sample)
        sample += self.cond_head(self.cond)
        skips = (sample,)
        for block in self.down_blocks:
            if getattr(block, "has_cross_attention", False):
                sample, found = block(sample, emb, encoder_hidden_states)
            else:
                sample, found = block(sample, emb)
            skips += found
        sample = self.mid_block(sample, emb, encoder_hidden_states=encoder_hidden_states)
        heads = zip(self.controlnet_down_blocks, skips, strict=True)
        controlnet_down_block_res_samples = tuple(head(skip) for head, skip in heads)
        mid_block_res_sample = self.controlnet_mid_block(sample)
        return controlnet_down_block_res_samples + (mid_block_res_sample,)  # noqa: RUF005


class PReLUPatchContainer(PatchPluginContainer):
    def forward(self, *args, **kwargs):
        output = 0.0
        for name in self.plugin_names:
            output = getattr(self, name).post_forward(output, *args, **kwargs)
        return output


class PReLUPatch(PatchPluginBlock):
    container_cls = PReLUPatchContainer
    wrapable_classes = (nn.SiLU,)

    def __init__(self, *args, p=0.2, **kwargs):
        super().__init__(*args, **kwargs)
        self.act = nn.PReLU(init=p)  # the guide's nn.PReLU(p) takes p for a number of parameters, which torch refuses

    def post_forward(self, output, x):
        return output + self.act(x)
