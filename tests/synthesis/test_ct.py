"""Synthetic CT: textbook HU, tumours, profiles, and slices that depend on nothing but seed, split and number."""

import json

import numpy as np
import pytest

from fedjax_seg import synthesis
from fedjax_seg.core.checks import UserError
from fedjax_seg.data import records
from fedjax_seg.data.federated import digest
from fedjax_seg.synthesis import ct_anatomy, ct_lesions, ct_profiles, ct_slices

SIZE, N = 64, 24
CLIENTS = [f"client_{k + 1}" for k in range(5)]


@pytest.fixture(scope="module")
def drawn():
    """{client: its first slices}."""
    return {client: ct_slices.slices(client, np.arange(N), size=SIZE) for client in CLIENTS}


def pixels(slices, tissue):
    """HU of the pixels that are clear of every edge and of tumours."""
    return slices.image[(slices.tissue == tissue) & (slices.mask == 0)].astype(float)


# Textbook HU: Hounsfield's scale fixes air at -1000 and water at 0; the others as in radiology primers.
@pytest.mark.parametrize(
    "tissue, low, high",
    [
        (ct_anatomy.AIR, -1010, -990),
        (ct_anatomy.LUNG, -900, -700),
        (ct_anatomy.FAT, -120, -60),
        (ct_anatomy.MUSCLE, 30, 70),
        (ct_anatomy.LIVER, 40, 120),
        (ct_anatomy.BONE, 300, 1000),
    ],
)
@pytest.mark.parametrize("client", ["client_1", "client_2", "client_5"])
def test_hounsfield_units_of_tissues(drawn, client, tissue, low, high):
    values = pixels(drawn[client], tissue)
    assert len(values) > 50
    assert low <= np.median(values) <= high


def test_images_are_12_bit_hounsfield_units(drawn):
    for slices in drawn.values():
        assert slices.image.dtype == np.int16 and slices.image.shape == (N, SIZE, SIZE)
        assert -1024 <= slices.image.min() < -1000 and 400 < slices.image.max() <= 3071
        # the field of view holds the whole body: its rim is air
        rim = np.concatenate([slices.image[:, 0], slices.image[:, :, 0], slices.image[:, :, -1]], None)
        assert np.median(rim) == pytest.approx(-1000, abs=15)


def test_every_slice_has_a_tumour_inside_the_body(drawn):
    for client, slices in drawn.items():
        assert set(np.unique(slices.mask)) == {0, 1}
        areas = slices.mask.sum((1, 2))
        assert areas.min() >= 5, client
        assert areas.max() < 0.12 * SIZE**2
        in_air = (slices.mask == 1) & (slices.tissue == ct_anatomy.AIR)
        in_wall = (slices.mask == 1) & np.isin(slices.tissue, [ct_anatomy.FAT, ct_anatomy.MUSCLE, ct_anatomy.BONE])
        assert not in_air.any() and not in_wall.any()


def contrasts(slices):
    """Per slice: tumour's mean HU - mean HU of liver clear of it, and the same for lung; NaN where there is none."""
    rows = []
    for image, mask, tissue in zip(slices.image.astype(float), slices.mask, slices.tissue):
        inside = image[mask == 1].mean()
        row = []
        for organ in (ct_anatomy.LIVER, ct_anatomy.LUNG):
            around = image[(tissue == organ) & (mask == 0)]
            shares = ((tissue == organ) & (mask == 1)).sum() / mask.sum()
            row.append(inside - around.mean() if shares > 0.3 and len(around) > 20 else np.nan)
        rows.append(row)
    return np.array(rows).T


@pytest.mark.parametrize("client", CLIENTS)
def test_liver_tumours_are_darker_and_lung_tumours_brighter_than_what_surrounds_them(drawn, client):
    liver, lung = contrasts(drawn[client])
    liver, lung = liver[~np.isnan(liver)], lung[~np.isnan(lung)]
    assert len(liver) >= 3 and len(lung) >= 3
    assert liver.max() < -8 and -70 < np.median(liver) < -18
    assert lung.min() > 500


