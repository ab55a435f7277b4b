"""Block swap: frozen weights of repeated regions wait on the host, and are on the device only around a region's computation.

kohya's sd-scripts call it `blocks_to_swap`.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import FxplugError, SpecError
from ...core.ir.containers import find_module, list_leaves, map_leaves
from ...core.ir.traced_module import TracedModule
from ...core.quantised import get_plain_tensors, is_own_layer
from ...core.torch_internals.modules import replace_forward
from ...core.torch_internals.tensors import memory_id, version
from .submodules import check_outlined, list_blocks, outline

ALIGNED = 64  # bytes: kernels of a CPU may compute otherwise where a weight begins elsewhere


@dataclass(eq=False)
class SwappedWeight:
    """A tensor of a block: its values on the `host`, and `place` on the device, which takes memory while they are there."""

    tensor: Tensor
    host: Tensor
    place: Tensor
    bytes: int
    version: int = 0

    @classmethod
    def of(cls, tensor: Tensor, device: torch.device) -> SwappedWeight:
        """Make one of a tensor, whose values are on the host from now on."""
        host = tensor.data.cpu()
        host = _pin(host) if device.type == "cuda" else host
        place = _make_place(host, device)
        tensor.data = host
        made = cls(tensor, host, place, place.untyped_storage().nbytes())
        made.free()
        return made

    def allocate(self) -> None:
        """Take the memory on the device. What was computed from the values that were there sees those that come."""
        self._take_changes()
        self.place.untyped_storage().resize_(self.bytes)

    def fill(self) -> None:
        """Copy the values to the device; a pinned host's while the device computes."""
        self.place.copy_(self.host, non_blocking=True)

    def use(self) -> None:
        """Let the tensor be what is on the device."""
        self.tensor.data = self.place
        self.version = version(self.tensor)

    def free(self) -> None:
        """Let the tensor be what is on the host, with what was written to it, and give the memory on the device back."""
        self._take_changes()
        self.tensor.data = self.host
        if not self.place.untyped_storage().resizable():  # numpy sees this memory, which goes when nothing sees it any more
            self.place = _make_place(self.host, self.place.device)
        self.place.untyped_storage().resize_(0)

    def _take_changes(self) -> None:
        """Copy to the host what others wrote on the device, or put in the place of the values (`module.to`)."""
        now = self.tensor.data_ptr()
        written = now == self.place.data_ptr() and self.version != version(self.tensor)
        if written or now not in (self.host.data_ptr(), self.place.data_ptr()):
            self.host.copy_(self.tensor.data)


