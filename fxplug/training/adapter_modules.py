"""The modules of a run that trains many adapters: that of each alone, made of a module with slots, and one for all of them.

All are on the tensors of one base. In the one for all a block is there once for each adapter, and takes the rows of the batch
that are that adapter's: none computes, or sees, another's samples, so that 0 x NaN of one cannot reach another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..blocks.base import get_kind
from ..blocks.gathered import GatheredLora
from ..blocks.lora import Lora
from ..blocks.scale import Scale, Ssf
from ..core.artifacts.modules import get_constructor_arguments, list_constructor_parameters
from ..core.capture.isolation import get_random_state
from ..core.errors import SpecError, TrainError, did_you_mean
from ..core.ir import ops
from ..core.ir.graph import change, erase, insert, replace
from ..core.ir.traced_module import TracedModule, copy_graphs, strip_to_container
from .random_draws import seed_within

WITHOUT_SLOTS: set[type[nn.Module]] = {Scale, Ssf}  # blocks that have no slots; new ones are made of their sizes alone
OPTIONS = ("rank", "alpha", "dropout")  # of a pass, which each adapter may have of its own
# that take their first argument's rows one by one
BY_ROWS = (
    F.linear, F.embedding, F.layer_norm, F.group_norm, F.rms_norm, torch.conv1d, torch.conv2d, torch.conv3d, F.conv_transpose1d,
    F.conv_transpose2d, F.conv_transpose3d,
)  # fmt: skip


def list_adapter_passes(module: TracedModule) -> list[dict[str, Any]]:
    """Return the records of the passes that adapters are trained for: those with slots, and those whose blocks cannot have any.

    Raises SpecError where there are none, and for another pass that trains.
    """
    entries = [entry for entry in module.meta.get("passes", []) if entry["train"]]
    for entry in entries:
        kinds = {type(module.get_submodule(site["block"])) for site in entry["sites"] if site["block"]}
        if any(issubclass(kind, GatheredLora) for kind in kinds):  # whose gates are two
            raise SpecError(
                f"pass '{entry['name']}' has per_sample, which training of many adapters does not support: leave per_sample "
                "out here, and load the trained adapters into a module that has it",
                path=("train", "adapters"),
            )
        if not entry["slots"] and not (kinds and kinds <= WITHOUT_SLOTS):
            raise SpecError(
                f"pass '{entry['name']}' has no slots, which training of many adapters needs: give it 'slots', one for each "
                "adapter that trains at once, or set train: false",
                path=("train", "adapters"),
            )
    if not entries:
        raise SpecError(
            "needs a pass with a slot per adapter that trains at once, {lora: {at: ..., rank: 16, slots: 8}}; none is applied",
            path=("train", "adapters"),
        )
    return entries


def find_left_out(module: TracedModule, chosen: Sequence[str] | None) -> list[str]:
    """Return the passes that an adapter with these does not train. Raises SpecError for an unknown name."""
    names = [entry["name"] for entry in list_adapter_passes(module)]
    if chosen is not None and not chosen:
        raise SpecError(f"needs one pass at least; there are {', '.join(names)}", path=("passes",))
    for name in chosen or ():
        if name not in names:
            finding = f"no pass '{name}' trains here{did_you_mean(name, names)}; there are {', '.join(names)}"
            raise SpecError(finding, path=("passes",))
    return [] if chosen is None else [name for name in names if name not in chosen]


# --- one adapter


def make_adapter_module(
    module: TracedModule, given: Mapping[str, Any], seed: int, chosen: Sequence[str] | None = None
) -> TracedModule:
    """Return a module with slots as that of one adapter, with new blocks in the place of the slots.

    Args:
        module: The module with slots.
        given: The adapter's own `rank`, `alpha` and `dropout`; what is not given is the pass's.
        seed: What the new blocks are drawn from, in the order of the model's layers, as `apply` draws those of a pass without
            slots.
        chosen: The names of the passes that it trains; None is all. The blocks of the others are not called.

    Returns:
        A module on the same tensors, but for the blocks.

    Raises:
        SpecError: No such pass, a rank beyond the slots', or an option that no block has.
    """
    left_out = find_left_out(module, chosen)
    tree, graphs = strip_to_container(module), copy_graphs(module)
    order = {name: index for index, (name, _) in enumerate(module.named_modules(remove_duplicate=False))}
    passes: list[dict[str, Any]] = []
    taken: set[str] = set()
    with seed_within(seed):
        for entry in module.meta["passes"]:
            if not entry["train"]:
                passes.append(entry)
                continue
            if entry["name"] in left_out:
                for graph in graphs.values():
                    _leave_blocks(graph, entry, tree)
                tree._modules.pop(entry["name"])
                continue
            sites = sorted(entry["sites"], key=lambda site: order.get(site["path"].partition("@")[0], len(order)))
            for name, site in {site["block"]: site for site in sites}.items():
                block, used = _remake_block(tree.get_submodule(name), find_parameter(module, site), entry, given)
                taken |= used
                _set_submodule(tree, name, block.train(module.training))
            if entry["slots"]:
                for graph in graphs.values():
                    _leave_slots(graph, entry)
                added: Any = tree._modules[entry["name"]]
                del added._modules["gates"]
            passes.append(_describe_alone(entry, given))
    if unknown := [key for key, value in given.items() if value is not None and key not in taken]:
        raise SpecError(f"no pass here has blocks with a {unknown[0]}", path=(unknown[0],))
    again = partial(make_adapter_module, given=given, seed=seed, chosen=chosen)  # of a trace for another form of call
    return module.derived(tree, graphs, passes=passes).made_by(again, module)


def _remake_block(
    bank: nn.Module, parameter: Tensor | None, entry: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[nn.Module, set[str]]:
    """Return a new block of one adapter in the place of a bank, and which options it has."""
    kind: Any = type(bank)
    known = {p.name for p in list_constructor_parameters(kind)}
    arguments = {key: value for key, value in get_constructor_arguments(bank).items() if key != "slots"}
    most = arguments.get("rank", getattr(bank, "rank", 1))
    for key in OPTIONS:
        value = given[key] if given.get(key) is not None else entry["params"].get(key)
        if key == "rank" and not isinstance(value, int):  # a share of each layer's width
            value = most
        if key in known:
            arguments[key] = value
    if "rank" in known and arguments["rank"] > most:
        raise SpecError(
            f"is {arguments['rank']}, and the slots of pass '{entry['name']}' are for ranks up to {most}: give the pass "
            f"rank_max: {arguments['rank']}",
            path=("rank",),
        )
    like = next(iter(bank.parameters()))
    with torch.device(like.device):
        block: nn.Module = kind(**{key: value for key, value in arguments.items() if key in known})
    block.to(like.device)
    for one in block.parameters():
        if one.is_floating_point():
            one.data = one.data.to(like.dtype)
    found = get_kind(block)
    for key, value in found.neutral.items() if found is not None else ():
        if callable(value) and parameter is not None:  # the norms of DoRA
            magnitude = block.get_parameter(found.state.get(key, key) if found is not None else key)
            dim = getattr(block, "own_dim", 0)
            magnitude.data = value(parameter.detach(), dim).reshape(magnitude.shape).to(magnitude.dtype)
    return block, known & {*OPTIONS}


def find_parameter(module: nn.Module, site: Mapping[str, Any]) -> Tensor | None:
    """Return the parameter of a site's layer that its block maps, or stands beside."""
    owner: Any = module
    for part in filter(None, site["path"].partition("@")[0].split(".")):
        owner = getattr(owner, part, None)
    found = getattr(owner, site.get("param", "weight"), None)
    return found if isinstance(found, Tensor) else None


