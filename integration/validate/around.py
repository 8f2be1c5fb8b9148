"""What steps around a prefill took, live and predicted: does the device's clock tell it?

    python -m integration.validate.around meta-llama/Llama-3.1-8B --backend FLASH_ATTN \
        integration/validate/results/h200-flash_attn-2/live-0.json.xz [--device-clock]

The device's steps of a recorded run follow each other without a pause, but a step's tokens
are seen late where the host was launching the next one meanwhile: behind a prefill, and
ahead of it. So a prefill is taken together with the decode before it and three behind it,
from when the tokens of the decode before those were out: a *window*. Beside it stand
the device's predicted times of the same steps. Launching is not in them: a window that it
bounds is predicted too short.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import pandas as pd

from dooly_backend.regression.batches import Floats
from dooly_backend.simulation.columns import Steps
from dooly_backend.simulation.device_clock import DeviceClock
from dooly_backend.simulation.execution import Execution, Mode
from dooly_backend.simulation.records import Run
from dooly_backend.simulation.replay import batches
from dooly_backend.simulation.run_file import load_run
from dooly_backend.simulation.source import Source, from_database
from dooly_backend.simulation.step_time import StepModel
from integration.validate.cross import quantization_of

_BEHIND = 3  # decodes behind a prefill that belong to its window
_TOKENS = (1, 513, 900, 1500, 2500, 4000, 8193)
_STEPS = (1, 2, 4, 8, 16, 1 << 30)  # behind a prefill
_REQUESTS = (8, 24, 48, 96)
_FEWEST = 4


@dataclass(frozen=True)
class Timed:
    """The steps of a run: what they were, when they were seen, and what the device takes.

    Times are in microseconds; `busy`: the step was launched before the one ahead was out.
    """

    tokens: Floats
    requests: Floats
    is_decode: np.ndarray  # in a whole graph
    busy: np.ndarray
    ready_us: Floats
    predicted_us: Floats

    @classmethod
    def of(cls, run: Run, source: Source, device_clock: bool) -> Timed:
        """Raises InputError where the device's clock was not watched."""
        assert run.limits is not None
        model = StepModel.of(source.fitted, Execution.served(run.about, run.limits.max_num_seqs))
        many, columns = batches(run), Steps.of(run.steps)
        shapes, us = model.shapes(many), model.times(many).device_us
        if device_clock:
            clock = source.with_clock(model).clock
            assert clock is not None
            us = _with_clock(DeviceClock(clock), columns, us, shapes.tokens)
        return cls(
            shapes.tokens,
            shapes.requests,
            (shapes.tokens == shapes.requests) & (shapes.mode == Mode.FULL),
            np.append(False, columns.start_s[1:] < columns.ready_s[:-1]),
            columns.ready_s * 1e6,
            us,
        )


def _with_clock(clock: DeviceClock, columns: Steps, us: Floats, tokens: Floats) -> Floats:
    """The device's times where each step begins when it was launched or the one ahead is done."""
    found, free_s = np.empty(len(us)), 0.0
    for i, (start_s, ready_s) in enumerate(zip(columns.start_s, columns.ready_s, strict=True)):
        begin_s = max(free_s, start_s)
        took_s = clock.step(begin_s, us[i] / 1e6, int(tokens[i]))
        found[i] = took_s * 1e6
        free_s = max(free_s, min(begin_s + took_s, ready_s))
    return found


def windows(steps: Timed) -> Iterator[tuple[int, float, float, float]]:
    """Of every lone prefill among decodes: its tokens, us live, predicted, and its own of these."""
    decodes = steps.is_decode
    for i in range(2, len(decodes) - _BEHIND):
        last = i + _BEHIND
        alone = decodes[i - 2 : i].all() and not decodes[i] and decodes[i + 1 : last + 1].all()
        if alone and steps.busy[i - 1 : last + 1].all():
            live = steps.ready_us[last] - steps.ready_us[i - 2]
            predicted = steps.predicted_us[i - 1 : last + 1].sum()
            yield int(steps.tokens[i]), live, predicted, steps.predicted_us[i]


def of_prefills(steps: Timed) -> pd.DataFrame:
    """By tokens of the prefill: windows, their means in ms, what is too long of the prefill (%)."""
    names = ["tokens", "live", "predicted", "prefill"]
    frame = pd.DataFrame(windows(steps), columns=names)
    groups = frame.groupby(pd.cut(frame["tokens"], list(_TOKENS), right=False), observed=True)
    table = groups.agg(
        windows=("live", "size"), live_ms=("live", "mean"), predicted_ms=("predicted", "mean")
    )
    excess = groups["predicted"].sum() - groups["live"].sum()
    table["too_long_percent"] = 100 * excess / groups["prefill"].sum()
    table[["live_ms", "predicted_ms"]] /= 1e3
    return table[table["windows"] >= _FEWEST]


def of_decodes(steps: Timed) -> pd.DataFrame:
    """By requests and steps behind a prefill: decodes, and the median of predicted over live."""
    count = len(steps.tokens)
    latest = np.maximum.accumulate(np.where(steps.is_decode, -1, np.arange(count)))
    frame = pd.DataFrame(
        {
            "behind": np.where(latest < 0, count, np.arange(count) - latest),
            "requests": steps.requests,
            "ratio": steps.predicted_us / np.diff(steps.ready_us, prepend=np.nan),
        }
    )[steps.is_decode & steps.busy]
    behind = pd.cut(frame["behind"], list(_STEPS), right=False)
    requests = pd.cut(frame["requests"], list(_REQUESTS), right=False)
    table = frame.groupby([requests, behind], observed=True)["ratio"].agg(["size", "median"])
    # When the first one's tokens are seen depends on the launch of the prefill ahead.
    first = table.index.get_level_values(1) == behind.cat.categories[0]
    return table[(table["size"] >= _FEWEST) & ~first]


@click.command()
@click.argument("model")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--db", default="builtin:h200", show_default=True)
@click.option("--backend")
@click.option("--device-clock", is_flag=True, help="As of dooly simulate.")
def main(
    model: str, files: tuple[Path, ...], db: str, backend: str | None, device_clock: bool
) -> None:
    """Compare the steps around prefills of the recorded FILES with predictions for MODEL."""
    for file in files:
        run = load_run(file)
        filters = {"backend": backend, "quantization": quantization_of(run)}
        steps = Timed.of(run, from_database(db, model, None, filters), device_clock)
        click.echo(f"{file.parent.name}/{file.name}: {run.about.get('workload')}\n")
        click.echo(of_prefills(steps).round(1).to_string() + "\n")
        click.echo(of_decodes(steps).round(3).to_string() + "\n")


if __name__ == "__main__":
    main()
