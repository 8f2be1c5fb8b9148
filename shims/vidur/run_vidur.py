#!/usr/bin/env python3
"""Run Vidur on the tables of this export.

Any option of `vidur.main` may follow and overrides the settings here, such as
``--synthetic_request_generator_config_num_requests 50``. Needs Vidur in the
Python that runs it, and nothing else: the settings are in launch.json.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

EXPORT = Path(__file__).resolve().parent
PREDICTOR = "--random_forrest_execution_time_predictor_config_"


def main() -> None:
    """Register the model and its device with Vidur, and start it."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the tables lie here, not on the hub
    settings = json.loads((EXPORT / "launch.json").read_text("utf-8"))
    try:
        import vidur.config  # noqa: F401
        from vidur.main import main as run
    except ImportError as error:
        _stop(f"cannot import Vidur ({error}): run this with a Python that has it installed")
    layout = _installed_layout()
    if layout != settings["layout"]:
        _stop(
            f"this export is for layout {settings['layout']!r}, the installed Vidur reads "
            f"{layout!r}: export with --layout {layout}"
        )
    classes = _register(settings)  # held: a base knows its subclasses only while they are used
    sys.argv = [sys.argv[0], *_defaults(settings), *sys.argv[1:]]
    try:
        run()
    except KeyError as error:
        limits = ", ".join(f"{name} {value}" for name, value in settings["ranges"].items())
        _stop(f"the workload leaves what this export covers ({limits}): Vidur looked up {error}")
    del classes


def _stop(message: str) -> None:
    sys.exit(f"run_vidur.py: {message}")


def _installed_layout() -> str:
    """Which of the two Vidurs is installed: only the PyPI release has `max_model_len`."""
    from vidur.config.model_config import BaseModelConfig

    names = {field.name for field in dataclasses.fields(BaseModelConfig)}
    return "pypi" if "max_model_len" in names else "repo"


def _register(settings: dict[str, Any]) -> list[type]:
    """Declare the classes: Vidur finds models and devices among its bases' subclasses."""
    from vidur.config.device_sku_config import BaseDeviceSKUConfig
    from vidur.config.model_config import BaseModelConfig
    from vidur.config.node_sku_config import BaseNodeSKUConfig
    from vidur.config.utils import get_all_subclasses
    from vidur.types import ActivationType, NormType

    model = dict(settings["model"])
    name = model.pop("name")
    for known in get_all_subclasses(BaseModelConfig):
        if getattr(known, "get_name", lambda: None)() == name:
            # Vidur takes the first of a name, and its sizes may not be the model's.
            known.get_name = staticmethod(lambda: f"{name} (Vidur's own)")
    length = "max_model_len" if settings["layout"] == "pypi" else "max_position_embeddings"
    model[length] = model.pop("max_length")
    model |= {
        "activation": ActivationType.SILU if model["use_gated_mlp"] else ActivationType.GELU,
        "norm": NormType.RMS_NORM,
    }
    device = settings["device"]
    sku = {key: device[key] for key in ("fp16_tflops", "total_memory_gb")}
    node = {"num_devices_per_node": device["num_devices_per_node"]}
    return [
        _subclass(BaseModelConfig, "ExportedModelConfig", model, get_name=name),
        _subclass(BaseDeviceSKUConfig, "ExportedDeviceSKUConfig", sku, get_type=device["name"]),
        _subclass(BaseNodeSKUConfig, "ExportedNodeSKUConfig", node, get_type=device["network"]),
    ]


def _subclass(base: type, name: str, fields: dict[str, Any], **constants: str) -> type:
    """A dataclass of `base` with these defaults, whose static methods give `constants`."""
    methods = {
        key: staticmethod(lambda value=value: value)  # type: ignore[misc]
        for key, value in constants.items()
    }
    specs = [(key, type(value), value) for key, value in fields.items()]
    return dataclasses.make_dataclass(name, specs, bases=(base,), namespace=methods)


def _defaults(settings: dict[str, Any]) -> list[str]:
    """Vidur's options for these tables; those given by the user come later and win."""
    arguments = [text for option in settings["options"].items() for text in _argument(*option)]
    cache = _cache(settings)
    if settings["layout"] == "repo":
        for name, file in settings["files"].items():
            arguments += [f"{PREDICTOR}{name}_input_file", str(EXPORT / file)]
        return [*arguments, "--metrics_config_cache_dir", str(cache)]
    datasets = settings["datasets"]
    return [
        *arguments,
        *(f"{PREDICTOR}model_profiling_dataset", datasets["compute"]),
        *(f"{PREDICTOR}network_profiling_dataset", datasets["network"]),
        *(f"{PREDICTOR}cache_dir", str(cache)),
    ]


def _argument(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", *map(str, value if isinstance(value, list) else [value])]


def _cache(settings: dict[str, Any]) -> Path:
    """A folder for Vidur's trained models that no other content of the tables shares.

    Vidur keys what it caches by name: an edited table would go unnoticed.
    """
    files = sorted(
        path
        for top in ("data", "profiling_data")
        for path in (EXPORT / top).rglob("*")
        if path.is_file()
    )
    digest = hashlib.sha256((EXPORT / "launch.json").read_bytes())
    for path in files:
        digest.update(path.relative_to(EXPORT).as_posix().encode() + b"\0" + path.read_bytes())
    cache = EXPORT / "cache" / digest.hexdigest()[:16]
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only export
        cache = Path(tempfile.gettempdir()) / f"vidur-{digest.hexdigest()[:16]}"
        cache.mkdir(parents=True, exist_ok=True)
    if settings["layout"] == "pypi":
        # The PyPI release wants tables and cache in one place.
        shutil.copytree(EXPORT / "profiling_data", cache / "profiling_data", dirs_exist_ok=True)
    return cache


if __name__ == "__main__":
    main()
