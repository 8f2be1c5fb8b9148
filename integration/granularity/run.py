"""Whole modules against the sums of their operations, timed in turns in one run.

    python -m integration.granularity.run [-o FOLDER] [--seconds 300] [--repeats 9]
    python -m integration.granularity.run --together --budget 115 --seconds 45 -o FOLDER

For each module of the paper's section 7.4 (linear of Llama-3.1-8B's widths,
Gemma's RMSNorm, Cohere's LayerNorm) and each number of tokens the module, the
module again (how far two timings of the same call differ), and every operation
that it runs take turns, each timed as the profiler times them. Runs on the
device that the engine finds: a CPU, or a GPU behind CUDA events. Writes
granularity.csv and granularity.md to FOLDER, after each module; what lies there
of the same device and engine is kept, so that another run measures the rest.
With --together, which is for a GPU, an engine for each model starts at once and
they measure in turn; after --budget seconds what is not done is killed.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from dooly_backend.database.records import Environment
from dooly_backend.engines import Engine, boot
from dooly_backend.errors import DoolyError
from dooly_backend.operations.capture import Key, captured
from dooly_backend.profiling.measure import Regime, measure
from dooly_backend.profiling.sweep import prefills
from dooly_backend.profiling.timer import Timer, quiet_process, timer_for
from dooly_backend.workload import WorkloadPoint
from integration.gpu.workers import in_turn, ready
from integration.granularity.pairs import PAIRS, Pair, Site, sites, subjects

TOKENS = tuple(2**n for n in range(12))
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Row:
    """One module at one number of tokens; medians in microseconds.

    `difference` is the percentage by which the sum of the operations exceeds
    the module, the median over turns, `low` and `high` its quartiles; `jitter`
    the same of the module's second timing.
    """

    environment: str
    pair: str
    module: str
    shape: str
    operations: int
    tokens: int
    module_us: float
    operations_us: float
    difference: float
    low: float
    high: float
    jitter: float
    unstable: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path, default=HERE / "results" / "cpu")
    parser.add_argument(
        "--seconds", type=float, default=300, help="for everything but the first start"
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--together", action="store_true", help="start all engines at once")
    parser.add_argument("--budget", type=float, default=540, help="seconds for all of --together")
    parser.add_argument("--pair", choices=[pair.title for pair in PAIRS], help="only this one")
    parser.add_argument("--wait", action="store_true", help="start, then wait for a line on stdin")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    pairs = [pair for pair in PAIRS if arguments.pair in (None, pair.title)]
    if arguments.together:
        return together(pairs, arguments)
    left = sum(len(pair.names) for pair in pairs)
    last = time.monotonic() + arguments.seconds
    for pair in pairs:
        try:
            with boot(pair.options) as engine, quiet_process():
                if arguments.wait:
                    ready()
                    last = time.monotonic() + arguments.seconds
                measured(engine, pair, arguments, left, last)
                left -= len(pair.names)
        except DoolyError as error:
            print(f"error: {pair.title}: {error}", file=sys.stderr)
            return error.exit_code
    print((arguments.out / "granularity.md").read_text())
    return 0


def together(pairs: Sequence[Pair], arguments: argparse.Namespace) -> int:
    """A process for every pair; each has its share of the seconds."""
    every = sum(len(pair.names) for pair in pairs)
    options = ["--wait", "--repeats", str(arguments.repeats), "--out", str(arguments.out)]
    commands = []
    for pair in pairs:
        seconds = arguments.seconds * len(pair.names) / every
        command = ["integration.granularity.run", "--pair", pair.title, "--seconds", str(seconds)]
        commands.append(command + options)
    return max(map(abs, in_turn(commands, arguments.budget)))


def measured(
    engine: Engine, pair: Pair, arguments: argparse.Namespace, left: int, last: float
) -> None:
    """Measure a pair's modules, `left` being those of all pairs, and write after each."""
    environment = described(engine.environment)
    rows = [r for r in read(arguments.out / "granularity.csv") if r.environment == environment]
    regime = Regime(repeats=arguments.repeats)
    found, leaves = sites(engine, pair.names)
    for site in found:
        now = time.monotonic()
        end = now + (last - now) / left  # what one does not use the others may
        left -= 1
        here = {r.tokens for r in rows if (r.pair, r.module) == (pair.title, site.name)}
        wanted = [tokens for tokens in TOKENS if tokens not in here]
        rows += compared(engine, pair.title, site, leaves, regime, wanted, end)
        write(rows, arguments.out)


def described(environment: Environment) -> str:
    """The device and the engine."""
    return f"{environment.device}, {environment.engine} {environment.engine_version}"


