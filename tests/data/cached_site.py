"""A FeTS tree of a few subjects with its cache, for tests of what is written there."""

import numpy as np
from volume_folder import AFFINE, VolumeFolder, classes, image

from fedjax_seg.data import nifti, volume_cache
from fedjax_seg.data.volume_tree import fets_tree

RULES = volume_cache.Rules("image", True, False)
VALUES = np.array((0, 1, 2, 4), np.uint8)


class Site:
    """A FeTS tree of a few subjects, and its cache."""

    def __init__(self, path, subjects=2):
        self.root, self.cache = path / "data", path / "cache"
        folder = VolumeFolder(self.root)
        self.folders = [folder.subject() for _ in range(subjects)]

    def prepare(self, workers=2, **rules):
        subjects = fets_tree(self.root, labels=True).subjects
        self.rules = RULES._replace(**rules)
        self.place = volume_cache.folder(str(self.cache), self.root, self.rules)
        return volume_cache.prepare(subjects, self.rules, self.place, workers=workers)

    def write(self, kind, data, subject=0, affine=AFFINE):
        nifti.write_volume(self.file(kind, subject), data, affine)

    def file(self, kind, subject=0):
        return self.folders[subject] / f"{self.folders[subject].name}_{kind}.nii.gz"


def arrays(entry):
    return [np.load(entry.folder / name) for name in ("image.npy", "label.npy", "index.npy")]


def everything(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def raw(subject=0):
    """float64 [4, X, Y, Z] and the label, as the fixture draws them."""
    own = classes(subject, 4)
    return np.stack([image(subject, own, c) for c in range(4)]).astype(np.float64), VALUES[own]
