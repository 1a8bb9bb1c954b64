"""NIfTI files: voxels, label maps and where the voxels lie. The only file that knows nibabel.

nibabel reads the header (versions 1 and 2, either byte order). The voxels are read here: the whole file is unpacked in
memory, so that a file cut short or damaged is found, and they become float32 in one step.
"""

import gzip
import math
import zlib
from pathlib import Path
from typing import NamedTuple

import nibabel
import numpy as np
from nibabel.spatialimages import HeaderDataError

from fedjax_seg.core import checks
from fedjax_seg.data import whole_files

_GZIP = b"\x1f\x8b"
_CURE = "copy it again"
# A label map saved with a scale factor comes back as 1.00001526 or, with 8 bits, 1.9922.
ROUNDED = 0.01


class Geometry(NamedTuple):
    """Where voxels lie.

    Attributes:
      shape: voxels along the three array axes.
      affine: float64 [4, 4]; voxel index -> mm.
    """

    shape: tuple[int, int, int]
    affine: np.ndarray

    @property
    def spacing(self) -> np.ndarray:
        """float64 [3]; mm per voxel along each array axis."""
        return spacing(self.affine)


class Volume(NamedTuple):
    """Voxels of a file.

    Attributes:
      data: [X, Y, Z] or [X, Y, Z, channels]; in the file's order in memory (the first axis runs fastest).
      geometry: of the three axes of space.
    """

    data: np.ndarray
    geometry: Geometry


def spacing(affine: np.ndarray) -> np.ndarray:
    """float64 [3]; mm per voxel along each ARRAY axis, whatever way it points: the norms of the affine's columns."""
    return np.sqrt((np.asarray(affine, np.float64)[:3, :3] ** 2).sum(0))


def orientation(affine: np.ndarray) -> str:
    """Where the array axes point to, a letter each of L or R, P or A, S or I: 'LPS' (BraTS, FeTS), 'RAS', ..."""
    return "".join(str(letter) for letter in nibabel.aff2axcodes(np.asarray(affine, np.float64)))


def read_image(path: Path | str, channels: bool = False) -> Volume:
    """An image, scaled as its header says. Every voxel is read; NaN and infinite voxels are kept.

    Args:
      path: a NIfTI file; whether it is compressed is read from its content, not from its name.
      channels: whether a fourth axis longer than 1 may come along, as channels.

    Returns: float32 voxels; axes of length 1 after the third one are left out.
    Raises: UserError, one line that names the file: missing, cut short, damaged, no NIfTI, no three-dimensional image.
    """
    header, content = _read(path)
    geometry, shape = _space(path, header, channels)
    stored = _stored(path, header, content).reshape(shape, order="F")
    slope, inter = _scaling(header)
    with np.errstate(over="ignore"):  # beyond float32 becomes infinite, which the caller counts
        if (slope, inter) == (1.0, 0.0):
            data = stored.astype(np.float32, order="F")
        else:
            data = (stored * np.float64(slope) + np.float64(inter)).astype(np.float32, order="F")
    return Volume(data, geometry)


def read_labels(path: Path | str) -> tuple[Volume, int]:
    """A label map, and how many voxels had to be rounded because a scale factor has made fractions of them.

    Returns: int32 voxels; the number of voxels that were no integer, yet within ROUNDED of one.
    Raises: UserError as read_image does, and where a voxel is not that close to an integer.
    """
    header, content = _read(path)
    geometry, shape = _space(path, header, channels=False)
    stored = _stored(path, header, content).reshape(shape, order="F")
    slope, inter = _scaling(header)
    if (slope, inter) == (1.0, 0.0) and stored.dtype.kind == "f":  # usually whole numbers: no detour by float64
        with np.errstate(invalid="ignore"):
            whole = stored.astype(np.int32, order="F")
        if np.array_equal(whole, stored):
            return Volume(whole, geometry), 0
    rounded = 0
    if stored.dtype.kind == "f" or (slope, inter) != (1.0, 0.0):
        stored, rounded = _whole(path, stored.astype(np.float64) * slope + inter)
    if stored.size and (stored.min() < -(2**31) or stored.max() >= 2**31):
        raise checks.UserError(f"{path}: labels from {stored.min()} to {stored.max()}; 32-bit integers expected")
    return Volume(stored.astype(np.int32, order="F"), geometry), rounded


def read_shape(path: Path | str) -> tuple[int, ...]:
    """The shape that the header tells, without the voxels: [X, Y, Z] or [X, Y, Z, channels]."""
    header, _ = _read(path, most=544)
    return _space(path, header, channels=True)[1]


