"""Measure single batches live, for several configurations on one device, within a budget.

    python -m integration.per_batch.measure run --out results --budget 540 \
        meta-llama/Llama-3.1-8B:FLASH_ATTN meta-llama/Llama-3.1-8B:FLASHINFER

A configuration is MODEL:BACKEND[:MODE[:PRECISION]], as for `integration.gpu.step_costs`; no
profile is needed. Every configuration is an engine in a process of its own, at its
defaults and with all layers. On every GPU of the host `--at-once` of them start together
and take turns: each goes through all batches before any goes through them again, so that
what two rounds differ by is also what minutes change. One JSON line a batch and round
goes to ``OUT/per-batch-MODEL-BACKEND[-MODE].jsonl`` as soon as it is measured; what is
there is not measured again.

A batch runs many times in a row, each launched before the tokens of the one before it
are waited for (`interval_us`: what serving sees, a decode's time per output token), and,
where it has prefills, alone and waited for (`waited_us`: a prompt's time to its first
token on an idle engine, without the scheduler).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from dooly_backend.engines import Engine
from dooly_backend.profiling.stream import stream_step
from dooly_backend.profiling.timer import quiet_process
from dooly_backend.workload import Batch
from integration.gpu.processors import ANYWHERE, Where
from integration.gpu.step_costs import options_of
from integration.gpu.workers import devices, in_turn_on_each, ready, shared_out
from integration.per_batch.batches import BATCHES, MOST_TOKENS

_LEAST_SECONDS = 60  # an engine takes about that long to start
#: Steps in a row: of decodes alone, which are short, and of batches with prefills.
_DECODES, _PREFILLS, _WAITED = 20, 6, 4


@click.group()
def cli() -> None:
    """Single batches on live engines."""


def _settings(function: Any) -> Any:
    """What both commands take, and the first hands to the second."""
    for option in (
        click.option("--out", required=True, type=click.Path(path_type=Path)),
        click.option("--rounds", default=2, show_default=True, help="Through all batches."),
        click.option("--max-num-seqs", default=256, show_default=True),
        click.option("--max-num-batched-tokens", default=MOST_TOKENS, show_default=True),
        click.option("--layers", type=int, help="As many as the model has by default."),
        click.option("--threads", type=int, help="Of an engine on a CPU."),
        click.option("--batch", "chosen", multiple=True, help="Only these; 1x128+0 and the like."),
    ):
        function = option(function)
    return function


@cli.command(name="run")
@click.argument(
    "configurations", nargs=-1, required=True, metavar="MODEL:BACKEND[:MODE[:PRECISION]]..."
)
@click.option("--budget", default=540.0, show_default=True, help="Seconds for everything.")
@click.option("--at-once", default=3, show_default=True, help="Engines that share a GPU.")
@_settings
def run_all(
    configurations: tuple[str, ...], budget: float, at_once: int, out: Path, **settings: Any
) -> None:
    """Start engines, `--at-once` together, and measure in turn."""
    end = time.monotonic() + budget
    out.mkdir(parents=True, exist_ok=True)
    failed = False
    gpus = devices()
    together = at_once * max(len(gpus), 1)
    for first in range(0, len(configurations), together):
        wave = configurations[first : first + together]
        left = end - time.monotonic()
        if left < _LEAST_SECONDS:
            click.echo(f"{left:.0f} s left, not run: {', '.join(wave)}", err=True)
            failed = True
            continue
        shares = shared_out(wave, gpus)
        commands = {
            gpu: [command(each, out, settings) for each in of] for gpu, of in shares.items()
        }
        for gpu, codes in in_turn_on_each(commands, left, settings["rounds"]).items():
            for each, code in zip(shares[gpu], codes, strict=True):
                click.echo(json.dumps({"configuration": each, "exit": code, "device": gpu}))
                failed |= bool(code)
    sys.exit(int(failed))


def command(configuration: str, out: Path, settings: Mapping[str, Any]) -> list[str]:
    """The arguments of `python -m` that measure one configuration."""
    found = ["integration.per_batch.measure", "one", configuration, "--out", str(out)]
    for name, value in settings.items():
        option = "--batch" if name == "chosen" else f"--{name.replace('_', '-')}"
        for each in value if isinstance(value, tuple) else (value,):
            if each is not None:
                found += [option, str(each)]
    return found


@cli.command()
@click.argument("configuration")
@_settings
def one(
    configuration: str,
    out: Path,
    rounds: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    layers: int | None,
    threads: int | None,
    chosen: tuple[str, ...],
) -> None:
    """One engine: wait for a turn, go through the batches, and so on."""
    from dooly_backend.engines import boot

    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    options = options_of(configuration, threads=threads, **limits)
    options = options.model_copy(update={"layers": layers or options.model.num_layers})
    start = time.monotonic()
    with boot(options) as engine:
        click.echo(f"{configuration}: started in {time.monotonic() - start:.0f} s", err=True)
        path = out / f"per-batch-{configuration.rpartition('/')[2].replace(':', '-')}.jsonl"
        about = about_of(engine) | {"mode": options.execution_mode, **limits}
        for turn in range(rounds):
            ready()
            start = time.monotonic()
            measured = measure(engine, path, about, turn, [*map(Batch.parse, chosen)] or BATCHES)
            seconds = round(time.monotonic() - start, 1)
            told = {"configuration": configuration, "round": turn, "batches": measured}
            click.echo(json.dumps({**told, "seconds": seconds}), err=True)


def about_of(engine: Engine) -> dict[str, Any]:
    """What tells the engine of a row: a configuration of the database, its depth, where it ran."""
    known = engine.configuration
    return {
        "model": known.model,
        "backend": known.backend,
        "quantization": known.quantization,
        "kv_cache_dtype": known.kv_cache_dtype,
        "layers": engine.num_layers,
        "device": engine.environment.device,
        "engine": f"{engine.environment.engine} {engine.environment.engine_version}",
    }


def measure(
    engine: Engine,
    path: Path,
    about: Mapping[str, Any],
    turn: int,
    batches: Sequence[Batch],
    where: Where = ANYWHERE,
) -> int:
    """Add to the file what it lacks of round `turn`; how many batches. Odd rounds go backwards."""
    here = {**about, "round": turn}
    known = set()
    if path.exists():
        lines = map(json.loads, path.read_text().splitlines())
        known = {row["batch"] for row in lines if here.items() <= row.items()}
    missing = [batch for batch in batches if batch.key not in known]
    count = 0
    with path.open("a") as file, quiet_process():
        for row in rows(engine, missing[::-1] if turn % 2 else missing, where):
            file.write(json.dumps({**here, **row}) + "\n")
            file.flush()
            count += 1
    return count


def rows(
    engine: Engine, batches: Sequence[Batch], where: Where = ANYWHERE
) -> Iterator[dict[str, Any]]:
    """One row for each of `batches` that the engine has room for; microseconds, in order.

    A held thread goes to the quickest processor before each, and the row says which.
    """
    for batch in batches:
        where.again()
        repeats, alone = (_PREFILLS, _WAITED) if batch.prefills else (_DECODES, 0)
        step = stream_step(engine, batch, repeats, alone)
        if isinstance(step, str):
            click.echo(f"{batch.key}: {step}", err=True)
            continue
        row = {
            "batch": batch.key,
            "step_mode": step.mode,
            "interval_us": step.interval_us,
            "launch_us": round(step.launch_median_us, 1),
            **where.about,
        }
        if step.device_us:
            row["device_us"] = round(statistics.median(step.device_us), 1)
        if batch.prefills:
            row["waited_us"] = step.alone_us
        yield row


if __name__ == "__main__":
    cli()
