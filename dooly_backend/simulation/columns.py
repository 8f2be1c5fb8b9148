"""Runs as arrays: what a long simulation is recorded in, and what its metrics are made from.

`Steps` and `Requests` are sequences of the records of `records`, made when one
is asked for; a simulation of a million scheduled requests never makes them all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np

from dooly_backend.simulation.records import (
    Integers,
    Numbers,
    RequestRecord,
    ScheduledRequest,
    ServingRequest,
    StepRecord,
    StepTime,
    StepTimes,
)


class _Rows(Sequence[Any]):
    """A sequence of records that are made from columns."""

    @abstractmethod
    def _row(self, index: int) -> Any:
        """The record at `index`, from 0."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self._row(i) for i in range(*index.indices(len(self))))
        place = range(len(self))[index]  # IndexError as a list's
        return self._row(place)

    def __iter__(self) -> Iterator[Any]:
        return (self._row(index) for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


@dataclass(eq=False)
class Steps(_Rows):
    """Steps as columns, one entry per step.

    What is scheduled lies in `id`, `query` and `context`, one entry per request of a
    step: those of step i from `starts[i]` up to `starts[i + 1]`, or to the end.
    """

    start_s: Numbers
    launched_s: Numbers
    ready_s: Numbers
    end_s: Numbers
    starts: Integers
    id: Integers
    query: Integers
    context: Integers
    times: StepTimes | None = None
    preempted: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # by step

    def __len__(self) -> int:
        return len(self.start_s)

    @classmethod
    def of(cls, steps: Sequence[StepRecord]) -> Steps:
        """The same steps as columns; what a live run does not say is NaN."""
        if isinstance(steps, cls):
            return steps
        parts = [part for step in steps for part in step.scheduled]
        sizes = [len(step.scheduled) for step in steps]
        return cls(
            _numbers([step.start_s for step in steps]),
            _numbers([step.launched_s for step in steps]),
            _numbers([step.ready_s for step in steps]),
            _numbers([step.end_s for step in steps]),
            np.cumsum([0, *sizes[:-1]], dtype=np.int64)[: len(sizes)],
            _integers([part.id for part in parts]),
            _integers([part.query for part in parts]),
            _integers([part.context for part in parts]),
            _times([step.time for step in steps]),
            {index: step.preempted for index, step in enumerate(steps) if step.preempted},
        )

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[StepRecord, ...]: ...
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)

    def _row(self, index: int) -> StepRecord:
        begin = int(self.starts[index])
        end = int(self.starts[index + 1]) if index + 1 < len(self) else len(self.id)
        parts = zip(
            self.id[begin:end].tolist(),
            self.query[begin:end].tolist(),
            self.context[begin:end].tolist(),
            strict=True,
        )
        time = None
        if self.times is not None:
            time = StepTime(
                float(self.times.device_us[index]),
                float(self.times.host_us[index]),
                float(self.times.output_us[index]),
                bool(self.times.extrapolated[index]),
                0.0 if self.times.launch_us is None else float(self.times.launch_us[index]),
                0 if self.times.tokens is None else int(self.times.tokens[index]),
                () if self.times.later_us is None else tuple(self.times.later_us[index].tolist()),
            )
        return StepRecord(
            float(self.start_s[index]),
            float(self.end_s[index]),
            tuple(ScheduledRequest(*part) for part in parts),
            self.preempted.get(index, ()),
            _maybe(self.launched_s[index]),
            _maybe(self.ready_s[index]),
            time,
        )


@dataclass(eq=False)
class Requests(_Rows):
    """Finished requests as columns, one entry per request, in order of their ids.

    Their tokens' times lie in `token_s`: those of request i from `starts[i]` up to
    `starts[i + 1]`, or to the end.
    """

    requests: Sequence[ServingRequest]
    scheduled_s: Numbers
    starts: Integers
    token_s: Numbers
    cached_tokens: Integers
    preemptions: Integers
    admitted: Integers

    def __len__(self) -> int:
        return len(self.requests)

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> Requests:
        """The same requests as columns."""
        if isinstance(records, cls):
            return records
        sizes = [len(record.token_s) for record in records]
        return cls(
            [record.request for record in records],
            _numbers([record.scheduled_s for record in records]),
            np.cumsum([0, *sizes[:-1]], dtype=np.int64)[: len(sizes)],
            _numbers([time for record in records for time in record.token_s]),
            _integers([record.cached_tokens for record in records]),
            _integers([record.preemptions for record in records]),
            _integers([record.admitted for record in records]),
        )

    @overload
    def __getitem__(self, index: int) -> RequestRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RequestRecord, ...]: ...
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)

    def _row(self, index: int) -> RequestRecord:
        begin = int(self.starts[index])
        end = int(self.starts[index + 1]) if index + 1 < len(self) else len(self.token_s)
        return RequestRecord(
            self.requests[index],
            float(self.scheduled_s[index]),
            tuple(self.token_s[begin:end].tolist()),
            int(self.cached_tokens[index]),
            int(self.preemptions[index]),
            int(self.admitted[index]),
        )


def _numbers(values: Sequence[float | None]) -> Numbers:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _integers(values: Sequence[int]) -> Integers:
    return np.array(values, np.int64)


def _times(times: Sequence[StepTime | None]) -> StepTimes | None:
    known = [time for time in times if time is not None]
    if not known or len(known) < len(times):
        return None
    return StepTimes(
        _numbers([time.device_us for time in known]),
        _numbers([time.host_us for time in known]),
        _numbers([time.output_us for time in known]),
        np.array([time.extrapolated for time in known], np.bool_),
        _numbers([time.launch_us for time in known]),
        _integers([time.tokens for time in known]),
        np.array([time.later_us for time in known]) if known[0].later_us else None,
    )


def _maybe(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
