"""Tests run on four CPU devices, whatever the machine has: layouts over devices are compared within one process.

The number must be set before JAX starts its backend, hence here and not in a fixture. Set JAX_PLATFORMS to run the
tests that need no second device on an accelerator.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_num_cpu_devices", 4)


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory):
    """One folder of compiled programs for this session and the processes that it starts."""
    folder = str(tmp_path_factory.mktemp("compiled"))
    settings = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        compilation_cache.reset_cache()  # it may have started without a folder
        yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def quick_compile(compile_cache):
    """Programs of this module's tests are compiled without the costly passes, and once per session."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def pcp_root(tmp_path_factory):
    """A synthetic PCP folder of three sites, read only."""
    import tiny_runs

    return tiny_runs.folder(tmp_path_factory.mktemp("pcp") / "root")


@pytest.fixture(scope="session")
def ct_root(tmp_path_factory):
    """Synthetic CT slices of 32x32 pixels of five clients, a test set and an attacker's own, read only."""
    from fedjax_seg.synthesis.ct import ct

    sizes = {"clients": (10, 8, 8, 5, 5), "test": 6, "shadow": 20}
    return str(ct(tmp_path_factory.mktemp("ct") / "root", size=32, **sizes))


@pytest.fixture(scope="session")
def mri_root(tmp_path_factory):
    """Synthetic brains of 24^3 voxels, two at each of twelve sites, as a FeTS folder, read only."""
    from fedjax_seg.synthesis.mri import mri

    return str(mri(tmp_path_factory.mktemp("mri") / "root", size=(24, 24, 24), sites=(2,) * 12))


@pytest.fixture(scope="session")
def tile_root(tmp_path_factory):
    """Synthetic histology tiles of 32x32 pixels of eight hospitals, read only."""
    from fedjax_seg.synthesis.histology import histology

    return str(histology(tmp_path_factory.mktemp("tiles") / "root", size=32, hospitals=(24,) * 8))


@pytest.fixture
def no_figures(monkeypatch):
    """Runs of this process draw nothing: pictures are half of the time of a tiny run, and have tests of their own."""
    from fedjax_seg.report import run_report

    monkeypatch.setattr(run_report, "_course", lambda *unused: [])
