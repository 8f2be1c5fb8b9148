"""The manifest: what is where, what was folded, how it adds up, what the format cannot say."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dooly_backend.exporters import Manifest
from dooly_backend.workload import Batch

from ..common import OWN_COST, TYPICAL, common_entries, random_batches
from ..times import Axes
from .costs import LayerCosts
from .grids import Grids
from .layout import Hardware, Place
from .mapping import COLLECTIVE, MOE, ONCE, STEP, TP_STABLE
from .routing import expert_parallelism
from .rules import LLMServingSimRules
from .tables import DegreeTables, carrier

#: Steps that the format can express off by more than this are worth a warning.
TOLERANCE_PERCENT = 1.0
#: Of each kind, in the manifest.
SAMPLED_STEPS = 20

logger = logging.getLogger(__name__)


def build_manifest(
    all_costs: Sequence[LayerCosts],
    tables: Mapping[int, DegreeTables],
    grids: Grids,
    axes: Axes,
    place: Place,
    hardware: Hardware,
) -> Manifest:
    """Everything but the files' digests, which are added when they are written."""
    costs = all_costs[0]
    architecture = costs.architecture
    conservation = {
        str(each.degree): _conservation(each, tables, grids, axes) for each in all_costs
    }
    for degree, kinds in conservation.items():
        for kind in ("prefill", "decode", "mixed"):
            worst = kinds[kind]["worst_percent"]
            if abs(worst) > TOLERANCE_PERCENT:
                logger.warning("tp%s: %s steps of the tables are off by %g%%", degree, kind, worst)
    cluster = place.cluster(costs.degree)
    return {
        "format": "llmservingsim",
        **common_entries([each.model for each in all_costs]),
        "llmservingsim": {
            "model": place.model,
            "model_type": architecture.model_type,
            "hardware": place.hardware,
            "variant": place.variant,
            "perf": place.perf,
            "sequence": architecture.sequence,
            "trace_rows": {str(each.degree): trace_rows(each) for each in all_costs},
        },
        "clusters": {str(each.degree): place.cluster(each.degree) for each in all_costs},
        "command": (
            'cp -R profiler configs "$LLMSERVINGSIM_REPO"/ && cd "$LLMSERVINGSIM_REPO" && '
            f"python -m serving --cluster-config {cluster} "
            "--dataset workloads/example_trace.jsonl --num-reqs 10 --output outputs/dooly.csv"
        ),
        "unit": "microseconds per call of a layer and tensor-parallel rank",
        "ranges": {
            "max_tokens": grids.max_tokens,
            "max_seqs": grids.max_seqs,
            "max_kv": grids.max_kv,
        },
        "rows": {
            str(degree): {
                "dense": len(rows.dense),
                "per_sequence": len(rows.per_sequence),
                "attention": len(rows.attention),
                "moe": len(rows.moe),
            }
            for degree, rows in tables.items()
        },
        "cells": {str(degree): rows.sources for degree, rows in tables.items()},
        "folded": _folded(costs, grids),
        "conservation": conservation,
        "approximations": [*_approximations(all_costs, grids), *hardware.notes],
    }


def trace_rows(costs: LayerCosts) -> int:
    """Rows of the simulator's trace of one step when no layer is missing.

    A sparse block has three: its experts' begin, one rank's part, its end.
    """
    sequence = costs.architecture.sequence
    block = [
        n for part in ("pre_attn", "post_attn", "mlp_dense", "mlp_moe") for n in sequence[part]
    ]
    ranks = expert_parallelism(costs.architecture.experts, costs.degree) if MOE in block else 0
    experts = 2 * ranks if MOE in block else 0  # the layer itself stands for the end
    once = len(sequence["prologue"]) + len(sequence["head"])
    return once + costs.layers * (len(block) + experts)


# -- what went where ----------------------------------------------------------


