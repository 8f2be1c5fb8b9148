"""How the clock of a database's device gives way: what is fitted, and how far that is off.

    python -m integration.gpu.clock h200.db

The steps come from `integration.gpu.step_costs run --clock`. One line a
configuration, then the heavy steps by pattern: what they took of their time in a
stream, at the median, and what the fit says.
"""

from __future__ import annotations

import statistics
from itertools import groupby, product
from pathlib import Path

import click

from dooly_backend.database import Database
from dooly_backend.database.records import ClockStep
from dooly_backend.regression.clock import ClockFit, explained, fit_clock


@click.command()
@click.argument("db")
def main(db: str) -> None:
    """Fit the steps in DB."""
    with Database.open(Path(db), read_only=True) as database:
        configurations, environments = database.configurations(), database.environments()
        for i, environment in product(configurations, environments):
            if steps := database.clock_steps(i, environment):
                each = configurations[i]
                click.echo(f"{each.model}, {each.backend}, {each.execution_mode}")
                show(steps, fit_clock(steps))


def show(steps: list[ClockStep], found: ClockFit) -> None:
    response = found.response
    click.echo(
        f"  cool {response.cool:.3f}, slope {response.slope:.3f}, tau {response.tau_s:.3f} s, "
        f"warm {response.warm_tokens:.0f} tokens, light {response.light:.3f} + "
        f"{response.light_token:.5f} a token; mean error {found.mean_error:.2%} of "
        f"{found.steps} steps"
    )
    rows = explained(steps, response)
    for (layers, pattern), same in groupby(rows, key=lambda row: row[:2]):
        shares = [(measured, said) for *_, measured, said in same]
        measured, said = (statistics.median(column) for column in zip(*shares, strict=True))
        click.echo(
            f"  {layers:3d} layers, {pattern:28s} {len(shares):3d} steps: {measured:.3f} of a "
            f"stream's, said {said:.3f}"
        )


if __name__ == "__main__":
    main()
