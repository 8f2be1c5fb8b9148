"""What a run is made of: model, sweep and hardware descriptions, and run options.

The descriptions that ship with the project lie in ``configs/`` (installed as
the package `dooly_configs`); files of the user's own work the same way. All of
them are checked when they are loaded, and an error is one line that says what
to do.
"""

from __future__ import annotations

import difflib
import importlib.resources
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from dooly_backend.errors import InputError
from dooly_backend.workload import Batch, WorkloadPoint

ExecutionMode = Literal["eager", "piecewise", "full_graph"]

# Strict: YAML's `yes` is True, and True would pass for 1.
PositiveInt = Annotated[int, Field(gt=0, strict=True)]
NaturalInt = Annotated[int, Field(ge=0, strict=True)]


def _sorted_unique(values: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(values)))


Axis = Annotated[tuple[PositiveInt, ...], Field(min_length=1), AfterValidator(_sorted_unique)]
AxisFromZero = Annotated[
    tuple[NaturalInt, ...], Field(min_length=1), AfterValidator(_sorted_unique)
]


class Description(BaseModel):
    """Frozen, and a misspelt field is an error rather than ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")


_D = TypeVar("_D", bound=Description)


# -- models -------------------------------------------------------------------


class ModelDescription(Description):
    """A model by its Hugging Face config.json, whole."""

    name: str
    hf_config: dict[str, Any]

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        count = _layer_count(self.hf_config)
        assert count is not None  # load_model refuses a config without them
        return count

    @property
    def architecture(self) -> str:
        return str(self.hf_config["architectures"][0])


def load_model(text: str) -> ModelDescription:
    """The model that `text` means: a folder, a JSON file, or a known name.

    A folder holds a config.json. Names are those of `known_models`, as
    ``ORG/NAME``, ``ORG__NAME`` or NAME alone where only one has it, in any
    case. Raises InputError.
    """
    path = Path(text).expanduser()
    if path.is_dir():
        return _model_from_folder(path)
    if path.is_file():
        return _read_model(path, _name_of_file(path))
    if text.startswith(("/", "./", "../", "~")) or text.endswith(".json"):
        raise InputError(f"no such file or folder: {text}")
    name = _find_model(text)
    return _read_model(known_models()[name], name)


def known_models() -> dict[str, Path]:
    """Every shipped model, ``ORG/NAME`` -> its JSON file."""
    files = sorted((configs_folder() / "models").glob("*.json"))
    return {_name_of_file(path): path for path in files}


def _model_from_folder(folder: Path) -> ModelDescription:
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(
            f"no config.json in {folder}: give a folder that holds a model's Hugging Face config"
        )
    return _read_model(path, _name_of_folder(folder))


def _read_model(path: Path, name: str) -> ModelDescription:
    try:
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path} is not JSON ({reason})") from None
    if not isinstance(config, dict):
        raise InputError(f"{path} is no Hugging Face model config: it is not a JSON object")
    architectures = config.get("architectures")
    if not (
        isinstance(architectures, list)
        and architectures
        and all(isinstance(item, str) for item in architectures)
    ):
        raise InputError(f"{path} is no Hugging Face model config: it has no 'architectures'")
    if _layer_count(config) is None:
        raise InputError(f"{path} is no Hugging Face model config: it has no 'num_hidden_layers'")
    return ModelDescription(
        name=name or str(config.get("_name_or_path", "model")), hf_config=config
    )


def _layer_count(config: dict[str, Any]) -> int | None:
    """Number of layers; multimodal models keep it with their text model."""
    text_config = config.get("text_config")
    for part in (config, text_config if isinstance(text_config, dict) else {}):
        for key in ("num_hidden_layers", "n_layer", "num_layers"):
            count = part.get(key)
            if isinstance(count, int) and not isinstance(count, bool) and count > 0:
                return count
    return None


def _name_of_file(path: Path) -> str:
    if path.name == "config.json":
        return _name_of_folder(path.parent)
    return path.stem.replace("__", "/", 1)


def _name_of_folder(folder: Path) -> str:
    folder = folder.resolve()
    if folder.parent.name == "snapshots":  # the hub's cache: models--ORG--NAME/snapshots/COMMIT
        repository = folder.parent.parent.name
        if repository.startswith("models--"):
            return repository.removeprefix("models--").replace("--", "/", 1)
    return folder.name


def _find_model(text: str) -> str:
    """The known model that `text` names. Raises InputError."""
    names = list(known_models())
    wanted = text.replace("__", "/", 1).lower()
    by_name = [name for name in names if name.lower() == wanted]
    found = by_name or [name for name in names if _basename(name).lower() == wanted]
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(f"{text!r} names several models: {', '.join(found)}")
    candidates = {name.lower(): name for name in names}
    candidates |= {_basename(name).lower(): name for name in names}
    close = _closest(wanted, candidates)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise InputError(
        f"unknown model {text!r}: {hint}"
        "`dooly models` lists the known ones, and a folder with a config.json works too"
    )


def _basename(name: str) -> str:
    return name.rpartition("/")[2]


def _closest(wanted: str, candidates: dict[str, str]) -> list[str]:
    """Up to three values whose keys look like `wanted`, best first."""
    matches = difflib.get_close_matches(wanted, candidates, n=5, cutoff=0.6)
    return list(dict.fromkeys(candidates[match] for match in matches))[:3]


# -- sweeps -------------------------------------------------------------------


_POWERS_OF_TWO = tuple(2**n for n in range(10))


class PrefillGrid(Description):
    """Prefill chunks of every length after every history."""

    chunk: Axis
    history: AxisFromZero = (0,)


class DecodeGrid(Description):
    """Decode batches of every size at every context."""

    batch: Axis
    context: Axis


class RoutingGrid(Description):
    """Mixture-of-experts layers at every number of tokens and of experts that fire."""

    tokens: Axis
    experts: Axis


class Sweep(Description):
    """The workload points at which operations are timed."""

    name: str
    tokens: Axis
    requests: Axis
    prefill: PrefillGrid
    decode: DecodeGrid
    routing: RoutingGrid | None = None  # None: the sweep's tokens, experts in powers of two

    def token_points(self) -> list[WorkloadPoint]:
        """Points of the operations that depend on the number of tokens."""
        return [WorkloadPoint("tokens", num_tokens=count) for count in self.tokens]

    def request_points(self) -> list[WorkloadPoint]:
        """Points of the operations that depend on the number of requests."""
        return [WorkloadPoint("requests", num_reqs=count) for count in self.requests]

    def routing_points(self, experts: int, top_k: int) -> list[WorkloadPoint]:
        """Points of a MoE layer of `experts` experts, `top_k` of them for a token.

        At every number of tokens from the fewest experts that can fire to the
        most, with the grid's numbers between them.
        """
        tokens = self.routing.tokens if self.routing else self.tokens
        counts = self.routing.experts if self.routing else _POWERS_OF_TWO
        points = []
        for count in tokens:
            most = min(experts, count * top_k)
            wanted = {top_k, most, *(n for n in counts if top_k < n < most)}
            points += [
                WorkloadPoint("routing", num_tokens=count, num_experts=n) for n in sorted(wanted)
            ]
        return points

    def batch_points(self, max_model_len: int) -> list[WorkloadPoint]:
        """Points of attention: the prefills and decodes that the model has room for."""
        prefills = (
            Batch.prefill(chunk, history)
            for history in self.prefill.history
            for chunk in self.prefill.chunk
        )
        decodes = (
            Batch.decode(count, context)
            for context in self.decode.context
            for count in self.decode.batch
        )
        fitting = [b for b in (*prefills, *decodes) if b.longest <= max_model_len]
        # A chunk of one token after a history is a decode: keep one of the two.
        unique = {batch.key: batch for batch in fitting}
        return [WorkloadPoint.of("batch", batch) for batch in unique.values()]


class AdaptiveSweep(Description):
    """Ranges in which points are chosen while measuring, and when to stop.

    The engine's own limits bound the ranges, too. `target` is the mean relative
    error on the last `held_out` points of a curve or surface, each predicted
    before it was measured; `points` bounds their number where it stays larger.
    """

    name: str
    target: Annotated[float, Field(gt=0, lt=1)]
    tokens: PositiveInt  # new tokens of a step, at most
    requests: PositiveInt  # requests of a step, at most
    context: PositiveInt  # tokens of a request in the KV cache, at most
    points: PositiveInt = 40
    held_out: PositiveInt = 4


def load_sweep(name_or_path: str) -> Sweep | AdaptiveSweep:
    """A sweep from ``configs/sweeps`` by name, or from a YAML file. Raises InputError.

    A description with a `target` is adaptive, any other a grid.
    """
    path = _description_path("sweep", name_or_path)
    values = read_yaml(path)
    if "target" in values:
        return validated(AdaptiveSweep, values, str(path))
    return validated(Sweep, values, str(path))


def load_grid(name_or_path: str) -> Sweep:
    """As `load_sweep`, where only a grid will do. Raises InputError."""
    sweep = load_sweep(name_or_path)
    if isinstance(sweep, AdaptiveSweep):
        raise InputError(f"sweep {sweep.name!r} has no fixed points: choose a grid, like quick")
    return sweep


# -- hardware -----------------------------------------------------------------


class Interconnect(Description):
    """How the devices of one node talk; bandwidth of both directions together."""

    name: str
    bandwidth_gbs: Annotated[float, Field(gt=0)]


class Hardware(Description):
    """A device's datasheet. Peaks are dense; `sources` says where each figure is from."""

    name: str
    kind: Literal["cuda", "cpu"]
    match: tuple[str, ...]  # parts of the names that drivers give the device
    unless: tuple[str, ...] = ()  # parts of the names of other variants
    fp16_tflops: Annotated[float, Field(gt=0)] | None = None
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    memory_bandwidth_gbs: Annotated[float, Field(gt=0)] | None = None
    interconnect: Interconnect | None = None
    devices_per_node: PositiveInt | None = None
    sources: dict[str, str]

    def matched_length(self, device_name: str) -> int:
        """Length of the longest part that fits `device_name`; 0: another device."""
        device = device_name.lower()
        if any(part.lower() in device for part in self.unless):
            return 0
        words = f" {_spaced(device)} "
        fitting = (part for part in self.match if f" {_spaced(part.lower())} " in words)
        return max(map(len, fitting), default=0)


