"""Block swap: weights of repeated regions on the host, fetched when they compute. The CPU stands for the device: each weight
has memory there while its block may compute, and none else."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import tiny_pipelines as tiny
import torch
from runs import config, notes, run
from test_pipeline_denoise import rewritten, trainer_of
from torch import nn

import fxplug
from fxplug.core.errors import FxplugError, MatchError, SpecError
from fxplug.lowerings.regions.swapping import plan_swap
from fxplug.training.adapter_output import prove_adapter
from fxplug.training.distributed import set_mode
from fxplug.training.swapped_blocks import outline_swapped
from fxplug.training.tasks.pipeline_denoise import PipelineDenoise

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return x + self.drop(self.two(torch.tanh(self.one(self.norm(x)))))


class Net(nn.Module):
    """Takes one tensor, or a list of them, which are two forms of call."""

    def __init__(self, depth=6, block=Block):
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(block() for _ in range(depth))

    def forward(self, x):
        x = self.first(torch.cat(x) if isinstance(x, list) else x)
        for block in self.blocks:
            x = block(x)
        return x.relu_()


def lora(net=None, several=False):
    torch.manual_seed(0)
    net = net or Net()
    x = torch.randn(4, WIDTH)
    gm = fxplug.trace(net, (x,))
    new = fxplug.apply(fxplug.variants(gm, net) if several else gm, fxplug.load_pass("lora", at="blocks.*.one", rank=2))
    for name, parameter in new.named_parameters():
        parameter.requires_grad_("lora" in name)
        if name.endswith("up.weight"):
            nn.init.normal_(parameter)
    return new, x


def step(run, module, x, **options):
    module.zero_grad()
    torch.manual_seed(7)
    result = run(x)
    result.square().sum().backward(**options)
    return result, {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def watched(swap, made):
    """What is on the device at each call of a region, as (its number, bytes, numbers of blocks)."""
    rows = []
    for number, path in enumerate(made.meta["regions"].values()):
        unit = made.get_submodule(path).region
        unit.register_forward_pre_hook(partial(lambda n, *_: rows.append((n, swap.bytes_on_device, {*swap.present})), number))
    return rows


def same(found, expected):
    assert torch.equal(found[0], expected[0]) and found[1].keys() == expected[1].keys() and found[1]
    assert all(torch.equal(found[1][name], grad) for name, grad in expected[1].items())


@pytest.mark.parametrize("count", [1, 3, 4, 5])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_results_and_gradients_are_equal_and_few_blocks_are_on_the_device(count, checkpoint):
    expected_module, x = lora()
    expected = [step(expected_module, expected_module, x) for _ in range(2)]
    module, x = lora()
    before = {name: t.clone() for name, t in module.state_dict().items() if "norm" not in name}
    swap = plan_swap(module, count, "cpu", checkpoint=checkpoint)
    made = swap.outline(module, checkpoint=checkpoint)
    rows, limit, each = watched(swap, made), 6 - count, max(swap.bytes_of_blocks)
    assert swap.bytes_on_device == 0 and each > 4 * WIDTH * WIDTH * 4
    backward = []
    for unit in map(made.get_submodule, made.meta["regions"].values()):
        unit.register_forward_hook(
            lambda m, a, out: out.grad_fn.register_prehook(lambda g: backward.append((swap.bytes_on_device, {*swap.present})))
            and None
        )
    same(step(made, module, x), expected[0])
    first = swap.fetches
    same(step(made, module, x), expected[1])
    assert swap.fetches - first == 2 * count  # those that are wanted next have stayed
    slack = 64 * len(list(module.parameters()))  # weights begin where they did
    assert len(rows) == 12 and len(backward) == 12
    for n, size, present in rows:
        assert n in present and len(present) <= limit and size <= limit * each + slack
        assert limit < 2 or n == 5 or n + 1 in present  # fetched ahead
    for (size, present), n in zip(backward, [5, 4, 3, 2, 1, 0] * 2, strict=True):
        assert n in present and len(present) <= limit and size <= limit * each + slack
        assert limit < 2 or n == 0 or n - 1 in present
    assert 0 < swap.most_bytes <= limit * each + slack
    swap.release()
    assert swap.bytes_on_device == 0
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items() if name in before)
    assert {id(p) for p in made.parameters()} == {id(p) for p in module.parameters()}


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_several_forms_of_call_share_the_weights(mode):
    plain, x = lora(several=True)
    module, _ = lora(several=True)
    swap = plan_swap(module, 4, "cpu")
    run, shown = outline_swapped(module, swap), outline_swapped(module, swap)
    for call in (x, [x, x + 1], [x], x):  # the second and third have no graph yet
        for each in (plain, module):
            set_mode(run if each is module else plain, each, mode)
        same(step(run, module, call), step(plain, plain, call))
        assert len(swap.present) <= 2
        plain.eval(), shown.eval()
        with torch.no_grad():
            assert torch.equal(shown(call), plain(call))
    assert len(run.forms) == 3


def test_two_forwards_before_a_backward_and_a_backward_again():
    plain, x = lora()
    module, _ = lora()
    made = plan_swap(module, 5, "cpu").outline(module)

    def both(run, of):
        of.zero_grad()
        torch.manual_seed(3)
        a, b = run(x), run(x + 1)
        with torch.no_grad():
            run(x - 1)
        loss = (a * b).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss, {name: p.grad for name, p in of.named_parameters() if p.grad is not None}

    same(both(made, module), both(plain, plain))


def test_threads_take_turns_and_are_refused_where_a_backward_pass_may_follow():
    module, x = lora()
    swap = plan_swap(module, 5, "cpu")
    made = swap.outline(module).eval()  # without dropout
    with torch.no_grad():
        expected = made(x)
    start, found = threading.Barrier(4), []

    def draw():
        start.wait()
        for _ in range(20):
            with torch.no_grad():
                found.append(torch.equal(made(x), expected))

    def call_in_thread():
        with torch.no_grad(), ThreadPoolExecutor(1) as pool:
            return pool.submit(made, x).result()

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80
    loss = made(x).sum()
    with pytest.raises(FxplugError, match="called from several threads: another thread has called it with gradients"):
        call_in_thread()
    loss.backward()
    del loss
    assert torch.equal(call_in_thread(), expected)


def test_sampling_fetches_only_what_there_is_no_room_for():
    module, x = lora()
    swap = plan_swap(module, 3, "cpu")
    made = swap.outline(module).eval()
    with torch.no_grad():
        made(x)
        before = swap.fetches
        made(x)
    assert swap.fetches - before <= 4


def test_what_trains_and_what_is_read_elsewhere_stays_on_the_device():
    net = Net()
    net.first.weight = net.blocks[1].one.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))  # tied, in one block
    net.blocks[1].one.bias = nn.Parameter(torch.randn(WIDTH))
    net.blocks[1].two = nn.Linear(WIDTH, WIDTH)
    net.blocks[3].two.weight = net.blocks[4].two.weight  # tied between blocks
    x = torch.randn(4, WIDTH)
    module = fxplug.trace(net, (x,))
    trained = {"blocks.0.one.weight", "blocks.2.norm.weight"}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trained)
    module.train()
    expected = step(module, module, x)
    swap = plan_swap(module, 4, "cpu")
    swapped = {id(each.tensor) for block in swap.weights for each in block}
    here = {name for name, p in module.named_parameters(remove_duplicate=False) if id(p) not in swapped}
    assert here == trained | {"first.weight", "first.bias", "blocks.1.one.weight", "blocks.3.two.weight", "blocks.4.two.weight"}
    assert not swapped & {id(b) for b in module.buffers()}
    same(step(swap.outline(module), module, x), expected)


def test_parts_of_one_tensor_are_not_torn():
    net = Net(block=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    whole = torch.randn(2, WIDTH, WIDTH)
    net.blocks[2][0].weight.data, net.blocks[3][0].weight.data = whole[0], whole[1]  # one memory in two blocks
    net.blocks[4][0].weight.data = torch.randn(WIDTH, 2 * WIDTH)[:, ::2]  # gaps
    net.blocks[1][0].weight.data = torch.randn(WIDTH, WIDTH).t()
    net.requires_grad_(False)
    net.blocks[0][0].bias.requires_grad_(True)
    x = torch.randn(4, WIDTH)
    module = fxplug.trace(net, (x,))
    expected = step(module, module, x)
    swap = plan_swap(module, 4, "cpu", ["blocks.*"])
    swapped = {id(each.tensor) for block in swap.weights for each in block}
    left = {name for name, p in module.named_parameters() if id(p) not in swapped and name.endswith("0.weight")}
    assert left == {"blocks.2.0.weight", "blocks.3.0.weight", "blocks.4.0.weight"}
    same(step(swap.outline(module), module, x), expected)


def test_an_error_in_the_middle_loses_nothing():
    plain, x = lora()
    module, _ = lora()
    swap = plan_swap(module, 4, "cpu")
    made = swap.outline(module)
    before = {name: t.clone() for name, t in module.named_parameters()}
    fails = made.get_submodule([*made.meta["regions"].values()][3])
    handle = fails.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made(x)
    handle.remove()
    result = made(x)
    result.grad_fn.next_functions[0][0].register_prehook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        result.sum().backward()
    (weight,) = (each for each in swap.weights[4] if each.tensor is module.blocks[4].one.weight)
    weight.fill = lambda: 1 / 0  # as where the device has no memory
    swap.release()
    with pytest.raises(ZeroDivisionError):
        made(x)
    assert len(swap.present) <= 2
    del weight.fill
    assert all(torch.equal(t, before[name]) for name, t in module.named_parameters())
    module.load_state_dict(plain.state_dict())  # the statistics of norms have moved
    same(step(made, module, x), step(plain, plain, x))


def test_what_others_write_is_kept():
    module, x = lora()
    swap = plan_swap(module, 5, "cpu")
    made = swap.outline(module).eval()
    with torch.no_grad():
        made(x)
        last, first = module.blocks[5].one.weight, module.blocks[0].one.weight
        assert swap.present == [5]
        last.mul_(2), first.mul_(3)
        module.blocks[5].two.weight.data = torch.ones_like(module.blocks[5].two.weight)
        module.blocks[1].two.weight.data = torch.ones_like(module.blocks[1].two.weight)
        last.numpy()  # after which torch changes the size of this memory no more
        wanted = {name: t.clone() for name, t in module.state_dict().items()}
        module.eval()
        expected = module(x)
        assert torch.equal(made(x), expected) and torch.equal(made(x), expected)
    swap.release()
    assert swap.bytes_on_device == 0 and all(torch.equal(t, wanted[name]) for name, t in module.state_dict().items())


class Gate(nn.Module):
    """Gives its weight away beside the result."""

    def __init__(self):
        super().__init__()
        self.one, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return torch.tanh(self.one(x)), self.weight[None]


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Gate() for _ in range(4))

    def forward(self, x):
        gates = []
        for block in self.blocks:
            x, gate = block(x)
            gates.append(gate)
        return x * sum(gates)


def test_a_view_of_a_weight_may_leave_its_region():
    torch.manual_seed(0)
    x = torch.randn(2, WIDTH, requires_grad=True)
    module = fxplug.trace(Gated().requires_grad_(False), (x,))
    swap = plan_swap(module, 3, "cpu", ["blocks.*"])
    made = swap.outline(module)
    grads = [torch.autograd.grad(each(x).square().sum(), x)[0] for each in (made, module)]
    assert torch.equal(*grads)


def test_gradients_of_gradients_are_refused():
    module, x = lora()
    made = plan_swap(module, 3, "cpu").outline(module)
    with pytest.raises(FxplugError, match="do not swap blocks"):
        made(x).sum().backward(create_graph=True)


def test_the_model_itself_fetches_the_weights_inside_a_context():
    net = Net()
    x = torch.randn(4, WIDTH)
    module = fxplug.trace(net, (x,)).requires_grad_(False)
    expected = net.eval()(x)
    swap = plan_swap(module, 4, "cpu")
    with torch.no_grad(), swap.fetching(net, nn.Linear(2, 2)):
        assert torch.equal(net(x), expected)
        assert swap.fetches == 6 and len(swap.present) == 2
    assert not any("forward" in vars(m) for m in net.modules())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "nf4", "bnb nf4", "bnb int8"])
def test_quantised_bases(kind):
    quantised = pytest.importorskip("test_quantised")
    import timm

    def vit():
        torch.manual_seed(0)
        options = {"img_size": 32, "patch_size": 8, "depth": 4, "embed_dim": 128, "num_heads": 4, "num_classes": 5}
        return timm.models.vision_transformer.VisionTransformer(**options).eval().requires_grad_(False)

    ways = {"int8": "int8 of torchao", "nf4": "nf4 of torchao"}
    ways |= {"bnb nf4": "nf4 of bitsandbytes", "bnb int8": "int8 of bitsandbytes"}
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))

    def made():
        gm = fxplug.trace(quantised.WAYS[ways[kind]](vit()), (x,))
        torch.manual_seed(1)
        new = fxplug.apply(gm, fxplug.load_pass("lora", at="blocks.*.attn.qkv", rank=2))
        for name, p in new.named_parameters():
            p.requires_grad_("lora" in name) if p.is_floating_point() else None
            if "lora" in name and name.endswith("up.weight"):
                nn.init.normal_(p)
        return new

    plain, module = made(), made()
    swap = plan_swap(module, 3, "cpu")
    run = swap.outline(module)
    packed = 4 * 128 * 128 * 12 * {"int8": 1, "nf4": 0.5, "bnb nf4": 0.5, "bnb int8": 0}[kind]
    assert sum(swap.bytes_of_blocks) >= packed
    same(step(run, module, x), step(plain, plain, x))
    assert len(swap.present) == 1
    swap.release()
    plain.eval(), module.eval()
    assert torch.equal(module(x), plain(x))


# --- refused


def test_counts_that_do_not_fit():
    module, _ = lora()
    for count in (6, 60, 0):
        with pytest.raises(SpecError, match=f"is {count}, and the model has 6 repeated regions .* take from 1 to 5"):
            plan_swap(module, count, "cpu")
    with pytest.raises(MatchError):
        plan_swap(fxplug.trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (torch.randn(1, 2),)), 1, "cpu")
    module.requires_grad_(True)
    with pytest.raises(SpecError, match="has nothing to swap: the 6 repeated regions .* no frozen weights of their own"):
        plan_swap(module, 1, "cpu")


VIT = {"timm": "vit_tiny_patch16_224", "options": {"img_size": 16, "patch_size": 8, "depth": 4, "num_classes": 10}}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"train__blocks_to_swap": 4}, "blocks_to_swap: is 4, and the model has 4 repeated regions .*: take from 1 to 3"),
        ({"train__blocks_to_swap": -1}, "blocks_to_swap: .*-1"),
        ({"train__blocks_to_swap": 1, "train__compile": True}, "blocks_to_swap: and 'compile' cannot be used together"),
        ({"train__blocks_to_swap": 1, "train__shard": True}, "blocks_to_swap: and 'shard' cannot be used together"),
        ({"train__blocks_to_swap": 1, "train__checkpointing": ["blox.*"]}, "blocks_to_swap: takes the regions of 'checkpo"),
        ({"train__blocks_to_swap": 1, "train__trainable": ["**"]}, "blocks_to_swap: has nothing to swap"),
        ({"train__blocks_to_swap": 1, "model": {**VIT, "options": {**VIT["options"], "depth": 1}}}, "the model has none"),
    ],
)
def test_settings_that_do_not_go_together(changed, said, tmp_path):
    with pytest.raises(SpecError, match=said):
        run(tmp_path, **{"model": VIT, **changed})


# --- runs

TESTED = {"model": VIT, "train__test": {"every": 1}, "train__ema": 0.9,
          "data": {"call": "runs:Digits", "test": {"call": {"runs:Digits": {"train": False, "count": 16}}}}}  # fmt: skip


def numbers(done):
    return [(row["loss"], row["grad_norm"]) for row in done.history]


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"train__checkpointing": ["blocks.*"]}])
def test_a_run_is_equal_to_the_bit_and_what_it_saves_is_whole(tmp_path, how):
    plain = run(tmp_path / "plain", **TESTED, **how)
    done = run(tmp_path / "swapped", **TESTED, **how, train__blocks_to_swap=3)
    assert numbers(done) == numbers(plain) and done.metrics == plain.metrics
    for name in ("module", "ema"):
        saved, expected = (fxplug.load(each.out / name).state_dict() for each in (done, plain))
        assert saved.keys() == expected.keys() and all(torch.equal(saved[key], expected[key]) for key in saved)
    swap = done.trainer.swap
    assert swap.bytes_on_device == 0 and 0 < swap.most_bytes < 1.1 * swap.bytes_of_blocks[0]
    (said,) = (note for note in notes(done.out) if note.startswith("blocks_to_swap"))
    assert "4 regions" in said and "at most 1," in said and "saves nothing" in said
    assert done.trainer.test() == plain.trainer.test()  # and it goes on


@pytest.mark.slow
def test_a_run_is_resumed_to_the_bit_with_and_without_it(tmp_path):
    whole = run(tmp_path / "whole", **TESTED)
    for first, then in ((2, 0), (0, 3), (1, 2)):
        out = tmp_path / f"{first}{then}"
        run(out, **TESTED, train__steps=3, train__blocks_to_swap=first)
        again = run(out, resume=True, **TESTED, train__blocks_to_swap=then)
        assert numbers(again) == numbers(whole) and again.metrics == whole.metrics


@pytest.mark.slow
def test_a_run_that_fails_saves_what_it_has_learnt(tmp_path):
    bad = {"call": {"runs:Digits": {"spoil": 70}}}
    errors = []
    for swapped in (0, 2):
        with pytest.raises(FxplugError) as caught:
            run(tmp_path / str(swapped), **{**TESTED, "data": bad, "train__test": {}}, train__blocks_to_swap=swapped)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    a, b = (fxplug.load(tmp_path / each / "module").state_dict() for each in "02")
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_the_schema_has_it():
    assert fxplug.load_config(config(train__blocks_to_swap=3)).train.blocks_to_swap == 3
    assert fxplug.load_config(config()).train.blocks_to_swap == 0




class Preserving(PipelineDenoise):
    """With a trigger, as the section `data` gives one."""

    def setup(self, module, info):
        super().setup(module, replace(info, trigger="red"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd15", "z_image"])
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_pipeline_trains_draws_and_is_proved_equally(name, tmp_path):
    """Its denoiser is called in several forms, and by the pipeline itself before the steps and after them."""
    drawn = {}
    for count, again in ((0, False), (4, False), (4, True)):
        pipe = tiny.make(name)
        module = rewritten(pipe, tiny.CALLS[name])
        options = {"samples": 1, "sample_steps": 2, "dropout": 0.3, "preserve": "blue"}
        task = Preserving(pipe, tiny.CALLS[name], **options)
        settings = {"blocks_to_swap": count, "checkpointing": again, "log": {"samples": 2}}
        trained = trainer_of(module, task, out=tmp_path / f"{count}{again}", **settings)
        trained.fit()
        pictures = [path.read_bytes() for path in sorted((trained.out / "samples").glob("*")) if path.suffix != ".txt"]
        fxplug.save_adapter(module, trained.out / "adapter", as_="diffusers", part=task.part)
        prove_adapter(trained, task, trained.out / "adapter")
        (proved,) = (note for note in notes(trained.out) if note.startswith("adapter/ in the stock pipeline"))
        drawn[count, again] = numbers(trained), pictures, proved
        if count:
            assert len(trained.swap.names) > count and trained.swap.most_bytes < sum(trained.swap.bytes_of_blocks)
    plain = drawn[0, False]
    assert len(plain[1]) >= 3 and "equal" in plain[2]
    assert drawn[4, False] == plain and drawn[4, True] == plain
