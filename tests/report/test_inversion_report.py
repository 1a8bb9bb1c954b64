"""The section on gradient inversion: every number drawn is in a CSV, words fit, and pictures only where they may be."""

import csv

import numpy as np
import pytest

from fedjax_seg.report import inversion_figures, inversion_report
from fedjax_seg.report.runs import Run
from fedjax_seg.report.tables import to_markdown


def row(scenario, each, baseline=15.0, **changes):
    made = {"scenario": scenario, "words": f"seen: {scenario}", "images": len(each), "messages": 1, "noise": 0.0}
    made |= {"known": True, "psnr": float(np.mean(each)), "each": each, "baseline": baseline, "ssim": 0.5}
    return made | {"dice": None, "labels_right": None, "above": 0.5, "cosine": 0.999} | changes


ROWS = [row("gradient", [24.0, 13.0]), row("unknown", [11.0], dice=0.75, known=False), row("own", [7.0], noise=1.5)]
TOLD = {
    "rows": ROWS,
    "baseline": {"psnr": 15.0, "ssim": 0.3, "images": 40},
    "model": "initial",
    "site": "client_1",
    "how": "cosine",
    "better": 3.0,
    "formal": False,
    "text": "What came of it.",
}


def pictures():
    random = np.random.default_rng(0)
    truth = random.uniform(size=(2, 8, 8, 1))
    guess = truth.mean(0)
    return {"truth": truth, "baseline": guess, "gradient": truth + 0.01, "unknown": truth[:1], "own": 0 * truth[:1]}


def run(folder, told=TOLD):
    return Run(folder, "FedAvg", "", {"inversion": told} if told else {}, [], {})


def numbers(path):
    with open(path.with_suffix(".csv"), newline="") as file:
        return list(csv.DictReader(file))


def test_every_picture_has_its_number(tmp_path):
    path = inversion_figures.images(ROWS, pictures(), 3.0, tmp_path)
    shown = {(r["image"], r["scenario"]): float(r["psnr_db"]) for r in numbers(path)}
    drawn = {("0", "gradient"): 24.0, ("1", "gradient"): 13.0, ("0", "unknown"): 11.0, ("0", "own"): 7.0}
    guess, truth = pictures()["baseline"], pictures()["truth"]
    drawn |= {(str(i), "baseline"): -10 * np.log10(np.mean((guess - truth[i]) ** 2)) for i in range(2)}
    assert shown == pytest.approx(drawn)
    again = inversion_figures.images(ROWS, pictures(), 3.0, tmp_path, "again")
    assert path.read_bytes() == again.read_bytes()


def test_every_dot_has_its_number(tmp_path):
    path = inversion_figures.chart(ROWS, 3.0, tmp_path)
    found = [(r["scenario"], float(r["psnr_db"]), float(r["baseline_mean_db"])) for r in numbers(path)]
    assert found == [("gradient", 24, 15), ("gradient", 13, 15), ("unknown", 11, 15), ("own", 7, 15)]


@pytest.mark.parametrize("allowed, formal, drawn", [(True, False, 2), (False, False, 1), (True, True, 1)])
def test_pictures_only_where_they_may_be(tmp_path, allowed, formal, drawn):
    inversion_report.keep(tmp_path, pictures(), allowed)
    assert (tmp_path / inversion_report.FILE).is_file() == allowed
    (section,) = inversion_report.sections(run(tmp_path, TOLD | {"formal": formal}), tmp_path / "figures")
    assert len(section.figures) == drawn and section.title == "Gradient inversion"
    assert ("No picture is shown" in section.remarks) == formal
    drawn = [tmp_path / "figures" / f"inversion_images.{suffix}" for suffix in ("png", "csv")]
    assert all(path.is_file() == (len(section.figures) == 2) for path in drawn)
    inversion_report.keep(tmp_path, {}, True)
    assert not any(path.exists() for path in drawn) and (tmp_path / "figures" / "inversion_psnr.png").is_file()
    assert not (tmp_path / inversion_report.FILE).exists()  # nothing of an earlier one stays


def test_the_table_by_hand():
    text = to_markdown(inversion_report.table(TOLD))
    assert "| seen: gradient | 18.5 | 15.0 | 3.5 | 0.50 | 0.50 | - | 0.999 |" in text
    assert "| seen: unknown | 11.0 | 15.0 | -4.0 | 0.50 | 0.50 | 0.75 | 0.999 |" in text
    assert "| no gradient: the guess | 15.0 | 15.0 | 0.0 | 0.30 | - | - | - |" in text


def test_words_of_the_own_mechanism_and_of_nothing(tmp_path):
    (section,) = inversion_report.sections(run(tmp_path), tmp_path)
    assert "own mechanism (noise multiplier 1.5): 7.0 dB" in section.remarks
    assert inversion_report.sections(run(tmp_path, None), tmp_path) == []
