"""Rows of Vidur's tables: milliseconds per layer and tensor-parallel rank.

Vidur adds ``layers * (every mlp.csv operation + attn_prefill + attn_decode)``
and knows no cost per step. So with T, attention and g of `costs`, L layers and
q for what one request costs more (the mean of the first few)

- ``add`` also holds what runs once per step over tokens, and g(1) - q;
- ``attn_prefill`` also holds q: Vidur adds one for each prefill of a step (the
  repository one for all of them);
- ``attn_decode`` also holds what a pure decode step of that batch size costs
  beyond its attention and the other rows: g(B) - g(1) + q, and T(B) minus what
  mlp.csv has for the tokens that Vidur rounds B up to. That can be below zero.

Where whole steps were measured (costs.py), both also hold what a step of their kind takes more or
less than all that: a prefill in pieces, and the launch that it waits for. The launch is in
``add`` instead for tokens of which no step has a graph (of the release: none that a prefill
does not have, too), since it is waited for once, whatever the step holds. The release adds one
``attn_prefill`` for each prefill of a step: there one of so few tokens that a decode step may have
them holds nothing of the kind, or sixteen in one step would wait sixteen times.

So prefills of one request and decodes add up exactly, but for those; what is left of mixed
batches is in the manifest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dooly_backend.simulation.execution import Mode
from dooly_backend.workload import Batch

from .costs import Cell, StepCosts, total
from .mapping import ALL_REDUCE, MLP_OPS
from .model import Dimensions
from .ranges import TOKEN_STEP, Layout, Ranges, round_up

STATISTICS = ("min", "max", "mean", "median", "std")
#: Vidur counts tensor-parallel communication twice per layer.
ALL_REDUCES_PER_LAYER = 2
#: Bytes that Vidur takes for one element when it turns sizes into tokens.
VIDUR_ELEMENT_BYTES = 2
#: A random forest trains each tree on rows drawn with replacement, so a tree
#: misses a third of rows that occur once and answers with a neighbour's value:
#: up to 8% off for one operation. Several rows each (they differ in a column that
#: Vidur does not read, as it drops equal rows) bring that below 1%. Attention
#: needs fewer: the neighbour of a KV length is close, and so is a batch's of many.
COPIES, ATTENTION_COPIES = 4, 2
MANY_REQUESTS = 32
COPY_COLUMN = "copy"

Row = dict[str, Any]


class AttentionPlace(NamedTuple):
    """A row of attention.csv, `copies` times. `chunk` is 0 for decodes."""

    degree: int
    batch_size: int
    chunk: int
    length: int  # kv_cache_size, as Vidur labels it
    cell: Cell
    copies: int


@dataclass(frozen=True)
class Tables:
    """Rows of the four files, and what the times in them rest on.

    `attention_columns` are the columns of attention.csv that only depend on
    the degree. `sources` counts distinct cells by file: measured,
    interpolated, extrapolated.
    """

    mlp: list[Row]
    attention: list[AttentionPlace]
    attention_columns: Mapping[int, Row]
    all_reduce: list[Row]
    send_recv: list[Row]
    sources: dict[str, dict[str, int]]


def build_tables(
    all_costs: Sequence[StepCosts], dimensions: Dimensions, ranges: Ranges, layout: Layout
) -> Tables:
    """Tables of all degrees of tensor parallelism in `all_costs`."""
    sources: dict[str, Counter[str]] = {"mlp": Counter(), "attention": Counter()}
    mlp: list[Row] = []
    attention: list[AttentionPlace] = []
    all_reduce: list[Row] = []
    for costs in all_costs:
        mlp += _mlp_rows(costs, dimensions, ranges, layout, sources["mlp"])
        attention += _attention_places(costs, ranges, layout)
        if costs.model.configuration.tensor_parallel > 1:
            all_reduce += _all_reduce_rows(costs, dimensions, ranges)
    sources["attention"].update(place.cell.source for place in attention)
    columns = {
        costs.model.configuration.tensor_parallel: _attention_columns(costs, dimensions, ranges)
        for costs in all_costs
    }
    counted = {file: dict(sorted(counter.items())) for file, counter in sources.items()}
    return Tables(mlp, attention, columns, all_reduce, [], counted)


def mlp_cells(costs: StepCosts, tokens: int, layout: Layout) -> dict[str, Cell]:
    """Each operation of mlp.csv for a step of `tokens` tokens, per layer; emb per step."""
    share = 1 / costs.layers
    cells = {op: costs.operation(op, tokens).times(share) for op in MLP_OPS}
    of_step = costs.requests(1).moved(_waited_for(costs, tokens, layout) - costs.one_request)
    cells["add"] = cells["add"] + of_step.times(share)
    cells["emb"] = costs.shown("emb", Batch.prefill(tokens))
    return cells


def _waited_for(costs: StepCosts, tokens: int, layout: Layout) -> float:
    """What launching takes longer, as far as rows over tokens hold it."""
    of_prefill, of_decodes = costs.modes(tokens)
    here = of_prefill == of_decodes and (layout == "pypi" or of_prefill == Mode.EAGER)
    return costs.waiting(tokens) if here else 0.0


def prefill_cell(costs: StepCosts, chunk: int, history: int, layout: Layout) -> Cell:
    """attn_prefill of `chunk` tokens after `history`, per layer, with the part of its request."""
    batch = Batch.prefill(chunk, history)
    of_prefill, of_decodes = costs.modes(chunk)
    if layout == "pypi" and of_prefill != of_decodes:
        return costs.attention(batch).moved(costs.one_request).times(1 / costs.layers)
    return _left_to_attention(costs, batch, chunk, layout)


def decode_cell(costs: StepCosts, size: int, context: int, layout: Layout) -> Cell:
    """attn_decode of `size` requests, per layer, with the rest of their step (module docs)."""
    batch = Batch.decode(size, context)
    return _left_to_attention(costs, batch, round_up(size, TOKEN_STEP), layout)


def _left_to_attention(costs: StepCosts, batch: Batch, rounded: int, layout: Layout) -> Cell:
    """What a step of `batch` takes beside the other rows for `rounded` tokens, per layer."""
    cell = costs.attention(batch)
    others = costs.tokens(rounded).median + _waited_for(costs, rounded, layout)
    others += costs.requests(1).median - costs.one_request
    return cell.moved(costs.step_ms(batch) - others - cell.median).times(1 / costs.layers)


def _mlp_rows(
    costs: StepCosts,
    dimensions: Dimensions,
    ranges: Ranges,
    layout: Layout,
    sources: Counter[str],
) -> Iterator[Row]:
    degree = costs.model.configuration.tensor_parallel
    for tokens in ranges.token_counts():
        cells = mlp_cells(costs, tokens, layout)
        sources[total(cells.values()).source] += 1
        row = _time_columns(cells) | {
            "n_head": dimensions.heads,
            "n_kv_head": dimensions.kv_heads,
            "n_embd": dimensions.hidden,
            "n_expanded_embd": dimensions.expanded,
            "vocab_size": dimensions.vocabulary,
            "use_gated_mlp": dimensions.gated,
            "num_tokens": tokens,
            "num_tensor_parallel_workers": degree,
        }
        yield from _copies(row, COPIES)


def _attention_places(costs: StepCosts, ranges: Ranges, layout: Layout) -> Iterator[AttentionPlace]:
    degree = costs.model.configuration.tensor_parallel
    for chunk, label, history in ranges.prefills(layout):
        cell = prefill_cell(costs, chunk, history, layout)
        yield AttentionPlace(degree, 1, chunk, label, cell, ATTENTION_COPIES)
    for size, label, context in ranges.decodes(layout):
        copies = ATTENTION_COPIES if size <= MANY_REQUESTS else 1
        cell = decode_cell(costs, size, context, layout)
        yield AttentionPlace(degree, size, 0, label, cell, copies)


def _attention_columns(costs: StepCosts, dimensions: Dimensions, ranges: Ranges) -> Row:
    configuration = costs.model.configuration
    return {
        "n_embd": dimensions.hidden,
        "n_q_head": dimensions.heads,
        "n_kv_head": dimensions.kv_heads,
        "block_size": configuration.block_size,
        "num_tensor_parallel_workers": configuration.tensor_parallel,
        "max_model_len": costs.max_model_len or ranges.max_length,
        "attention_backend": configuration.backend,
    }


def _all_reduce_rows(costs: StepCosts, dimensions: Dimensions, ranges: Ranges) -> Iterator[Row]:
    degree = costs.model.configuration.tensor_parallel
    for index, tokens in enumerate(ranges.token_counts()):
        calls = costs.layers * ALL_REDUCES_PER_LAYER
        cell = costs.home(ALL_REDUCE, Batch.prefill(tokens)).times(1 / calls)
        yield from _copies(
            {"": index}
            | _time_columns({"all_reduce": cell})
            | {
                "rank": 0,
                "num_workers": degree,
                "size": tokens * dimensions.hidden * VIDUR_ELEMENT_BYTES,
                "collective": "all_reduce",
                "devices_per_node": degree,
                "max_devices_per_node": degree,
            },
            COPIES,
        )


def network_columns(collective: str) -> list[str]:
    """Columns of a network file, for one without rows."""
    columns = [f"time_stats.{collective}.{statistic}" for statistic in STATISTICS]
    rest = ("rank", "num_workers", "size", "collective", "devices_per_node", "max_devices_per_node")
    return ["", *columns, *rest, COPY_COLUMN]


def _time_columns(cells: dict[str, Cell]) -> Row:
    return {
        f"time_stats.{op}.{statistic}": getattr(cell, statistic)
        for op, cell in cells.items()
        for statistic in STATISTICS
    }


def _copies(row: Row, count: int) -> Iterator[Row]:
    for copy in range(count):
        yield row | {COPY_COLUMN: copy}
