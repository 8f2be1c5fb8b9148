"""What the device and the host were like while something was measured.

Clock, temperature and reasons to run slower of a GPU, as its driver tells
them; how many processors other processes kept busy, of a CPU. A reading costs
a fraction of a millisecond and is taken between captured steps, never during a
sample.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dooly_backend.database.records import Environment, Measurement, RunConditions

#: Measurements by (signature hash, point).
Found = dict[Any, Measurement]

#: NVML's reasons for a lower clock (nvml.h, nvmlClocksThrottleReason*). Of these only the
#: last ones say that a measurement is not what the device does when it is well: a power cap
#: is a part of heavy work, and an idle device has no reason to be fast.
_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
_SUSPICIOUS = frozenset(_REASONS.values()) - {"power cap"}
_QUERY = "clocks.sm,temperature.gpu,clocks_throttle_reasons.active"


@dataclass(frozen=True)
class Conditions:
    """Of one captured step's measurements; None where the system does not tell."""

    clock_mhz: float | None = None  # of the streaming multiprocessors
    temperature_c: float | None = None
    throttled: frozenset[str] = frozenset()
    others: float | None = None  # processors that other processes kept busy, on average
    suspicious: str | None = None  # why these measurements should not be trusted


class Watch(ABC):
    """Watches one device: `begin` ahead of measurements, `end` behind them."""

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def end(self) -> Conditions: ...


class CpuWatch(Watch):
    """Other processes' share of the processors, from what the kernel counts.

    Suspicious is a host on which `threads` of this process and the others together
    need more than half of the processors: two of them may be the threads of one
    core, which a virtual machine does not tell, and then each is about half as
    fast while the other one works, too.
    """

    #: Interrupts and the like need no whole processor.
    SLACK = 0.25

    def __init__(self, threads: int, stat: Path = Path("/proc/stat")) -> None:
        self._threads = threads
        self._stat = stat
        self._cpus = os.cpu_count() or 1
        self._before: tuple[float, float, float] | None = None

    def begin(self) -> None:
        self._before = self._times()

    def end(self) -> Conditions:
        now = self._times()
        if now is None or self._before is None:
            return Conditions()
        clock, busy, own = (after - before for after, before in zip(now, self._before, strict=True))
        if clock <= 0:
            return Conditions()
        others = max(0.0, (busy - own) / clock)
        taken = others > max(0.0, self._cpus / 2 - self._threads) + self.SLACK
        reason = f"other processes kept {others:.1f} processors busy" if taken else None
        return Conditions(others=others, suspicious=reason)

    def _times(self) -> tuple[float, float, float] | None:
        """Seconds: the clock, all processors' work, this process's work."""
        try:
            first = self._stat.read_text().splitlines()[0].split()
        except OSError:  # not Linux
            return None
        user, nice, system, _idle, _wait, irq, softirq, steal = map(int, first[1:9])
        ticks = user + nice + system + irq + softirq + steal
        mine = os.times()
        own = mine.user + mine.system
        return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), own


class GpuWatch(Watch):
    """What NVML says of this process's device, through its Python binding or nvidia-smi."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._device = visible_device()
        try:
            import pynvml  # type: ignore[import-not-found]

            pynvml.nvmlInit()
            by_index = self._device.isdecimal()
            handle_of = (
                pynvml.nvmlDeviceGetHandleByIndex if by_index else pynvml.nvmlDeviceGetHandleByUUID
            )
            self._nvml = pynvml
            self._handle = handle_of(int(self._device) if by_index else self._device)
        except ImportError:
            pass  # the binding is optional: nvidia-smi tells the same, more slowly

    def begin(self) -> None:
        return None

    def end(self) -> Conditions:
        values = self._read()
        if values is None:
            return Conditions()
        clock, temperature, bits = values
        reasons = frozenset(name for bit, name in _REASONS.items() if bits & bit)
        bad = sorted(reasons & _SUSPICIOUS)
        text = f"the device was slowed down ({', '.join(bad)})" if bad else None
        return Conditions(clock, temperature, reasons, suspicious=text)

    def _read(self) -> tuple[float, float, int] | None:
        if self._nvml is not None:
            nvml, handle = self._nvml, self._handle
            return (
                nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
            )
        wanted = [f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", f"--id={self._device}"]
        command = ["nvidia-smi", *wanted]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return parsed(answer.stdout)


def visible_device() -> str:
    """Index or UUID of the first device that CUDA shows this process; NVML counts them all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"


