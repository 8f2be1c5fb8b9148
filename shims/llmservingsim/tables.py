"""Rows of LLMServingSim's tables: microseconds per call of a layer and rank.

The simulator reads norms and the sampler from tp1 at every degree. What they
cost more or less elsewhere is moved to layers that it reads from the degree's
own folder: of norms to `carrier`, of the sampler to lm_head. What a step costs
whatever it holds is in the sampler as far as every degree has it; the rest of
each is in its embedding.

Its moe.csv, too, is read from tp1 (the smallest degree where there is none),
by the tokens and active experts of one expert-parallel rank. Degrees differ in
the experts that a rank owns, so each has its own places in the one table. With
one degree it holds what was measured by tokens and experts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..times import Axes, Cell
from .architecture import Architecture
from .costs import LayerCosts
from .grids import AttentionGrid, Grids, doubling
from .mapping import TP_STABLE
from .routing import Routing, expert_parallelism

ATTENTION_COLUMNS = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
MOE_COLUMNS = ("tokens", "activated_experts", "time_us")
DENSE_COLUMNS = ("layer", "tokens", "time_us")
PER_SEQUENCE_COLUMNS = ("layer", "sequences", "time_us")

Row = tuple[str | int | float, ...]


@dataclass(frozen=True)
class DegreeTables:
    """The rows of one tp folder. `sources` counts what their times rest on, by file."""

    dense: list[Row]
    per_sequence: list[Row]
    attention: list[Row]
    moe: list[Row]
    sources: dict[str, dict[str, int]]


def build_tables(
    all_costs: Sequence[LayerCosts], grids: Grids, axes: Axes
) -> dict[int, DegreeTables]:
    """Tables by degree. `all_costs` rise in degree and are of one model."""
    base = all_costs[0]
    moe_sources: Counter[str] = Counter()
    moe: list[Row] = []
    if base.architecture.experts:
        moe = _moe_rows(all_costs, grids, axes, moe_sources)
    tables = {}
    for costs in all_costs:
        shared = base if base.degree == 1 and base.architecture.known else costs
        sharing = all_costs if shared is base else [costs]
        fixed = min(each.fixed_step_cost for each in sharing)
        counted: dict[str, Counter[str]] = defaultdict(Counter)
        dense = _dense_rows(costs, shared, fixed, grids, counted["dense"])
        per_sequence = _per_sequence_rows(costs, shared, fixed, grids, counted["per_sequence"])
        attention = _attention_rows(costs, grids.attention, axes, counted["attention"])
        if moe:
            counted["moe"] = moe_sources
        sources = {file: dict(sorted(counter.items())) for file, counter in counted.items()}
        tables[costs.degree] = DegreeTables(dense, per_sequence, attention, moe, sources)
    return tables


def carrier(architecture: Architecture) -> str:
    """The layer of a block that takes what its norms cost more or less than at tp1."""
    return "o_proj" if architecture.experts else "gate_up_proj"


# -- tokens and sequences -----------------------------------------------------


def dense_cell(
    costs: LayerCosts, shared: LayerCosts, fixed: float, layer: str, tokens: int
) -> Cell:
    """A row of dense.csv; `shared` is the degree that the simulator reads norms from.

    `fixed` is what the sampler holds of the cost of any step, microseconds.
    """
    if layer in TP_STABLE:
        return shared.dense(layer, tokens)
    cell = costs.dense(layer, tokens)
    if layer == "embedding":
        return cell.moved(costs.fixed_step_cost - fixed + costs.waiting(tokens))
    if shared is not costs and layer == carrier(costs.architecture):
        stable = [name for name in costs.architecture.dense_layers if name in TP_STABLE]
        differences = (
            (costs.dense(name, tokens).us - shared.dense(name, tokens).us) * costs.calls(name)
            for name in stable
        )
        cell = cell.moved(sum(differences) / costs.layers)
    return Cell(max(0.0, cell.us), cell.source)


def lm_head_cell(costs: LayerCosts, shared: LayerCosts, sequences: int) -> Cell:
    """A row of lm_head, with what requests cost the sampler more or less than where it is read."""
    cell = costs.lm_head(sequences)
    if shared is not costs:
        own, read = ((c.sampler(sequences).us - c.fixed_step_cost) for c in (costs, shared))
        cell = cell.moved(own - read)
    return Cell(max(0.0, cell.us), cell.source)


def _dense_rows(
    costs: LayerCosts, shared: LayerCosts, fixed: float, grids: Grids, sources: Counter[str]
) -> list[Row]:
    rows: list[Row] = []
    for layer in costs.architecture.dense_layers:
        for tokens in grids.tokens:
            cell = dense_cell(costs, shared, fixed, layer, tokens)
            sources[cell.source] += 1
            rows.append((layer, tokens, cell.us))
    return rows


def _per_sequence_rows(
    costs: LayerCosts, shared: LayerCosts, fixed: float, grids: Grids, sources: Counter[str]
) -> list[Row]:
    elsewhere = fixed - shared.fixed_step_cost
    cells = [("lm_head", n, lm_head_cell(costs, shared, n)) for n in grids.sequences]
    cells += [("sampler", n, shared.sampler(n).moved(elsewhere)) for n in grids.sequences]
    sources.update(cell.source for _, _, cell in cells)
    return [(layer, sequences, cell.us) for layer, sequences, cell in cells]


# -- attention ----------------------------------------------------------------


def _attention_rows(
    costs: LayerCosts, grid: AttentionGrid, axes: Axes, sources: Counter[str]
) -> list[Row]:
    """Prefills, decodes, and both: measured where they were, else the sum of the two."""
    prefills = {
        (chunk, history): costs.attention(chunk, history, 0, 0)
        for chunk in grid.chunks
        for history in {*grid.histories, *grid.mixed_histories}
    }
    decodes = {
        (size, context): costs.attention(0, 0, size, context)
        for size in grid.sizes
        for context in {*grid.contexts, *grid.mixed_contexts}
    }
    mixed = _measured_mixed(costs, axes)
    cells: dict[tuple[int, int, int, int], Cell] = {}
    for size in grid.sizes:
        for context in grid.contexts:
            cells[0, 0, size, context] = decodes[size, context]
    for chunk in grid.chunks:
        for history in grid.histories:
            cells[chunk, history, 0, 0] = prefills[chunk, history]
        for history in grid.mixed_histories:
            for size in grid.sizes:
                for context in grid.mixed_contexts:
                    place = chunk, history, size, context
                    # No operation runs twice for being mixed: the sum is the latency model's own.
                    cell = prefills[chunk, history] + decodes[size, context]
                    cells[place] = mixed.get(place, cell)
    rows = {p: costs.row_of_attention(p[0], p[2], cell) for p, cell in sorted(cells.items())}
    sources.update(cell.source for cell in rows.values())
    return [(*place, cell.us) for place, cell in rows.items()]


def _measured_mixed(costs: LayerCosts, axes: Axes) -> dict[tuple[int, int, int, int], Cell]:
    """Batches of one prefill and equal decodes that were measured as such, by their place."""
    found = {}
    for batch in axes.others:
        if len(batch.prefills) == 1 and len(set(batch.decodes)) == 1:
            prefill, decode = batch.prefills[0], batch.decodes[0]
            place = prefill.query, prefill.context, len(batch.decodes), decode.context
            found[place] = costs.attention(*place)
    return found


# -- experts ------------------------------------------------------------------


def _moe_rows(
    all_costs: Sequence[LayerCosts], grids: Grids, axes: Axes, sources: Counter[str]
) -> list[Row]:
    """The sparse block of one rank, by its tokens and active experts.

    Each degree's times lie where the simulator looks for them at that degree.
    What it would not look for there has the time that was measured, or that of
    the next routing that was.
    """
    by_routing = _by_routing(all_costs)
    base = all_costs[0]
    experts, each = base.architecture.experts, base.architecture.experts_per_token
    smallest = min(routing.owned for routing in by_routing)
    steps = sorted({*grids.tokens, *range(1, experts // each + 2)})
    active = {r.active(tokens) for r in by_routing for tokens in steps}
    if base.knows_routing:
        active |= _measured_columns(base, axes)
    # With one degree, measured by tokens alone, every column would have the same times.
    columns = sorted(active) if len(by_routing) > 1 or base.knows_routing else [smallest]
    cells: dict[tuple[int, int], Cell] = {}
    for column in columns:
        routing = min(
            (r for r in by_routing if r.owned >= column), key=lambda r: r.owned, default=None
        )
        if routing is None:  # experts that no rank owns
            continue
        costs = by_routing[routing]
        for tokens in sorted({max(1, routing.tokens(step)) for step in steps}):
            cells[tokens, column] = (
                base.sparse(tokens, column)
                if costs is base and base.knows_routing
                else costs.routed(routing.step_tokens(tokens))
            )
    for routing in sorted(by_routing, key=lambda r: -r.degree):  # tp1 last: its times stay
        cells |= _looked_up(by_routing[routing], routing, steps, columns)
    sources.update(cell.source for cell in cells.values())
    return [(*place, cell.us) for place, cell in sorted(cells.items())]


def _measured_columns(costs: LayerCosts, axes: Axes) -> set[int]:
    """Numbers of active experts of the sweep and of the simulator's own profiler."""
    routing = costs.routing
    own = doubling(routing.owned, min(routing.each, routing.owned))
    return {*own, *(n for n in axes.experts if n <= routing.owned)}


def _by_routing(all_costs: Sequence[LayerCosts]) -> dict[Routing, LayerCosts]:
    """The degrees that the simulator tells apart."""
    found: dict[Routing, LayerCosts] = {}
    for costs in all_costs:
        experts, each = costs.architecture.experts, costs.architecture.experts_per_token
        degree = expert_parallelism(experts, costs.degree)
        found.setdefault(Routing(experts, min(each, experts), degree), costs)
    return found


def _looked_up(
    costs: LayerCosts, routing: Routing, steps: Sequence[int], columns: Sequence[int]
) -> dict[tuple[int, int], Cell]:
    """The times of steps of `steps` tokens, at the places where the simulator looks for them.

    Steps that share a place (a rank computes a part of the tokens) have their mean there.
    """
    places: dict[tuple[int, int], list[Cell]] = defaultdict(list)
    for tokens in steps:
        column = routing.active(tokens) if len(columns) > 1 else columns[0]
        places[max(1, routing.tokens(tokens)), column].append(costs.routed(tokens))
    return {
        place: Cell(sum(cell.us for cell in cells) / len(cells), cells[-1].source)
        for place, cells in places.items()
    }
