"""8-bit RGB pictures as PNG files of the same bytes every time."""

import struct
import zlib

import numpy as np

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_TRUE_COLOUR, _NO_FILTER = 2, 0


def encode(pixels: np.ndarray) -> bytes:
    """The file of a picture, uint8 [H, W, 3].

    Source: W3C, Portable Network Graphics (PNG) Specification, second edition, sections 5 (chunks), 9 (filter 0 of
    every row) and 10 (zlib).

    Raises: ValueError on any other array.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise ValueError(f"{pixels.dtype} {pixels.shape} given, uint8 [H, W, 3] expected")
    height, width, _ = pixels.shape
    head = struct.pack(">IIBBBBB", width, height, 8, _TRUE_COLOUR, 0, 0, 0)
    rows = np.full((height, 1 + 3 * width), _NO_FILTER, np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)
    return _SIGNATURE + _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 6)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)
