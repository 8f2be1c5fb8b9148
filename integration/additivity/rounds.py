"""Rounds of isolated calls between live steps: what `integration.additivity.run` compares."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import click

from dooly_backend.database.records import Signature
from dooly_backend.engines import Engine
from dooly_backend.errors import EngineError
from dooly_backend.operations.callgraph import signatures
from dooly_backend.operations.capture import captured
from dooly_backend.operations.runnable import Entry, RunnableSet
from dooly_backend.operations.tree import layer_of
from dooly_backend.profiling.ahead import Ahead
from dooly_backend.profiling.measure import Regime, measure, step_samples
from dooly_backend.profiling.profiler import subject_of
from dooly_backend.profiling.timer import Timer, quiet_process, timer_for
from dooly_backend.profiling.watch import watch_for
from dooly_backend.tracing.trace import Trace
from dooly_backend.workload import Batch, WorkloadPoint
from integration.additivity.forward import ForwardClock

#: Rounds of isolated calls, samples of a call in a round and of live steps between two. Many
#: rounds of one sample: a shared host is quicker and slower by turns of some seconds, and what
#: is compared shall lie in one of them.
ROUNDS, REPEATS = 15, 1
#: Steps of few tokens are short, and noise is a larger part of them: more rounds.
SHORT, SHORT_ROUNDS = 64, 24
GPU_ROUNDS, GPU_REPEATS = 3, 3  # kernels between events hardly vary
_ATTEMPTS = 4  # at passes that were launched before the device began them
_LAYERS_APART = 4  # whose calls are timed: a call finds another layer's weights in the cache

BATCHES = [
    Batch.prefill(48),
    Batch.prefill(192),
    Batch.prefill(384),
    Batch.prefill(768),
    Batch.prefill(200, 300),
    Batch.prefill(100, count=3),
    Batch.prefill(96),
    Batch.prefill(512),
    Batch.decode(1, 300),
    Batch.decode(2, 900),
    Batch.decode(6, 200),
    Batch.decode(12, 700),
    Batch.decode(24, 400),
    Batch.decode(4, 500),
    Batch.decode(16, 1000),
    Batch.decode(32, 150),
    Batch.prefill(150) + Batch.decode(8, 500),
    Batch.prefill(400) + Batch.decode(16, 300),
    Batch.prefill(64, 640) + Batch.decode(3, 1000),
    Batch.prefill(256) + Batch.decode(4, 800),
]


GPU_BATCHES = [
    *(Batch.prefill(n) for n in (128, 300, 512, 1024, 2048, 4096, 8192)),
    Batch.prefill(1000, 6000),
    Batch.prefill(512, count=8),
    *(Batch.decode(n, context) for n in (1, 16, 64, 128) for context in (1000, 8000)),
    Batch.decode(4, 16000),
    Batch.prefill(1024) + Batch.decode(32, 2000),
    Batch.prefill(256, 4000) + Batch.decode(100, 1000),
]


@dataclass(frozen=True)
class Row:
    """One batch. Times are medians over the rounds that count, in microseconds.

    `forward_error` is the percentage by which the isolated calls of a round
    differ from the live forward pass around it, the median over the rounds. `rounds`
    are the live and isolated times of whole steps, by round. `drift` is by how many
    percent the slowest live steps between two rounds exceed the quickest, `others`
    how many processors other processes kept busy (None where nobody tells). `ahead` is
    what ran ahead of the isolated calls.
    """

    batch: str
    phase: str
    forward_live_us: float
    forward_isolated_us: float
    step_live_us: float
    step_isolated_us: float
    forward_error: float
    drift: float
    others: float | None
    rounds: tuple[tuple[float, float], ...] = ()
    ahead: Ahead = "product"


@dataclass(frozen=True)
class _Sums:
    """The forward pass and the whole step, live or as a sum of isolated calls; microseconds."""

    forward: float
    step: float


def compare(
    engine: Engine,
    timer: Timer,
    batch: Batch,
    signed: dict[Entry, Signature],
    times: int = 1,
    ways: Sequence[Ahead] = ("product",),
) -> list[Row]:
    """One batch: rounds of isolated calls, with live steps ahead of each and behind it.

    `times` as many rounds as usual, for a host that drifts. A row for each of the `ways`,
    which take turns within each round.
    """
    rounds_of_it, repeats = GPU_ROUNDS, GPU_REPEATS
    if engine.environment.device_kind == "cpu":
        rounds_of_it = SHORT_ROUNDS if batch.num_tokens <= SHORT else ROUNDS
        repeats = REPEATS
    rounds_of_it *= times
    watch = watch_for(engine.environment)
    watch.begin()
    lives = [_live(engine, timer, batch, repeats)]
    isolated: dict[Ahead, list[_Sums]] = {way: [] for way in ways}
    for _ in range(rounds_of_it):
        for way, sums in isolated.items():
            sums.append(_isolated(engine, timer, batch, signed, repeats, way))
        lives.append(_live(engine, timer, batch, repeats))
    others = watch.end().others
    return [_row(batch, lives, sums, others, way) for way, sums in isolated.items()]


def _row(
    batch: Batch,
    lives: Sequence[_Sums],
    isolated: Sequence[_Sums],
    others: float | None,
    ahead: Ahead,
) -> Row:
    """The rounds of one batch: what was live around each, and the sums of its isolated calls."""
    around = [
        _Sums((before.forward + after.forward) / 2, (before.step + after.step) / 2)
        for before, after in pairwise(lives)
    ]
    rounds = calmer_half(list(zip(around, isolated, strict=True)))

    def median(of: Callable[[_Sums, _Sums], float]) -> float:
        return statistics.median(of(live, alone) for live, alone in rounds)

    steps = [live.step for live in lives]
    return Row(
        batch.key,
        "mixed" if batch.decodes and batch.prefills else "decode" if batch.decodes else "prefill",
        median(lambda live, _: live.forward),
        median(lambda _, alone: alone.forward),
        median(lambda live, _: live.step),
        median(lambda _, alone: alone.step),
        100 * (median(lambda live, alone: alone.forward / live.forward) - 1),
        100 * (max(steps) / min(steps) - 1),
        others,
        tuple((live.step, alone.step) for live, alone in rounds),
        ahead,
    )


def calmer_half(rounds: Sequence[tuple[_Sums, _Sums]]) -> list[tuple[_Sums, _Sums]]:
    """The rounds whose live and isolated steps took the least together, in their order.

    By the sum, so that neither side is favoured: what is left out is a time when
    the whole host was slower.
    """
    quick = sorted(range(len(rounds)), key=lambda i: rounds[i][0].step + rounds[i][1].step)
    return [rounds[i] for i in sorted(quick[: (len(rounds) + 1) // 2])]


def _isolated(
    engine: Engine,
    timer: Timer,
    batch: Batch,
    signed: dict[Entry, Signature],
    repeats: int,
    ahead: Ahead,
) -> _Sums:
    entries = leading(signed)
    with captured(engine, batch, [entry.key for entry in entries]) as calls:
        subjects = {
            (signature.hash, WorkloadPoint.of(signature.kind, batch)): subject_of(
                signature.hash, entries, signed, calls
            )
            for signature in set(signed.values())
        }
        regime = Regime(repeats, 0, rounds=1, ahead=ahead)
        measured = measure(engine, timer, subjects, regime, calls)
    medians = {key[0]: measurement.median_us for key, measurement in measured.items()}
    entries = list(signed)
    return _Sums(
        sum(medians[signed[e].hash] for e in entries if e.path.startswith("model")),
        sum(medians[signed[e].hash] for e in entries),
    )


def leading(signed: Mapping[Entry, Signature]) -> list[Entry]:
    """The entries of as few first layers as tell every signature twice, and all outside layers.

    The calls of a whole step are kept while they are timed: of 32 layers and 8,192
    tokens they take 35 GB.
    """
    layers = [layer_of(entry.path) for entry in signed]
    depth = max((layer + 1 for layer in layers if layer is not None), default=0)
    for least in range(min(_LAYERS_APART, depth), depth):
        inside = [e for e, at in zip(signed, layers, strict=True) if at is None or at < least]
        every, here = (Counter(signed[e].hash for e in of) for of in (signed, inside))
        if all(here[name] >= min(2, count) for name, count in every.items()):
            return inside
    return list(signed)


def _live(engine: Engine, timer: Timer, batch: Batch, repeats: int) -> _Sums:
    clock = ForwardClock(engine, timer, batch)
    steps: list[float] = []
    for _ in range(_ATTEMPTS):
        with clock.running():
            steps += step_samples(engine, timer, batch, engine.num_layers, repeats)
        # The first pass warms up.
        if len(clock.times_us) > 1:
            return _Sums(statistics.median(clock.times_us[1:]), statistics.median(steps))
    raise EngineError(
        f"{batch.key}: in {clock.exposed} passes the device never waited until all was launched: "
        "this host launches too slowly for a pass to be timed"
    )


def measure_rows(
    engine: Engine,
    trace: Trace,
    runnable: RunnableSet,
    batches: Sequence[Batch],
    times: int = 1,
    ways: Sequence[Ahead] = ("product",),
) -> list[Row]:
    """The rows of every batch that the engine has room for; `times` and `ways` as in `compare`.

    Those that the KV cache has no room for are named on stderr.
    """
    signed = signatures(trace, runnable, engine)
    timer = timer_for(engine)
    rows = []
    with quiet_process():
        for batch in (each for each in batches if each.longest < engine.max_request_len - 16):
            try:
                rows += compare(engine, timer, batch, signed, times, ways)
            except EngineError as error:
                click.echo(f"{batch.key}: not compared: {error}", err=True)
    return rows


def of_way(rows: Sequence[Row], way: Ahead) -> list[Row]:
    """Those of `rows` whose calls were timed that way."""
    return [row for row in rows if row.ahead == way]