@dataclass(eq=False)
class BlockSwap:
    """Blocks of a model of which at most `limit` have their weights on `device` at any time; the others' are on the host.

    `blocks` are the weights by the names of regions, in the order they run. What computes a block calls `enter` before: it
    fetches the weights, and those of the next block beside the computation, and gives the memory of the block back that is
    wanted last: forward, then backward, then forward again. The parameters stay the same objects with the same values,
    wherever they are. With a device that is the host itself all is done as elsewhere, and saves nothing. Threads take turns, a
    block each; while one of them has a result whose backward pass may follow, the others are refused.
    """

    blocks: dict[str, list[SwappedWeight]]
    limit: int
    device: torch.device
    patterns: Sequence[str] | None = None  # of regions, as the user gave them
    fetches: int = 0  # how often a block was fetched
    most_bytes: int = 0  # the most that these weights took on the device
    present: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names = list(self.blocks)
        self.weights = [self.blocks[name] for name in self.names]
        self.block_of = {id(each.tensor): number for number, block in enumerate(self.weights) for each in block}
        stream: Any = torch.cuda.Stream
        self.stream: torch.cuda.Stream | None = stream(self.device) if self.device.type == "cuda" else None
        self.events: dict[int, torch.cuda.Event] = {}
        self.lock = threading.RLock()
        self.waiting: weakref.ref[GradientPass] | None = None

    # --- what is where

    @property
    def bytes_on_device(self) -> int:
        """Bytes that the weights of the blocks take on the device now."""
        return sum(each.place.untyped_storage().nbytes() for block in self.weights for each in block)

    @property
    def bytes_of_blocks(self) -> list[int]:
        """Bytes of the weights of each block."""
        return [sum(each.host.nbytes for each in block) for block in self.weights]

    @torch.no_grad()
    def enter(self, needed: Sequence[int], backward: bool = False) -> None:
        """Have blocks on the device, and begin to fetch the next one.

        Args:
            needed: The numbers of the blocks that are computed now, most often one.
            backward: Whether that is in a backward pass, in which the next one is the one before.
        """
        ahead = min(needed) - 1 if backward else max(needed) + 1
        wanted = [*needed, *([ahead] if len(needed) < self.limit and 0 <= ahead < len(self.weights) else [])]
        turns = not backward and torch.is_grad_enabled()
        for block in wanted:
            if block not in self.present:
                if len(self.present) >= self.limit:
                    others = [other for other in self.present if other not in wanted]
                    self._free(max(others, key=partial(self._distance, max(needed), backward, turns)))
                self._fetch(block)
        for block in needed:
            self._wait(block)

    def _distance(self, at: int, backward: bool, turns: bool, block: int) -> int:
        """Return in how many blocks one is wanted again; `turns` is whether a backward pass follows."""
        count = len(self.weights)
        if backward:
            return at - block if block < at else at + block + 1
        if block > at:
            return block - at
        return 2 * count - at - block - 1 if turns else count + block - at

    def _fetch(self, block: int) -> None:
        weights = self.weights[block]
        self.present.append(block)
        try:
            for each in weights:
                each.allocate()
            if self.stream is None:
                for each in weights:
                    each.fill()
            else:  # beside what the device computes, and after what used this memory before
                self.stream.wait_stream(torch.cuda.current_stream(self.device))
                with torch.cuda.stream(self.stream):
                    for each in weights:
                        each.fill()
                self.events[block] = self.stream.record_event()
            for each in weights:
                each.use()
        except BaseException:  # no memory, or an interrupt: the values are on the host
            if self.stream is not None:  # a copy that has no event yet must not end in memory that was given back
                torch.cuda.current_stream(self.device).wait_stream(self.stream)
            self._free(block)
            raise
        self.fetches += 1
        self.most_bytes = max(self.most_bytes, sum(each.bytes for other in self.present for each in self.weights[other]))

    def _wait(self, block: int) -> None:
        """Let what is computed from here on wait for the values of a block."""
        if (event := self.events.pop(block, None)) is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _free(self, block: int) -> None:
        self._wait(block)
        self.present.remove(block)
        for each in self.weights[block]:
            each.free()

    @torch.no_grad()
    def release(self) -> None:
        """Give all memory on the device back: the weights are on the host, and may be written there."""
        with self.lock:
            for block in [*self.present]:
                self._free(block)
            if self.stream is not None:
                self.stream.synchronize()  # else a copy may still read the host

    @torch.no_grad()
    def keep(self, tensor: Tensor) -> None:
        """Put a weight on the device for good, and swap it no more."""
        with self.lock:
            number = self.block_of.pop(id(tensor))
            (kept,) = (each for each in self.weights[number] if each.tensor is tensor)
            self._wait(number)
            kept.free()
            self.weights[number].remove(kept)
            tensor.data = kept.host.to(self.device)

    def place(self, module: nn.Module) -> None:
        """Move a module to the device, but for the weights of blocks.

        Args:
            module: The module.
        """
        if not self._list_blocks(module):
            module.to(self.device)
            return
        for p in module._parameters.values():
            if p is not None and not any(id(part) in self.block_of for part in _list_parts(p)):
                p.data = p.data.to(self.device)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(self.device)
        for child in module.children():
            self.place(child)

    # --- what calls for them

    def outline(self, gm: TracedModule, *, checkpoint: bool = False) -> TracedModule:
        """Outline a traced module on these weights, the blocks of which come when they are computed, forward and backward.

        Args:
            gm: The module: that of the blocks, a lowered one, or one for another form of call.
            checkpoint: Whether activations are computed again in the backward pass.

        Returns:
            The outlined module. A weight that it reads outside regions is on the device from now on.

        Raises:
            MatchError: It has no regions.
            SpecError: A region of it has more blocks than may be on the device.
        """
        try:
            made = outline(gm, self.names, checkpoint=checkpoint, wrap=self._wrapped)
        except FxplugError:  # another form of call goes through other regions
            found = self.patterns or list_blocks(gm, checkpoint=checkpoint)
            made = outline(gm, found, checkpoint=checkpoint, wrap=self._wrapped)
        for tensor in _list_outside(made, _list_units(made)):
            if id(tensor) in self.block_of:
                self.keep(tensor)
        return made

    def _wrapped(self, region: nn.Module) -> nn.Module:
        needed = self._list_blocks(region)
        if len(needed) > self.limit:
            finding = f"a region of another form of call has {len(needed)} blocks, and {self.limit} may be on the device"
            raise SpecError(f"{finding}: swap fewer")
        return SwappedRegion(region, self, needed) if needed else region

    @contextmanager
    def fetching(self, *models: nn.Module) -> Iterator[None]:
        """Let the model itself, of whose trace the blocks are, fetch them inside the context, without gradients.

        Args:
            *models: The model, on the same parameters; others do as ever.
        """
        paths = [re.sub(r"@\d+", "", name) for name in self.names]
        found = [part for model in models for path in paths if (part := find_module(model, path)) is not None]
        with ExitStack() as stack:
            for part in dict.fromkeys(found):
                if needed := self._list_blocks(part):
                    stack.enter_context(replace_forward(part, partial(self._call, needed, part.forward)))
            yield

    def _call(self, needed: Sequence[int], forward: Any, *args: Any, **kwargs: Any) -> Any:
        with self.entered(needed):
            return forward(*args, **kwargs)

    @contextmanager
    def entered(self, needed: Sequence[int]) -> Iterator[None]:
        """Have blocks on the device inside the context, which one thread is in at a time.

        Args:
            needed: The numbers of the blocks that are computed.

        Yields:
            Nothing.

        Raises:
            FxplugError: Another thread has a result whose backward pass may follow, for which these blocks must stay.
        """
        with self.lock:
            other = self._find_pass()
            if other is not None and other.thread != threading.get_ident():
                finding = "another thread has called it with gradients, and its backward pass needs the blocks that it has left"
                raise FxplugError(f"swapped blocks are called from several threads: {finding}; wait until that thread is done "
                                  "and its loss is deleted, or do not swap blocks")  # fmt: skip
            self.enter(needed)
            yield

    def begin_pass(self) -> GradientPass:
        """Return what knows that a backward pass may follow, as long as it is held: by the nodes of the results."""
        found = self._find_pass()
        if found is None:
            found = GradientPass(self, threading.get_ident())
            self.waiting = weakref.ref(found)
        return found

    def _find_pass(self) -> GradientPass | None:
        return None if self.waiting is None else self.waiting()

    def _list_blocks(self, module: nn.Module) -> list[int]:
        """Return the numbers of the blocks that a module has weights of."""
        parts = [part for p in module.parameters() for part in _list_parts(p)]
        return sorted({self.block_of[id(part)] for part in parts if id(part) in self.block_of})


