"""The manifest of an export: what is where, what was folded, what Vidur cannot say."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from dooly_backend.exporters import Manifest
from dooly_backend.workload import Batch

from ..common import OWN_COST, TYPICAL, common_entries
from .costs import StepCosts
from .launcher import SCRIPT
from .mapping import MLP_OPS, STEP
from .model import Device, Dimensions
from .ranges import CHUNK_STEP, TOKEN_STEP, Layout, Ranges
from .rules import VidurRules
from .tables import (
    ATTENTION_COPIES,
    COPIES,
    COPY_COLUMN,
    MANY_REQUESTS,
    Tables,
    decode_cell,
)

#: Pure prefills and decodes off by more than this are worth a warning.
TOLERANCE_PERCENT = 1.0

logger = logging.getLogger(__name__)


def build_manifest(
    all_costs: Sequence[StepCosts],
    dimensions: Dimensions,
    device: Device,
    ranges: Ranges,
    layout: Layout,
    tables: Tables,
    kv_blocks: tuple[int, str],
) -> Manifest:
    """Everything but the files' digests, which are added when they are written."""
    costs = all_costs[0]
    configuration = costs.model.configuration
    rules = VidurRules(
        tables, layout, ranges.granularity, costs.layers, configuration.tensor_parallel
    )
    conservation = _conservation(costs, ranges, rules)
    for kind in ("prefill", "decode"):
        worst = conservation[kind]["worst_percent"]
        if abs(worst) > TOLERANCE_PERCENT:
            logger.warning("%s steps of the exported tables are off by up to %g%%", kind, worst)
    return {
        "format": "vidur",
        "layout": layout,
        **common_entries([c.model for c in all_costs]),
        "vidur_model": dimensions.name,
        "vidur_device": device.name,
        "vidur_network_device": device.network,
        "kv_blocks": {"number": kv_blocks[0], "source": kv_blocks[1]},
        "command": f"python {SCRIPT}",
        "unit": "milliseconds per layer and tensor-parallel rank",
        "ranges": {
            "max_length": ranges.max_length,
            "max_chunk": ranges.max_chunk,
            "max_batch": ranges.max_batch,
            "kv_granularity": ranges.granularity,
        },
        "cells": tables.sources,
        "copies_of_each_row": {
            "mlp": COPIES,
            "attention": ATTENTION_COPIES,
            f"attention, more than {MANY_REQUESTS} requests": 1,
        },
        "folded": _folded(costs, ranges),
        "conservation": conservation,
        "approximations": [
            *_approximations(costs, dimensions, ranges, layout, tables),
            *device.notes,
        ],
    }


# -- what went where ----------------------------------------------------------


def _folded(costs: StepCosts, ranges: Ranges) -> list[dict[str, Any]]:
    """Every occurrence with its home and its share of a typical decode and prefill step."""
    decode, prefill = typical_steps(ranges)
    whole = {batch.key: costs.step_ms(batch) for batch in (decode, prefill)}

    def share(milliseconds: float, batch: Batch) -> float:
        return round(100 * milliseconds / whole[batch.key], 3)

    entries: list[dict[str, Any]] = []
    for assignment in costs.assignments:
        occurrence = assignment.occurrence
        entries.append(
            {
                "path": occurrence.path,
                "name": occurrence.signature.name,
                "depends_on": occurrence.signature.kind,
                "count": occurrence.count,
                "to": assignment.home,
                "runs": "per layer" if assignment.per_layer else "once per step",
                "decode_percent": share(costs.occurrence(occurrence, decode).median, decode),
                "prefill_percent": share(costs.occurrence(occurrence, prefill).median, prefill),
            }
        )
    if costs.rules.knows_own_cost:
        known = [sum(float(e[f"{kind}_percent"]) for e in entries) for kind in TYPICAL]
        own = [round(100 - percent, 3) for percent in known]
        entries.append(
            {
                "path": "",
                "name": OWN_COST,
                "depends_on": "requests",
                "count": 1,
                "to": STEP,
                "runs": "once per step",
                "decode_percent": own[0],
                "prefill_percent": own[1],
            }
        )
    return entries


