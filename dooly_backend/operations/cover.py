"""Whether the runnable set of one trace also covers other steps (paper section 5.3).

A trace is made of one mixed step. Steps of prefills alone or of decodes alone
run the same modules; what they run inside is compared here with the entries,
by place, since their operations are other objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dooly_backend.engines import Engine
from dooly_backend.engines.paths import ModuleStack
from dooly_backend.operations.runnable import Entry, place
from dooly_backend.operations.tree import Node, forest
from dooly_backend.tracing.modes import DispatchTracer, Labeller
from dooly_backend.tracing.trace import CheckResult, ModuleRecord, Operation, Trace
from dooly_backend.workload import Batch


@dataclass(frozen=True)
class StepCover:
    """What of one step lies under the entries of a runnable set.

    `kernels` are the operations of its modules that run a kernel; `gaps` those
    under no entry and `doubles` those under several, as "operation in path";
    `idle` are the entries that the step does not run.
    """

    kernels: int
    gaps: tuple[str, ...]
    doubles: tuple[str, ...]
    idle: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """Every kernel under exactly one entry."""
        return not self.gaps and not self.doubles


def step_cover(step: Trace, entries: Sequence[Entry]) -> StepCover:
    """How `entries` cover the kernels of a step (see `recorded`), whichever they come from."""
    kernels = 0
    gaps: list[str] = []
    doubles: list[str] = []
    met: set[int] = set()
    for node in (node for root in forest(step) for node in root.walk()):
        for op in node.kernels:
            kernels += 1
            found = [i for i, entry in enumerate(entries) if covers(entry, node, op)]
            met.update(found)
            if len(found) != 1:
                (doubles if found else gaps).append(f"{op.name} in {op.path or 'the model'}")
    idle = [entry for i, entry in enumerate(entries) if i not in met]
    return StepCover(
        kernels, tuple(gaps), tuple(doubles), tuple(e.path or "the model" for e in idle)
    )


def covers(entry: Entry, node: Node, op: Operation) -> bool:
    """Whether an entry of another trace covers a kernel of this one, by its place."""
    if entry.ordinal is None:
        inside = entry.path == "" or node.path == entry.path
        return inside or node.path.startswith(f"{entry.path}.")
    top, ordinal = place(node, op)
    return entry.key == (node.path, ordinal) and entry.name == top.name


def recorded(engine: Engine, batch: Batch) -> Trace:
    """An unlabelled trace of one step of any batch."""
    stack = ModuleStack(engine.modules)
    tracer = DispatchTracer(stack, Labeller({}), engine.operation_bodies, None, label=False)
    with stack.tracking(), tracer.recording():
        engine.step(batch)
    return Trace(
        model=engine.configuration.model,
        num_tokens=batch.num_tokens,
        num_reqs=batch.num_reqs,
        layers=engine.num_layers,
        modules=tuple(ModuleRecord(*entry) for entry in stack.entered),
        operations=tuple(tracer.operations),
        check=CheckResult(0, 0, 0, 0),
    )
