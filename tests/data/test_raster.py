"""Single image files: values by hand for every kind of file, one clear line for every damage, geometry by hand."""

import io

import numpy as np
import pytest
from PIL import Image

from fedjax_seg.core.checks import UserError
from fedjax_seg.data import raster
from fedjax_seg.data.raster import Look

GREY = np.array([[0, 51, 102], [153, 204, 255]], np.uint8)  # fifths of 255
DEEP = np.array([[0, 1, 256], [4660, 43981, 65535]], np.uint16)
COLOUR = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255]], [[10, 20, 30], [255, 255, 255], [0, 0, 0]]], np.uint8)


def look(**changes):
    look = Look("gray", (2, 3), "resize", "area", "nearest", 0.0, (), 1.0, 0.0)
    return look._replace(**changes)


def save(path, image, **options):
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(path, **options)
    return path


def palette():
    image = Image.fromarray(np.array([[0, 1, 2], [2, 1, 0]], np.uint8))
    image = image.convert("P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    return image


@pytest.mark.parametrize(
    "name, image, bits, values",
    [
        ("a.png", GREY, 8, GREY),
        ("a.tif", GREY, 8, GREY),
        ("a.bmp", GREY, 8, GREY),
        ("a.png", DEEP, 16, DEEP),
        ("a.tif", DEEP, 16, DEEP),
        ("a.tif", DEEP.astype(">u2"), 16, DEEP),
        ("a.png", COLOUR, 8, COLOUR),
        ("a.png", GREY > 128, 8, [[0, 0, 0], [255, 255, 255]]),
        ("a.png", palette(), 8, COLOUR[[[0, 0, 0], [0, 0, 0]], [[0, 1, 2], [2, 1, 0]]]),
        ("a.tif", DEEP.astype(np.int32) - 9, 0, DEEP.astype(int) - 9),
        ("a.tif", GREY.astype(np.float32) / 7, 0, GREY.astype(np.float32) / 7),
        # alpha 102 = 0.4: 0.4 * colour + 0.6 * 255
        ("a.png", np.dstack([COLOUR, np.full((2, 3), 102, np.uint8)]), 8, COLOUR * 0.4 + 153),
        ("a.png", np.dstack([GREY, np.full((2, 3), 0, np.uint8)]), 8, np.full((2, 3), 255)),
    ],
)
def test_values_as_stored(tmp_path, name, image, bits, values):
    found = raster.decode(save(tmp_path / name, image))
    values = np.asarray(values, np.float32)
    assert found.bits == bits and found.pixels.dtype == np.float32
    assert found.pixels.shape == (2, 3, 3 if values.ndim == 3 else 1)
    np.testing.assert_allclose(found.pixels.squeeze(), values, atol=1e-4)
    assert found.transparent == (image is not COLOUR and np.ndim(image) == 3)


def test_jpeg_and_its_turn(tmp_path):
    flat = np.full((16, 24), 77, np.uint8)
    turned = Image.Exif()
    turned[0x0112] = 6
    found = raster.decode(save(tmp_path / "a.jpg", flat, exif=turned))
    assert found.pixels.shape == (16, 24, 1) and found.turned  # as stored, where masks are drawn
    np.testing.assert_allclose(found.pixels, 77, atol=1)
    assert not raster.decode(save(tmp_path / "b.jpg", flat)).turned


def test_the_same_picture_in_two_formats_is_one(tmp_path):
    files = [save(tmp_path / f"a.{end}", GREY) for end in ("png", "tif")]
    hashes = {raster.decode(f).sha256 for f in files}
    assert len(hashes) == 1 and raster.decode(save(tmp_path / "b.png", GREY.T)).sha256 not in hashes


def encoded(image, form, **options):
    data = io.BytesIO()
    Image.fromarray(image).save(data, form, **options)
    return data.getvalue()


NOISE = np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)
NAN = np.where(GREY > 128, np.nan, 1).astype(np.float32)
SEVERAL = {"save_all": True, "append_images": [Image.fromarray(GREY)]}


@pytest.mark.parametrize(
    "content, text",
    [
        (None, "no such file"),
        (b"", r"an empty file \(0 bytes\); copy it again"),
        (b"image,mask", r"no image that can be read \(it starts with b'image,ma'\); PNG, TIFF or JPEG expected"),
        (bytes(128) + b"DICM", "a DICOM file: export it as 16-bit PNG or TIFF"),
        (b"\x1f\x8b\x08\x00", "a NIfTI volume: export its slices"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image that can be read"),  # starts no Ghostscript
        (encoded(NOISE, "JPEG")[:-900], "cut short or damaged .*truncated.*; copy it again"),
        (encoded(NOISE, "PNG")[:-900], "cut short or damaged .*truncated"),
        (encoded(NOISE, "TIFF")[:-900], "cut short or damaged"),
        (encoded(NOISE, "PNG")[:20], "damaged|no image"),
        (encoded(GREY, "TIFF", **SEVERAL), "2 pages or frames; one image per file expected"),
        (encoded(NAN, "TIFF"), "3 pixels are NaN or infinite"),
    ],
)
def test_damage_is_told_in_one_line(tmp_path, content, text):
    path = tmp_path / "x.png"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=text) as error:
        raster.decode(path)
    assert "\n" not in str(error.value) and str(path) not in str(error.value)


