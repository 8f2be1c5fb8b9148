"""Descriptions that lie in YAML files: what all kinds of them have in common.

A file is found by name among the shipped ones or by its path, is checked when
it is loaded, and an error is one line that says what to do.
"""

from __future__ import annotations

import difflib
import importlib.resources
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from dooly_backend.errors import InputError

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


def configs_folder() -> Path:
    """``configs/`` beside the package in a checkout, else the installed `dooly_configs`."""
    beside = Path(__file__).resolve().parent.parent / "configs"
    if (beside / "models").is_dir():
        return beside
    return Path(str(importlib.resources.files("dooly_configs")))


def known_files(kind: str) -> dict[str, Path]:
    """The shipped descriptions of a kind ("sweep", "hardware") by name."""
    folder = {"sweep": "sweeps", "hardware": "hardware"}[kind]
    return {path.stem: path for path in sorted((configs_folder() / folder).glob("*.yaml"))}


def load_description(description: type[_D], kind: str, name_or_path: str) -> _D:
    path = description_path(kind, name_or_path)
    return validated(description, read_yaml(path), str(path))


def description_path(kind: str, name_or_path: str) -> Path:
    known = known_files(kind)
    path = known.get(name_or_path.lower()) or Path(name_or_path).expanduser()
    if not path.is_file():
        raise unknown_name(kind, name_or_path, known, "a YAML file works too")
    return path


def unknown_name(kind: str, name: str, known: Iterable[str], also: str) -> InputError:
    """The error for a name that is none of `known`."""
    names = list(known)
    close = closest(name.lower(), {known: known for known in names})
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


def closest(wanted: str, candidates: dict[str, str]) -> list[str]:
    """Up to three values whose keys look like `wanted`, best first."""
    matches = difflib.get_close_matches(wanted, candidates, n=5, cutoff=0.6)
    return list(dict.fromkeys(candidates[match] for match in matches))[:3]