def _spaced(text: str) -> str:
    """Words of `text` with one space between: "A100-SXM4" is A100, not an A10."""
    return " ".join("".join(c if c.isalnum() else " " for c in text).split())


def load_hardware(name: str) -> Hardware:
    """A device from ``configs/hardware`` by name, or from a YAML file. Raises InputError."""
    return _load_description(Hardware, "hardware", name)


def hardware_for(device_name: str) -> Hardware | None:
    """The shipped description of the device that a driver calls `device_name`."""
    known = [load_hardware(str(path)) for path in _known("hardware").values()]
    best = max(known, key=lambda hardware: hardware.matched_length(device_name))
    return best if best.matched_length(device_name) else None


# -- runs ---------------------------------------------------------------------


class RunOptions(Description):
    """How the engine serves the model in a traced or timed run."""

    model: ModelDescription
    engine: str = "vllm"
    backend: str | None = None  # attention backend; None: the engine's choice
    tensor_parallel: PositiveInt = 1
    pipeline_parallel: PositiveInt = 1
    expert_parallel: PositiveInt = (
        1  # ranks that share the experts, all tensor-parallel ones among them
    )
    rank: NaturalInt = 0  # of the data x pipeline x tensor ranks, the one that runs
    dtype: str | None = None  # None: the model's own
    kv_cache_dtype: str = "auto"
    block_size: PositiveInt | None = None  # None: the engine's choice
    layers: PositiveInt | None = None  # None: as few as show every kind of layer
    threads: PositiveInt | None = None  # of a CPU engine; None: the engine's choice
    max_num_seqs: PositiveInt = 64
    max_num_batched_tokens: PositiveInt = 2048
    execution_mode: ExecutionMode = "eager"

    @model_validator(mode="after")
    def _check_rank(self) -> Self:
        tensor, expert = self.tensor_parallel, self.expert_parallel
        if expert > 1 and expert % tensor:
            raise ValueError(
                f"expert_parallel {expert} is no multiple of tensor_parallel {tensor}: "
                "every tensor-parallel rank holds experts"
            )
        ranks = max(expert, tensor) * self.pipeline_parallel
        if self.rank >= ranks:
            raise ValueError(f"rank {self.rank} is beyond the {ranks} ranks, which count from 0")
        return self

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """As the constructor, but what is wrong is an InputError."""
        return validated(cls, values, "run options")


