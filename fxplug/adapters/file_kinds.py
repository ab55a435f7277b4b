"""What a file has for a layer: a table of forms of updates, the tensors and sizes of each, and the entries that these make.

The forms of products are those that their blocks say. What PEFT's configuration must say for the others, and which of its
methods have no home here, and why, is in formats.yaml.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..blocks import list_update_kinds
from ..blocks.base import UpdateKind
from ..core.errors import ArtifactError, quote
from .layer_matching import split_part
from .peft_config import METHODS
from .updates import Entry

Tensors = Mapping[str, Tensor]
# changes of a parameter, and what is read in its place
WHOLE = {
    "diff": "weight", "w_norm": "weight", "diff_b": "bias", "b_norm": "bias", "beft_bias": "bias",
    "diff_m": "modulation",  # LightX2V's, of Wan's blocks and head
}  # fmt: skip
SET = {"set_weight": "weight"}
WHOLE_OF = "whole_"  # before the name of a parameter that a file has whole
NUMBER = (int, float)
TERMS = 64  # the most of a series: later ones are nothing where it has a sum at all
INTEGERS = (
    "shira_indices", "on_input", "reshape_weight", "scaled_oft", "vblora_logits_A_topk_indices", "vblora_logits_B_topk_indices",
)  # fmt: skip


@dataclass(frozen=True)
class LayerFacts:
    """What a file says beside the tensors of a layer: `where` is the file, `layer` its layer, `keys` the tensors' own names.

    `onetrainer` says that OneTrainer wrote it, whose OFT is PEFT's with choices of its own.
    """

    where: str
    layer: str
    keys: Mapping[str, str]
    config: Mapping[str, Any] | None = None
    alpha: float | None = None
    shared: Tensors = field(default_factory=dict)
    onetrainer: bool = False

    def get(self, kind: str, key: str, kinds: type | tuple[type, ...]) -> Any:
        """Return a value of PEFT's configuration of a method. Raises ArtifactError without a configuration, and for a value of
        another type."""
        if self.config is None:
            raise self.error(f"needs PEFT's configuration for its {key}: give config=, or the folder with adapter_config.json")
        value = self.config.get(key, METHODS[kind][key])
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise self.error(f"has a configuration with {key}: {quote(value)}, which is not possible")
        return value

    def error(self, finding: str) -> ArtifactError:
        """Return an error about the layer."""
        return ArtifactError(f"{self.where}: '{self.layer}' {finding}")

    def unfit(self, a: str, b: str, tensors: Tensors) -> ArtifactError:
        """Return the error for two tensors whose sizes do not match."""
        shapes = f"{list(tensors[a].shape)} and {list(tensors[b].shape)}"
        both = f"'{self.keys[a]}' and '{self.keys[b]}'"
        return ArtifactError(f"{self.where}: {both} do not fit each other: their shapes are {shapes}")

    def entry(self, kind: str, method: str, tensors: Tensors, options: Mapping[str, Any] | None = None, **more: Any) -> Entry:
        """Return the entry of one parameter of the layer; `more` are further fields of `Entry`."""
        _, part, path = split_part(self.layer)
        more = {"scale": 1.0, "rank": 0, "flat": "." not in self.layer, **more}
        return Entry(self.layer, path, part, kind, tensors, method=method, options=options or {}, **more)


Make = Callable[[Tensors, LayerFacts], list[Entry]]


@dataclass(frozen=True)
class LayerForm:
    """The tensors that a form of an update needs, and those that it may have, by role, each with its sizes.

    Sizes are as in `blocks.base.UpdateKind`. `make` gives the entries of the tensors; without one they are a product of `kind`,
    whose scale the reader works out.
    """

    needed: Mapping[str, str]
    more: Mapping[str, str] = field(default_factory=dict)
    make: Make | None = None
    kind: UpdateKind | None = None

    def check_roles(self, tensors: Tensors, facts: LayerFacts) -> None:
        """Raise ArtifactError for tensors that are missing, or that the kind has not."""
        first = next(iter(facts.keys.values()))
        if lacks := sorted(self.needed.keys() - tensors.keys()):
            raise ArtifactError(f"{facts.where}: '{first}' is an incomplete update: '{facts.layer}' has no {', '.join(lacks)}")
        if extra := sorted(tensors.keys() - self.needed.keys() - self.more.keys()):
            keys = ", ".join(f"'{facts.keys[role]}'" for role in extra)
            raise facts.error(f"has a whole update and also {keys}, which cannot both be applied")

    def check_sizes(self, tensors: Tensors, facts: LayerFacts) -> None:
        """Raise ArtifactError for tensors whose sizes are none of theirs, or do not go together."""
        known: dict[str, tuple[Any, str]] = {}  # sizes by name, each with the role of the tensor that has it
        for role, form in {**self.needed, **self.more}.items():
            if role in tensors and (other := _conflict(role, form.split(), tensors[role], known, facts)):
                raise facts.unfit(other, role, tensors)


def _conflict(role: str, names: list[str], tensor: Tensor, known: dict[str, tuple[Any, str]], facts: LayerFacts) -> str:
    """Return the role of the tensor whose sizes contradict `known`, or "" if none does; new sizes are added to `known`."""
    shape = tuple(tensor.shape)
    rest = names.pop() if names[-1].startswith("...") else ""
    if not len(names) <= len(shape) <= (5 if rest else len(names)) or (not tensor.numel() and role not in INTEGERS):
        raise ArtifactError(
            f"{facts.where}: '{facts.keys[role]}' has the shape {list(shape)}, which is not possible for {role}"
        )
    found: list[tuple[str, Any]] = [*zip(names, shape, strict=False), *([(rest, shape[len(names) :])] if len(rest) > 3 else [])]
    for name, size in found:
        factors = name.split("*")
        wanted = int(name) if name.isdigit() else known[name][0] if name in known else size
        if len(factors) > 1:
            wanted = math.prod(known[factor][0] for factor in factors)
        if size != wanted:
            return known[factors[0]][1] if factors[0] in known else role
        known.setdefault(name, (size, role))
    return ""


@cache
def product_forms(*kinds: UpdateKind) -> list[LayerForm]:
    """Make the forms of those of these kinds that are products of their tensors, the plain one first."""
    products = [kind for kind in kinds if kind.is_product and (kind.formats or not kind.is_plain)]
    products.sort(key=lambda kind: (not kind.is_plain, kind.name))
    return [LayerForm(form, {**kind.aside, **_BESIDE}, kind=kind) for kind in products for form in kind.forms]


def find_form(tensors: Tensors) -> LayerForm:
    """Find the form that tensors by role have, or the one that they are nearest to."""
    def distance(form: LayerForm) -> tuple[int, int]:
        return len(form.needed.keys() - tensors.keys()), len(tensors.keys() - form.needed.keys() - form.more.keys())

    forms = (*product_forms(*list_update_kinds().values()), *FORMS)
    return min([form for form in forms if not tensors.keys().isdisjoint(form.needed)] or [forms[0]], key=distance)


def pop_changes(facts: LayerFacts, tensors: dict[str, Tensor]) -> list[Entry]:
    """Pop the whole changes from a layer's tensors and return them as entries. Raises ArtifactError for an empty one."""
    made = []
    whole = sorted((role for role in tensors if role.startswith(WHOLE_OF)), reverse=True)  # the weight before the bias
    for role in [*(role for role in (*WHOLE, *SET) if role in tensors), *whole]:
        value = tensors.pop(role)
        if not value.numel() or not 1 <= value.dim() <= 5:
            raise facts.error(f"has a {role} of shape {list(value.shape)}, which fits no parameter")
        method, name = ("diff", "delta") if role in WHOLE else ("whole", "whole")
        own = {name: value.flatten() if role == "beft_bias" else value}
        param, of = {**WHOLE, **SET}.get(role, role.removeprefix(WHOLE_OF)), facts
        if role == "diff_m":  # by its own name, as other tools have it
            param, of = "weight", replace(facts, layer=f"{facts.layer}{'.' if '.' in facts.layer else '_'}{param}")
        made.append(of.entry("delta", method, own, param=param))
    return made


