"""Time series of regions (ROIs) -> functional connectivity: the upper triangle of their correlation matrix."""

import numpy as np

FISHER_LIMIT = 1 - 1e-7  # |r| is clipped here before arctanh, else identical columns give infinity
_ROUNDING = 8 * np.finfo(np.float64).eps


def bad_rois(series: np.ndarray) -> np.ndarray:
    """ROIs without a correlation: a NaN or infinite cell, or a constant column (e.g. zeros outside the field of view).

    Args:
      series: float64 [T, R]; T time points, R ROIs.

    Returns: bool [R].
    """
    finite = np.isfinite(series).all(axis=0)
    clean = np.where(finite, series, 0.0)
    return ~finite | (np.ptp(clean, axis=0) <= _ROUNDING * np.abs(clean).max(axis=0, initial=0.0))


def edges(series: np.ndarray, *, fisher_z: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Pearson correlation of every pair of ROIs, row by row above the diagonal.

    Source: FedHAvg, data section (116 AAL ROIs give 6,670 features). Deviation: the paper does not say whether it
    used Pearson r or Fisher z; both are offered.

    Args:
      series: float64 [T, R].
      fisher_z: arctanh of r, with |r| clipped to 1 - 1e-7.

    Returns: float32 [R(R-1)/2] without NaN, 0 where one of the two ROIs is bad; bool [R(R-1)/2], False there.
    """
    bad = bad_rois(series)
    z = np.where(bad, 0.0, series)
    # to unit range before and after centring, so that no unit of measurement over- or underflows in the squares
    z = z / np.where(bad, 1.0, np.abs(z).max(axis=0, initial=0.0))
    z = z - z.mean(axis=0)
    z = z / np.where(bad, 1.0, np.abs(z).max(axis=0, initial=0.0))
    z = z / np.where(bad, 1.0, np.sqrt(np.square(z).sum(axis=0)))
    upper = np.triu_indices(series.shape[1], k=1)
    # einsum, not BLAS: these small products gain nothing from its threads, whose number would change the last bits
    r = np.einsum("ti,tj->ij", z, z)[upper]
    ok = ~(bad[upper[0]] | bad[upper[1]])
    r = np.where(ok, np.clip(r, -1.0, 1.0), 0.0)
    if fisher_z:
        r = np.arctanh(np.clip(r, -FISHER_LIMIT, FISHER_LIMIT))
    return r.astype(np.float32), ok
