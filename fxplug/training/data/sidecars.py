"""What stands beside images about them: captions with tags, and numbers, in files of an image, of a folder, or of a list.

Lists are JSON, or the `.toml` data sets of kohya's sd-scripts.

The files are those of EveryDream2trainer's doc/DATA.md. Of an image are `.txt`, `.caption`, `.yml` and `.yaml` of its name; of
a folder `multiply.txt`, `flip_p.txt`, `cond_dropout.txt`, `loss_scale.txt`, `shuffle_tags.txt` and `local.yaml`; of a folder
and those below it `global.yaml`. What is nearer to the image wins; tags add up, the nearest first.
"""

from __future__ import annotations

import math
import os
import random
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ...core import reading
from ...core.errors import DEFAULT, SpecError, did_you_mean, shown
from ...core.spec.yaml_source import Where, read_yaml

NUMBERS = {"multiply": math.inf, "flip_p": 1.0, "cond_dropout": 1.0, "loss_scale": math.inf}  # each with the most it may be
KEYS = ("main_prompt", "caption", "tags", "max_caption_length", "shuffle_tags", *NUMBERS)
IGNORED = ("rating", "batch_id")
LONGEST = 2048  # characters of a caption with weighted tags
CONCEPT = re.compile(r"(\d+)_(.+)")  # a folder of kohya's: so many repeats, and what is in it
# what is read of what a subset of a TOML may say
TOML = {"image_dir", "num_repeats", "caption_extension", "class_tokens", "shuffle_caption", "keep_tokens", "flip_aug"} | {
    "caption_dropout_rate"
}


@dataclass(frozen=True)
class Caption:
    """A caption with tags (text, weight), which are shuffled when it is trained on; of weighted ones as many as fit."""

    main: str
    tags: tuple[tuple[str, float], ...] = ()
    longest: int = LONGEST

    def text(self) -> str:
        """The caption with its tags, those of the highest weight first."""
        return _joined(self.main, [tag for tag, _ in sorted(self.tags, key=lambda tag: -tag[1])])

    def shuffled(self) -> str:
        """The caption with its tags in an order that is drawn from Python's random numbers."""
        left = list(self.tags)
        if len({weight for _, weight in left}) <= 1:
            random.shuffle(left)
            return _joined(self.main, [tag for tag, _ in left])
        taken: list[str] = []
        while left and len(", ".join(taken)) < self.longest - len(self.main):
            (place,) = random.choices(range(len(left)), [weight for _, weight in left])
            taken.append(left.pop(place)[0])
        return _joined(self.main, taken)


@dataclass(frozen=True)
class Settings:
    """What is said about an image. None is nothing said. A caption is `plain` text, or a `prompt` with `tags` beside it."""

    plain: str | None = None
    prompt: str | None = None
    tags: tuple[tuple[str, float], ...] = ()
    max_caption_length: int | None = None
    shuffle_tags: bool | None = None
    multiply: float | None = None
    flip_p: float | None = None
    cond_dropout: float | None = None
    loss_scale: float | None = None

    def under(self, nearer: Settings) -> Settings:
        """These, with those of something nearer to the image over them."""
        said = {f.name: value for f in fields(nearer) if (value := getattr(nearer, f.name)) is not None}
        tags = self.tags
        if "plain" in said or "prompt" in said:
            said |= {"plain": nearer.plain, "prompt": nearer.prompt}
            tags = (*_parts(self.plain)[1], *tags)  # of a caption that gives way, the tags stay
        said["tags"] = tuple(dict.fromkeys((*nearer.tags, *tags)))
        said["shuffle_tags"] = True if self.shuffle_tags else nearer.shuffle_tags
        return replace(self, **said)

    def caption(self) -> str | Caption | None:
        """The caption, its parts behind the first one being tags where there are others or they are to be shuffled."""
        said = self.plain if self.prompt is None else self.prompt
        if said is None or not (self.tags or self.shuffle_tags):
            return said
        first, parts = (said, ()) if self.prompt is not None else _parts(said)
        tags = tuple(dict.fromkeys((*parts, *self.tags)))
        made = Caption(first, tags, self.max_caption_length or LONGEST)
        return made if self.shuffle_tags else made.text()


def _parts(text: str | None) -> tuple[str, tuple[tuple[str, float], ...]]:
    """A caption as what stands before its first comma, and tags."""
    first, *tags = (part.strip() for part in (text or "").split(","))
    return first, tuple((tag, 1.0) for tag in tags if tag)


def from_name(stem: str) -> str:
    """The caption that a file name is, without what follows an underscore."""
    return ", ".join(part.strip() for part in stem.partition("_")[0].split(","))


def numbers(values: Sequence[dict[str, Any]], said: Sequence[Settings], flip: bool) -> None:
    """Give the samples the numbers that the loader and the task go by, in place, where any of them has one of its own."""
    default = {"loss_scale": 1.0, "cond_dropout": math.nan, "flip_p": 0.5 if flip else 0.0}
    for key, usual in default.items():
        if any(getattr(settings, key) is not None for settings in said):
            for value, settings in zip(values, said, strict=True):
                own = getattr(settings, key)
                value[key] = usual if own is None else own


