"""Finding exporters and importers: what packages offer in an entry-point group.

Those of this project lie in ``shims/`` and are also found where nothing is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

from dooly_backend.errors import InputError

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Plugins(Generic[T]):
    """One kind of plug-in, and the words for it.

    `protocol` is what each must be (checked at runtime), and `parts` says what
    that asks for; `group` is the entry-point group, `listed_as` the dict in
    which packages of ``shims`` list theirs.
    """

    protocol: type[T]
    group: str
    listed_as: str
    noun: str
    what: str
    parts: str

    def names(self) -> list[str]:
        """Names of all that can be found, sorted."""
        return sorted(_loaders(self.group, self.listed_as))

    def get(self, name: str) -> T:
        """The one of that name. Raises InputError naming the known ones."""
        found = _loaders(self.group, self.listed_as)
        if name not in found:
            known = ", ".join(sorted(found)) or "none (is the package installed completely?)"
            raise InputError(f"unknown {self.what} {name!r}: known are {known}")
        try:
            plugin = found[name]()
        except (ImportError, AttributeError) as error:
            raise InputError(f"the {self.noun} {name!r} cannot be loaded: {error}") from error
        if not isinstance(plugin, self.protocol):
            raise InputError(f"the {self.noun} {name!r} is none: it lacks {self.parts}")
        return plugin


def _loaders(group: str, listed_as: str) -> dict[str, Callable[[], Any]]:
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
