"""What stands beside the model while it trains and does not learn: a VAE, a text encoder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import SpecError, below
from ...core.models.factory import build
from ...core.spec.pass_file import check_options
from ...core.spec.run_config import load_config
from ...core.spec.task_section import TextOptions
from ...core.spec.train_section import read_use
from ...core.spec.yaml_source import no_such_file, validate
from ..param_groups import named_by
from ..random_draws import Draws
from .model_call import first_tensor
from .task import function_of

LONGEST = 512  # tokens of a caption where neither the tokenizer nor the encoder says how many


class Vae:
    """Images [b, c, h, w] in [-1, 1] to latents and back, without gradients and in the VAE's own dtype."""

    def __init__(self, spec: Any, base: Path, device: torch.device) -> None:
        """`spec` is what `model` is in a configuration, or a mapping that has `model` beside `weights` and `dtype`."""
        whole = spec if isinstance(spec, Mapping) and "model" in spec else {"model": spec}
        config = load_config(whole, base=base)
        self.module = build(config, device=str(device)).eval().requires_grad_(False)
        if not callable(getattr(self.module, "encode", None)) or not callable(getattr(self.module, "decode", None)):
            raise SpecError(f"{type(self.module).__name__} has no 'encode' and 'decode': it is not a VAE")
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


class Text:
    """Captions to tensors by name, of a function or of a text encoder."""

    def __init__(self, spec: Any, base: Path, device: torch.device) -> None:
        """`spec` is `"package.module:function"` of a function (captions, **options), or of a class whose objects are called
        with captions, or a folder with a tokenizer and a text encoder of transformers: both in it, or in `tokenizer` and
        `text_encoder` below it. A single tensor is `encoder_hidden_states`. Raises SpecError.
        """
        use = read_use(spec)
        self.name, self.device, self.encoder = use.name, device, None
        if ":" in use.name:
            self.encode = function_of(use)
            if isinstance(self.encode, nn.Module):
                self.encode.to(device).eval().requires_grad_(False)
        else:
            check_options(FolderText, use.options, "a text encoder", given=2)
            with below(use.name):
                self.encode = self.encoder = FolderText(base / use.name, device, **use.options)

    def __call__(self, captions: Sequence[str], tokens: Tensor | None = None) -> dict[str, Tensor]:
        """Tensors [b, ...]; `tokens` int64 [b, n] take the place of those of the captions. Gradients reach what trains."""
        given = {} if tokens is None else {"tokens": tokens}
        learns = self.encoder is not None and bool(self.encoder.trainable)
        with torch.autocast(self.device.type, enabled=False), torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            found = self.encode(list(captions), **given)
        named = found if isinstance(found, Mapping) else {"encoder_hidden_states": found}
        for name, value in named.items():
            if not isinstance(value, Tensor) or len(value) != len(captions):
                got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                wanted = f"for {len(captions)} captions it must be a tensor [{len(captions)}, ...]"
                raise SpecError(f"'{self.name}' returns {got} for '{name}'; {wanted}")
        return {name: value.to(self.device) for name, value in named.items()}