def test_profiles_differ_as_described(drawn):
    area = {c: np.median(s.mask.sum((1, 2))) for c, s in drawn.items()}
    assert area["client_1"] > 3 * area["client_2"]
    assert all(area["client_2"] < area[c] < area["client_1"] for c in ("client_3", "client_4", "client_5"))
    # noise where there is nothing else: air far from the body
    noise = {c: pixels(s, ct_anatomy.AIR).std() for c, s in drawn.items()}
    assert noise["client_3"] > 2 * max(v for c, v in noise.items() if c != "client_3")
    muscle = {c: np.median(pixels(s, ct_anatomy.MUSCLE)) for c, s in drawn.items()}
    assert 8 < muscle["client_4"] - muscle["client_2"] < 30  # 1.06 * HU + 14, half as many with contrast agent
    fewest, most = ct_profiles.MULTIFOCAL.tumours
    from scipy import ndimage

    counts = [ndimage.label(m, np.ones((3, 3)))[1] for m in drawn["client_5"].mask]
    assert min(counts) >= 1 and max(counts) <= most and np.mean(counts) > 1.5 and fewest == 2


def test_a_slice_alone_is_the_slice_of_the_batch(drawn):
    alone = ct_slices.slices("client_3", [5], size=SIZE)
    again = ct_slices.slices("client_3", np.arange(3, 7), size=SIZE)
    for one, whole in ((alone.image[0], drawn["client_3"].image[5]), (again.image[2], drawn["client_3"].image[5])):
        np.testing.assert_array_equal(one, whole)
    np.testing.assert_array_equal(alone.mask[0], drawn["client_3"].mask[5])


def test_seed_split_and_number_make_different_slices(drawn):
    first = drawn["client_1"].image[0].astype(int)
    others = [
        drawn["client_1"].image[1],
        drawn["client_2"].image[0],
        ct_slices.slices("client_1", [0], size=SIZE, seed=1).image[0],
        ct_slices.slices("shadow", [0], size=SIZE).image[0],
        ct_slices.slices("test", [0], size=SIZE).image[0],
    ]
    assert all((np.abs(first - other) > 100).mean() > 0.05 for other in others)


def test_test_and_shadow_take_the_profiles_in_turn():
    for split in ("test", "shadow"):
        assert ct_slices.clients_of(split, np.arange(7), 5, 1).tolist() == [0, 1, 2, 3, 4, 0, 1]
        assert ct_slices.clients_of(split, np.arange(6), 2, 2).tolist() == [0, 0, 1, 1, 0, 0]
    assert ct_slices.clients_of("client_4", np.arange(3), 5, 1).tolist() == [3, 3, 3]
    assert [ct_slices.profile_of(k) for k in (0, 4, 5, 11)] == [0, 4, 0, 1]


def test_slices_of_a_patient_share_anatomy_and_tumour():
    two = ct_slices.slices("client_1", np.arange(6), size=SIZE, slices_per_patient=3)
    images = two.image.astype(float)
    within = np.abs(images[0] - images[1]).mean(), np.abs(images[4] - images[5]).mean()
    between = np.abs(images[2] - images[3]).mean()
    assert max(within) < 0.5 * between
    assert (two.image[0] != two.image[1]).mean() > 0.5  # noise of its own
    overlap = (two.mask[0] & two.mask[1]).sum() / min(two.mask[0].sum(), two.mask[1].sum())
    assert overlap > 0.6
    assert two.mask[1].sum() > two.mask[0].sum() and two.mask[4].sum() > two.mask[3].sum()  # widest in the middle


