"""Serve a workload on live vLLM with dummy weights and write down every step.

    python -m integration.live_vllm.run meta-llama/Llama-3.1-8B \
        --workload paper-small:requests=500,rate=8 -o log.json.xz

All that is not said is vLLM's own default for a server. The log holds when
every step began, was launched and ended, what it computed, and when every
token came; `dooly_backend.simulation.run_file.load_run` reads it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import click

REHEARSE = "Runs of each workload ahead of those that are kept: kernels are compiled in them."


@click.command()
@click.argument("model")
@click.option("--workload", "workloads", required=True, multiple=True, help="May be given again.")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path))
@click.option("--layers", type=int, help="As many of the model's layers; else all.")
@click.option("--backend", help="Attention backend.")
@click.option("--tp", default=1, show_default=True)
@click.option("--dtype")
@click.option("--kv-cache-dtype")
@click.option("--quantization", help="Of the weights, by the engine: fp8.")
@click.option("--block-size", type=int)
@click.option("--eager", is_flag=True, help="No compilation and no CUDA graphs.")
@click.option("--sync/--async", "sync", default=None, help="Scheduling; else vLLM's default.")
@click.option("--prefix-caching/--no-prefix-caching", default=None)
@click.option("--chunked-prefill/--no-chunked-prefill", default=None)
@click.option("--max-num-seqs", type=int)
@click.option("--max-num-batched-tokens", type=int)
@click.option("--max-model-len", type=int)
@click.option("--num-gpu-blocks", type=int)
@click.option("--kv-cache-gib", type=float)
@click.option("--threads", type=int, help="Of a CPU engine.")
@click.option("--by-step", is_flag=True, help="arrival_s counts steps: a run without a clock.")
@click.option("--warm-up/--no-warm-up", default=True, show_default=True)
@click.option("--warm-up-sizes", is_flag=True, help="With prompts of all sizes, too.")
@click.option("--rehearse", default=0, show_default=True, help=REHEARSE)
@click.option("--hold", is_flag=True, help="The launching thread on the quickest processor.")
@click.option("--repeats", default=1, show_default=True, help="Runs of each workload.")
@click.option("--wait", is_flag=True, help="Start the engine, then wait for a line on stdin.")
def main(
    model: str,
    workloads: tuple[str, ...],
    out: Path,
    sync: bool | None,
    by_step: bool,
    warm_up: bool,
    warm_up_sizes: bool,
    rehearse: int,
    hold: bool,
    repeats: int,
    wait: bool,
    tp: int,
    prefix_caching: bool | None,
    chunked_prefill: bool | None,
    kv_cache_gib: float | None,
    **settings: Any,
) -> None:
    """Serve WORKLOADs on MODEL; several runs of one engine get numbered files."""
    from dooly_backend.config import load_model
    from dooly_backend.engines.serving import ServingOptions, boot_server
    from dooly_backend.simulation import live
    from dooly_backend.simulation.run_file import save_run
    from dooly_backend.simulation.workload import load_workload
    from integration.gpu.processors import held_if
    from integration.gpu.workers import ready

    options = ServingOptions(
        model=load_model(model),
        tensor_parallel=tp,
        async_scheduling=None if sync is None else not sync,
        enable_prefix_caching=prefix_caching,
        enable_chunked_prefill=chunked_prefill,
        kv_cache_gib=kv_cache_gib,
        **settings,
    )
    described = [load_workload(text) for text in workloads]
    out.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with boot_server(options) as server:
        click.echo(f"booted in {time.monotonic() - began:.0f} s: {server.limits}", err=True)
        if wait:
            ready()
        if warm_up or warm_up_sizes or rehearse:
            began = time.monotonic()
            if warm_up_sizes:
                live.warm_up_sizes(server)
            for workload in described if warm_up else ():
                live.warm_up(server, workload.build())
            for workload in described * rehearse:
                live.serve(
                    server, workload.build(), by_step=by_step, concurrency=workload.concurrency
                )
            click.echo(f"warmed up in {time.monotonic() - began:.0f} s", err=True)
        runs = [(w, text) for w, text in zip(described, workloads, strict=True)] * repeats
        for number, (workload, text) in enumerate(runs):
            with held_if(hold) as where:
                run = live.serve(
                    server, workload.build(), by_step=by_step, concurrency=workload.concurrency
                )
            run.about.update(workload=text, **where.about)
            path = out if len(runs) == 1 else numbered(out, number)
            save_run(run, path)
            click.echo(json.dumps({"file": str(path), "workload": text, **summary(run)}))


def numbered(path: Path, number: int) -> Path:
    """log.json.xz -> log-3.json.xz."""
    name, dot, suffixes = path.name.partition(".")
    return path.with_name(f"{name}-{number}{dot}{suffixes}")


def summary(run: Any) -> dict[str, Any]:
    """Means of a run, to look at while it goes on."""
    ttft = [r.token_s[0] - r.request.arrival_s for r in run.requests]
    tpot = [
        (r.token_s[-1] - r.token_s[0]) / (len(r.token_s) - 1)
        for r in run.requests
        if len(r.token_s) > 1
    ]
    tokens = sum(len(r.token_s) for r in run.requests)
    return {
        "requests": len(run.requests),
        "steps": len(run.steps),
        "seconds": round(run.steps[-1].end_s, 3),
        "ttft_ms": round(1e3 * fmean(ttft), 3),
        "tpot_ms": round(1e3 * fmean(tpot), 3) if tpot else None,
        "tokens_per_s": round(tokens / run.steps[-1].end_s, 1),
        "preemptions": sum(r.preemptions for r in run.requests),
    }


if __name__ == "__main__":
    main()
