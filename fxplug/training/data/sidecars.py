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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ...core import reading
from ...core.errors import DEFAULT, SpecError, did_you_mean, quote
from ...core.spec.yaml_source import Section, Source, Where, make_validator, read_yaml, validate

NUMBERS = ("multiply", "flip_p", "cond_dropout", "loss_scale")
KEYS = ("main_prompt", "caption", "tags", "max_caption_length", "shuffle_tags", *NUMBERS)
IGNORED = ("rating", "batch_id")
LONGEST = 2048  # characters of a caption with weighted tags
CONCEPT = re.compile(r"(\d+)_(.+)")  # a folder of kohya's: so many repeats, and what is in it


def _read_number(value: Any, least: float = -math.inf, most: float = math.inf) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and least <= number <= most):
        bounds = "" if least == -math.inf else ", 0 or more" if most == math.inf else " from 0 to 1"
        raise SpecError(f"must be a number{bounds}, not {quote(value)}")
    return number


def _read_tags(value: Any) -> tuple[tuple[str, float], ...]:
    if not isinstance(value, list):
        raise SpecError(f"must be a list, not {quote(value)}")
    tags = [tag if isinstance(tag, Mapping) else {"tag": tag} for tag in value]
    for tag in tags:
        if not isinstance(tag.get("tag"), (str, int, float)):
            raise SpecError(f"a tag must be text, or a mapping of 'tag' and 'weight', not {quote(tag.get('tag', tag))}")
    return tuple((str(tag["tag"]), 1.0 if tag.get("weight") is None else _read_number(tag["weight"])) for tag in tags)


Repeats = Annotated[float, make_validator(lambda value: _read_number(value, 0.0))]
Share = Annotated[float, make_validator(lambda value: _read_number(value, 0.0, 1.0))]
Number = Annotated[float, make_validator(_read_number)]


@dataclass(frozen=True)
class Caption:
    """A caption with tags (text, weight), which are shuffled when it is trained on; of weighted ones as many as fit."""

    main: str
    tags: tuple[tuple[str, float], ...] = ()
    longest: int = LONGEST

    def text(self) -> str:
        """Return the caption with its tags, those of the highest weight first."""
        return _joined(self.main, [tag for tag, _ in sorted(self.tags, key=lambda tag: -tag[1])])

    def shuffled(self) -> str:
        """Return the caption with its tags in an order drawn from Python's random numbers."""
        left = list(self.tags)
        if len({weight for _, weight in left}) <= 1:
            random.shuffle(left)
            return _joined(self.main, [tag for tag, _ in left])
        taken: list[str] = []
        while left and len(", ".join(taken)) < self.longest - len(self.main):
            (place,) = random.choices(range(len(left)), [weight for _, weight in left])
            taken.append(left.pop(place)[0])
        return _joined(self.main, taken)


class ImageSettings(Section):
    """What is said about an image. None is nothing said. A caption is `plain` text, or a `prompt` with `tags` beside it."""

    plain: str | None = None
    prompt: str | None = None
    tags: Annotated[tuple[tuple[str, float], ...], make_validator(_read_tags)] = ()
    max_caption_length: Annotated[int, Field(ge=0)] | None = None
    shuffle_tags: bool | None = None
    multiply: Repeats | None = None
    flip_p: Share | None = None
    cond_dropout: Share | None = None
    loss_scale: Number | None = None

    def under(self, nearer: ImageSettings) -> ImageSettings:
        """Return these settings overridden by those of something nearer to the image."""
        said = {key: value for key, value in nearer if value is not None}
        tags = self.tags
        if "plain" in said or "prompt" in said:
            said |= {"plain": nearer.plain, "prompt": nearer.prompt}
            tags = (*_parts(self.plain)[1], *tags)  # of a caption that gives way, the tags stay
        said["tags"] = tuple(dict.fromkeys((*nearer.tags, *tags)))
        said["shuffle_tags"] = True if self.shuffle_tags else nearer.shuffle_tags
        return self.model_copy(update=said)

    def caption(self) -> str | Caption | None:
        """Return the caption, its parts after the first as tags if there are other tags or they are to be shuffled."""
        said = self.plain if self.prompt is None else self.prompt
        if said is None or not (self.tags or self.shuffle_tags):
            return said
        first, parts = (said, ()) if self.prompt is not None else _parts(said)
        tags = tuple(dict.fromkeys((*parts, *self.tags)))
        made = Caption(first, tags, LONGEST if self.max_caption_length is None else self.max_caption_length)
        return made if self.shuffle_tags else made.text()


