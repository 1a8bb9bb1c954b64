"""Interleaved samples of several loops, and what other processes did to the machine while a sample ran."""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

BUSY = 0.25  # cores used by other processes from which a sample counts as disturbed


class Load:
    """Cores that others used (or that were stolen from the machine) while a block ran; None where not known."""

    def __enter__(self) -> "Load":
        self._before = self._now()
        return self

    def __exit__(self, *unused: object) -> None:
        (busy0, own0, wall0), (busy1, own1, wall1) = self._before, self._now()
        self.wall, self.cpu = wall1 - wall0, own1 - own0
        known = busy0 is not None and busy1 is not None
        self.others = max(0.0, (busy1 - busy0 - self.cpu) / self.wall) if known else None

    @staticmethod
    def _now() -> tuple[float | None, float, float]:
        busy = None
        if os.path.exists("/proc/stat"):
            with open("/proc/stat") as file:
                user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
            busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return busy, time.process_time(), time.monotonic()


def interleaved(
    loops: Mapping[str, Callable[[], Any]], repeats: int, wait: Callable[[Any], Any], most: Mapping[str, int]
) -> dict[str, list[Load]]:
    """Samples of every loop, one after the other in every repeat, after a first call of each that is not counted.

    Args:
      wait: returns when the result of a call is there.
      most: {name: repeats} of loops that are to be called less often.
    """
    for name, go in loops.items():
        began = time.monotonic()
        wait(go())
        if not name.startswith("torch"):
            print(f"  compile and first call of '{name}': {time.monotonic() - began:.1f} s", flush=True)
    samples: dict[str, list[Load]] = {name: [] for name in loops}
    for repeat in range(repeats):
        for name, go in loops.items():
            if repeat >= most.get(name, repeats):
                continue
            time.sleep(0.05)  # the thread pool of the loop before falls asleep
            with Load() as load:
                wait(go())
            samples[name].append(load)
    return samples


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median [min-max]."""
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}-{max(values):.{digits}f}]"


def disturbance(loads: Sequence[Load]) -> str:
    """Cores that others held meanwhile, and whether the samples tell nothing for it."""
    others = [load.others for load in loads if load.others is not None]
    busy = sum(o > BUSY for o in others) > len(others) / 2
    return f"{statistics.median(others):.2f}{' inconclusive: busy machine' if busy else ''}" if others else "unknown"
