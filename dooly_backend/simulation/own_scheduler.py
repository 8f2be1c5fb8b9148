"""The scheduler of vLLM in plain Python: which requests a step computes, and how much of each.

It follows `vllm/v1/core/sched/scheduler.py` and `async_scheduler.py` of 0.32.0,
and of 0.25.1 where `ServingLimits.version` says so, without speculative decoding,
LoRA or connectors.
tests/test_scheduler_equal.py holds it against the original.

Where every running request decodes and nothing else can happen, many steps are
the same but for the contexts: `stride` tells how many, `advance` takes them.
"""

from __future__ import annotations

from dooly_backend.simulation.kv_cache import KvCache
from dooly_backend.simulation.kv_groups import GroupedKvCache
from dooly_backend.simulation.records import KvCacheGroup, ServingLimits
from dooly_backend.simulation.rules import Rules
from dooly_backend.simulation.tasks import PriorityQueue, Queue, Step, Task


class Scheduler:
    """The state between two steps. `schedule` makes a step, `update` takes its result."""

    def __init__(self, limits: ServingLimits) -> None:
        self.limits = limits
        self.running: list[Task] = []
        self.waiting = PriorityQueue() if limits.policy == "priority" else Queue()
        self.cache: KvCache | GroupedKvCache
        simple = limits.groups == (KvCacheGroup(limits.block_size),)
        self.cache = KvCache(limits) if simple else GroupedKvCache(limits)
        self.steps = 0  # that computed anything
        self.finished: list[Task] = []  # since the caller last looked
        self._unfinished = 0
        self._unreported = False  # a request ended and no step has told the workers
        self._blocked = False  # the first waiting request needs more blocks than there are
        self._watermark = int(limits.watermark * limits.num_gpu_blocks)
        self._rules = Rules.of(limits.version)
        # Calls of `schedule` from one decode of a request to the next (V2 runner, asynchronous).
        self._stagger = limits.pipeline_parallel if limits.async_scheduling else 1
        self._counts_in_flight = self.cache.has_windows or limits.pipeline_parallel > 1
        self._calls = 0

    def add(self, task: Task) -> None:
        """Put a request that has come into the queue."""
        self.waiting.add(task)
        self._unfinished += 1
        if self.limits.policy == "priority":
            self._blocked = False  # it may go first

    @property
    def has_requests(self) -> bool:
        """Whether vLLM would step on: it does once more when the last request has ended."""
        return self._unfinished > 0 or self._unreported

    # -- one step --------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Decide on a step and take its blocks. It may compute nothing."""
        self._calls += 1
        step = Step()
        eligible = len(self.running) + len(self.waiting)
        threshold = self.limits.long_prefill_token_threshold
        if self._rules.frees_lone_request and eligible <= 1:
            threshold = 0
        budget = self._schedule_running(step, threshold)
        self._blocked = False
        if not step.preempted:
            self._schedule_waiting(step, threshold, budget)
        self._unreported = False
        if step.tasks:
            self._launch(step)
        return step

    def _schedule_running(self, step: Step, threshold: int) -> int:
        """Those that run go first; returns how many tokens the step has left."""
        running, size, cache = self.running, self.limits.block_size, self.cache
        longest = self.limits.max_model_len
        budget = self.limits.max_num_batched_tokens
        tasks, queries, contexts = step.tasks, step.queries, step.contexts
        place = 0
        while place < len(running) and budget > 0:
            task = running[place]
            computed, pending = task.computed, task.pending
            if pending and computed + 2 - pending >= task.total:
                place += 1  # its last token is under way
                continue
            if self._calls < task.eligible:
                place += 1
                continue
            count = task.known + pending - computed
            if 0 < threshold < count:
                count = threshold
            if count > budget:
                count = budget
            if count > longest - computed - 1:
                count = longest - computed - 1
            if count == 0:
                place += 1
                continue
            end = computed + count
            if end > task.held * size or end >= task.hashed_end + cache.hash_size:
                preempted = False
                while not (preempted or cache.extend(task, end)):
                    victim, moved, freed = self._choose_victim(step, place)
                    place -= moved
                    budget += freed
                    self._preempt(victim)
                    step.preempted.append(victim)
                    preempted = victim is task
                if preempted:
                    return budget
            tasks.append(task)
            queries.append(count)
            contexts.append(computed)
            budget -= count
            place += 1
        return budget

    def _choose_victim(self, step: Step, place: int) -> tuple[Task, int, int]:
        """Take a request out of `running`.

        Returns it, by how much the scan moves back, and the tokens that the step gets back.
        """
        if self.limits.policy != "priority":
            return self.running.pop(), 0, 0
        victim = max(self.running, key=lambda task: (task.priority, task.order))
        index = self.running.index(victim)
        del self.running[index]
        freed = 0
        was_scheduled = victim in step.tasks
        if was_scheduled:
            index_in_step = step.tasks.index(victim)
            del step.tasks[index_in_step], step.contexts[index_in_step]
            freed = step.queries.pop(index_in_step)
        moved = index < place if self._rules.always_moves_back else was_scheduled
        return victim, int(moved), freed

    def _schedule_waiting(self, step: Step, threshold: int, budget: int) -> None:
        passed: list[Task] = []  # who was preempted waits for what is still under way
        self._admit(step, threshold, budget, passed)
        for task in reversed(passed):
            self.waiting.put_back(task)

    def _admit(self, step: Step, threshold: int, budget: int, passed: list[Task]) -> None:
        limits = self.limits
        while budget > 0 and self.waiting and len(self.running) < limits.max_num_seqs:
            task = self.waiting.first()
            if task.stale:
                passed.append(self.waiting.pop())
                continue
            computed = self.cache.find(task)
            count = task.known - computed
            if 0 < threshold < count:
                count = threshold
            if not limits.enable_chunked_prefill and count > budget:
                return
            count = min(count, budget)
            whole = 0
            if limits.scheduler_reserve_full_isl:
                whole = min(task.known, limits.max_model_len)
            spared = self._watermark if self.running else 0
            if not self.cache.admit(task, computed + count, whole, spared):
                self._blocked = True
                return
            self.waiting.pop()
            task.computed = computed
            task.running = True
            self.running.append(task)
            step.tasks.append(task)
            step.queries.append(count)
            step.contexts.append(computed)
            budget -= count

    def _launch(self, step: Step) -> None:
        """The step is under way: what it computes counts as computed from now on."""
        waits = self.limits.async_scheduling
        number, number_of_call = self.steps, self._calls
        samples = step.samples
        for task, count in zip(step.tasks, step.queries, strict=True):
            if task.first_step < 0:
                task.first_step = number
                task.cached_tokens = task.computed
            task.computed += count
            task.in_flight += count
            if task.computed >= task.known + task.pending:
                samples.append(task)
                stretches = task.stretches
                if stretches and stretches[-2] + stretches[-1] == number:
                    stretches[-1] += 1
                else:
                    stretches += (number, 1)
                if waits:
                    task.pending += 1
                    task.eligible = number_of_call + self._stagger
        self.steps += 1

    def update(self, step: Step) -> None:
        """Take the result of a step; requests that have all their tokens end."""
        waited, size = self.limits.async_scheduling, self.cache.hash_size
        if self._counts_in_flight:
            for task, count in zip(step.tasks, step.queries, strict=True):
                task.in_flight -= count
                task.stale = max(task.stale - count, 0)
        for task in step.samples:
            task.known += 1
            if waited and task.running:
                task.pending -= 1
                if task.computed - task.pending >= task.hashed_end + size:
                    self.cache.cache(task, task.computed - task.pending)
            if task.known == task.total:
                self._finish(task)

    def _finish(self, task: Task) -> None:
        if task.running:
            self.cache.free(task)
            self.running.remove(task)
        else:
            self.waiting.remove(task)
        self.finished.append(task)
        self._unfinished -= 1
        self._unreported = True
        self._blocked = False

    def _preempt(self, task: Task) -> None:
        self.cache.preempt(task)
        task.running = False
        task.computed = task.pending = 0
        if self._counts_in_flight:
            task.stale = task.in_flight
        task.preemptions += 1
        self.waiting.put_back(task)

    # -- many steps ------------------------------------------------------------------------

    def stride(self, most: int) -> int:
        """How many steps, up to `most`, only decode every running request: 0 if the next may not.

        In none of them a request ends, starts or is preempted. With asynchronous
        scheduling the step before must be under way.
        """
        running, limits = self.running, self.limits
        if not running or len(running) > limits.max_num_batched_tokens:
            return 0
        # Who is blocked stays so while nobody gives a block back.
        blocked = self._blocked and not self.cache.has_windows
        if self.waiting and len(running) < limits.max_num_seqs and not blocked:
            return 0
        pending = int(limits.async_scheduling)
        # The step that samples the last token is not taken, as it ends the request; where
        # its result comes a step later, it is.
        ahead = 1 if pending else 2
        for task in running:
            if task.pending != pending or task.known + pending - task.computed != 1:
                return 0
            left = task.total - ahead - task.computed
            if left < most:
                if left < 1:
                    return 0
                most = left
        low, high = 0, most  # the most steps that the free blocks suffice for
        while low < high:
            middle = high if low == 0 and high == most else (low + high + 1) // 2
            if self.cache.needed(running, middle) <= self.cache.pool.free:
                low = middle
            else:
                high = middle - 1
        return low

    def advance(self, steps: int) -> None:
        """Take `steps` steps, as many as `stride` told at most."""
        behind = int(self.limits.async_scheduling)
        for task in self.running:
            task.known += steps
        self.cache.advance(self.running, steps, behind)
        for task in self.running:
            task.computed += steps
            task.in_flight = behind
            stretches = task.stretches
            if stretches and stretches[-2] + stretches[-1] == self.steps:
                stretches[-1] += steps
            else:
                stretches += (self.steps, steps)
        self.steps += steps
