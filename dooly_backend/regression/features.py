"""What of a batch a signature's time is predicted from: features, by kind of signature.

A feature is a small function of many batches at once, registered under a name
for one kind of signature, with its unit and meaning:

    @feature("batch", "prefills", "requests", "requests that are no decodes")
    def _prefills(batches: BatchArray, facts: Facts) -> Floats:
        return batches.num_reqs - batches.decodes

The features of a kind are the columns of a matrix, in the order in which they
were registered. `facts` are what the model decides and a feature needs: the
sliding window of an attention layer, the experts of a mixture.

Vidur's and Revati's features of attention are among them: prefill tokens,
batch size, chunk and KV-cache size (paper, section 7; Vidur keeps the root of
the sum of squares as the size of several chunks). Another package adds its
own through the entry-point group ``dooly.regression``: an entry names a module
whose import registers features and models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from dooly_backend.database.records import Signature
from dooly_backend.errors import InputError
from dooly_backend.regression.batches import BatchArray, Floats, keys_seen
from dooly_backend.workload import Batch, PointKind, WorkloadPoint

#: What of a signature features depend on; plain numbers, so that a bundle can hold them.
Facts = Mapping[str, float]
Compute = Callable[[BatchArray, Facts], Floats]

KINDS: tuple[PointKind, ...] = get_args(PointKind)


@dataclass(frozen=True)
class Feature:
    """One number of a batch, for signatures of one kind."""

    kind: PointKind
    name: str
    unit: str
    meaning: str
    compute: Compute


_FEATURES: dict[PointKind, dict[str, Feature]] = {kind: {} for kind in KINDS}


def feature(kind: PointKind, name: str, unit: str, meaning: str) -> Callable[[Compute], Compute]:
    """Register a feature. Raises ValueError for a name that its kind has already."""

    def register(compute: Compute) -> Compute:
        if name in _FEATURES[kind]:
            raise ValueError(f"{kind} signatures have a feature {name!r} already")
        _FEATURES[kind][name] = Feature(kind, name, unit, meaning, compute)
        return compute

    return register


def features_of(kind: PointKind) -> tuple[Feature, ...]:
    """The features of a kind, in the order of the columns."""
    return tuple(_FEATURES[kind].values())


def feature_names(kind: PointKind) -> tuple[str, ...]:
    """The names of a kind's features, in the order of the columns."""
    return tuple(_FEATURES[kind])


def known_features(kind: PointKind, names: Sequence[str]) -> tuple[Feature, ...]:
    """The features of those names. Raises InputError for one that is not registered."""
    missing = [name for name in names if name not in _FEATURES[kind]]
    if missing:
        raise InputError(
            f"unknown feature {missing[0]!r} of {kind} signatures: install the package that "
            f"registers it; known are {', '.join(_FEATURES[kind]) or 'none'}"
        )
    return tuple(_FEATURES[kind][name] for name in names)


def matrix(features: Sequence[Feature], batches: BatchArray, facts: Facts) -> Floats:
    """A row for every batch, a column for every feature."""
    values = np.empty((len(batches), len(features)))
    for column, each in enumerate(features):
        values[:, column] = each.compute(batches, facts)
    return values


def point_matrix(
    features: Sequence[Feature], points: Sequence[WorkloadPoint], facts: Facts
) -> Floats:
    """The same for measured points, which need not tell a batch.

    A point of routing tells the experts that fired, which a batch does not.
    """
    rows: dict[str, Floats] = {}
    for each in features:
        if each.kind == "batch":
            continue
        given = {"num_tokens": "num_tokens", "num_reqs": "num_reqs", "experts": "num_experts"}
        field = given.get(each.name)
        if field is not None:
            rows[each.name] = np.array([getattr(point, field) for point in points], dtype=float)
    batches = BatchArray.of([_batch(point) for point in points])
    columns = [
        rows[each.name] if each.name in rows else each.compute(batches, facts) for each in features
    ]
    return np.column_stack(columns) if columns else np.empty((len(points), 0))


