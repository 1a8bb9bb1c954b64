"""NIfTI files against nibabel's own reading; every damage in one line."""

import gzip
import io
import struct

import nibabel
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_seg.core.checks import UserError
from fedjax_seg.data import nifti

OBLIQUE = np.array([[0.9, -0.3, 0.1, -80], [0.2, 1.1, 0.4, 12], [-0.1, 0.3, 2.9, 7], [0, 0, 0, 1]])
FLIPPED = np.array([[-1.0, 0, 0, 90], [0, -1, 0, 239], [0, 0, 1.5, -70], [0, 0, 0, 1]])
VOXELS = np.random.default_rng(0).integers(-300, 3000, (5, 4, 3)).astype(np.int16)
LABELS = np.array([0, 1, 2, 4] * 15, np.uint8).reshape(5, 4, 3)


def saved(path, data, affine=FLIPPED, kind=nibabel.Nifti1Image, **options):
    nibabel.save(kind(data, affine, **options), path)
    return path


def scaled_labels(path, dtype):
    """A float64 label map saved with an integer header: the way that makes nibabel scale it."""
    own = nibabel.Nifti1Image(LABELS.astype(np.float64), FLIPPED)
    own.header.set_data_dtype(dtype)
    nibabel.save(own, path)
    return path


@pytest.mark.parametrize("end", [".nii", ".nii.gz"])
@pytest.mark.parametrize(
    "data, options",
    [
        (VOXELS, {}),
        (VOXELS.astype(np.float32) / 7, {}),
        (VOXELS.astype(np.float64) / 7, {}),
        (VOXELS.astype(np.uint8), {}),
        (VOXELS.astype(np.int64), {"dtype": np.int64}),
        (VOXELS.astype(">i2"), {}),
        (VOXELS[..., None], {}),
        (VOXELS[..., None, None], {}),
        (VOXELS, {"kind": nibabel.Nifti2Image}),
    ],
)
def test_images_as_nibabel_reads_them(tmp_path, end, data, options):
    path = saved(tmp_path / f"a{end}", data, **options)
    found = nifti.read_image(path)
    assert found.data.dtype == np.float32 and found.data.shape == found.geometry.shape == (5, 4, 3)
    np.testing.assert_array_equal(found.data, nibabel.load(path).get_fdata().reshape(5, 4, 3).astype(np.float32))
    np.testing.assert_array_equal(found.geometry.affine, nibabel.load(path).affine)
    np.testing.assert_allclose(found.geometry.spacing, [1, 1, 1.5])
    found.data[0, 0, 0] = 1  # it is the caller's own


def test_scaled_big_endian_and_extended(tmp_path):
    header = nibabel.Nifti1Header(endianness=">")
    header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"sixteen and more bytes of text"))
    own = nibabel.Nifti1Image(VOXELS.astype(np.float64) / 7 + 0.5, OBLIQUE, header)
    own.header.set_data_dtype(np.int16)
    nibabel.save(own, tmp_path / "a.nii.gz")
    raw = gzip.decompress((tmp_path / "a.nii.gz").read_bytes())
    assert raw[:4] == struct.pack(">i", 348) and struct.unpack(">f", raw[112:116])[0] not in (0, 1)  # scl_slope
    found = nifti.read_image(tmp_path / "a.nii.gz")
    np.testing.assert_array_equal(found.data, nibabel.load(tmp_path / "a.nii.gz").get_fdata().astype(np.float32))
    np.testing.assert_allclose(found.data, VOXELS / 7 + 0.5, atol=0.01)
    np.testing.assert_allclose(found.geometry.spacing, np.linalg.norm(OBLIQUE[:3, :3], axis=0), rtol=1e-6)


def test_the_content_tells_whether_it_is_packed(tmp_path):
    plain = saved(tmp_path / "a.nii", VOXELS).read_bytes()
    for name, content in (("b.nii.gz", plain), ("c.NII", gzip.compress(plain, mtime=0)), ("d", plain)):
        (tmp_path / name).write_bytes(content)
        np.testing.assert_array_equal(nifti.read_image(tmp_path / name).data, VOXELS)


