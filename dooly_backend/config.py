"""What a run is made of: model, sweep and hardware descriptions, and run options.

The descriptions that ship with the project lie in ``configs/`` (installed as
the package `dooly_configs`); files of the user's own work the same way. All of
them are checked when they are loaded, and an error is one line that says what
to do.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from dooly_backend.descriptions import (
    Description,
    NaturalInt,
    PositiveInt,
    closest,
    configs_folder,
    known_files,
    load_description,
    read_yaml,
    unknown_name,
    validated,
)
from dooly_backend.errors import InputError
from dooly_backend.sweeps import (
    AdaptiveSweep,
    DecodeGrid,
    Grid,
    MixedGrid,
    PrefillGrid,
    RoutingGrid,
    Sweep,
    UnevenGrid,
    VidurSweep,
    load_grid,
    load_sweep,
)

__all__ = [
    "AdaptiveSweep",
    "DecodeGrid",
    "Description",
    "ExecutionMode",
    "Grid",
    "Hardware",
    "Interconnect",
    "MixedGrid",
    "ModelDescription",
    "PrefillGrid",
    "RoutingGrid",
    "RunOptions",
    "Sweep",
    "UnevenGrid",
    "VidurSweep",
    "configs_folder",
    "hardware_for",
    "known_models",
    "load_grid",
    "load_hardware",
    "load_model",
    "load_sweep",
    "read_yaml",
    "unknown_name",
    "validated",
]

ExecutionMode = Literal["eager", "piecewise", "full_graph"]

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
    close = closest(wanted, candidates)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise InputError(
        f"unknown model {text!r}: {hint}"
        "`dooly models` lists the known ones, and a folder with a config.json works too"
    )


def _basename(name: str) -> str:
    return name.rpartition("/")[2]


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
    return load_description(Hardware, "hardware", name)


def hardware_for(device_name: str) -> Hardware | None:
    """The shipped description of the device that a driver calls `device_name`."""
    best = max(_shipped_hardware(), key=lambda hardware: hardware.matched_length(device_name))
    return best if best.matched_length(device_name) else None


@functools.cache
def _shipped_hardware() -> tuple[Hardware, ...]:
    """All shipped descriptions; they are frozen, and reading YAML takes its time."""
    return tuple(load_hardware(str(path)) for path in known_files("hardware").values())


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
    quantization: str | None = None  # of the weights, by the engine; None: as the checkpoint has it
    block_size: PositiveInt | None = None  # None: the engine's choice
    layers: PositiveInt | None = None  # None: as few as show every kind of layer
    threads: PositiveInt | None = None  # of a CPU engine; None: the engine's choice
    max_num_seqs: PositiveInt = 64
    max_num_batched_tokens: PositiveInt = 2048
    # As whom the calls are timed: kernels differ where CUDA graphs are to be replayed.
    execution_mode: ExecutionMode = "eager"
    # Whole steps as the engine runs them by itself, with graphs and compiled code: nothing
    # inside such a step can be captured.
    compiled: bool = False

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
