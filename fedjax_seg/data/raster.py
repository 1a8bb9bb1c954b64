"""One image file: decoding to stored values, labels of a mask, grey level window, and bringing it to a common size."""

import hashlib
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from fedjax_seg.core.checks import UserError

# Only these decoders are tried: Pillow knows others, and one of them starts a foreign program (EPS).
FORMATS = ("PNG", "TIFF", "JPEG", "JPEG2000", "BMP", "PPM", "GIF", "WEBP")
UNIFY = ("resize", "crop", "pad")
# Files of other names are not taken for images where no table names them.
ENDINGS = (".png", ".tif", ".tiff", ".jpg", ".jpeg", ".jp2", ".bmp", ".ppm", ".pgm", ".gif", ".webp")
FILTERS = ("area", "bilinear", "nearest")
MASK_FILTERS = ("nearest", "majority")
_ORIENTATION = 0x0112  # EXIF tag
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601
_LISTED = 8


class Raster(NamedTuple):
    """A decoded image.

    Attributes:
      pixels: float32 [H, W, 1 or 3], stored values; transparency is composited on white.
      bits: 8 or 16, the stored range is [0, 2**bits - 1]; 0 where it is unknown (32-bit integers, floats).
      kind: e.g. '8-bit PNG RGBA'.
      sha256: of the pixels, not of the file: the same picture saved twice is a copy.
      transparent: some pixel was not opaque.
      turned: the EXIF orientation asks for a turn, which is not made: masks are drawn on the stored pixels.
    """

    pixels: np.ndarray
    bits: int
    kind: str
    sha256: str
    transparent: bool
    turned: bool


class Look(NamedTuple):
    """How stored values become network inputs; see `images2d` for the meaning of each."""

    channels: str
    size: tuple[int, int]
    unify: str
    resize: str
    mask_resize: str = "nearest"
    fill: float = 0.0
    window: tuple[float, ...] = ()
    hu_slope: float = 1.0
    hu_offset: float = 0.0


