"""Exporters: what turns latency models into files that a simulator reads.

An exporter is a class with the attributes of `Exporter`. A package makes its
own known through the entry-point group ``dooly.exporters``; those of this
project lie in ``shims/`` and are also found where nothing is installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dooly_backend.errors import InputError
from dooly_backend.plugins import Plugins

if TYPE_CHECKING:
    from dooly_backend.regression.latency import LatencyModel

GROUP = "dooly.exporters"
MANIFEST_FILE = "manifest.json"
WRITTEN_BY = "dooly-export"

#: What the manifest says of an export: JSON, with at least format, model,
#: environment, command and the keys that `write_manifest` adds.
Manifest = dict[str, Any]


@runtime_checkable
class Exporter(Protocol):
    """One output format. `options` names what `export` accepts, with a line of help each."""

    name: str
    description: str
    options: Mapping[str, str]

    def export(
        self, models: Sequence[LatencyModel], out: Path, options: Mapping[str, Any]
    ) -> Manifest:
        """Write `models` (one per parallelism degree) into the new folder `out`.

        Raises InputError for options, models or folders that it cannot use;
        then nothing is left behind.
        """


# -- discovery ----------------------------------------------------------------

_PLUGINS: Plugins[Exporter] = Plugins(
    Exporter,  # type: ignore[type-abstract]
    group=GROUP,
    listed_as="EXPORTERS",
    noun="exporter",
    what="export format",
    parts="name, description or export",
)


def exporter_names() -> list[str]:
    """Names of every exporter that can be found, sorted."""
    return _PLUGINS.names()


def get_exporter(name: str) -> Exporter:
    """The exporter of that name. Raises InputError naming the known ones."""
    return _PLUGINS.get(name)


# -- writing ------------------------------------------------------------------


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out` that takes its place when the body ends well.

    An earlier export in `out` is replaced; a folder with anything else in it is
    refused. When the body fails, or the disk does, nothing is left behind.
    Raises InputError.
    """
    out = out.expanduser().absolute()
    _check_replaceable(out)
    with _as_input_error(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        with _as_input_error(out):
            folder.chmod(0o777 & ~_umask())  # mkdtemp's 0700 is for secrets, not for exports
            yield folder
            _take_place(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_manifest(folder: Path, manifest: Manifest, scratch: Sequence[str] = ()) -> Manifest:
    """Write the manifest of everything in `folder`; returns it completed.

    Adds `written_by`, the SHA-256 of every file (`files`), of all of them
    together (`digest`), and the names that using the export may add (`scratch`).
    """
    files = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    whole = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    complete = {
        **manifest,
        "written_by": WRITTEN_BY,
        "digest": whole,
        "files": files,
        "scratch": sorted(scratch),
    }
    text = json.dumps(complete, indent=2, ensure_ascii=False, allow_nan=False)
    (folder / MANIFEST_FILE).write_text(text + "\n", "utf-8")
    return complete


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an export. Raises InputError where `folder` is none."""
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text("utf-8"))
    except OSError:
        raise InputError(f"{folder} is no export: it has no readable {MANIFEST_FILE}") from None
    except ValueError:
        raise InputError(f"{folder} is no export: its {MANIFEST_FILE} is not JSON") from None
    if not isinstance(manifest, dict) or manifest.get("written_by") != WRITTEN_BY:
        raise InputError(f"{folder} is no export: its {MANIFEST_FILE} is another program's")
    return manifest


def _check_replaceable(out: Path) -> None:
    """Refuse a file, and a folder with anything but an earlier export in it."""
    if not os.path.lexists(out):
        return
    if out.is_symlink() or not out.is_dir():
        raise InputError(f"{out} is not a folder: give a new or empty one")
    with _as_input_error(out):
        if not any(out.iterdir()):
            return
        foreign = _foreign_file(out)
    if foreign is not None:
        raise InputError(
            f"{out} holds files that no export wrote ({foreign}): give a new or empty folder"
        )


def _foreign_file(out: Path) -> str | None:
    """A file of `out` that is not of an earlier export, None when all are."""
    try:
        manifest = read_manifest(out)
    except InputError:
        return min(path.name for path in out.iterdir())
    ours = {*manifest.get("files", ()), MANIFEST_FILE}
    scratch = {*manifest.get("scratch", ()), "__pycache__"}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if name.partition("/")[0] in scratch or (path.is_dir() and not path.is_symlink()):
            continue
        if name not in ours:
            return name
    return None


def _take_place(folder: Path, out: Path) -> None:
    """Move `folder` to `out`; an earlier export goes only when the new one is in place."""
    if not out.exists():
        folder.rename(out)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".old", dir=out.parent))
    try:
        out.rename(old / "export")
        try:
            folder.rename(out)
        except OSError:
            (old / "export").rename(out)
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _as_input_error(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(f"cannot write {out}: {reason}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
