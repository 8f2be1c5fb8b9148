"""Which of LLMServingSim's layers each operation of the engine goes to.

The simulator prices a step as ``prologue + layers * block + head``, one table
look-up for each layer of a sequence. Everything that the engine runs has to be
in one of them, or it is lost, so the last rules take what no other does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dooly_backend.database.records import Occurrence

#: Homes that are no layer: a network simulator prices the first; the second is in the sampler.
COLLECTIVE, STEP = "collectives (the network simulator's)", "sampler (the step's own cost)"

#: Layers by the table that holds them, in the order of the pass.
DENSE = (
    "embedding",
    "layernorm",
    "qkv_proj",
    "qk_norm",
    "rotary_emb",
    "o_proj",
    "gate_up_proj",
    "act_fn",
    "down_proj",
    "final_layernorm",
)
PER_SEQUENCE = ("lm_head", "sampler")
ATTENTION, MOE = "attention", "moe"

#: Layers that run once per step, and those that a block runs more than once.
ONCE = ("embedding", "final_layernorm", *PER_SEQUENCE)
CALLS_PER_BLOCK = {"layernorm": 2}

#: Layers that the simulator reads from tp1 at every degree, where tp1 is there.
TP_STABLE = ("layernorm", "qk_norm", "final_layernorm", "sampler")


@dataclass(frozen=True)
class Rule:
    """Occurrences whose path, signature name and kind fit the patterns go to `layer`."""

    layer: str
    path: str
    name: str = "*"
    kind: str = "*"


#: The first rule that fits decides.
RULES = (
    # of tokens; gathering the logits of requests is in no trace of the simulator's
    Rule(COLLECTIVE, "*", name="*all_reduce*", kind="tokens"),
    Rule(COLLECTIVE, "*", name="*all_gather*", kind="tokens"),
    Rule(COLLECTIVE, "*", name="*reduce_scatter*", kind="tokens"),
    Rule(COLLECTIVE, "*", name="*all_to_all*", kind="tokens"),
    # what depends on the whole batch, on the number of requests, on nothing
    Rule(ATTENTION, "*", kind="batch"),
    Rule("lm_head", "*.logits_processor*", kind="requests"),
    Rule("lm_head", "*.lm_head*", kind="requests"),
    Rule("sampler", "*", kind="requests"),
    Rule(STEP, "*", kind="constant"),
    # attention's projections, and everything between them: QK-norm, rotation, splits, copies
    Rule("qkv_proj", "*attn.qkv_proj"),
    Rule("qkv_proj", "*attn.[qkv]_proj"),
    Rule("qkv_proj", "*attn.c_attn"),
    Rule("o_proj", "*attn.o_proj"),
    Rule("o_proj", "*attn.out_proj"),
    Rule("o_proj", "*attn.c_proj"),
    Rule("o_proj", "*attn.dense"),
    Rule("qk_norm", "*attn.*norm*"),
    Rule("rotary_emb", "*attn"),
    Rule("rotary_emb", "*attn.*"),
    Rule("rotary_emb", "*rotary_emb*"),
    # the sparse block, gate included, whether measured in parts or whole
    Rule(MOE, "*", kind="routing"),
    Rule(MOE, "*", name="*Mo[eE]*"),
    Rule(MOE, "*", name="*moe_forward*"),
    Rule(MOE, "*.experts*"),
    Rule(MOE, "*.mlp.gate"),
    Rule(MOE, "*.shared_expert*"),
    Rule(MOE, "*.block_sparse_moe*"),
    # the dense feed-forward part
    Rule("down_proj", "*.mlp.down_proj"),
    Rule("down_proj", "*.mlp.c_proj"),
    Rule("down_proj", "*.fc2"),
    Rule("act_fn", "*.act_fn"),
    Rule("act_fn", "*.mlp.act"),
    Rule("gate_up_proj", "*.mlp"),
    Rule("gate_up_proj", "*.mlp.*"),
    Rule("gate_up_proj", "*.fc1"),
    Rule("gate_up_proj", "*.feed_forward*"),
    # norms, with the residual adds and whatever else a layer runs beside its parts
    Rule("layernorm", "*.layers.*"),
    Rule("layernorm", "*.h.*"),
    # once per step
    Rule("final_layernorm", "*norm"),
    Rule("final_layernorm", "*.ln_f"),
    Rule("embedding", "*"),
)

#: Where a layer's operations go in a model whose sequence does not have it.
ELSEWHERE = {
    "qk_norm": "rotary_emb",
    "gate_up_proj": MOE,
    "act_fn": MOE,
    "down_proj": MOE,
}


@dataclass(frozen=True)
class Assignment:
    """Where one occurrence is counted."""

    occurrence: Occurrence
    home: str


def assign(
    occurrences: Iterable[Occurrence], layers: Iterable[str] | None = None
) -> tuple[Assignment, ...]:
    """Each occurrence with its one home, in order; `layers` are those that the sequence has."""
    has = None if layers is None else set(layers)
    return tuple(Assignment(each, _home(each, has)) for each in occurrences)


def _home(occurrence: Occurrence, layers: set[str] | None) -> str:
    layer = next(rule.layer for rule in RULES if _fits(rule, occurrence))
    if layers is None or layer in layers or layer in (COLLECTIVE, STEP):
        return layer
    return ELSEWHERE[layer]


def _fits(rule: Rule, occurrence: Occurrence) -> bool:
    # A leading dot lets "*.mlp" fit a path that starts with it.
    return (
        fnmatchcase("." + occurrence.path, rule.path)
        and fnmatchcase(occurrence.signature.name, rule.name)
        and fnmatchcase(occurrence.signature.kind, rule.kind)
    )