def same_geometry(a: Geometry, b: Geometry, tolerance: float = 1e-3) -> str:
    """'' where two volumes lie on the same voxels, else one line that tells what differs.

    Args:
      tolerance: the largest distance between the two places of a corner voxel, in voxels of either volume.
    """
    if tuple(a.shape) != tuple(b.shape):
        return f"shape {_by(a.shape)} and {_by(b.shape)}"
    ends = np.array(a.shape, np.float64) - 1
    corners = np.array([[(i >> k & 1) * ends[k] for k in range(3)] + [1.0] for i in range(8)])
    apart = max(
        float(np.linalg.norm((corners @ np.linalg.solve(one, other).T - corners)[:, :3], axis=1).max())
        for one, other in ((a.affine, b.affine), (b.affine, a.affine))
    )
    if apart <= tolerance:
        return ""
    return f"corner voxels lie up to {apart:.4g} voxels apart, affine {_rows(a.affine)} and {_rows(b.affine)}"


def write_labels(path: Path | str, labels: np.ndarray, reference: Path | str) -> None:
    """Writes a label map into the frame of another file: its affine, sform, qform and their codes, bit for bit.

    The same labels give the same bytes; the file is there whole or not at all.

    Args:
      path: a .nii or .nii.gz file, replaced if it is there.
      labels: uint8 [X, Y, Z], stored as such, unscaled.
      reference: an image of the same shape; only its header is read.
    """
    if labels.dtype != np.uint8:
        raise TypeError(f"uint8 labels expected, {labels.dtype} given")
    old, _ = _read(reference, most=544)
    geometry, _ = _space(reference, old, channels=True)
    if labels.shape != geometry.shape:
        raise checks.UserError(f"{path}: labels {_by(labels.shape)} given, {reference} is {_by(geometry.shape)}")
    new = type(old)()  # an empty header of the same version: no text of the reference is carried over
    new.set_data_shape(labels.shape)
    frame = ["qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y", "qoffset_z"]
    for name in [*frame, "srow_x", "srow_y", "srow_z", "xyzt_units"]:
        new[name] = old[name]
    new["pixdim"][:4] = old["pixdim"][:4]
    _write(path, new, labels)


def write_volume(path: Path | str, data: np.ndarray, affine: np.ndarray) -> None:
    """Writes an image of our own making: float32, int16 or uint8 [X, Y, Z] or [X, Y, Z, channels], unscaled."""
    checks.one_of("voxels", str(data.dtype), ("float32", "int16", "uint8"))
    new = nibabel.Nifti1Header()
    new.set_data_shape(data.shape)
    new.set_zooms([*spacing(affine), 1.0][: data.ndim])
    new.set_xyzt_units("mm")
    new.set_sform(affine, code=1)
    new.set_qform(affine, code=1)
    _write(path, new, data)


def _read(path: Path | str, most: int | None = None) -> tuple[nibabel.Nifti1Header, bytes]:
    """The header and the unpacked content, or only its first bytes (`most`)."""
    content = _content(path, most)
    kind, first = _version(content)
    if kind is None:
        raise checks.UserError(f"{path}: no NIfTI file (it starts with {content[:12]!r}); .nii or .nii.gz expected")
    try:
        header = kind(content[:first])
        single = header["magic"].item() == header.single_magic
    except (HeaderDataError, ValueError, OverflowError) as error:
        raise checks.UserError(f"{path}: a damaged NIfTI header ({_one_line(error)}); {_CURE}") from None
    if not single:
        raise checks.UserError(f"{path}: a header without voxels (.hdr/.img pair or Analyze); convert it to .nii.gz")
    return header, content


def _version(content: bytes) -> tuple[type[nibabel.Nifti1Header] | None, int]:
    """The class of the header and its length, which is also its first number, in either byte order."""
    for kind, first in ((nibabel.Nifti1Header, 348), (nibabel.Nifti2Header, 540)):
        if len(content) >= first and first.to_bytes(4, "little") in (content[:4], content[3::-1]):
            return kind, first
    return None, 0


def _content(path: Path | str, most: int | None) -> bytes:
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == _GZIP
            file.seek(0)
            if packed and most:
                content = gzip.GzipFile(fileobj=file).read(most)
            else:
                content = gzip.decompress(file.read()) if packed else file.read(most or -1)
    except FileNotFoundError:
        raise checks.UserError(f"{path}: no such file") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise checks.UserError(f"{path}: cut short or damaged ({_one_line(error)}); {_CURE}") from None
    except OSError as error:
        raise checks.UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not content:
        raise checks.UserError(f"{path}: an empty file; {_CURE}")
    return content


