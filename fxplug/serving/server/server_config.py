"""The configuration of a server, read and checked. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, PrivateAttr, ValidationInfo, field_validator

from ...config.model_section import Dtype
from ...config.run_config import read_passes, read_settings
from ...core.errors import SpecError
from ...core.spec.rules import Pass
from ...core.spec.yaml_source import Section, Text, convert_error, declare, describe_missing, quote_yaml

Size = tuple[int, int]  # width, height


def parse_size(text: Any) -> Size:
    """Parse `WIDTHxHEIGHT`.

    Args:
        text: The text.

    Returns:
        The width and the height, in pixels.

    Raises:
        SpecError: For anything else.
    """
    sides = text.split("x") if isinstance(text, str) else []
    if len(sides) != 2 or not all(side.isascii() and side.isdecimal() and 0 < len(side) < 6 and int(side) for side in sides):
        raise SpecError(f"must be WIDTHxHEIGHT in pixels, such as 1024x768, not {quote_yaml(text)}")
    return int(sides[0]), int(sides[1])


class AdapterSettings(Section):
    """A folder of adapters, and the slots that they are put into."""

    folder: Text | None = declare(None, "the folder of adapter files; null: none, and no slots", "adapters/")
    pass_: Literal["lora", "dora"] = declare(
        "dora", "the pass that makes the slots: `dora` is for DoRA and (IA)3, too, `lora` costs less", "lora", alias="pass"
    )
    at: Text | list[Text] = declare("**", "the layers that get slots, as in a pass", ["**.to_q", "**.to_v"])
    slots: int = declare(16, "how many adapters are in the models at once", 64, ge=1)
    per_sample: int = declare(2, "the most adapters of one request", 4, ge=1)
    rank_max: int = declare(32, "the highest rank of an adapter", 16, ge=1)
    resize: bool = declare(False, "whether a higher rank is lowered to `rank_max`; else the adapter is refused", True)
    groups: Text | list[Text] | None = declare(
        None, "blocks with strengths of their own: `block`, or patterns of paths; null: none", "block"
    )
    regions: bool = declare(False, "whether adapters of a request's regions act there in one run, see `Strength`", True)
    partial: bool = declare(False, "whether an adapter may have layers that are not there", True)
    keep: list[Text] = declare([], "adapters that are loaded at the start and stay", ["ink"])
    models: list[Text] | None = declare(None, "the models that get slots; null: the denoisers", ["unet", "text_encoder"])
    host_mib: int = declare(2048, "MiB of adapters that are kept in host memory", 512, ge=1)


class EngineSettings(Section):
    """How requests are run."""

    rows: int = declare(16, "the most samples of one call of a model", 8, ge=1)
    queue: int = declare(64, "the most requests that wait", 16, ge=1)
    buckets: list[int] | None = declare(None, "sample counts up to which calls are padded; null: none", [2, 4, 8, 16])
    compile: bool = declare(False, "whether models are compiled", True)
    schedulers: list[Text] = declare(
        [], "schedulers of diffusers that a request may name, beside the pipeline's own", ["EulerDiscreteScheduler"]
    )


class LimitSettings(Section):
    """What a request may ask for at most."""

    pixels: int = declare(1536 * 1024, "pixels of a picture", 512 * 512, ge=1)
    multiple: int = declare(8, "the number that width and height must be multiples of", 64, ge=1)
    steps: int = declare(100, "steps", 50, ge=1)
    n: int = declare(4, "pictures of one request", 1, ge=1)
    adapters: int = declare(4, "adapters of one request", 2, ge=0)
    regions: int = declare(4, "regions of one request", 2, ge=0)
    body_mib: int = declare(20, "MiB of a body", 1, ge=1)
    upload_mib: int = declare(2048, "MiB of an adapter that is uploaded", 256, ge=1)
    seconds: float = declare(300.0, "seconds after which a request is cancelled", 60.0, gt=0)


class HttpSettings(Section):
    """The address, and who may use it."""

    host: Text = declare("127.0.0.1", "the address; 0.0.0.0: all of this machine", "0.0.0.0")
    port: int = declare(8000, "the port", 8080, ge=0, le=65535)
    keys: Text | None = declare(None, "a file with a key on each line; null: nobody is asked for one", "keys.txt")
    uploads: bool = declare(False, "whether an admin key may add and delete adapters", True)
    page: bool = declare(True, "whether there is a page at /", False)
    previews: Literal["linear", "none"] = declare(
        "linear", "how previews are made: `linear` of the latents, by what the warm-up has shown; `none`: never", "none"
    )
    drain_s: float = declare(120.0, "seconds that accepted requests have to finish, once the server shall end", 10.0, ge=0)
    cors: list[Text] = declare([], "origins whose pages may call the server from a browser", ["https://example.org"])


class JobSettings(Section):
    """Jobs, and pictures that are answered by their URL."""

    keep_s: float = declare(3600.0, "seconds that the result of a job is kept", 600.0, gt=0)
    keep: int = declare(1000, "the most jobs that are kept", 100, ge=1)
    dir: Text | None = declare(None, "a folder that keeps jobs over a restart; null: they are lost", "jobs/")


class WarmSettings(Section):
    """The calls that are made at the start."""

    prompt: str = declare("", "their prompt", "a photo")
    sizes: list[Text] = declare([], "their sizes, WIDTHxHEIGHT; none: the pipeline's own", ["1024x1024"])

    @field_validator("sizes")
    @classmethod
    def _check_sizes(cls, sizes: list[str]) -> list[str]:
        for index, size in enumerate(sizes):
            try:
                parse_size(size)
            except SpecError as error:
                raise convert_error(SpecError(error.finding, path=(index,))) from None
        return sizes


class RaySettings(Section):
    """The replicas of `--ray`, each with the pipeline and an engine of its own."""

    replicas: int = declare(2, "how many there are", 4, ge=1)
    gpus: float | None = declare(
        None, "GPUs of each; null: 1, or 0 where `device` is cpu or the cluster has none at the start", 1.0, ge=0
    )
    cpus: float = declare(1.0, "CPU cores that Ray keeps for each", 4.0, ge=0)


def _read_passes(value: Any, info: ValidationInfo) -> dict[str, list[Pass]]:
    base = info.context["base"] if info.context else Path.cwd()
    if not isinstance(value, dict):
        raise convert_error(SpecError(f"must be a mapping of passes by the names of models, not {quote_yaml(value)}"))
    try:
        return {name: read_passes(given if isinstance(given, list) else [given], base) for name, given in value.items()}
    except SpecError as error:
        raise convert_error(error) from None


class ServerConfig(Section):
    """A server: the pipeline, and how it is served."""

    model: Text = declare(
        ..., "a folder of a pipeline, a name on the hub, a checkpoint, or `module:function` that gives one", "sdxl/"
    )
    dtype: Dtype | None = declare(None, "the dtype of the models; null: float32", "bfloat16")
    device: Text = declare("auto", "where the models are; `auto`: cuda where there is one", "cpu")
    offload: bool = declare(
        False, "whether models wait on the CPU while another one is called, for a GPU that cannot hold them all", True
    )
    quantize: Literal["int8", "nf4"] | None = declare(None, "how the linear layers of the denoisers are quantised", "int8")
    call: dict[str, Any] = declare({}, "arguments of the pipeline that requests need not give", {"guidance_scale": 3.5})
    adapters: AdapterSettings = declare(AdapterSettings(**{}), "adapters in a folder", {"folder": "adapters/"})
    controls: dict[str, Text] = declare({}, "folders of ControlNets, by the name that an edit gives", {"canny": "canny/"})
    engine: EngineSettings = declare(EngineSettings(), "how requests are run", {"rows": 8})
    limits: LimitSettings = declare(LimitSettings(), "what a request may ask for", {"steps": 50})
    http: HttpSettings = declare(HttpSettings(), "the address, and who may use it", {"port": 8080})
    jobs: JobSettings = declare(JobSettings(), "jobs", {"keep_s": 600})
    warm: WarmSettings = declare(WarmSettings(), "the calls at the start", {"sizes": ["512x512"]})
    ray: RaySettings = declare(RaySettings(**{}), "replicas on several machines", {"replicas": 4})
    passes: Annotated[dict[str, list[Pass]], PlainValidator(_read_passes)] = declare(
        {}, "further passes by model", {"unet": [{"freeu": {}}]}
    )

    _folder: Path = PrivateAttr(default_factory=Path.cwd)

    @property
    def base(self) -> Path:
        """Folder that paths in this configuration are relative to."""
        return self._folder


def load_server_config(source: str | Path, set: Sequence[str] = ()) -> ServerConfig:
    """Read the configuration of a server.

    Args:
        source: A YAML file; or the folder of a pipeline, or another `model`, which is served with defaults.
        set: Changes of values, such as `"http.port=8080"`.

    Returns:
        The configuration.

    Raises:
        SpecError: Anything is wrong; with file and line.
    """
    is_file = str(source).endswith((".yaml", ".yml"))
    config, _, base = read_settings(ServerConfig, source if is_file else {"model": str(source)}, set)
    config._folder = base
    if config.offload and config.quantize:
        raise SpecError("quantised layers cannot wait on the CPU: leave out 'quantize' or 'offload'", path=("offload",))
    places: list[tuple[tuple[str, ...], str | None]] = [
        (("adapters", "folder"), config.adapters.folder), (("http", "keys"), config.http.keys)
    ]  # fmt: skip
    for path, place in places + [(("controls", name), folder) for name, folder in config.controls.items()]:
        if place is not None and not (base / place).exists():
            raise SpecError(f"'{place}': {describe_missing(base / place)}", path=path)
    return config
