"""The KV cache of the engine as a schedule sees it: how many blocks are free, and what they hold.

vLLM keeps its free blocks in one queue (`vllm/v1/core/block_pool.py`): blocks
without a hash are put in front of it, hashed ones, which a later request may
hit, at its end, and allocation takes from the front. So the queue is always
the unhashed blocks, then the hashed ones in the order in which they were
freed. Which unhashed block is which decides nothing: they are a number here.
Hashed blocks that no request can hit any more (those of a finished request
beyond a shared prefix) are numbers in the queue, too; the others are `Block`s.

All KV cache groups take their blocks from here, each with keys of its own. Partial hits are
not modelled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class Block:
    """A hashed block that requests may hit; `key` stands for its hash."""

    __slots__ = ("key", "place", "references")

    def __init__(self, key: int) -> None:
        self.key = key
        self.references = 1
        self.place: _Place | None = None  # in the queue, while nothing refers to it


class _Place:
    """A stretch of the queue of hashed free blocks: one that can be hit, or some that cannot."""

    __slots__ = ("block", "count")

    def __init__(self, count: int, block: Block | None = None) -> None:
        self.count = count
        self.block = block


class BlockPool:
    """Free blocks in the order in which they are given out, and hashed blocks by key.

    `num_blocks` is vLLM's `num_gpu_blocks`: one of them is its null block.
    """

    def __init__(self, num_blocks: int) -> None:
        self.free = num_blocks - 1
        self._unhashed = num_blocks - 1
        self._queue: deque[_Place] = deque()
        self._cached: dict[int, list[Block]] = {}  # first cached, first hit

    def allocate(self, count: int) -> None:
        """Take `count` free blocks; those that hold something lose it. The caller has checked."""
        self.free -= count
        if count <= self._unhashed:
            self._unhashed -= count
            return
        count -= self._unhashed
        self._unhashed = 0
        queue = self._queue
        while count:
            place = queue[0]
            if place.count > count:
                place.count -= count
                return
            count -= place.count
            queue.popleft()
            if place.block is not None and place.count:
                self._forget(place.block)

    def release(self, unhashed: int, hashed: int, blocks: Iterable[Block] = ()) -> None:
        """Give back blocks without a hash, hashed ones that cannot be hit, and then `blocks`.

        `blocks` come in the order in which they will be taken: a request's last one first.
        """
        self._unhashed += unhashed
        self.free += unhashed + hashed
        if hashed:
            self._queue.append(_Place(hashed))
        for block in blocks:
            block.references -= 1
            if not block.references:
                block.place = _Place(1, block)
                self._queue.append(block.place)
                self.free += 1

    def cache(self, key: int) -> Block:
        """A block that is referred to once and can be hit by `key` from now on."""
        block = Block(key)
        self._cached.setdefault(key, []).append(block)
        return block

    def find(self, key: int) -> Block | None:
        """The block that holds `key`, of several the one that has for longest."""
        blocks = self._cached.get(key)
        return blocks[0] if blocks else None

    def touch(self, blocks: Iterable[Block]) -> None:
        """Refer to `blocks` once more; those that were free are no longer."""
        for block in blocks:
            if block.place is not None:
                block.place.count = 0  # skipped when its turn comes
                block.place = None
                self.free -= 1
            block.references += 1

    def _forget(self, block: Block) -> None:
        block.place = None
        blocks = self._cached[block.key]
        blocks.remove(block)
        if not blocks:
            del self._cached[block.key]