def _batch(point: WorkloadPoint) -> Batch:
    if point.batch is not None:
        return point.batch
    if point.num_tokens is not None:
        return Batch.prefill(point.num_tokens)
    return Batch.decode(point.num_reqs or 1, 1)


# -- what of a signature features depend on -------------------------------------


def facts_of(signature: Signature) -> dict[str, float]:
    """Numbers that the signature's canonical text tells and its features need.

    "window" of an attention layer with a sliding window, in tokens, "kv_heads" and
    "queries_per_kv" of one that tells its heads; "experts" and "top_k" of a mixture of
    experts.
    """
    try:
        described = json.loads(signature.canonical)
    except json.JSONDecodeError:
        return {}  # an imported profile: its text is a name
    if not isinstance(described, dict):
        return {}
    if signature.kind == "routing":
        routing = described["routing"]
        return {"experts": float(routing["experts"]), "top_k": float(routing["top_k"])}
    attributes = described.get("attributes")
    if signature.kind != "batch" or not isinstance(attributes, dict):
        return {}
    facts = {}
    window = attributes.get("sliding_window")
    if isinstance(window, int) and window > 0:
        facts["window"] = float(window)
    heads, kv_heads = attributes.get("num_heads"), attributes.get("num_kv_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads > 0:
        facts |= {"kv_heads": float(kv_heads), "queries_per_kv": heads / kv_heads}
    return facts


def expected_experts(num_tokens: Any, experts: float, top_k: float) -> Any:
    """Distinct experts that fire when every token draws `top_k` of `experts` at random."""
    return experts * (1 - (1 - top_k / experts) ** num_tokens)


# -- tokens, requests, routing --------------------------------------------------


@feature("tokens", "num_tokens", "tokens", "new tokens of the step")
@feature("routing", "num_tokens", "tokens", "new tokens of the step")
@feature("batch", "num_tokens", "tokens", "new tokens of the step")
def _num_tokens(batches: BatchArray, facts: Facts) -> Floats:
    return batches.num_tokens


@feature("requests", "num_reqs", "requests", "requests of the step")
@feature("batch", "num_reqs", "requests", "requests of the step")
def _num_reqs(batches: BatchArray, facts: Facts) -> Floats:
    return batches.num_reqs


@feature(
    "routing", "experts", "experts", "distinct experts that fire; of a batch, under uniform routing"
)
def _experts(batches: BatchArray, facts: Facts) -> Floats:
    return expected_experts(batches.num_tokens, facts["experts"], facts["top_k"])


# -- attention: the prefills ----------------------------------------------------


def _of_prefills(batches: BatchArray, values: Any) -> Floats:
    return np.where(batches.is_decode, 0.0, values)


def _of_decodes(batches: BatchArray, values: Any) -> Floats:
    return np.where(batches.is_decode, values, 0.0)


def _window(facts: Facts) -> float:
    return facts.get("window", math.inf)


@feature("batch", "prefills", "requests", "requests that are no decodes")
def _prefills(batches: BatchArray, facts: Facts) -> Floats:
    return batches.num_reqs - batches.decodes


@feature("batch", "prefill_tokens", "tokens", "new tokens of the prefills")
def _prefill_tokens(batches: BatchArray, facts: Facts) -> Floats:
    return batches.num_tokens - batches.decodes


@feature("batch", "prefill_chunk_size", "tokens", "new tokens of the longest prefill")
def _prefill_chunk_size(batches: BatchArray, facts: Facts) -> Floats:
    return batches.max(_of_prefills(batches, batches.query))


@feature("batch", "prefill_root_square", "tokens", "root of the sum of squares of the chunks")
def _prefill_root_square(batches: BatchArray, facts: Facts) -> Floats:
    squares = batches.query.astype(np.float64) ** 2
    return np.sqrt(batches.sum(_of_prefills(batches, squares)))


@feature("batch", "prefill_history", "tokens", "most cached tokens before a prefill's chunk")
def _prefill_history(batches: BatchArray, facts: Facts) -> Floats:
    return batches.max(_of_prefills(batches, batches.context))


@feature("batch", "prefill_query_context", "pairs", "sum over prefills of new times cached tokens")
def _prefill_query_context(batches: BatchArray, facts: Facts) -> Floats:
    product = batches.query.astype(np.float64) * batches.context
    return batches.sum(_of_prefills(batches, product))


@feature("batch", "prefill_pairs", "pairs", "keys that each new token of a prefill sees, summed")
def _prefill_pairs(batches: BatchArray, facts: Facts) -> Floats:
    pairs = keys_seen(_window(facts), batches.query, batches.context)
    return batches.sum(_of_prefills(batches, pairs))


@feature("batch", "prefill_keys", "tokens", "keys that the prefills read, their own included")
def _prefill_keys(batches: BatchArray, facts: Facts) -> Floats:
    cached = np.minimum(batches.context, _window(facts))
    return batches.sum(_of_prefills(batches, batches.query + cached))


# -- attention: the decodes -----------------------------------------------------


@feature("batch", "decodes", "requests", "requests that decode one token")
def _decodes(batches: BatchArray, facts: Facts) -> Floats:
    return batches.decodes


def _decode_keys(batches: BatchArray, facts: Facts) -> Floats:
    return _of_decodes(batches, np.minimum(batches.context + 1, _window(facts)))


@feature("batch", "decode_keys", "tokens", "keys that the decodes read")
def _sum_of_decode_keys(batches: BatchArray, facts: Facts) -> Floats:
    return batches.sum(_decode_keys(batches, facts))


@feature("batch", "decode_context", "tokens", "mean of the decodes' cached tokens (KV-cache size)")
def _decode_context(batches: BatchArray, facts: Facts) -> Floats:
    total = batches.sum(_of_decodes(batches, batches.context))
    return total / np.maximum(batches.decodes, 1.0)


@feature("batch", "decode_longest", "tokens", "most keys that one decode reads")
def _decode_longest(batches: BatchArray, facts: Facts) -> Floats:
    return batches.max(_decode_keys(batches, facts))


@feature("batch", "decode_beyond", "tokens", "most cached tokens of a decode beyond the window")
def _decode_beyond(batches: BatchArray, facts: Facts) -> Floats:
    """Kernels that divide a request's keys may divide those that no token sees, too."""
    beyond = np.maximum(batches.context + 1 - _window(facts), 0.0)
    return batches.max(_of_decodes(batches, beyond))


@feature("batch", "decode_unevenness", "ratio", "longest decode over their mean; 1 where equal")
def _decode_unevenness(batches: BatchArray, facts: Facts) -> Floats:
    """Of all cached tokens: how a kernel shares out requests follows what they hold."""
    keys = _of_decodes(batches, batches.context + 1)
    mean = batches.sum(keys) / np.maximum(batches.decodes, 1.0)
    return np.where(batches.decodes > 0, batches.max(keys) / np.maximum(mean, 1.0), 1.0)


# -- attention: thread blocks ---------------------------------------------------

#: Rows of a thread block: queries of one key-value head, those of several tokens together
#: (FlashAttention 3 and FlashInfer with heads of 128).
ROWS = 128


@feature("batch", "prefill_blocks", "blocks", "thread blocks of the prefills: rows of 128 a head")
def _prefill_blocks(batches: BatchArray, facts: Facts) -> Floats:
    tiles = np.ceil(batches.query * facts.get("queries_per_kv", 1.0) / ROWS)
    return batches.sum(_of_prefills(batches, tiles)) * facts.get("kv_heads", 1.0)


@feature("batch", "decode_blocks", "blocks", "thread blocks of the decodes: one for each head")
def _decode_blocks(batches: BatchArray, facts: Facts) -> Floats:
    return batches.decodes * facts.get("kv_heads", 1.0)
