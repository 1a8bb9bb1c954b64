"""Small synthetic runs, written by RunFolder itself: known accuracies, no training."""

import numpy as np
import pytest
from synthetic_run import result

from fedjax_seg.report.writer import RunFolder

METRICS = {"accuracy": ["max", "share of cases with the right class"], "auc": ["max", "area under the ROC curve"]}


@pytest.fixture
def make_run(tmp_path):
    """(label, results, cases=[], rows=[]) -> folder of a finished run."""

    def make(label, results, cases=(), rows=(), sites=("A", "B"), name=None):
        with RunFolder(tmp_path / (name or label), quiet=True) as folder:
            folder.add_rows(rows)
            if cases:
                folder.write_cases(cases)
            summary = {"label": label, "group": "paper", "round": 2, "sites": list(sites)}
            folder.finish(summary | {"results": list(results), "metrics": METRICS})
        return folder.path

    return make


@pytest.fixture
def noisy_rows():
    """label -> rows of 20 rounds, 3 folds, 2 seeds: smooth curves with noise, and update norms."""

    def make(shift=0.0, sites=("NYU", "UM", "UCLA", "USM"), rounds=20):
        rng = np.random.default_rng(1)
        rows = []
        for t in range(1, rounds + 1):
            for fold in ("fold0", "fold1", "fold2"):
                for seed in (0, 1):
                    for k, site in enumerate(sites):
                        value = 0.5 + (0.2 + shift) * (1 - np.exp(-t / 6)) + 0.02 * k + rng.normal(0, 0.02)
                        rows.append(result(fold, seed, site, "accuracy", value, round=t))
                        if (t + k) % 3:
                            norm = np.exp(rng.normal(0, 0.2)) * 4.0**k / t
                            rows.append(result(fold, seed, site, "update_norm", norm, split="train", round=t))
        return rows

    return make