def _space(path: Path | str, header: nibabel.Nifti1Header, channels: bool) -> tuple[Geometry, tuple[int, ...]]:
    """The geometry and the shape without the trailing axes of length 1."""
    try:
        full = tuple(int(n) for n in header.get_data_shape())
        affine = np.asarray(header.get_best_affine(), np.float64)
    except (HeaderDataError, ValueError) as error:
        raise checks.UserError(f"{path}: a damaged NIfTI header ({_one_line(error)}); {_CURE}") from None
    shape = full[:3] + tuple(n for n in full[3:] if n != 1)
    if len(shape) != 3 and not (channels and len(shape) == 4):
        expected = "[X, Y, Z] or [X, Y, Z, channels]" if channels else "one volume [X, Y, Z]"
        raise checks.UserError(f"{path}: shape {_by(full)} found, {expected} expected")
    if min(shape) < 1:
        raise checks.UserError(f"{path}: shape {_by(full)} found, voxels along every axis expected")
    steps = spacing(affine)
    # Relative to the spacing: the determinant of a fine grid is small without being singular.
    if not np.isfinite(affine).all() or (steps <= 0).any() or abs(np.linalg.det(affine[:3, :3] / steps)) < 1e-6:
        raise checks.UserError(f"{path}: affine {_rows(affine)} spans no volume; repair the header's sform or qform")
    return Geometry((shape[0], shape[1], shape[2]), affine), shape


def _stored(path: Path | str, header: nibabel.Nifti1Header, content: bytes) -> np.ndarray:
    """All the voxels as they are stored, in one row."""
    try:
        dtype = header.get_data_dtype()
        start = int(header.get_data_offset()) or len(header.binaryblock) + 4
    except (HeaderDataError, ValueError, OverflowError, KeyError) as error:
        raise checks.UserError(f"{path}: a damaged NIfTI header ({_one_line(error)}); {_CURE}") from None
    if dtype.kind not in "iuf":
        what = {"V": "colours (RGB)", "c": "complex numbers"}.get(dtype.kind, str(dtype))
        raise checks.UserError(f"{path}: voxels are {what}; integers or real numbers expected")
    count = math.prod(int(n) for n in header.get_data_shape())
    if start + count * dtype.itemsize > len(content):
        raise checks.UserError(
            f"{path}: cut short ({max(len(content) - start, 0)} bytes of voxels found,"
            f" {count * dtype.itemsize} expected); {_CURE}"
        )
    return np.frombuffer(content, dtype, count, start)


def _whole(path: Path | str, values: np.ndarray) -> tuple[np.ndarray, int]:
    """The nearest integers (as float64), and how many values were none; far ones are an error."""
    with np.errstate(invalid="ignore"):
        nearest = np.rint(values)
        off = np.abs(values - nearest)
    far = ~(off <= ROUNDED)  # NaN is far too
    if far.any():
        some = ", ".join(f"{v:.5g}" for v in np.unique(values[far])[:4])
        raise checks.UserError(
            f"{path}: {int(far.sum())} voxels are no whole numbers ({some}); a label map expected, is this a"
            " probability map or an image given as seg?"
        )
    return nearest, int((off > 1e-6).sum())  # not what float32 alone makes of a label


def _scaling(header: nibabel.Nifti1Header) -> tuple[float, float]:
    slope, inter = float(header["scl_slope"]), float(header["scl_inter"])
    if slope == 0 or not math.isfinite(slope):  # the standard's word for 'unscaled', and what other writers leave
        return 1.0, 0.0
    return slope, inter if math.isfinite(inter) else 0.0


def _write(path: Path | str, header: nibabel.Nifti1Header, data: np.ndarray) -> None:
    path = Path(path)
    lower = path.name.lower()
    if not lower.endswith((".nii", ".nii.gz")):
        raise checks.UserError(f"{path}: a file name that ends in .nii or .nii.gz expected")
    header.set_data_dtype(data.dtype)
    header.set_slope_inter(1.0, 0.0)
    first = len(header.binaryblock) + 4
    header["vox_offset"], header["magic"] = first, header.single_magic
    swapped = data.astype(data.dtype.newbyteorder(header.endianness), copy=False)
    content = header.binaryblock + bytes(4) + swapped.tobytes("F")
    if lower.endswith(".gz"):
        content = gzip.compress(content, compresslevel=6, mtime=0)
    try:
        with whole_files.atomic(path) as file:
            file.write(content)
    except OSError as error:
        raise checks.UserError(f"{path}: cannot be written ({error.strerror})") from None


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "none"


def _rows(affine: np.ndarray) -> str:
    return "[" + "; ".join(" ".join(f"{v + 0.0:.5g}" for v in row) for row in affine[:3]) + "]"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
