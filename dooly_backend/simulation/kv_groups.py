"""The KV cache of models with several groups of layers, or with sliding windows.

Every group has block tables of its own and takes blocks from one pool
(`vllm/v1/core/kv_cache_coordinator.py` and `single_type_kv_cache_manager.py`,
0.25.1 and 0.32.0):

- A group with a window gives back the blocks that no later token sees, when
  the request next asks for blocks. In 0.25.1 tokens under way count as
  computed there, in 0.32 they do not.
- A prefix is found as far as every group has it: a full group all of its
  blocks, one with a window those of the last window.
- In 0.32 (`prefix_cache_retention_interval` 0) a window's blocks get a hash
  only before the end of the prompt, and where another group found more of
  the prompt than this one; in 0.25.1 all do.
- A prompt must fit as a whole, but of a window no more counts than steps hold
  at once.

A model with Mamba layers has, without prefix caching, one block of state per
request in each such group: a full group whose block is the longest context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dooly_backend.simulation.blocks import Block, BlockPool
from dooly_backend.simulation.records import KvCacheGroup, ServingLimits
from dooly_backend.simulation.rules import Rules
from dooly_backend.simulation.tasks import Task


class Table:
    """The blocks of one request in one group: those from `start` up to `held`."""

    __slots__ = ("blocks", "held", "start")

    def __init__(self) -> None:
        self.start = 0
        self.held = 0
        self.blocks: list[Block | None] = []  # the first ones that are full, those with a hash


class GroupedKvCache:
    """As `kv_cache.KvCache`, for any number of groups."""

    has_windows = True

    def __init__(self, limits: ServingLimits) -> None:
        self.pool = BlockPool(limits.num_gpu_blocks)
        self._caches = limits.enable_prefix_caching
        self._size = limits.block_size
        self.hash_size = limits.block_size if self._caches else 1 << 62
        self._groups = limits.groups
        self._rules = Rules.of(limits.version)
        self._most = [limits.most_blocks(group) for group in limits.groups]
        # A prefix is looked for in full groups first, then in those of each window.
        windows = dict.fromkeys(group.window for group in limits.groups)
        self._by_window = [
            (window, [i for i, group in enumerate(limits.groups) if group.window == window])
            for window in sorted(windows, key=lambda window: window is not None)
        ]
        self._hits: list[list[Block]] = []  # by group: the last blocks of what was found
        self._found = 0  # blocks

    # -- what is found ---------------------------------------------------------------------

    def find(self, task: Task) -> int:
        """As `KvCache.find`: the tokens after which every group can go on."""
        self._hits = [[] for _ in self._groups]
        self._found = task.junction = 0
        if not self._caches:
            return 0
        found = (task.known - 1) // self._size
        if not task.tracked:
            found = min(found, task.shared_blocks)
        before, longest = -1, 0
        while found != before:
            before = found
            for window, members in self._by_window:
                found = self._reach(task, window, members, found)
                longest = max(longest, found)
        if longest > found and len(self._groups) > 1:
            task.junction = longest
        for index, group in enumerate(self._groups):
            first = max(0, found - _seen(group)) if group.window else 0
            self._hits[index] = [self._block(task, index, at) for at in range(first, found)]
        self._found = found
        return found * self._size

    def _reach(self, task: Task, window: int | None, members: Sequence[int], most: int) -> int:
        """The most blocks, up to `most`, after which these groups can go on."""

        def has(place: int) -> bool:
            return all(self._lookup(task, index, place) is not None for index in members)

        if window is None:
            return next((place for place in range(most) if not has(place)), most)
        needed = _seen(self._groups[members[0]])
        run, end = 0, most
        for place in range(most - 1, -1, -1):
            if not has(place):
                run, end = 0, place
                continue
            run += 1
            if run >= needed:
                return end
        return run

    def _key(self, task: Task, index: int, place: int) -> int:
        return task.key(place) * len(self._groups) + index

    def _lookup(self, task: Task, index: int, place: int) -> Block | None:
        return self.pool.find(self._key(task, index, place))

    def _block(self, task: Task, index: int, place: int) -> Block:
        block = self._lookup(task, index, place)
        assert block is not None  # `_reach` saw it
        return block

    # -- what is taken ---------------------------------------------------------------------

    def admit(self, task: Task, end: int, whole: int, spared: int) -> bool:
        """As `KvCache.admit`; of `whole` tokens a window needs what its steps hold at once."""
        hits, found = self._hits, self._found
        spare = self.pool.free - spared
        spare -= sum(block.place is not None for blocks in hits for block in blocks)
        fitting = needed = 0
        for group, most in zip(self._groups, self._most, strict=True):
            fitting += max(min(-(-whole // group.block_size), most) - found, 0)
            needed += max(-(-end // group.block_size) - found, 0)
        if max(fitting, needed) > spare:
            return False
        task.tables = [Table() for _ in self._groups]
        for table, blocks in zip(task.tables, hits, strict=True):
            self.pool.touch(blocks)
            table.start = found - len(blocks)
            table.held = found
            table.blocks = [None] * table.start + blocks
        self.pool.allocate(needed)
        self._hold(task, end)
        return True

    def extend(self, task: Task, end: int) -> bool:
        """As `KvCache.extend`; gives back first what is outside of the windows."""
        in_flight = task.in_flight if self._rules.counts_in_flight else 0
        for index, group in enumerate(self._groups):
            if group.window:
                self._drop(task.tables[index], _first(group, task.computed - in_flight))
        needed = self._more(task, end)
        if needed > self.pool.free:
            return False
        if needed:
            self.pool.allocate(needed)
        self._hold(task, end)
        return True

    def _more(self, task: Task, end: int) -> int:
        """Blocks that it lacks for `end` tokens."""
        return sum(
            max(-(-end // group.block_size) - table.held, 0)
            for group, table in zip(self._groups, task.tables, strict=True)
        )

    def _hold(self, task: Task, end: int) -> None:
        for group, table in zip(self._groups, task.tables, strict=True):
            table.held = max(table.held, -(-end // group.block_size))
        self.cache(task, min(end, task.known))

    def _drop(self, table: Table, start: int) -> None:
        """Give back the blocks before `start`, the last one first."""
        start = min(start, table.held)
        if start <= table.start:
            return
        blocks = table.blocks[table.start : start]
        hashed = [block for block in reversed(blocks) if block is not None]
        self.pool.release(start - table.start - len(hashed), 0, hashed)
        table.blocks[table.start : start] = [None] * len(blocks)
        table.start = start

    def cache(self, task: Task, tokens: int) -> None:
        """As `KvCache.cache`."""
        if not self._caches:
            return
        full = tokens // self._size
        for index, (group, table) in enumerate(zip(self._groups, task.tables, strict=True)):
            for place in range(len(table.blocks), full):
                wanted = place >= table.start and self._hashes(task, group, place)
                key = self._key(task, index, place)
                table.blocks.append(self.pool.cache(key) if wanted else None)

    def _hashes(self, task: Task, group: KvCacheGroup, place: int) -> bool:
        if group.window is None or self._rules.hashes_all_of_windows:
            return True
        ends = ((task.prompt - 1) // self._size, task.junction)
        return any(end - _seen(group) <= place < end for end in ends)

    def preempt(self, task: Task) -> None:
        """As `KvCache.preempt`."""
        task.tracked = True
        self.free(task)

    def free(self, task: Task) -> None:
        """As `KvCache.free`: group by group."""
        for table in task.tables:
            blocks = [block for block in reversed(table.blocks) if block is not None]
            self.pool.release(table.held - table.start - len(blocks), 0, blocks)
        task.tables = []

    # -- many steps that only decode -------------------------------------------------------

    def needed(self, tasks: Sequence[Task], steps: int) -> int:
        """As `KvCache.needed`, not counting what windows give back meanwhile."""
        return sum(self._more(task, task.computed + steps) for task in tasks)

    def advance(self, tasks: Sequence[Task], steps: int, behind: int) -> None:
        """As `KvCache.advance`: takes and gives back in the order in which the steps do."""
        lag = behind if self._rules.counts_in_flight else 0
        events: list[tuple[int, int, int, int]] = []  # step, place of the task, group or none, ...
        for place, task in enumerate(tasks):
            self.cache(task, task.computed + steps - behind)
            for index, (group, table) in enumerate(zip(self._groups, task.tables, strict=True)):
                if group.window:
                    first = task.in_flight if self._rules.counts_in_flight else 0
                    for step, start in _starts(group, task.computed, steps, first, lag):
                        if start > table.start:
                            events.append((step, place, index, start))
                size = group.block_size
                for step in range(table.held * size - task.computed, steps, size):
                    events.append((step, place, len(self._groups), index))
        for _, place, index, detail in sorted(events):
            tables = tasks[place].tables
            if index < len(tables):
                self._drop(tables[index], detail)
            else:
                self.pool.allocate(1)
                tables[detail].held += 1


def _seen(group: KvCacheGroup) -> int:
    """Blocks before a token at the start of a block that it sees."""
    assert group.window is not None
    return -(-(group.window - 1) // group.block_size)


def _first(group: KvCacheGroup, computed: int) -> int:
    """The first block that a token after `computed` others sees."""
    assert group.window is not None
    return max(0, computed - group.window + 1) // group.block_size


def _starts(
    group: KvCacheGroup, computed: int, steps: int, first: int, lag: int
) -> Iterator[tuple[int, int]]:
    """When a decode gives blocks back: the step, and where its blocks begin from then on.

    Of the computed tokens `first` are under way in the first step and `lag` in later ones.
    """
    assert group.window is not None
    yield 0, _first(group, computed - first)
    if steps < 2:
        return
    start = _first(group, computed + 1 - lag)
    yield 1, start
    while True:
        start += 1
        step = start * group.block_size + group.window - 1 - computed + lag
        if step >= steps:
            return
        yield step, start
