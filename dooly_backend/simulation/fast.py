"""A run of our own scheduler on a virtual clock: no engine, no torch.

The loop is that of `engines/vllm_drive.py` and the two step functions of
vLLM's EngineCore, the clock's rule that of `engines/vllm_scheduler.py`. It is
fast for two reasons: steps that only decode are taken many at once, and once
no more requests come by the clock, steps are timed when all are known.
"""

from __future__ import annotations

import gc
from collections import deque

import numpy as np

from dooly_backend.regression.clock import ClockResponse
from dooly_backend.simulation.arrivals import Feed, came
from dooly_backend.simulation.columns import Requests
from dooly_backend.simulation.log import BOTH, LAUNCHES, TAKES, Log, ranges
from dooly_backend.simulation.own_scheduler import Scheduler
from dooly_backend.simulation.records import ManyStepTimer, Run, ServingLimits
from dooly_backend.simulation.tasks import Step, Task

_STRIDE = 1 << 20  # steps at once: the requests end it earlier


def run_fast(
    feed: Feed, limits: ServingLimits, timer: ManyStepTimer, clock: ClockResponse | None = None
) -> Run:
    """Serve what `feed` hands out, until all has ended; `clock` is the device's."""
    # The collector would walk all requests again and again, and find nothing: no cycle is made.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _Simulation(feed, limits, Log(timer, clock)).run()
    finally:
        if collects:
            gc.enable()


class _Simulation:
    def __init__(self, feed: Feed, limits: ServingLimits, log: Log) -> None:
        self._feed = feed
        self._limits = limits
        self._scheduler = Scheduler(limits)
        self._queue: deque[Step] = deque()  # asynchronous: those under way, the newest first
        self._log = log
        self._tasks: list[Task] = []
        self._came: list[float] = []  # when, where the clock decides that
        self._calls = 0
        self._turns = 0
        self._preempted: dict[int, tuple[int, ...]] = {}

    def run(self) -> Run:
        feed, scheduler = self._feed, self._scheduler
        admitted: list[int] = []
        while True:
            next_s = feed.next_s
            timed = next_s is not None
            if timed:
                self._log.settle()
            for request in feed.due(self._log.now, self._calls):
                task = Task(request, len(self._tasks), self._limits.block_size)
                task.turn = self._turns
                self._tasks.append(task)
                self._came.append(request.arrival_s if timed else np.nan)
                admitted.append(self._calls)
                scheduler.add(task)
            if not scheduler.has_requests and not self._queue:
                after = feed.skip()
                if after is None:
                    break
                self._log.wait(after)
                continue
            if not self._stride():
                self._turn()
                self._turns += 1
            for task in scheduler.finished:
                feed.finished(task.id, self._log.now)
            scheduler.finished.clear()
        self._log.settle()
        return self._records(admitted)

    # -- turns of the loop -----------------------------------------------------------------

    def _stride(self) -> bool:
        """Take many steps that only decode, if the next ones do."""
        if self._limits.pipeline_parallel > 1:
            return False  # steps under way take turns with the requests
        if self._limits.async_scheduling and len(self._queue) != 1:
            return False
        most = min(self._feed.next_call - self._calls, _STRIDE)
        next_s = self._feed.next_s
        if next_s is not None:
            most = min(most, self._log.steps_until(next_s))
        steps = self._scheduler.stride(int(most))
        if steps < 2:
            return False
        running = self._scheduler.running
        ids = [task.id for task in running]
        contexts = [task.computed for task in running]
        if next_s is None:
            self._log.add_stride(ids, contexts, steps)
        else:
            steps = self._log.take_stride(ids, contexts, steps, next_s)
        if self._limits.async_scheduling:
            # The step under way sampled a token for each of these, as the last one of these does.
            last = Step()
            last.tasks = last.samples = list(running)
            last.queries = [1] * len(running)
            self._queue[0] = last
        self._scheduler.advance(steps)
        self._calls += steps
        self._turns += steps
        return True

    def _turn(self) -> None:
        """One call of vLLM's step function."""
        if self._limits.max_concurrent_batches > 1:
            self._step_with_queue()
        else:
            step = self._schedule()
            self._log.turn(BOTH if step.tasks else 0)
            self._scheduler.update(step)

    def _step_with_queue(self) -> None:
        scheduler, queue = self._scheduler, self._queue
        launches = 0
        if scheduler.has_requests:
            step = self._schedule()
            launches = LAUNCHES if step.tasks else 0
            queue.appendleft(step)
            room = len(queue) < self._limits.max_concurrent_batches
            if room and (launches or scheduler.has_requests):
                self._log.turn(launches)
                return
        taken = queue.pop()
        self._log.turn(launches | (TAKES if taken.tasks else 0))
        scheduler.update(taken)

    def _schedule(self) -> Step:
        step = self._scheduler.schedule()
        self._calls += 1
        if step.tasks:
            if step.preempted:
                ids = sorted(task.id for task in step.preempted)
                self._preempted[self._scheduler.steps - 1] = tuple(ids)
            self._log.add_step([t.id for t in step.tasks], step.queries, step.contexts)
        return step

    # -- afterwards ------------------------------------------------------------------------

    def _records(self, admitted: list[int]) -> Run:
        steps = self._log.steps(self._preempted)
        order = sorted(range(len(self._tasks)), key=lambda i: self._tasks[i].id)
        tasks = [self._tasks[i] for i in order]
        by_id = {request.id: request for request in self._feed.everything()}
        times = [self._came[i] for i in order]
        turn_s = self._log.turn_s
        requests = [
            by_id[task.id] if at == at else came(by_id[task.id], turn_s[task.turn])
            for task, at in zip(tasks, times, strict=True)
        ]
        stretches = np.array([n for task in tasks for n in task.stretches], np.int64).reshape(-1, 2)
        outputs = np.array([request.output_tokens for request in requests], np.int64)
        first = np.array([task.first_step for task in tasks], np.int64)
        columns = Requests(
            requests,
            steps.start_s[first],
            np.cumsum(outputs) - outputs,
            steps.end_s[ranges(stretches[:, 0], stretches[:, 1])],
            np.array([task.cached_tokens for task in tasks], np.int64),
            np.array([task.preemptions for task in tasks], np.int64),
            np.array([admitted[i] for i in order], np.int64),
        )
        return Run(steps, columns, self._limits, {"engine": "dooly"})
