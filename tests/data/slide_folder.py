"""A folder of slide features with a table, in memory until it is written."""

import numpy as np
import pytest

from fedjax_seg.core.checks import DataFaults
from fedjax_seg.data.slide_bags import slide_bags

WIDTH = 3


class Slides:
    """Slides in memory order: slide i has i % 4 + 1 instances of three numbers, its label is i % 2."""

    def __init__(self, root):
        self.root, self.rows, self.header = root, [], "bag,label,patient,site"
        self._random = np.random.default_rng(1)

    def slide(self, *more, name=None, features=None, dtype=np.float32):
        n = len(self.rows)
        name = f"s{n:02d}.npz" if name is None else name
        if features is None:
            features = self._random.normal(size=(n % 4 + 1, WIDTH))
        self.put(name, features if isinstance(features, bytes | dict) else np.asarray(features, dtype))
        self.rows.append([name, "ab"[n % 2], *(more or (f"p{n}", "A"))])
        return features

    def put(self, name, content):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif path.suffix == ".h5":
            h5py = pytest.importorskip("h5py")
            arrays = content if isinstance(content, dict) else {"features": content}
            with h5py.File(path, "w") as file:
                for key, values in arrays.items():
                    file[key] = values
        else:
            np.savez(path, **(content if isinstance(content, dict) else {"features": content}))

    def two_sites(self, patients=5, slides=2):
        for site in "AB":
            for p in range(patients):
                for _ in range(slides):
                    self.slide(f"{site}{p}", site)
        return self

    def load(self, **options):
        lines = [self.header, *(",".join(row) for row in self.rows)]
        (self.root / "metadata.csv").write_text("\n".join(lines))
        return slide_bags(**{"root": str(self.root)} | options)

    def faults(self, **options):
        with pytest.raises(DataFaults) as error:
            self.load(**options)
        return error.value.faults


def line(found, start):
    (text,) = [text for text in found.summary if text.startswith(start)]
    return text
