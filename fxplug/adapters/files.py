"""Adapter files of any common layout, read into low-rank updates by layer.

PEFT, diffusers (its old attention processors too), kohya and LyCORIS, ai-toolkit, and fxplug's own. `read` needs no model: it
gives what each layer of the file gets, under the names that fxplug's blocks have. `fit` finds those layers in a graph.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..blocks import low_rank
from ..blocks.lora import Lora
from ..core import reading
from ..core.errors import DEFAULT, ArtifactError, Limits, SpecError, did_you_mean, quote
from ..core.spec.addresses import match_endings
from ..core.weight_files import find, find_kind
from . import peft_config
from .file_keys import INNER, SHARED, TABLES, LayerKeys, find_saved_module, place_key
from .file_kinds import INTEGERS, LayerFacts, LayerForm, find_form, pop_changes
from .file_tensors import explain_unreadable, join_sam, load, parse_object
from .layer_matching import WRAPPED, Fit, fit, split_part
from .own_files import OWN, check_tensors
from .tables import PARTS
from .updates import PRODUCT, AdapterFile, Entry, bound_change, has_lokr_of_3_dims

__all__ = ["AdapterFile", "Entry", "Fit", "fit", "read"]
Source = str | os.PathLike[str] | Mapping[str, Any] | AdapterFile
LARGE = 1e30  # no number of an adapter's is larger
SLOTS = ".gates.table.names"  # how a tensor of a pass with slots ends


def read(
    source: Source,
    *,
    adapter: str | None = None,
    config: Mapping[str, Any] | None = None,
    meta: bool = False,
    limits: Limits = DEFAULT,
) -> AdapterFile:
    """Read an adapter: a file (.safetensors; .bin, .pt, .pth as plain tensors), a folder, or a state dict; or what was read.

    A folder is one that PEFT, diffusers or `fxplug.save` wrote, of a pass without slots. `adapter` names one of several in a
    file, as PEFT does. `config` is PEFT's `adapter_config.json` for a source that has none beside it: it says alpha and rank;
    without it, and without `.alpha` in the file, the scale is taken to be 1, as all tools do, and `Fit.assumed` names the
    layers. A state dict may hold `.alpha` as numbers. A file is data: nothing in it is run, and it is read within `limits`.
    With `meta` only its smallest tensors are, which alphas are among; the others are on the meta device.

    Raises SpecError for a source that is none of these; ArtifactError for what is no adapter, half pairs, numbers that are not
    finite or not floating point, saying the key, and for a configuration under which the tensors mean something else (see
    `peft_config`).
    """
    if isinstance(source, AdapterFile):
        return source
    if not isinstance(config, (Mapping, type(None))):
        raise SpecError(f"config must be PEFT's adapter configuration as a dict, not {quote(config)}")
    if isinstance(source, Mapping):
        where, folder, state = "the state dict", None, dict(source)
        about: Mapping[str, Any] = {}
    else:
        if not isinstance(source, (str, os.PathLike)) or not isinstance(os.fspath(source), str):
            raise SpecError(
                f"an adapter must be a file, a folder or a dict of tensors, not {quote(source)}: write bytes to a file, or "
                "read them with safetensors.torch.load, which gives a dict"
            )
        file = find(source)
        where, folder = str(file), file.parent
        state, about = load(file, limits, meta)
        if OWN in about:
            return AdapterFile(where, (), {}, about, check_tensors(state, where))
        beside = file.parent / "adapter_config.json"
        if config is None and "lora_adapter_metadata" not in about and find_kind(beside) == "file":
            config = parse_object(reading.read_json(beside, limits=limits), str(beside))
    reader = _AdapterFileReader(where, folder, config, about, limits)
    return reader.read(state, adapter)


class _AdapterFileReader:
    def __init__(
        self, where: str, folder: Path | None, config: Mapping[str, Any] | None, about: Mapping[str, Any], limits: Limits
    ) -> None:
        self.where, self.folder, self.about, self.limits = where, folder, about, limits
        self.configs = {"": dict(config)} if config is not None else _packed(about, where, limits)
        for part, one in self.configs.items():
            peft_config.check(one, f"{where}: its configuration{part and f' of {part}'}")
        self.chosen: dict[tuple[str, str], Mapping[str, Any]] = {}  # part, key of its configuration -> values by layer
        self.state: dict[str, Any] = {}
        self.shared: dict[str, str] = {}  # tensors that belong to all layers
        self.kinds: dict[str, str | None] | None = None  # of our blocks, by path
        self.halves: set[str] = set()  # the layers of MultiheadAttentions
        self.weights: list[str] = []  # those of `target_parameters` that have this name

    def read(self, state: Mapping[str, Any], adapter: str | None) -> AdapterFile:
        self.state = {str(key).replace("_orig_mod.", ""): value for key, value in state.items()}
        if len(self.state) < len(state):
            raise ArtifactError(
                f"{self.where} has the same tensor with and without the prefix '_orig_mod.' of torch.compile: keep one of them"
            )
        self.state = join_sam(self.state, self.where)
        if owner := next((key.removesuffix(SLOTS) for key in self.state if key.endswith(SLOTS)), ""):
            raise ArtifactError(
                f"{self.where} has the slots of the pass '{owner}': load its folder with fxplug.load, and write the adapter "
                "that you want with adapters.save(name, path)"
            )
        adapters: set[str] = set()
        common_of = {key: m for key in self.state if (m := SHARED.match(key))}
        self.shared = {m["name"]: key for key, m in common_of.items() if m["adapter"] in (None, adapter, "default")}
        placed = {key: place_key(key, self.state, adapter, adapters) for key in self.state if key not in common_of}
        config = self.configs.get("", {})
        if config:
            placed |= {key: find_saved_module(key, config, self.state) for key, found in placed.items() if found is None}
        if adapter is None and len(adapters) > 1:
            raise ArtifactError(f"{self.where} has several adapters: give one of {', '.join(sorted(adapters))} as adapter=")
        self.mark_wrapped(placed)
        layers: dict[str, LayerKeys] = {}
        for found in placed.values():
            if found is None or not found.keys:
                continue  # no layer's, or another adapter's
            layer = layers.setdefault(found.name, found)
            layer.embedding |= found.embedding
            for role, at in found.keys.items():
                if layer.keys.setdefault(role, at) != at:
                    raise ArtifactError(f"{self.where}: '{layer.keys[role]}' and '{at}' are the same tensor of one layer")
        rest = {key: self.state[key] for key, found in placed.items() if found is None}
        peft_config.check_layout(rest, self.where)
        if adapter is not None and adapter not in adapters:
            has = f"; it has {', '.join(sorted(adapters))}" if adapters else ""
            raise ArtifactError(f"{self.where} has no adapter '{adapter}'{did_you_mean(adapter, adapters)}{has}")
        if not layers:
            raise ArtifactError(f"{self.where} {self.none()}")
        self.halves = drop_unused(layers, self.state)
        self.read_patterns(layers.values())
        entries = [entry for layer in layers.values() for entry in self.entries(layer)]
        ours = {"software": "fxplug"} if all(layer.own for layer in layers.values()) else {}
        return AdapterFile(self.where, tuple(entries), rest, {**ours, **self.about, **self.configs.get("", {})})

    def mark_wrapped(self, placed: Mapping[str, LayerKeys | None]) -> None:
        """Keep the updates of several parameters of one module apart, which PEFT wraps one around the other."""
        targets = self.configs.get("", {}).get("target_parameters") or []
        if not isinstance(targets, (list, tuple)) or not all(isinstance(one, str) for one in targets):
            raise ArtifactError(f"{self.where}: target_parameters of its configuration must be a list of names")
        self.targets = [one for one in targets if one.rpartition(".")[2] != "weight"]
        self.weights = [one for one in targets if one.rpartition(".")[2] == "weight"]
        owners = {f".{one.rpartition('.')[0]}" for one in self.targets}
        for key, found in placed.items():
            if found is not None and any(f".{found.name}".endswith(owner) for owner in owners):
                found.name = f"{found.name}{WRAPPED}{key.count('.base_layer')}"

    def wrapped(self, layer: LayerKeys, config: Mapping[str, Any]) -> Entry:
        """Return the update of a wrapped parameter; its tensors have the size of the experts times the rank, which only the
        model can separate."""
        name, _, depth = layer.name.partition(WRAPPED)
        tensors = {role: self.tensor(key) for role, key in layer.keys.items()}
        _, part, path = split_part(name)
        if tensors.keys() != {"down", "up"} or any(t.dim() != 2 for t in tensors.values()):
            raise ArtifactError(f"{self.where}: '{name}' has {', '.join(sorted(tensors))} for a parameter: it must be a LoRA")

        def of(key: str) -> Entry:
            about = reading.make_reporter(f"{self.where}: its configuration")
            tables = [config.get("alpha_pattern") or {}, config.get("rank_pattern") or {}]
            alphas, ranks = match_endings(tables, [key], about, self.limits)
            rank, alpha = ranks.get(key, config.get("r", 8)), alphas.get(key, config.get("lora_alpha", 8))
            rows = len(tensors["down"])
            if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1 or rows % rank or tensors["up"].shape[1] != rows:
                shapes = " and ".join(str(list(t.shape)) for t in tensors.values())
                raise ArtifactError(f"{self.where}: the tensors of '{key}' are {shapes}, which are not of rank {quote(rank)}")
            alpha = _number(alpha, f"{self.where}: its configuration: the alpha of '{key}'")
            scale = low_rank.compute_scale(rank, alpha, config.get("use_rslora") is True)
            if bound_change(tensors, scale) > self.limits.update:
                raise ArtifactError(
                    f"{self.where}: the update of '{key}' can change a weight by more than {self.limits.update:g}, which is "
                    "the limit; fxplug.Limits can raise it"
                )
            more = {"experts": rows // rank} if rows > rank else {}
            return Entry(name, path, part, "lora", tensors, scale, rank, param=key.rpartition(".")[2], options=more)

        options = {"targets": self.targets, "depth": int(depth), "of": of}
        return Entry(name, path, part, "lora", tensors, 1.0, 1, param=WRAPPED, options=options)

    def read_patterns(self, layers: Iterable[LayerKeys]) -> None:
        """Look up what PEFT's configurations say of single layers, all at once."""
        names = list(dict.fromkeys(name for layer in layers for name in self.peft_names(layer)))
        tables: dict[tuple[str, str], Mapping[str, Any]] = {}
        for part, config in self.configs.items():
            for key in ("alpha_pattern", "rank_pattern"):
                tables[part, key] = config.get(key) or {} if config.get("peft_type") in peft_config.PRODUCTS else {}
                if not isinstance(tables[part, key], Mapping) or not all(isinstance(p, str) for p in tables[part, key]):
                    raise ArtifactError(f"{self.where}: '{key}' of its configuration must be a mapping of patterns to values")
        about = reading.make_reporter(f"{self.where}: its configuration")
        self.chosen = dict(zip(tables, match_endings(list(tables.values()), names, about, self.limits), strict=True))

    def none(self) -> str:
        """Why nothing was found."""
        keys = [str(key) for key in self.state]
        kind = str(self.configs.get("", {}).get("peft_type", ""))
        if any(re.search(r"\.Delta(_\d+)?\.delta$", key) for key in keys):
            return "has whole changes without the names of their parameters: save them with adapters.save(..., as_='fxplug')"
        found = f"its keys are like '{keys[0]}'" if keys else "it is empty"
        return f"has no layer of an adapter{f' (it is {kind})' if kind else ''}: {found}"

    def entries(self, layer: LayerKeys) -> list[Entry]:
        """Return the entries of a layer, one for each parameter."""
        if WRAPPED in layer.name:
            return [self.wrapped(layer, self.configs[""])]
        keys = {role: key for role, key in layer.keys.items() if role not in ("alpha", "scale")}
        tensors = {role: self.tensor(key) for role, key in keys.items()}
        part = layer.group if layer.own else split_part(layer.name)[1]
        alpha = self.number(layer.keys["alpha"]) if "alpha" in layer.keys else None
        config = self.configs.get(part) or self.configs.get("")
        onetrainer = "." not in layer.name or any(key.startswith("ot_") for key in self.about)  # PEFT's names have dots
        shared = {} if layer.own else {name: self.tensor(key) for name, key in self.shared.items()}
        facts = LayerFacts(self.where, layer.name, keys or layer.keys, config, alpha, shared, onetrainer)
        shape = tensors.pop("reshape_weight", None)
        made = pop_changes(facts, tensors)
        for entry in made:
            if entry.method == "diff" and bound_change(entry.tensors, 1.0) > self.limits.update:
                most = f"changes a {entry.param} by more than {self.limits.update:g}; fxplug.Limits can raise it"
                raise ArtifactError(f"{self.where}: '{layer.name}' {most}")
        if tensors or not made:
            form = find_form(tensors)
            form.check_roles(tensors, facts)
            if form.make is not None:
                form.check_sizes(tensors, facts)
                own = form.make(tensors, facts)
            else:
                own = self.product(layer, form, tensors, facts)
            base = next((e for e in made if e.method == "whole" and e.param == "weight"), None)
            if own and base is not None and ".base_layer." in keys["whole_weight"]:
                made.remove(base)  # PEFT saves the weights of embeddings beside
                own = [replace(own[0], base=base.tensors["whole"]), *own[1:]]
            made = own + made
        if shape is not None and (wrong := next((e for e in made if not e.fits([int(n) for n in shape.tolist()])), None)):
            text = f"'{wrong.name}' does not fit a weight of shape {shape.tolist()}, which its reshape_weight gives"
            raise ArtifactError(f"{self.where}: {text}")
        return made

    def product(self, layer: LayerKeys, form: LayerForm, tensors: dict[str, Tensor], facts: LayerFacts) -> list[Entry]:
        """Return the entry of an update that is a product of its tensors."""
        keys, kind = layer.keys, form.kind
        assert kind is not None
        base = kind.name
        if base == "loha" and not layer.own and "hada_t1" not in tensors:  # OneTrainer keeps the kernel dimensions
            tensors = {r: t.flatten(1) if r.startswith("hada_") and 2 < t.dim() < 6 else t for r, t in tensors.items()}
        embedding = self.embedding(layer, tensors)
        if layer.own and embedding:
            tensors["down"] = tensors["down"].T
        self.check(form, tensors, facts, embedding)
        if facts.config and facts.config.get("peft_type") == "LOKR" and has_lokr_of_3_dims(tensors):
            raise facts.error(
                "is a LoKr of a Conv1d, whose factors PEFT combines in another order: merge it with PEFT (merge_and_unload) "
                "and take the difference with fxplug.extract"
            )
        if "mid" in tensors:  # a core between the two halves is the same as a larger down
            mid, low = tensors.pop("mid"), tensors["down"]
            tensors["down"] = low_rank.multiply_core(mid.float(), low.flatten(1).float()).to(low.dtype)
            if not low.is_meta and not tensors["down"].isfinite().all():
                raise ArtifactError(
                    f"{self.where}: '{keys['mid']}' times '{keys['down']}' has numbers out of range for {low.dtype}"
                )
        rank = kind.rank(tensors)
        if facts.config and "down" in tensors:
            rank = len(tensors["down"])  # PEFT's, also of a convolution in groups
        part_path = (layer.group, layer.name.partition(".")[2]) if layer.own else split_part(layer.name)[1:]
        word = base
        if "magnitude" in tensors:
            word = {"lora": "dora"}.get(base, f"{base}+dora")
            most = max(tensors["magnitude"].numel(), Entry("", "", "", base, tensors, 1.0, rank).sizes()[0])
            if keys["magnitude"].endswith("dora_scale") and tensors["magnitude"].shape[0] == 1 < most:
                word = f"{word} by input"  # LyCORIS has both
            tensors["magnitude"] = tensors["magnitude"].flatten()
        word = f"{word}+bias" if "bias" in tensors else word
        scale = self.scale(layer, tensors, rank, part_path[0])
        assumed, scale = scale is None, 1.0 if scale is None else scale
        if layer.name in self.halves and not tensors["up"].is_meta:
            last = (tensors["up"].any(0) | tensors["down"].any(1)).nonzero()  # behind it are zeros, up to the other half's rank
            rank = int(last.max()) + 1 if len(last) else rank
            tensors |= {"down": tensors["down"][:rank].contiguous(), "up": tensors["up"][:, :rank].contiguous()}
        if is_inner(layer):
            scale *= 2  # PEFT's MultiheadAttention adds this update twice, when it is called and when it is merged
        if bound_change(tensors, scale) > self.limits.update:
            raise ArtifactError(
                f"{self.where}: the update of '{layer.name}' is scaled by {scale:g} and can change a weight by more than "
                f"{self.limits.update:g}, which is the limit; fxplug.Limits can raise it"
            )
        flat = "." not in layer.name and not layer.own
        return [Entry(layer.name, part_path[1], part_path[0], word, tensors, scale, rank, embedding, flat, assumed)]

    def embedding(self, layer: LayerKeys, tensors: Mapping[str, Tensor]) -> bool | None:
        """Return whether the layer is an Embedding, for which `blocks.Lora` has the rank in the last dimension of `down`; None
        if unknown."""
        if layer.own is not Lora.update_kind or not tensors["down"].dim() == tensors["up"].dim() == 2:
            return layer.embedding
        (rows, columns), rank = tensors["down"].shape, tensors["up"].shape[1]
        if not rows == columns == rank:
            return columns == rank
        if TABLES in self.about:
            return layer.keys["down"].removesuffix(f".{Lora.__name__}.down.weight") in str(self.about[TABLES]).split("\n")
        if self.kinds is None:  # only what the folder says of the block can tell
            graph = self.folder / "graph.json" if self.folder else None
            read = parse_object(reading.read_json(graph, limits=self.limits), str(graph)) if graph and find_kind(graph) else {}
            modules = read.get("modules")
            given = {n: m.get("arguments") for n, m in modules.items() if type(m) is dict} if type(modules) is dict else {}
            self.kinds = {name: of.get("kind") for name, of in given.items() if type(of) is dict}
        kind = self.kinds.get(layer.keys["down"].removesuffix(".down.weight"))
        return kind == "Embedding" if kind else None

    def tensor(self, key: str) -> Tensor:
        """Return the tensor of a key after checking it."""
        value = self.state[key]
        if not isinstance(value, Tensor):
            raise ArtifactError(f"{self.where}: '{key}' is a {type(value).__name__}, not a tensor")
        if odd := explain_unreadable(value):
            raise ArtifactError(f"{self.where}: '{key}' {odd}")
        integer = value.dtype != torch.bool and not value.is_complex()
        if not value.is_floating_point() and key.endswith(INTEGERS) and (integer or key.endswith("scaled_oft")):
            return value.detach()
        if not value.is_floating_point():
            raise ArtifactError(f"{self.where}: '{key}' is {value.dtype}; an adapter's weights must be floating point")
        value, wide = value.detach(), torch.float64 if value.dtype == torch.float64 else torch.float32
        numbers = value if value.itemsize > 1 else value.float()
        # the sum tells in a seventh of the time, unless it is too large itself
        if not value.is_meta and not numbers.sum(dtype=wide).isfinite() and not numbers.isfinite().all():
            raise ArtifactError(f"{self.where}: '{key}' has numbers that are not finite (NaN or infinity)")
        return value

    def check(self, form: LayerForm, tensors: Mapping[str, Tensor], facts: LayerFacts, embedding: bool | None) -> None:
        """Raise ArtifactError unless the parts of a product go together."""
        form.check_sizes(tensors, facts)
        if "down" not in tensors:
            return
        down, up = tensors["down"], tensors["up"]
        rank, groups = up.shape[1], len(down) // up.shape[1]  # a convolution may have groups, each with a down of its own
        flat = embedding is False or down.dim() == up.dim() == 2
        if rank != up.flatten(1).shape[1] or len(down) != rank * groups or not (groups == 1 or down.dim() > 2) or not flat:
            raise facts.unfit("down", "up", tensors)
        if "mid" in tensors:
            mid = tensors["mid"]
            most = max(PRODUCT, down.numel() + up.numel() + mid.numel())
            if mid[:, 0].numel() * down[0].numel() > most:
                raise facts.unfit("mid", "down", tensors)

    def number(self, key: str) -> float:
        value = self.state[key]
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta and not value.is_complex():
            value = value.item()
        return _number(value, f"{self.where}: '{key}'")

    def scale(self, layer: LayerKeys, tensors: Mapping[str, Tensor], rank: int, part: str) -> float | None:
        """Return the factor of the product: the file's own scale, alpha / rank, or PEFT's configuration; None if none is
        given."""
        if "scale" in layer.keys:
            return self.number(layer.keys["scale"])
        if "alpha" in layer.keys:
            if "lokr_w1" in tensors and "lokr_w2" in tensors:
                return 1.0  # LyCORIS: two full matrices are not scaled
            return (self.number(layer.keys["alpha"]) or rank) / rank
        part = part if self.configs.get(part) else ""
        config = self.configs.get(part)
        if not config:
            return None
        about = f"{self.where}: its configuration: "
        absent = peft_config.METHODS.get(config.get("peft_type"), {})
        default = config.get("lora_alpha", config.get("alpha", absent.get("lora_alpha", absent.get("alpha"))))
        alpha = self.pattern_value(part, "alpha_pattern", layer, default)
        r = self.pattern_value(part, "rank_pattern", layer, config.get("r", absent.get("r")))
        if r is not None and (not isinstance(r, int) or isinstance(r, bool) or not 0 < r < 1 << 31):
            raise ArtifactError(f"{about}the rank of '{layer.name}' must be a whole number, 1 or more, not {quote(r)}")
        if config.get("use_rslora") not in (None, True, False):
            raise ArtifactError(f"{about}use_rslora must be true or false, not {quote(config['use_rslora'])}")
        if "down" in tensors and r is not None and r != len(tensors["down"]):
            raise ArtifactError(f"{about}the rank of '{layer.name}' is {r}, and its tensors have {len(tensors['down'])}")
        for key, role in (("use_dora", "magnitude"), ("lora_bias", "bias")):
            if config.get(key) is True and role not in layer.keys:
                raise ArtifactError(f"{about}{key} is true, and '{layer.name}' has no {role}")
        rank = r if "down" not in tensors and r is not None else rank
        if alpha is None:
            return None
        alpha = _number(alpha, f"{about}the alpha of '{layer.name}'")
        return low_rank.compute_scale(rank, alpha, config.get("use_rslora") is True)

    def pattern_value(self, part: str, key: str, layer: LayerKeys, default: Any) -> Any:
        """Return the value of the first of PEFT's patterns that matches a layer's name."""
        found = self.chosen[part, key]
        return next((found[name] for name in self.peft_names(layer) if name in found), default)

    def peft_names(self, layer: LayerKeys) -> list[str]:
        """Return PEFT's possible names of a layer: an attention's out_proj is named like the attention, a parameter by its own
        name."""
        name = layer.name.removesuffix(".out_proj") if is_inner(layer) else layer.name
        names = [split_part(name)[2], name.removeprefix("base_model.model.")]
        return [f"{one}.weight" if any(f".{one}.weight".endswith(f".{by}") for by in self.weights) else one for one in names]