def test_nan_and_infinite_voxels_are_kept(tmp_path):
    data = VOXELS.astype(np.float64)
    data[0, 0, 0], data[1, 0, 0], data[2, 0, 0] = np.nan, np.inf, 1e300
    found = nifti.read_image(saved(tmp_path / "a.nii", data)).data
    assert np.isnan(found[0, 0, 0]) and np.isinf(found[[1, 2], 0, 0]).all() and (~np.isfinite(found)).sum() == 3


def test_channels_only_where_allowed(tmp_path):
    four = np.stack([VOXELS, VOXELS + 1], -1)
    for name, data in (("a.nii", four), ("b.nii.gz", four[:, :, :, None])):  # (5, 4, 3, 2) and (5, 4, 3, 1, 2)
        path = saved(tmp_path / name, data)
        found = nifti.read_image(path, channels=True)
        np.testing.assert_array_equal(found.data, four)
        assert found.geometry.shape == (5, 4, 3) and nifti.read_shape(path) == (5, 4, 3, 2)
        for read in (nifti.read_image, nifti.read_labels):
            with pytest.raises(UserError, match=rf"{name}: shape 5x4x3x(1x)?2 found, one volume \[X, Y, Z\] expected"):
                read(path)
    assert nifti.read_image(saved(tmp_path / "c.nii", VOXELS), channels=True).data.shape == (5, 4, 3)
    with pytest.raises(UserError, match="shape 5x4 found"):
        nifti.read_image(saved(tmp_path / "d.nii", VOXELS[..., 0]))


def packed(data=VOXELS):
    file = io.BytesIO()
    nibabel.Nifti1Image(data, FLIPPED).to_file_map({"image": nibabel.FileHolder(fileobj=file)})
    return file.getvalue()


def changed(at, form, *values):
    content = bytearray(packed())
    struct.pack_into(form, content, at, *values)
    return bytes(content)


def wrong_checksum():
    content = bytearray(gzip.compress(packed(), mtime=0))
    content[-8] ^= 1
    return bytes(content)


