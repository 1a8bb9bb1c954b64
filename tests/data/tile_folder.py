"""Folders of small histology tiles for tests."""

import numpy as np
import pytest
from PIL import Image

from fedjax_seg.core.checks import DataFaults
from fedjax_seg.data.histopathology import histopathology


class Tiles:
    """Tiles of 8x8 noise below a folder; `table` writes metadata.csv."""

    def __init__(self, root):
        self.root, self._random = root, np.random.default_rng(2)

    def put(self, *names, pixels=None):
        """Writes a picture (or bytes) under every name; noise where nothing is given."""
        for name in names:
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            content = self._random.integers(0, 256, (8, 8, 3), np.uint8) if pixels is None else pixels
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                Image.fromarray(content).save(path)
        return self

    def table(self, text):
        (self.root / "metadata.csv").write_text(text)
        return self

    def rows(self, header, rows):
        """A table of dicts or tuples with a picture for every row's first cell."""
        self.put(*(row[0] for row in rows if not (self.root / row[0]).exists()))
        return self.table("\n".join([header, *(",".join(row) for row in rows)]) + "\n")

    def load(self, **options):
        return histopathology(**{"root": str(self.root), "size": (8, 8), "normalise": "none"} | options)

    def faults(self, **options):
        with pytest.raises(DataFaults) as error:
            self.load(**options)
        return error.value.faults


def slides(sites="AB", groups=4, tiles=2, labels=("benign", "tumour")):
    """Rows image,label,group,site: groups of tiles, labels in turn."""
    return [
        (f"t/{s}{g}_{i}.png", labels[g % len(labels)], f"{s}{g}", s)
        for s in sites for g in range(groups) for i in range(tiles)
    ]  # fmt: skip
