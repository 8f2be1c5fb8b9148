"""How a device's clock gives way: steps that draw much power, after rest and after one another.

A GPU that computes long prefills without a pause draws more power than it may,
and lowers its clock within some tenths of a second; while it decodes it
recovers. Operations are timed with the device kept at work (`measure._Filler`),
so what they take is right for a stream of prefills and too long for one after a
rest. This measures the way from one to the other.
"""

from __future__ import annotations

from collections.abc import Iterator

from dooly_backend.database.records import ClockStep
from dooly_backend.engines import Engine
from dooly_backend.errors import EngineError
from dooly_backend.workload import Batch

REST_S = 0.5  # until the clock has recovered; some time constants
STREAM_S = 0.8
#: Decodes between two prefills, in a stream of both.
PAUSES = (1, 2, 4, 8, 16, 32)
_DECODES, _CONTEXT = 8, 512
_MOST_STEPS = 2000


def measure_clock(engine: Engine, tokens: int, repeats: int = 2) -> list[ClockStep]:
    """Steps of `tokens` prefill tokens among decodes, in several patterns, `repeats` times each.

    `tokens` must be so many that the device needs longer than the host for a step.
    Raises EngineError where the engine cannot run them, or tells no device times.
    """
    decodes = Batch.decode(_DECODES, _CONTEXT)
    heavy = Batch.prefill(tokens)
    light_s = _seconds(engine, decodes, None)
    heavy_s = _seconds(engine, decodes, heavy)
    rest = _count(REST_S, light_s)
    found = []
    for pattern, prefills in _patterns(rest, light_s, heavy_s, heavy, repeats):
        for place, step in enumerate(engine.pipelined_sequence(decodes, prefills)):
            if step.begin_us is None or step.device_us is None:
                raise EngineError("this device tells no times of its own: it has no clock to watch")
            fresh = prefills[place]
            batch = decodes + fresh if fresh else decodes
            found.append(ClockStep(pattern, place, batch.num_tokens, step.begin_us, step.device_us))
    return found


def _patterns(
    rest: int, light_s: float, heavy_s: float, heavy: Batch, repeats: int
) -> Iterator[tuple[str, list[Batch | None]]]:
    """What each pattern is called, and the prefills of its steps."""
    stream = _count(STREAM_S, heavy_s)
    quiet: list[Batch | None] = [None] * rest
    for turn in range(repeats):
        yield f"stream {turn}", [*quiet, *[heavy] * stream, *quiet[: rest // 4], heavy]
        for pause in PAUSES:
            cycle: list[Batch | None] = [heavy, *[None] * pause]
            cycles = _count(STREAM_S, heavy_s + pause * light_s)
            yield f"pause {pause} {turn}", [*quiet, *cycle * cycles]


def _count(seconds: float, each_s: float) -> int:
    return min(max(2, round(seconds / each_s)), _MOST_STEPS)


def _seconds(engine: Engine, decodes: Batch, fresh: Batch | None) -> float:
    """What one step takes in a row of such."""
    steps = engine.pipelined_sequence(decodes, [fresh] * 8)
    return sorted(step.interval_us for step in steps)[len(steps) // 2] / 1e6
