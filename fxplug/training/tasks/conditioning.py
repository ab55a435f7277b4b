"""What stands beside the model while it trains and does not learn: a VAE, a text encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import SpecError
from ...models.factory import build
from ...spec.import_path import import_target
from ...spec.options import check_options
from ...spec.run_config import load_config
from ...spec.train_section import Use, read_use
from ...spec.yaml_source import no_such_file
from ..random_draws import Draws
from .calling import first_tensor

LONGEST = 512  # tokens of a caption where neither the tokenizer nor the encoder says how many


class Vae:
    """Images [b, c, h, w] in [-1, 1] to latents and back, without gradients and in the VAE's own dtype."""

    def __init__(self, spec: Any, base: Path, device: torch.device) -> None:
        """`spec` is what `model` is in a configuration, or a mapping that has `model` beside `weights` and `dtype`."""
        whole = spec if isinstance(spec, Mapping) and "model" in spec else {"model": spec}
        config = load_config(whole, base=base)
        self.module = build(config, device=str(device)).eval().requires_grad_(False)
        if not callable(getattr(self.module, "encode", None)) or not callable(getattr(self.module, "decode", None)):
            raise SpecError(f"{type(self.module).__name__} has no 'encode' and 'decode': it is no VAE")
        self.device, self.dtype = device, next((p.dtype for p in self.module.parameters()), torch.float32)
        found = getattr(self.module, "config", {})
        self.scale = float(found.get("scaling_factor") or 1.0)
        self.shift = float(found.get("shift_factor") or 0.0)
        mean, std = found.get("latents_mean"), found.get("latents_std")
        self.mean = torch.tensor(mean, device=device).view(1, -1, 1, 1) if mean is not None else None
        self.std = torch.tensor(std, device=device).view(1, -1, 1, 1) if std is not None else None

    @torch.no_grad()
    def encode(self, image: Tensor, draw: Draws) -> Tensor:
        """A sample of the latents float32 [b, c, h, w]; of a VAE without a distribution the latents themselves."""
        with torch.autocast(image.device.type, enabled=False):
            found = self.module.encode(image.to(self.dtype))  # type: ignore[operator]
            inside = getattr(found, "latent_dist", found)
            if hasattr(inside, "mean") and hasattr(inside, "std") and not isinstance(inside, Tensor):
                x: Tensor = inside.mean + inside.std * draw.like(inside.mean)
            else:
                x = first_tensor(inside)
        x = x.float()
        x = (x - self.mean) / self.std if self.mean is not None and self.std is not None else x - self.shift
        return x * self.scale

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Images float32 [b, c, h, w] in about [-1, 1]."""
        x = latents.float() / self.scale
        x = x * self.std + self.mean if self.mean is not None and self.std is not None else x + self.shift
        with torch.autocast(latents.device.type, enabled=False):
            return first_tensor(self.module.decode(x.to(self.dtype))).float()  # type: ignore[operator]


Text = Callable[[Sequence[str]], dict[str, Tensor]]


def open_text(spec: Any, base: Path, device: torch.device) -> Text:
    """Captions to tensors by name. Raises SpecError.

    `spec` is `"package.module:function"` of a function (captions, **options), or of a class whose objects are called with
    captions, or a folder with a tokenizer and a text encoder of transformers: both in it, or in `tokenizer` and
    `text_encoder` below it. A single tensor is `encoder_hidden_states`.
    """
    use = read_use(spec)
    encode = _called(use, device) if ":" in use.name else FolderText(base / use.name, device, **_folder_options(use))

    @torch.no_grad()
    def run(captions: Sequence[str]) -> dict[str, Tensor]:
        with torch.autocast(device.type, enabled=False):
            found = encode(list(captions))
        named = found if isinstance(found, Mapping) else {"encoder_hidden_states": found}
        for name, value in named.items():
            if not isinstance(value, Tensor) or len(value) != len(captions):
                got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise SpecError(
                    f"'{use.name}' gives {got} for '{name}'; for {len(captions)} captions it is a tensor [{len(captions)}, ...]"
                )
        return {name: value.to(device) for name, value in named.items()}

    return run


def _called(use: Use, device: torch.device) -> Callable[[list[str]], Any]:
    target: Any = import_target(use.name)
    if isinstance(target, type):
        check_options(target, use.options, use.name)
        made = target(**use.options)
        if isinstance(made, nn.Module):
            made.to(device).eval().requires_grad_(False)
        if not callable(made):
            raise SpecError(f"a {target.__name__} cannot be called with captions")
        return made  # type: ignore[no-any-return]
    if not callable(target):
        raise SpecError(f"'{use.name}' is not a function or class")
    check_options(target, use.options, use.name, given=1)
    return lambda captions: target(captions, **use.options)


def _folder_options(use: Use) -> dict[str, Any]:
    check_options(FolderText, use.options, "a text encoder", given=2)
    return use.options


class FolderText:
    """A tokenizer and a text encoder of transformers from a folder: CLIP, T5 and what else is made like them.

    Gives `encoder_hidden_states` [b, n, d], `encoder_attention_mask` [b, n], and the pooled `text_embeds` [b, d] of an
    encoder that has them.
    """

    def __init__(
        self, folder: Path, device: torch.device, max_length: int | None = None, layer: int = -1, dtype: str | None = None
    ) -> None:
        """`layer` is the hidden state that is taken, -2 for the one before the last, as Stable Diffusion XL does."""
        import transformers

        if not folder.is_dir():
            raise SpecError(f"'{folder.name}': {no_such_file(folder)}")
        parts = [folder / name if (folder / name).is_dir() else folder for name in ("tokenizer", "text_encoder")]
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(parts[0], local_files_only=True)
            config = transformers.AutoConfig.from_pretrained(parts[1], local_files_only=True)
            kind = getattr(transformers, (config.architectures or ["AutoModel"])[0])
            model = kind.from_pretrained(parts[1], local_files_only=True)
        except Exception as error:  # transformers', about files of anybody's
            text = f"'{folder.name}' holds no tokenizer and text encoder of transformers: {type(error).__name__}: {error}"
            raise SpecError(text) from error
        self.model = model.to(device, getattr(torch, dtype) if dtype else None).eval().requires_grad_(False)
        said = getattr(config, "max_position_embeddings", None) or LONGEST
        self.length = max_length or min(self.tokenizer.model_max_length, said)
        self.layer, self.device = layer, device

    def __call__(self, captions: list[str]) -> dict[str, Tensor]:
        options = {"padding": "max_length", "truncation": True, "max_length": self.length, "return_tensors": "pt"}
        tokens = self.tokenizer(captions, **options).to(self.device)
        mask = tokens.attention_mask
        # CLIP is trained to see its padding (diffusers' scripts give it no mask), T5 is not
        given = {} if "clip" in self.model.config.model_type else {"attention_mask": mask}
        found = self.model(tokens.input_ids, output_hidden_states=self.layer != -1, **given)
        states = found.last_hidden_state if self.layer == -1 else found.hidden_states[self.layer]
        pooled = next((found[key] for key in ("text_embeds", "pooler_output") if key in found), None)
        out = {"encoder_hidden_states": states, "encoder_attention_mask": mask}
        return out if pooled is None else {**out, "text_embeds": pooled}
