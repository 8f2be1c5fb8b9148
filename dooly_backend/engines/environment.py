"""Facts about the host and device that a measurement depends on."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from dooly_backend.database.records import Environment


def package_version(*names: str) -> str | None:
    """Version of the first of `names` that is installed, None when none is."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def cpu_name() -> str:
    """The processor as the kernel names it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux: platform's word is the best there is
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def device_identity() -> str:
    """The device that this process computes on, as no other of this host is called.

    All processors of a host are one: they share memory and caches.
    """
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return f"cuda {getattr(properties, 'uuid', None) or torch.cuda.current_device()}"
    return f"cpu {platform.node()}"


def environment_of(engine: str, engine_version: str, kernels: dict[str, Any]) -> Environment:
    """The environment of this process; torch must be usable. `kernels` adds what selects them."""
    import torch

    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        **kernels,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "cuda": torch.version.cuda,
            "driver": _nvidia("driver_version"),
            "max_sm_clock_mhz": _nvidia("clocks.max.sm"),
            "power_limit_w": _nvidia("power.limit"),
            "memory_gib": round(properties.total_memory / 2**30),
            "triton": package_version("triton"),
            "flashinfer": package_version("flashinfer-python"),
            "host_cpu": cpu_name(),
        }
        return Environment(properties.name, "cuda", engine, engine_version, facts)
    facts |= {
        "threads": torch.get_num_threads(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
    }
    return Environment(cpu_name(), "cpu", engine, engine_version, facts)


def _nvidia(field: str) -> str | None:
    """One field of nvidia-smi for the first device, None where the tool is missing."""
    import subprocess

    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