# --- LyCORIS


def _lycoris_oft(t: Tensors, facts: LayerFacts) -> list[Entry]:
    blocks = t["oft_blocks"]
    if blocks.dim() not in (3, 4) or blocks.shape[-1] != blocks.shape[-2] or (blocks.dim() == 4 and blocks.shape[-1] % 2):
        raise facts.error(f"has oft_blocks of shape {list(blocks.shape)}, which must be square blocks")
    if "rescale" in t and t["rescale"].numel() != blocks.shape[-3] * blocks.shape[-1]:
        raise facts.error(f"has {t['rescale'].numel()} factors in rescale for {blocks.shape[-3] * blocks.shape[-1]} outputs")
    method = "diag-oft" if blocks.dim() == 3 else "butterfly oft"
    return [facts.entry("delta", method, dict(t), {"constraint": facts.alpha or 0.0})]


def _glora(t: Tensors, facts: LayerFacts) -> list[Entry]:
    rank = len(t["a2"])
    return [facts.entry("delta", "glora", dict(t), {"scale": (facts.alpha or rank) / rank}, rank=rank)]


def _lycoris_ia3(t: Tensors, facts: LayerFacts) -> list[Entry]:
    side = "input" if bool(t["on_input"].flatten()[:1].any()) else "output"
    return [facts.entry("delta", "gate", {"gate": t["weight"].flatten().float() + 1}, {"side": side})]


