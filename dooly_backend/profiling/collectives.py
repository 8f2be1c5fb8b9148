"""Collectives, measured between real processes of one host (paper section 6).

A collective is a signature like any other: its canonical text names the
operation, the library, the topology, the degree, the number format, and how
many elements a token (or a request) has. So two models of one width share it,
predictions and exports find it in the call graph, and the points are token
counts. The view `collective` of the database tells them by bytes.

Ranks leave a barrier at different times, and who comes early waits. A sample is
that of the rank that came last, which is the shortest; of a gather it is the
root's, and of a send and receive half a round trip, of the slowest pair.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dooly_backend.database.records import Measurement, Signature, canonical_json
from dooly_backend.errors import EngineError
from dooly_backend.profiling.measure import Regime, spread
from dooly_backend.workload import PointKind, WorkloadPoint

OPERATIONS = ("all_reduce", "all_gather", "gather", "reduce_scatter", "broadcast", "send_recv")

_TIMEOUT_S = 120


@dataclass(frozen=True)
class Collective:
    """One collective between `degree` ranks of one host.

    `elements` is how many numbers a rank puts in: per token, per request, or in
    all, as `kind` says.
    """

    operation: str
    degree: int
    dtype: str  # "bfloat16"
    elements: int
    kind: PointKind = "tokens"
    backend: str = "gloo"  # "gloo" or "nccl"
    nodes: int = 1

    @property
    def topology(self) -> str:
        """Nodes and ranks on each: ``1x4``."""
        return f"{self.nodes}x{self.degree // self.nodes}"

    @property
    def signature(self) -> Signature:
        canonical = {
            "collective": self.operation,
            "backend": self.backend,
            "topology": self.topology,
            "degree": self.degree,
            "dtype": self.dtype,
            "elements": self.elements,
            "element_bytes": element_bytes(self.dtype),
            "per": self.kind,
        }
        return Signature(
            f"dooly::{self.operation}", "operation", self.kind, canonical_json(canonical)
        )

    def elements_at(self, point: WorkloadPoint) -> int:
        """Numbers that a rank puts in at `point`."""
        return self.elements * (point.num_tokens or point.num_reqs or 1)


def element_bytes(dtype: str) -> int:
    """Bytes of one number of this format."""
    import torch

    return int(getattr(torch, dtype).itemsize)


def available_degree(backend: str) -> int:
    """The largest degree that can be measured on this host: its GPUs; 4 processes on a CPU."""
    import torch

    return torch.cuda.device_count() if backend == "nccl" else 4


def measure_collectives(
    wanted: Mapping[Collective, Sequence[WorkloadPoint]], regime: Regime | None = None
) -> dict[Collective, list[Measurement]]:
    """Time every point of every collective between as many processes as its degree says.

    Raises EngineError, in one line, when a process fails.
    """
    regime = regime or Regime()
    found: dict[Collective, list[Measurement]] = {}
    groups = dict.fromkeys((c.degree, c.backend) for c in wanted)
    for degree, backend in groups:
        work = [
            (collective, point)
            for collective, points in wanted.items()
            if (collective.degree, collective.backend) == (degree, backend)
            for point in points
        ]
        items = [(c.operation, c.dtype, c.elements_at(point)) for c, point in work]
        samples = _run(degree, backend, items, regime)
        for (collective, point), of_point in zip(work, samples, strict=True):
            unstable = spread(of_point) > regime.spread
            measurement = Measurement(point, tuple(of_point), unstable)
            found.setdefault(collective, []).append(measurement)
    return found


def _run(
    degree: int, backend: str, items: Sequence[tuple[str, str, int]], regime: Regime
) -> list[list[float]]:
    """Samples of each item in microseconds, from processes that live for this call."""
    with tempfile.TemporaryDirectory(prefix="dooly-collectives-") as folder:
        request = {
            "degree": degree,
            "backend": backend,
            "store": str(Path(folder) / "store"),
            "timeout_s": _TIMEOUT_S,
            "items": items,
            "repeats": regime.repeats,
            "warmups": max(regime.warmups, 2),  # the first one connects
        }
        processes = [_start(request | {"rank": rank}) for rank in range(degree)]
        try:
            answers = [_answer(process) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    return [
        _combined(operation, [answer[index] for answer in answers])
        for index, (operation, _, _) in enumerate(items)
    ]


def _start(request: dict) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if request["backend"] == "gloo":
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # one host: its name need not resolve
    process = subprocess.Popen(
        [sys.executable, "-m", "dooly_backend.profiling.collective_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(request))
    process.stdin.close()
    process.stdin = None
    return process


def _answer(process: subprocess.Popen[str]) -> list[list[float]]:
    output, errors = process.communicate(timeout=5 * _TIMEOUT_S)
    if process.returncode or not output.strip():
        last = (errors.strip().splitlines() or ["no answer"])[-1]
        raise EngineError(f"a process that measures collectives failed: {last}")
    return json.loads(output.splitlines()[-1])


def _combined(operation: str, by_rank: Iterable[Sequence[float]]) -> list[float]:
    """One time per sample of all ranks' (module docs)."""
    turns = list(zip(*by_rank, strict=True))
    if operation == "gather":
        return [turn[0] for turn in turns]
    if operation == "send_recv":
        return [max(turn[0::2]) for turn in turns]
    return [min(turn) for turn in turns]
