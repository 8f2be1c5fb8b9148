"""Where Vidur's profiling tables lie in a folder, in either layout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dooly_backend.errors import InputError
from dooly_backend.exporters import read_manifest
from dooly_backend.importers import Wanted

from .ranges import Layout

MLP, ATTENTION, ALL_REDUCE = "mlp.csv", "attention.csv", "all_reduce.csv"


@dataclass(frozen=True)
class Source:
    """The tables of one model on one device. `network` is None where there are no collectives.

    `manifest` is that of the export which the tables are from; empty for Vidur's own.
    """

    root: Path
    layout: Layout
    device: str
    model: str
    mlp: Path
    attention: Path
    network: Path | None
    manifest: Mapping[str, Any]

    @property
    def files(self) -> list[Path]:
        return [self.mlp, self.attention, *([self.network] if self.network else [])]


def find_sources(folder: Path, wanted: Wanted) -> list[Source]:
    """What is wanted of `folder`, by device and model. Raises InputError where nothing is."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give one with Vidur's profiling tables")
    root = folder.resolve()
    manifest = _manifest(root)
    scratch = tuple(manifest.get("scratch", ()))
    found = [*_repo(root, scratch, manifest, wanted), *_pypi(root, scratch, manifest, wanted)]
    if not found:
        raise InputError(
            f"{folder} has no tables of Vidur{_asked(wanted)}: they lie in "
            "data/profiling/compute/DEVICE/MODEL/{mlp,attention}.csv or profiling_data/compute"
        )
    for source in found:
        for path in (source.mlp, source.attention):
            if not path.is_file():
                raise InputError(
                    f"{path.relative_to(root)} is missing: {source.model} on {source.device} "
                    "needs both mlp.csv and attention.csv (in a clone, try `git lfs pull`)"
                )
    return found


def _asked(wanted: Wanted) -> str:
    parts = [f" of {wanted.model}"] if wanted.model else []
    parts += [f" on {wanted.device}"] if wanted.device else []
    return "".join(parts)


def _manifest(root: Path) -> Mapping[str, Any]:
    try:
        return read_manifest(root)
    except InputError:
        return {}


def _below(root: Path, pattern: str, scratch: tuple[str, ...]) -> Iterator[Path]:
    """Files that fit, without what running an export left behind."""
    for path in sorted(root.rglob(pattern)):
        if path.relative_to(root).parts[0] not in scratch:
            yield path


# -- microsoft/vidur ----------------------------------------------------------


def _repo(
    root: Path, scratch: tuple[str, ...], manifest: Mapping[str, Any], wanted: Wanted
) -> Iterator[Source]:
    """``compute/DEVICE/MODEL/mlp.csv`` beside ``network/DEVICE_.../all_reduce.csv``."""
    tables = [path for name in (MLP, ATTENTION) for path in _below(root, name, scratch)]
    for place in sorted({path.parent for path in tables if "compute" in path.parts}):
        index = len(place.parts) - 1 - place.parts[::-1].index("compute")
        device, model = place.parts[index + 1 : index + 2], "/".join(place.parts[index + 2 :])
        if not device or not model or not wanted.fits(model, device[0]):
            continue
        networks = {
            path.parent.name: path
            for path in sorted((Path(*place.parts[:index]) / "network").glob("*/" + ALL_REDUCE))
        }
        yield Source(
            root,
            "repo",
            device[0],
            model,
            place / MLP,
            place / ATTENTION,
            _network(networks, device[0], wanted),
            manifest,
        )


def _network(networks: Mapping[str, Path], device: str, wanted: Wanted) -> Path | None:
    """The one profile of collectives of `device`. Raises InputError where there are several."""
    own = {name: path for name, path in networks.items() if name.startswith(device + "_")}
    chosen = {name: path for name, path in own.items() if name in wanted.networks}
    choices = chosen or own
    if len(choices) > 1:
        raise InputError(
            f"{device} has several networks ({', '.join(choices)}): choose one with --network"
        )
    return next(iter(choices.values()), None)


# -- vidur from PyPI ----------------------------------------------------------


def _pypi(
    root: Path, scratch: tuple[str, ...], manifest: Mapping[str, Any], wanted: Wanted
) -> Iterator[Source]:
    """Snapshots of datasets as the Hugging Face hub caches them, told by their config.json."""
    compute: list[tuple[dict[str, Any], Path]] = []
    networks: dict[str, Path] = {}
    for path in _below(root, "config.json", scratch):
        config = _config(path)
        if not _is_current(path.parent):
            continue
        if {"model", "device_sku"} <= set(config):
            compute.append((config, path.parent))
        elif "sku" in config and (path.parent / f"{ALL_REDUCE}.xz").is_file():
            networks[str(config["sku"])] = path.parent / f"{ALL_REDUCE}.xz"
    for config, place in compute:
        model, device = str(config["model"]), str(config["device_sku"])
        if wanted.fits(model, device):
            yield Source(
                root,
                "pypi",
                device,
                model,
                place / f"{MLP}.xz",
                place / f"{ATTENTION}.xz",
                _network(networks, device, wanted),
                manifest,
            )


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _is_current(snapshot: Path) -> bool:
    """Whether it is the revision that ``refs/main`` names, or there is none that says."""
    reference = snapshot.parent.parent / "refs" / "main"
    try:
        return reference.read_text("utf-8").strip() == snapshot.name
    except OSError:
        return True
