"""What Vidur makes of the tables for one step, by its own rules of rounding and adding.

This restates the simulator, not the exporter: it reads rows, and is what the
manifest's figures and the tests compare with the latency model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import sqrt

from dooly_backend.workload import Batch, Request

from .ranges import CHUNK_STEP, DECODE_LEAD, TOKEN_STEP, Layout, round_up
from .tables import ALL_REDUCES_PER_LAYER, COPY_COLUMN, Row, Tables

#: mlp.csv's operations that Vidur adds up: emb is not among them.
SUMMED_OPS = (
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
)


class VidurRules:
    """Step times in milliseconds of `layers` layers at one tensor-parallel degree."""

    def __init__(
        self, tables: Tables, layout: Layout, granularity: int, layers: int, degree: int = 1
    ) -> None:
        self.layout = layout
        self.granularity = granularity
        self.layers = layers
        mine = [r for r in tables.mlp if r["num_tensor_parallel_workers"] == degree]
        self._mlp = {row["num_tokens"]: _sum(row, SUMMED_OPS) for row in _first(mine)}
        self._all_reduce = {
            row["size"]: _sum(row, ("all_reduce",))
            for row in _first(tables.all_reduce)
            if row["num_workers"] == degree
        }
        self._bytes_per_token = 2 * mine[0]["n_embd"]
        self._prefill: dict[int, dict[int, float]] = defaultdict(dict)
        self._decode: dict[int, dict[int, float]] = defaultdict(dict)
        for place in tables.attention:
            if place.degree != degree:
                continue
            if place.chunk:
                self._prefill[place.chunk][place.length] = place.cell.median
            else:
                self._decode[place.batch_size][place.length] = place.cell.median
        self._longest = max(max(rows) for rows in self._decode.values())

    def step_ms(self, batch: Batch) -> float:
        """Raises KeyError outside the tables' ranges, as Vidur does."""
        tokens = round_up(batch.num_tokens, TOKEN_STEP)
        layer = self._mlp[tokens]
        if self._all_reduce:
            size = tokens * self._bytes_per_token
            layer += ALL_REDUCES_PER_LAYER * self._all_reduce[size]
        if batch.decodes:
            layer += self._decode_ms(batch.decodes)
        if batch.prefills:
            layer += self._prefill_ms(batch.prefills)
        return layer * self.layers

    def _decode_ms(self, decodes: tuple[Request, ...]) -> float:
        lengths = [request.context + DECODE_LEAD[self.layout] for request in decodes]
        mean = int(sum(lengths) / len(lengths))
        return self._nearest(self._decode[len(decodes)], round_up(mean, self.granularity))

    def _prefill_ms(self, prefills: tuple[Request, ...]) -> float:
        if self.layout == "pypi":
            return sum(
                self._prefill_of(
                    round_up(request.query, CHUNK_STEP),
                    round_up(request.context + request.query, self.granularity),
                )
                for request in prefills
            )
        # The repository makes one prefill of them all.
        length = sum(round_up(request.context, self.granularity) for request in prefills)
        chunk = round(sqrt(sum(request.query**2 for request in prefills)))
        return self._prefill_of(chunk, length)

    def _prefill_of(self, chunk: int, length: int) -> float:
        if chunk not in self._prefill:  # rows of large chunks lie farther apart
            power = 2 if self.layout == "repo" else 1  # its forest sees the chunk squared
            chunk = min(self._prefill, key=lambda known: abs(known**power - chunk**power))
        return self._nearest(self._prefill[chunk], length)

    def _nearest(self, rows: Mapping[int, float], length: int) -> float:
        """The row at whose value the forest answers. Raises KeyError beyond all rows."""
        if length > self._longest:
            raise KeyError(length)
        return rows[min(rows, key=lambda known: abs(known - length))]


def _first(rows: Iterable[Row]) -> Iterable[Row]:
    return (row for row in rows if row[COPY_COLUMN] == 0)


def _sum(row: Row, ops: Iterable[str]) -> float:
    return sum(row[f"time_stats.{op}.median"] for op in ops)
