"""One profile run that several processes share: each point is measured by one of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType

from dooly_backend.database import Database
from dooly_backend.database.claims import Claims
from dooly_backend.profiling.device_lock import device_lock
from dooly_backend.profiling.measure import WorkloadPointKey
from dooly_backend.workload import Batch

log = logging.getLogger(__name__)

#: Between looks whether others are done with what they claimed.
_WAIT_SECONDS = 0.5


class Sharing:
    """This process's part of a profile in one environment; a context manager.

    It holds the device while it measures, and has claimed what it measures;
    what others have claimed it leaves to them, and waits until they have
    settled it or are gone.
    """

    def __init__(self, database: Database, environment_id: int, device: str) -> None:
        self._database = database
        self._environment_id = environment_id
        self._device = device
        self._claims = Claims(database, environment_id)
        self._told = False

    def __enter__(self) -> Sharing:
        self._claims.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._claims.__exit__(kind, error, traceback)

    @contextmanager
    def device(self) -> Iterator[None]:
        """Have the device alone."""
        with device_lock(self._device, self._tell):
            yield

    def turns(
        self,
        by_batch: Mapping[Batch, Sequence[WorkloadPointKey]],
        settled_elsewhere: Callable[[int], None],
    ) -> Generator[tuple[Batch, list[WorkloadPointKey]], None, None]:
        """Batches with the keys that are ours to measure, which the caller records at once.

        The device is held until the next one is asked for. `settled_elsewhere`
        is told how many keys others have settled. Ends when all are settled.
        """
        pending = {batch: list(keys) for batch, keys in by_batch.items()}
        while pending:
            before = sum(map(len, pending.values()))
            for batch in list(pending):
                with self.device(), self._claimed(pending[batch]) as mine:
                    if mine:
                        yield batch, mine
                unsettled = self._unsettled(pending[batch])
                settled_elsewhere(len(pending[batch]) - len(unsettled) - len(mine))
                pending[batch] = unsettled
                if not unsettled:
                    del pending[batch]
            if sum(map(len, pending.values())) == before:
                time.sleep(_WAIT_SECONDS)

    @contextmanager
    def _claimed(self, keys: Sequence[WorkloadPointKey]) -> Iterator[list[WorkloadPointKey]]:
        """Those of `keys` that are neither settled nor claimed by others, for the block."""
        texts = {f"{hash_} {point.key}": (hash_, point) for hash_, point in keys}
        taken = self._claims.take(list(texts))
        try:
            # Looked at under the claim: who held it before may have settled it.
            yield self._unsettled([texts[text] for text in taken])
        finally:
            self._claims.release(taken)

    @contextmanager
    def once(self, what: str, is_done: Callable[[], bool]) -> Iterator[bool]:
        """Whether `what` is ours to do, alone on the device; false once somebody has done it."""
        while not is_done():
            with self.device():
                taken = self._claims.take([what])
                try:
                    if taken and not is_done():
                        yield True
                        return
                finally:
                    self._claims.release(taken)
            time.sleep(_WAIT_SECONDS)
        yield False

    def _unsettled(self, keys: Sequence[WorkloadPointKey]) -> list[WorkloadPointKey]:
        settled = {
            hash_: self._database.settled_points(hash_, self._environment_id)
            for hash_ in {hash_ for hash_, _ in keys}
        }
        return [(hash_, point) for hash_, point in keys if point.key not in settled[hash_]]

    def _tell(self) -> None:
        if not self._told:
            log.warning("another process measures on this device: waiting for it in turns")
        self._told = True
