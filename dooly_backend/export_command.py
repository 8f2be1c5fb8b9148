"""`dooly export`, which scripts know as `dooly-export`.

Its options are those below and those of the exporters: each names its own, with
a line of help.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dooly_backend import console
from dooly_backend.errors import CheckFailed, InputError

if TYPE_CHECKING:
    from dooly_backend.database import Database
    from dooly_backend.export_tables import ExportTables
    from dooly_backend.exporters import Exporter
    from dooly_backend.regression.latency import LatencyModel

logger = logging.getLogger(__name__)

_FORMAT = "dooly.export.format"  # where a context keeps what --to names


class ExportCommand(click.Command):
    """A command that also takes the options of the exporter that ``--to`` names.

    Without ``--to`` those of all exporters, so that ``--help`` shows them.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_FORMAT] = _named_format(args)
        return super().parse_args(ctx, args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        params = super().get_params(ctx)
        taken = {name for parameter in params for name in (parameter.name, *parameter.opts)}
        own = [option for option in _exporter_options(ctx.meta.get(_FORMAT)) if option.name]
        own = [option for option in own if taken.isdisjoint((option.name, *option.opts))]
        help_option = self.get_help_option(ctx)
        before_help = [parameter for parameter in params if parameter is not help_option]
        return [*before_help, *own, *([help_option] if help_option in params else [])]


def _named_format(args: Sequence[str]) -> str | None:
    """The value of ``--to``, before the options are known that parsing needs."""
    for position, argument in enumerate(args):
        if argument == "--to" and position + 1 < len(args):
            return args[position + 1]
        if argument.startswith("--to="):
            return argument.removeprefix("--to=")
    return None


def _exporter_options(name: str | None) -> list[click.Option]:
    from dooly_backend.exporters import exporter_names, get_exporter

    options: dict[str, click.Option] = {}
    for exporter in [get_exporter(name)] if name else _usable(exporter_names(), get_exporter):
        for key, text in exporter.options.items():
            prefix = "" if name else f"[{exporter.name}] "
            flag = "--" + key.replace("_", "-")
            options.setdefault(key, click.Option([flag, key], metavar="VALUE", help=prefix + text))
    return list(options.values())


def _usable(names: Sequence[str], load: Callable[[str], Exporter]) -> Iterator[Exporter]:
    """Those that load: a broken exporter of another package must not hide the others."""
    for name in names:
        try:
            yield load(name)
        except InputError as error:
            logger.warning("%s", error)


def _list_formats(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    from dooly_backend.exporters import exporter_names, get_exporter

    for exporter in _usable(exporter_names(), get_exporter):
        click.echo(f"{exporter.name}  {exporter.description}")
    ctx.exit()


@click.command(cls=ExportCommand, context_settings=console.CONTEXT_SETTINGS)
@click.option(
    "--to", "format_name", metavar="FORMAT", required=True, help="What to write; see --formats."
)
@console.database_option
@console.model_option
@console.environment_option
@click.option(
    "--tp",
    "degrees",
    type=click.IntRange(min=1),
    multiple=True,
    help="Tensor-parallel size; may be repeated. [default: all that are measured]",
)
@click.option("--backend", metavar="NAME", help="The attention backend, where there are several.")
@console.precision_options
@click.option(
    "--bundle",
    metavar="FILE",
    help="Predict what was not measured with the regressors of this bundle (`dooly fit`). "
    "[default: straight lines between the measured points]",
)
@console.output_option("The folder to write; a new or empty one, or an earlier export.")
@click.option(
    "--check",
    "earlier",
    metavar="OLD_DIR",
    type=click.Path(path_type=Path),
    help="Compare with an earlier export: exit code 1 where a time moved. Needs no -o.",
)
@click.option(
    "--threshold",
    type=click.FloatRange(min=0),
    metavar="PERCENT",
    default=5.0,
    show_default=True,
    help="The largest change that --check lets pass.",
)
@console.json_option
@click.option(
    "--formats",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_formats,
    help="List the formats and exit.",
)
def export(
    format_name: str,
    db: str,
    model: str | None,
    environment: str | None,
    degrees: tuple[int, ...],
    backend: str | None,
    kv_cache_dtype: str | None,
    quantization: str | None,
    bundle: str | None,
    out: Path | None,
    earlier: Path | None,
    threshold: float,
    as_json: bool,
    **options: str | None,
) -> None:
    """Write the files that a simulator reads.

    The folder holds the simulator's tables, the command that runs it, and a
    manifest: what was written, how well it adds up, and what the format cannot
    say. Options marked with a [FORMAT] belong to that one.

    \b
    Examples:
      dooly export --to vidur -o vidur-profiles
      dooly export --to vidur --model Qwen/Qwen3-8B --layout pypi -o vidur-profiles
      dooly export --to vidur --check vidur-profiles --threshold 10
      dooly export --formats
    """
    from dooly_backend.database import Database
    from dooly_backend.exporters import get_exporter

    if out is None and earlier is None:
        context = click.get_current_context()
        parameter = next(p for p in context.command.params if p.name == "out")
        raise click.MissingParameter(ctx=context, param=parameter)
    exporter = get_exporter(format_name)
    chosen = _chosen(options)
    old = _earlier_export(earlier, format_name, out) if earlier else None
    with Database.open(db, read_only=True) as database:
        filters = {
            "backend": backend,
            "kv_cache_dtype": kv_cache_dtype,
            "quantization": quantization,
        }
        models = load_models(database, model, environment, degrees, **filters)
    if bundle is not None:
        from dooly_backend.regression.bundle import load_bundle
        from dooly_backend.regression.refined import refined

        fitted = load_bundle(bundle)
        models = [refined(each, fitted) for each in models]
    if earlier is not None and old is not None:
        _check(exporter, models, chosen, old, earlier, out, threshold, as_json)
        return
    assert out is not None  # else there is an earlier one to check
    manifest = exporter.export(models, out, chosen)
    if as_json:
        console.print_json({**manifest, "out": str(out)})
        return
    click.echo(f"wrote {len(manifest['files'])} files to {out}")
    click.echo(f"run: cd {out} && {manifest['command']}")


def _earlier_export(earlier: Path, format_name: str, out: Path | None) -> ExportTables:
    """What --check compares with, read before anything is written. Raises InputError."""
    from dooly_backend.export_tables import read_export

    if not earlier.is_dir():
        raise InputError(f"there is no earlier export {earlier}: write one with -o first")
    if out is not None and out.resolve() == earlier.resolve():
        raise InputError(f"{out} would replace what it is checked against: give another -o")
    old = read_export(earlier)
    if old.manifest.get("format") != format_name:
        raise InputError(
            f"{earlier} is of format {old.manifest.get('format')!r}, not {format_name!r}"
        )
    return old


def _check(
    exporter: Exporter,
    models: Sequence[LatencyModel],
    options: Mapping[str, Any],
    old: ExportTables,
    earlier: Path,
    out: Path | None,
    threshold: float,
    as_json: bool,
) -> None:
    """Export, compare, print. Raises CheckFailed where something moved."""
    from dooly_backend.export_check import check_comparable, compare
    from dooly_backend.export_tables import read_export

    with tempfile.TemporaryDirectory(prefix="dooly-export-") as scratch:
        folder = out or Path(scratch) / "export"
        check_comparable(old.manifest, exporter.export(models, folder, options), earlier)
        change = compare(old, read_export(folder), threshold)
    if as_json:
        console.print_json({**change.as_json(), "out": str(out) if out else None})
    else:
        console.show(change)
    if not change.ok:
        moved = ", ".join(item.operation for item in change.moved)
        raise CheckFailed(f"beyond {threshold:g}% and the noise of the tables: {moved}")


def _chosen(options: Mapping[str, str | None]) -> dict[str, Any]:
    """The exporter's options that were given; a device by its description."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if "hardware" in given:
        from dooly_backend.config import load_hardware

        given["hardware"] = load_hardware(given["hardware"]).model_dump()
    return given


def load_models(
    database: Database,
    model: str | None,
    environment: str | None,
    degrees: Sequence[int] = (),
    **filters: Any,
) -> list[LatencyModel]:
    """One latency model for each tensor-parallel degree of the configuration that is meant.

    Without `degrees` all that are measured; one that is not measured to the
    end is left out with a warning. Raises InputError when none is left.
    """
    from dooly_backend.regression.latency import LatencyModel

    def load(degree: int) -> LatencyModel:
        return LatencyModel.load(database, model, environment, tensor_parallel=degree, **filters)

    if degrees:
        return [load(degree) for degree in dict.fromkeys(degrees)]
    known = {
        configuration.tensor_parallel
        for configuration in database.configurations().values()
        if model is None or _is_called(configuration.model, model)
    }
    if len(known) < 2:  # also for a configuration by its digest
        return [LatencyModel.load(database, model, environment, **filters)]
    models: list[LatencyModel] = []
    failures: dict[int, InputError] = {}
    for degree in sorted(known):
        try:
            models.append(load(degree))
        except InputError as error:
            failures[degree] = error
    if not models:
        raise next(iter(failures.values()))
    for degree, reason in failures.items():
        logger.warning("tensor-parallel size %d is left out: %s", degree, reason)
    return models


def _is_called(name: str, text: str) -> bool:
    return text in (name, name.rpartition("/")[2])
