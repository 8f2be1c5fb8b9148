"""The KV cache of one group of full attention: which blocks a request gets, keeps and finds again.

The rules are those of `vllm/v1/core/kv_cache_manager.py` with its
UnitaryKVCacheCoordinator, in 0.25.1 and 0.32.0. Models with several groups, or
with windows, have `kv_groups.GroupedKvCache` instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from dooly_backend.simulation.blocks import Block, BlockPool
from dooly_backend.simulation.records import ServingLimits
from dooly_backend.simulation.tasks import Task


class KvCache:
    """Blocks of all requests. Counts are tokens where nothing else is said."""

    #: Whether `Task.in_flight` matters, and a step of decodes can give blocks back.
    has_windows = False

    def __init__(self, limits: ServingLimits) -> None:
        self.pool = BlockPool(limits.num_gpu_blocks)
        self._block_size = limits.block_size
        self._caches = limits.enable_prefix_caching
        self._hits: list[Block] = []
        # Tokens that a block has when it gets a hash: never, without prefix caching.
        self.hash_size = limits.block_size if self._caches else 1 << 62

    def find(self, task: Task) -> int:
        """How many tokens the blocks hold that hold the beginning of a request, but not all of it.

        `admit` takes what was found last.
        """
        hits = self._hits = []
        if not self._caches:
            return 0
        most = (task.known - 1) // self._block_size
        if not task.tracked:
            most = min(most, task.shared_blocks)
        for index in range(most):
            block = self.pool.find(task.key(index))
            if block is None:
                break
            hits.append(block)
        return len(hits) * self._block_size

    def admit(self, task: Task, end: int, whole: int, spared: int) -> bool:
        """Give a waiting request what was found and blocks for `end` tokens, if there are enough.

        There must be enough for `whole` tokens, and `spared` blocks must stay free.
        """
        hits = self._hits
        # Blocks that it hits and nobody holds are free ones, too.
        spare = self.pool.free - sum(block.place is not None for block in hits) - spared
        if max(-(-max(whole, end) // self._block_size) - len(hits), 0) > spare:
            return False
        self.pool.touch(hits)
        task.blocks = hits
        task.held = len(hits)
        task.hashed_end = len(hits) * self._block_size
        return self.extend(task, end)

    def extend(self, task: Task, end: int) -> bool:
        """Give it blocks for `end` tokens, if there are enough."""
        held = -(-end // self._block_size)
        if held > task.held:
            if held - task.held > self.pool.free:
                return False
            self.pool.allocate(held - task.held)
            task.held = held
        self.cache(task, min(end, task.known))
        return True

    def cache(self, task: Task, tokens: int) -> None:
        """Its full blocks of the first `tokens` tokens get a hash."""
        if tokens < task.hashed_end + self.hash_size:
            return
        full = tokens // self._block_size
        hit = full if task.tracked else min(full, task.shared_blocks)
        if len(task.blocks) < hit:
            fresh = range(len(task.blocks), hit)
            task.blocks += [self.pool.cache(task.key(index)) for index in fresh]
        task.hashed_end = full * self._block_size

    def preempt(self, task: Task) -> None:
        """Take all blocks from a request that will want them again."""
        if self._caches and not task.tracked:
            # From now on it can hit its own blocks.
            task.tracked = True
            own = range(len(task.blocks), task.hashed_end // self._block_size)
            task.blocks += [self.pool.cache(task.key(index)) for index in own]
        self.free(task)

    def free(self, task: Task) -> None:
        """Take all blocks from a request."""
        hashed = task.hashed_end // self._block_size
        cannot_be_hit = hashed - len(task.blocks)
        self.pool.release(task.held - hashed, cannot_be_hit, reversed(task.blocks))
        task.held = task.hashed_end = 0
        task.blocks = []

    # -- many steps that only decode -------------------------------------------------------

    def needed(self, tasks: Sequence[Task], steps: int) -> int:
        """Blocks that so many steps take."""
        size = self._block_size
        last = size - 1 + steps
        return sum((task.computed + last) // size - task.held for task in tasks)

    def advance(self, tasks: Sequence[Task], steps: int, behind: int) -> None:
        """Take what `steps` steps need; the output of the last `behind` has not come back."""
        size = self._block_size
        self.pool.allocate(self.needed(tasks, steps))
        for task in tasks:
            computed = task.computed + steps
            task.held = -(-computed // size)
            if computed - behind >= task.hashed_end + self.hash_size:
                self.cache(task, computed - behind)
