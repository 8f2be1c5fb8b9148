"""Exports latency models as the profiling data of the Vidur simulator.

The result is a folder with Vidur's tables in the layout of its repository or
of its PyPI release, a launcher that needs nothing but Vidur, and a manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dooly_backend.exporters import Manifest, new_folder, write_manifest
from dooly_backend.regression.latency import LatencyModel

from ..common import belonging_together
from .costs import StepCosts
from .launcher import SCRATCH, enough_blocks, write_launcher
from .layout import write_tables
from .model import Device, Dimensions, device_of, dimensions_of, kv_blocks
from .options import HELP, VidurOptions
from .ranges import Ranges, choose_ranges
from .report import build_manifest
from .tables import build_tables


class VidurExporter:
    """Latency models of one model, one per degree of tensor parallelism, for Vidur."""

    name = "vidur"
    description = "Vidur: microsoft/vidur (--layout repo) or vidur 0.0.26 (--layout pypi)"
    options: Mapping[str, str] = HELP

    def export(
        self, models: Sequence[LatencyModel], out: Path, options: Mapping[str, Any]
    ) -> Manifest:
        """Write the tables, the launcher and the manifest into `out`. Raises InputError."""
        chosen = VidurOptions.parse(options)
        # One file holds one of everything: Vidur blends rows that differ in nothing it looks at.
        all_costs = [StepCosts(model) for model in belonging_together(models, "Vidur")]
        costs = all_costs[0]
        configuration = costs.model.configuration
        degree = all_costs[-1].model.configuration.tensor_parallel
        dimensions = dimensions_of(configuration, costs.model.occurrences)
        device = device_of(costs.model.environment, chosen.hardware, degree)
        ranges = choose_ranges(costs, chosen, chosen.layout)
        blocks = _blocks(costs, dimensions, device, ranges, chosen.num_blocks)
        tables = build_tables(all_costs, dimensions, ranges, chosen.layout)
        manifest = build_manifest(
            all_costs, dimensions, device, ranges, chosen.layout, tables, blocks
        )
        with new_folder(out) as folder:
            placement = write_tables(folder, tables, dimensions, device, chosen.layout)
            write_launcher(
                folder, costs, dimensions, device, ranges, chosen.layout, placement, blocks[0]
            )
            return write_manifest(folder, manifest, SCRATCH)


#: For `dooly_backend.exporters`, where nothing is installed.
EXPORTERS = {VidurExporter.name: VidurExporter}


def _importer() -> Any:
    from .importer import VidurImporter  # pandas takes a second to import

    return VidurImporter()


IMPORTERS = {"vidur": _importer}


def _blocks(
    costs: StepCosts,
    dimensions: Dimensions,
    device: Device,
    ranges: Ranges,
    given: int | None,
) -> tuple[int, str]:
    """KV-cache blocks, and where the figure is from."""
    if given is not None:
        return given, "given"
    blocks, source = kv_blocks(costs.model.configuration, dimensions, device)
    if blocks is not None:
        return blocks, source
    enough = enough_blocks(ranges, costs.model.configuration.block_size)
    return enough, "enough for the largest batch: the device's memory is not known"
