"""Secure sums on real histology, at a small size: the same predictions as without."""

import numpy as np
import pytest
from tiny_runs import ROOT

from fedjax_seg import config as configuration
from fedjax_seg import experiment
from fedjax_seg.report import runs

CONFIG = ROOT / "configs" / "smc_histopathology.py"


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile", "no_figures")
def test_a_round_on_lc25000_is_the_same_under_a_secure_sum(real, tmp_path):
    found = {}
    for method in ("fedavg", "additive"):
        c = configuration.load(CONFIG, f"lc25000,{method}")
        c.data.root, c.data.size, c.rounds, c.eval_every = str(real / "lc25000"), (16, 16), 2, 2
        c.model.width, c.model.blocks, c.attack = 4, 2, configuration.slot("attack", "none")
        summary = experiment.run(c, tmp_path / method, quiet=True)
        found[method] = runs.read_run(tmp_path / method).cases["p_1"]
        assert len(summary["sites"]) == 8 and summary["classes"] == ["lung_aca", "lung_n", "lung_scc"]
    np.testing.assert_allclose(found["fedavg"], found["additive"], atol=5e-3)
