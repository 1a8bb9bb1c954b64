"""What a run costs: wall-clock seconds, peak memory, and energy where the hardware tells it.

Source: the rows "Job Wall-clock time", "Memory Utilized" and "Energy" of DP-SimAgg, Table II. The paper does not say
how it measured them. Here: memory is the largest resident set that this process ever had, and the device's own
peak where it has memory of its own; energy is the sum over the counters of the processors and their memory (RAPL,
read from sysfs) and of NVIDIA devices (NVML). Such a counter belongs to the whole machine: other programs on it are
counted too, and what has no counter (fans, disks, the losses of the power supply) is not.

Nothing is sampled in the background. A RAPL counter wraps within about half an hour at full load, and a reading sees
one wrap at most: call `advance` more often than that, at every evaluation say.
"""

import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

POWERCAP = Path("/sys/class/powercap")
_JOULES_PER_WH = 3600.0


class Counter(NamedTuple):
    """An energy counter.

    Attributes:
      name: for the report; counters of one kind share it.
      read: () -> joules since some moment; None where it cannot be read now.
      wraps: joules after which it starts again at 0; 0 = it never does.
    """

    name: str
    read: Callable[[], float | None]
    wraps: float = 0.0


class Meter(NamedTuple):
    """A measurement that is under way: what `start` and `advance` found last, and the joules until then.

    Attributes:
      began: seconds of the monotonic clock at the start.
      counters: those that could be read at the start.
      last: their last readings, joules.
      used: their joules so far.
    """

    began: float
    counters: tuple[Counter, ...]
    last: tuple[float, ...]
    used: tuple[float, ...]


def start(counters: tuple[Counter, ...] | None = None, clock: Callable[[], float] = time.monotonic) -> Meter:
    """Begins to measure.

    Args:
      counters: default those of this machine, `rapl()` and `nvml()`.
      clock: seconds.
    """
    found = (*rapl(), *nvml()) if counters is None else counters
    pairs = [(counter, value) for counter in found if (value := counter.read()) is not None]
    return Meter(clock(), tuple(c for c, _ in pairs), tuple(v for _, v in pairs), (0.0,) * len(pairs))


def advance(meter: Meter) -> Meter:
    """The meter with everything counted until now; to be called more often than a counter wraps."""
    last, used = [], []
    for counter, before, so_far in zip(meter.counters, meter.last, meter.used):
        now = counter.read()
        now = before if now is None else now  # cannot be read any more: nothing is added
        step = now - before
        last.append(now)
        used.append(so_far + (step if step >= 0 else step + counter.wraps if counter.wraps else now))
    return meter._replace(last=tuple(last), used=tuple(used))


def read(
    meter: Meter, device_peak_bytes: float | None = None, clock: Callable[[], float] = time.monotonic
) -> dict[str, Any]:
    """What was used since the start.

    Args:
      meter: as `start` or `advance` returned it.
      device_peak_bytes: the sum over devices of memory_stats()['peak_bytes_in_use']; None on a CPU.

    Returns: 'wall_seconds'; 'peak_memory_gb' (10^9 bytes, of the process since it began); 'device_peak_memory_gb' or
      None; 'energy_wh' or None where no counter could be read; 'energy_source', the counters' names or ''.
    """
    now = advance(meter)
    names = dict.fromkeys(counter.name for counter in now.counters)
    return {
        "wall_seconds": clock() - now.began,
        "peak_memory_gb": peak_bytes() / 1e9,
        "device_peak_memory_gb": None if device_peak_bytes is None else device_peak_bytes / 1e9,
        "energy_wh": sum(now.used) / _JOULES_PER_WH if now.counters else None,
        "energy_source": " + ".join(names),
    }


def texts(found: Mapping[str, Any]) -> dict[str, str]:
    """The rows of the table as printed: {'Wall-clock time': '16:08:53', 'Energy (Wh)': 'n/a', ...}."""
    minutes, seconds = divmod(round(found["wall_seconds"]), 60)
    number = lambda key: "n/a" if found[key] is None else f"{found[key]:.2f}"
    return {
        "Wall-clock time": f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}",
        "Peak memory (GB)": number("peak_memory_gb"),
        "Peak device memory (GB)": number("device_peak_memory_gb"),
        "Energy (Wh)": number("energy_wh"),
        "Energy counted by": found["energy_source"] or "n/a",
    }


def peak_bytes() -> int:
    """The largest resident set of this process so far.

    getrusage counts what a process was before it began to run its own program, its parent's size where that was larger;
    Linux tells the program's own peak in /proc. Both in kilobytes, but getrusage of macOS in bytes.
    """
    own = (_text(Path("/proc/self/status")) or "").partition("VmHWM:")[2].split()
    if own:
        return int(own[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rapl(folder: str | os.PathLike[str] = POWERCAP) -> tuple[Counter, ...]:
    """A counter for every processor package, and for the memory of each, that may be read.

    Reading is the superuser's on most systems, since a fine power trace leaks secrets: then there is none here. A zone
    'core' or 'uncore' is a part of its package and 'psys' is the whole platform: they would count twice, as would the
    memory-mapped zones, which show the same packages again.
    """
    found: dict[tuple[str | None, str | None], Counter] = {}
    zones = sorted(Path(folder).glob("*-rapl*:*"), key=lambda zone: ("mmio" in zone.name, zone.name))
    for zone in zones:
        name, limit = _text(zone / "name"), _text(zone / "max_energy_range_uj")
        package = name if zone.name.count(":") == 1 else _text(zone.parent / zone.name.rpartition(":")[0] / "name")
        if name != "dram" and not (name == package and str(name).startswith("package")):
            continue
        path = zone / "energy_uj"
        if _joules(path) is not None:
            wraps = float(limit) / 1e6 if limit and limit.isdigit() else 0.0
            found.setdefault((package, name), Counter("RAPL", lambda path=path: _joules(path), wraps))  # type: ignore[misc]
    return tuple(found.values())


def nvml() -> tuple[Counter, ...]:
    """A counter for every NVIDIA device, where the optional package pynvml is installed and the device has one."""
    try:
        import pynvml
    except ImportError:
        return ()
    found = []
    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            millijoules = pynvml.nvmlDeviceGetTotalEnergyConsumption

            def joules(handle: Any = handle, millijoules: Any = millijoules) -> float | None:
                try:
                    return millijoules(handle) / 1000
                except pynvml.NVMLError:
                    return None

            found.append(Counter("NVML", joules))
    except pynvml.NVMLError:
        return ()
    return tuple(c for c in found if c.read() is not None)


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _joules(path: Path) -> float | None:
    text = _text(path)
    return float(text) / 1e6 if text and text.isdigit() else None
