"""Images in folders: with captions beside them or in metadata.jsonl, or a folder for each class."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Container, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from PIL import Image

from ...core import reading
from ...core.errors import DEFAULT, SpecError, TrainError, did_you_mean
from ...core.reading import parse_json
from ...core.spec.yaml_source import Section, Source, Where, validate
from ..train_section import Data
from .image_files import read_size
from .image_sources import IMAGES, ImageFile, ImageSource
from .sidecars import CONCEPT, ImageSettings, Sidecars, read_json_list, read_name, read_toml, set_numbers

METADATA = "metadata.jsonl"  # the form of Hugging Face's ImageFolder
READ = ("flip_p", "cond_dropout", "loss_scale")  # which the loader and the tasks go by
MOST_CLASSES = 1_000_000  # whose labels are numbers
OWN = ("image", "condition", "loss_mask", "name", "index")  # keys of an item that the loader fills


class Items:
    """Samples by number.

    An item is a dict: `name`, and what there is of `image`, `condition` and `loss_mask` (PIL images, or float tensors
    [c, h, w] that are ready), `caption` (str), `label` (int), and other values that collate. An image that cannot be read
    raises `Unreadable`. `open_sample` gives the same before image files are decoded, as `ImageSource`.

    `root` is the folder that holds them, `classes` the names of their labels, where there are such. `labels` are all that
    there are, where they are numbers and known without reading the samples. `repeats` says how often an epoch has each;
    `notes`, what was found and is not read; `has_files`, whether all
    its images are `ImageSource`s. `numbers`: labels of other classes of the same names.
    """

    root: str | None = None
    classes: list[str] | None = None
    labels: Collection[int] | None = None
    repeats: list[float] | None = None
    has_files: bool = False
    notes: Sequence[str] = ()
    values: Sequence[dict[str, Any]] = ()
    numbers: list[int] | None = None

    @cached_property
    def class_count(self) -> int | None:
        """Number of classes: of the names, or up to the largest label; None where it is not known."""
        return count_classes(self.classes, self.labels)

    @property
    def sizes(self) -> list[tuple[int, int]] | None:
        """(h, w) of each image, found without decoding it, (0, 0) for one that is unreadable; None when unknown."""
        return None

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, i: int) -> dict[str, Any]:
        item = self.open_sample(i)
        return item | {key: item[key].read() for key in IMAGES if isinstance(item.get(key), ImageSource)}

    def open_sample(self, i: int) -> dict[str, Any]:
        """Return item `i`, with the images that are files as `ImageSource`, not decoded."""
        item = self.sample(i)
        if self.numbers is not None and "label" in item:
            if not 0 <= item["label"] < len(self.numbers):
                found = f"has the label {item['label']}, and its data have {len(self.numbers)} classes"
                raise TrainError(f"{item['name']} {found}, 0 to {len(self.numbers) - 1}")
            item["label"] = self.numbers[item["label"]]
        return item

    def sample(self, i: int) -> dict[str, Any]:
        """Return item `i` as `open_sample`, with the label as its source gives it."""
        raise NotImplementedError


def count_classes(names: list[str] | None, labels: Collection[int] | None) -> int | None:
    """Return the number of classes by their names, or by their labels where these are numbers from 0 on; else None."""
    if names is not None or not labels:
        return None if names is None else len(names)
    return max(labels) + 1 if 0 <= min(labels) <= max(labels) < MOST_CLASSES else None


def name_classes(names: list[str] | None, labels: Collection[int] | None) -> list[str] | None:
    """Return the names of the classes, or their numbers as text where they have no names; None where neither is known."""
    count = count_classes(names, labels)
    return [str(number) for number in range(count)] if names is None and count is not None else names


class FileItems(Items):
    """Image files below `top`, with the values of each; `conditions` and `masks` have a further image for
    each."""

    has_files = True

    def __init__(
        self,
        top: Path,
        names: list[str],
        values: list[dict[str, Any]],
        spec: Data,
        conditions: Path | None = None,
        masks: Path | None = None,
    ) -> None:
        self.top, self.names, self.values, self.root = top, names, values, str(top)
        self.spec, self.channels, self.background = spec, spec.channels, spec.background
        self.conditions = match_stems(names, conditions) if conditions else None
        self.masks = match_stems(names, masks, "masks", "mask") if masks else None

    def __len__(self) -> int:
        return len(self.names)

    def sample(self, i: int) -> dict[str, Any]:
        """Return `image`, `name` (relative to the folder), and the known values."""
        name = self.names[i]
        item = {"image": self._image(self.top / name, name), "name": name, **self.values[i]}
        if self.conditions:
            item["condition"] = self._image(self.conditions[i], f"{self.conditions[i]} (the condition of {name})")
        if self.masks:
            item["loss_mask"] = ImageFile(self.masks[i], f"{self.masks[i]} (the mask of {name})", 1, self.background)
        return item

    def _image(self, file: Path, name: str) -> ImageFile:
        return ImageFile(file, name, self.channels, self.background)

    def files(self, i: int) -> list[Path]:
        """Return the files of item `i` without its condition."""
        return [self.top / self.names[i]]

    @cached_property
    def sizes(self) -> list[tuple[int, int]]:
        """(h, w) of each image, from the headers."""
        return [read_size(self.top / name) for name in self.names]

    @staticmethod
    def below(top: Path, skip: Container[str] = (), notes: list[str] | None = None) -> list[str]:
        """Return the samples below a folder as relative paths in natural order."""
        return images_below(top, skip)


def open_files(spec: Data, base: Path, kind: type[FileItems] = FileItems) -> FileItems:
    """Open folders of images and their sub-folders, in natural order (`2.png` before `10.png`), or lists of files.

    For `images`, captions and further values come from the nearest `metadata.jsonl` above an image, else from its sidecar
    files. For `classes`, the label is the top folder, by sorted names; sidecar files of folders are read, those of images are
    not. Raises SpecError for a folder that is absent or empty, metadata that does not fit, and captions that are missing.
    """
    key = next(key for key in ("images", "videos", "classes") if getattr(spec, key) is not None)
    given = getattr(spec, key)
    assert given is not None  # a section has one of the kinds
    conditions = _condition_folder(spec, base)
    masks = check_folder(base / spec.masks, "masks") if spec.masks is not None else None
    sources = _paths(given, base)
    roots = [source.parent if os.path.isfile(source) and key == "images" else check_folder(source, key) for source in sources]
    # the folder that holds all of them
    top = roots[0] if len(roots) == 1 else Path(os.path.commonpath([folder.resolve() for folder in roots]))
    sidecars, others = Sidecars(roots, key == "videos"), _OtherFolders(spec, base, conditions, masks, sources)
    listed = [image for source in sources for image in _listed(source, sidecars, others, key, kind)]
    names = [Path(os.path.relpath(file, top)).as_posix() for file, _ in listed]
    if spec.classes is None:
        values = _with_metadata(top, names)
        said = [_settings(*image, sidecars, spec.repeats == "folders") for image in listed]
    else:
        folders = _class_folders(top, names, others)
        number = {name: i for i, name in enumerate(folders)}
        values = [{"label": number[name.partition("/")[0]]} for name in names]
        said = [sidecars.of(file, alone=True) for file, _ in listed]
    notes = [*sidecars.notes, *others.notes()]
    kept = [i for i, settings in enumerate(said) if settings.multiply != 0]
    if not kept:
        raise SpecError(f"all {len(names)} images have 0 repeats: there is nothing left", path=(key,))
    if len(kept) < len(names):
        notes.append(f"{len(names) - len(kept)} of {len(names)} images have 0 repeats and are left out")
        names, values, said = [names[i] for i in kept], [values[i] for i in kept], [said[i] for i in kept]
    if spec.classes is None:
        classes = _numbered(names, values)
        _put_captions(names, values, said, spec.captions)
    else:
        classes = folders
    set_numbers(values, said, spec.flip)
    items = kind(top, names, values, spec, conditions, masks)
    items.classes, items.notes, items.repeats = classes, notes, _repeats(said, names, key)
    if classes is None and values and "label" in values[0]:
        items.labels = {value["label"] for value in values}
    return items


def _paths(given: str | list[str], base: Path) -> list[Path]:
    return [base / source for source in ([given] if isinstance(given, str) else given)]


class _OtherFolders:
    """Folders whose images are other data, and what of: condition images, masks, prior images, the test
    data and theirs.

    They are left out where they lie below `sources`, and `met` has those that did.
    """

    def __init__(self, spec: Data, base: Path, conditions: Path | None, masks: Path | None, sources: Sequence[Path]) -> None:
        self.kinds, self.met = dict[str, str](), set[str]()
        if (test := spec.test) is not None:
            others = _paths(test.classes or test.images or test.videos or [], base)
            if test.conditions is not None and ":" not in test.conditions.name:
                others.append(base / test.conditions.name)
            if test.masks is not None:
                others.append(base / test.masks)
            own = {os.path.realpath(source) for source in sources}
            found = {os.path.realpath(folder) for folder in others if os.path.isdir(folder)}
            self.kinds = dict.fromkeys(found - own, "test data")
        if spec.prior is not None:
            others = _paths(spec.prior.classes or spec.prior.images or spec.prior.videos or [], base)
            found = {os.path.realpath(folder) for folder in others if os.path.isdir(folder)}
            self.kinds |= dict.fromkeys(found, "prior images")
        if conditions is not None:
            self.kinds[os.path.realpath(conditions)] = "condition images"
        if masks is not None:
            self.kinds[os.path.realpath(masks)] = "masks"

    def __contains__(self, folder: object) -> bool:
        """Return whether a folder, given by its real path, is one of them, and note it if so."""
        if folder not in self.kinds:
            return False
        self.met.add(str(folder))
        return True

    def notes(self) -> list[str]:
        """Return a note for each of these folders that was left out."""
        left_out = "is left out of the images around it: it has the"
        return [f"'{folder}' {left_out} {self.kinds[folder]}" for folder in sorted(self.met)]


def _repeats(said: Sequence[ImageSettings], names: Sequence[str], key: str) -> list[float] | None:
    """Return how often an epoch has each image, or None where it has each once. Raises SpecError for more than an epoch can
    hold."""
    repeats = [1.0 if settings.multiply is None else settings.multiply for settings in said]
    if sum(repeats) > DEFAULT.samples:
        most, name = max(zip(repeats, names, strict=True))
        raise SpecError(
            f"an epoch would have {sum(repeats):g} samples, {most:g} of them from '{name}'; the limit is {DEFAULT.samples:g}: "
            "set a smaller multiply, num_repeats or number in the folder's name",
            path=(key,),
        )
    return repeats if {*repeats} != {1.0} else None


def _listed(
    source: Path, sidecars: Sidecars, skip: Container[str], key: str, kind: type[FileItems]
) -> list[tuple[Path, ImageSettings | None]]:
    """Return the image files of a folder or a list, each with its settings from the list; None where sidecar files have
    them."""
    if key == "images" and os.path.isfile(source) and source.suffix == ".json":
        return read_json_list(source, sidecars)
    if key == "images" and os.path.isfile(source) and source.suffix == ".toml":
        return read_toml(source, images_below, sidecars.notes)
    found = kind.below(check_folder(source, key), skip, sidecars.notes)
    if not found:
        suffixes = sorted({p.suffix or "no suffix" for p in source.rglob("*") if p.is_file()})
        has = f"it has files with {', '.join(suffixes[:6])}" if suffixes else "it is empty"
        hint = "; a video is a folder of frames, an animated picture or a video file" if key == "videos" else ""
        raise SpecError(f"no {'videos' if key == 'videos' else 'images'} in '{source}'; {has}{hint}", path=(key,))
    return [(source / name, None) for name in found]


def _settings(file: Path, given: ImageSettings | None, sidecars: Sidecars, repeats: bool) -> ImageSettings:
    """Return the settings of an image: from its list, else from its sidecars, over those in the name of its folder."""
    if given is not None:
        return given
    settings, above = sidecars.of(file), file.parents
    depth = next((n for n, folder in enumerate(above) if folder in sidecars.roots), 1)  # of a listed one, the nearest folder
    concept = next(filter(None, (CONCEPT.fullmatch(folder.name) for folder in above[:depth])), None)
    if concept is None:
        return settings
    if repeats:
        return ImageSettings(plain=concept[2], multiply=float(concept[1])).under(settings)
    text = (
        f"the number in the name of a folder ('{concept[0]}') is not used as a count of repeats: set 'repeats: folders' to "
        "use it"
    )
    if not any(note.endswith("to use it") for note in sidecars.notes):
        sidecars.notes.append(text)
    return settings


def _with_metadata(top: Path, names: list[str]) -> list[dict[str, Any]]:
    """Return the values for each image from the `metadata.jsonl` files above it; the nearest wins."""
    values: dict[str, dict[str, Any]] = {name: {} for name in names}
    folders = {folder for name in names for folder in Path(name).parents}
    for folder in sorted(folders, key=lambda f: (len(f.parts), f)):  # so that the nearest metadata is read last
        values |= read_metadata(top / folder / METADATA, top, values)
    return [dict(values[name]) for name in names]  # a list may have an image twice


def _class_folders(top: Path, names: Sequence[str], skip: Container[str]) -> list[str]:
    """Return the classes: the sorted names of the folders in `top`. Raises SpecError for an empty one, and images outside of
    them."""
    folders = (p for p in top.iterdir() if p.is_dir() and not p.name.startswith("."))
    classes = sorted(p.name for p in folders if os.path.realpath(p) not in skip)
    if empty := sorted({*classes} - {name.partition("/")[0] for name in names}):
        raise SpecError(f"no images in the class folder {few(empty, 'folder')} of '{top}'", path=("classes",))
    if outside := [name for name in names if "/" not in name]:
        raise SpecError(f"{few(outside, 'image')} not inside a class folder of '{top}': move or remove them", path=("classes",))
    return classes


def check_folder(folder: Path, key: str) -> Path:
    """Return the folder; raise SpecError with the nearest existing name if there is none."""
    if os.path.isdir(folder):  # which, as the others here, takes what no file can be called
        return folder
    if os.path.exists(folder):
        raise SpecError(f"must be a folder, and '{folder}' is a file", path=(key,))
    if not os.path.isdir(folder.parent):
        raise SpecError(f"no such folder '{folder}', nor '{folder.parent}'", path=(key,))
    near = did_you_mean(folder.name, (p.name for p in folder.parent.iterdir() if p.is_dir()))
    raise SpecError(f"no such folder '{folder}'{near}", path=(key,))


def images_below(top: Path, skip: Container[str] = ()) -> list[str]:
    """Return the images below a folder as relative paths in natural order. Hidden files, and folders whose real path is in
    `skip`, are left out."""
    known, names = list_image_suffixes(), []
    for folder, _, files in walk_folders(top, skip):
        kept = (file for file in files if os.path.splitext(file)[1].lower() in known)
        names += [(folder / file).relative_to(top).as_posix() for file in kept]
    return sorted(names, key=make_sort_key)


def walk_folders(top: Path, skip: Container[str] = ()) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield each folder below one, once, with the names of its folders, which the caller may shorten, and of its files.

    Links are followed. Hidden folders and files, and folders whose real path is in `skip`, are left out.
    """
    seen = set[str]()
    for folder, folders, files in os.walk(top, followlinks=True):
        here = os.path.realpath(folder)
        if here in seen or here in skip:
            folders.clear()
            continue
        seen.add(here)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield Path(folder), folders, [name for name in files if not name.startswith(".")]


