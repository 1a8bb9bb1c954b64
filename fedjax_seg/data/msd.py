"""A folder of the Medical Segmentation Decathlon with a partitioning CSV; one client per site."""

from fedjax_seg.data.federated import FederatedData
from fedjax_seg.data.volumes import Options, volumes


def msd(
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
    """Reads a task of the Medical Segmentation Decathlon: `imagesTr/ID.nii.gz`, `labelsTr/ID.nii.gz`.

    The Decathlon itself names no sites: the table is yours, in the form of FeTS.

    Args:
      root: the folder of the task, with or without dataset.json.
      partition: the CSV, as in `fets`.
      label_scheme: has to be named, 'auto' is refused: 'plain' = a class per value; msd_brats or brats2023 for brain
        tumours (their values are the same).
      normalise ... sites: as in `fets`.

    Returns, Raises: see `volumes`.
    """
    given = locals()
    return volumes("msd", root, partition, Options(*(given[name] for name in Options._fields)))