# --- PEFT: what is a low-rank product after all


def _adalora(t: Tensors, facts: LayerFacts) -> list[Entry]:
    rank = len(t["down"])
    # all in one factor, so that the scale says the rest
    own = {"down": t["down"] * t["lora_E"].to(t["down"].dtype), "up": t["up"]}
    return [facts.entry("lora", "", own, scale=facts.get("ADALORA", "lora_alpha", NUMBER) / (rank + 1e-5), rank=rank)]


def _vera(t: Tensors, facts: LayerFacts) -> list[Entry]:
    rank = len(t["vera_lambda_d"])
    own = {"lambda_b": t["vera_lambda_b"], "lambda_d": t["vera_lambda_d"]}
    if {"vera_A", "vera_B"} <= facts.shared.keys():
        a, b = facts.shared["vera_A"], facts.shared["vera_B"]
        if a.dim() != 2 or b.dim() != 2 or len(a) != rank or b.shape[1] != rank or len(b) < len(own["lambda_b"]):
            raise facts.error(
                f"has vera_lambda_d of {rank}, which does not fit the file's projections of {list(a.shape)} and {list(b.shape)}"
            )
        return [facts.entry("lora", "vera", {**own, "A": a, "B": b}, rank=rank)]
    return [facts.entry("lora", "vera", own, {"key": facts.get("VERA", "projection_prng_key", int)}, rank=rank)]


def _vblora(t: Tensors, facts: LayerFacts) -> list[Entry]:
    if "vblora_vector_bank" not in facts.shared:
        raise facts.error("needs vblora_vector_bank, which is not in the file")
    bank, topk = facts.shared["vblora_vector_bank"].float(), facts.get("VBLORA", "topk", int)

    def made(half: str) -> Tensor:
        if half in t:
            logits, at = t[half].float().topk(min(max(topk, 1), t[half].shape[-1]), dim=-1)
            weights = torch.softmax(logits, -1)
        else:
            at, weights = t[f"{half}_topk_indices"].long(), t[f"{half}_topk_weights"].float()
            weights = torch.cat([weights, 1 - weights.sum(-1, keepdim=True)], -1)
        good = bank.dim() == 2 and at.shape == weights.shape and at.dim() == 3 and at.numel() > 0
        if not good or (not at.is_meta and (int(at.max()) >= len(bank) or int(at.min()) < 0)):
            raise facts.error(f"has {half} that do not fit the bank of {len(bank)} vectors")
        return (weights.unsqueeze(-1) * bank[at]).sum(-2)

    a, b = made("vblora_logits_A"), made("vblora_logits_B")
    down, up = a.flatten(1), b.transpose(1, 2).flatten(0, 1)
    if up.shape[1] != len(down):
        raise facts.error(f"has logits of two ranks, {len(down)} and {up.shape[1]}")
    return [facts.entry("lora", "", {"down": down, "up": up}, rank=len(down))]


