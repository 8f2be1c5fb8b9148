"""The kernels of decode steps: those of live serving beside those of injected steps.

    python -m integration.gpu.kernels MODEL --backend FLASH_ATTN --requests 8 --context 2000

Both engines run at vLLM's defaults (compiled, CUDA graphs, asynchronous
scheduling). Per step and kernel name: how often it runs and how long, from
torch's profiler, and how long the device idles between kernels. Where both
agree, what injected steps take is what serving takes.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import click

from dooly_backend.config import RunOptions, load_model

_OUTPUT = 80  # tokens that every request gets
_SAMPLER = "ArgMaxOps"  # the kernel that ends a step
_SKIPPED = 30  # steps, until all requests decode
_SEATS, _TOKENS = 256, 8192


@click.command()
@click.argument("model")
@click.option("--backend", default="FLASH_ATTN", show_default=True)
@click.option("--requests", default=8, show_default=True)
@click.option("--context", default=2000, show_default=True)
@click.option("--only", type=click.Choice(["live", "injected"]), help="One of the two.")
def main(model: str, backend: str, requests: int, context: int, only: str | None) -> None:
    """Print the kernels of a decode step of MODEL."""
    if only is None:
        for which in ("live", "injected"):  # an engine leaves its memory only with its process
            subprocess.run(
                [sys.executable, "-m", "integration.gpu.kernels", *sys.argv[1:], "--only", which],
                check=True,
            )
        return
    print(f"== {only}")
    run = serve if only == "live" else inject
    run(model, backend, requests, context)


def serve(model: str, backend: str, requests: int, context: int) -> None:
    """Requests of equal length, all at once."""
    from dooly_backend.engines.serving import ServingOptions, boot_server
    from dooly_backend.simulation import live
    from dooly_backend.simulation.records import ServingRequest

    options = ServingOptions(
        model=load_model(model),
        backend=backend,
        max_num_seqs=_SEATS,
        max_num_batched_tokens=_TOKENS,
    )
    with boot_server(options) as server:

        def serving(first: int) -> Any:
            workload = [ServingRequest(first + i, 0.0, context, _OUTPUT) for i in range(requests)]
            return live.serve(server, workload)

        serving(0)
        steps = serving(1000).steps[_SKIPPED:-_SKIPPED]
        interval = statistics.median((b.end_s - a.end_s) * 1e6 for a, b in pairwise(steps))
        print(f"interval without profiler: {interval:.0f} us")
        show(lambda: serving(2000), slice(_SKIPPED, -_SKIPPED // 3))


def inject(model: str, backend: str, requests: int, context: int) -> None:
    """The same batch, injected."""
    from dooly_backend.engines import boot
    from dooly_backend.workload import Batch

    options = RunOptions(
        model=load_model(model),
        backend=backend,
        layers=load_model(model).num_layers,
        execution_mode="full_graph",
        compiled=True,
        max_num_seqs=_SEATS,
        max_num_batched_tokens=_TOKENS,
    )
    batch = Batch.decode(requests, context + _OUTPUT // 2)
    with boot(options) as engine:
        for _ in range(2):
            steps = engine.pipelined_steps(batch, 40)
        print(
            f"interval without profiler: {statistics.median(s.interval_us for s in steps):.0f} us"
        )
        show(lambda: engine.pipelined_steps(batch, 40), slice(10, -1))


def show(run: Callable[[], Any], which: slice, most: int = 20) -> None:
    """Profile `run` and print what a step of `which` consists of."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
    events = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    )
    marks = [end for _, end, name in events if _SAMPLER in name][which]
    steps = len(marks) - 1
    kernels: dict[str, list[float]] = defaultdict(list)
    idle, last = 0.0, marks[0]
    for start, end, name in events:
        if marks[0] < start <= marks[-1]:
            kernels[name].append(end - start)
            idle += max(0.0, start - last)
            last = max(last, end)
    total = sum(map(sum, kernels.values())) / steps
    span = (marks[-1] - marks[0]) / steps
    count = sum(map(len, kernels.values())) / steps
    print(f"{span:.0f} us a step: {count:.0f} kernels, {total:.0f} us; idle {idle / steps:.0f} us")
    for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:most]:
        print(f"{sum(times) / steps:9.1f} us {len(times) / steps:6.1f}x  {name[:90]}")


if __name__ == "__main__":
    main()
