"""What a scheduler keeps of a request, of a step, and of those that wait."""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from dooly_backend.simulation.blocks import Block
from dooly_backend.simulation.records import ServingRequest

if TYPE_CHECKING:
    from dooly_backend.simulation.kv_groups import Table


class Task:
    """A request as the scheduler knows it. Counts are tokens where nothing else is said."""

    __slots__ = (
        "blocks",
        "cached_tokens",
        "computed",
        "eligible",
        "first_step",
        "hashed_end",
        "held",
        "id",
        "in_flight",
        "junction",
        "known",
        "order",
        "own_key",
        "pending",
        "preemptions",
        "prefix_key",
        "priority",
        "prompt",
        "running",
        "shared_blocks",
        "stale",
        "stretches",
        "tables",
        "total",
        "tracked",
        "turn",
    )

    def __init__(self, request: ServingRequest, order: int, block_size: int) -> None:
        self.id = request.id
        self.order = order  # of arrival
        self.priority = request.priority
        self.prompt = request.prompt_tokens
        self.total = request.prompt_tokens + request.output_tokens
        self.known = request.prompt_tokens  # prompt, and output that has come back
        self.computed = 0  # or under way
        self.pending = 0  # tokens that steps under way will sample
        self.running = False
        # Of its `held` blocks those of the first `hashed_end` tokens have a hash, and of these
        # the first len(blocks) can be hit: those of the shared prefix, and once it has been
        # preempted its own.
        self.held = 0
        self.hashed_end = 0
        self.blocks: list[Block] = []
        self.tracked = False
        # Where there are several KV cache groups or windows, instead: a table per group, and
        # blocks of its prompt up to which a group found more than it could take.
        self.tables: list[Table] = []
        self.junction = 0
        # Tokens under way, those of them that are from before it was preempted (kept where
        # they matter), and the call of the scheduler from which on it may decode again.
        self.in_flight = 0
        self.stale = 0
        self.eligible = 0
        shared = 0 if request.prefix is None else min(request.prefix_tokens, request.prompt_tokens)
        self.shared_blocks = shared // block_size
        # Keys of equal blocks are equal, all others differ.
        self.own_key = (2 * request.id + 1) << 32
        self.prefix_key = 0 if request.prefix is None else (2 * request.prefix) << 32
        self.preemptions = 0
        self.cached_tokens = 0
        self.first_step = -1
        self.turn = 0  # of the loop that added it
        self.stretches: list[int] = []  # steps that sample for it: first, how many, first, ...

    def key(self, index: int) -> int:
        return (self.prefix_key if index < self.shared_blocks else self.own_key) + index


class Step:
    """What one step computes: tasks, new tokens of each, and tokens computed before."""

    __slots__ = ("contexts", "preempted", "queries", "samples", "tasks")

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.queries: list[int] = []
        self.contexts: list[int] = []
        self.preempted: list[Task] = []
        self.samples: list[Task] = []  # those for which it samples a token


class Queue:
    """Waiting requests: first come, first served; preempted ones go first."""

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, task: Task) -> None:
        self._tasks.append(task)

    def put_back(self, task: Task) -> None:
        self._tasks.appendleft(task)

    def first(self) -> Task:
        return self._tasks[0]

    def pop(self) -> Task:
        return self._tasks.popleft()

    def remove(self, task: Task) -> None:
        self._tasks.remove(task)


class PriorityQueue(Queue):
    """Waiting requests by priority, then by arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Task]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, task: Task) -> None:
        heappush(self._heap, (task.priority, task.order, task))

    put_back = add

    def first(self) -> Task:
        return self._heap[0][2]

    def pop(self) -> Task:
        return heappop(self._heap)[2]

    def remove(self, task: Task) -> None:
        self._heap.remove((task.priority, task.order, task))
        heapify(self._heap)
