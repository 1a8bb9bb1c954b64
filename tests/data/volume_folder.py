"""Tiny trees of volumes, 16x16x12 voxels, in every naming and every label set that people have."""

import numpy as np

from fedjax_seg.data import nifti

SHAPE = (16, 16, 12)
AFFINE = np.array([[-1.0, 0, 0, 0], [0, -1, 0, 239], [0, 0, 1, 0], [0, 0, 0, 1]])  # as BraTS has it
KINDS = ("t1", "t1ce", "t2", "flair", "seg")
# The files' names by kind; {} is the subject's id.
NAMINGS = {
    "fets2022": tuple("{}_%s.nii.gz" % k for k in KINDS),  # noqa: UP031
    "brats2023": ("{}-t1n.nii.gz", "{}-t1c.nii.gz", "{}-t2w.nii.gz", "{}-t2f.nii.gz", "{}-seg.nii.gz"),
    "kaggle": tuple("{}_%s.nii" % k for k in KINDS),  # noqa: UP031
    "fets_tool": (
        "{}_brain_t1.nii.gz",
        "{}_brain_t1gd.nii.gz",
        "{}_brain_t2.nii.gz",
        "{}_brain_flair.nii.gz",
        "{}_final_seg.nii.gz",
    ),
    "tcga": ("{}_t1.nii.gz", "{}_t1ce.nii.gz", "{}_t2.nii.gz", "{}_flair.nii.gz", "{}_seg_fused.nii.gz"),
    "capitals": ("{}_T1.NII.GZ", "{}_T1Gd.NII.GZ", "{}_T2.NII.GZ", "{}_FLAIR.NII.GZ", "{}_SEG.NII.GZ"),
}
# Values in the file of background, necrotic core, oedema, enhancing tumour (and resection cavity).
VALUES = {
    "brats2021": (0, 1, 2, 4),
    "brats2023": (0, 1, 2, 3),
    "brats2024_post": (0, 1, 2, 3, 4),
    "msd_brats": (0, 2, 1, 3),
    "no_enhancing": (0, 1, 2),
}


def classes(seed, count, shape=SHAPE):
    """uint8 [shape]; nested boxes, class 2 around 3 around 1 (and a cavity of class 4), moved by the seed."""
    out = np.zeros(shape, np.uint8)
    start = 2 + np.random.default_rng(seed).integers(0, 3, 3)
    for grow, size, own in ((0, 7, 2), (1, 5, 3), (2, 2, 1), (3, 1, 4)):
        if own < count:
            out[tuple(slice(s + grow, s + grow + size) for s in start)] = own
    return out


def image(seed, labels, channel=0):
    """int16 [shape]; zero outside a head-like box, as skull-stripped images are; each class has its own brightness."""
    random = np.random.default_rng([seed, channel])
    bright = 400 + 150 * channel + 90 * labels.astype(float) + random.normal(0, 20, labels.shape)
    head = np.zeros(labels.shape, bool)
    head[tuple(slice(1, n - 1) for n in labels.shape)] = True
    return np.where(head, bright, 0).astype(np.int16)


class VolumeFolder:
    """A tree that is written at once, subject by subject.

    Attributes:
      rows: (site, subject) of every subject that has a site, for the table.
    """

    def __init__(self, root):
        self.root, self.rows, self._count = root, [], 0
        root.mkdir(parents=True, exist_ok=True)

    def subject(
        self,
        name=None,
        site=None,
        *,
        naming="fets2022",
        scheme="brats2021",
        below="",
        skip=(),
        affine=AFFINE,
        shape=SHAPE,
    ):
        """Writes a subject's five files; returns its folder. Ids count up: FeTS2022_00000, ..."""
        seed, self._count = self._count, self._count + 1
        name = name or f"FeTS2022_{seed:05d}"
        folder = self.root / below / name
        folder.mkdir(parents=True)
        values = np.array(VALUES[scheme], np.uint8)
        own = classes(seed, len(values), shape)
        for channel, (kind, pattern) in enumerate(zip(KINDS, NAMINGS[naming])):
            if kind not in skip:
                data = values[own] if kind == "seg" else image(seed, own, channel)
                nifti.write_volume(folder / pattern.format(name), data, affine)
        if site is not None:
            self.rows.append((str(site), name))
        return folder

    def sites(self, sizes, **options):
        """Sites 1, 2, ... of the given sizes."""
        for site, size in enumerate(sizes, start=1):
            for _ in range(size):
                self.subject(site=site, **options)
        return self

    def table(self, header="Partition_ID,Subject_ID", end="\r\n", more=()):
        """Writes partitioning.csv with CRLF, as FeTS has it; returns its path."""
        path = self.root / "partitioning.csv"
        lines = [header, *(f"{site},{name}" for site, name in self.rows), *more]
        path.write_bytes("".join(line + end for line in lines).encode())
        return path


def msd_folder(root, subjects=4, channels=1, values=(0, 1, 2), shapes=(SHAPE,), dataset=None, end=".nii.gz"):
    """An MSD folder: case_000, case_001, ... with shapes in turn; returns the ids."""
    for name in ("imagesTr", "labelsTr"):
        (root / name).mkdir(parents=True, exist_ok=True)
    ids = [f"case_{i:03d}" for i in range(subjects)]
    for i, name in enumerate(ids):
        own = classes(i, len(values), shapes[i % len(shapes)])
        data = np.stack([image(i, own, c) for c in range(channels)], axis=-1)
        nifti.write_volume(root / "imagesTr" / (name + end), data if channels > 1 else data[..., 0], AFFINE)
        nifti.write_volume(root / "labelsTr" / (name + end), np.array(values, np.uint8)[own], AFFINE)
    if dataset is not None:
        (root / "dataset.json").write_text(dataset)
    return ids
