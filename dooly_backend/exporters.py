"""Exporters: what turns latency models into files that a simulator reads.

An exporter is a class with the attributes of `Exporter`. A package makes its
own known through the entry-point group ``dooly.exporters``; those of this
project lie in ``shims/`` and are also found where nothing is installed.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import logging
import os
import pkgutil
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dooly_backend.errors import InputError

if TYPE_CHECKING:
    from dooly_backend.regression.latency import LatencyModel

GROUP = "dooly.exporters"
MANIFEST_FILE = "manifest.json"
WRITTEN_BY = "dooly-export"

#: What the manifest says of an export: JSON, with at least format, model,
#: environment, command and the keys that `write_manifest` adds.
Manifest = dict[str, Any]

logger = logging.getLogger(__name__)


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


def exporter_names() -> list[str]:
    """Names of every exporter that can be found, sorted."""
    return sorted(loaders(GROUP, "EXPORTERS"))


def get_exporter(name: str) -> Exporter:
    """The exporter of that name. Raises InputError naming the known ones."""
    found = loaders(GROUP, "EXPORTERS")
    if name not in found:
        known = ", ".join(sorted(found)) or "none (is the package installed completely?)"
        raise InputError(f"unknown export format {name!r}: known are {known}")
    try:
        exporter = found[name]()
    except (ImportError, AttributeError) as error:
        raise InputError(f"the exporter {name!r} cannot be loaded: {error}") from error
    if not isinstance(exporter, Exporter):
        raise InputError(f"the exporter {name!r} is none: it lacks name, description or export")
    return exporter


def loaders(group: str, listed_as: str) -> dict[str, Callable[[], Any]]:
    """Constructor by name of what packages offer in an entry-point group; it wins over the source.

    For an uninstalled checkout the packages of ``shims`` list theirs in a dict called `listed_as`.
    """
    found = _source_tree_loaders(listed_as)
    for entry in metadata.entry_points(group=group):
        package = entry.module.partition(".")[0]
        if entry.name in found and importlib.util.find_spec(package) is None:
            continue  # a build's metadata in a checkout, without what it installs
        found[entry.name] = lambda entry=entry: entry.load()()  # type: ignore[misc]
    return found


def _source_tree_loaders(listed_as: str) -> dict[str, Callable[[], Any]]:
    """Those of the ``shims`` folder beside this package, for an uninstalled checkout.

    Every package in it names its own in a dict `listed_as` (name -> class).
    """
    folder = Path(__file__).resolve().parent.parent / "shims"
    parent = _package_of(folder)
    if parent is None:
        return {}
    found: dict[str, Callable[[], Any]] = {}
    for module in pkgutil.iter_modules([str(folder)]):
        try:
            package = importlib.import_module(f"{parent}.{module.name}")
        except ImportError as error:  # another `shims` on the path, or a broken one
            logger.warning("shims/%s is left out: %s", module.name, error)
            continue
        found.update(getattr(package, listed_as, {}))
    return found


def _package_of(folder: Path) -> str | None:
    """The name by which `folder` can be imported: on the path, or installed as editable."""
    for name in ("dooly_shims", "shims"):
        spec = importlib.util.find_spec(name)
        if spec and str(folder) in (spec.submodule_search_locations or ()):
            return name
    return None


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
