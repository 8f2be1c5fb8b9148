"""What a profile says of itself while it runs."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told what a profile is doing; `advance` counts finished points."""

    def phase(self, name: str, total: int | None = None) -> None: ...

    def advance(self, points: int = 1) -> None: ...


class Silent:
    """A progress that shows nothing."""

    def phase(self, name: str, total: int | None = None) -> None:
        return None

    def advance(self, points: int = 1) -> None:
        return None
