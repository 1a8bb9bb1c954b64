"""Rows of the files a run writes, with the values a test asks for."""

from fedjax_seg.report.writer import CASE_KEYS, ROW_KEYS


def result(fold, seed, site, metric, value, n=10, split="test", round=2):
    return dict(zip(ROW_KEYS, (round, fold, seed, site, split, metric, value, n)))


def case(site, name, correct, fold="fold0", seed=0):
    task = {"label": 1, "probability": 0.75, "predicted": int(correct), "correct": int(correct), "loss": 0.25}
    return dict(zip(CASE_KEYS, (fold, seed, site, name, name))) | task
