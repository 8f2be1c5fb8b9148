"""What a profile did not have to measure, and from where it is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dooly_backend.database import Database
from dooly_backend.database.records import Signature
from dooly_backend.profiling.confirm import Confirmation


@dataclass(frozen=True)
class Reused:
    """A signature whose points were all known; `models` run it, too (none: only this one)."""

    signature: Signature
    models: tuple[str, ...]


def reused(
    database: Database, environment_id: int, known: Iterable[Signature], model: str
) -> tuple[Reused, ...]:
    """Each of `known`, with the other models in the database that run it in this environment."""
    models: dict[str, list[str]] = {}
    for id_, configuration in database.configurations().items():
        if configuration.model != model:
            for occurrence in database.occurrences(id_, environment_id):
                names = models.setdefault(occurrence.signature.hash, [])
                if configuration.model not in names:
                    names.append(configuration.model)
    ordered = sorted(known, key=lambda signature: (signature.name, signature.hash))
    return tuple(Reused(s, tuple(models.get(s.hash, ()))) for s in ordered)


def reused_lines(found: Iterable[Reused]) -> list[str]:
    """A line for each set of models, with the names of what is known from them."""
    by_models: dict[tuple[str, ...], list[str]] = {}
    for item in found:
        by_models.setdefault(item.models, []).append(item.signature.name)
    return [
        f"known from {', '.join(models) or 'an earlier run'}: {counted(names)}"
        for models, names in by_models.items()
    ]


def confirmed_lines(found: Confirmation) -> list[str]:
    """What a few points said of an older environment's measurements."""
    names = counted(signature.name for signature in found.confirmed)
    lines = [
        f"confirmed from {found.source}: {len(found.confirmed)} signatures ({names or 'none'}), "
        f"{found.points} points taken over "
        f"(single points scatter by {found.scatter:.1%} between the two sessions)"
    ]
    if found.changed:
        names = counted(signature.name for signature in found.changed)
        lines.append(f"changed since, measured in full: {len(found.changed)} ({names})")
    return lines


def skipped_lines(reasons: Mapping[str, Iterable[str]]) -> list[str]:
    """A line for each reason, with the points that it kept out."""
    lines = []
    for reason, keys in reasons.items():
        unique = list(dict.fromkeys(keys))
        shown = ", ".join(unique[:4]) + (f" and {len(unique) - 4} more" if len(unique) > 4 else "")
        lines.append(f"skipped, {reason}: {shown}")
    return lines


def counted(names: Iterable[str]) -> str:
    """``Attention, RMSNorm (3)``."""
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(name if n == 1 else f"{name} ({n})" for name, n in counts.items())