# -- files --------------------------------------------------------------------


def configs_folder() -> Path:
    """``configs/`` beside the package in a checkout, else the installed `dooly_configs`."""
    beside = Path(__file__).resolve().parent.parent / "configs"
    if (beside / "models").is_dir():
        return beside
    return Path(str(importlib.resources.files("dooly_configs")))


def _known(kind: str) -> dict[str, Path]:
    folder = {"sweep": "sweeps", "hardware": "hardware"}[kind]
    return {path.stem: path for path in sorted((configs_folder() / folder).glob("*.yaml"))}


def _load_description(description: type[_D], kind: str, name_or_path: str) -> _D:
    path = _description_path(kind, name_or_path)
    return validated(description, read_yaml(path), str(path))


def _description_path(kind: str, name_or_path: str) -> Path:
    known = _known(kind)
    path = known.get(name_or_path.lower()) or Path(name_or_path).expanduser()
    if not path.is_file():
        raise unknown_name(kind, name_or_path, known, "a YAML file works too")
    return path


def unknown_name(kind: str, name: str, known: Iterable[str], also: str) -> InputError:
    """The error for a name that is none of `known`."""
    names = list(known)
    close = _closest(name.lower(), {known: known for known in names})
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return InputError(f"unknown {kind} {name!r}: {hint}known are {', '.join(names)}, and {also}")


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in the YAML file at `path`. Raises InputError."""
    try:
        value = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        raise InputError(f"{path} is not YAML{line}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} is not a YAML mapping")
    return value


def validated(description: type[_D], values: dict[str, Any], where: str) -> _D:
    """`values` as a description; what is wrong is an InputError that begins with `where`."""
    try:
        return description.model_validate(values)
    except ValidationError as error:
        problems = (
            ": ".join(
                part
                for part in (
                    ".".join(map(str, problem["loc"])),
                    problem["msg"].removeprefix("Value error, "),
                )
                if part
            )
            for problem in error.errors(include_url=False)
        )
        raise InputError(f"{where}: {_joined(problems)}") from None


def _joined(lines: Iterable[str]) -> str:
    return "; ".join(line.strip() for line in lines)
