"""Serve workloads on several live engines that share a device: they start together, serve in turn.

    python -m integration.gpu.live -o live --kv-cache-gib 40 --repeats 2 \
        --workload paper-small:requests=250,rate=6 \
        meta-llama/Llama-3.1-8B:FLASH_ATTN meta-llama/Llama-3.1-8B:FLASHINFER \
        mistralai/Ministral-8B-Instruct-2410:FLASHINFER:eager

An engine of its own would take nine tenths of the device's memory: here each
gets its weights and `--kv-cache-gib`. The logs are those of
`integration.live_vllm.run`; what a configuration needs beside its backend
follows it after a colon: `eager`, `fp8` (weights), `rate=N` in the place of the
workload's.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from integration.gpu.workers import in_turn


@click.command()
@click.argument("configurations", nargs=-1, required=True, metavar="MODEL:BACKEND[:WORD]...")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path))
@click.option("--workload", "workloads", required=True, multiple=True)
@click.option("--kv-cache-gib", type=float, required=True)
@click.option("--max-num-seqs", type=int, default=256, show_default=True)
@click.option("--max-num-batched-tokens", type=int, default=8192, show_default=True)
@click.option("--max-model-len", type=int, default=16384, show_default=True)
@click.option("--repeats", default=2, show_default=True)
@click.option("--warm-up-sizes", is_flag=True, help="As of integration.live_vllm.run.")
@click.option("--rehearse", default=0, show_default=True, help="As of integration.live_vllm.run.")
@click.option("--hold", is_flag=True, help="As of integration.live_vllm.run.")
@click.option("--budget", default=540.0, show_default=True, help="Seconds for everything.")
def main(
    configurations: tuple[str, ...],
    out: Path,
    workloads: tuple[str, ...],
    budget: float,
    **settings: float | bool,
) -> None:
    """Serve the workloads on every configuration."""
    out.mkdir(parents=True, exist_ok=True)
    commands = [command(c, out, workloads, settings) for c in configurations]
    for configuration, code in zip(configurations, in_turn(commands, budget), strict=True):
        click.echo(json.dumps({"configuration": configuration, "exit": code}))


def command(
    configuration: str, out: Path, workloads: tuple[str, ...], settings: dict[str, float | bool]
) -> list[str]:
    """The arguments of `python -m` that serve one configuration."""
    model, backend, *words = configuration.split(":")
    name = "-".join([model.rpartition("/")[2], backend, *(w for w in words if "=" not in w)])
    arguments = ["integration.live_vllm.run", model, "--backend", backend, "--wait"]
    arguments += ["-o", str(out / f"{name}.json.xz")]
    rate = next((word for word in words if word.startswith("rate=")), None)
    for workload in workloads:
        head, _, rest = workload.partition(":")
        parts = [part for part in rest.split(",") if not (rate and part.startswith("rate="))]
        arguments += ["--workload", f"{head}:{','.join([*parts, rate] if rate else parts)}"]
    for option, value in settings.items():
        name = f"--{option.replace('_', '-')}"
        if value is True:
            arguments.append(name)
        elif value is not False:
            arguments += [name, str(value)]
    for word in words:
        if word == "eager":
            arguments.append("--eager")
        elif word == "fp8":
            arguments += ["--quantization", "fp8"]
        elif "=" not in word:
            raise click.UsageError(f"{configuration}: {word!r} is not eager, fp8 or rate=N")
    return arguments


if __name__ == "__main__":
    main()