def make_sort_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders numbers in names by value, folder by folder."""
    parts = re.split(r"(\d+)", name.replace("/", "\0"))
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts] + [(0, name)]


def _condition_folder(spec: Data, base: Path) -> Path | None:
    """Return the folder of condition images, if conditions are given as one and not as `module:function`."""
    if spec.conditions is None or ":" in spec.conditions.name:
        return None
    if spec.conditions.options:
        raise SpecError("a folder takes no options", path=("conditions", spec.conditions.name))
    return check_folder(base / spec.conditions.name, "conditions")


def match_stems(
    names: Sequence[str], folder: Path, key: str = "conditions", kind: str = "condition image"
) -> list[Path]:
    """Return the further image of each name: the same path below `folder`, with any suffix.

    Raises SpecError, at `key`, if any are missing.
    """
    found: dict[str, str] = {}
    for name in images_below(folder):
        stem = os.path.splitext(name)[0]
        if stem in found:
            raise SpecError(f"'{found[stem]}' and '{name}' in '{folder}' have the same name without suffix", path=(key,))
        found[stem] = name
    if missing := [name for name in names if os.path.splitext(name)[0] not in found]:
        near = did_you_mean(os.path.splitext(missing[0])[0], found)
        raise SpecError(f"no {kind} for {few(missing, 'image')} in '{folder}'{near}", path=(key,))
    return [folder / found[os.path.splitext(name)[0]] for name in names]


def few(names: Sequence[str], kind: str) -> str:
    """List names for a message: all of a few, else the first three and how many there are."""
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more {kind}s"


@cache
def list_image_suffixes() -> frozenset[str]:
    """Return the suffixes of files that PIL opens."""
    Image.init()
    return frozenset(suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN)


class MetadataLine(Section, extra="allow"):
    """What one line says of an image; `file_name` is relative to the file's folder, `text` another word for `caption`."""

    file_name: str
    text: str | None = None
    caption: str | None = None


