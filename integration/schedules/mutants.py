"""How many random cases notice a rule of our scheduler that is changed.

    python -m integration.schedules.mutants --cases 200

Each mutant is the scheduler with one line of it wrong. vLLM's scheduler runs
every case once; a case notices a mutant when any step or time differs. Exit
code 1 where a mutant is noticed by none: then the cases do not try that rule.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from dooly_backend.simulation import blocks, fast, kv_cache, kv_groups, own_scheduler, tasks
from dooly_backend.simulation.scheduler import simulate
from integration.schedules.cases import cases as make_cases
from integration.schedules.cases import differences, grouped_cases, pipeline_cases
from integration.schedules.equal import vllm_version

BLOCKS, TASKS, CACHE, GROUPS, SCHEDULER = (
    "blocks",
    "tasks",
    "kv_cache",
    "kv_groups",
    "own_scheduler",
)
_CLASSES = (
    "BlockPool",
    "GroupedKvCache",
    "KvCache",
    "PriorityQueue",
    "Queue",
    "Scheduler",
    "Step",
    "Task",
)
#: What is wrong, where, the line as it is and as it would be.
MUTANTS = (
    (
        "a request's first blocks are evicted first",
        CACHE,
        "cannot_be_hit, reversed(task.blocks))",
        "cannot_be_hit, list(task.blocks))",
    ),
    (
        "the blocks freed last are evicted first",
        BLOCKS,
        "self._queue.append(block.place)",
        "self._queue.appendleft(block.place)",
    ),
    (
        "of two blocks with one content the newer is hit",
        BLOCKS,
        "return blocks[0] if blocks else None",
        "return blocks[-1] if blocks else None",
    ),
    (
        "a prompt may be found in the cache as a whole",
        CACHE,
        "most = (task.known - 1) // self._block_size",
        "most = task.known // self._block_size",
    ),
    (
        "blocks that are hit count as free",
        CACHE,
        "self.pool.free - sum(block.place is not None for block in hits) - spared",
        "self.pool.free - spared",
    ),
    (
        "no request ever finds its own blocks again",
        CACHE,
        "task.tracked = True",
        "task.tracked = False",
    ),
    (
        "blocks are hashed when they are scheduled, not when their tokens are known",
        CACHE,
        "self.cache(task, min(end, task.known))",
        "self.cache(task, end)",
    ),
    ("no watermark", SCHEDULER, "spared = self._watermark if", "spared = 0 if"),
    (
        "a prompt need not fit as a whole",
        SCHEDULER,
        "if limits.scheduler_reserve_full_isl:",
        "if False:",
    ),
    (
        "the oldest request is preempted",
        SCHEDULER,
        "return self.running.pop(), 0, 0",
        "return self.running.pop(place), 0, 0",
    ),
    (
        "preempted requests go to the end of the queue",
        TASKS,
        "self._tasks.appendleft(task)",
        "self._tasks.append(task)",
    ),
    (
        "requests are admitted in a step that preempts",
        SCHEDULER,
        "if not step.preempted:",
        "if True:",
    ),
    (
        "of one priority the oldest is preempted",
        SCHEDULER,
        "key=lambda task: (task.priority, task.order))",
        "key=lambda task: (task.priority, -task.order))",
    ),
    ("a lone request is held to the threshold", SCHEDULER, "eligible <= 1", "eligible <= 0"),
    (
        "a step gets no tokens back from a request that it preempts",
        SCHEDULER,
        "freed = step.queries.pop(index_in_step)",
        "step.queries.pop(index_in_step)",
    ),
    (
        "steps at once do not stop for blocks",
        SCHEDULER,
        "if self.cache.needed(running, middle) <= self.cache.pool.free:",
        "if True:",
    ),
    (
        "steps at once do not wait for who could be admitted",
        SCHEDULER,
        "len(running) < limits.max_num_seqs and not blocked:",
        "False:",
    ),
    (
        "windows: all blocks before a hit are needed",
        GROUPS,
        "needed = _seen(self._groups[members[0]])",
        "needed = most",
    ),
    (
        "windows: one block less is needed for a hit",
        GROUPS,
        "if run >= needed:",
        "if run >= max(needed - 1, 1):",
    ),
    (
        "windows: nothing is given back before the end",
        GROUPS,
        "if start <= table.start:",
        "if True:",
    ),
    (
        "windows: the first block that is not seen is evicted first",
        GROUPS,
        "hashed = [block for block in reversed(blocks) if block is not None]",
        "hashed = [block for block in blocks if block is not None]",
    ),
    (
        "windows: tokens under way are not seen any more",
        GROUPS,
        "_first(group, task.computed - in_flight)",
        "_first(group, task.computed)",
    ),
    (
        "windows: all their blocks get a hash",
        GROUPS,
        "if group.window is None or self._rules.hashes_all_of_windows:",
        "if True:",
    ),
    (
        "windows: where another group found more, nothing is kept",
        GROUPS,
        "if longest > found and len(self._groups) > 1:",
        "if False:",
    ),
    (
        "windows: a prompt must fit as if there were none",
        GROUPS,
        "max(min(-(-whole // group.block_size), most) - found, 0)",
        "max(-(-whole // group.block_size) - found, 0)",
    ),
    (
        "windows: who is blocked stays so while others decode",
        SCHEDULER,
        "self._blocked and not self.cache.has_windows",
        "self._blocked",
    ),
    (
        "windows: of many steps, blocks are given back at the end",
        GROUPS,
        "sorted(events)",
        "sorted(events, key=lambda event: event[2] < len(self._groups))",
    ),
    (
        "pipelines: a request decodes in the next step again",
        SCHEDULER,
        "if self._calls < task.eligible:",
        "if False:",
    ),
    (
        "pipelines: who was preempted does not wait for what is under way",
        SCHEDULER,
        "if task.stale:",
        "if False:",
    ),
)


@click.command()
@click.option("--cases", default=200, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the first case.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="A Markdown table.")
def main(cases: int, seed: int, out: Path | None) -> None:
    """Run CASES random cases of each kind through every mutant."""
    from dooly_backend.engines.vllm_boot import import_vllm

    import_vllm(None)
    version = vllm_version()
    kinds = (make_cases, grouped_cases, pipeline_cases)
    made = [case for make in kinds for case in make(cases, seed, version).values()]
    expected = [simulate(c.requests, c.limits, c.timer, "engine", **c.feed) for c in made]
    lines = [
        f"Cases of {len(made)} (vLLM {version}) that notice a changed rule:",
        "",
        "| changed rule | cases |",
        "|---|---|",
    ]
    unnoticed = 0
    for name, module, old, new in MUTANTS:
        with mutated(module, old, new):
            noticed = sum(fails(case, run) for case, run in zip(made, expected, strict=True))
        unnoticed += not noticed
        lines.append(f"| {name} | {noticed} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if out is not None:
        out.write_text(text)
    sys.exit(unnoticed > 0)


def fails(case: Any, expected: Any) -> bool:
    """Whether our scheduler, as it is now, gives anything else, or breaks."""
    try:
        found = simulate(case.requests, case.limits, case.timer, "dooly", **case.feed)
    except Exception:  # a mutant may break in any way: that is noticed
        return True
    return bool(differences(expected, found))


@contextmanager
def mutated(module: str, old: str, new: str) -> Iterator[None]:
    """Our scheduler with one line changed while the block runs."""
    sources = {
        name: Path(str(real.__file__)).read_text()
        for name, real in (
            (BLOCKS, blocks),
            (TASKS, tasks),
            (CACHE, kv_cache),
            (GROUPS, kv_groups),
            (SCHEDULER, own_scheduler),
        )
    }
    if sources[module].count(old) != 1:
        raise ValueError(f"{module} does not hold {old!r} once: bring the mutant up to date")
    sources[module] = sources[module].replace(old, new)
    made: dict[str, Any] = {}
    for name, source in sources.items():
        space = types.ModuleType(f"mutated_{name}").__dict__
        exec(compile(source, f"mutated_{name}", "exec"), space)
        space.update(made)  # instead of what it has just imported
        made |= {key: space[key] for key in _CLASSES if key in space}
    real = {name: getattr(fast, name) for name in ("Scheduler", "Step", "Task")}
    for name in real:
        setattr(fast, name, made[name])
    try:
        yield
    finally:
        for name, value in real.items():
            setattr(fast, name, value)


if __name__ == "__main__":
    main()