def typical_steps(ranges: Ranges) -> tuple[Batch, Batch]:
    """A decode step and a prefill step that the manifest's shares refer to."""
    context = max(1, min(512, ranges.max_length // 2))
    chunk = min(512, ranges.max_chunk) // CHUNK_STEP * CHUNK_STEP
    return Batch.decode(min(8, ranges.max_batch), context), Batch.prefill(chunk)


# -- what adds up -------------------------------------------------------------


def _conservation(costs: StepCosts, ranges: Ranges, rules: VidurRules) -> dict[str, Any]:
    """Vidur's sum against the latency model, in percent, over a fixed sample of steps."""
    decodes = [
        Batch.decode(size, context)
        for size in spread(1, ranges.max_batch)
        for context in spread(ranges.granularity, ranges.max_length - ranges.granularity)
    ]
    chunks = [n * CHUNK_STEP for n in spread(1, ranges.max_chunk // CHUNK_STEP)]
    prefills = [Batch.prefill(chunk) for chunk in chunks]
    # Several prompts at once whose tokens still fit into one step.
    prompts = [Batch.prefill(chunk, 0, 2) for chunk in chunks if 2 * chunk <= ranges.max_chunk]
    mixed = [
        decode + Batch.prefill(chunk)
        for chunk in chunks[:-1]
        for decode in decodes
        if chunk + decode.num_tokens <= ranges.max_tokens
    ]
    kinds = {"prefill": prefills, "decode": decodes, "several_prefills": prompts, "mixed": mixed}
    return {kind: _errors(costs, rules, batches) for kind, batches in kinds.items()}


def _errors(costs: StepCosts, rules: VidurRules, batches: Sequence[Batch]) -> dict[str, Any]:
    errors = [
        100 * (rules.step_ms(batch) / (costs.model.step_us(batch) / 1e3) - 1) for batch in batches
    ]
    mean, worst = (statistics.fmean(errors), max(errors, key=abs)) if errors else (0.0, 0.0)
    return {
        "steps": len(errors),
        "mean_percent": round(mean, 3) + 0.0,  # not -0.0
        "worst_percent": round(worst, 3) + 0.0,
    }


def spread(first: int, last: int, count: int = 6) -> list[int]:
    """Up to `count` whole numbers from `first` to `last`, closer together at the start."""
    last = max(first, last)
    ratio = (last / first) ** (1 / (count - 1))
    return sorted({min(last, round(first * ratio**power)) for power in range(count)})


# -- what it cannot say -------------------------------------------------------


def _approximations(
    costs: StepCosts, dimensions: Dimensions, ranges: Ranges, layout: Layout, tables: Tables
) -> Iterable[str]:
    yield (
        "Vidur has no cost per step: embedding, final norm and the cost of one request "
        "(logits, sampler, the step's own) are in 'add', divided by the layers, but for what a "
        "further request costs, which is in attn_prefill; that of more decodes is in attn_decode, "
        "by batch size. The cost of requests is taken to be the same for each where prefills and "
        "decodes, or several prefills, share a step."
    )
    yield (
        f"Tokens of a step are rounded up to {TOKEN_STEP}. attn_decode takes back what that adds "
        f"to pure decode steps{_below_zero(costs, ranges, layout)}; prefills of other lengths than "
        f"multiples of {TOKEN_STEP} are priced as the next multiple. In a mixed step it takes "
        "back the same, though more tokens round otherwise: off where the first tokens of a step "
        "cost more or less than later ones ('mixed'), and not at all with a multiple of "
        f"{TOKEN_STEP} decodes."
    )
    yield (
        f"Decodes are priced at their mean KV length, rounded up to {ranges.granularity}; a row "
        "holds the middle of the lengths that are rounded up to it. Rows of lengths and chunks lie "
        f"up to 1/{ranges.density} of themselves apart; Vidur's forest takes the nearest."
    )
    if layout == "pypi":
        yield (
            f"Prefill attention is priced per request, its chunk rounded up to {CHUNK_STEP} and "
            f"its KV length after the chunk to {ranges.granularity}: kv_cache_size of prefill "
            "rows is that length. The first length of a chunk is that of a prompt without history."
        )
        yield "attn_kv_cache_save is 0: the cache write is measured inside attention."
    else:
        yield (
            "All prefills of a step are priced as one, of the root of their summed squared chunks: "
            "what attention takes beyond the square of a chunk is underrated ('several_prefills'). "
            f"Chunks between rows ({CHUNK_STEP} apart) take the nearest row's attention."
        )
        yield (
            "attn_kv_cache_save is 0: the cache write is measured inside attention. "
            "cpu_overheads.csv is not written, as the step's own cost is in the tables: keep "
            "skip_cpu_overhead_modeling on, or it would be counted twice."
        )
    yield (
        "Prefill and decode attention of one step are added, though the engine runs them in one "
        "call; a last chunk of one token counts as a prefill in the tables."
    )
    yield (
        f"The scheduler is Vidur's Sarathi with chunks of {ranges.max_chunk} tokens and "
        f"{ranges.max_batch} requests, the closest to the engine's own: decodes come first, then "
        "prefills in order of arrival. It has no prefix caching."
    )
    yield (
        "Vidur predicts with random forests, which answer with a neighbour's value for rows that a "
        f"tree did not draw; copies of each row (column '{COPY_COLUMN}') make that rare."
    )
    yield from _limits_left_out(costs, ranges)
    if costs.rules.knows_whole_steps:
        yield _of_whole_steps(layout)
    yield from _model_notes(costs, dimensions, tables)


def _of_whole_steps(layout: Layout) -> str:
    waiting = (
        "where there is no graph; else it is in attn_prefill, with what a prefill in pieces takes "
        "more than a graph."
    )
    if layout == "pypi":
        waiting = (
            "but for prefills of so few tokens that a decode step may have them: these are priced "
            "as if they were launched at once ('prefill')."
        )
    return (
        "Steps are those of an engine at its defaults. Rows over tokens are a decode step's, "
        "padded and fused as its graph is. What launching takes longer is in 'add', by the tokens "
        f"of the step, {waiting}"
    )


def _below_zero(costs: StepCosts, ranges: Ranges, layout: Layout) -> str:
    """How many rows of the first context that makes below zero, in words."""
    context = max(1, ranges.granularity // 2)
    sizes = range(1, ranges.max_batch + 1)
    count = sum(decode_cell(costs, size, context, layout).median < 0 for size in sizes)
    return f" (below zero for {count} of {len(sizes)} batch sizes at short contexts)" * (count > 0)


def _limits_left_out(costs: StepCosts, ranges: Ranges) -> Iterable[str]:
    for name, covered in (
        ("max_model_len", ranges.max_length),
        ("max_num_batched_tokens", ranges.max_chunk),
        ("max_num_seqs", ranges.max_batch),
    ):
        limit = costs.engine_limit(name)
        if limit > covered:
            yield f"The engine's {name} was {limit}; the tables stop at {covered}."


def _model_notes(costs: StepCosts, dimensions: Dimensions, tables: Tables) -> Iterable[str]:
    if dimensions.head_dim * dimensions.heads != dimensions.hidden:
        yield (
            f"Heads have {dimensions.head_dim} dimensions; Vidur takes hidden size / heads = "
            f"{dimensions.hidden // dimensions.heads}, which touches its MFU figures only, "
            "as the number of KV blocks is given."
        )
    if dimensions.experts:
        yield (
            "Vidur has no experts: theirs and their router's time is in mlp_up_proj, by number "
            "of tokens, at the routing that was measured; parameter counts and MFU are a dense "
            "model's."
        )
    degrees = {row["num_workers"] for row in tables.all_reduce}
    silent = [
        degree
        for degree in sorted(degrees)
        if not any(
            row["time_stats.all_reduce.median"]
            for row in tables.all_reduce
            if row["num_workers"] == degree
        )
    ]
    if silent:
        yield (
            f"No collective was measured at tensor parallel {', '.join(map(str, silent))}: "
            "all_reduce is 0 there."
        )
    if not costs.rules.knows_own_cost:
        yield "No step cost was fitted: what a step takes beyond its operations is missing."
    empty = [op for op in MLP_OPS if op != "emb" and not costs.of_home(op)]
    if empty:
        yield f"The model has no {', '.join(empty)}: these columns hold nothing of their own."
