"""How many points a sweep needs for its error: the adaptive one against Vidur's own grid.

    python -m integration.adaptive.run [MODEL] [--what linear|attention] [-o FOLDER]
    python -m integration.adaptive.run --databases FOLDER --judge -o FOLDER    # no engine

Both measure the same signatures of one model in one run, within the same caps,
and in the same run random places are measured that neither of them knows: all
three in turns, a captured step each. What `dooly fit` chooses is fitted to
what each sweep measured, and to thinned Vidur grids and the beginnings of the
adaptive sweep. Writes held_out.csv, curves.csv and curves.html (curves.png,
too, where plotly can draw one), each with the kind ahead of its name, and
prints a table. Caps are those of a CPU
(1,024 tokens, 32 requests) or, on a GPU, Vidur's defaults.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dooly_backend.config import RunOptions, load_model
from dooly_backend.errors import DoolyError
from integration.adaptive.held_out import Caps
from integration.adaptive.judging import curves, described, judge, show
from integration.adaptive.plot import draw

CPU_CAPS = Caps(tokens=1024, length=1024, batch=32)
GPU_CAPS = Caps(tokens=4096, length=4096, batch=128)


@click.command()
@click.argument("model", default="HuggingFaceTB/SmolLM-135M")
@click.option("--layers", default=2, show_default=True, type=click.IntRange(1))
@click.option("--backend", help="The attention backend.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1))
@click.option("--dtype", help="As of `dooly profile`; processors without AVX-512 are slow in bf16.")
@click.option("--what", type=click.Choice(["linear", "attention", "both"]), default="both")
@click.option("--places", default=60, show_default=True, help="Held-out places of a shape.")
@click.option("--tokens", type=int, help="Cap of the tokens of a step and of a request.")
@click.option("--batch", type=int, help="Cap of the requests of a step.")
@click.option("--databases", type=click.Path(path_type=Path), help="Keep the measurements here.")
@click.option("--judge", "only_judge", is_flag=True, help="Judge what --databases holds.")
@click.option("--regressor", "only", multiple=True, help="Choose among these only.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Folder for the results.")
def main(
    model: str, layers: int, backend: str | None, threads: int, dtype: str | None, what: str,
    places: int, tokens: int | None, batch: int | None, databases: Path | None, only_judge: bool,
    only: tuple[str, ...], out: Path | None,
) -> None:  # fmt: skip
    """Compare the adaptive sweep with Vidur's grid on MODEL."""
    kinds = ["linear", "attention"] if what == "both" else [what]
    with tempfile.TemporaryDirectory() if databases is None else nullcontext(databases) as folder:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            if not only_judge:
                how = {"layers": layers, "backend": backend, "threads": threads, "dtype": dtype}
                _measure(model, how, (tokens, batch), kinds, places, folder)
            for kind in kinds:
                _judge(kind, folder, only, out)
        except DoolyError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(error.exit_code)


def _measure(
    model: str, how: Mapping[str, Any], most: tuple[int | None, int | None], kinds: list[str],
    places: int, folder: Path,
) -> None:  # fmt: skip
    from dooly_backend.engines import boot
    from dooly_backend.engines.vllm_boot import on_gpu
    from integration.adaptive.measuring import benches, measure

    default = GPU_CAPS if on_gpu() else CPU_CAPS
    tokens = most[0] or default.tokens
    caps = Caps(tokens, tokens, most[1] or default.batch)
    options = RunOptions(
        model=load_model(model), **{name: value for name, value in how.items() if value},
        max_num_seqs=max(caps.batch, 32), max_num_batched_tokens=max(caps.tokens, 1024),
    )  # fmt: skip
    with boot(options) as engine:
        for kind, bench in benches(engine, caps, kinds).items():
            measure(bench, kind, places, folder)


def _judge(kind: str, folder: Path, only: tuple[str, ...], out: Path | None) -> None:
    table = judge(kind, folder, only)
    curve, title = curves(table), described(kind, folder)
    Console(width=110).print(show(curve, title))
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    table[table["part"] == "all"].round(4).to_csv(out / f"{kind}-held-out.csv", index=False)
    curve.round(4).to_csv(out / f"{kind}-curves.csv", index=False)
    draw(curve, title, out / f"{kind}.html")


if __name__ == "__main__":
    main()
