"""FeTS and BraTS: a folder of four MRI volumes and a label map per subject; one client per institution."""

from fedjax_seg.data.federated import FederatedData
from fedjax_seg.data.volumes import Options, volumes


def fets(
    root: str,
    partition: str,
    *,
    label_scheme: str = "auto",
    normalise: str = "image",
    crop: bool = True,
    patch: tuple[int, ...] = (64, 64, 64),
    patches: int = 40,
    sampling: str = "foreground",
    background: float = 0.0,
    share: float = 0.8,
    split_seed: int = 0,
    drop_small: bool = False,
    nonfinite: str = "error",
    check_affine: bool = True,
    cache: str = "",
    workers: int = 0,
    ahead: int = 4,
    sites: tuple[str, ...] = (),
) -> FederatedData:
    """Reads a tree of FeTS or BraTS subjects; channels t1, t1ce, t2, flair.

    Source: FeTS 2022, Task 1 (partitioning_1.csv, partitioning_2.csv; 64^3 patches, 40 of a subject and epoch, label
    sampler; 80 % of every institution train). Deviation: `patches.start` for centres close to the border; a seed.

    Args:
      root: the tree, in any of the namings of `volume_tree.ALIASES`, each subject a folder.
      partition: the CSV, relative to root or a path of its own: `Partition_ID` (or InstitutionName), `Subject_ID`
        and, if wanted, `TrainOrVal` (train, val). Rows of Partition_ID -1 take no part; only they may lack a label.
      label_scheme: 'auto' = told by the values, brats2021 (ET = 4) or brats2023 (ET = 3); or a name of
        label_schemes.SCHEMES, or 'plain' (a class per value).
      normalise: 'image' = z-score per channel over all voxels (FeTS); 'brain' = over the voxels that are not 0,
        which stay 0; 'none' = as stored.
      crop: keep the box of voxels that are not 0, enlarged to hold every label voxel. Predictions are put back.
      patch: voxels of a training patch.
      patches: of a subject and epoch.
      sampling: 'foreground' = around labelled voxels, all equally likely (FeTS); 'balanced' = around a label value, all
        that the subject has equally likely; 'uniform' = anywhere.
      background: share of 'balanced' patches that are uniform instead.
      share: of each site's subjects, rounded down, that train; the others test.
      split_seed: of that draw, which depends on the site's name and subjects only.
      drop_small: leave out sites that are too small to be split, instead of refusing them.
      nonfinite: NaN and infinite voxels: 'error', or 'background' = they become 0 before normalisation.
      check_affine: refuse a label (or channel) that lies elsewhere in space than the first image.
      cache: folder for what was read; '' = fedjax_seg/volumes in XDG_CACHE_HOME or ~/.cache. What was made of files
        that have changed since stays there, for runs that still read it.
      workers: threads that read subjects, each in about half a GB; 0 = one per core, at most 16.
      ahead: training batches read ahead of every client; 0 = none.
      sites: the sites to use, in this order; () = all.

    Returns, Raises: see `volumes`.
    """
    given = locals()
    return volumes("fets", root, partition, Options(*(given[name] for name in Options._fields)))
