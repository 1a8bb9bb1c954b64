"""Where voxels lie: geometries that differ, and files that are written into another one's frame, bit for bit."""

import gzip
import struct

import nibabel
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_seg.core.checks import UserError
from fedjax_seg.data import nifti
from fedjax_seg.data.nifti import Geometry

OBLIQUE = np.array([[0.9, -0.3, 0.1, -80], [0.2, 1.1, 0.4, 12], [-0.1, 0.3, 2.9, 7], [0, 0, 0, 1]])
FLIPPED = np.array([[-1.0, 0, 0, 90], [0, -1, 0, 239], [0, 0, 1.5, -70], [0, 0, 0, 1]])
VOXELS = np.random.default_rng(0).integers(-300, 3000, (5, 4, 3)).astype(np.int16)
LABELS = np.array([0, 1, 2, 4] * 15, np.uint8).reshape(5, 4, 3)


def saved(path, data):
    nibabel.save(nibabel.Nifti1Image(data, FLIPPED), path)
    return path


def moved(affine, by):
    out = affine.copy()
    out[:3, 3] += by
    return out


@pytest.mark.parametrize(
    "axes, letters",  # the direction of each array axis: +x is right, +y anterior, +z superior
    [
        ([(1, 0, 0), (0, 1, 0), (0, 0, 1)], "RAS"),
        ([(-1, 0, 0), (0, -1, 0), (0, 0, 1.5)], "LPS"),
        ([(0, 2, 0), (0, 0, -3), (-1, 0, 0)], "AIL"),
        ([(-0.9, 0.3, 0), (0.3, 0.9, 0.2), (0, 0.2, -2)], "LAI"),
    ],
)
def test_where_the_axes_point_to(axes, letters):
    affine = np.eye(4)
    affine[:3, :3], affine[:3, 3] = np.array(axes).T, (80, -30, 7)
    assert nifti.orientation(affine) == letters


def test_geometry_that_differs():
    one = Geometry((16, 16, 12), FLIPPED)
    assert nifti.same_geometry(one, Geometry((16, 16, 12), FLIPPED.copy())) == ""
    assert nifti.same_geometry(one, Geometry((16, 16, 10), FLIPPED)) == "shape 16x16x12 and 16x16x10"
    # 3 mm and 4 mm and no step along the third axis of 1.5 mm: 5 voxels
    text = nifti.same_geometry(one, Geometry((16, 16, 12), moved(FLIPPED, [3, -4, 0])))
    assert text == (
        "corner voxels lie up to 5 voxels apart,"
        " affine [-1 0 0 90; 0 -1 0 239; 0 0 1.5 -70] and [-1 0 0 93; 0 -1 0 235; 0 0 1.5 -70]"
    )
    assert "up to 2 voxels" in nifti.same_geometry(one, Geometry((16, 16, 12), moved(FLIPPED, [0, 0, 3])))
    # a flip of the first axis in place: the corner goes from index 0 to 15
    flip = FLIPPED @ np.array([[-1.0, 0, 0, 15], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    assert "up to 15 voxels" in nifti.same_geometry(one, Geometry((16, 16, 12), flip))
    # 1% larger voxels, the same first voxel: the far corner (15, 15, 11) moves by 1% of its distance
    grown = FLIPPED @ np.diag([1.01, 1.01, 1.01, 1])
    assert f"up to {0.01 * np.sqrt(15**2 + 15**2 + 11**2):.4g} voxels" in nifti.same_geometry(
        one, Geometry((16, 16, 12), grown)
    )


def test_the_smaller_voxels_count():
    """A shift by 0.0015 mm is 0.0015 voxels of 1 mm, and 0.00075 voxels of 2 mm."""
    fine, coarse = Geometry((1, 1, 1), np.eye(4)), Geometry((1, 1, 1), moved(np.diag([2.0, 2, 2, 1]), [0.0015, 0, 0]))
    assert nifti.same_geometry(fine, coarse).startswith("corner voxels lie up to 0.0015 voxels apart")
    assert nifti.same_geometry(coarse, fine).startswith("corner voxels lie up to 0.0015 voxels apart")
    assert nifti.same_geometry(fine, coarse, tolerance=0.002) == nifti.same_geometry(coarse, fine, 0.002) == ""


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-0.02, 0.02), min_size=3, max_size=3),
    st.floats(0.5, 3.0),
    st.sampled_from([1e-3, 1e-2, 5e-3]),
)
def test_the_tolerance_is_a_distance_in_voxels_and_symmetric(by, size, tolerance):
    affine = np.diag([size, size, size, 1.0])
    a, b = Geometry((9, 8, 7), affine), Geometry((9, 8, 7), moved(affine, by))
    distance = np.linalg.norm(by) / size
    if abs(distance - tolerance) > 1e-9:
        assert (nifti.same_geometry(a, b, tolerance) == "") == (distance < tolerance)
    assert (nifti.same_geometry(a, b, tolerance) == "") == (nifti.same_geometry(b, a, tolerance) == "")


def framed(affine, qform, sform, kind, order="<"):
    own = kind(VOXELS, None, kind.header_class(endianness=order))
    own.header.set_data_shape(VOXELS.shape)
    own.set_qform(affine, qform)
    own.set_sform(affine if sform else None, sform)
    own.header["descrip"] = b"patient's name"
    return own


FRAME = ["qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y", "qoffset_z"]
FRAME += ["srow_x", "srow_y", "srow_z"]


