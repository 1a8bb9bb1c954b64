"""A folder of images and masks with a table, in memory until it is written."""

import numpy as np
import pytest
from PIL import Image

from fedjax_seg.core.checks import DataFaults
from fedjax_seg.data.images2d import images2d

HEADER = "image,mask,site,patient"


class Folder:
    """Images of 8x8 in memory order: image i is noise, its mask a square of side 1 + i % 4."""

    def __init__(self, root):
        self.root, self.rows, self.header = root, [], HEADER
        self._random = np.random.default_rng(1)

    def image(self, site="A", patient=None, name=None, pixels=None, mask=None, more="", label=None):
        n = len(self.rows)
        name = name or f"images/{n:02d}.png"
        square = np.zeros((8, 8), np.uint8)
        square[: 1 + n % 4, : 1 + n % 4] = 255
        self.put(name, self._random.integers(0, 256, (8, 8), np.uint8) if pixels is None else pixels)
        if label is None:
            self.put(f"masks/{n:02d}.png", square if mask is None else mask)
        second = f"masks/{n:02d}.png" if label is None else label
        self.rows.append([name, second, site, patient or f"p{n}", *([more] if more else [])])
        return name

    def put(self, name, pixels):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(pixels, bytes):
            path.write_bytes(pixels)
        else:
            Image.fromarray(pixels).save(path)

    def two_sites(self, patients=5, slices=2):
        for site in "AB":
            for p in range(patients):
                for _ in range(slices):
                    self.image(site, f"{site}{p}")
        return self

    def text(self, delimiter=",", end="\n"):
        lines = [self.header.split(","), *self.rows]
        return "".join(delimiter.join(line) + end for line in lines)

    def load(self, text=None, **options):
        (self.root / "metadata.csv").write_bytes((self.text() if text is None else text).encode())
        return images2d(**{"root": str(self.root), "size": (8, 8)} | options)

    def faults(self, **options):
        with pytest.raises(DataFaults) as error:
            self.load(**options)
        return error.value.faults


def roles(data):
    """{case id: its part}"""
    split = data.splits[0]
    parts = {"train": np.concatenate(split.train), "test": np.concatenate(split.test), "aside": data.aside}
    return {data.case_ids[i]: role for role, own in parts.items() for i in own}


def line(data, start):
    found = [text for text in data.summary if text.startswith(start)]
    assert len(found) == 1, data.summary
    return found[0]