def _miss(t: Tensors, facts: LayerFacts) -> list[Entry]:
    (block,) = t.values()
    if block.dim() not in (2, 3) or (block.dim() == 3 and block.shape[1] != block.shape[2]):
        raise facts.error(f"has a block of shape {list(block.shape)}, which must be square")
    if block.dim() == 3:
        return [facts.entry("delta", "bat", {"block": block}, rank=block.shape[2])]
    mini = facts.config is not None and facts.config.get("init_weights") == "mini"
    return [facts.entry("lora", "miss", {"block": block}, {"mini": mini}, rank=len(block))]


# --- PEFT: the others


def _plain(method: str, ranked: str = "", dim: int = 0, **options: tuple[str, Any]) -> Make:
    """Return a function that makes the entry of a method from its tensors, without the method's name in front of theirs.

    The size of `ranked` in dimension `dim` is the rank. `options` are the method's own, with PEFT's configuration keys and
    their types.
    """

    def make(t: Tensors, facts: LayerFacts) -> list[Entry]:
        own = {role.removeprefix(f"{method}_"): tensor for role, tensor in t.items()}
        given = {name: facts.get(method.upper(), *value) for name, value in options.items()}
        return [facts.entry("delta", method, own, given, rank=own[ranked].shape[dim] if ranked else 0)]

    return make


def _oft(t: Tensors, facts: LayerFacts) -> list[Entry]:
    rotation = t["oft_R"]
    size = (1 + math.isqrt(1 + 8 * rotation.shape[1])) // 2
    if size * (size - 1) // 2 != rotation.shape[1]:
        raise facts.error(f"has an oft_R of shape {list(rotation.shape)}, which is not the upper triangle of a square matrix")
    if facts.onetrainer:  # OneTrainer's modules/module/LoRAModule.py: always five terms, and no configuration in the file
        scaled = "scaled_oft" in t and bool(t["scaled_oft"].any())
        rotation = rotation / (2 * math.sqrt(size - 1)) if scaled else rotation
        own = {"size": size, "terms": 5, "share": len(rotation) == 1, "kernel_forwards": True}
        return [facts.entry("oft", "oft", {"rotation": rotation}, own, rank=len(rotation))]
    share = facts.get("OFT", "block_share", bool)
    if share and len(rotation) != 1:
        raise facts.error(
            f"has an oft_R of {len(rotation)} blocks, and a configuration with block_share, for which there is one"
        )
    series, config = facts.get("OFT", "use_cayley_neumann", bool), facts.config or {}
    version = re.match(r"(\d+)\.(\d+)", str(config.get("peft_version")))
    if series and "use_cayley_neumann" in config and (not version or (int(version[1]), int(version[2])) < (0, 18)):
        raise facts.error(
            "has a configuration with use_cayley_neumann of PEFT before 0.18, which computed another series: merge it with "
            "that version of PEFT (merge_and_unload) and take the difference with fxplug.extract"
        )
    terms = facts.get("OFT", "num_cayley_neumann_terms", int) if series else 0
    if terms and not 3 <= terms <= TERMS:
        raise facts.error(f"has a configuration with num_cayley_neumann_terms: {terms}; 3 to {TERMS} are supported")
    if facts.get("OFT", "coft", bool):  # as PEFT bounds them when it reads them
        most = facts.get("OFT", "eps", NUMBER) / math.sqrt(len(rotation))
        norms = rotation.float().norm(dim=1, keepdim=True) * math.sqrt(2)
        rotation = torch.where(norms <= most, rotation, (rotation * (most / norms)).to(rotation.dtype))
    options = {"size": size, "terms": max(terms, 4) if terms else 0, "share": share}
    return [facts.entry("oft", "oft", {"rotation": rotation}, options, rank=len(rotation))]