class Sidecars:
    """The settings of images below the folders `roots` by what lies beside them. `notes` says what is not read."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots, self.notes = {*roots}, list[str]()
        self._folders: dict[Path, tuple[set[str], Settings, Settings]] = {}

    def of(self, file: Path, *, alone: bool = False) -> Settings:
        """What is said about an image, if `alone` then by its folders only. SpecError, with file and line, for what cannot be
        read."""
        names, everywhere, here = self._folder(file.parent)
        settings = everywhere.under(here)
        if alone:
            return settings
        for suffix in (".txt", ".caption", ".yml", ".yaml"):
            if file.stem + suffix not in names:
                continue
            beside = file.with_suffix(suffix)
            if suffix in (".txt", ".caption"):
                settings = settings.under(Settings(_text(beside)))
            else:
                settings = settings.under(self.read(beside))
        return settings

    def read(self, file: Path) -> Settings:
        """The settings of a YAML file."""
        source = read_yaml(file)
        if source.data is None:
            return Settings()
        return self.parsed(source.data, Where(str(file)))

    def parsed(self, data: Any, where: Where) -> Settings:
        """Settings of a mapping, or of text: a caption."""
        if isinstance(data, str):
            return Settings(plain=data.strip())
        if not isinstance(data, Mapping):
            raise SpecError(f"must be a mapping or a caption, not {shown(data)}", where=where)
        unread = [str(key) for key in data if key not in (*KEYS, *IGNORED, "image")]
        if unread:
            self._note(f"{where}: nothing reads '{unread[0]}'{did_you_mean(unread[0], KEYS)}")
        for key in IGNORED:
            if data.get(key) is not None:
                self._note(f"{where}: '{key}' is not gone by")
        own: dict[str, Any] = {key: read_number(data[key], key, where) for key in NUMBERS if data.get(key) is not None}
        for key, kind in (("max_caption_length", int), ("shuffle_tags", bool)):
            if data.get(key) is not None:
                own[key] = _of(kind, data[key], key, where)
        if data.get("main_prompt") is not None:
            own["prompt"] = _of(str, data["main_prompt"], "main_prompt", where)
        own["tags"] = tuple(_tag(tag, where) for tag in _of(list, data.get("tags") or [], "tags", where))
        settings = Settings(**own)
        return settings if data.get("caption") is None else settings.under(self.parsed(data["caption"], where))

    def _folder(self, folder: Path) -> tuple[set[str], Settings, Settings]:
        if folder in self._folders:
            return self._folders[folder]
        above = Settings() if folder in self.roots or folder == folder.parent else self._folder(folder.parent)[1]
        names = {path.name for path in folder.iterdir()}
        for name in ("global.yaml", "global.yml"):
            if name in names:
                above = above.under(self.read(folder / name))
        here = Settings(shuffle_tags=True if "shuffle_tags.txt" in names else None)
        for key in NUMBERS:
            if f"{key}.txt" in names:
                file = folder / f"{key}.txt"
                own: dict[str, Any] = {key: read_number(_text(file), key, Where(str(file)))}
                here = replace(here, **own)
        for name in ("local.yaml", "local.yml"):
            if name in names:
                here = here.under(self.read(folder / name))
        if "batch_id.txt" in names:
            self._note(f"{folder / 'batch_id.txt'} is not gone by: batches are of any images of a size")
        archives = sorted(name for name in names if name.endswith(".zip"))
        if archives:
            self._note(f"{folder / archives[0]} is not opened: unpack it")
        self._folders[folder] = names, above, here
        return self._folders[folder]

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _joined(main: str, tags: list[str]) -> str:
    return ", ".join([main, *tags] if main else tags)


def _text(file: Path) -> str:
    return reading.text(file, DEFAULT.caption, lambda finding: SpecError(finding, where=Where(str(file)))).strip()


def read_number(value: Any, key: str, where: Where) -> float:
    """A number that a sidecar or a list has for one of NUMBERS. Raises SpecError for one that the key cannot be."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    low = key == "multiply" and number == 0
    if not math.isfinite(number) or low or not (key == "loss_scale" or 0 <= number <= NUMBERS[key]):
        kind = {"multiply": "above 0", "loss_scale": "of any size"}.get(key, "from 0 to 1")
        raise SpecError(f"{key} must be a number {kind}, not {shown(value)}", where=where)
    return number


def _of(kind: type[Any], value: Any, key: str, where: Where) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise SpecError(f"'{key}' must be {kind.__name__}, not {shown(value)}", where=where)
    return str(value).strip() if kind is str else value


