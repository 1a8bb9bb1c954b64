"""The diffusion generator: its schedule and sampler against closed forms, and a tiny model through the command."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from fedjax_seg import data
from fedjax_seg.core.checks import UserError
from fedjax_seg.data import records
from fedjax_seg.synthesis import __main__ as program
from fedjax_seg.synthesis import diffusion, diffusion_data, diffusion_sampling, diffusion_training

pytestmark = pytest.mark.usefixtures("quick_compile")

TINY = {
    "size": 8,
    "window": (0.0, 200.0),
    "width": 4,
    "depth": 1,
    "patch": 1,
    "batch": 16,
    "rate": 5e-3,
    "held_out": 0.2,
}
FLAGS = ["--size=8", "--window=0,200", "--width=4", "--depth=1", "--patch=1", "--batch=16", "--rate=0.005"]
FLAGS = [*FLAGS, "--held_out=0.2"]
PEOPLE = 20  # of each client


def hu(mask, offset):
    """-50 outside and +50 inside of the mask, and what the client adds."""
    return (100 * mask.astype(float) - 50 + offset).round().astype(np.int16)


@pytest.fixture(scope="module")
def slices(tmp_path_factory):
    """A data set of 8x8 slices that are their masks; those of the second client are brighter by 40 HU."""
    random = np.random.default_rng(0)
    splits = {}
    for split, n in (("client_1", PEOPLE), ("client_2", PEOPLE), ("test", 5)):
        mask = np.zeros((n, 8, 8), np.uint8)
        for one in mask:
            y, x = random.integers(0, 5, 2)
            one[y : y + 3, x : x + 3] = 1
        image = hu(mask, 40 if split == "client_2" else 0) + random.integers(-3, 4, mask.shape).astype(np.int16)
        patient = [f"{split}_{i}" for i in range(n)]
        spacing = np.full((n, 2), 4.0, np.float32)
        splits[split] = {"image": image, "mask": mask, "patient": patient, "spacing": spacing}
    return records.write(
        tmp_path_factory.mktemp("slices") / "d", splits, name="shapes", about={"generator": "shapes", "synthetic": True}
    )


@pytest.fixture(scope="module")
def workdir(slices, tmp_path_factory):
    """A model that has been trained, by the command."""
    folder = tmp_path_factory.mktemp("model") / "w"
    words = ["train", f"--data={slices}", f"--workdir={folder}", "--steps=400", *FLAGS]
    assert program.main(["synthesis", *words]) == 0
    return folder


@pytest.fixture(scope="module")
def trained(workdir):
    return diffusion_training.load(workdir / diffusion_training.MODEL)


@pytest.fixture(scope="module")
def seen(slices):
    return diffusion_data.read(str(slices), size=8, window=(0.0, 200.0), clients=(), held_out=0.2)


def test_the_schedule_is_the_one_of_nichol_and_dhariwal():
    got = diffusion.cosine(1000)
    f = lambda t: math.cos((t / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2  # their equation 17
    assert got.shape == (1001,) and got[0] == 1
    for t in (1, 250, 500, 900, 999):
        assert got[t] == pytest.approx(f(t) / f(0), rel=1e-9)
    assert got[500] == pytest.approx(0.4938, abs=1e-4)  # computed by hand: cos(0.791634)^2 / cos(0.012467)^2
    assert got[1000] == pytest.approx(1e-3 * got[999], rel=1e-9)  # beta is clipped at 0.999
    assert np.all(np.diff(got) < 0)


def test_noise_has_the_moments_of_q():
    noise = jax.random.normal(jax.random.key(0), (2, 200_000))
    alpha_bar = jnp.array([0.9, 0.2])
    z = np.asarray(diffusion.noised(jnp.full_like(noise, 0.7), noise, alpha_bar), np.float64)
    np.testing.assert_allclose(z.mean(1), 0.7 * np.sqrt([0.9, 0.2]), atol=0.01)
    np.testing.assert_allclose(z.var(1), [0.1, 0.8], rtol=0.02)


def test_v_gives_back_the_image_and_the_noise():
    x, e = jax.random.normal(jax.random.key(1), (2, 3, 4, 4, 1))
    alpha_bar = jnp.array([1.0, 0.4, 1e-6])
    z, v = diffusion.noised(x, e, alpha_bar), diffusion.velocity(x, e, alpha_bar)
    for got, right in zip(diffusion.image_and_noise(z, v, alpha_bar), (x, e)):
        np.testing.assert_allclose(got, right, atol=1e-5)
    np.testing.assert_allclose(v[0], e[0], atol=1e-6)  # a = 1: v is the noise


MEAN, STD = 0.3, 0.2


def ideal(z, t):
    """E[v | z_t] for x ~ N(MEAN, STD^2): what a perfect network says (posterior mean of a Gaussian)."""
    alpha_bar = jnp.asarray(diffusion.cosine(), jnp.float32)[t]
    a, s = diffusion.amounts(alpha_bar, z)
    x = MEAN + a * STD**2 / (a**2 * STD**2 + s**2) * (z - a * MEAN)
    return (a * z - x) / s


def test_ddim_maps_noise_to_the_quantiles_of_a_gaussian():
    # The probability flow keeps quantiles: noise z becomes MEAN + STD z, each value by itself.
    z = jnp.linspace(-3, 3, 13)[:, None]
    got = diffusion.ddim(ideal, z, steps=500, limit=None)
    np.testing.assert_allclose(got, MEAN + STD * z, atol=0.01)
    few = diffusion.ddim(ideal, z, steps=20, limit=None)
    assert 0.01 < np.abs(few - MEAN - STD * z).max() < 0.1  # and the error comes from the number of steps


def test_with_fresh_noise_the_gaussian_has_its_moments():
    keys = jax.random.split(jax.random.key(3), 4000)
    z = jax.random.normal(jax.random.key(2), (4000, 1))
    got = np.asarray(diffusion.ddim(ideal, z, steps=200, eta=1.0, keys=keys, limit=None), np.float64)
    assert got.mean() == pytest.approx(MEAN, abs=0.015) and got.std() == pytest.approx(STD, rel=0.05)
    assert abs(np.corrcoef(got[:, 0], np.asarray(z)[:, 0])[0, 1]) < 0.1  # the first noise is forgotten
    with pytest.raises(UserError, match="eta: above 0 needs a key"):
        diffusion.ddim(ideal, z, steps=2, eta=0.5)


def test_images_stay_within_the_limit():
    z = jnp.linspace(-9, 9, 7)[:, None]
    assert np.abs(diffusion.ddim(ideal, z, steps=20, limit=None)).max() > 1
    assert np.abs(diffusion.ddim(ideal, z, steps=20)).max() <= 1


def test_times_are_spread_evenly():
    times = np.asarray(diffusion_training.drawn_times(jax.random.key(5), 10))
    assert np.all((times >= 1) & (times <= 1000))
    np.testing.assert_array_equal(np.sort((times - times.min()) // 100), np.arange(10))


def test_the_unit_of_the_files():
    unit = diffusion_data.Unit(-160.0, 240.0, "int16")
    np.testing.assert_array_equal(unit.stored(np.array([-2, -1, 0, 0.5, 1.0])), [-160, -160, 40, 140, 240])
    np.testing.assert_allclose(unit.read(np.array([-160, 40, 240], np.int16)), [-1, 0, 1])


def test_what_a_model_learns_from(seen):
    assert seen.x.shape == (2 * PEOPLE, 8, 8, 1) and seen.clients == ("client_1", "client_2")
    assert len(seen.train) == 32 and len(seen.held_out) == 8  # a fifth of the patients of each client
    assert not {seen.patient[i] for i in seen.train} & {seen.patient[i] for i in seen.held_out}
    assert not any(name.startswith("test") for name in seen.patient)
    assert not seen.real and seen.spacing == (4.0, 4.0)
    for k, right in enumerate((0.5, 0.9)):  # 50 and 90 HU, in a window of +-100 HU
        inside = seen.x[..., 0][(seen.label > 0) & (seen.client == k)[:, None, None]]
        assert np.abs(inside - right).max() <= 0.031
    assert diffusion_data.as_input(np.array([[0, 1]]), 2).ravel().tolist() == [-1, 1]


def test_an_interrupted_training_ends_with_the_same_bits(slices, tmp_path):
    quiet = lambda line: None
    for name, stops in (("whole", (7,)), ("parts", (3, 4, 7))):
        for steps in stops:
            diffusion_training.train(data=str(slices), workdir=str(tmp_path / name), steps=steps, tell=quiet, **TINY)
    whole, parts = (np.load(tmp_path / name / diffusion_training.MODEL) for name in ("whole", "parts"))
    assert whole.files == parts.files and len(whole.files) > 50
    for name in set(whole.files) - {"losses"}:
        np.testing.assert_array_equal(whole[name], parts[name], err_msg=name)
    assert whole[".step"] == 7 and list(parts["losses"][:, 0]) == [3, 4, 7]


def test_training_lowers_the_loss(trained):
    first, last = trained.losses[0, 1], trained.losses[-4:, 1].mean()
    assert last < 0.35 * first, trained.losses[:, 1]
    assert np.isfinite(trained.losses).all() and trained.losses[-1, 0] == 400


def drawn(trained, seen, **changed):
    options = {"steps": 20, "eta": 0.0, "seed": 0} | changed
    return diffusion_sampling.draw(trained, seen, "client_1", np.arange(6), 2, **options)


def test_the_tumour_is_where_the_mask_says_and_the_client_is_kept(trained, seen):
    mask = np.zeros((4, 8, 8), np.uint8)
    mask[:2, 0:3, 0:3] = 1
    mask[2:, 4:7, 3:6] = 1
    client, numbers = np.array([0, 1, 0, 1]), np.array([0, 0, 0, 0])  # one noise for all
    x = diffusion_sampling.images(trained, mask, client, "test", numbers, 2, steps=20, eta=0.0, seed=0)[..., 0]
    inside, outside = ([float(one[m == v].mean()) for one, m in zip(x, mask)] for v in (1, 0))
    # 100 HU brighter inside, the second client 40 HU brighter; the window is 200 HU wide.
    assert all(0.6 < a - b < 1.3 for a, b in zip(inside, outside)), (inside, outside)
    assert 0.2 < outside[1] - outside[0] < 0.6 and 0.2 < outside[3] - outside[2] < 0.6, outside


def test_samples_depend_on_the_seed_and_the_number_alone(trained, seen):
    first = drawn(trained, seen)
    np.testing.assert_array_equal(first.x, drawn(trained, seen).x)
    assert np.abs(first.x - drawn(trained, seen, seed=1).x).max() > 0.05
    alone = diffusion_sampling.draw(trained, seen, "client_1", np.array([4]), 2, steps=20)
    np.testing.assert_allclose(alone.x[0], first.x[4], atol=1e-5)
    np.testing.assert_array_equal(alone.label[0], first.label[4])
    assert not np.array_equal(
        first.label, diffusion_sampling.draw(trained, seen, "test", np.arange(6), 2, steps=20).label
    )


def test_a_placed_mask_stays_about_where_it_was():
    label = np.zeros((32, 32), np.uint8)
    label[10:16, 20:24] = 2
    label[15, 24:27] = 2
    centre = np.array(ndimage.center_of_mass(label))
    placed = [diffusion_sampling.placed_mask(label, np.random.default_rng(i)) for i in range(40)]
    assert set(np.unique(placed)) == {0, 2}
    for one in placed:
        assert np.abs(np.array(ndimage.center_of_mass(one)) - centre).max() < 2  # 3 % of 32, and a pixel
        assert 0.5 * np.count_nonzero(label) <= np.count_nonzero(one) <= 1.6 * np.count_nonzero(label)
    assert len({one.tobytes() for one in placed}) > 20
    empty = np.zeros((8, 8), np.uint8)
    assert not diffusion_sampling.placed_mask(empty, np.random.default_rng(0)).any()


@pytest.fixture(scope="module")
def written(workdir, tmp_path_factory):
    """A data set of the model, by the command."""
    out = tmp_path_factory.mktemp("out") / "d"
    words = ["sample", f"--workdir={workdir}", f"--out={out}", "--clients=9,4", "--test=5", "--steps=20"]
    assert program.main(["synthesis", *words]) == 0
    return out


def test_the_data_set_is_read_as_any_other(written, workdir, trained):
    got = data.make("tfds", root=str(written), window=(0.0, 200.0))
    assert got.sites == ("client_1", "client_2", "test") and got.external == ("test",)
    assert np.bincount(got.site_of).tolist() == [9, 4, 5]
    assert got.about["generator"].startswith("ct diffusion")
    told = got.about["generated"]
    assert told["training_data"]["digest"] == trained.facts["digest"] and told["model"]["steps"] == 400
    assert (
        told["training_data"]["generated"] == {"generator": "shapes", "synthetic": True}
        and not told["training_data"]["real"]
    )
    assert (told["steps"], told["seed"], told["slices"]) == (20, 0, {"client_1": 9, "client_2": 4, "test": 5})
    assert str(workdir) not in json.dumps(told)  # nobody's folders in a data set that is handed on
    columns, _ = records.read(written)
    image, mask = columns["client_1"]["image"], columns["client_1"]["mask"] > 0
    assert image.dtype == np.int16 and image.min() >= -100 and image.max() <= 100
    assert image[mask].mean() - image[~mask].mean() > 50
    np.testing.assert_allclose(got.arrays["spacing"], 4.0)


def test_pictures_and_the_memorisation_check_come_with_it(written):
    sizes = {name: Image.open(written / name).size for name in ("samples.png", "memorisation.png")}
    assert min(min(size) for size in sizes.values()) > 400
    found = json.loads((written / "memorisation.json").read_text())
    assert found["verdict"].startswith("memorisation:") and 0 <= found["nearer"] <= 1
    rows = (written / "memorisation.csv").read_text().splitlines()
    assert len(rows) == 1 + 18 + 8  # samples and held-out slices


def test_a_folder_of_real_images(tmp_path):
    random = np.random.default_rng(0)
    lines = ["image,mask,site,patient"]
    for i in range(8):
        Image.fromarray(random.integers(0, 256, (16, 16), np.uint8)).save(tmp_path / f"i{i}.png")
        Image.fromarray(np.eye(16, dtype=np.uint8) * 255).save(tmp_path / f"m{i}.png")
        lines.append(f"i{i}.png,m{i}.png,{'AB'[i % 2]},p{i}")
    (tmp_path / "metadata.csv").write_text("\n".join(lines))
    got = diffusion_data.read(str(tmp_path), size=8, window=(), clients=("B",), held_out=0.25)
    np.testing.assert_array_equal(  # and it is the default of a folder of images
        got.x, diffusion_data.read(str(tmp_path), size=8, window=None, clients=("B",), held_out=0.25).x
    )
    assert got.real and got.clients == ("B",) and got.unit == diffusion_data.Unit(0.0, 255.0, "uint8")
    assert (len(got.train), len(got.held_out)) == (3, 1) and -1 <= got.x.min() < got.x.max() <= 1


def test_faults_are_one_line(slices, workdir, tmp_path, capsys):
    train = lambda *words: ("train", f"--data={slices}", f"--workdir={workdir}", *FLAGS, *words)
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / diffusion_training.MODEL).write_bytes(b"PK broken")
    cases = [
        (train("--width=8"), "width: 8 given, the model in"),
        (train("--size=7"), "size: 7 given, a multiple of 2 expected"),
        (train("--clients=client_9"), "clients: unknown name 'client_9'; did you mean"),
        (train("--rate=0"), "rate: 0.0 given"),
        (("train", f"--data={slices}", f"--workdir={tmp_path / 'n'}", "--size=8", "--window="), "window: () given"),
        (("train", f"--workdir={tmp_path}"), "data: no folder given"),
        (("train", f"--data={slices}"), "workdir: no folder given"),
        (("train", f"--data={tmp_path / 'none'}", f"--workdir={tmp_path}"), "does not exist"),
        (("sample", f"--workdir={bad}", f"--out={tmp_path / 'o'}"), "no model of this program"),
        (("sample", f"--workdir={tmp_path}", f"--out={tmp_path / 'o'}"), "train one first"),
        (("sample", f"--workdir={workdir}", f"--out={bad}"), "holds other files"),
        (("sample", f"--workdir={workdir}", f"--out={tmp_path / 'o'}", "--steps=0"), "steps: 0 given"),
        (("sample", f"--workdir={workdir}", f"--out={tmp_path / 'o'}", "--clients="), "clients: () given"),
    ]
    for words, message in cases:
        assert program.main(["synthesis", *words]) == 1, words
        told = capsys.readouterr().err
        assert told.startswith("error: ") and told.count("\n") == 1 and message in told, (words, told)
    assert not (tmp_path / "o").exists()


def test_other_data_than_in_training_are_refused(slices, workdir, tmp_path, capsys):
    columns, _ = records.read(slices)
    other = {name: {k: c[k] for k in ("image", "mask", "patient")} for name, c in columns.items()}
    records.write(tmp_path / "d", other, name="shapes", about={"generator": "shapes", "synthetic": True})
    for words in (
        ("train", f"--data={tmp_path / 'd'}", f"--workdir={workdir}", *FLAGS),
        ("sample", f"--data={tmp_path / 'd'}", f"--workdir={workdir}", f"--out={tmp_path / 'o'}"),
    ):
        assert program.main(["synthesis", *words]) == 1
        assert "other slices than those" in capsys.readouterr().err
