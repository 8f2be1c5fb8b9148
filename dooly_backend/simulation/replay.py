"""A live run once more in simulation: its batches, and its schedule by the step."""

from __future__ import annotations

from dooly_backend.simulation.arrivals import as_admitted
from dooly_backend.simulation.columns import Steps
from dooly_backend.simulation.records import Batches, Run, StepTime
from dooly_backend.simulation.scheduler import SchedulerName, simulate
from dooly_backend.workload import Batch


def replayed(live: Run, scheduler: SchedulerName = "dooly") -> Run:
    """The requests of a live run again, each joining the queue where it did, by the step.

    What a step takes does not matter then: the schedule shows the scheduler alone.
    """
    if live.limits is None:
        raise ValueError("a run without limits cannot be replayed")
    return simulate(as_admitted(live), live.limits, _EqualSteps(), scheduler, by_step=True)


class _EqualSteps:
    """A timer for which every step takes a millisecond."""

    def time(self, batch: Batch) -> StepTime:
        return StepTime(1000.0)


def batches(run: Run) -> Batches:
    """The batches of the run's steps."""
    steps = Steps.of(run.steps)
    return Batches(steps.query, steps.context, steps.starts)