def compared(
    engine: Engine,
    title: str,
    site: Site,
    leaves: Sequence[Key],
    regime: Regime,
    wanted: Sequence[int],
    end: float,
) -> Iterator[Row]:
    """A row for each number of tokens, as long as the next is likely to be done before `end`."""
    timer = timer_for(engine)
    taken = 0.0
    for tokens in wanted:
        start = time.monotonic()
        if start + 2 * taken > end:
            return
        yield _row(engine, timer, title, site, leaves, regime, tokens)
        taken = time.monotonic() - start


def _row(
    engine: Engine,
    timer: Timer,
    title: str,
    site: Site,
    leaves: Sequence[Key],
    regime: Regime,
    tokens: int,
) -> Row:
    point = WorkloadPoint("tokens", num_tokens=tokens)
    keys = list(dict.fromkeys([*leaves, *site.keys]))
    with captured(engine, prefills(tokens, engine.max_request_len), keys) as calls:
        found = subjects(site, calls)
        named = {(f"operation {at}", point): subject for at, subject in found.items()}
        named |= {(name, point): found[None] for name in ("module", "again")}
        del named["operation None", point]
        measured = {key[0]: m for key, m in measure(engine, timer, named, regime).items()}
    module, again = measured.pop("module"), measured.pop("again")
    # A compiled module may run nothing that the dispatcher sees: then there is no sum.
    sums = [sum(turn) for turn in zip(*(m.samples_us for m in measured.values()), strict=True)]
    against = [100 * (s / m - 1) for s, m in zip(sums, module.samples_us, strict=bool(sums))]
    low, middle, high = (
        statistics.quantiles(against, n=4, method="inclusive") if sums else [math.nan] * 3
    )
    return Row(
        environment=described(engine.environment),
        pair=title,
        module=site.name,
        shape=site.shape,
        operations=len(measured),
        tokens=tokens,
        module_us=statistics.median(module.samples_us),
        operations_us=statistics.median(sums) if sums else math.nan,
        difference=middle,
        low=low,
        high=high,
        jitter=100
        * (statistics.median(again.samples_us) / statistics.median(module.samples_us) - 1),
        unstable=module.unstable or any(m.unstable for m in measured.values()),
    )


def read(path: Path) -> list[Row]:
    """The rows of an earlier run."""
    if not path.is_file():
        return []
    kinds = {"operations": int, "tokens": int, "unstable": "True".__eq__}
    texts = {"environment", "pair", "module", "shape"}
    with path.open(newline="") as file:
        return [
            Row(**{k: v if k in texts else kinds.get(k, float)(v) for k, v in line.items()})
            for line in csv.DictReader(file)
        ]


def write(rows: list[Row], out: Path) -> None:
    """granularity.csv and granularity.md in `out`; sorts `rows`."""
    titles = [pair.title for pair in PAIRS]
    modules = list(dict.fromkeys(row.module for row in rows))
    rows.sort(key=lambda r: (titles.index(r.pair), modules.index(r.module), r.tokens))
    with (out / "granularity.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            values = asdict(row).items()
            writer.writerow({k: round(v, 3) if isinstance(v, float) else v for k, v in values})
    (out / "granularity.md").write_text(markdown(rows))


NOTES = """\
*difference*: by how much the sum of the operations, each timed alone, exceeds the whole module; the
median over turns (its quartiles). *jitter*: the same of a second timing of the module, in the same
turns. *: a spread above the regime's limit, also after three rounds. nan: a module that runs
nothing that the dispatcher sees, a compiled one; it is the finest entry then."""


def markdown(rows: Sequence[Row]) -> str:
    """One table for each module."""
    lines = ["# Whole modules against the sums of their operations", ""]
    lines += [f"{rows[0].environment}, bfloat16.", "", NOTES]
    missing = []
    for title, module, shape, count in dict.fromkeys(
        (row.pair, row.module, row.shape, row.operations) for row in rows
    ):
        here = [row for row in rows if (row.pair, row.module) == (title, module)]
        lines += ["", f"## {title}: {module} ({shape}), operations: {count}", ""]
        lines += ["| tokens | module us | operations us | difference % | jitter % |"]
        lines += ["| ---: | ---: | ---: | ---: | ---: |"]
        lines += [
            f"| {r.tokens}{'*' if r.unstable else ''} | {r.module_us:.1f} | {r.operations_us:.1f} "
            f"| {r.difference:+.1f} ({r.low:+.1f} to {r.high:+.1f}) | {r.jitter:+.1f} |"
            for r in here
        ]
        if rest := [str(t) for t in TOKENS if t not in {r.tokens for r in here}]:
            missing.append(f"- {module}: {', '.join(rest)} tokens")
    if missing:
        lines += ["", "Not measured within the given seconds:", "", *missing]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
