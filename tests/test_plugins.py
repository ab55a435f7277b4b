"""Plugins: what the specification promises, EveryDream2trainer's own document, and everything that may be wrong with one."""

from __future__ import annotations

import pickle
import sys

import pytest
from sweeps import sweep
from torch.utils.data import DataLoader, Dataset

from fxplug.compat.everydream import BasePlugin
from fxplug.compat.everydream.hooks import OFFERED
from fxplug.compat.everydream.plugins import LoadedPlugins
from fxplug.core.errors import SpecError, TrainError

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
from plugins.plugins import BasePlugin


class ShuffleTags(BasePlugin):
    def transform_caption(self, caption:str):
        first, *tags = caption.split(", ")
        return ", ".join([first, *reversed(tags)])


class Gamma(BasePlugin):
    def transform_pil_image(self, img):
        return (255 * (img / 255) ** 0.5).round().astype("uint8")
'''


def call(plugins, *hooks):
    """Some hooks of a run, with numbers as their own data."""
    plugins.common = COMMON
    for hook in hooks:
        plugins.call(hook, **{name: 1 for name in OFFERED[hook] if name not in COMMON})


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


def test_plugins_chain_in_the_written_order(folder):
    class Upper:
        def transform_caption(self, text):  # called with one value: the name of the argument is the plugin's own
            return text.upper()

    class AddMore:
        def transform_caption(self, caption, more=", More"):
            return caption + more

    tags = "plugins.example_plugin.ShuffleTags"
    assert LoadedPlugins([tags]).transform_caption("cat, a, b") == "cat, b, a"
    assert LoadedPlugins([tags, Upper, AddMore]).transform_caption("cat, a, b") == "CAT, B, A, More"
    assert LoadedPlugins([AddMore, Upper, tags]).transform_caption("cat, a, b") == "CAT, MORE, B, A"
    assert LoadedPlugins([]).transform_caption("cat") == "cat"
    assert LoadedPlugins([Upper]).transforms and not LoadedPlugins([type("Empty", (BasePlugin,), {})]).transforms


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

    call(LoadedPlugins([Some]), "on_step_end", "on_epoch_end", "on_training_end")
    assert seen["epoch"] == 1 and seen["ended"] == 1 and seen["over"]
    assert seen["rest"].keys() == set(OFFERED["on_step_end"]) - {"loss", "lr", "epoch"}


# where modules are found


def test_beside_the_configuration_comes_before_the_working_folder(folder):
    other = folder / "configs"
    (other / "plugins").mkdir(parents=True)
    (other / "plugins" / "my_plugin.py").write_text(DOCUMENT.replace("epoch number", "beside"))
    (other / "alone.py").write_text(DOCUMENT)
    before = list(sys.path)
    near = LoadedPlugins(["plugins.my_plugin.MyPlugin", "plugins.example_plugin.Gamma", "alone:MyPlugin"], base=other)
    far = LoadedPlugins(["plugins.my_plugin.MyPlugin"])
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
        loaded.append(LoadedPlugins(["plugins.mine.Mine"], base=tmp_path / name))
    assert [p.transform_caption("cat") for p in loaded] == ["one cat", "two cat"]
    assert issubclass(type(of(loaded[0])), BasePlugin)
    assert pickle.loads(pickle.dumps(loaded[1])).transform_caption("cat") == "two cat"  # and can be sent to a worker


def test_a_plugins_package_with_an_init_file(folder):
    (folder / "plugins" / "__init__.py").write_text("")
    assert LoadedPlugins(["plugins.example_plugin.ShuffleTags"]).transform_caption("a, b, c") == "a, c, b"


# what may be wrong


def error(spec, **more):
    with pytest.raises(SpecError) as info:
        LoadedPlugins(["plugins.my_plugin.MyPlugin", spec], **more)
    assert info.value.path[:3] == ("train", "plugins", 1)
    return info.value.finding


def test_paths_that_do_not_import(folder):
    (folder / "plugins" / "broken.py").write_text("import nothing_of_this_name")
    (folder / "plugins" / "wrong.py").write_text("1 / 0")
    text = error("plugins.exmple_plugin.Gamma")
    assert "no module named 'plugins.exmple_plugin' (did you mean 'plugins.example_plugin'?)" in text and str(folder) in text
    assert "has no attribute 'Gama' (did you mean 'Gamma'?)" in error("plugins.example_plugin.Gama")
    module = "plugins.my_plugin"
    assert f"{module} is a module, not a class; write '{module}.MyPlugin'" in error(module)
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
            LoadedPlugins([spec])
        return info.value.finding

    assert finding((Options, {"colour": 1})) == "Options has no option 'colour' (did you mean 'color'?); it takes color, size"
    assert finding(Options) == "Options needs the option 'color'"
    assert finding({Options: {"color": "none"}}) == "Options cannot be built: ValueError: no such colour"
    assert LoadedPlugins([{Options: {"color": "red"}}, Options("blue")])


def made(**methods):
    return type("Mine", (), methods)


def finding(**methods):
    with pytest.raises(SpecError) as info:
        LoadedPlugins([made(**methods)])
    return info.value.finding


def test_hooks_that_do_not_exist():
    text = finding(on_epoch_strat=lambda self, **kwargs: None)
    assert "no hook is called 'on_epoch_strat' (did you mean 'on_epoch_start'?)" in text
    assert "no hook is called 'transform_captions'" in finding(transform_captions=lambda self, caption: caption)
    assert "Mine is not a plugin: it has none of the methods on_model_load" in finding(run=lambda self: None)
    with pytest.raises(SpecError, match="no hook is called 'on_step_stop'"):
        LoadedPlugins([type("Mine", (BasePlugin,), {"on_step_stop": lambda self, **kwargs: None})])
    value = made(on_gpu=True, on_epoch_end=lambda self: None)  # which is no hook
    assert LoadedPlugins([type("Empty", (BasePlugin,), {}), value])


def test_arguments_that_a_hook_does_not_offer():
    text = finding(on_epoch_end=lambda self, epcoh: None)
    assert "Mine.on_epoch_end: the hook gets no 'epcoh' (did you mean 'epoch'?); it gets epoch, global_step, loss" in text
    assert "the hook gets no 'batch'" in finding(on_epoch_end=lambda self, batch=None, **kwargs: None)
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


@pytest.mark.parametrize("given", [None, 3], ids=str)
def test_a_transform_that_returns_something_else(given):
    plugin = made(transform_caption=lambda self, caption: given)
    with pytest.raises(TrainError, match="plugin Mine raised in transform_caption: TypeError: it returned .* return a str"):
        LoadedPlugins([plugin]).transform_caption("cat")
    plugins = LoadedPlugins([plugin], on_error="continue")
    plugins.note = str
    assert plugins.transform_caption("cat") == "cat"


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
        plugins = LoadedPlugins(["plugins.example_plugin.ShuffleTags", keeps])
        of(plugins, 1).file = file  # does not transform, so it need not be sent
        loader = DataLoader(Captions(plugins), num_workers=1, batch_size=2, multiprocessing_context=method)
        assert [caption for batch in loader for caption in batch] == [f"cat {index}, b, a" for index in range(4)]
    (line,) = plugins.summary(0.0)  # counted in the worker
    assert line.startswith("slow plugin: ShuffleTags.transform_caption took ") and "(4 calls" in line


def test_a_plugin_that_cannot_be_sent_to_a_worker():
    with pytest.raises(TrainError, match="plugin Mine cannot be sent to worker processes.*set 'workers' of the data to 0"):
        pickle.dumps(LoadedPlugins([made(transform_caption=lambda self, caption: caption)]))