def _boft(t: Tensors, facts: LayerFacts) -> list[Entry]:
    levels, count, size, _ = t["boft_R"].shape
    if levels > 1 and (size % 2 or count % 2 ** (levels - 1)):
        raise facts.error(f"has a boft_R of shape {list(t['boft_R'].shape)}, which must be butterfly factors of square blocks")
    return [facts.entry("boft", "boft", {"rotation": t["boft_R"], "magnitude": t["boft_s"].reshape(-1, 1)}, rank=count)]


def _ia3(t: Tensors, facts: LayerFacts) -> list[Entry]:
    gate = t["ia3_l"]
    if gate.numel() != max(gate.shape):
        raise facts.error(f"has an ia3_l of shape {list(gate.shape)}, which must have one value per channel")
    if gate.dim() == 2:
        side = "output" if gate.shape[1] == 1 and gate.shape[0] > 1 else "input"
    else:  # a convolution's are alike
        feeding = facts.get("IA3", "feedforward_modules", (list, str, type(None))) or []
        side = "input" if _feeds(facts.layer, feeding) else "output"
    own = {"gate": gate.flatten()}
    made = [facts.entry("ia3", "gate", own, {"side": side})]
    return [*made, facts.entry("ia3", "gate", own, {"side": side}, param="bias", optional=True)] if side == "output" else made


def _feeds(name: str, targets: Sequence[str] | str) -> bool:
    if isinstance(targets, str):
        raise ArtifactError(
            f"feedforward_modules of the configuration is a regular expression, {quote(targets)}: give a list of names"
        )
    return any(isinstance(one, str) and (name == one or name.endswith(f".{one}")) for one in targets)


def _shira(t: Tensors, facts: LayerFacts) -> list[Entry]:
    at, values = t["shira_indices"], t["shira_weight"].flatten()
    if at.shape[1] != len(values) or (not at.is_meta and int(at.min()) < 0):
        raise facts.error(f"has {len(values)} values, and shira_indices of shape {list(at.shape)}")
    return [facts.entry("delta", "shira", {"values": values, "at": at}, {"scale": 1.0})]


def _randlora(t: Tensors, facts: LayerFacts) -> list[Entry]:
    a, b = (t.get(f"randlora_{name}", facts.shared.get(f"randlora_{name}")) for name in "AB")
    if a is None or b is None:
        why = "needs randlora_A and randlora_B, which PEFT draws again in 16 bits: save the adapter with save_projection=True"
        raise facts.error(why)
    lam, gamma = t["randlora_lambda"], t["randlora_gamma"]
    good = a.dim() == b.dim() == 3 and a.shape[1] == 1 and len(a) == len(lam) == b.shape[2]
    if not good or len(gamma) > b.shape[1]:
        raise facts.error("has randlora_lambda and randlora_gamma that do not fit the file's projections")
    options = {"scale": facts.get("RANDLORA", "randlora_alpha", NUMBER) / len(lam)}
    return [facts.entry("delta", "randlora", {"lambda": lam, "gamma": gamma, "A": a, "B": b}, options, rank=len(lam))]


def _road(t: Tensors, facts: LayerFacts) -> list[Entry]:
    options = {"variant": facts.get("ROAD", "variant", str), "group": facts.get("ROAD", "group_size", int)}
    if options["variant"] not in ("road_1", "road_2", "road_4"):
        raise facts.error(
            f"has a configuration with variant: {quote(options['variant'])}; road_1, road_2 and road_4 are supported"
        )
    if options["group"] < 2 or options["group"] % 2:
        raise facts.error("has road_theta and road_alpha that do not fit its group_size")
    own = {"theta": t["road_theta"], "alpha": t["road_alpha"]}
    return [facts.entry("delta", "road", own, options, param=param, optional=param == "bias") for param in ("weight", "bias")]


def _gralora(t: Tensors, facts: LayerFacts) -> list[Entry]:
    own = {role.removeprefix("gralora_"): tensor for role, tensor in t.items()}
    k, _, rank = own["A"].shape
    if rank % k or len(own.keys() & {"A_general", "B_general"}) == 1:
        raise facts.error("has gralora_A and gralora_B whose shapes do not fit each other")
    options = {"scale": facts.get("GRALORA", "alpha", NUMBER) / (rank + len(own.get("A_general", ())))}
    return [facts.entry("delta", "gralora", own, options, rank=rank)]