def flipped_bit():
    content = bytearray(gzip.compress(packed(np.random.default_rng(1).integers(0, 999, (20, 20, 20), np.int16))))
    content[len(content) // 2] ^= 16
    return bytes(content)


RGB = VOXELS[..., :3].astype("u1")[..., None].repeat(3, -1).copy().view([("R", "u1"), ("G", "u1"), ("B", "u1")])[..., 0]
NOWHERE = ("<12f", *[0.0] * 12)


@pytest.mark.parametrize(
    "content, text",
    [
        (None, "no such file"),
        (b"", "an empty file; copy it again"),
        (gzip.compress(b"", mtime=0), "an empty file; copy it again"),
        (
            gzip.compress(packed(), mtime=0)[: len(gzip.compress(packed())) // 2],
            "cut short or damaged .*; copy it again",
        ),
        (gzip.compress(packed(), mtime=0)[:12], "cut short or damaged .*; copy it again"),
        (wrong_checksum(), "cut short or damaged .*CRC.*; copy it again"),
        (flipped_bit(), "cut short or damaged .*; copy it again"),
        (packed()[:-1], r"cut short \(119 bytes of voxels found, 120 expected\); copy it again"),
        (gzip.compress(packed()[:352], mtime=0), r"cut short \(0 bytes of voxels found, 120 expected\)"),
        (packed()[:200], "no NIfTI file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "no NIfTI file .it starts with b'version http'"),
        (bytes(128) + b"DICM" + bytes(400), "no NIfTI file"),
        (changed(70, "<h", 1234), "a damaged NIfTI header"),  # datatype
        (changed(40, "<8h", 3, 5, -4, 3, 1, 1, 1, 1), "damaged NIfTI header|voxels along every axis"),
        (changed(40, "<8h", 3, 32767, 32767, 32767, 1, 1, 1, 1), r"cut short .*7036\d{10} expected"),
        (changed(344, "<4s", b"ni1\0"), "a header without voxels"),
        (changed(280, *NOWHERE), "affine .* spans no volume"),
        (changed(280, "<f", np.nan), "affine .* spans no volume"),
        (packed(RGB), "voxels are colours"),
        (packed(VOXELS.astype(np.complex64)), "voxels are complex numbers"),
    ],
)
def test_damage_is_told_in_one_line(tmp_path, content, text):
    path = tmp_path / "FeTS_1_t1.nii.gz"
    if content is not None:
        path.write_bytes(content)
    for read in (nifti.read_image, nifti.read_labels):
        with pytest.raises(UserError, match=text) as error:
            read(path)
        assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 347), st.binary(min_size=1, max_size=8))
def test_no_header_gives_a_traceback(tmp_path_factory, at, junk):
    path = tmp_path_factory.getbasetemp() / "junk.nii"
    content = bytearray(packed())
    content[at : at + len(junk)] = junk
    path.write_bytes(content)
    try:
        nifti.read_image(path, channels=True)
        nifti.read_labels(path)
    except UserError as error:
        assert "\n" not in str(error)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        nifti.read_image(tmp_path)


@pytest.mark.parametrize(
    "dtype, stored, count",
    # the figures that nibabel gives for labels 0, 1, 2, 4: 8 bits 1.0039, 1.9922, 4; 16 bits 1.00001526, 2.00003052, 4
    [(np.uint8, [1.0039, 1.9922, 4], 30), (np.int16, [1.00001526, 2.00003052, 4], 30)],
)
def test_scaled_labels_are_rounded_and_counted(tmp_path, dtype, stored, count):
    path = scaled_labels(tmp_path / "seg.nii.gz", dtype)
    np.testing.assert_allclose(np.unique(nibabel.load(path).get_fdata())[1:], stored, atol=5e-5)
    found, rounded = nifti.read_labels(path)
    np.testing.assert_array_equal(found.data, LABELS)
    assert found.data.dtype == np.int32 and rounded == count  # 15 voxels of 1 and 15 of 2; 0 and 4 are met exactly


@pytest.mark.parametrize(
    "data",
    [
        LABELS,
        LABELS.astype(np.float32),
        LABELS.astype(np.float64),
        LABELS.astype(np.int16)[..., None],
        LABELS.astype(">f4"),
    ],
)
def test_whole_labels_need_no_rounding(tmp_path, data):
    found, rounded = nifti.read_labels(saved(tmp_path / "seg.nii", data))
    np.testing.assert_array_equal(found.data, LABELS)
    assert rounded == 0 and found.data.shape == (5, 4, 3)


@pytest.mark.parametrize(
    "label, text",
    [
        (0.5, r"30 voxels are no whole numbers \(0.5, 1\); .*|15 voxels .*0.5"),
        (1.011, r"15 voxels are no whole numbers \(1.011\); a label map expected, is this a probability map"),
        (np.nan, r"15 voxels are no whole numbers \(nan\)"),
        (np.inf, r"15 voxels are no whole numbers \(inf\)"),
        (3e9, "labels from 0.0 to 3000000000.0; 32-bit integers expected"),
    ],
)
def test_no_labels(tmp_path, label, text):
    data = np.where(LABELS == 1, label, LABELS)
    with pytest.raises(UserError, match=text):
        nifti.read_labels(saved(tmp_path / "seg.nii", data))


def test_labels_near_an_integer_count_as_rounded(tmp_path):
    found, rounded = nifti.read_labels(saved(tmp_path / "seg.nii", np.where(LABELS == 1, 1.0099, LABELS)))
    np.testing.assert_array_equal(found.data, LABELS)
    assert rounded == 15


@pytest.mark.parametrize(
    "slope, inter, factor, offset",
    [
        (2, 0.5, 2, 0.5),
        (0, 7, 1, 0),
        (np.nan, 7, 1, 0),
        (np.inf, 7, 1, 0),
        (2, np.nan, 2, 0),
        (1, 0, 1, 0),
        (1, -1, 1, -1),
    ],
)
def test_the_header_s_scale(tmp_path, slope, inter, factor, offset):
    """The standard: scl_slope 0 means unscaled; values = slope * stored + inter. No number is no scale."""
    (tmp_path / "a.nii").write_bytes(changed(112, "<2f", slope, inter))
    np.testing.assert_array_equal(nifti.read_image(tmp_path / "a.nii").data, VOXELS * factor + offset)