def _tag(value: Any, where: Where) -> tuple[str, float]:
    if isinstance(value, Mapping) and value.get("tag") is not None:
        weight = value.get("weight")
        return str(value["tag"]), 1.0 if weight is None else read_number(weight, "loss_scale", where)
    if not isinstance(value, (str, int, float)):
        raise SpecError(f"a tag must be text, or a mapping of 'tag' and 'weight', not {shown(value)}", where=where)
    return str(value), 1.0


@dataclass
class Listed:
    """An image file, with what its list says about it. None: what lies beside it says it."""

    file: Path
    settings: Settings | None = None


def from_json(file: Path, sidecars: Sidecars) -> list[Listed]:
    """The images of a JSON list: mappings of `image`, a path relative to the file, and what a YAML sidecar may have; or such
    paths alone, beside which the captions lie."""
    where = Where(str(file))
    found = reading.read_json(file, lambda finding: SpecError(finding, where=where))
    if not isinstance(found, list):
        raise SpecError(f"must be a list of images, not {shown(found)}", where=where)
    listed = []
    for number, entry in enumerate(found):
        alone = isinstance(entry, str)
        entry = {"image": entry} if alone else entry
        if not isinstance(entry, Mapping) or not isinstance(entry.get("image"), str):
            raise SpecError(f"[{number}] needs 'image', the path of a file; it is {shown(entry)}", where=where)
        image = file.parent / entry["image"]
        if not image.is_file():
            raise SpecError(f"[{number}] '{image}' {reading.missing(image)}", where=where)
        caption = entry.get("caption")
        beside = file.parent / caption if isinstance(caption, str) and caption.endswith((".txt", ".caption")) else None
        if beside is not None and beside.is_file():
            text = reading.text(beside, DEFAULT.caption, lambda finding: SpecError(finding, where=where))
            entry = {**entry, "caption": text}
        listed.append(Listed(image, None if alone else sidecars.parsed(entry, where)))
    return listed


def from_toml(file: Path, below: Callable[[Path], list[str]], notes: list[str]) -> list[Listed]:
    """The images of the subsets of a data set of kohya's: `image_dir` is relative to the file."""
    where = Where(str(file))
    try:
        data = tomllib.loads(reading.text(file, DEFAULT.json, lambda finding: SpecError(finding, where=where)))
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"not valid TOML: {error}", where=where) from None
    listed, unread = [], set()
    for said in _subsets(data, where):
        if not isinstance(said.get("image_dir"), str):
            raise SpecError("a subset needs 'image_dir', a folder", where=where)
        folder = file.parent / said["image_dir"]
        if not folder.is_dir():
            raise SpecError(f"no such folder '{folder}'", where=where)
        unread |= said.keys() - TOML
        # as there: a subset has the images of its folder, not of those below it
        listed += [_of_subset(folder / name, said, where) for name in below(folder) if "/" not in name]
    if not listed:
        raise SpecError("it names no images", where=where)
    if unread:
        names = ", ".join(f"{key}{did_you_mean(key, TOML)}" for key in sorted(unread))
        notes.append(f"{file}: {names} are not read: 'size', 'buckets' and 'train' say such things here")
    return listed


def _subsets(data: Mapping[str, Any], where: Where) -> Iterator[dict[str, Any]]:
    """Each subset with what is said above it."""
    general = _tables(data, "general", where)
    for dataset in _tables(data, "datasets", where):
        whole = {key: value for key, value in dataset.items() if key != "subsets"}
        for subset in _tables(dataset, "subsets", where):
            yield {**(general[0] if general else {}), **whole, **subset}


def _tables(data: Mapping[str, Any], key: str, where: Where) -> list[dict[str, Any]]:
    """The tables under a key; [general] is one, the others are lists. Raises SpecError for anything else."""
    found = data.get(key, [])
    tables = [found] if key == "general" and isinstance(found, dict) else found
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        wanted = "[general]" if key == "general" else f"a list of tables, [[{key}]]"
        raise SpecError(f"'{key}' must be {wanted}, not {shown(found)}", where=where)
    return tables


def _of_subset(image: Path, said: Mapping[str, Any], where: Where) -> Listed:
    beside = image.with_suffix(str(said.get("caption_extension", ".caption")))
    caption = said.get("class_tokens")
    if os.path.lexists(beside):
        caption = _text(beside)
    try:
        settings = Settings(
            plain=caption,
            multiply=read_number(said.get("num_repeats", 1), "multiply", where),
            flip_p=0.5 if said.get("flip_aug") else None,
            cond_dropout=read_number(said[rate], "cond_dropout", where) if (rate := "caption_dropout_rate") in said else None,
            shuffle_tags=bool(said.get("shuffle_caption")) or None,
        )
        keep = int(said.get("keep_tokens", 0))
    except (TypeError, ValueError) as error:
        raise SpecError(f"a subset has a value of the wrong kind: {error}", where=where) from None
    if settings.shuffle_tags and caption:
        parts = [part.strip() for part in caption.split(",")]
        tags = tuple((part, 1.0) for part in parts[keep:])
        settings = replace(settings, plain=None, prompt=", ".join(parts[:keep]), tags=tags)
    return Listed(image, settings)
