"""The finest set of calls that run alone and cover the pass (paper section 5).

Resolution goes bottom-up. An operation that cannot run alone falls back to the
module that runs it, which may take the engine's forward context; a module that
cannot run at all falls back to its caller. Children of a resolved parent are
dropped, so that every kernel lies under exactly one entry.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dooly_backend.database.records import Granularity
from dooly_backend.engines import CapturedCall, Engine
from dooly_backend.errors import TraceError
from dooly_backend.operations.capture import Key, captured
from dooly_backend.operations.inputs import generated
from dooly_backend.operations.tree import Node, forest
from dooly_backend.tracing.sizes import traced_batch
from dooly_backend.tracing.trace import Operation, Trace

Outcome = Literal["alone", "with context"]

#: Mixture-of-experts layers.
ROUTING = "its latency depends on the routing, which only a hook at this module controls"

#: Of a module that launches kernels in code of its own: none of its operations runs them.
LAUNCHES = "launched past the dispatcher, under none of the module's operations"

#: Module calls on a host-bound device keep their host time: see `resolve`.
HOST_TIME = "the module's own host time is part of what a step pays on this device"


@dataclass(frozen=True)
class Entry:
    """A call to measure: one operation, or a module with all below it.

    `operations` are the trace's operations that it covers, `reason` says why
    it is not finer (empty for operations). An operation was run with arguments
    made from labels and formulas, or for the reason in `captured` with those of
    a step.
    """

    path: str
    ordinal: int | None  # of the operation in its module's call, None for a module
    name: str  # operation or module class
    module_class: str
    operations: tuple[Operation, ...]
    stateful: bool
    reason: str = ""
    captured: str = ""

    @property
    def key(self) -> Key:
        return self.path, self.ordinal

    @property
    def granularity(self) -> Granularity:
        return "module" if self.ordinal is None else "operation"

    @property
    def position(self) -> int:
        """Order in the pass."""
        return self.operations[0].index


@dataclass(frozen=True)
class RunnableSet:
    """Entries in the order of the pass; every kernel of its modules lies under one."""

    entries: tuple[Entry, ...]

    def fallbacks(self) -> list[Entry]:
        """Entries that are coarser than an operation, with their reasons."""
        return [entry for entry in self.entries if entry.reason]


def resolve(trace: Trace, engine: Engine, prefer_operations: bool | None = None) -> RunnableSet:
    """Find the runnable set of `trace` by running its calls at two other sizes.

    With `prefer_operations` (the default on GPUs, where kernels decide) a leaf
    module whose operations all run alone is measured by operation. On a CPU
    each call of an operation costs about what its module costs, so the sum of
    a module's operations is not the module; the module is kept whole.

    Raises TraceError when a module can be run neither alone nor within any of
    its callers.
    """
    if prefer_operations is None:
        prefer_operations = engine.environment.device_kind == "cuda"
    return resolve_from(trace, engine, tried(trace, engine), prefer_operations)


def tried(trace: Trace, engine: Engine) -> Outcomes:
    """What runs again of the pass, and how: the same whatever granularity is preferred."""
    nodes = [node for root in forest(trace) for node in _tried_nodes(root, engine.moe)]
    return _try_calls(trace, engine, nodes)


def _tried_nodes(node: Node, routed: Collection[str]) -> Iterator[Node]:
    """The calls at or below `node`, but nothing inside a routed one, which stays whole.

    vLLM's shared experts would keep the result of a call of their own for the
    next step, and stop it.
    """
    if node.path in routed:
        yield replace(node, children=(), operations=())
        return
    yield node
    for child in node.children:
        yield from _tried_nodes(child, routed)


def resolve_from(
    trace: Trace, engine: Engine, outcomes: Outcomes, prefer_operations: bool
) -> RunnableSet:
    """The runnable set that `outcomes` allow. Raises TraceError as `resolve` does."""
    entries: list[Entry] = []
    for root in forest(trace):
        found = _resolve(root, outcomes, prefer_operations, engine.moe)
        if found is None:
            raise TraceError(
                f"{root.path or 'the model'} cannot be run again outside its step: "
                f"{outcomes.reason((root.path, None))}"
            )
        entries += found
    entries.sort(key=lambda entry: entry.position)
    result = RunnableSet(tuple(entries))
    check_cover(_nodes(trace), result)
    return result


def _nodes(trace: Trace) -> list[Node]:
    return [node for root in forest(trace) for node in root.walk()]


def check_cover(nodes: Sequence[Node], runnable: RunnableSet) -> None:
    """Every kernel of the pass under exactly one entry, or a TraceError naming it."""
    covered: dict[int, int] = {}
    for entry in runnable.entries:
        for op in entry.operations:
            covered[op.index] = covered.get(op.index, 0) + 1
    for node in nodes:
        for op in node.kernels:
            if covered.get(op.index, 0) != 1:
                raise TraceError(
                    f"{op.name} in {op.path or 'the model'} lies under "
                    f"{covered.get(op.index, 0)} entries of the runnable set instead of one"
                )


@dataclass(frozen=True)
class Outcomes:
    """What running each call again gave: how it ran, or why it did not."""

    ran: Mapping[Key, Outcome]
    failed: Mapping[Key, str]
    captured: Mapping[Key, str]  # why an operation's arguments could not be made

    def reason(self, key: Key) -> str:
        return self.failed.get(key, "it was not called")


def _try_calls(trace: Trace, engine: Engine, nodes: Sequence[Node]) -> Outcomes:
    """Run every module and every kernel operation of the pass again, at two other sizes.

    What a call needs at either size, it needs: one that fails at one size cannot run.
    """
    keys: list[Key] = [(node.path, None) for node in nodes]
    tops: dict[Key, Operation] = {}
    for node in nodes:
        operations = (op for op in node.kernels if not op.is_launch)
        for top, ordinal in (place(node, op) for op in operations):
            tops[node.path, ordinal] = top
    keys += tops
    ran: dict[Key, Outcome] = {}
    failed: dict[Key, str] = {}
    captured_: dict[Key, str] = {}
    dead: set[Key] = set()
    for tokens, requests in _other_sizes(trace):
        with captured(engine, traced_batch(tokens, requests), keys) as calls:
            for call in calls:
                key = call.path, call.ordinal
                if key in tops:
                    why = _made_and_run(trace, engine, tops[key], (tokens, requests), call)
                    if why is None:
                        ran.setdefault(key, "alone")
                        continue
                    captured_[key] = why
                alone = _error(engine, call, None)
                if alone is None:
                    ran.setdefault(key, "alone")
                    continue
                failed[key] = alone
                if call.context is not None and _error(engine, call, call.context) is None:
                    ran[key] = "with context"
                else:
                    dead.add(key)
    alive = {key: how for key, how in ran.items() if key not in dead}
    return Outcomes(alive, failed, captured_)


def _made_and_run(
    trace: Trace, engine: Engine, op: Operation, size: tuple[int, int], call: CapturedCall
) -> str | None:
    """Why `op` does not run alone with arguments made for a step of `size`, None when it does."""
    try:
        made = (call.args, call.kwargs)
        args, kwargs = generated(op, trace.formulas.get(op.index, ()), *size, made)
    except TraceError as error:
        return str(error)
    return _error(engine, replace(call, args=args, kwargs=kwargs), None)


def _other_sizes(trace: Trace) -> list[tuple[int, int]]:
    """Two (tokens, requests) that the trace did not see."""
    tokens, requests = trace.num_tokens, trace.num_reqs
    return [(tokens // 2 + 1, max(2, requests - 2)), (tokens + 3, requests + 1)]


def _error(engine: Engine, call: object, context: object) -> str | None:
    """Why the call does not run under `context`, None when it does."""
    try:
        with engine.running(context):
            call()  # type: ignore[operator]
            engine.synchronize()
    except Exception as error:  # whatever stops it is the answer
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    return None


def _ordinal(node: Node, op: Operation) -> int:
    """Count of the dispatcher calls in the module's call before `op`.

    Operations inside a custom operation's body are not calls of the module:
    they are seen only when tracing enters the body. Nor are launches past the dispatcher.
    """
    return sum(
        1 for o in node.operations if o.parent is None and o.index < op.index and not o.is_launch
    )


def _resolve(
    node: Node, outcomes: Outcomes, prefer_operations: bool, routed: Collection[str]
) -> list[Entry] | None:
    """Entries that cover `node`, or None when its caller must."""
    operations = tuple(node.all_operations())
    if not any(below.kernels for below in node.walk()):
        return []  # nothing runs here
    fine, reason = _finer(node, outcomes, prefer_operations, routed)
    if fine is not None:
        return fine
    outcome = outcomes.ran.get((node.path, None))
    if outcome is None:
        return None
    return [
        Entry(
            node.path,
            None,
            node.record.module_class,
            node.record.module_class,
            operations,
            outcome == "with context",
            reason,
        )
    ]


def _finer(
    node: Node, outcomes: Outcomes, prefer_operations: bool, routed: Collection[str]
) -> tuple[list[Entry] | None, str]:
    """Entries finer than the module, or None and the reason for keeping it whole."""
    if node.path in routed:
        return None, ROUTING
    if not node.children and not prefer_operations:
        alone = outcomes.ran.get((node.path, None)) == "alone"
        return None, HOST_TIME if alone else outcomes.reason((node.path, None))
    launches = dict.fromkeys(op.name for op in node.operations if op.is_launch)
    if launches:
        return None, f"{', '.join(launches)}: {LAUNCHES}"
    entries: list[Entry] = []
    for child in node.children:
        found = _resolve(child, outcomes, prefer_operations, routed)
        if found is None:
            return None, f"{child.path}: {outcomes.reason((child.path, None))}"
        entries += found
    for op in node.kernels:
        top = _outermost(node, op)
        key = node.path, _ordinal(node, top)
        if outcomes.ran.get(key) != "alone":
            return None, f"{top.name}: {outcomes.reason(key)}"
        if any(entry.key == key for entry in entries):
            continue
        covered = tuple(o for o in node.operations if o is top or _outermost(node, o) is top)
        entries.append(
            Entry(
                node.path,
                key[1],
                top.name,
                node.record.module_class,
                covered,
                stateful=False,
                captured=outcomes.captured.get(key, ""),
            )
        )
    return entries, ""


def place(node: Node, op: Operation) -> tuple[Operation, int]:
    """The dispatcher call of the module that `op` runs in, and its ordinal there."""
    top = _outermost(node, op)
    return top, _ordinal(node, top)


def _outermost(node: Node, op: Operation) -> Operation:
    """The dispatcher call of the module that `op` runs in: itself, or a custom operation."""
    by_index = {o.index: o for o in node.operations}
    while op.parent is not None and op.parent in by_index:
        op = by_index[op.parent]
    return op
