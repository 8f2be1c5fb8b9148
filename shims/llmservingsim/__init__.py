"""Exports latency models as the profiles of the LLMServingSim simulator.

The result is a folder laid out as the simulator's repository: tables by degree
of tensor parallelism, the model's config, a cluster for each degree, and a
manifest. Copied over a checkout, the simulator finds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dooly_backend.exporters import Manifest, new_folder, write_manifest
from dooly_backend.regression.latency import LatencyModel

from ..common import belonging_together
from ..times import axes_of
from .architecture import architecture_of
from .costs import LayerCosts
from .grids import choose_grids
from .layout import hardware_of, place_of, write_files
from .options import HELP, LLMServingSimOptions
from .report import build_manifest
from .tables import build_tables


class LLMServingSimExporter:
    """Latency models of one model, one per degree of tensor parallelism, for LLMServingSim."""

    name = "llmservingsim"
    description = "LLMServingSim: casys-kaist/LLMServingSim (layout of 2026)"
    options: Mapping[str, str] = HELP

    def export(
        self, models: Sequence[LatencyModel], out: Path, options: Mapping[str, Any]
    ) -> Manifest:
        """Write the tables, the configs and the manifest into `out`. Raises InputError."""
        chosen = LLMServingSimOptions.parse(options)
        ordered = belonging_together(models, "LLMServingSim")
        first = ordered[0]
        architecture = architecture_of(first.configuration, first.occurrences)
        all_costs = [LayerCosts(model, architecture) for model in ordered]
        place = place_of(first.configuration, first.environment, chosen)
        hardware = hardware_of(first.environment, chosen.hardware)
        axes = axes_of(ordered)
        grids = choose_grids(axes, chosen)
        tables = build_tables(all_costs, grids, axes)
        manifest = build_manifest(all_costs, tables, grids, axes, place, hardware)
        with new_folder(out) as folder:
            write_files(folder, place, all_costs, tables, grids, hardware)
            return write_manifest(folder, manifest)


#: For `dooly_backend.exporters`, where nothing is installed.
EXPORTERS = {LLMServingSimExporter.name: LLMServingSimExporter}


def _importer() -> Any:
    from .importer import LLMServingSimImporter  # pandas takes a second to import

    return LLMServingSimImporter()


IMPORTERS = {"llmservingsim": _importer}
