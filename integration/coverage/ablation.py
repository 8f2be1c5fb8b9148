"""The ablation of Table 4: how much is left without a label when a kind of rules is off.

Usage: python -m integration.coverage.ablation [MODEL] [--out FOLDER]

The default is Llama-3.1-8B; the paper does not name its model, engine settings
or what it counts as an operation, so only the order is comparable.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dooly_backend.engines import Engine, boot
from dooly_backend.errors import TraceError
from dooly_backend.tracing.modes import RuleSet
from dooly_backend.tracing.sources import collect
from dooly_backend.tracing.trace import STEP
from dooly_backend.tracing.tracer import labelled_pass, plan_passes
from integration.coverage.corpus import find
from integration.coverage.one import options_of

VARIANTS = {
    "full": (RuleSet(), "0"),
    "without dimension-preserving rules": (RuleSet(preserving=False), "ambiguity failure"),
    "without dimension-preserving rules, forced": (RuleSet(preserving=False, forced=True), "241"),
    "without dimension-mapping rules": (RuleSet(mapping=False), "448"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="Llama-3.1-8B")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    arguments = parser.parse_args()
    case = find([arguments.model])[0]
    lines = [
        "# Ablation of the dimension rules (paper, Table 4)",
        "",
        f"{case.name}: operations of one pass with a size above 1 that no rule labelled, before",
        "any repair; in brackets those inside modules. The paper names neither its model nor what",
        "it counts as an operation.",
        "",
        "| rules | operations without a label | paper |",
        "| --- | --- | --- |",
    ]
    with boot(options_of(case)) as engine:
        for name, (rules, paper) in VARIANTS.items():
            lines.append(f"| {name} | {unlabelled(engine, rules)} | {paper} |")
    text = "\n".join(lines) + "\n"
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "ablation.md").write_text(text)
    print(text)
    return 0


def unlabelled(engine: Engine, rules: RuleSet) -> str:
    """Operations that have a size without a label, or why there is no trace."""
    sources = collect(engine)
    plan = plan_passes(sources, engine.max_num_tokens, engine.max_num_reqs)
    try:
        traced, _ = labelled_pass(engine, *plan.labelled, sources, rules)
    except TraceError as error:
        return f"failure: {error}"
    found = [op for op in traced.operations if any(d.size > 1 and not d.label for d in op.dims())]
    inside = sum(op.path != STEP for op in found)
    return f"{len(found)} of {len(traced.operations)} ({inside} of {len(traced.of_modules)})"


if __name__ == "__main__":
    sys.exit(main())
