"""What a run used: counters in a made-up sysfs folder and a made-up NVML, sums by hand."""

import resource
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from fedjax_seg.report import resources
from fedjax_seg.report.resources import Counter


@pytest.fixture
def zones(tmp_path):
    """(zone, name, microjoules, range) -> writes them; calling it again changes the counter."""

    def write(zone, name, energy, limit=1_000_000_000):
        folder = tmp_path / zone
        folder.mkdir(exist_ok=True)
        for file, value in (("name", name), ("energy_uj", energy), ("max_energy_range_uj", limit)):
            (folder / file).write_text(f"{value}\n")

    write.folder = tmp_path
    return write


def counter(values, wraps=0.0, name="X"):
    left = iter(values)
    return Counter(name, lambda: next(left), wraps)


def test_packages_and_their_memory_are_counted_once(zones):
    zones("intel-rapl:0", "package-0", 5_000_000)
    zones("intel-rapl:0:0", "core", 4_000_000)
    zones("intel-rapl:0:1", "dram", 1_000_000)
    zones("intel-rapl:1", "package-1", 7_000_000)
    zones("intel-rapl:1:0", "dram", 2_000_000)
    zones("intel-rapl:2", "psys", 100_000_000)
    zones("intel-rapl-mmio:0", "package-0", 5_000_000)
    found = resources.rapl(zones.folder)
    assert sorted(c.read() for c in found) == [1, 2, 5, 7]  # joules
    assert {c.wraps for c in found} == {1000} and {c.name for c in found} == {"RAPL"}


def test_energy_is_the_difference_in_watt_hours_also_over_a_wrap(zones):
    zones("intel-rapl:0", "package-0", 900_000_000)
    zones("intel-rapl:1", "package-1", 0)
    meter = resources.start(resources.rapl(zones.folder))
    zones("intel-rapl:0", "package-0", 980_000_000)  # 80 J
    meter = resources.advance(meter)
    zones("intel-rapl:0", "package-0", 20_000_000)  # 20 + 20 J, over the end of the range
    zones("intel-rapl:1", "package-1", 240_000_000)  # 240 J
    used = resources.read(meter)
    assert used["energy_wh"] == pytest.approx(360 / 3600)
    assert used["energy_source"] == "RAPL"
    assert resources.read(meter)["energy_wh"] == used["energy_wh"]  # a reading changes nothing


def test_what_must_not_be_read_is_no_counter(zones, monkeypatch):
    zones("intel-rapl:0", "package-0", 5_000_000)
    zones("intel-rapl:1", "package-1", "unreadable")
    (zones.folder / "intel-rapl:2").mkdir()
    assert len(resources.rapl(zones.folder)) == 1
    assert resources.rapl(zones.folder / "missing") == ()
    real = resources.Path.read_text

    def refused(path, *args, **kwargs):
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(resources.Path, "read_text", refused)
    assert resources.rapl(zones.folder) == ()
    used = resources.read(resources.start(resources.rapl(zones.folder)))
    assert used["energy_wh"] is None and used["energy_source"] == ""


def test_counters_that_vanish_or_start_again():
    # 100 J, then no reading, then 30 J more
    meter = resources.start((counter([0.0, 100.0, None, 130.0]),))
    for _ in range(3):
        meter = resources.advance(meter)
    assert meter.used == (130.0,)
    # a counter without a known range that starts again at 0: at least what it shows
    meter = resources.advance(resources.start((counter([500.0, 20.0]),)))
    assert meter.used == (20.0,)
    assert resources.start((counter([None]),)).counters == ()


def test_a_report_of_both_kinds_and_its_texts():
    clock = iter([100.0, 100.0 + 16 * 3600 + 8 * 60 + 53.2])
    pair = counter([0.0, 3600.0], name="RAPL"), counter([7200.0, 7200.0 + 9000.0], name="NVML")
    meter = resources.start(pair, lambda: next(clock))
    used = resources.read(meter, 2.5e9, lambda: next(clock))
    assert (used["energy_wh"], used["energy_source"]) == (pytest.approx(3.5), "RAPL + NVML")
    assert used["wall_seconds"] == pytest.approx(58133.2) and used["device_peak_memory_gb"] == 2.5
    texts = resources.texts(used)
    assert texts["Wall-clock time"] == "16:08:53" and texts["Energy (Wh)"] == "3.50"
    assert texts["Peak device memory (GB)"] == "2.50" and texts["Energy counted by"] == "RAPL + NVML"


def test_nothing_to_measure_with_prints_as_not_available():
    used = resources.read(resources.start(()))
    assert used["energy_wh"] is None and used["device_peak_memory_gb"] is None
    texts = resources.texts(used)
    assert [texts[k] for k in ("Energy (Wh)", "Energy counted by", "Peak device memory (GB)")] == ["n/a"] * 3
    assert texts["Wall-clock time"] == "0:00:00" and float(texts["Peak memory (GB)"]) > 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_at_least_what_is_resident_and_is_kept(monkeypatch):
    block = np.ones(64_000_000, np.uint8)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    assert int(block[-1]) == 1 and resident > 64_000_000
    peak = resources.peak_bytes()
    del block
    slack = 0.02 * resident  # the kernel's counts of pages lag a little behind
    assert resources.peak_bytes() + slack >= peak >= resident - slack
    rusage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert peak <= rusage + slack
    monkeypatch.setattr(resources, "_text", lambda path: None)  # a system without /proc
    assert abs(resources.peak_bytes() - rusage) <= slack


# NVML


class NVMLError(Exception):
    pass


def fake_nvml(monkeypatch, init=lambda: None, millijoules=lambda handle: [1500, 2500][handle]):
    module = types.ModuleType("pynvml")
    module.NVMLError, module.nvmlInit, module.nvmlDeviceGetCount = NVMLError, init, lambda: 2
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetTotalEnergyConsumption = millijoules
    monkeypatch.setitem(sys.modules, "pynvml", module)


def test_nvml_counts_joules_of_every_device(monkeypatch):
    fake_nvml(monkeypatch)
    assert [(c.name, c.read(), c.wraps) for c in resources.nvml()] == [("NVML", 1.5, 0), ("NVML", 2.5, 0)]


def test_nvml_without_a_driver_a_counter_or_the_package_is_no_counter(monkeypatch):
    def fail(*args):
        raise NVMLError("not supported")

    fake_nvml(monkeypatch, init=fail)
    assert resources.nvml() == ()
    fake_nvml(monkeypatch, millijoules=fail)
    assert resources.nvml() == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    assert resources.nvml() == ()


def test_this_machine_can_be_measured():
    used = resources.read(resources.start())
    assert used["wall_seconds"] >= 0 and (used["energy_wh"] is None) == (used["energy_source"] == "")
