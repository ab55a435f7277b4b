"""Plugins: what the specification promises, EveryDream2trainer's own document, and everything that may be wrong with one."""

from __future__ import annotations

import logging
import pickle
import sys

import pytest
import torch
from PIL import Image
from sweeps import sweep
from torch.utils.data import DataLoader, Dataset

from fxplug.compat.everydream import BasePlugin
from fxplug.core.errors import SpecError, TrainError
from fxplug.core.spec.train_section import Train
from fxplug.training.plugin_hooks import OFFERED
from fxplug.training.plugins import Plugins

COMMON = {"project_name": "run", "log_folder": "out/run", "data_root": "photos", "ed_state": None}
# the quick example of its document, word for word
DOCUMENT = '''
from plugins.plugins import BasePlugin

class MyPlugin(BasePlugin):
    def on_epoch_end(self, **kwargs):
        print(f"hello world, this is a plugin at the end of epoch number: {kwargs['epoch']}")
'''
# what its document says that plugins are for, as its users write them
EXAMPLE = '''
import logging

from plugins.plugins import BasePlugin


class ExampleLoggingPlugin(BasePlugin):
    def __init__(self):
        self.seen = []

    def on_epoch_start(self, **kwargs):
        for k, v in kwargs.items():
            logging.info(f"  {k}: {v}")
        self.seen.append(kwargs)

    def on_step_end(self, **kwargs):
        self.seen.append(kwargs)


class ShuffleTags(BasePlugin):
    def transform_caption(self, caption:str):
        first, *tags = caption.split(", ")
        return ", ".join([first, *reversed(tags)])


class Gamma(BasePlugin):
    def transform_pil_image(self, img):
        return (255 * (img / 255) ** 0.5).round().astype("uint8")
'''


def data(hook, **given):
    """All that a hook gets: its own data as numbers, what is common, and `given`."""
    own = {name: 0 for name in OFFERED[hook] if name not in COMMON}
    return {**own, **COMMON, **given}


