"""The sum of the operations of a measured step: of its layers, at its padding."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dooly_backend.database.records import Configuration, Occurrence, StreamStep
from dooly_backend.regression.prediction import SignaturePredictor
from dooly_backend.workload import Batch, PointKind


@dataclass(frozen=True)
class Operations:
    """The operations of one step, summed: microseconds of all of them, and of attention alone.

    No compiler fuses attention with what lies around it.
    """

    us: float
    attention_us: float = 0.0


def step_operations(
    configuration: Configuration,
    occurrences: Iterable[Occurrence],
    predictors: Mapping[str, SignaturePredictor],
    steps: Sequence[StreamStep],
) -> list[Operations]:
    """Those of each of `steps`. One rank alone does not communicate: no collectives.

    What depends on tokens is predicted for the padded ones; attention, the LM
    head and the sampler see the real requests.
    """
    occurrences = tuple(occurrences)
    first, _ = configuration.facts.get("stage_layers", (0, configuration.num_layers))
    by_depth: dict[int, list[int]] = defaultdict(list)
    for index, step in enumerate(steps):
        by_depth[step.num_layers].append(index)
    attending = {o.signature.hash for o in occurrences if o.signature.is_attention}
    totals, attention = np.zeros(len(steps)), np.zeros(len(steps))
    for depth, indices in by_depth.items():
        shown: dict[PointKind, list[Batch]] = {}
        for signature, count in counts_of(occurrences, first, depth).items():
            predictor = predictors[signature]
            if predictor.kind not in shown:
                shown[predictor.kind] = [_shown(steps[i], predictor.kind) for i in indices]
            us = count * predictor.predict_batches(shown[predictor.kind]).us
            totals[indices] += us
            if signature in attending:
                attention[indices] += us
    return [Operations(*map(float, each)) for each in zip(totals, attention, strict=True)]


def counts_of(occurrences: Iterable[Occurrence], first: int, depth: int) -> Counter[str]:
    """How often a step of `depth` layers from layer `first` on runs each signature."""
    counts: Counter[str] = Counter()
    for occurrence in of_depth(occurrences, first, depth):
        counts[occurrence.signature.hash] += occurrence.count
    return counts


def of_depth(occurrences: Iterable[Occurrence], first: int, depth: int) -> Iterator[Occurrence]:
    """What of the call graph one rank of `depth` layers from layer `first` on runs alone."""
    for occurrence in occurrences:
        if occurrence.signature.is_collective:
            continue
        inside = occurrence.count
        if occurrence.layers:
            each = occurrence.count // len(occurrence.layers)
            inside = each * sum(first <= layer < first + depth for layer in occurrence.layers)
        if inside:
            yield replace(occurrence, count=inside)


def _shown(step: StreamStep, kind: PointKind) -> Batch:
    """The batch that an operation of this kind sees."""
    if kind == "batch":
        return step.batch
    if kind == "requests":
        return Batch.decode(step.batch.num_reqs, 1)
    return Batch.prefill(step.padded_tokens)
