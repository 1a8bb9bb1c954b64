"""Real tumours from the check to the prediction: BraTS (labels 0 1 2 3) and TCGA (0 1 2 4, one of them without a 4)."""

import csv
import os
from types import SimpleNamespace

import nibabel
import numpy as np
import pytest
import tiny_volumes
from tiny_runs import call, rows

from fedjax_seg import outcome

GLI, DU, FG = "BraTS-GLI-00000-000", "TCGA-DU-7294", "TCGA-FG-6692"
SEG = {GLI: "-seg.nii.gz", DU: "_seg_fused.nii.gz", FG: "_seg_fused.nii.gz"}
# {tree: (label values, rows of its table as (site, case, part), name of the last class)}; a case that must train and be
# predicted is there under two names.
TREES = {
    "tcga": ((0, 1, 2, 4), ((1, FG, "train"), (1, DU, "val"), (2, DU, "train"), (2, FG, "val"))),
    "gli": ((0, 1, 2, 3), ((1, GLI, "train"), (1, GLI, "val"))),
}
SEED = 1  # whose first model sees no enhancing tumour in the case that has none, and whose second one does
DIAGONAL = float(np.linalg.norm((240, 240, 155)))  # 373.13 mm


@pytest.fixture(scope="module")
def trained(real, quick_compile, tmp_path_factory):
    """tree -> what a run of one step per case has left: folder, label values, {name of a predicted case: case}."""
    base, kept = tmp_path_factory.mktemp("tumours"), {}

    def run(name):
        if name not in kept:
            values, table = TREES[name]
            root, cases = base / name, {}
            root.mkdir()
            lines = ["Partition_ID,Subject_ID,TrainOrVal"]
            for site, case, part in table:
                own = f"{case}-{part}"
                os.symlink(real / "brats" / case, root / own)
                lines.append(f"{site},{own},{part}")
                cases |= {own: case} if part == "val" else {}
            (root / "partitioning.csv").write_text("\r\n".join(lines))
            options = {
                "data.sites": "",
                "data.patches": 1,
                "data.patch": "32,32,32",
                "task.tile": "64,64,64",
                "task.labels": ",".join(map(str, values)),
                "task.surface": "true" if name == "tcga" else "false",
                "sampler.name": "full",
                "rounds": 1,
                "predictions": "true",
                "seeds": SEED,
            }
            argv = tiny_volumes.words(root, base / "cache", base / f"{name}_run")
            argv += [f"--config.{k}={v}" for k, v in options.items()]
            with pytest.MonkeyPatch.context() as patch:
                tiny_volumes.register(patch)
                patch.setattr(outcome.run_report, "write", lambda *unused: None)
                patch.setattr(outcome, "_pictures", lambda *unused: None)
                assert call([*argv, "--check_data"]) == 0
                assert call(argv) == 0
            kept[name] = SimpleNamespace(folder=base / f"{name}_run", values=values, cases=cases)
        return kept[name]

    return run


def per_case(run):
    lines = csv.DictReader((run.folder / "per_case.csv").read_text().splitlines())
    return {row["case"]: row for row in lines}


FIRST = next(iter(TREES))  # the others on demand: a program of 3D convolutions is compiled for each


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != FIRST)) for n in TREES])
def test_checked_trained_one_step_and_predicted_whole(name, real, trained):
    run = trained(name)
    steps = [r for r in rows(run.folder) if r["metric"] == "update_norm"]
    assert len(steps) == len(run.cases) and all(r["value"] > 0 for r in steps)
    counted = {r["Subject_ID"]: r for r in csv.DictReader((run.folder / "labels.csv").read_text().splitlines())}
    assert len(counted) == 2 * len(run.cases)
    table = per_case(run)
    assert set(table) == set(run.cases) and len(list((run.folder / "predictions").iterdir())) == len(run.cases)
    labels_seen = set()
    for own, case in run.cases.items():
        old = nibabel.load(real / "brats" / case / f"{case}{SEG[case]}")
        new = nibabel.load(run.folder / "predictions" / f"{own}.nii.gz")
        assert new.shape == old.shape == (240, 240, 155) and new.get_data_dtype() == np.uint8
        np.testing.assert_array_equal(new.affine, old.affine)
        truth, guess = np.asanyarray(old.dataobj).astype(int), np.asanyarray(new.dataobj)
        labels_seen |= set(np.unique(guess).tolist())
        for label in run.values:
            assert int(counted[own][f"voxels_{label}"]) == (truth == label).sum()
        ncr, oedema, enhancing = run.values[1:]
        for region, labels in {"ET": (enhancing,), "TC": (ncr, enhancing), "WT": (ncr, oedema, enhancing)}.items():
            p, t = np.isin(guess, labels), np.isin(truth, labels)
            found = [float(table[own][f"{what}_voxels_{region}"]) for what in ("predicted", "truth")]
            assert found == [p.sum(), t.sum()]
            if p.any() or t.any():
                dice = 2 * (p & t).sum() / (p.sum() + t.sum())
                assert float(table[own][f"dice_{region}"]) == pytest.approx(dice)
    assert labels_seen <= set(run.values) and run.values[3] in labels_seen


def test_a_case_without_enhancing_tumour_follows_the_rule_of_empty_masks(trained):
    """Where none is predicted either Dice is 1 and the distance 0 mm; else they are 0 and the volume's diagonal."""
    run = trained("tcga")
    row = per_case(run)[f"{DU}-val"]
    assert float(row["truth_voxels_ET"]) == 0 and float(row["truth_voxels_WT"]) == 9281 + 14907
    wrong = float(row["predicted_voxels_ET"]) > 0
    assert float(row["dice_ET"]) == (0.0 if wrong else 1.0)
    assert float(row["hd95_ET"]) == pytest.approx(DIAGONAL if wrong else 0.0)
    # The first site tests on this case alone, so that its metrics are those of the case, under both models.
    seen = {"n_false_alarm": {}, "n_both_empty": {}, "dice_ET": {}, "hd95_ET": {}}
    for r in rows(run.folder):
        if r["site"] == "1" and r["split"] == "test" and r["metric"] in seen:
            seen[r["metric"]][r["round"]] = r["value"]
    assert seen["n_both_empty"] == {0: 1.0, 1: 0.0} and seen["n_false_alarm"] == {0: 0.0, 1: 1.0}
    assert seen["dice_ET"] == {0: 1.0, 1: 0.0} and seen["hd95_ET"] == pytest.approx({0: 0.0, 1: DIAGONAL})