def opened(path: Path) -> Image.Image:
    """The loaded image of a file. Raises: UserError saying what is wrong with it, without the name of the file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError("no such file") from None
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})") from None
    if not content:
        raise UserError("an empty file (0 bytes); copy it again")
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.UnidentifiedImageError:
        raise UserError(f"no image that can be read{_guess(content)}; PNG, TIFF or JPEG expected") from None
    except Exception as error:  # decoders of damaged files raise whatever they stumble over
        raise UserError(f"damaged ({_one_line(error)}); copy it again") from None
    try:
        frames = getattr(image, "n_frames", 1)
        image.load()
    except Exception as error:
        raise UserError(f"cut short or damaged ({_one_line(error)}); copy it again") from None
    if frames > 1 and image.format != "MPO":  # a camera's JPEG with a preview in it
        raise UserError(f"{frames} pages or frames; one image per file expected, split it")
    return image


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _guess(content: bytes) -> str:
    if content[128:132] == b"DICM":
        return " (a DICOM file: export it as 16-bit PNG or TIFF)"
    if content[:2] == b"\x1f\x8b" or content[344:347] in (b"n+1", b"ni1"):
        return " (compressed, or a NIfTI volume: export its slices)"
    return f" (it starts with {content[:8]!r})"


def decode(path: Path) -> Raster:
    """An image file as stored values.

    8 bits per channel for bilevel, grey, palette and colour images; 16 for 16-bit grey of either byte order. Pillow
    itself reduces 16-bit colour to 8 bits.

    Raises: UserError without the name of the file.
    """
    image = opened(path)
    stored = f"{image.format} {image.mode}"
    turned = image.getexif().get(_ORIENTATION, 1) not in (0, 1)
    pixels, bits, transparent = _stored_values(image)
    if not np.isfinite(pixels).all():
        raise UserError(f"{int((~np.isfinite(pixels)).sum())} pixels are NaN or infinite; finite values expected")
    total = hashlib.sha256(f"{bits} {pixels.shape}".encode())
    total.update(pixels.tobytes())
    kind = f"{bits or 32}-bit {stored}"
    return Raster(pixels, bits, kind, total.hexdigest(), transparent, turned)


def _stored_values(image: Image.Image) -> tuple[np.ndarray, int, bool]:
    if image.mode.startswith("I;16"):
        return _float(image), 16, False
    if image.mode in ("I", "F"):
        # 16-bit PNG and PGM have the mode 'I' in older Pillow
        return _float(image), 16 if image.mode == "I" and image.format in ("PNG", "PPM") else 0, False
    see_through = "transparency" in image.info
    if image.mode == "L" and see_through:
        image = image.convert("LA")
    elif image.mode in ("P", "PA", "RGB", "RGBa", "La") and (see_through or image.mode in ("PA", "RGBa", "La")):
        image = image.convert("RGBA")
    elif image.mode == "1":
        image = image.convert("L")
    elif image.mode not in ("L", "LA", "RGB", "RGBA"):
        image = image.convert("RGB")
    pixels = _float(image)
    if image.mode in ("L", "RGB"):
        return pixels, 8, False
    alpha = pixels[..., -1:] / 255
    return (pixels[..., :-1] * alpha + 255 * (1 - alpha)).astype(np.float32), 8, bool((alpha < 1).any())


def _float(image: Image.Image) -> np.ndarray:
    pixels = np.asarray(image).astype(np.float32)
    return np.ascontiguousarray(pixels if pixels.ndim == 3 else pixels[..., None])


def decode_mask(path: Path) -> np.ndarray:
    """int64 [H, W], the stored values of a mask; of a palette image the indices, whatever their colours.

    Raises: UserError without the name of the file: colours, transparency, or fractions.
    """
    image = opened(path)
    values = np.asarray(image)
    if values.ndim == 3:
        colours = values[..., :3] if values.shape[-1] >= 3 else values[..., :1]
        if values.shape[-1] in (2, 4) and (values[..., -1] != 255).any():
            raise UserError("a mask with transparent pixels; one opaque channel of label values expected")
        if (colours != colours[..., :1]).any():
            raise UserError("a mask in colours; one channel of label values expected")
        values = colours[..., 0]
    if values.dtype.kind == "f":
        off = np.abs(values - np.rint(values)).max(initial=0)
        if not off <= 0.01:  # NaN too
            raise UserError("a mask of fractions; whole label values expected (a map of probabilities?)")
        values = np.rint(values)
    return values.astype(np.int64)


def labels(values: np.ndarray, allowed: Sequence[int]) -> np.ndarray:
    """uint8 [H, W], the position of every value among the allowed ones.

    Args:
      values: int [H, W].
      allowed: stored value of label 0, 1, ...; () = a binary mask of 0 and 1, or of 0 and 255.

    Raises: UserError with the values found and the values allowed.
    """
    found = np.unique(values)
    if not len(allowed):
        if set(found.tolist()) <= {0, 1} or set(found.tolist()) <= {0, 255}:
            return (values > 0).astype(np.uint8)
        raise UserError(f"mask values {_listed(found)} found, 0 and 1 or 0 and 255 allowed (data.mask_values)")
    if not set(found.tolist()) <= set(allowed):
        expected = ", ".join(map(str, allowed))
        raise UserError(f"mask values {_listed(found)} found, {expected} allowed (data.mask_values)")
    order = np.argsort(allowed)
    return order[np.searchsorted(np.asarray(allowed)[order], values)].astype(np.uint8)


def _listed(found: np.ndarray) -> str:
    more = f", ... ({len(found)} values)" if len(found) > _LISTED else ""
    return ", ".join(map(str, found[:_LISTED])) + more


def to_unit(raster: Raster, look: Look) -> np.ndarray:
    """float32 [H, W, C], about [0, 1]: 0 and 1 are the ends of the window, or of the range of the bit depth; unclipped.

    Raises: UserError where the range is unknown and no window is given.
    """
    pixels = raster.pixels
    if look.channels == "gray" and pixels.shape[-1] == 3:
        pixels = (pixels @ _LUMA)[..., None]
    elif look.channels == "rgb" and pixels.shape[-1] == 1:
        pixels = np.repeat(pixels, 3, axis=-1)
    if look.window:
        centre, width = look.window
        low = centre - width / 2
        return (pixels * np.float32(look.hu_slope / width) + np.float32((look.hu_offset - low) / width)).astype(
            np.float32
        )
    if not raster.bits:
        raise UserError(f"{raster.kind}: its range of values is not known; set data.window=(centre, width)")
    return pixels / np.float32(2**raster.bits - 1)


def fit(x: np.ndarray, y: np.ndarray | None, look: Look) -> tuple[np.ndarray, np.ndarray | None, tuple[float, float]]:
    """Brings a case to the common size.

    Args:
      x: float32 [H, W, C].
      y: uint8 [H, W] labels, or None.

    Returns: x [*size, C], y [*size], and the (row, column) factors that turn the old mm per pixel into the new.
    """
    height, width = look.size
    if look.unify == "crop":
        return framed(x, look.size, look.fill), None if y is None else framed(y, look.size, 0), (1.0, 1.0)
    if look.unify == "pad":  # to the proportions of `size`, so that nothing is stretched
        h, w = x.shape[:2]
        shape = (max(h, math.ceil(w * height / width)), max(w, math.ceil(h * width / height)))
        x, y = framed(x, shape, look.fill), None if y is None else framed(y, shape, 0)
    zoom = (x.shape[0] / height, x.shape[1] / width)
    if x.shape[:2] == (height, width):
        return x, y, zoom
    fitted = np.stack([_resized(x[..., c], look.size, look.resize) for c in range(x.shape[-1])], axis=-1)
    return fitted, None if y is None else _resized_mask(y, look.size, look.mask_resize), zoom


def framed(array: np.ndarray, shape: tuple[int, int], fill: float) -> np.ndarray:
    """[H, W, ...] cut or filled up around the centre; the odd pixel goes to the far side."""
    for axis, wanted in enumerate(shape):
        have = array.shape[axis]
        if have > wanted:
            start = (have - wanted) // 2
            array = array[(slice(None),) * axis + (slice(start, start + wanted),)]
        elif have < wanted:
            before = (wanted - have) // 2
            around = [(0, 0)] * array.ndim
            around[axis] = (before, wanted - have - before)
            array = np.pad(array, around, constant_values=fill)
    return array


def _resized(plane: np.ndarray, size: tuple[int, int], how: str) -> np.ndarray:
    shrinks = plane.shape[0] >= size[0] and plane.shape[1] >= size[1]
    bilinear: Any = Image.Resampling.BILINEAR  # Pillow widens it when shrinking: no aliasing
    area: Any = Image.Resampling.BOX if shrinks else bilinear  # enlarged, a box would repeat pixels
    by = {"area": area, "bilinear": bilinear, "nearest": Image.Resampling.NEAREST}[how]
    return np.asarray(Image.fromarray(np.ascontiguousarray(plane, np.float32)).resize(size[::-1], by))


def _resized_mask(y: np.ndarray, size: tuple[int, int], how: str) -> np.ndarray:
    if how == "nearest":
        return np.asarray(Image.fromarray(y).resize(size[::-1], Image.Resampling.NEAREST))
    best, out = np.full(size, -1, np.float32), np.zeros(size, np.uint8)
    for label in np.unique(y):
        share = _resized((y == label).astype(np.float32), size, "area")
        wins = share >= best - 1e-6  # a tie goes to the higher label: a lesion rather than background
        best, out = np.where(wins, share, best), np.where(wins, label, out).astype(np.uint8)
    return out