def test_placed_tumours_fit(drawn):
    """Tumours of a slice do not overlap: each keeps its distance from the others."""
    import jax
    import jax.numpy as jnp

    at = ct_anatomy.grid(40)
    depth = 0.5 - jnp.sqrt(at.x**2 + at.y**2)  # a disc
    radius = jnp.array([0.2, 0.1, 0.1, 0.3])
    placed = jax.jit(lambda random: ct_lesions._placed(random, depth, at, radius, jnp.float32(0.05)))
    for seed in range(5):
        random = jax.random.uniform(jax.random.key(seed), (4, 1600))
        x, y, r = (np.asarray(a) for a in placed(random))
        assert r[0] == pytest.approx(0.2) and r[3] == 0  # the last one has no room
        there = r > 0
        assert (0.5 - np.hypot(x, y)[there] >= 0.6 * r[there] - 1e-6).all()
        for i in np.flatnonzero(there):
            for j in np.flatnonzero(there)[:i]:
                assert np.hypot(x[i] - x[j], y[i] - y[j]) > r[i] + r[j]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"size": 16}, "synthesis.size: 16 given"),
        ({"size": 64.5}, "synthesis.size: 64.5 given, an integer"),
        ({"clients": ()}, "synthesis.clients: () given"),
        ({"clients": (5, 0)}, "synthesis.clients: client_2: 0 given"),
        ({"test": -1}, "synthesis.test: -1 given"),
        ({"shadow": -1}, "synthesis.shadow: -1 given"),
        ({"seed": -1}, "synthesis.seed: -1 given"),
        ({"slices_per_patient": 0}, "synthesis.slices_per_patient: 0 given"),
        ({"sise": 64}, "unknown option 'sise'; did you mean 'size'?"),
    ],
)
def test_wrong_options(tmp_path, options, message):
    with pytest.raises(UserError) as error:
        synthesis.make("ct", tmp_path / "new", **options)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()


def test_profiles_are_facts_for_a_report():
    assert json.loads(json.dumps(ct_profiles.described()))["large"]["radius"] == [24.0, 46.0]
    assert len(ct_profiles.PROFILES) == 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("array_record", reason="the extra `tfds` is not installed")
    options = {"size": SIZE, "clients": (10, 5), "test": 4, "shadow": 6, "seed": 0}
    return synthesis.make("ct", tmp_path_factory.mktemp("ct") / "data", **options)


def test_the_written_data_set_is_what_data_reads(folder, drawn):
    data = records.tfds(root=str(folder))
    assert data.sites == ("client_1", "client_2", "test") and data.external == ("test",)
    assert [len(part) for part in data.splits[0].train] == [8, 4, 0]  # 80/20
    assert [len(part) for part in data.splits[0].test] == [2, 1, 4]
    assert data.aside.tolist() == list(range(19, 25)) and data.site_of[data.aside].tolist() == [0, 1, 0, 1, 0, 1]
    np.testing.assert_array_equal(data.arrays["y"][:10], drawn["client_1"].mask[:10])
    # window 40/400: -160 HU is 0, 240 HU is 1
    expected = np.clip((drawn["client_2"].image[:5].astype(np.float64) + 160) / 400, 0, 1)
    np.testing.assert_allclose(data.arrays["x"][10:15, ..., 0], expected, atol=1e-6)
    np.testing.assert_allclose(data.arrays["spacing"], 400 / SIZE)
    assert "procedural" in data.about["generator"]
    assert data.about["generated"]["profiles"] == {"client_1": "large", "client_2": "small"}
    assert data.about["generated"]["seed"] == 0


def test_tfds_opens_the_data_set_without_tensorflow(folder):
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(str(folder))
    assert {k: s.num_examples for k, s in builder.info.splits.items()} == {
        "client_1": 10, "client_2": 5, "test": 4, "shadow": 6,
    }  # fmt: skip
    case = builder.as_data_source("shadow")[1]
    assert case["image"].dtype == np.int16 and case["mask"].dtype == np.uint8 and case["image"].shape == (SIZE, SIZE)
    assert (case["case"], case["site"]) == (b"shadow_00001", b"client_2")


def test_writing_again_gives_the_same_and_other_options_are_refused(folder):
    options = {"size": SIZE, "clients": (10, 5), "test": 4, "shadow": 6}
    before = records.tfds(root=str(folder))
    synthesis.make("ct", folder, **options, seed=0)
    assert digest(before) == digest(records.tfds(root=str(folder)))
    with pytest.raises(UserError, match="holds a data set of other options; name a new or empty folder"):
        synthesis.make("ct", folder, **options, seed=1)