def _set_submodule(tree: nn.Module, name: str, block: nn.Module) -> None:
    home, _, key = name.rpartition(".")
    tree.get_submodule(home)._modules[key] = block


def _leave_slots(graph: fx.Graph, entry: Mapping[str, Any]) -> None:
    """Take the gates of a pass out of a graph: its blocks are called without them."""
    blocks = {site["block"] for site in entry["sites"]}
    for node in graph.find_nodes(op="call_module"):
        if node.target in blocks:
            change(node, args=tuple(node.args[:-1]))
    tables = [node for node in graph.find_nodes(op="call_module") if str(node.target).startswith(f"{entry['name']}.gates.")]
    read = [value for node in tables for value in node.all_input_nodes]
    dead = set(tables)
    waiting = list(tables)
    while waiting:
        new = [user for user in waiting.pop().users if user not in dead]
        dead.update(new)
        waiting += new
    erase(dead)
    erase({value for value in read if value.target is ops.edge and not value.users})


def _leave_blocks(graph: fx.Graph, entry: Mapping[str, Any], tree: nn.Module) -> None:
    """Take the blocks of a pass out of a graph: who reads their results reads what they change."""
    if entry["slots"]:
        _leave_slots(graph, entry)
    places = {site["block"]: site["place"] for site in entry["sites"]}
    for node in [node for node in graph.find_nodes(op="call_module") if node.target in places]:
        block = tree.get_submodule(str(node.target))
        replace(node, node.args[0 if places[str(node.target)] == "param" else _find_changed(block, node)])