def _folded(costs: LayerCosts, grids: Grids) -> list[dict[str, Any]]:
    """Every occurrence with its home and its share of a typical decode and prefill step."""
    decode, prefill = typical_steps(grids)
    whole = {batch.key: costs.times.step_us(batch) for batch in (decode, prefill)}

    def entry(
        path: str, name: str, kind: str, count: int, home: str, times: Iterable[float]
    ) -> dict[str, Any]:
        shares = [
            round(100 * us / whole[batch.key], 3)
            for us, batch in zip(times, (decode, prefill), strict=True)
        ]
        runs = "once per step" if home in (*ONCE, STEP) else "per layer"
        return {
            "path": path,
            "name": name,
            "depends_on": kind,
            "count": count,
            "to": home,
            "runs": runs,
            "decode_percent": shares[0],
            "prefill_percent": shares[1],
        }

    entries = []
    for assignment in costs.assignments:
        occurrence = assignment.occurrence
        times = [costs.times.of(occurrence, batch).us for batch in (decode, prefill)]
        signature = occurrence.signature
        entries.append(
            entry(
                occurrence.path,
                signature.name,
                signature.kind,
                occurrence.count,
                assignment.home,
                times,
            )
        )
    if costs.rules.knows_own_cost:
        known = [sum(e[f"{kind}_percent"] for e in entries) for kind in TYPICAL]
        own = [round(100 - percent, 3) for percent in known]
        entries.append(entry("", OWN_COST, "requests", 1, STEP, (0.0, 0.0)))
        entries[-1] |= dict(zip((f"{kind}_percent" for kind in TYPICAL), own, strict=True))
    return entries


