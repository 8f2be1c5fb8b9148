"""One of the processes that measure collectives together; `collectives.py` starts it.

    python -m dooly_backend.profiling.collective_worker < request.json

The request names its rank, the group, and what to run; samples come out as one
line of JSON, microseconds by item. All ranks run the same items in turn.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_SLEEP_CYCLES = 1_000_000  # for the host to launch the call behind it


def main() -> None:
    """Join the group and answer the request on stdin."""
    request = json.load(sys.stdin)
    rank, degree, backend = request["rank"], request["degree"], request["backend"]
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{request['store']}",
        rank=rank,
        world_size=degree,
        timeout=timedelta(seconds=request["timeout_s"]),
    )
    results = [
        _samples(operation, getattr(torch, dtype), elements, rank, degree, device, request)
        for operation, dtype, elements in request["items"]
    ]
    dist.barrier()
    sys.stdout.write(json.dumps(results) + "\n")
    sys.stdout.flush()
    os._exit(0)  # taking the group down may wait for others, who are done, too


def _samples(
    operation: str,
    dtype: torch.dtype,
    elements: int,
    rank: int,
    degree: int,
    device: torch.device,
    request: dict[str, Any],
) -> list[float]:
    call = _call(operation, torch.ones(elements, dtype=dtype, device=device), rank, degree)
    timed = _on_cuda if device.type == "cuda" else _on_cpu
    found = []
    for _ in range(request["warmups"] + request["repeats"]):
        dist.barrier()
        found.append(timed(call))
    found = found[request["warmups"] :]
    # A round trip is two transfers.
    return [us / 2 for us in found] if operation == "send_recv" else found


def _call(operation: str, x: torch.Tensor, rank: int, degree: int) -> Callable[[], Any]:
    """What one rank does. Ranks 0 and 1, 2 and 3, ... send each other a tensor and get it back."""
    if operation == "all_reduce":
        return lambda: dist.all_reduce(x)
    if operation == "broadcast":
        return lambda: dist.broadcast(x, 0)
    if operation == "all_gather" and x.is_cuda:
        whole = x.new_empty(degree * x.numel())
        return lambda: dist.all_gather_into_tensor(whole, x)  # a list would be copied into
    if operation == "all_gather":
        parts = [torch.empty_like(x) for _ in range(degree)]
        return lambda: dist.all_gather(parts, x)
    if operation == "gather":
        gathered = [torch.empty_like(x) for _ in range(degree)] if rank == 0 else None
        return lambda: dist.gather(x, gathered, dst=0)
    if operation == "reduce_scatter":
        whole = x.new_ones(max(x.numel() // degree, 1) * degree)
        chunks = list(whole.chunk(degree))
        out = torch.empty_like(chunks[0])
        if x.is_cuda:
            return lambda: dist.reduce_scatter_tensor(out, whole)
        return lambda: dist.reduce_scatter(out, chunks)
    if operation == "send_recv":
        neighbour = rank ^ 1
        return lambda: _round_trip(x, neighbour, first=rank % 2 == 0)
    raise ValueError(f"unknown collective {operation}")


def _round_trip(x: torch.Tensor, neighbour: int, first: bool) -> None:
    if first:
        dist.send(x, neighbour)
        dist.recv(x, neighbour)
    else:
        dist.recv(x, neighbour)
        dist.send(x, neighbour)


def _on_cpu(call: Callable[[], Any]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1000


def _on_cuda(call: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_SLEEP_CYCLES)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


if __name__ == "__main__":
    main()
