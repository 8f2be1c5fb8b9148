"""The command line: each command parses, calls one function, and prints."""

from __future__ import annotations

import click

from dooly_backend import __version__, console
from dooly_backend.db_commands import db
from dooly_backend.engine_commands import plan, profile, trace
from dooly_backend.export_command import export
from dooly_backend.fit_command import fit
from dooly_backend.import_command import import_
from dooly_backend.simulate_command import simulate
from dooly_backend.validate_command import validate


@click.group(context_settings=console.CONTEXT_SETTINGS)
@click.version_option(__version__, prog_name="dooly")
def cli() -> None:
    """Profile LLM inference once, and feed any simulator.

    Dooly runs a model in a real serving engine for one step, times every
    operation that its latency database does not know yet, and writes the
    files that simulators read.

    \b
    Examples:
      dooly profile smollm-135m
      dooly db info
      dooly export --to vidur --db latency.db -o vidur-profiles
    """


# -- models -------------------------------------------------------------------


@cli.command()
@console.json_option
def models(as_json: bool) -> None:
    """List the models that are known by name.

    Any of them can be given as MODEL to the other commands, in any case, and
    without the organisation where only one has that name. So can a folder with
    a Hugging Face config.json, or such a file.

    \b
    Examples:
      dooly models
      dooly models --json
    """
    from dooly_backend.config import known_models, load_model

    known = [load_model(name) for name in known_models()]
    if as_json:
        listed = [
            {"name": m.name, "architecture": m.architecture, "layers": m.num_layers} for m in known
        ]
        console.print_json({"models": listed})
        return
    width = max(len(model.name) for model in known)
    for model in known:
        click.echo(f"{model.name:{width}}  {model.num_layers:3} layers  {model.architecture}")


# -- entry points -------------------------------------------------------------

for command in (db, trace, plan, profile, export, fit, import_, simulate, validate):
    cli.add_command(command)


def main() -> None:
    """`dooly`."""
    console.run(cli, "dooly")


def export_main() -> None:
    """`dooly-export`."""
    console.run(export, "dooly-export")


if __name__ == "__main__":
    main()