def read_metadata(file: Path, top: Path, names: Collection[str]) -> dict[str, dict[str, Any]]:
    """Read the values that the lines of a `metadata.jsonl` give to images, whose `names` are relative to `top`; null is left
    out.

    Returns an empty dict if there is no file. Raises SpecError with file and line.
    """
    found: dict[str, dict[str, Any]] = {}
    if not os.path.lexists(file):
        return found
    whole = reading.read_text(file, DEFAULT.lines, lambda finding: SpecError(finding, where=Where(str(file))))
    for number, text in enumerate(whole.split("\n"), 1):
        if not text.strip():
            continue
        where = Where(str(file), number)
        data = parse_json(text, lambda finding, where=where: SpecError(finding, where=where))  # type: ignore[misc]
        with Source(data, str(file), {(): where}).inside():
            line = validate(MetadataLine, data)
            values = {key: value for key, value in (line.model_extra or {}).items() if value is not None}
            name = (file.parent.relative_to(top) / line.file_name).as_posix()
            if line.text is not None and line.caption is not None:
                raise SpecError("give either 'text' or 'caption', not both")
            values |= {key: getattr(validate(ImageSettings, {key: values[key]}), key) for key in READ if key in values}
            if taken := [key for key in OWN if key in values]:
                raise SpecError(f"the key '{taken[0]}' is reserved by the loader: rename it")
            if name not in names:
                raise SpecError(f"no image '{name}'{did_you_mean(name, names)}")
            if name in found:
                raise SpecError(f"'{name}' is listed in an earlier line already")
        caption = line.caption if line.text is None else line.text
        found[name] = values if caption is None else {**values, "caption": caption}
    return found


