"""The step times of a pipeline: one `StepModel` per stage.

Every stage has a process of its own, which launches its operations while its
device runs them, so a stage takes the longer of the two. What the engine core
does before a step and after it is the first stage's and the last one's.

A stage's own collectives, what it receives among them, are operations of its
call graph. Where its profile lacks them, `left_out` says so.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from dooly_backend.database.records import Configuration, Occurrence
from dooly_backend.errors import InputError
from dooly_backend.regression.clock import ClockResponse
from dooly_backend.simulation.columns import Steps
from dooly_backend.simulation.log import launches
from dooly_backend.simulation.records import Batches, Numbers, StepTime, StepTimes
from dooly_backend.simulation.step_time import StepModel
from dooly_backend.workload import Batch

_MEMO = 65_536  # single steps that are remembered
_TRANSFER = "send_recv"


class StageTimer:
    """Times of a pipeline's steps: a `ManyStepTimer` whose `later_us` are the later stages."""

    def __init__(self, stages: Sequence[StepModel]) -> None:
        if len(stages) < 2:
            raise ValueError("a pipeline has two stages or more")
        self.stages = tuple(stages)
        self._one = lru_cache(_MEMO)(self._time)

    @property
    def clock(self) -> ClockResponse | None:
        """How each stage's device gives way under load."""
        return self.stages[0].clock

    def time(self, batch: Batch) -> StepTime:
        """One step; remembered by the lengths of its requests."""
        return self._one(batch)

    def times(self, batches: Batches) -> StepTimes:
        """Many steps at once, microseconds. No batch may be empty."""
        each = [stage.times(batches) for stage in self.stages]
        device = [np.maximum(times.device_us, launches(times)) for times in each]
        return replace(
            each[0],
            device_us=device[0],
            output_us=each[-1].output_us,
            extrapolated=np.any([times.extrapolated for times in each], axis=0),
            launch_us=None,
            later_us=np.stack(device[1:], axis=1),
        )

    def parts_us(self, batches: Batches) -> Mapping[str, Numbers]:
        """By group, as `StepModel.parts_us`: what all stages together take."""
        found: dict[str, Numbers] = {}
        for stage in self.stages:
            for group, us in stage.parts_us(batches).items():
                found[group] = found[group] + us if group in found else us
        return found

    def _time(self, batch: Batch) -> StepTime:
        times = self.times(Batches.of([batch]))
        assert times.later_us is not None
        return StepTime(
            float(times.device_us[0]),
            float(times.host_us[0]),
            float(times.output_us[0]),
            bool(times.extrapolated[0]),
            tokens=0 if times.tokens is None else int(times.tokens[0]),
            later_us=tuple(times.later_us[0].tolist()),
        )


def stage_utilisation(steps: Steps, duration_s: float) -> list[float]:
    """The share of a run during which each stage works; the rest of it are bubbles and idling."""
    times = steps.times
    if times is None or times.later_us is None or not duration_s:
        return []
    busy_us = [times.device_us.sum(), *times.later_us.sum(axis=0)]
    return [round(float(us) / 1e6 / duration_s, 4) for us in busy_us]


def chosen_stages(profiled: Iterable[int], count: int) -> list[int | None]:
    """Which profiled stage stands for each of `count`: itself, or another middle one; or none."""
    known = set(profiled)
    middle = min((stage for stage in known if 0 < stage < count - 1), default=None)
    inner = range(1, count - 1)
    return [
        stage if stage in known else middle if stage in inner else None for stage in range(count)
    ]


def refuse_gaps(stages: Sequence[Configuration]) -> None:
    """Raise InputError where the stages' layers are not those of the whole model."""
    layers = sum(stage.layers_run for stage in stages)
    if layers != stages[0].num_layers:
        lengths = ", ".join(str(stage.layers_run) for stage in stages)
        raise InputError(
            f"stages of {lengths} layers do not make {stages[0].model} with its "
            f"{stages[0].num_layers}: a middle stage that is not profiled has another length than "
            "the one that stands for it: profile every stage (--rank)"
        )


def left_out(stages: Sequence[tuple[Configuration, Sequence[Occurrence]]]) -> list[str]:
    """The communication that the profiles lack, in words; nothing where it is all there."""
    found: Counter[str] = Counter()
    for number, (configuration, occurrences) in enumerate(stages):
        known = {
            (facts["collective"], facts["degree"])
            for occurrence in occurrences
            if (facts := _collective(occurrence)) is not None
        }
        degree = max(configuration.tensor_parallel, configuration.expert_parallel)
        if degree > 1 and not any(d == degree and name != _TRANSFER for name, d in known):
            found[f"the collectives of {degree} ranks"] += 1
        if number and not any(name == _TRANSFER for name, _ in known):
            found["what stages hand over to the next"] += 1
    return list(found)


def _collective(occurrence: Occurrence) -> Mapping[str, object] | None:
    if not occurrence.signature.is_collective:
        return None
    return dict(json.loads(occurrence.signature.canonical))