@dataclass(eq=False)
class GradientPass:
    """Regions of a swap that a `thread` has computed with gradients: it lives as long as the graph of any result of these."""

    swap: BlockSwap
    thread: int

    def enter_backward(self, needed: Sequence[int], gradients: Any) -> None:
        """Have blocks on the device before their backward pass, and begin to fetch the one before.

        Args:
            needed: The numbers of the blocks.
            gradients: Those of their results, which stay.

        Raises:
            FxplugError: The gradients are to have gradients themselves.
        """
        if torch.is_grad_enabled():
            raise FxplugError(
                "gradients of gradients (create_graph=True) need the weights of all blocks at once: do not swap blocks"
            )
        with self.swap.lock:
            self.swap.enter(needed, backward=True)


class SwappedRegion(nn.Module):
    """A region whose weights a swap has: they are on the device when it computes, forward and backward."""

    def __init__(self, region: nn.Module, swap: BlockSwap, needed: Sequence[int]) -> None:
        super().__init__()
        self.region, self.swap, self.needed = region, swap, needed
        self.training = region.training

    def forward(self, *args: Any) -> Any:
        with self.swap.entered(self.needed):
            weights = [each for block in self.needed for each in self.swap.weights[block]]
            memory = {memory_id(each.place.untyped_storage()) for each in weights}
            result = map_leaves(  # a view of a weight leaves as a copy
                self.region(*args),
                lambda x, _: x.clone() if isinstance(x, Tensor) and memory_id(x.untyped_storage()) in memory else x,
            )
            given = [x.grad_fn for x in list_leaves(args) if isinstance(x, Tensor)]
            nodes = [x.grad_fn for x in list_leaves(result) if isinstance(x, Tensor) and x.grad_fn is not None]
            for node in dict.fromkeys(node for node in nodes if node not in given):
                node.register_prehook(partial(self.swap.begin_pass().enter_backward, self.needed))
        return result