def _find_changed(block: nn.Module, node: fx.Node) -> int:
    """Return which argument of a call of a block is the value that its result takes the place of. Raises SpecError where none
    is known."""
    names = list(inspect.signature(type(block).forward).parameters)[1:]
    before = node.meta.get("pass", {}).get("instead")
    found = [n for n, value in enumerate(node.args) if isinstance(value, fx.Node) and value.name == before]
    if "y" in names:
        found = [names.index("y")]
    if not found:
        raise SpecError(
            f"'{node.target}' does not read the value that its result replaces, so adapters without it cannot share its batch: "
            "leave it out",
            path=("passes",),
        )
    return found[0]


def _describe_alone(entry: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a pass with slots as that of one adapter without."""
    own = {key: value for key, value in given.items() if value is not None and key in entry["params"]}
    without = {"slots": 0, "rank_max": None, "samples": None}
    params = {**entry["params"], **{key: value for key, value in without.items() if key in entry["params"]}, **own}
    sites = [{key: value for key, value in site.items() if key != "bank"} for site in entry["sites"]]
    networks = [name for name in entry["networks"] if name != "gates"]
    return {**entry, "params": params, "slots": 0, "sites": sites, "networks": networks}


# --- all of them


@dataclass
class RandomState:
    """Where the generators of one adapter stand: what `get_random_state` gives."""

    random: tuple[Any, ...] = field(default_factory=get_random_state)


@dataclass
class SampleRows:
    """Whose the rows of the batch at hand are: `parts` has the number of an adapter and of its samples, one after the other."""

    drawings: list[RandomState] = field(default_factory=list)
    parts: list[tuple[int, int]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Number of samples in the batch."""
        return sum(count for _, count in self.parts)

    def split(self, value: Any, what: str, dim: int = 0) -> Sequence[Any]:
        """Divide a value among the adapters: its samples are along `dim`, one or more rows each, one sample's in succession."""
        if not isinstance(value, Tensor) or len(self.parts) == 1:
            return [value] * len(self.parts)
        size = value.shape[dim] if value.dim() > dim else 0
        if not size or size % self.total:
            raise TrainError(
                f"'{what}' is given {list(value.shape)}, whose dimension {dim} does not match the batch's {self.total} "
                "samples, so adapters cannot be distinguished there: exclude the layer from the pass"
            )
        parts: Sequence[Tensor] = torch.split(value, [count * (size // self.total) for _, count in self.parts], dim)
        return parts


class AdapterBlocks(nn.Module):
    """The blocks that all adapters have at one place, each for its own samples.

    With `function` the blocks make parameters, and this calls it with them: `at` has the positions of these parameters among
    the arguments, and the blocks for each. Samples are in dimension `dim` of all that the blocks are given. An adapter
    without a block leaves the parameter as it is, or the argument number `changed`.
    """

    def __init__(
        self,
        name: str,
        rows: SampleRows,
        blocks: Sequence[nn.Module | None],
        dim: int = 0,
        function: Any = None,
        at: Any = None,
        changed: int = 0,
    ) -> None:
        super().__init__()
        self.name, self.rows, self.dim, self.function, self.changed = name, rows, dim, function, changed
        self.blocks = tuple(blocks)
        self.at: dict[int | str, list[tuple[nn.Module | None, ...]]] = {}  # one after the other, where several passes map it
        self.held = nn.ModuleList(filter(None, blocks))  # so that they have a mode; a list of modules is slow to read
        self.draws = any(may_draw(block) for block in self.held)
        # the layer's output is added to once for all, not divided and joined again
        self.adds = bool(blocks) and all(type(block) is Lora and not block.same_padding for block in blocks)
        for key, found in (at or {}).items():
            self.add_blocks(key, found)

    def add_blocks(self, key: int | str, blocks: Sequence[nn.Module | None]) -> None:
        """Let blocks map the parameter at a position of the function's arguments, before those that map it already."""
        self.at.setdefault(key, []).insert(0, tuple(blocks))
        self.held.extend(filter(None, blocks))
        self.draws |= any(may_draw(block) for block in blocks if block is not None)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = args if self.function is None and not self.adds else args[:1]
        split = [self.rows.split(value, self.name, self.dim) for value in given]
        found = []
        for place, (index, _) in enumerate(self.rows.parts):
            own = [values[place] for values in split]
            if self.draws:
                with _drawing_from(self.rows.drawings[index], own[0]):
                    found.append(self._call(index, own, args, kwargs))
            else:
                found.append(self._call(index, own, args, kwargs))
        whole = found[0] if len(found) == 1 else torch.cat(found, self.dim)
        return torch.add(args[1], whole) if self.adds else whole

    def _call(self, index: int, own: list[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        if self.adds:
            return self.blocks[index].compute(*own)  # type: ignore[operator, union-attr, no-any-return]
        if self.function is None:
            block = self.blocks[index]
            result: Tensor = own[self.changed] if block is None else block(*own)
            return result
        given, named = [*own, *args[1:]], dict(kwargs)
        for key, chain in self.at.items():
            table: Any = named if isinstance(key, str) else given
            for block in (blocks[index] for blocks in chain):
                if block is not None:
                    table[key] = block(table[key])
        made: Tensor = self.function(*given, **named)
        return made


@contextmanager
def _drawing_from(drawing: RandomState, like: Any) -> Iterator[None]:
    """Let a block draw from an adapter's own generators of torch inside the context."""
    device = like.device if isinstance(like, Tensor) and like.is_cuda else None
    python, numpy, state, cuda = drawing.random
    before = torch.get_rng_state()
    torch.set_rng_state(state)
    if device is not None:
        states = list(cuda or torch.cuda.get_rng_state_all())
        kept = torch.cuda.get_rng_state(device)
        torch.cuda.set_rng_state(states[device.index or 0], device)
    try:
        yield
    finally:
        if device is not None:
            states[device.index or 0] = torch.cuda.get_rng_state(device)
            torch.cuda.set_rng_state(kept, device)
            cuda = states
        drawing.random = (python, numpy, torch.get_rng_state(), cuda)
        torch.set_rng_state(before)


def may_draw(block: nn.Module) -> bool:
    """Return whether a block may draw random numbers: one of ours without dropout does not."""
    ours = type(block).__module__.startswith("fxplug.blocks.")
    return not ours or bool(getattr(block, "dropout", 0))


def join_adapters(
    module: TracedModule,
    adapters: Sequence[TracedModule],
    rows: SampleRows,
    makers: Sequence[Callable[[TracedModule], TracedModule]],
) -> TracedModule:
    """Return one module for the samples of several adapters.

    Args:
        module: The module with slots that all were made of.
        adapters: What `make_adapter_module` made of it, equal but for their blocks and passes.
        rows: Whose rows are whose, which is set before each call.
        makers: What made the modules of the adapters, and makes those of another trace, for another form of call.

    Returns:
        A module on the same tensors, whose graph calls every adapter's blocks with that adapter's rows.

    Raises:
        SpecError: A place where adapters cannot be distinguished by sample.
    """
    own = [{entry["name"] for entry in one.meta["passes"]} for one in adapters]
    entries = [entry for entry in list_adapter_passes(module) if any(entry["name"] in names for names in own)]
    passes = [entry["name"] for entry in entries]
    whole = next((one for one, names in zip(adapters, own, strict=True) if names.issuperset(passes)), None)
    first = make_adapter_module(module, {}, 0, passes) if whole is None else whole
    tree, graphs = strip_to_container(first), copy_graphs(first)
    for entry in reversed(entries):  # of several that map a parameter the last one is read by the layer
        for site in {site["block"]: site for site in entry["sites"]}.values():
            name = site["block"]
            blocks = [
                strip_to_container(one.get_submodule(name)) if entry["name"] in names else None  # each with a mode of its own
                for one, names in zip(adapters, own, strict=True)
            ]
            if site["place"] == "param":
                for graph in graphs.values():
                    _call_by_rows(tree, graph, name, blocks, rows)
            else:
                dim = getattr(module.get_submodule(name), "batch_dim", 0)
                if dim < 0:
                    raise SpecError(
                        f"'{name}' is given values without samples, so adapters cannot be distinguished there: exclude "
                        f"'{site['path']}' from the pass",
                        path=("train", "adapters"),
                    )
                every = (node for graph in graphs.values() for node in graph.find_nodes(op="call_module"))
                calls = [node for node in every if node.target == name]
                changed = _find_changed(module.get_submodule(name), calls[0]) if None in blocks and calls else 0
                _set_submodule(tree, name, AdapterBlocks(name, rows, blocks, dim, changed=changed))
    return first.derived(tree, graphs).made_by(partial(_rejoin_adapters, rows=rows, makers=makers), module)


def _rejoin_adapters(
    module: TracedModule, rows: SampleRows, makers: Sequence[Callable[[TracedModule], TracedModule]]
) -> TracedModule:
    return join_adapters(module, [make(module) for make in makers], rows, makers)


def _call_by_rows(tree: nn.Module, graph: fx.Graph, name: str, blocks: Sequence[nn.Module | None], rows: SampleRows) -> None:
    """Let what reads a block's parameter be called for each adapter's rows with that adapter's own."""
    for node in [node for node in graph.find_nodes(op="call_module") if node.target == name]:
        for number, user in enumerate(list(node.users)):
            keys = [key for key, value in _arguments(user) if value is node]
            held: Any = tree.get_submodule(str(user.target)) if user.op == "call_module" else None
            if isinstance(held, AdapterBlocks) and held.function is not None:  # which has another parameter of adapters already
                for key in keys:
                    held.add_blocks(key, blocks)
            elif user.op == "call_function" and user.target in BY_ROWS and keys and 0 not in keys:
                made = AdapterBlocks(name, rows, [], function=user.target, at=dict.fromkeys(keys, blocks))
                target = f"{name}_rows" + f"_{number}" * bool(number)
                while target in dict(tree.named_modules()):
                    target += "_"
                _set_submodule(tree, target, made)
                new = insert(graph, "call_module", target, user.args, user.kwargs, after=user, meta=user.meta)
                replace(user, new)
            else:
                called = getattr(user.target, "__name__", user.target)
                raise SpecError(
                    f"'{name}' changes a parameter of '{called}', where fxplug cannot tell which rows belong to which sample: "
                    "exclude the layer from the pass",
                    path=("train", "adapters"),
                )
        replace(node, node.args[0])


def _arguments(node: fx.Node) -> Iterator[tuple[int | str, Any]]:
    yield from enumerate(node.args)
    yield from node.kwargs.items()
