"""What other processes did to the machine while a sample ran."""

import os
import time

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