def _parts(text: str | None) -> tuple[str, tuple[tuple[str, float], ...]]:
    """Split a caption into the part before its first comma, and tags."""
    first, *tags = (part.strip() for part in (text or "").split(","))
    return first, tuple((tag, 1.0) for tag in tags if tag)


def read_name(stem: str) -> str:
    """Return the caption that a file name stands for: the part before an underscore."""
    return ", ".join(part.strip() for part in stem.partition("_")[0].split(","))


def set_numbers(values: Sequence[dict[str, Any]], said: Sequence[ImageSettings], flip: bool) -> None:
    """Set the numbers that the loader and the task read, in place, if any sample has one of its own."""
    default = {"loss_scale": 1.0, "cond_dropout": math.nan, "flip_p": 0.5 if flip else 0.0}
    for key, usual in default.items():
        if any(getattr(settings, key) is not None for settings in said):
            for value, settings in zip(values, said, strict=True):
                own = getattr(settings, key)
                value[key] = usual if own is None else own


class Sidecars:
    """The settings of images below the folders `roots` by what lies beside them. `notes` says what is not read.

    `of_folders` says that some samples are folders, whose names have no suffix.
    """

    def __init__(self, roots: Sequence[Path], of_folders: bool = False) -> None:
        self.of_folders = of_folders
        self.roots, self.notes = {*roots}, list[str]()
        self._folders: dict[Path, tuple[set[str], ImageSettings, ImageSettings]] = {}

    def of(self, file: Path, *, alone: bool = False) -> ImageSettings:
        """Return the settings of an image; with `alone`, only those of its folders. Raises SpecError, with file and line, for
        what cannot be read."""
        names, everywhere, here = self._folder(file.parent)
        settings = everywhere.under(here)
        if alone:
            return settings
        stem = file.name if self.of_folders and file.is_dir() else file.stem
        for suffix in (".txt", ".caption", ".yml", ".yaml"):
            if stem + suffix in names:
                settings = settings.under(self.read(file.with_name(stem + suffix)))
        return settings

    def read(self, file: Path) -> ImageSettings:
        """Read the settings of a YAML file, or of a text file with a caption."""
        source = read_yaml(file) if file.suffix in (".yml", ".yaml") else Source(_text(file), str(file))
        return ImageSettings() if source.data is None else self.parsed(source.data, source)

    def parsed(self, data: Any, source: Source) -> ImageSettings:
        """Return the settings in a mapping, or in text, which is a caption; `source` knows the lines."""
        if isinstance(data, str):
            return ImageSettings(plain=data.strip())
        if not isinstance(data, Mapping):
            raise source.error(f"must be a mapping or a caption, not {quote(data)}")
        said = {str(key): value for key, value in data.items() if value is not None}
        for key in said:
            if key not in (*KEYS, *IGNORED, "image"):
                self._note(f"{source.file}: nothing reads '{key}'{did_you_mean(key, KEYS)}")
            elif key in IGNORED:
                self._note(f"{source.file}: '{key}' is ignored")
        own = {key: said[key] for key in KEYS[2:] if key in said}
        with source.inside():
            settings = validate(ImageSettings, {**own, "prompt": said["main_prompt"]} if "main_prompt" in said else own)
        return settings if "caption" not in said else settings.under(self.parsed(said["caption"], source))

    def _folder(self, folder: Path) -> tuple[set[str], ImageSettings, ImageSettings]:
        if folder in self._folders:
            return self._folders[folder]
        above = ImageSettings() if folder in self.roots or folder == folder.parent else self._folder(folder.parent)[1]
        names = {path.name for path in folder.iterdir()}
        for name in ("global.yaml", "global.yml"):
            if name in names:
                above = above.under(self.read(folder / name))
        here = ImageSettings(shuffle_tags=True if "shuffle_tags.txt" in names else None)
        for key in NUMBERS:
            if (file := folder / f"{key}.txt").name in names:
                here = here.under(self.parsed({key: _text(file)}, Source(None, str(file))))
        for name in ("local.yaml", "local.yml"):
            if name in names:
                here = here.under(self.read(folder / name))
        if "batch_id.txt" in names:
            self._note(f"{folder / 'batch_id.txt'} is ignored: any images of one size can be in a batch")
        archives = sorted(name for name in names if name.endswith(".zip"))
        if archives:
            self._note(f"{folder / archives[0]} is ignored: unpack it")
        self._folders[folder] = names, above, here
        return self._folders[folder]

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _joined(main: str, tags: list[str]) -> str:
    return ", ".join([main, *tags] if main else tags)


def _text(file: Path) -> str:
    return reading.read_text(file, DEFAULT.caption, lambda finding: SpecError(finding, where=Where(str(file)))).strip()


