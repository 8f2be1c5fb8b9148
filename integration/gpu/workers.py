"""Processes that start together and measure in turn.

An engine takes a minute or more to start and seconds to measure; starting
disturbs whoever measures, on the other GPUs of the host as well. So all of them
start, say that they are ready, and wait until it is their turn.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

_READY = "ready"


def ready() -> None:
    """Called by a worker: wait for its turn."""
    sys.stdout.write(f"{_READY}\n")
    sys.stdout.flush()
    sys.stdin.readline()


def devices() -> list[str]:
    """The GPUs of this host as nvidia-smi numbers them, or those that the user has chosen."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [one.strip() for one in chosen.split(",") if one.strip()]
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.split()


def on_device(device: str | None) -> dict[str, str]:
    """This process's environment, with one GPU only; None leaves it as it is."""
    if device is None:
        return dict(os.environ)
    # As nvidia-smi counts, which is not CUDA's own order by default.
    return {**os.environ, "CUDA_VISIBLE_DEVICES": device, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


class Wave:
    """Workers that share the GPU `device`, or what CUDA chooses; their processes start at once.

    `commands` are the ``python -m`` arguments of each. A worker that fails is left out.
    """

    def __init__(self, commands: Sequence[Sequence[str]], device: str | None = None) -> None:
        self._workers = [
            subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=on_device(device),
            )
            for command in commands
        ]

    def run(
        self,
        budget_s: float,
        turns: int = 1,
        started: Callable[[], object] = lambda: None,
        staged: bool = False,
    ) -> list[int]:
        """Let them work; their exit codes, in order.

        Each says `turns` times that it is ready: all have their first turn before any has its
        second. `staged` ones say so once before, when they need the device, and take it together.
        `started` is called ahead of the first turn. What is not done within `budget_s` seconds
        is killed.
        """
        # Also while they start: one that hangs must not take the others' results with it.
        end = threading.Timer(budget_s, self.kill)
        end.start()
        try:
            waiting = [worker for worker in self._workers if _is_ready(worker)]
            if staged:
                told = [worker for worker in waiting if _tell(worker)]
                waiting = [worker for worker in told if _is_ready(worker)]
            started()
            for _ in range(turns - 1):
                waiting = [worker for worker in waiting if _tell(worker) and _is_ready(worker)]
            for worker in waiting:
                output, _ = worker.communicate("go\n")
                sys.stdout.write(output)
                sys.stdout.flush()
            return [worker.wait() for worker in self._workers]
        finally:
            end.cancel()

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()


def in_turn(
    commands: Sequence[Sequence[str]],
    budget_s: float,
    device: str | None = None,
    turns: int = 1,
    started: Callable[[], object] = lambda: None,
) -> list[int]:
    """Start a `Wave` of `commands` and run it; the exit codes, in order."""
    return Wave(commands, device).run(budget_s, turns, started)


def in_turn_on_each(
    commands: Mapping[str | None, Sequence[Sequence[str]]], budget_s: float, turns: int = 1
) -> dict[str | None, list[int]]:
    """`in_turn` on several GPUs of a host at once; the exit codes by device.

    Each GPU's workers have their turns beside those of the others, but not before all workers
    on all of them are ready. Raises what a device's turns raise.
    """
    everybody = threading.Barrier(len(commands) or 1)

    def run(device: str | None) -> list[int]:
        try:
            return in_turn(commands[device], budget_s, device, turns, everybody.wait)
        except BaseException:
            everybody.abort()  # nobody waits for those that will not come
            raise

    with ThreadPoolExecutor(max(len(commands), 1)) as pool:
        return dict(zip(commands, pool.map(run, commands), strict=True))


def shared_out(configurations: Sequence[Any], devices: Sequence[str]) -> dict[str | None, Any]:
    """Neighbours on the same GPU, as equal numbers as can be; all on CUDA's choice without one."""
    names: list[str | None] = [*devices][: len(configurations)] or [None]
    each, more = divmod(len(configurations), len(names))
    ends = list(accumulate(each + (number < more) for number in range(len(names))))
    return {
        name: configurations[begin:end]
        for name, begin, end in zip(names, [0, *ends], ends, strict=False)
    }


def _tell(worker: subprocess.Popen[str]) -> bool:
    """Let the worker go; False when it has ended."""
    assert worker.stdin is not None
    try:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    except BrokenPipeError:  # killed while it waited
        return False
    return True


def _is_ready(worker: subprocess.Popen[str]) -> bool:
    """Wait until the worker is ready; False when it ends first."""
    assert worker.stdout is not None
    return any(line.strip() == _READY for line in worker.stdout)
