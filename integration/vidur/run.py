"""Run Vidur on an export for a few requests and read its TTFT and TPOT.

    python -m integration.vidur.run EXPORT [--requests 20] [--python PYTHON] [--json]

Vidur must be installed in PYTHON, by default the Python that runs this. An
export in layout repo needs microsoft/vidur: a clone that ``--checkout`` names,
or VIDUR_REPO does, where PYTHON has what it imports.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from dooly_backend.errors import DoolyError, InputError
from dooly_backend.exporters import read_manifest

LAUNCHER = "run_vidur.py"
CHECKOUT_VARIABLE = "VIDUR_REPO"
TTFT_COLUMN = "prefill_e2e_time"
TPOT_COLUMN = "decode_time_execution_plus_preemption_normalized"
TIMEOUT_S = 900


class TracedRequest(Protocol):
    """A request of a trace: when it comes, and how long it is."""

    @property
    def arrival_s(self) -> float: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...


@dataclass(frozen=True)
class VidurResult:
    """Times of every request in seconds, in order of their ids.

    Vidur's TPOT divides the decode steps (one fewer than the tokens) by all
    tokens of the answer, the first included: `vidur_tpot_s`. `tpot_s` divides
    by the steps, as serving benchmarks do.
    """

    ttft_s: tuple[float, ...]
    vidur_tpot_s: tuple[float, ...]
    decode_tokens: tuple[int, ...]
    layout: str
    model: str

    @property
    def tpot_s(self) -> tuple[float, ...]:
        """Of the requests with more than one token."""
        pairs = zip(self.vidur_tpot_s, self.decode_tokens, strict=True)
        return tuple(tpot * tokens / (tokens - 1) for tpot, tokens in pairs if tokens > 1)

    def summary(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "layout": self.layout,
            "requests": len(self.ttft_s),
            "ttft_s": percentiles(self.ttft_s),
            "vidur_tpot_s": percentiles(self.vidur_tpot_s),
            "tpot_s": percentiles(self.tpot_s),
        }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, P50, P90 and P99; empty without values."""
    if not values:
        return {}
    p50, p90, p99 = (float(p) for p in np.percentile(values, (50, 90, 99)))
    return {"mean": float(np.mean(values)), "p50": p50, "p90": p90, "p99": p99}


def run_vidur(
    export: Path,
    requests: int = 20,
    prefill_tokens: int | None = None,
    decode_tokens: int | None = None,
    qps: float = 1.0,
    seed: int = 42,
    python: str = sys.executable,
    checkout: Path | None = None,
    extra: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
) -> VidurResult:
    """Vidur's times for `requests` equal requests that arrive at `qps` on average.

    Lengths are the export's own defaults unless given; `checkout` is a clone to
    run in place of the installed release; `extra` are options of vidur.main.
    Raises InputError when `export` is none, when Vidur is missing in `python`,
    or when it fails.
    """
    options: dict[str, Any] = {
        "seed": seed,
        "synthetic_request_generator_config_num_requests": requests,
        "poisson_request_interval_generator_config_qps": qps,
        "poisson_request_interval_generator_config_seed": seed,
        "fixed_request_length_generator_config_prefill_tokens": prefill_tokens,
        "fixed_request_length_generator_config_decode_tokens": decode_tokens,
    }
    return _times(export, options, python, checkout, extra, timeout_s)


def replay(
    export: Path,
    requests: Sequence[TracedRequest],
    num_blocks: int | None = None,
    python: str = sys.executable,
    checkout: Path | None = None,
    timeout_s: float = TIMEOUT_S,
) -> VidurResult:
    """Vidur's times for just these requests, with `num_blocks` blocks of KV cache.

    Raises InputError as `run_vidur` does.
    """
    day = "2000-01-01"  # Vidur takes the rows of one date
    with tempfile.TemporaryDirectory(prefix="dooly-vidur-") as folder:
        trace = Path(folder) / "trace.csv"
        with trace.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("Date", "Time", "PromptTokenCount", "CompletionTokenCount"))
            for each in sorted(requests, key=lambda request: request.arrival_s):
                writer.writerow((day, each.arrival_s, each.prompt_tokens, each.output_tokens))
        longest = max(each.prompt_tokens + each.output_tokens for each in requests)
        options = {
            "request_generator_config_type": "trace_replay",
            "trace_request_generator_config_trace_file": trace,
            "trace_request_generator_config_date": day,
            "trace_request_generator_config_max_tokens": longest,
            "trace_request_generator_config_prefill_scale_factor": 1,
            "trace_request_generator_config_decode_scale_factor": 1,
            "trace_request_generator_config_time_scale_factor": 1,
            "cache_config_num_blocks": num_blocks,
        }
        return _times(export, options, python, checkout, (), timeout_s)