def _hira(t: Tensors, facts: LayerFacts) -> list[Entry]:
    if "hira_A" in t:
        own = {"A": t["hira_A"].flatten(1), "B": t["hira_B"].flatten(1)}
    else:  # of an embedding's transpose
        own = {"A": t["hira_embedding_B"].T, "B": t["hira_embedding_A"].T}
    return [facts.entry("delta", "hira", own, rank=len(own["A"]))]


def _tokens(t: Tensors, facts: LayerFacts) -> list[Entry]:
    config = facts.config or {}
    found = config.get("trainable_token_indices") or config.get("token_indices")
    if isinstance(found, dict):
        found = next((rows for name, rows in found.items() if _feeds(facts.layer, [name])), None)
    rows = t["trainable_tokens_delta"]
    good = isinstance(found, list) and all(type(n) is int and n >= 0 for n in found)
    if not good or not len({*found}) == len(found) == len(rows):  # type: ignore[misc, arg-type]
        raise facts.error(
            f"has {len(rows)} trained tokens, and its configuration has no trainable_token_indices of that length"
        )
    return [facts.entry("delta", "tokens", {"rows": rows}, {"rows": tuple(found or ())})]


_BESIDE = {"bias": "n ...", "magnitude": "m ..."}  # what low-rank updates may have
FORMS = (  # that are no product
    LayerForm({"oft_blocks": "..."}, {"rescale": "..."}, _lycoris_oft),
    LayerForm({"a1": "i r ...", "a2": "r j ...", "b1": "o r ...", "b2": "r c ..."}, {"bm": "r r ..."}, _glora),
    LayerForm({"on_input": "...", "weight": "..."}, {}, _lycoris_ia3),
    LayerForm({"down": "r i", "up": "o r", "lora_E": "r 1"}, {"ranknum": "..."}, _adalora),
    LayerForm({"vera_lambda_b": "o", "vera_lambda_d": "r"}, {}, _vera),
    LayerForm({"vblora_logits_A": "a m k", "vblora_logits_B": "b n k"}, {}, _vblora),
    LayerForm({f"vblora_logits_{half}_topk_{end}": "..." for half in "AB" for end in ("indices", "weights")}, {}, _vblora),
    LayerForm({"miss_block": "..."}, {}, _miss),
    LayerForm({"bone_block": "..."}, {}, _miss),
    LayerForm({"oft_R": "n v"}, {"scaled_oft": "..."}, _oft),
    LayerForm({"boft_R": "l n s s", "boft_s": "..."}, {}, _boft),
    LayerForm({"ia3_l": "a b ..."}, {}, _ia3),
    LayerForm({"hra_u": "i r"}, {}, _plain("hra", "u", 1, gs=("apply_GS", bool))),
    LayerForm({"c3a_kernel": "a b s"}, {}, _plain("c3a")),
    LayerForm({"fourierft_spectrum": "n"}, {}, _plain("fourierft", seed=("random_loc_seed", int), scale=("scaling", NUMBER))),
    LayerForm({"shira_weight": "...", "shira_indices": "2 n"}, {}, _shira),
    LayerForm({"randlora_lambda": "r n", "randlora_gamma": "n m"}, {"randlora_A": "...", "randlora_B": "..."}, _randlora),
    LayerForm({"hira_A": "r i ...", "hira_B": "o r ..."}, {}, _hira),
    LayerForm({"hira_embedding_A": "r n", "hira_embedding_B": "d r"}, {}, _hira),
    LayerForm({"road_theta": "n", "road_alpha": "n"}, {}, _road),
    LayerForm({"delora_A": "r i", "delora_B": "o r", "delora_lambda": "1", "delora_w_norm": "i"}, {},
         _plain("delora", "A")),
    LayerForm(
        {"gralora_A": "k i r", "gralora_B": "k r o"}, {"gralora_A_general": "h k*i", "gralora_B_general": "k*o h"}, _gralora
    ),
    LayerForm({"trainable_tokens_delta": "n d"}, {}, _tokens),
)  # fmt: skip