@pytest.mark.parametrize(
    "kind, order", [(nibabel.Nifti1Image, "<"), (nibabel.Nifti1Image, ">"), (nibabel.Nifti2Image, "<")]
)
@pytest.mark.parametrize("affine", [FLIPPED, np.diag([2.0, 2, 5, 1])])
@pytest.mark.parametrize("qform, sform", [(1, 1), (2, 1), (1, 0), (0, 2), (0, 0)])
def test_labels_keep_the_frame_of_the_reference(tmp_path, kind, order, affine, qform, sform):
    nibabel.save(framed(affine, qform, sform, kind, order), tmp_path / "t1.nii.gz")
    path = tmp_path / "out.nii.gz"
    nifti.write_labels(path, LABELS, tmp_path / "t1.nii.gz")
    old, new = nibabel.load(tmp_path / "t1.nii.gz"), nibabel.load(path)
    np.testing.assert_array_equal(np.asanyarray(new.dataobj), LABELS)
    assert type(new) is type(old) and new.get_data_dtype() == np.uint8 and new.shape == LABELS.shape
    np.testing.assert_array_equal(new.affine, old.affine)
    for name in FRAME:
        np.testing.assert_array_equal(new.header[name], old.header[name], err_msg=name)
    np.testing.assert_array_equal(new.header["pixdim"][:4], old.header["pixdim"][:4])
    raw = gzip.decompress(path.read_bytes())
    if kind is nibabel.Nifti1Image:
        assert struct.unpack("<ff", raw[112:120]) == (1.0, 0.0)  # scl_slope, scl_inter as they stand in the file
    assert b"patient" not in raw
    back, rounded = nifti.read_labels(path)
    assert rounded == 0 and nifti.same_geometry(back.geometry, nifti.read_image(tmp_path / "t1.nii.gz").geometry) == ""


def test_an_oblique_frame_with_a_sheared_sform(tmp_path):
    own = nibabel.Nifti1Image(VOXELS, OBLIQUE)
    own.set_sform(OBLIQUE, 1)
    own.set_qform(OBLIQUE, 1)  # without the shear: the two differ, and both are kept
    nibabel.save(own, tmp_path / "t1.nii")
    nifti.write_labels(tmp_path / "out.nii", LABELS, tmp_path / "t1.nii")
    old, new = nibabel.load(tmp_path / "t1.nii"), nibabel.load(tmp_path / "out.nii")
    assert not np.allclose(old.get_qform(), old.get_sform(), atol=0.01)
    np.testing.assert_array_equal(new.get_qform(), old.get_qform())
    np.testing.assert_array_equal(new.get_sform(), old.get_sform())


def test_the_same_labels_give_the_same_bytes(tmp_path):
    saved(tmp_path / "t1.nii.gz", VOXELS)
    for name, labels in (("a.nii.gz", LABELS), ("b.nii.gz", np.asfortranarray(LABELS))):
        nifti.write_labels(tmp_path / name, labels, tmp_path / "t1.nii.gz")
    one, two = ((tmp_path / name).read_bytes() for name in ("a.nii.gz", "b.nii.gz"))
    assert one == two and one[4:8] == bytes(4)  # no time in the gzip header
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.nii.gz", "b.nii.gz", "t1.nii.gz"]  # nothing left over


def test_what_cannot_be_written(tmp_path):
    reference = saved(tmp_path / "t1.nii", VOXELS)
    with pytest.raises(UserError, match=r"labels 5x4x2 given, .*t1.nii is 5x4x3"):
        nifti.write_labels(tmp_path / "a.nii", LABELS[..., :2], reference)
    with pytest.raises(TypeError, match="uint8"):
        nifti.write_labels(tmp_path / "a.nii", LABELS.astype(int), reference)
    with pytest.raises(UserError, match="a file name that ends in"):
        nifti.write_labels(tmp_path / "a.png", LABELS, reference)
    with pytest.raises(UserError, match="cannot be written"):
        nifti.write_labels(tmp_path / "no" / "a.nii", LABELS, reference)
    (tmp_path / "b.nii" / "full").mkdir(parents=True)
    with pytest.raises(UserError, match="cannot be written"):  # in the last step: nothing is left over
        nifti.write_labels(tmp_path / "b.nii", LABELS, reference)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.nii", "t1.nii"]


@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.uint8])
@pytest.mark.parametrize("shape", [(5, 4, 3), (5, 4, 3, 2)])
def test_own_images_come_back(tmp_path, dtype, shape):
    data = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    for name in ("a.nii", "a.NII.GZ"):
        nifti.write_volume(tmp_path / name, data, FLIPPED)
        own = nibabel.Nifti1Image.from_bytes(
            gzip.decompress((tmp_path / name).read_bytes()) if name == "a.NII.GZ" else (tmp_path / name).read_bytes()
        )
        np.testing.assert_array_equal(np.asanyarray(own.dataobj), data)
        assert own.get_data_dtype() == dtype
        np.testing.assert_array_equal(own.affine, FLIPPED)
        np.testing.assert_allclose(own.get_qform(), FLIPPED, atol=1e-5)
        assert own.header.get_xyzt_units()[0] == "mm"
        np.testing.assert_array_equal(nifti.read_image(tmp_path / name, channels=True).data, data)
    with pytest.raises(UserError, match="int64"):
        nifti.write_volume(tmp_path / "b.nii", data.astype(np.int64), FLIPPED)