def read_json_list(file: Path, sidecars: Sidecars) -> list[tuple[Path, ImageSettings | None]]:
    """Read the images of a JSON list: mappings of `image`, a path relative to the file, and the keys of a YAML sidecar; or just
    paths, with captions in sidecar files."""
    where = Where(str(file))
    found = reading.read_json(file, lambda finding: SpecError(finding, where=where))
    if not isinstance(found, list):
        raise SpecError(f"must be a list of images, not {quote(found)}", where=where)
    listed = []
    for number, entry in enumerate(found):
        alone = isinstance(entry, str)
        entry = {"image": entry} if alone else entry
        if not isinstance(entry, Mapping) or not isinstance(entry.get("image"), str):
            raise SpecError(f"[{number}] needs 'image', the path of a file; it is {quote(entry)}", where=where)
        image = file.parent / entry["image"]
        if not os.path.isfile(image):  # no error for a name that no file can have
            raise SpecError(f"[{number}] '{image}' {reading.explain_missing(image)}", where=where)
        caption = entry.get("caption")
        beside = file.parent / caption if isinstance(caption, str) and caption.endswith((".txt", ".caption")) else None
        if beside is not None and os.path.isfile(beside):
            entry = {**entry, "caption": _text(beside)}
        try:
            listed.append((image, None if alone else sidecars.parsed(entry, Source(entry, str(file)))))
        except SpecError as error:
            raise SpecError(error.finding, path=(number, *error.path), key=error.key, where=where) from None
    return listed


class Toml(Section, extra="ignore"):
    """A data set of kohya's: what it says of all `subsets`, of those of one of `datasets`, and of each."""

    general: dict[str, Any] = {}
    datasets: list[dict[str, Any]] = []
    subsets: list[dict[str, Any]] = []


class Subset(Section, extra="ignore"):
    """A folder of images, and what is read of what is said about it."""

    image_dir: str
    num_repeats: Repeats = 1.0
    caption_extension: str = ".caption"
    class_tokens: str | None = None
    shuffle_caption: bool = False
    keep_tokens: Annotated[int, Field(ge=0)] = 0
    flip_aug: bool = False
    caption_dropout_rate: Share | None = None


def read_toml(file: Path, below: Callable[[Path], list[str]], notes: list[str]) -> list[tuple[Path, ImageSettings | None]]:
    """Read the images of the subsets of a kohya data set; `image_dir` is relative to the file."""
    where = Where(str(file))
    try:
        data = tomllib.loads(reading.read_text(file, DEFAULT.json, lambda finding: SpecError(finding, where=where)))
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"not valid TOML: {error}", where=where) from None
    listed, unread, source = list[tuple[Path, ImageSettings | None]](), set[str](), Source(data, str(file))
    with source.inside():
        whole = validate(Toml, data)
        for number, dataset in enumerate(whole.datasets):
            for index, own in enumerate(validate(Toml, dataset, "datasets", number).subsets):
                said = {**whole.general, **dataset, **own}
                del said["subsets"]
                subset = validate(Subset, said, "datasets", number, "subsets", index)
                unread |= said.keys() - Subset.model_fields.keys()
                folder = file.parent / subset.image_dir
                if not folder.is_dir():
                    raise SpecError(f"no such folder '{folder}'")
                # as there: a subset has the images of its folder, not of those below it
                listed += [(folder / name, _of_subset(folder / name, subset)) for name in below(folder) if "/" not in name]
    if not listed:
        raise SpecError("it lists no images", where=where)
    if unread:
        names = ", ".join(f"{key}{did_you_mean(key, Subset.model_fields)}" for key in sorted(unread))
        notes.append(f"{file}: {names} are ignored: set 'size', 'buckets' and the section 'train' of the configuration instead")
    return listed


def _of_subset(image: Path, subset: Subset) -> ImageSettings:
    beside = Path(f"{os.path.splitext(image)[0]}{subset.caption_extension}")
    caption = _text(beside) if os.path.lexists(beside) else subset.class_tokens
    said: dict[str, Any] = {"plain": caption}
    if subset.shuffle_caption and caption:
        parts, keep = [part.strip() for part in caption.split(",")], subset.keep_tokens
        said = {"prompt": ", ".join(parts[:keep]), "tags": parts[keep:]}
    return ImageSettings(
        **said,
        multiply=subset.num_repeats,
        flip_p=0.5 if subset.flip_aug else None,
        cond_dropout=subset.caption_dropout_rate,
        shuffle_tags=subset.shuffle_caption or None,
    )