def typical_steps(grids: Grids) -> tuple[Batch, Batch]:
    """A decode step and a prefill step that the manifest's shares refer to."""
    context = max(1, min(512, grids.max_kv // 2))
    return Batch.decode(min(8, grids.max_seqs), context), Batch.prefill(min(512, grids.max_tokens))


# -- what adds up -------------------------------------------------------------


def _conservation(
    costs: LayerCosts, tables: Mapping[int, DegreeTables], grids: Grids, axes: Axes
) -> dict[str, Any]:
    """The simulator's sum against the latency model, collectives aside, in percent."""
    rules = LLMServingSimRules(tables, costs.architecture, costs.layers, costs.degree)
    limits = {
        "max_tokens": min(grids.max_tokens, grids.attention.chunks[-1]),
        "max_seqs": grids.max_seqs,
        "max_length": max(2, min(axes.max_length, grids.max_kv) or grids.max_kv),
    }
    single = random_batches(3 * SAMPLED_STEPS, **limits)
    several = random_batches(3 * SAMPLED_STEPS, **limits, prefills=4)
    kinds = {
        "prefill": [b for b in single if not b.decodes],
        "decode": [b for b in single if not b.prefills],
        "mixed": [b for b in single if b.prefills and b.decodes],
        "several_prefills": [b for b in several if len(b.prefills) > 1],
    }
    return {kind: _errors(costs, rules, batches) for kind, batches in kinds.items()}


def _errors(
    costs: LayerCosts, rules: LLMServingSimRules, batches: Sequence[Batch]
) -> dict[str, Any]:
    errors = []
    for batch in batches:
        expected = costs.step_us(batch)
        errors.append(100 * (rules.step_us(batch) / expected - 1) if expected > 0 else 0.0)
    mean, worst = (statistics.fmean(errors), max(errors, key=abs)) if errors else (0.0, 0.0)
    return {
        "steps": len(errors),
        "mean_percent": round(mean, 3) + 0.0,  # not -0.0
        "worst_percent": round(worst, 3) + 0.0,
    }


# -- what it cannot say -------------------------------------------------------


def _approximations(all_costs: Sequence[LayerCosts], grids: Grids) -> Iterable[str]:
    costs = all_costs[0]
    architecture = costs.architecture
    yield (
        "The simulator has no cost of a step: the step's own cost and operations that depend on "
        "nothing are in the sampler, which runs once per step and is keyed by its requests; "
        "operations outside the layers that depend on tokens are in the embedding."
    )
    yield (
        "A step's prefills are one there, of the sum of their chunks and histories, so several "
        "prefills are overrated by what is quadratic in the chunk and miss the fixed cost of all "
        "but one ('several_prefills'); decodes are priced at their mean context, rounded down. "
        "No skew of contexts is corrected (skew_fit is off): none was measured."
    )
    yield (
        "Rows of prefills with decodes hold the measured time where such a batch was measured, "
        "else the sum of both."
    )
    collectives = costs.of_home(COLLECTIVE)
    degrees = [each.degree for each in all_costs]
    if any(each.of_home(COLLECTIVE) for each in all_costs):
        yield (
            "Collectives were measured but are in no table: the simulator's network model prices "
            "them, by link_bw and link_latency of the cluster."
        )
    elif max(degrees) > 1 or collectives:
        yield "No collective was measured; the simulator's network model prices them anyway."
    if 1 in degrees and len(degrees) > 1 and architecture.known:
        stable = [name for name in architecture.layers if name in TP_STABLE]
        yield (
            f"The simulator reads {', '.join(stable)} from tp1 at every degree: what they cost "
            f"more or less elsewhere is in {carrier(architecture)} (norms) and in lm_head (the "
            "sampler). Of the step's own cost the sampler holds what every degree has; the rest "
            "of each degree is in its embedding."
        )
    if architecture.experts:
        yield from _expert_notes(all_costs)
    empty = [n for n in architecture.layers if not costs.of_home(n) and n != "sampler"]
    if empty:
        yield (
            f"Nothing of {', '.join(empty)} was measured by itself: these rows hold 0, as a "
            "missing layer would be skipped without an error."
        )
    if costs.rules.knows_whole_steps:
        yield (
            "Steps are those of an engine at its defaults. Rows over tokens and sequences are a "
            "decode step's, padded and fused as its graph is; what a step takes more, in pieces or "
            "waiting for its launch, is in its row of attention, and where there is no graph in "
            "the embedding, by tokens."
        )
    if not costs.rules.knows_own_cost:
        yield "No step cost was fitted: what a step takes beyond its operations is missing."
    for name, covered in (
        ("max_num_batched_tokens", grids.max_tokens),
        ("max_num_seqs", grids.max_seqs),
    ):
        limit = int(costs.model.configuration.facts.get(name) or 0)
        if limit > covered:
            yield f"The engine's {name} was {limit}; the tables stop at {covered}."
    yield from architecture.notes


def _expert_notes(all_costs: Sequence[LayerCosts]) -> Iterable[str]:
    experts = all_costs[0].architecture.experts
    if all_costs[0].knows_routing:
        yield (
            "moe.csv holds the sparse block by its tokens and the distinct experts that fire. The "
            "simulator reads the smallest degree's at every degree, for the tokens and experts of "
            "one expert-parallel rank: where its BALANCED routing looks at a higher exported "
            "degree (ep_size = tp_size), that degree's times lie; steps of few tokens that share a "
            "place have their mean. BALANCED has more experts fire at few tokens than the random "
            "draws that Dooly's latency model expects: 'conservation' compares at BALANCED."
        )
    else:
        yield (
            "moe.csv is read from the smallest degree at every degree, by the tokens and active "
            "experts of one expert-parallel rank. The database knows this sparse block by its "
            "tokens, at the routing that was measured: rows hold it at the places where the "
            "simulator's BALANCED routing looks at each exported degree (ep_size = tp_size); other "
            "routings get the time of the next one that was measured."
        )
    odd = [each.degree for each in all_costs if experts % each.degree]
    if odd:
        yield (
            f"{experts} experts cannot be divided over {', '.join(map(str, odd))} ranks: these "
            "clusters have ep_size 1 and the experts' time of the smallest degree."
        )