def plan_swap(
    gm: TracedModule,
    count: int,
    device: torch.device | str,
    regions: Sequence[str] | None = None,
    *,
    checkpoint: bool = False,
) -> BlockSwap:
    """Put the frozen weights of a module's repeated regions on the host, to be fetched when they are computed.

    Parameters that train, buffers, and weights that are read outside regions or by several of them stay where they are.

    Args:
        gm: The module, with `requires_grad` of all parameters as it will be.
        count: How many regions have their weights on the host at any time.
        device: Where the regions are computed.
        regions: Patterns of regions, as `outline` takes them; None takes the outermost repeated ones.
        checkpoint: Whether activations will be computed again in the backward pass.

    Returns:
        The blocks, all of them on the host.

    Raises:
        MatchError: The module has no repeated regions.
        SpecError: It has not so many, or none of their weights can be on the host.
    """
    made = outline(gm, regions or list_blocks(gm, checkpoint=checkpoint), checkpoint=checkpoint)
    names, units = list(made.meta["regions"]), _list_units(made)
    if not 0 < count < len(names):
        finding = f"is {count}, and the model has {len(names)} repeated regions ({names[0]} to {names[-1]}), of which one"
        raise SpecError(f"{finding} is computed at a time: take from 1 to {len(names) - 1}")
    found = [[part for module in unit.modules() for part in _list_frozen(module)] for unit in units]
    uses: dict[int, set[int]] = {}
    for number, block in enumerate(found):
        for tensor in block:
            uses.setdefault(memory_id(tensor.untyped_storage()), set()).add(number)
    frozen = {id(tensor) for block in found for tensor in block}
    others = [part for unit in units for t in (*unit.parameters(), *unit.buffers()) for part in _list_parts(t)]
    fixed = [*_list_outside(made, units), *(tensor for tensor in others if id(tensor) not in frozen)]
    taken = {memory_id(tensor.untyped_storage()) for tensor in fixed}
    blocks: dict[str, list[SwappedWeight]] = {name: [] for name in names}
    device = torch.device(device)
    with torch.no_grad():
        for name, block in zip(names, found, strict=True):
            for tensor in {id(tensor): tensor for tensor in block}.values():
                memory = memory_id(tensor.untyped_storage())
                if len(uses[memory]) == 1 and memory not in taken:
                    blocks[name].append(SwappedWeight.of(tensor, device))
    if not any(blocks.values()):
        raise SpecError(
            f"has nothing to swap: the {len(names)} repeated regions ({names[0]} to {names[-1]}) have no frozen weights of "
            "their own"
        )
    return BlockSwap(blocks, len(names) - count, device, regions)


def _list_units(outlined: TracedModule) -> list[nn.Module]:
    check_outlined(outlined, "swap")
    return [outlined.get_submodule(path) for path in outlined.meta["regions"].values()]


def _list_outside(outlined: nn.Module, units: Sequence[nn.Module]) -> list[Tensor]:
    """Return the plain tensors of a module outside its regions."""
    inside = {id(unit) for unit in units}
    todo, found = [outlined], []
    while todo:
        module = todo.pop()
        found += [t for table in (module._parameters, module._buffers) for t in table.values() if t is not None]
        todo += [child for child in module.children() if id(child) not in inside]
    return [part for tensor in found for part in _list_parts(tensor)]


def _list_parts(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a parameter is made of, at any depth; of a plain one, or one of bitsandbytes, itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [part for inner in get_plain_tensors(tensor) for part in ([inner] if inner is tensor else _list_parts(inner))]


def _list_frozen(module: nn.Module) -> list[Tensor]:
    """Return the plain frozen tensors of a module's own parameters that can be elsewhere for a while."""
    if is_own_layer(module) and "state" in vars(module):  # 8 bit layers of bitsandbytes hold views of their weight
        return []
    every = [p for p in module._parameters.values() if p is not None and not p.requires_grad]
    return [part for p in every for part in _list_parts(p) if _can_move(part)]


def _can_move(tensor: Tensor) -> bool:
    """Return whether a tensor has memory of its own that a copy elsewhere is laid out like."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_inference() or not tensor.numel():
        return False
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _make_place(host: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device that is laid out like one on the host; on a CPU it begins as far from an aligned address."""
    begins = host.data_ptr() % ALIGNED if device.type == "cpu" else 0
    offset = begins // host.itemsize
    made = torch.empty(host.numel() + offset, dtype=host.dtype, device=device)
    return made.as_strided(host.shape, host.stride(), offset)


def _pin(host: Tensor) -> Tensor:
    """Return a tensor in memory that a device can read beside the host; itself where the system gives no such memory."""
    try:
        return host.pin_memory()
    except RuntimeError:
        return host
