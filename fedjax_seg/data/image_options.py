"""The options of `images2d`: their checks, and what a report says of them."""

from collections.abc import Sequence
from typing import Any

from fedjax_seg.core import checks
from fedjax_seg.data.raster import FILTERS, MASK_FILTERS, UNIFY, Look

DRAWN = ("dirichlet", "lesion_size", "iid")
VAL = ("unused", "train", "test")


def check(
    look: Look,
    *,
    target: str,
    mask_values: Sequence[int],
    classes: Sequence[str],
    spacing: Sequence[float],
    partition: str,
    min_site_size: int,
    test_share: float,
    aside_share: float,
    val: str,
    seed: int,
) -> None:
    """Raises: UserError on the first option that is out of range, of the wrong length, or read by nothing."""
    checks.one_of("data.target", target, ("mask", "label"))
    checks.one_of("data.channels", look.channels, ("gray", "rgb"))
    checks.one_of("data.unify", look.unify, UNIFY)
    checks.one_of("data.resize", look.resize, FILTERS)
    checks.one_of("data.mask_resize", look.mask_resize, MASK_FILTERS)
    checks.one_of("data.val", val, VAL)
    _check_length("data.size", look.size, (2,), "(rows, columns)")
    _check_length("data.window", look.window, (0, 2), "(centre, width) in HU, or ()")
    _check_length("data.spacing", spacing, (0, 1, 2), "mm per pixel, (both,) or (rows, columns), or ()")
    for side in look.size:
        checks.number("data.size", side, low=1, integer=True)
    for mm in spacing:
        checks.number("data.spacing", mm, above=0)
    checks.number("data.fill", look.fill, low=0, high=1)
    checks.number("data.hu_slope", look.hu_slope, above=0)
    checks.number("data.hu_offset", look.hu_offset)
    if look.window:
        checks.number("data.window centre", look.window[0])
        checks.number("data.window width", look.window[1], above=0)
        if look.channels == "rgb":
            raise checks.UserError(
                "data.window: a grey level window does not apply to channels='rgb'; unset one of them"
            )
    elif (look.hu_slope, look.hu_offset) != (1, 0):
        raise checks.UserError("data.hu_slope, data.hu_offset: without data.window=(centre, width) nothing reads them")
    for value in mask_values:
        checks.number("data.mask_values", value, integer=True)
    if len(set(mask_values)) != len(mask_values) or len(mask_values) == 1 or len(mask_values) > 256:
        raise checks.UserError(
            f"data.mask_values: {tuple(mask_values)} given, 2 to 256 distinct values (or ()) expected"
        )
    if target == "mask" and classes and len(classes) != (len(mask_values) or 2):
        raise checks.UserError(f"data.classes: {len(classes)} names for {len(mask_values) or 2} mask values")
    if target == "label" and (mask_values or partition == "lesion_size"):
        wrong = "data.mask_values" if mask_values else "data.partition='lesion_size'"
        raise checks.UserError(f"{wrong}: needs masks, data.target='label' has none")
    if not (partition.startswith("column:") and partition != "column:"):
        checks.one_of("data.partition", partition, ("site", "column:NAME", *DRAWN))
    checks.number("data.min_site_size", min_site_size, low=0, integer=True)
    checks.number("data.seed", seed, low=0, integer=True)
    _check_shares(test_share, aside_share)


def _check_length(what: str, value: Any, lengths: Sequence[int], form: str) -> None:
    if isinstance(value, str) or len(value) not in lengths:
        raise checks.UserError(f"{what}: {value!r} given, {form} expected")


def _check_shares(test_share: float, aside_share: float) -> None:
    checks.number("data.test_share", test_share, low=0, high=0.9)
    checks.number("data.aside_share", aside_share, low=0, high=0.9)
    if test_share + aside_share >= 1:
        raise checks.UserError(
            f"data.test_share + data.aside_share: {test_share + aside_share:g} given, less than 1 expected: somebody"
            " must train"
        )


def input_text(look: Look) -> str:
    """How stored values became inputs, in one line."""
    how = {
        "resize": f"scaled to {look.size[0]}x{look.size[1]} (images {look.resize}, masks {look.mask_resize})",
        "crop": f"cut or filled up to {look.size[0]}x{look.size[1]} around the centre, not scaled",
        "pad": f"filled up to the proportions of {look.size[0]}x{look.size[1]}, then scaled (images {look.resize},"
        f" masks {look.mask_resize})",
    }[look.unify]
    if look.window:
        low, high = look.window[0] - look.window[1] / 2, look.window[0] + look.window[1] / 2
        values = f"0 to 1 = {low:g} to {high:g} HU, HU = stored * {look.hu_slope:g} + {look.hu_offset:g}"
    else:
        values = "0 to 1 = the full range of the bit depth"
    return f"{look.channels}, {how}; {values}"


def partition_text(partition: str, clients: int, alpha: float, seed: int) -> str:
    """Which rule made the clients, in one line."""
    drawn = {
        "dirichlet": f"drawn: Dirichlet, alpha {alpha:g}, {clients} clients, seed {seed}",
        "lesion_size": f"drawn: patients in ascending order of their mean lesion, {clients} equal parts",
        "iid": f"drawn: at random, {clients} clients of equal size, seed {seed}",
    }
    return drawn.get(partition, f"by the column {partition.removeprefix('column:')!r}")


def split_text(given: int, rows: int, test_share: float, aside_share: float, val: str, seed: int) -> str:
    """Which rule divided the patients, in one line; `given` of the rows have an entry in the split column."""
    drawn = f"by patient, per client: test share {test_share:g}, set aside {aside_share:g}, seed {seed}"
    if not given:
        return drawn
    fixed = f"the column 'split' (val: {val})"
    return fixed if given == rows else f"{fixed} for {given} of {rows} rows, others {drawn}"
