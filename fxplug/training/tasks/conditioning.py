"""What stands beside the model while it trains and does not learn: a VAE, a text encoder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...config.models.factory import build
from ...config.run_config import load_config, read_passes
from ...core.artifacts.artifact import save
from ...core.capture.tracer import trace
from ...core.errors import FxplugError, SpecError, prefix_path
from ...core.ir.traced_module import TracedModule
from ...core.rewriter.applying import apply
from ...core.rewriter.matcher import find
from ...core.spec.pass_file import check_options, get_arguments
from ...core.spec.rules import Pass
from ...core.spec.yaml_source import describe_missing, validate
from ...parallel.parallel_pass import ParallelPass
from ..distributed import set_mode
from ..import_paths import import_function
from ..param_groups import BASE, choose, find_parameters
from ..random_draws import Draws, seed_within
from ..task_section import TextOptions
from ..train_section import Train, read_use
from .model_call import find_tensor

LONGEST = 512  # tokens of a caption where neither the tokenizer nor the encoder says how many
ENCODER = "text_encoder"  # what the names of a text encoder's parameters and groups begin with in a run


class Vae:
    """Images [b, c, h, w] in [-1, 1] to latents and back, without gradients and in the VAE's own dtype."""

    def __init__(self, spec: Any, base: Path, device: torch.device) -> None:
        """Build the VAE: `spec` is the `model` of a configuration, or a mapping of `model` with `weights` and `dtype`."""
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
        """Return a sample of the latents, float32 [b, c, h, w]; for a VAE without a distribution the latents themselves."""
        with torch.autocast(image.device.type, enabled=False):
            found = self.module.encode(image.to(self.dtype))  # type: ignore[operator]
            inside = getattr(found, "latent_dist", found)
            if hasattr(inside, "mean") and hasattr(inside, "std") and not isinstance(inside, Tensor):
                x: Tensor = inside.mean + inside.std * draw.like(inside.mean)
            else:
                x = find_tensor(inside)
        x = x.float()
        x = (x - self.mean) / self.std if self.mean is not None and self.std is not None else x - self.shift
        return x * self.scale

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents to images, float32 [b, c, h, w] in about [-1, 1]."""
        x = latents.float() / self.scale
        x = x * self.std + self.mean if self.mean is not None and self.std is not None else x + self.shift
        with torch.autocast(latents.device.type, enabled=False):
            return find_tensor(self.module.decode(x.to(self.dtype))).float()  # type: ignore[operator]


class Text:
    """Captions to tensors by name, of a function or of a text encoder."""

    def __init__(self, spec: Any, base: Path, device: torch.device, seed: int = 0) -> None:
        """Open `spec`: `"package.module:function"` of a function (captions, **options), or of a class whose objects are called
        with captions, or a folder with a tokenizer and a text encoder of transformers: both in it, or in `tokenizer` and
        `text_encoder` below it. A single tensor becomes `encoder_hidden_states`. New blocks of passes in the encoder are
        initialised with `seed`. Raises SpecError.
        """
        use = read_use(spec)
        self.name, self.device, self.encoder = use.name, device, None
        if ":" in use.name:
            self.encode = import_function(use)
            if isinstance(self.encode, nn.Module):
                self.encode.to(device).eval().requires_grad_(False)
        else:
            check_options(get_arguments(FolderText, 2), use.options, "a text encoder")
            with prefix_path(use.name):
                self.encode = self.encoder = FolderText(base / use.name, device, **use.options)
                if use.options.get("passes"):
                    with prefix_path("passes"):
                        self.encoder.rewrite(use.options["passes"], base, seed)

    def __call__(self, captions: Sequence[str], tokens: Tensor | None = None) -> dict[str, Tensor]:
        """Return tensors [b, ...]; `tokens` int64 [b, n] replace those of the captions. Gradients reach trainable
        parameters."""
        given = {} if tokens is None else {"tokens": tokens}
        rewritten = self.encoder is not None and self.encoder.traced is not None
        learns = self.encoder is not None and bool(rewritten or self.encoder.trainable)
        # new blocks train in float32 beside an encoder of any dtype, as those of the module do: under the run's autocast
        mixed = rewritten and torch.is_autocast_enabled(self.device.type)
        with torch.autocast(self.device.type, enabled=mixed), torch.set_grad_enabled(learns and torch.is_grad_enabled()):
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
        passes: list[Any] | None = None,
    ) -> None:
        """Load the tokenizer and encoder. `layer` is the hidden state that is used, -2 for the one before the last, as Stable
        Diffusion XL does. `trainable` are patterns of the encoder's parameters that train, with their own `lr` and
        `weight_decay`, which are also those of `passes` that set none: `rewrite` applies these."""
        import transformers

        given = {"max_length": max_length, "layer": layer, "dtype": dtype, "lr": lr, "weight_decay": weight_decay}
        validate(TextOptions, {**given, "trainable": trainable or []})
        for key, value in (("lr", lr), ("weight_decay", weight_decay)):
            if value is not None and not trainable and not passes:
                finding = "has no effect, because nothing of the text encoder trains: set 'trainable' or 'passes'"
                raise SpecError(finding, path=(key,))
        if not folder.is_dir():
            raise SpecError(f"'{folder.name}': {describe_missing(folder)}")
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
        self.traced: TracedModule | None = None  # the model, where passes are in it
        self.learning = False  # whether what passes added is in training mode
        self.names, self.dtype = [name for name, _ in model.named_parameters()], model.dtype
        said = getattr(config, "max_position_embeddings", None) or LONGEST
        self.length = min(self.tokenizer.model_max_length, said) if max_length is None else max_length
        if getattr(config, "max_position_embeddings", None) and self.length > said:
            raise SpecError(f"must be at most {said}, the positions of the encoder, not {self.length}", path=("max_length",))
        states = getattr(config, "num_hidden_layers", None)
        if states is not None and not -states - 1 <= layer <= states:
            finding = f"must be from {-states - 1} to {states}, not {layer}: the encoder has {states} layers"
            raise SpecError(finding, path=("layer",))
        self.layer, self.device, self.source, self.folder = layer, device, str(folder), folder
        self.trainable, self.lr, self.weight_decay = trainable or [], lr, weight_decay
        self._trained()

    def tokens(self, captions: Sequence[str]) -> Tensor:
        """Return the token ids int64 [b, n] of captions."""
        ids: Tensor = self._tokenized(captions).input_ids
        return ids

    def rewrite(self, passes: Any, base: Path, seed: int) -> None:
        """Trace the encoder and apply passes, listed as in a configuration; paths are relative to `base`.

        Raises SpecError, with the place in that list, for a pass that cannot be applied.
        """
        if (self.folder / "text_encoder_2").is_dir():
            raise SpecError(f"'{self.folder.name}' has two text encoders, and passes train in a pipeline with one only")
        found = read_passes(passes, base)
        ids = self.tokens(["", ""])
        with seed_within(seed):
            try:
                module = trace(self.model, *self._call(ids, torch.ones_like(ids)))
            except FxplugError as error:
                raise SpecError(f"the text encoder cannot be traced: {error}") from error
            module = apply_passes(module, found)
        self.model = self.traced = module.eval().requires_grad_(False)

    def rates(self, settings: Train) -> dict[str, float]:
        """Return the default `lr` and `weight_decay` of the encoder's parameters."""
        own = {"lr": self.lr, "weight_decay": self.weight_decay}
        return {key: getattr(settings, key) if value is None else value for key, value in own.items()}

    def groups(self, settings: Train) -> list[dict[str, Any]]:
        """Return the optimizer's groups, as `choose` does for the module, and make their parameters require gradients."""
        rates = self.rates(settings)
        if self.traced is not None:
            found = choose(self.traced, settings.model_copy(update={"trainable": self.trainable, **rates}), others=True)
        else:
            own = self._trained()
            params = [parameter.requires_grad_(True) for parameter in own.values()]
            found = [{"name": BASE, "names": [*own], "params": params, "dtypes": [p.dtype for p in params], **rates}]
        for group in found:
            group["name"] = ENCODER if group["name"] == BASE else f"{ENCODER}.{group['name']}"
            group["names"] = [f"{ENCODER}.{name}" for name in group["names"]]
        return found

    def freezing(self) -> dict[str, Any]:
        """Return the frozen parts of CLIP's encoder, under the keys of EveryDream2trainer's optimizer.json."""
        own = self._trained()
        layers = {int(found[1]) for name in own if (found := re.search(r"layers\.(\d+)\.", name))}
        return {
            "freeze_embeddings": not any("token_embedding" in name for name in own),
            "freeze_position_embeddings": not any("position_embedding" in name for name in own),
            "freeze_final_layer_norm": not any("final_layer_norm" in name for name in own),
            "unfreeze_last_n_layers": self.model.config.num_hidden_layers - min(layers) if layers else 0,
        }

    def save(self, folder: Path) -> None:
        """Write `tokenizer` and `text_encoder` into a folder as transformers does; an encoder with passes as an artifact."""
        self.tokenizer.save_pretrained(folder / "tokenizer")
        self._set_mode(False)
        if self.traced is not None:
            save(self.traced, folder / "text_encoder")
        else:
            self.model.save_pretrained(folder / "text_encoder")

    def _trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that a pattern of `trainable` names, themselves or through a module around them."""
        named = dict(self.model.named_parameters())
        own = dict(zip(self.names, self.names, strict=True))
        chosen = find_parameters(self.trainable, own, "the text encoder", ("trainable",))
        return {name: named[name] for name in chosen}

    def _tokenized(self, captions: Sequence[str]) -> Any:
        options = {"padding": "max_length", "truncation": True, "max_length": self.length, "return_tensors": "pt"}
        return self.tokenizer(list(captions), **options).to(self.device)

    def __call__(self, captions: list[str], tokens: Tensor | None = None) -> dict[str, Tensor]:
        """Return tensors of captions; `tokens` [b, n], from the method `tokens`, replace the captions' own."""
        tokenized = self._tokenized(captions)
        mask = tokenized.attention_mask
        args, kwargs = self._call(tokenized.input_ids if tokens is None else tokens, mask)
        self._set_mode(torch.is_grad_enabled())
        found = self.model(*args, **kwargs)
        states = found.last_hidden_state if self.layer == -1 else found.hidden_states[self.layer]
        pooled = next((found[key] for key in ("text_embeds", "pooler_output") if key in found), None)
        out = {"encoder_hidden_states": states, "encoder_attention_mask": mask}
        out |= {} if pooled is None else {"text_embeds": pooled}
        # the module was traced with what the encoder gives without autocast
        wide = self.traced is not None
        return {key: value.to(self.dtype) if wide and value.is_floating_point() else value for key, value in out.items()}

    def _call(self, ids: Tensor, mask: Tensor) -> tuple[tuple[Tensor], dict[str, Any]]:
        """Return the arguments of the encoder's call for tokens [b, n] and their mask."""
        # CLIP is trained to see its padding (diffusers' scripts give it no mask), T5 is not
        given: dict[str, Any] = {} if self.is_clip else {"attention_mask": mask}
        # as pipelines call it: a graph admits the arguments that it was traced with
        return (ids,), given if self.layer == -1 else {**given, "output_hidden_states": True}

    def _set_mode(self, learning: bool) -> None:
        """Put the encoder into evaluation mode, but its added blocks into training mode while it learns."""
        if self.traced is None or learning == self.learning:
            return
        self.traced.eval()
        if learning:
            set_mode(self.traced, self.traced, "eval")
        self.learning = learning

    @property
    def is_clip(self) -> bool:
        """Return whether this is CLIP's text encoder."""
        return "clip" in self.model.config.model_type


def apply_passes(module: TracedModule, passes: Sequence[Pass]) -> TracedModule:
    """Apply passes to a traced text encoder. Raises SpecError, with the number of the pass, for one that cannot be applied."""
    for index, p in enumerate(passes):
        with prefix_path(index):
            if why := _explain_refusal(p):
                raise SpecError(f"pass '{p.name}' {why}")
            try:
                module = apply(module, find(module, p))
            except SpecError:
                raise
            except FxplugError as error:
                raise SpecError(f"in the text encoder: {error}") from error
    return module


def _explain_refusal(p: Pass) -> str:
    """Explain why a pass cannot be used in a trainable text encoder; "" if it can."""
    if isinstance(p, ParallelPass):
        return "splits a model over processes, and the text encoder is whole in one process"
    if p.inputs:
        return f"has inputs ({', '.join(p.inputs)}), but a text encoder gets only tokens"
    return "has slots, which cannot be trained: leave 'slots' out, or set train: false" if p.slots and p.train else ""
