"""Synthetic brain MRI: the form of a FeTS folder, the order of tissues, tumours, and what a subject depends on."""

import csv
import json

import nibabel
import numpy as np
import pytest
from scipy import ndimage, stats

from fedjax_seg import data, synthesis
from fedjax_seg.core.checks import UserError
from fedjax_seg.synthesis import __main__ as command
from fedjax_seg.synthesis import mri_anatomy, mri_fields, mri_lesions, mri_scanner, mri_subjects

SIZE = (48, 48, 32)
PARTS = ("t1", "t1ce", "t2", "flair", "seg")
SITES = (3, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return synthesis.make("mri", tmp_path_factory.mktemp("mri") / "fets", size=SIZE, sites=SITES, seed=3)


@pytest.fixture(scope="module")
def drawn():
    """Ten subjects of as many sites, before they are scanned, at 3 mm."""
    at = mri_fields.grid((80, 80, 52))
    return at, [mri_subjects.drawn(0, site, 0, at) for site in range(10)]


def files(root):
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_folder_and_table_have_the_form_of_fets(folder):
    names = [f"FeTS2022_{i:05d}" for i in range(5)]
    expected = {f"{n}/{n}_{part}.nii.gz" for n in names for part in PARTS} | {"generator.json", "partitioning.csv"}
    assert set(files(folder)) == expected
    rows = "".join(f"{1 + (i > 2)},{n}\r\n" for i, n in enumerate(names))
    assert (folder / "partitioning.csv").read_bytes() == b"Partition_ID,Subject_ID\r\n" + rows.encode()
    about = json.loads((folder / "generator.json").read_text())
    assert about["synthetic"] is True and about["sites"] == [3, 2] and about["seed"] == 3


def test_volumes_have_the_form_of_brats(folder):
    """int16 images that share one mask, 0 outside; uint8 labels in the brain; the field of view is that of 1 mm."""
    for n in ("FeTS2022_00000", "FeTS2022_00004"):
        loaded = {part: nibabel.load(folder / n / f"{n}_{part}.nii.gz") for part in PARTS}
        arrays = {part: np.asarray(image.dataobj) for part, image in loaded.items()}
        brain = arrays["t1"] > 0
        for part, image in loaded.items():
            assert image.shape == SIZE and image.get_data_dtype() == (np.uint8 if part == "seg" else np.int16)
            np.testing.assert_allclose(image.header.get_zooms(), (5, 5, 155 / 32), rtol=1e-6)
            # voxel -1/2 of a volume of any size is the corner of the field of view: (0.5, 239.5, -0.5) in BraTS
            np.testing.assert_allclose(image.affine @ [-0.5, -0.5, -0.5, 1], [0.5, 239.5, -0.5, 1], atol=1e-4)
            corner = np.array(SIZE) - 0.5
            np.testing.assert_allclose(image.affine @ [*corner, 1], [-239.5, -0.5, 154.5, 1], atol=1e-4)
            if part != "seg":
                np.testing.assert_array_equal(arrays[part] > 0, brain)
                assert arrays[part].min() == 0
        assert set(np.unique(arrays["seg"])) <= {0, 1, 2, 4} and (arrays["seg"] > 0).sum() > 20
        assert brain[arrays["seg"] > 0].all()
    np.testing.assert_array_equal(
        mri_fields.affine((240, 240, 155)), [[-1, 0, 0, 0], [0, -1, 0, 239], [0, 0, 1, 0], [0, 0, 0, 1]]
    )


def test_data_reads_the_folder(folder, tmp_path):
    found = data.make("fets", root=str(folder), partition="partitioning.csv", patch=(16, 16, 16), cache=str(tmp_path))
    assert [len(a) + len(b) for a, b in zip(found.splits[0].train, found.splits[0].test)] == [3, 2]
    assert found.about["synthetic"] is True and "phantoms" in found.about["generator"]


def test_the_same_call_gives_the_same_bytes_and_completes_a_stopped_one(folder, tmp_path):
    before = files(folder)
    again = synthesis.make("mri", tmp_path / "again", size=SIZE, sites=SITES, seed=3)
    assert files(again) == before
    (again / "partitioning.csv").unlink()
    (again / "FeTS2022_00001" / "FeTS2022_00001_t2.nii.gz").unlink()
    kept = again / "FeTS2022_00002" / "FeTS2022_00002_t2.nii.gz"
    time = kept.stat().st_mtime_ns
    synthesis.make("mri", again, size=SIZE, sites=SITES, seed=3)
    assert files(again) == before and kept.stat().st_mtime_ns == time


@pytest.mark.parametrize("other", [{"seed": 4}, {"size": (48, 48, 36)}, {"sites": (3, 3)}])
def test_a_folder_of_other_options_is_refused(folder, other):
    with pytest.raises(UserError, match="holds a data set of other options; name a new or empty folder"):
        synthesis.make("mri", folder, **{"size": SIZE, "sites": SITES, "seed": 3} | other)


def test_a_folder_of_other_files_is_refused(tmp_path):
    (tmp_path / "scan.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        synthesis.make("mri", tmp_path, size=SIZE, sites=(1,))
    assert [p.name for p in tmp_path.iterdir()] == ["scan.txt"]


def test_a_subject_depends_on_seed_site_and_number_alone(folder):
    n = "FeTS2022_00004"  # the second of the second site
    alone = mri_subjects.subject(3, 1, 1, SIZE)
    for part, array in {**alone.images, "seg": alone.labels}.items():
        np.testing.assert_array_equal(np.asarray(nibabel.load(folder / n / f"{n}_{part}.nii.gz").dataobj), array)
    for other in ((4, 1, 1), (3, 0, 1), (3, 1, 0)):
        assert (mri_subjects.subject(*other, SIZE).labels != alone.labels).sum() > 20


@pytest.mark.parametrize("size", [(48, 48, 32), (80, 60, 52)])
def test_another_size_shows_the_same_head(size):
    coarse, fine = mri_fields.grid((40, 40, 26)), mri_fields.grid(size)
    for site in range(3):
        plans, brains, centres = [], [], []
        for at in (coarse, fine):
            plan, head, lesion = mri_subjects.drawn(0, site, 1, at)
            plans.append(plan)
            brains.append(len(head.flat) * np.prod(at.spacing))
            centres.append(np.mean([p[lesion.label > 0] for p in head.places], 1))
        assert plans[0].volumes == plans[1].volumes
        np.testing.assert_array_equal(plans[0].centres, plans[1].centres)
        assert brains[1] == pytest.approx(brains[0], rel=0.05)
        assert np.linalg.norm(centres[0] - centres[1]) < 6  # voxels of 6 mm


def test_labels_have_the_volumes_of_the_plan(drawn):
    at, subjects = drawn
    ml = np.prod(at.spacing) / 1000
    for plan, _, lesion in subjects:
        v = plan.volumes
        wanted = {mri_lesions.NCR: v.core, mri_lesions.ED: v.oedema, mri_lesions.ET: v.rim}
        for label, volume in wanted.items():
            assert (lesion.label == label).sum() * ml == pytest.approx(volume, abs=1.01 * ml)


@pytest.fixture(scope="module")
def scans(drawn):
    at, subjects = drawn
    out = []
    for site, (plan, head, lesion) in enumerate(subjects):
        random = np.random.default_rng(site)
        out.append(mri_scanner.scan(random, head, lesion, plan, mri_subjects.site_of(0, site), at))
    return out


# Textbook order: T1 white > grey > fluid; T2 the reverse; FLAIR darkens fluid; oedema is bright in T2 and FLAIR and
# dark in T1; the rim is bright in T1 with contrast agent only.
@pytest.mark.parametrize(
    "modality, order",
    [
        ("t1", ("white", "grey", "csf")),
        ("t1", ("white", "oedema")),
        ("t1", ("white", "rim")),
        ("t1ce", ("rim", "white", "grey", "csf")),
        ("t1ce", ("rim", "oedema")),
        ("t1ce", ("rim", "core")),
        ("t2", ("csf", "oedema", "grey", "white")),
        ("flair", ("oedema", "grey", "white", "csf")),
        ("flair", ("oedema", "core", "csf")),
    ],
)
def test_contrasts_are_those_of_text_books(drawn, scans, modality, order):
    for site, (_, head, lesion) in enumerate(drawn[1]):
        values, free = scans[site][modality].reshape(-1)[head.flat], lesion.label == 0
        parts = {k: (getattr(head, k) > 0.9) & free & (head.vessel < 0.05) for k in ("white", "grey", "csf")}
        parts |= {k: getattr(lesion, k) > 0.9 for k in ("core", "rim", "oedema")}
        medians = [np.median(values[parts[k]]) for k in order if parts[k].sum() > 20]
        assert (np.diff(medians) < 0).all(), (site, order, medians)


def test_the_brain_is_one_of_text_books(drawn):
    """Adult brains have 1.0 to 1.8 litres, more than half of it cerebrum on each side of the middle alike."""
    at, subjects = drawn
    ml = np.prod(at.spacing) / 1000
    for _, head, lesion in subjects:
        np.testing.assert_allclose(head.csf + head.grey + head.white, 1, atol=1e-5)
        assert min(head.csf.min(), head.grey.min(), head.white.min()) >= -1e-6
        assert 1000 < len(head.flat) * ml < 1800
        assert 0.05 < head.below.mean() < 0.2  # cerebellum and stem: about a tenth
        free = lesion.label == 0
        assert 0.5 < head.grey[free].sum() / head.white[free].sum() < 2.0
        assert 0.02 < head.csf.mean() < 0.3
        assert 0.8 < (head.places[0] > 0).sum() / (head.places[0] < 0).sum() < 1.25
        box = np.zeros(at.shape, bool)
        box.reshape(-1)[head.flat] = True
        parts, _ = ndimage.label(box)
        assert np.bincount(parts.ravel())[1:].max() > 0.99 * box.sum()  # one piece


def test_a_mass_pushes_the_middle_away(drawn):
    at, _ = drawn
    person = mri_anatomy.person(np.random.default_rng(0))
    plain = mri_anatomy.head(person, at)
    push = mri_anatomy.Push(np.array([30.0, 0.0, 12.0]), 22.0, 0.3)
    other = mri_anatomy.head(person, at, push)

    def ventricle(head):
        x, y, z = head.places
        inside = (head.csf > 0.5) & (np.abs(x) < 20) & (np.abs(y) < 25) & (np.abs(z - 13) < 9)
        return np.average(x[inside])

    assert ventricle(other) < ventricle(plain) - 1.0
    assert len(other.flat) == pytest.approx(len(plain.flat), rel=0.02)  # the skull gives no way


def test_tumours_are_nested_and_above_the_tentorium(drawn):
    at, subjects = drawn
    for _, head, lesion in subjects:
        box = np.zeros(at.shape, np.uint8)
        box.reshape(-1)[head.flat] = lesion.label
        whole = box > 0
        parts, _ = ndimage.label(whole, np.ones((3, 3, 3)))
        assert np.bincount(parts.ravel())[1:].max() > 0.8 * whole.sum()
        assert (head.below[lesion.label > 0]).mean() < 0.1
        deep = ndimage.distance_transform_edt(np.isin(box, (1, 4)), sampling=at.spacing)
        if (box == 4).sum() > 50 and (box == 1).sum() > 50:
            assert deep[box == 1].mean() > deep[box == 4].mean()  # the rim is outside the core
        assert (lesion.core + lesion.rim + lesion.oedema <= 1 + 1e-5).all()


def test_laws_of_the_volumes():
    random = np.random.default_rng(0)
    many = [mri_lesions.volumes(random) for _ in range(1500)]
    whole = np.array([v.whole for v in many])
    share = np.array([(v.core + v.rim) / v.whole for v in many])
    rim = np.array([v.rim / (v.core + v.rim) for v in many])
    law = stats.weibull_min(1.73, scale=110.8)
    assert np.median(whole) == pytest.approx(law.median(), rel=0.05)
    assert stats.kstest(whole[whole > 8], lambda x: (law.cdf(x) - law.cdf(8)) / law.sf(8)).pvalue > 1e-3
    assert stats.kstest(share[share > 0.04], stats.beta(1.761, 2.606).cdf).statistic < 0.04
    assert (rim == 0).mean() == pytest.approx(0.073, abs=0.02)
    assert stats.spearmanr(share, rim).statistic < -0.25 and stats.spearmanr(whole, share).statistic > 0.05
    weak, strong = stats.beta(0.458, 0.564), stats.beta(5.265, 2.552)
    for q in (0.1, 0.3, 0.5, 0.9):
        x = mri_lesions.rim_share(q)
        assert 0.299 * weak.cdf(x) + 0.701 * strong.cdf(x) == pytest.approx(q, abs=2e-3)
    shifted = mri_lesions.volumes(np.random.default_rng(5), 0.3).whole
    assert shifted == pytest.approx(mri_lesions.volumes(np.random.default_rng(5)).whole * np.exp(0.3))


def test_sites_draw_from_the_ranges_and_differ():
    sites = [mri_subjects.site_of(7, k) for k in range(40)]
    for name, (low, high, _) in mri_scanner.RANGES.items():
        values = np.array([np.ravel(getattr(s, name)) for s in sites])
        assert low <= values.min() and values.max() <= high
        assert np.ptp(values.mean(1)) > 0.3 * (high - low)
    assert mri_subjects.site_of(7, 3).described() == sites[3].described()
    assert json.loads(json.dumps(sites[0].described())) == sites[0].described()


def test_noise_is_that_of_the_site(drawn):
    """In the same head, what differs between two scans is noise: sd * gain, smaller in larger voxels."""
    at, subjects = drawn
    plan, head, lesion = subjects[0]
    where = mri_scanner.site(np.random.default_rng(1))._replace(bias=0.0, slab=np.zeros(4), gamma=np.ones(4))
    for noise in (0.0, 0.05):
        box = mri_scanner.scan(np.random.default_rng(2), head, lesion, plan, where._replace(noise=noise), at)["flair"]
        clean = mri_scanner.scan(np.random.default_rng(2), head, lesion, plan, where._replace(noise=0.0), at)["flair"]
        bright = (clean > 0.5 * where.gain[3]).reshape(-1)
        spread = (box.reshape(-1)[bright] - clean.reshape(-1)[bright].astype(float)).std() / where.gain[3]
        assert spread == pytest.approx(noise / np.prod(at.spacing) ** 0.2, rel=0.2, abs=1e-6)


def test_smooth_noise_has_unit_variance_and_no_bias():
    at = mri_fields.grid((60, 60, 40))
    many = [mri_fields.smooth(mri_fields.noise(np.random.default_rng(i), 12.0), at) for i in range(30)]
    assert np.mean(many) == pytest.approx(0, abs=0.05) and np.var(many) == pytest.approx(1, abs=0.1)
    flat = mri_fields.smooth(np.ones((8, 9, 7), np.float32), at)
    assert np.ptp(flat[10:-10, 10:-10, 10:-10]) < 0.2 * flat.mean()


def test_distances():
    places = (np.array([0.0, 3.0, 9.0, 12.0]), np.zeros(4), np.zeros(4))
    # a ball of radius 10 around the origin: depth 10 - distance, exact at the surface
    np.testing.assert_allclose(mri_fields.depth(places, (0, 0, 0), (10, 10, 10))[1:], [7, 1, -2], atol=1e-3)
    np.testing.assert_allclose(mri_fields.capsule(places, (0, 0, 0), (10, 0, 0), (2, 4)), [2, 2.6, 3.8, 2], atol=1e-6)
    np.testing.assert_allclose(mri_fields.cover(np.array([-1.0, -0.5, 0.0, 0.25, 2.0]), 1.0), [0, 0, 0.5, 0.75, 1])
    wave = np.broadcast_to(np.sin(2 * np.pi * np.arange(16) / 16), (4, 4, 16)).astype(np.float32)
    near = mri_fields.zero_distance(wave, 3.0)[0, 0]
    np.testing.assert_allclose(near[[0, 1, 15]], [0, 3, -3], rtol=0.15, atol=1e-5)  # nodes lie 3 mm apart
    at_nodes = mri_fields.looked_up(wave, [np.full(3, 5.0), np.full(3, -7.0), np.array([0.0, 12.0, 60.0])], 3.0)
    np.testing.assert_allclose(at_nodes, [0, 1, 1], atol=1e-6)  # periodic: node 20 is node 4


def test_partitions_are_those_of_fets_2022():
    from fedjax_seg.synthesis.mri import PARTITIONS, site_sizes

    assert {k: (len(v), sum(v), max(v), min(v)) for k, v in PARTITIONS.items()} == {
        "1": (23, 1251, 511, 4), "2": (33, 1251, 171, 4),
    }  # fmt: skip
    assert site_sizes("2", 0.1, 4, ())[:10] == (17, 17, 17, 4, 4, 4, 4, 4, 4, 4)
    assert site_sizes("1", 0.01, 1, ())[0] == 5
    assert site_sizes("1", 1.0, 4, (2, 9)) == (2, 9)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"size": (64, 64)}, "synthesis.size: (64, 64) given, three numbers"),
        ({"size": (64, 64, 8)}, "synthesis.size: z: 8 given"),
        ({"size": (64.5, 64, 48)}, "synthesis.size: x: 64.5 given, an integer"),
        ({"partition": "3"}, "synthesis.partition: unknown name '3'"),
        ({"scale": 0.0}, "synthesis.scale: 0.0 given"),
        ({"least": 0}, "synthesis.least: 0 given"),
        ({"sites": (4, 0)}, "synthesis.sites: site 2: 0 given"),
        ({"seed": -1}, "synthesis.seed: -1 given"),
        ({"sise": SIZE}, "unknown option 'sise'; did you mean"),
    ],
)
def test_wrong_options(tmp_path, options, message):
    with pytest.raises(UserError) as error:
        synthesis.make("mri", tmp_path / "new", **options)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()


def test_the_command_writes_a_folder(tmp_path, capsys):
    words = ["write", "--name=mri", f"--out={tmp_path / 'fets'}", "--size=32,32,24", "--sites=1,2", "--seed=5"]
    assert command.main(["synthesis", *words]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "fets")
    rows = list(csv.reader((tmp_path / "fets" / "partitioning.csv").open(newline="")))
    assert [row[0] for row in rows] == ["Partition_ID", "1", "2", "2"]
