"""pyproject.toml against the tree: what is listed is there, and what is there is listed."""

from __future__ import annotations

import importlib
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = PROJECT["tool"]["setuptools"]["package-dir"]  # package -> folder


def packages_in(package: str, folder: str) -> set[str]:
    """Every package that lies in `folder`, by the name it is installed as."""
    root = ROOT / folder
    found = {path.parent.relative_to(root) for path in root.rglob("*.py")}
    return {".".join([package, *relative.parts]) for relative in found}


def test_every_package_is_listed() -> None:
    there = set().union(*(packages_in(name, folder) for name, folder in FOLDERS.items()))
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(there)


def test_every_config_is_package_data() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["dooly_configs"]
    folder = ROOT / "configs"
    files = [path for path in folder.rglob("*") if path.suffix in {".json", ".yaml", ".md"}]
    assert files
    for path in files:
        relative = path.relative_to(folder).as_posix()
        assert any(fnmatch(relative, pattern) for pattern in patterns), relative


@pytest.mark.parametrize("name", ["dooly", "dooly-export"])
def test_every_script_exists(name: str) -> None:
    module, _, function = PROJECT["project"]["scripts"][name].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
