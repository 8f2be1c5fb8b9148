"""Which of Vidur's operations each operation of the engine goes to.

Vidur prices a step as ``layers * sum of its per-layer operations``. Everything
that the engine runs has to be in one of them, or it is lost, so the last rule
takes what no other does. What runs once per step is divided by the layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dooly_backend.database.records import Occurrence

#: Columns of mlp.csv, in Vidur's order. Vidur reads every median but emb's.
MLP_OPS = (
    "emb",
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
#: Columns of attention.csv, in Vidur's order.
ATTENTION_OPS = (
    "attn_input_reshape",
    "attn_kv_cache_save",
    "attn_prefill",
    "attn_decode",
    "attn_output_reshape",
)
#: Homes that are no single column of mlp.csv.
ATTENTION = "attn_prefill and attn_decode"
ALL_REDUCE = "all_reduce"
STEP = "add, attn_prefill (the part of its request) and attn_decode (of its batch size)"


@dataclass(frozen=True)
class Rule:
    """Occurrences whose path and signature name fit the patterns go to `op`.

    `shown` is a column of mlp.csv that shows them besides and that Vidur does not read.
    """

    op: str
    path: str
    name: str = "*"
    shown: str | None = None


#: For what depends on the number of tokens; the first rule that fits decides.
TOKEN_RULES = (
    # collectives of tensor parallelism; Vidur counts two all_reduces per layer
    Rule(ALL_REDUCE, "*", name="*all_reduce*"),
    Rule(ALL_REDUCE, "*", name="*all_gather*"),
    Rule(ALL_REDUCE, "*", name="*reduce_scatter*"),
    # attention's projections
    Rule("attn_pre_proj", "*attn.qkv_proj"),
    Rule("attn_pre_proj", "*attn.[qkv]_proj"),
    Rule("attn_pre_proj", "*attn.*[qkv]*_a_proj*"),  # latent attention (MLA)
    Rule("attn_pre_proj", "*attn.*[qkv]*_b_proj*"),
    Rule("attn_pre_proj", "*attn.c_attn"),
    Rule("attn_post_proj", "*attn.o_proj"),
    Rule("attn_post_proj", "*attn.out_proj"),
    Rule("attn_post_proj", "*attn.c_proj"),
    Rule("attn_post_proj", "*attn.dense"),
    # everything else between the projections: rotation, QK-norm, splits, copies
    Rule("attn_rope", "*attn"),
    Rule("attn_rope", "*attn.*"),
    # the feed-forward part; experts and their router have no operation of their own
    Rule("mlp_down_proj", "*.mlp*.down_proj"),
    Rule("mlp_down_proj", "*.fc2"),
    Rule("mlp_down_proj", "*.mlp.c_proj"),
    Rule("mlp_act", "*.act_fn"),
    Rule("mlp_act", "*.mlp.act"),
    Rule("mlp_act", "*.mlp"),
    Rule("mlp_up_proj", "*.fc1"),
    Rule("mlp_up_proj", "*.mlp.*"),
    Rule("mlp_up_proj", "*.block_sparse_moe*"),
    Rule("mlp_up_proj", "*.feed_forward*"),
    # norms: the first of a layer, and all later ones
    Rule("input_layernorm", "*.layers.*.input_layernorm"),
    Rule("post_attention_layernorm", "*.layers.*layernorm"),
    # once per step, and whatever has no home
    Rule("add", "*embed_tokens", shown="emb"),
    Rule("add", "*"),
)

#: Paths that only models with experts have.
EXPERT_PATHS = ("*.experts", "*.experts.*", "*.block_sparse_moe", "*.block_sparse_moe.*")
#: Paths that only gated feed-forward parts have.
GATED_PATHS = ("*.gate_up_proj", "*.gate_proj", *EXPERT_PATHS)


@dataclass(frozen=True)
class Assignment:
    """Where one occurrence is counted. `per_layer` is False for what runs once per step."""

    occurrence: Occurrence
    home: str
    per_layer: bool
    shown: str | None = None


def assign(occurrences: Iterable[Occurrence]) -> tuple[Assignment, ...]:
    """Each occurrence with its one home, in order."""
    return tuple(_assign(occurrence) for occurrence in occurrences)


def _assign(occurrence: Occurrence) -> Assignment:
    per_layer = bool(occurrence.layers) or ".*" in occurrence.path
    kind = occurrence.signature.kind
    if kind == "batch":
        return Assignment(occurrence, ATTENTION, per_layer)
    if kind in ("requests", "constant"):
        return Assignment(occurrence, STEP, per_layer)
    rule = next(rule for rule in TOKEN_RULES if _fits(rule, occurrence))
    return Assignment(occurrence, rule.op, per_layer, rule.shown)


def _fits(rule: Rule, occurrence: Occurrence) -> bool:
    # A leading dot lets "*.mlp" fit a path that starts with it.
    path = "." + occurrence.path
    return fnmatchcase(path, rule.path) and fnmatchcase(occurrence.signature.name, rule.name)


def any_path(occurrences: Iterable[Occurrence], patterns: Iterable[str]) -> bool:
    """Whether one of `occurrences` has a path that fits one of `patterns`."""
    paths = {"." + occurrence.path for occurrence in occurrences}
    return any(fnmatchcase(path, pattern) for path in paths for pattern in patterns)