def is_inner(layer: LayerKeys) -> bool:
    """Return whether the layer is the out_proj within PEFT's wrapper around a MultiheadAttention."""
    return f"{INNER}." in layer.keys.get("down", "")


def drop_unused(layers: dict[str, LayerKeys], state: Mapping[str, Any]) -> set[str]:
    """Take out the half of a MultiheadAttention that has zeros beside one that has not, and give the names of all halves.

    PEFT's files always have both, and of one rank.
    """
    halves: set[str] = set()
    for name in [name for name, layer in layers.items() if is_inner(layer)]:
        ups = {one: state[layers[one].keys["up"]] for one in (name.removesuffix(".out_proj"), name)
               if one in layers and "up" in layers[one].keys}  # fmt: skip
        halves |= ups.keys()
        used = [one for one, up in ups.items() if not isinstance(up, Tensor) or up.is_meta or up.any()]
        for one in ups if len(used) == 1 else ():
            if one not in used:
                del layers[one]
    return halves


def _number(value: Any, what: str) -> float:
    plain = isinstance(value, (bool, int, float, str, type(None)))
    kind = quote(value) if plain else f"a {type(value).__name__.lower()}"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGE:
        raise ArtifactError(f"{what} must be one finite number, not {kind}")
    return float(value)


def _packed(about: Mapping[str, Any], where: str, limits: Limits) -> dict[str, dict[str, Any]]:
    """Return the configurations that diffusers stores in a file's metadata, by part of the pipeline."""
    text = about.get("lora_adapter_metadata")
    made: dict[str, dict[str, Any]] = {}
    if not isinstance(text, str):
        return made
    what = f"{where}: its lora_adapter_metadata"
    for key, value in parse_object(reading.parse_json(text, reading.make_reporter(what), limits), what).items():
        part, _, name = key.rpartition(".") if key.partition(".")[0] in PARTS else ("", "", key)
        made.setdefault(part, {})[name] = value
    return made