def _numbered(names: Sequence[str], values: list[dict[str, Any]]) -> list[str] | None:
    """Convert text labels to numbers, in place, and return the classes: the sorted texts. None without such labels. the texts,
    sorted. None without such labels.

    Raises SpecError where some images have a key and others do not, and for labels of several kinds.
    """
    for key in sorted({key for value in values for key in value if key != "caption"}):
        without = [name for name, value in zip(names, values, strict=True) if key not in value]
        if without:
            given = f"'{key}' for {len(names) - len(without)} of {len(names)} images"
            raise SpecError(f"{METADATA} has {given}, and none for '{without[0]}'", path=("images",))
    kinds = {type(value["label"]): name for name, value in zip(names, values, strict=True) if "label" in value}
    if kinds.keys() <= {int}:
        return None
    if kinds.keys() != {str}:
        several = ", ".join(f"{kind.__name__} ('{kinds[kind]}')" for kind in sorted(kinds, key=lambda kind: kind.__name__))
        raise SpecError(f"labels in {METADATA} must all be whole numbers or all text, not {several}", path=("images",))
    classes = sorted({value["label"] for value in values})
    number = {name: i for i, name in enumerate(classes)}
    for value in values:
        value["label"] = number[value["label"]]
    return classes


def _put_captions(names: Sequence[str], values: list[dict[str, Any]], said: Sequence[ImageSettings], law: str) -> None:
    """Set the captions of the samples, in place: from metadata, else from the settings `said`.

    `required`: an image without a caption, or with an empty one, is a SpecError, unless all images have labels and none a
    caption. `filename` is the same, with the file's name as the last resort. `optional`: the caption is "". `none`: there are
    no captions.
    """
    for name, value, settings in zip(names, values, said, strict=True):
        if "caption" in value:
            settings = settings.model_copy(update={"plain": value["caption"], "prompt": None})
        elif law == "filename" and not (settings.plain or settings.prompt):
            settings = settings.under(ImageSettings(plain=read_name(Path(name).stem)))
        value["caption"] = settings.caption() or ""
    without = [name for name, value in zip(names, values, strict=True) if not value["caption"]]
    labelled = len(without) == len(names) and all("label" in value for value in values)
    if without and not labelled and law not in ("optional", "none"):
        first = ", ".join(f"'{name}'" for name in without[:5]) + (", ..." if len(without) > 5 else "")
        raise SpecError(
            f"{len(without)} of {len(names)} images have no caption: {first}; put a .txt beside each or a line in {METADATA}, "
            "or say 'captions: optional', 'captions: filename' or 'captions: none'",
            path=("images",),
        )
    if law == "none" or (labelled and law != "optional"):
        for value in values:
            del value["caption"]
