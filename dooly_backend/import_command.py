"""`dooly import`: other profilers' tables into a latency database."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dooly_backend import console

if TYPE_CHECKING:
    from dooly_backend.importers import Imported


@click.command(name="import", context_settings=console.CONTEXT_SETTINGS)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "format_name",
    metavar="FORMAT",
    required=True,
    help="Whose tables they are: vidur or llmservingsim.",
)
@console.database_option
@click.option("--model", metavar="NAME", help="Only this model. [default: all]")
@click.option("--device", metavar="NAME", help="Only this device, as its folder is called.")
@click.option(
    "--network",
    "networks",
    metavar="NAME",
    multiple=True,
    help="The folder of collectives, where Vidur's tables have several for a device.",
)
@click.option(
    "--config",
    metavar="MODEL",
    help="The model's Hugging Face config (a folder or file), where its name is not known.",
)
@console.json_option
def import_(
    folder: Path,
    format_name: str,
    db: str,
    model: str | None,
    device: str | None,
    networks: tuple[str, ...],
    config: str | None,
    as_json: bool,
) -> None:
    """Read old profiles into a latency database.

    DIR is a checkout of the simulator, its folder of profiles, or an export of
    Dooly. What is read keeps an environment of its own, whose engine is the
    simulator: it never mixes with measurements, and can be compared with them,
    predicted from and exported again.

    \b
    Examples:
      dooly import --from vidur ./vidur --device a100 --network a100_pairwise_nvlink
      dooly import --from llmservingsim ./LLMServingSim --model Qwen3-32B --db old.db
    """
    from dooly_backend.config import load_model
    from dooly_backend.database import Database
    from dooly_backend.importers import Wanted, get_importer, store

    importer = get_importer(format_name)
    wanted = Wanted(model, device, networks, load_model(config) if config else None)
    profiles = importer.read(folder, wanted)  # all of it, before the database is touched
    with Database.open(db, create=True) as database:
        result = store(database, profiles)
    if as_json:
        console.print_json(_as_json(result))
        return
    for profile in result.profiles:
        configuration = profile.configuration
        click.echo(
            f"{configuration.model} tp{configuration.tensor_parallel} on "
            f"{profile.environment.device} ({configuration.backend})"
        )
    for note in dict.fromkeys(note for profile in result.profiles for note in profile.notes):
        click.echo(f"note: {note}", err=True)
    click.echo(f"{result.signatures} signatures, {result.points} new points in {db}")


def _as_json(result: Imported) -> dict[str, Any]:
    return {
        "configurations": [
            {
                "model": profile.configuration.model,
                "tensor_parallel": profile.configuration.tensor_parallel,
                "backend": profile.configuration.backend,
                "device": profile.environment.device,
                "environment": profile.environment.digest,
                "notes": list(profile.notes),
            }
            for profile in result.profiles
        ],
        "signatures": result.signatures,
        "points": result.points,
    }