def _times(
    export: Path,
    options: Mapping[str, Any],
    python: str,
    checkout: Path | None,
    extra: Sequence[str],
    timeout_s: float,
) -> VidurResult:
    """What Vidur says of every request; `options` of None are left to the export."""
    manifest = read_manifest(export)
    if manifest.get("format") != "vidur":
        raise InputError(f"{export} is an export for {manifest.get('format')}, not for vidur")
    given = [text for k, v in options.items() if v is not None for text in (f"--{k}", str(v))]
    with tempfile.TemporaryDirectory(prefix="dooly-vidur-") as output:
        command = [python, str(export / LAUNCHER), *given, "--metrics_config_output_dir", output]
        environment = _environment(checkout, Path(output) / "path")
        _run([*command, *extra], environment, timeout_s)
        rows = _request_metrics(Path(output))
    return VidurResult(
        ttft_s=tuple(float(row[TTFT_COLUMN]) for row in rows),
        vidur_tpot_s=tuple(float(row[TPOT_COLUMN]) for row in rows),
        decode_tokens=tuple(int(float(row["request_num_decode_tokens"])) for row in rows),
        layout=manifest["layout"],
        model=manifest["model"],
    )


def _environment(checkout: Path | None, folder: Path) -> dict[str, str]:
    """This process's, with `checkout` before an installed Vidur.

    The clone has no ``__init__.py``, so an installed package would win over it
    wherever it is: `folder` gets a package whose modules are the clone's.
    """
    environment = dict(os.environ)
    if checkout is None:
        return environment
    package = checkout.resolve() / "vidur"
    if not (package / "main.py").is_file():
        raise InputError(f"{checkout} is no clone of microsoft/vidur: it has no vidur/main.py")
    (folder / "vidur").mkdir(parents=True)
    (folder / "vidur" / "__init__.py").write_text(f"__path__ = [{str(package)!r}]\n", "utf-8")
    paths = (str(folder), environment.get("PYTHONPATH", ""))
    return environment | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _run(command: list[str], environment: dict[str, str], timeout_s: float) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env=environment
        )
    except OSError as error:
        raise InputError(f"cannot run {command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise InputError(f"Vidur took more than {timeout_s:g} s: raise the timeout") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        last = lines[-1].strip() if lines else f"exit code {done.returncode}"
        raise InputError(f"Vidur failed: {last}")


def _request_metrics(output: Path) -> list[dict[str, str]]:
    """Rows of the one request_metrics.csv below `output`."""
    files = sorted(output.glob("*/request_metrics.csv"))
    if not files:
        raise InputError("Vidur wrote no request_metrics.csv: is writing metrics switched off?")
    with files[-1].open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or TTFT_COLUMN not in rows[0] or TPOT_COLUMN not in rows[0]:
        raise InputError(f"Vidur's request_metrics.csv has no requests with {TTFT_COLUMN}")
    return rows


def show(result: VidurResult, console: Console) -> None:
    """Print a table of the percentiles in milliseconds."""
    title = f"{result.model} in Vidur ({result.layout}), {len(result.ttft_s)} requests"
    table = Table("", "mean", "P50", "P90", "P99", title=title)
    summary = result.summary()
    for label, key in (
        ("TTFT, ms", "ttft_s"),
        ("TPOT as Vidur counts it, ms", "vidur_tpot_s"),
        ("TPOT per decode step, ms", "tpot_s"),
    ):
        figures = summary[key].values()
        table.add_row(label, *(f"{1e3 * figure:.2f}" for figure in figures))
    console.print(table)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("export", type=click.Path(path_type=Path))
@click.option("--requests", default=20, show_default=True, type=click.IntRange(1))
@click.option("--prefill-tokens", type=click.IntRange(1), help="Default: the export's.")
@click.option("--decode-tokens", type=click.IntRange(1), help="Default: the export's.")
@click.option("--qps", default=1.0, show_default=True, type=click.FloatRange(0, min_open=True))
@click.option("--seed", default=42, show_default=True)
@click.option("--python", default=sys.executable, help="A Python that has Vidur.")
@click.option(
    "--checkout",
    type=click.Path(path_type=Path),
    help="A clone of microsoft/vidur. [default: of an export in layout repo $VIDUR_REPO]",
)
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout.")
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
def main(
    export: Path,
    as_json: bool,
    checkout: Path | None,
    extra: tuple[str, ...],
    **options: Any,
) -> None:
    """Run Vidur on EXPORT and print its TTFT and TPOT. EXTRA are options of vidur.main."""
    try:
        if checkout is None and read_manifest(export).get("layout") == "repo":
            name = os.environ.get(CHECKOUT_VARIABLE)
            checkout = Path(name) if name else None
        result = run_vidur(export, checkout=checkout, extra=extra, **options)
    except DoolyError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    if as_json:
        click.echo(json.dumps(result.summary()))
    else:
        show(result, Console())


if __name__ == "__main__":
    main()