def parsed(line: str) -> tuple[float, float, int] | None:
    """Clock, temperature and reasons from a line of nvidia-smi; None where it tells them not."""
    try:
        clock, temperature, bits = line.strip().split(",")
        return float(clock), float(temperature), int(bits, 16)
    except ValueError:  # "[N/A]" on some devices
        return None


@dataclass
class WatchedRun:
    """Measures under a watch: what looks suspicious once more, and marked if it stays so.

    On a device that is suspicious all the time measuring again is useless: then
    everything is marked, and nothing repeated. `about` and `seconds` go into the
    run's facts: what it was for, and what its parts took. Of captured steps these are
    "timing", the samples, and "setup": capturing the step and its calls' arguments; "rest"
    is what went by beside them: choosing points, writing, waiting for other workers.
    """

    watch: Watch
    started_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat())
    seen: list[Conditions] = field(default_factory=list)
    again: int = 0  # captured steps that were measured again
    about: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    _RECENT = 6

    def measure(self, measuring: Callable[[], Found | str]) -> Found | str:
        """What `measuring` returns: measurements, or the reason for none."""
        found = self._once(measuring)
        if isinstance(found, str) or self.seen[-1].suspicious is None:
            return found
        recent = self.seen[-self._RECENT :]
        if len(recent) < self._RECENT or not all(c.suspicious for c in recent):
            self.again += 1
            later = self._once(measuring)
            if isinstance(later, str):
                return later
            found = {key: with_cost(m, found.get(key)) for key, m in later.items()}
        if self.seen[-1].suspicious is None:
            return found
        return {key: replace(measurement, unstable=True) for key, measurement in found.items()}

    def conditions(self) -> RunConditions:
        """As the database keeps them: smallest, median and largest of what was read."""
        reasons = Counter(reason for c in self.seen for reason in c.throttled)
        facts = {
            "captured_steps": len(self.seen),
            "measured_again": self.again,
            "suspicious": sum(c.suspicious is not None for c in self.seen),
            "clock_mhz": _range([c.clock_mhz for c in self.seen]),
            "temperature_c": _range([c.temperature_c for c in self.seen]),
            "others_busy_processors": _range([c.others for c in self.seen]),
            "throttled": dict(sorted(reasons.items())) or None,
            "spent_s": self._parts() or None,
            **self.about,
        }
        known = {name: value for name, value in facts.items() if value is not None}
        return RunConditions(self.started_at, datetime.now(UTC).isoformat(), known)

    def _once(self, measuring: Callable[[], Found | str]) -> Found | str:
        self.watch.begin()
        began = time.monotonic()
        found = measuring()
        took = time.monotonic() - began
        self.seen.append(self.watch.end())
        measurements = [] if isinstance(found, str) else found.values()
        timing = sum(m.timing_us or 0.0 for m in measurements) / 1e6
        self._spend("timing", timing)
        self._spend("setup", took - timing)
        return found

    def _parts(self) -> dict[str, float]:
        """Seconds by part, so far; nothing where nobody looks."""
        if not self.seconds:
            return {}
        measured = sum(self.seconds.get(part, 0.0) for part in ("setup", "timing"))
        rest = {"rest": time.monotonic() - self.began - measured}
        return {part: round(took, 3) for part, took in (self.seconds | rest).items()}

    def _spend(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds


def with_cost(measurement: Measurement, other: Measurement | None) -> Measurement:
    """The measurement, with what taking the `other` one at the same point cost on top."""
    known = [m.timing_us for m in (measurement, other) if m is not None]
    spent = [us for us in known if us is not None]
    return replace(measurement, timing_us=sum(spent) if spent else None)


def _range(values: Sequence[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return [round(value, 2) for value in (min(known), statistics.median(known), max(known))]


def watch_for(environment: Environment) -> Watch:
    """The watch of the environment's device."""
    if environment.device_kind == "cuda":
        return GpuWatch()
    return CpuWatch(int(environment.facts.get("threads", 1)))