@pytest.mark.parametrize(
    "image, allowed, labels",
    [
        (np.array([[0, 1]], np.uint8), (), [[0, 1]]),
        (np.array([[0, 255]], np.uint8), (), [[0, 1]]),
        (np.array([[False, True]]), (), [[0, 1]]),
        (np.array([[0, 0]], np.uint8), (), [[0, 0]]),
        (np.array([[0, 4, 2, 205]], np.uint8), (0, 205, 2, 4), [[0, 3, 2, 1]]),
        (np.array([[100, 850]], np.uint16), (850, 100), [[1, 0]]),
        (np.array([[0, 1.00001526]], np.float32), (), [[0, 1]]),
        (np.array([[[255] * 3, [0] * 3]], np.uint8), (), [[1, 0]]),
        (palette(), (0, 1, 2), [[0, 1, 2], [2, 1, 0]]),
    ],
)
def test_labels_of_a_mask(tmp_path, image, allowed, labels):
    found = raster.labels(raster.decode_mask(save(tmp_path / "m.tif", image)), allowed)
    assert found.dtype == np.uint8 and found.tolist() == labels


@pytest.mark.parametrize(
    "image, allowed, text",
    [
        (np.array([[0, 1, 255]], np.uint8), (), "mask values 0, 1, 255 found, 0 and 1 or 0 and 255 allowed"),
        (
            np.array([[0, 3, 5]], np.uint8),
            (0, 2, 3),
            r"mask values 0, 3, 5 found, 0, 2, 3 allowed \(data.mask_values\)",
        ),
        (np.arange(20, dtype=np.uint8)[None], (), r"6, 7, ... \(20 values\) found"),
        (np.array([[0, 0.5]], np.float32), (), "fractions"),
        (np.array([[[255, 0, 0], [0, 0, 0]]], np.uint8), (), "a mask in colours"),
        (np.array([[[255, 9], [0, 255]]], np.uint8), (), "transparent"),
    ],
)
def test_other_masks_are_refused(tmp_path, image, allowed, text):
    with pytest.raises(UserError, match=text):
        raster.labels(raster.decode_mask(save(tmp_path / "m.tif", image)), allowed)


def unit(tmp_path, image, **changes):
    return raster.to_unit(raster.decode(save(tmp_path / "a.tif", image)), look(**changes))


def test_the_range_of_the_bit_depth(tmp_path):
    np.testing.assert_allclose(unit(tmp_path, GREY)[..., 0], [[0, 0.2, 0.4], [0.6, 0.8, 1]], atol=1e-6)
    np.testing.assert_allclose(unit(tmp_path, DEEP)[1, 2], 1)
    with pytest.raises(UserError, match=r"32-bit TIFF F: its range of values is not known; set data.window"):
        unit(tmp_path, GREY.astype(np.float32))


def test_a_window_in_hounsfield_units(tmp_path):
    # centre 40, width 400: -160 HU is 0, 40 HU is 1/2, 240 HU is 1; stored = (HU + 1024) / 2
    stored = (np.array([[-160, 40, 240], [-1024, 140, 440]]) + 1024) // 2
    found = unit(tmp_path, stored.astype(np.uint16), window=(40.0, 400.0), hu_slope=2.0, hu_offset=-1024.0)
    np.testing.assert_allclose(found[..., 0], [[0, 0.5, 1], [-2.16, 0.75, 1.5]], atol=1e-5)


def test_grey_and_colour(tmp_path):
    luma = unit(tmp_path, COLOUR)
    np.testing.assert_allclose(luma[0, :, 0], [0.299, 0.587, 0.114], atol=1e-6)  # ITU-R BT.601
    np.testing.assert_allclose(luma[1, 1:, 0], [1, 0], atol=1e-6)
    np.testing.assert_allclose(unit(tmp_path, GREY, channels="rgb")[0, 1], [0.2] * 3, atol=1e-6)


X = np.arange(24, dtype=np.float32).reshape(4, 6)
Y = np.array([[0, 0, 0, 0, 2, 2], [0, 1, 0, 0, 2, 2], [0, 0, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0]], np.uint8)


def fitted(x, y, **changes):
    x, y, zoom = raster.fit(x[..., None], y, look(**changes))
    return x[..., 0], y, zoom


def test_area_and_majority():
    x, y, zoom = fitted(X, Y, mask_resize="majority")
    np.testing.assert_allclose(x, [[3.5, 5.5, 7.5], [15.5, 17.5, 19.5]], atol=1e-5)  # means of 2x2
    assert y.tolist() == [[0, 0, 2], [0, 1, 0]] and zoom == (2, 2)
    half = np.array([[0, 1]], np.uint8)
    assert fitted(half * 1.0, half, size=(1, 1), mask_resize="majority")[1].tolist() == [[1]]  # a tie is a lesion


def test_nearest_invents_no_label():
    _, y, _ = fitted(X, Y)
    assert y.shape == (2, 3) and set(np.unique(y)) <= {0, 1, 2}
    assert fitted(X, Y, size=(8, 12))[1].tolist() == np.kron(Y, np.ones((2, 2), int)).tolist()


def test_the_same_size_is_left_alone():
    x, y, zoom = fitted(X, Y, size=(4, 6))
    assert np.array_equal(x, X) and np.array_equal(y, Y) and zoom == (1, 1)


def test_crop_cuts_and_fills_around_the_centre():
    x, y, zoom = fitted(X, Y, size=(5, 3), unify="crop", fill=0.5)
    assert x.tolist() == [[1, 2, 3], [7, 8, 9], [13, 14, 15], [19, 20, 21], [0.5] * 3] and zoom == (1, 1)
    assert y.tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 1], [0, 1, 0], [0, 0, 0]]


def test_pad_keeps_proportions():
    x, y, zoom = fitted(X, Y, size=(3, 3), unify="pad", mask_resize="majority")
    # a row of fill above and below, then 2x2 means
    np.testing.assert_allclose(x[0], [0.25, 1.25, 2.25], atol=1e-5)
    np.testing.assert_allclose(x[1], [9.5, 11.5, 13.5], atol=1e-5)
    assert zoom == (2, 2) and y.shape == (3, 3)
