"""How a device's clock gives way: steps that draw much power, after rest and after one another.

A GPU that computes long prefills without a pause draws more power than it may,
and lowers its clock within some tens of milliseconds; while it idles or decodes few
requests it recovers. Operations are timed with the device kept at work
(`profiling/ahead.py`), so what they take is right for a stream of prefills and too
long for one after a rest. This measures the way from one to the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dooly_backend.database.records import ClockStep
from dooly_backend.engines import Engine
from dooly_backend.engines.base import PipelinedStep
from dooly_backend.errors import EngineError
from dooly_backend.workload import Batch

REST_S = 0.4  # until the clock has recovered; several time constants
STREAM_S = 0.8
#: Requests that decode beside the prefills, and how many steps of theirs lie between two
#: prefills: many requests draw much power, too.
PAUSES = {8: (1, 2, 4, 8, 16), 64: (2, 8), 128: (2, 8), 248: (2, 8)}
_CONTEXT = 512
_FEWEST_IN_STREAM = 8
_MOST_STEPS = 2000


#: Layers of an engine whose decodes take the device longer than the host.
_DEEP = 16
#: New tokens of a step with prefills, so many that the host is the quicker one there, too.
_TOKENS, _TOKENS_OF_FEW_LAYERS = 2048, 4096


def measure_clock(engine: Engine) -> list[ClockStep]:
    """Steps with prefills among steps of decodes alone, in several patterns.

    With few layers the steps are short, and show how quickly the clock follows;
    but then the device idles beside decodes and waits for the inputs of the step
    after them, so that only a stream is run there. Raises EngineError where the
    engine cannot run them, or tells no device times.
    """
    # Told by two light steps: the patterns take a minute on a device without such times.
    for step in engine.pipelined_sequence(Batch.decode(1, _CONTEXT), [None, None]):
        _times_of(step)
    is_deep = engine.num_layers >= _DEEP
    tokens = min(_TOKENS if is_deep else _TOKENS_OF_FEW_LAYERS, engine.max_num_tokens)
    found = []
    for requests, pauses in PAUSES.items():
        if requests >= engine.max_num_reqs or (requests > min(PAUSES) and not is_deep):
            continue
        decodes = Batch.decode(requests, _CONTEXT)
        heavy = _prefill(engine, tokens - requests)
        light_s, heavy_s = _seconds(engine, decodes, None), _seconds(engine, decodes, heavy)
        for pattern in _patterns(light_s, heavy_s, heavy, pauses if is_deep else ()):
            steps = engine.pipelined_sequence(decodes, pattern.prefills)
            for place, (fresh, step) in enumerate(zip(pattern.prefills, steps, strict=True)):
                begin_us, device_us = _times_of(step)
                found.append(
                    ClockStep(
                        engine.num_layers,
                        f"{requests} requests, {pattern.name}",
                        place,
                        requests + (fresh.num_tokens if fresh else 0),
                        begin_us,
                        device_us,
                    )
                )
    return found


def _times_of(step: PipelinedStep) -> tuple[float, float]:
    """When the device began the step and what it took, microseconds. Raises EngineError."""
    if step.begin_us is None or step.device_us is None:
        raise EngineError("this device tells no times of its own: it has no clock to watch")
    return step.begin_us, step.device_us


@dataclass(frozen=True)
class _Pattern:
    name: str
    prefills: Sequence[Batch | None]


def _patterns(
    light_s: float, heavy_s: float, heavy: Batch, pauses: Sequence[int]
) -> Iterator[_Pattern]:
    quiet: list[Batch | None] = [None] * _count(REST_S, light_s)
    stream = max(_FEWEST_IN_STREAM, _count(STREAM_S, heavy_s))
    yield _Pattern("a stream", [*quiet, *[heavy] * stream])
    for pause in pauses:
        cycle: list[Batch | None] = [heavy, *[None] * pause]
        cycles = _count(STREAM_S, heavy_s + pause * light_s)
        yield _Pattern(f"pauses of {pause}", [*quiet, *cycle * cycles])


def _prefill(engine: Engine, tokens: int) -> Batch:
    """So many tokens as one request, or as few as the engine has room for in one."""
    count = -(-tokens // (engine.max_request_len - 1))
    return Batch.prefill(tokens // count, count=count)


def _count(seconds: float, each_s: float) -> int:
    return min(max(2, round(seconds / each_s)), _MOST_STEPS)


def _seconds(engine: Engine, decodes: Batch, fresh: Batch | None) -> float:
    """What one step takes in a row of such."""
    steps = engine.pipelined_sequence(decodes, [fresh] * 8)
    return sorted(step.interval_us for step in steps)[len(steps) // 2] / 1e6