def run(plugins, epochs=2, steps=3):
    """The hooks in the order of a training run."""
    plugins.common = COMMON
    step = 0
    for hook in ("on_model_load", "on_training_start"):
        plugins.call(hook, **data(hook))
    for epoch in range(epochs):
        plugins.call("on_epoch_start", **data("on_epoch_start", epoch=epoch, global_step=step, epoch_length=steps))
        for local in range(steps):
            for hook in ("on_step_start", "on_backpropagation", "on_step_end"):
                here = {"epoch": epoch, "global_step": step} | ({} if hook == "on_backpropagation" else {"local_step": local})
                plugins.call(hook, **data(hook, **here))
            step += 1
        plugins.call("on_epoch_end", **data("on_epoch_end", epoch=epoch, global_step=step))
    plugins.call("on_model_save", **data("on_model_save", epoch=epochs - 1, global_step=step))
    plugins.call("on_training_end", **data("on_training_end", global_step=step))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with EveryDream2trainer's `plugins` in it."""
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "my_plugin.py").write_text(DOCUMENT)
    (tmp_path / "plugins" / "example_plugin.py").write_text(EXAMPLE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def of(plugins, index=0):
    return list(plugins._plugins.values())[index]


# EveryDream2trainer's document


def test_the_list_of_train_json(folder):
    listed = Train(task="classify", epochs=1, plugins=["plugins.example_plugin.ExampleLoggingPlugin"]).plugins
    plugins = Plugins(listed)
    run(plugins, epochs=1, steps=1)
    epoch, step = of(plugins).seen
    # what train.py of EveryDream2trainer gives to these hooks, under its names
    assert {"epoch", "global_step", "epoch_length", "project_name", "log_folder", "data_root"} <= epoch.keys()
    assert {"epoch", "global_step", "local_step", "project_name", "log_folder", "data_root", "batch"} <= step.keys()
    assert "batch" not in epoch  # "should not receive batch data or anything specific to a step"
    assert epoch["epoch_length"] == 1 and epoch["project_name"] == "run"


def test_plugins_chain_in_the_written_order(folder):
    class Upper:
        def transform_caption(self, text):  # called with one value: the name of the argument is the plugin's own
            return text.upper()

    class AddMore:
        def transform_caption(self, caption, more=", More"):
            return caption + more

    tags = "plugins.example_plugin.ShuffleTags"
    assert Plugins([tags]).transform_caption("cat, a, b") == "cat, b, a"
    assert Plugins([tags, Upper, AddMore]).transform_caption("cat, a, b") == "CAT, B, A, More"
    assert Plugins([AddMore, Upper, tags]).transform_caption("cat, a, b") == "CAT, MORE, B, A"
    assert Plugins([]).transform_caption("cat") == "cat"
    assert Plugins([Upper]).transforms and not Plugins([type("Empty", (BasePlugin,), {})]).transforms


def test_an_image_plugin(folder):
    image = Image.new("RGB", (4, 4), (64, 64, 64))
    assert Plugins(["plugins.example_plugin.Gamma"]).transform_pil_image(image).getpixel((0, 0)) == (128, 128, 128)


def test_calls_come_in_the_written_order():
    called = []

    def plugin(name):
        return type(name, (), {"on_step_start": lambda self, epoch: called.append((name, epoch))})

    plugins = Plugins([plugin("A"), plugin("B"), plugin("C")])
    plugins.call("on_step_start", **data("on_step_start", epoch=4))
    assert called == [("A", 4), ("B", 4), ("C", 4)]


def test_a_plugin_takes_any_part_of_the_data():
    seen = {}

    class Some:
        def on_step_end(self, loss, *, lr, epoch=7, **rest):
            seen.update(loss=loss, lr=lr, epoch=epoch, rest=rest)

        @staticmethod
        def on_epoch_end(epoch):
            seen.update(ended=epoch)

        def on_training_end(self):
            seen.update(over=True)

    run(Plugins([Some]), epochs=2, steps=1)
    assert seen["epoch"] == 1 and seen["ended"] == 1 and seen["over"]
    assert seen["rest"].keys() == set(OFFERED["on_step_end"]) - {"loss", "lr", "epoch"}


# where modules are found


def test_beside_the_configuration_comes_before_the_working_folder(folder):
    other = folder / "configs"
    (other / "plugins").mkdir(parents=True)
    (other / "plugins" / "my_plugin.py").write_text(DOCUMENT.replace("epoch number", "beside"))
    (other / "alone.py").write_text(DOCUMENT)
    before = list(sys.path)
    near = Plugins(["plugins.my_plugin.MyPlugin", "plugins.example_plugin.Gamma", "alone:MyPlugin"], base=other)
    far = Plugins(["plugins.my_plugin.MyPlugin"])
    assert sys.path == before
    assert type(of(near)) is not type(of(far))
    files = [sys.modules.get(type(of(plugins)).__module__).__file__ for plugins in (far,)]
    assert files == [str(folder / "plugins" / "my_plugin.py")]
    assert near.summary(1) == []


def test_two_configurations_in_one_process_have_their_own_modules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = []
    for name in ("one", "two"):
        (tmp_path / name / "plugins").mkdir(parents=True)
        (tmp_path / name / "words.py").write_text(f"WORD = '{name}'")
        (tmp_path / name / "plugins" / "mine.py").write_text(
            "from plugins.plugins import BasePlugin\nfrom words import WORD\n"
            "class Mine(BasePlugin):\n    def transform_caption(self, caption):\n        return f'{WORD} {caption}'\n"
        )
        loaded.append(Plugins(["plugins.mine.Mine"], base=tmp_path / name))
    assert [p.transform_caption("cat") for p in loaded] == ["one cat", "two cat"]
    assert issubclass(type(of(loaded[0])), BasePlugin)
    for plugins, word in zip(loaded, ("one", "two"), strict=True):  # either can be sent to a worker
        assert pickle.loads(pickle.dumps(plugins)).transform_caption("cat") == f"{word} cat"


def test_a_plugins_file_of_the_users_own_wins(folder):
    (folder / "plugins" / "plugins.py").write_text(
        "class BasePlugin:\n    own = True\n    def on_epoch_end(self, **kwargs):\n        pass\n"
    )
    assert of(Plugins(["plugins.my_plugin.MyPlugin"])).own


def test_a_plugins_package_with_an_init_file(folder):
    (folder / "plugins" / "__init__.py").write_text("")
    assert Plugins(["plugins.example_plugin.ShuffleTags"]).transform_caption("a, b, c") == "a, c, b"


def test_one_module_is_imported_once(folder):
    first, second = (Plugins(["plugins.my_plugin.MyPlugin"]) for _ in range(2))
    assert type(of(first)) is type(of(second))


# what may be wrong


def error(spec, **more):
    with pytest.raises(SpecError) as info:
        Plugins(["plugins.my_plugin.MyPlugin", spec], **more)
    assert info.value.path[:3] == ("train", "plugins", 1)
    return info.value.finding


def test_paths_that_do_not_import(folder):
    (folder / "plugins" / "broken.py").write_text("import nothing_of_this_name")
    (folder / "plugins" / "wrong.py").write_text("1 / 0")
    text = error("plugins.exmple_plugin.Gamma")
    assert "no module named 'plugins.exmple_plugin' (did you mean 'plugins.example_plugin'?)" in text and str(folder) in text
    assert "has no attribute 'Gama' (did you mean 'Gamma'?)" in error("plugins.example_plugin.Gama")
    module = "plugins.example_plugin"
    assert f"{module} is a module, not a class; write '{module}.Gamma'" in error(module)
    assert "'nothing_of_this_name'" in error("plugins.broken.Any")
    assert "ZeroDivisionError" in error("plugins.wrong.Any")
    assert "must look like 'package.module.Class', not 'Gamma'" in error("Gamma")
    assert "must look like" in error("plugins/example_plugin.py")
    assert "must be an import path" in error(["a"])
    assert "is a function, not a class" in error("json.dumps")


def test_classes_that_cannot_be_made():
    class Options:
        def __init__(self, color, size=1):
            if color == "none":
                raise ValueError("no such colour")

        def on_epoch_end(self):
            pass

    def finding(spec):
        with pytest.raises(SpecError) as info:
            Plugins([spec])
        return info.value.finding

    assert finding((Options, {"colour": 1})) == "Options takes no option 'colour' (did you mean 'color'?); it takes color, size"
    assert finding(Options) == "Options needs the option 'color'"
    assert finding({Options: {"color": "none"}}) == "making Options failed: ValueError: no such colour"
    assert Plugins([{Options: {"color": "red"}}, Options("blue")])


def made(**methods):
    return type("Mine", (), methods)


def finding(**methods):
    with pytest.raises(SpecError) as info:
        Plugins([made(**methods)])
    return info.value.finding


def test_hooks_that_do_not_exist():
    text = finding(on_epoch_strat=lambda self, **kwargs: None)
    assert "there is no hook 'on_epoch_strat' (did you mean 'on_epoch_start'?)" in text
    assert "there is no hook 'transform_captions'" in finding(transform_captions=lambda self, caption: caption)
    assert "Mine is no plugin: it has none of the methods on_model_load" in finding(run=lambda self: None)
    with pytest.raises(SpecError, match="no hook 'on_step_stop'"):
        Plugins([type("Mine", (BasePlugin,), {"on_step_stop": lambda self, **kwargs: None})])
    assert Plugins([type("Empty", (BasePlugin,), {}), made(on_gpu=True, on_epoch_end=lambda self: None)])  # a value is no hook


def test_arguments_that_a_hook_does_not_offer():
    text = finding(on_epoch_end=lambda self, epcoh: None)
    assert "Mine.on_epoch_end: the hook has no 'epcoh' (did you mean 'epoch'?); it offers epoch, global_step, loss" in text
    assert "the hook has no 'batch'" in finding(on_epoch_end=lambda self, batch=None, **kwargs: None)
    assert "by position" in finding(on_epoch_end=lambda self, *args: None)
    assert "must take one argument" in finding(transform_caption=lambda self, caption, image: caption)
    assert "must take one argument" in finding(transform_caption=lambda self: "")


def test_hooks_that_would_never_run():
    async def later(self, **kwargs):
        pass

    def generator(self, **kwargs):
        yield

    assert "generator or async" in finding(on_step_end=later)
    assert "generator or async" in finding(on_step_end=generator)


def fails(self, **kwargs):
    raise RuntimeError("out of ink")


def test_a_plugin_that_raises_lets_the_run_go_on():
    calls, notes = [], []
    plugins = Plugins([made(on_step_end=fails), made(on_step_end=lambda self: calls.append(1))], on_error="continue")
    plugins.note = notes.append
    run(plugins)
    text = "plugin Mine raised in on_step_end (epoch 0, global_step 0): RuntimeError: out of ink; the run goes on"
    assert notes == [text] and len(calls) == 6
    assert "plugin Mine raised 6 times in 6 calls of on_step_end" in plugins.summary(100.0)


def test_data_that_a_hook_does_not_get():
    plugin = made(on_epoch_end=lambda self, **kwargs: kwargs["batch"])
    with pytest.raises(TrainError, match="KeyError: 'batch'; the hook offers epoch, global_step, loss"):
        run(Plugins([plugin]))


@pytest.mark.parametrize("given", [None, 3], ids=str)
def test_a_transform_that_returns_something_else(given):
    plugin = made(transform_caption=lambda self, caption: given)
    with pytest.raises(TrainError, match="plugin Mine raised in transform_caption: TypeError: it returned .* return a str"):
        Plugins([plugin]).transform_caption("cat")
    plugins = Plugins([plugin], on_error="continue")
    plugins.note = str
    assert plugins.transform_caption("cat") == "cat"


def test_a_call_without_its_data_is_a_mistake_of_the_caller():
    with pytest.raises(TypeError, match="its data are"):
        Plugins([made(on_epoch_end=lambda self: None)]).call("on_epoch_end", epoch=1)


# time


def test_slow_plugins_are_named_with_their_share(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("fxplug.training.plugins.perf_counter", lambda: clock[0])

    def takes_a_moment(self):
        clock[0] += 0.02

    plugins = Plugins([made(on_step_end=takes_a_moment), type("Fast", (), {"on_step_end": lambda self: None})])
    run(plugins)
    assert plugins.summary(1.0) == ["slow plugin: Mine.on_step_end took 0.12 s, 12.0% of the run (6 calls)"]
    assert plugins.summary(1000.0) == []


def test_one_long_call_is_named():
    plugins = Plugins([made(on_step_end=lambda self: None)])
    plugins._tally[0] += torch.tensor([0.7, 1, 0.7, 0])
    assert "the longest 0.7 s where 0.5 s is much" in plugins.summary(1e6)[0]


# worker processes


class Captions(Dataset):
    def __init__(self, plugins):
        self.plugins = plugins

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.plugins.transform_caption(f"cat {index}, a, b")


@sweep("method", ["spawn", "fork"], "fork")
def test_plugins_in_worker_processes(folder, method):
    with open(folder / "log", "w") as file:
        keeps = made(on_epoch_end=lambda self: None)
        plugins = Plugins(["plugins.example_plugin.ShuffleTags", keeps])
        of(plugins, 1).file = file  # does not transform, so it need not be sent
        loader = DataLoader(Captions(plugins), num_workers=1, batch_size=2, multiprocessing_context=method)
        assert [caption for batch in loader for caption in batch] == [f"cat {index}, b, a" for index in range(4)]
    (line,) = plugins.summary(0.0)  # counted in the worker
    assert line.startswith("slow plugin: ShuffleTags.transform_caption took ") and "(4 calls" in line


def test_a_plugin_that_cannot_be_sent_to_a_worker():
    with pytest.raises(TrainError, match="plugin Mine cannot be sent to worker processes.*set 'workers' of the data to 0"):
        pickle.dumps(Plugins([made(transform_caption=lambda self, caption: caption)]))


def test_notes_go_to_the_log_by_default(caplog):
    with caplog.at_level(logging.WARNING):
        run(Plugins([made(on_step_end=fails)], on_error="continue"))
    assert "out of ink" in caplog.text