class FolderText:
    """A tokenizer and a text encoder of transformers from a folder: CLIP, T5 and what else is made like them.

    Gives `encoder_hidden_states` [b, n, d], `encoder_attention_mask` [b, n], and the pooled `text_embeds` [b, d] of an
    encoder that has them.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        max_length: int | None = None,
        layer: int = -1,
        dtype: str | None = None,
        trainable: list[str] | None = None,
        lr: float | None = None,
        weight_decay: float | None = None,
    ) -> None:
        """`layer` is the hidden state that is taken, -2 for the one before the last, as Stable Diffusion XL does. `trainable`
        are patterns of the encoder's parameters that train, with an `lr` and `weight_decay` of their own."""
        import transformers

        given = {"max_length": max_length, "layer": layer, "dtype": dtype, "lr": lr, "weight_decay": weight_decay}
        validate(TextOptions, {**given, "trainable": trainable or []})
        for key, value in (("lr", lr), ("weight_decay", weight_decay)):
            if value is not None and not trainable:
                raise SpecError("has no effect, because nothing of the text encoder trains: set 'trainable'", path=(key,))
        if not folder.is_dir():
            raise SpecError(f"'{folder.name}': {no_such_file(folder)}")
        parts = [folder / name if (folder / name).is_dir() else folder for name in ("tokenizer", "text_encoder")]
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(parts[0], local_files_only=True)
            config = transformers.AutoConfig.from_pretrained(parts[1], local_files_only=True)
            kind = getattr(transformers, (config.architectures or ["AutoModel"])[0])
            model = kind.from_pretrained(parts[1], local_files_only=True)
        except Exception as error:  # transformers', about files of anybody's
            text = f"'{folder.name}' must have a tokenizer and a text encoder of transformers: {type(error).__name__}: {error}"
            raise SpecError(text) from error
        self.model = model.to(device, None if dtype is None else getattr(torch, dtype)).eval().requires_grad_(False)
        said = getattr(config, "max_position_embeddings", None) or LONGEST
        self.length = min(self.tokenizer.model_max_length, said) if max_length is None else max_length
        if getattr(config, "max_position_embeddings", None) and self.length > said:
            raise SpecError(f"must be at most {said}, the positions of the encoder, not {self.length}", path=("max_length",))
        states = getattr(config, "num_hidden_layers", None)
        if states is not None and not -states - 1 <= layer <= states:
            finding = f"must be from {-states - 1} to {states}, not {layer}: the encoder has {states} layers"
            raise SpecError(finding, path=("layer",))
        self.layer, self.device, self.source = layer, device, str(folder)
        self.trainable, self.lr, self.weight_decay = trainable or [], lr, weight_decay
        self._trained()

    def tokens(self, captions: Sequence[str]) -> Tensor:
        """Numbers int64 [b, n] of the tokens of captions."""
        ids: Tensor = self._tokenized(captions).input_ids
        return ids

    def group(self, lr: float, weight_decay: float) -> dict[str, Any]:
        """What trains, as a group of the optimizer; its gradients are wanted from now on."""
        own = self._trained()
        for parameter in own.values():
            parameter.requires_grad_(True)
        rates = {"lr": lr if self.lr is None else self.lr}
        rates["weight_decay"] = weight_decay if self.weight_decay is None else self.weight_decay
        names = [f"text_encoder.{name}" for name in own]
        return {"name": "text_encoder", "names": names, "params": list(own.values()), **rates}

    def freezing(self) -> dict[str, Any]:
        """What of CLIP's encoder does not train, in the words of EveryDream2trainer's optimizer.json."""
        own = self._trained()
        layers = {int(found[1]) for name in own if (found := re.search(r"layers\.(\d+)\.", name))}
        return {
            "freeze_embeddings": not any("token_embedding" in name for name in own),
            "freeze_position_embeddings": not any("position_embedding" in name for name in own),
            "freeze_final_layer_norm": not any("final_layer_norm" in name for name in own),
            "unfreeze_last_n_layers": self.model.config.num_hidden_layers - min(layers) if layers else 0,
        }

    def save(self, folder: Path) -> None:
        """Write `tokenizer` and `text_encoder` into a folder."""
        self.tokenizer.save_pretrained(folder / "tokenizer")
        self.model.save_pretrained(folder / "text_encoder")

    def _trained(self) -> dict[str, nn.Parameter]:
        """The parameters that a pattern of `trainable` names, itself or by a module around them."""
        named = dict(self.model.named_parameters())
        chosen = named_by(self.trainable, {name: name for name in named}, "the text encoder", ("trainable",))
        return {name: named[name] for name in chosen}

    def _tokenized(self, captions: Sequence[str]) -> Any:
        options = {"padding": "max_length", "truncation": True, "max_length": self.length, "return_tensors": "pt"}
        return self.tokenizer(list(captions), **options).to(self.device)

    def __call__(self, captions: list[str], tokens: Tensor | None = None) -> dict[str, Tensor]:
        """Tensors of captions; `tokens` [b, n], as `tokens` gives them, take the place of the captions' own."""
        tokenized = self._tokenized(captions)
        mask = tokenized.attention_mask
        ids = tokenized.input_ids if tokens is None else tokens
        # CLIP is trained to see its padding (diffusers' scripts give it no mask), T5 is not
        given = {} if "clip" in self.model.config.model_type else {"attention_mask": mask}
        found = self.model(ids, output_hidden_states=self.layer != -1, **given)
        states = found.last_hidden_state if self.layer == -1 else found.hidden_states[self.layer]
        pooled = next((found[key] for key in ("text_embeds", "pooler_output") if key in found), None)
        out = {"encoder_hidden_states": states, "encoder_attention_mask": mask}
        return out if pooled is None else {**out, "text_embeds": pooled}
