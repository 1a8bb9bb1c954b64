"""The options of image folders: their checks, and what a report says of them."""

from collections.abc import Sequence
from typing import Any

from fedjax_seg.core import checks
from fedjax_seg.data.image_clients import Division
from fedjax_seg.data.raster import FILTERS, MASK_FILTERS, UNIFY, Look

DRAWN = ("dirichlet", "quantity", "iid")
DRAWN_BY_MASKS = ("lesion_size",)  # more rules, of segmentation only
VAL = ("unused", "train", "test")


def check_look(look: Look) -> None:
    """Raises: UserError on the first option of the pictures that is out of range or of the wrong length."""
    checks.one_of("data.channels", look.channels, ("gray", "rgb"))
    checks.one_of("data.unify", look.unify, UNIFY)
    checks.one_of("data.resize", look.resize, FILTERS)
    checks.one_of("data.mask_resize", look.mask_resize, MASK_FILTERS)
    _check_length("data.size", look.size, (2,), "(rows, columns)")
    _check_length("data.window", look.window, (0, 2), "(centre, width) in HU, or ()")
    for side in look.size:
        checks.number("data.size", side, low=1, integer=True)
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


def check_target(
    target: str, mask_values: Sequence[int], classes: Sequence[str], spacing: Sequence[float], partition: str
) -> None:
    """Raises: UserError where the labels' options do not fit each other."""
    checks.one_of("data.target", target, ("mask", "label"))
    _check_length("data.spacing", spacing, (0, 1, 2), "mm per pixel, (both,) or (rows, columns), or ()")
    for mm in spacing:
        checks.number("data.spacing", mm, above=0)
    for value in mask_values:
        checks.number("data.mask_values", value, integer=True)
    if len(set(mask_values)) != len(mask_values) or len(mask_values) == 1 or len(mask_values) > 256:
        raise checks.UserError(
            f"data.mask_values: {tuple(mask_values)} given, 2 to 256 distinct values (or ()) expected"
        )
    if target == "mask" and classes and len(classes) != (len(mask_values) or 2):
        raise checks.UserError(f"data.classes: {len(classes)} names for {len(mask_values) or 2} mask values")
    if target == "label" and (mask_values or partition in DRAWN_BY_MASKS):
        wrong = "data.mask_values" if mask_values else f"data.partition={partition!r}"
        raise checks.UserError(f"{wrong}: needs masks, data.target='label' has none")


def check_division(division: Division, partition: str, allowed: Sequence[str], val: str) -> None:
    """Raises: UserError on the first option of clients and split that is out of range.

    Args:
      division: the rule, as far as the options tell it.
      partition: as given; `allowed` are the names that it may have, 'column:NAME' stands for any column.
      val: see images2d.
    """
    if not (partition.startswith("column:") and partition != "column:"):
        checks.one_of("data.partition", partition, allowed)
    checks.one_of("data.val", val, VAL)
    checks.number("data.min_site_size", division.min_site_size, low=0, integer=True)
    checks.number("data.seed", division.seed, low=0, integer=True)
    test_share, aside_share = division.test_share, division.aside_share
    checks.number("data.test_share", test_share, low=0, high=0.9)
    checks.number("data.aside_share", aside_share, low=0, high=0.9)
    if test_share + aside_share >= 1:
        raise checks.UserError(
            f"data.test_share + data.aside_share: {test_share + aside_share:g} given, less than 1 expected: somebody"
            " must train"
        )


def _check_length(what: str, value: Any, lengths: Sequence[int], form: str) -> None:
    if isinstance(value, str) or len(value) not in lengths:
        raise checks.UserError(f"{what}: {value!r} given, {form} expected")


def input_text(look: Look, masks: bool = True, zooms: Sequence[tuple[float, float]] = ()) -> str:
    """How stored values became inputs, in one line; zooms: of the images, see raster.fit."""
    smaller = sum(min(zoom) < 1 for zoom in zooms) if look.resize == "area" else 0
    resize = look.resize + f", bilinear for the {smaller} that were smaller" * (smaller > 0)
    filters = f"images {resize}, masks {look.mask_resize}" if masks else resize
    size = f"{look.size[0]}x{look.size[1]}"
    how = {
        "resize": f"scaled to {size} ({filters})",
        "crop": f"cut or filled up to {size} around the centre, not scaled",
        "pad": f"filled up to the proportions of {size}, then scaled ({filters})",
    }[look.unify]
    if look.window:
        low, high = look.window[0] - look.window[1] / 2, look.window[0] + look.window[1] / 2
        values = f"0 to 1 = {low:g} to {high:g} HU, HU = stored * {look.hu_slope:g} + {look.hu_offset:g}"
    else:
        values = "0 to 1 = the full range of the bit depth"
    return f"{look.channels}, {how}; {values}"


def partition_text(division: Division) -> str:
    """Which rule made the clients, in one line."""
    clients, seed = division.clients, division.seed
    if division.column:
        return f"by the column {division.column!r}"
    return {
        "dirichlet": f"drawn: Dirichlet, alpha {division.alpha:g}, {clients} clients, seed {seed}",
        "quantity": f"drawn: sizes by Dirichlet, alpha {division.alpha:g}, {clients} clients, seed {seed}",
        "lesion_size": f"drawn: {division.unit}s in ascending order of their mean lesion, {clients} equal parts",
        "iid": f"drawn: at random, {clients} clients of equal size, seed {seed}",
    }[division.rule]


def split_text(given: int, rows: int, division: Division, val: str) -> str:
    """Which rule divided the patients, in one line; `given` of the rows have an entry in the split column."""
    drawn = (
        f"by {division.unit}, per client: test share {division.test_share:g}, set aside {division.aside_share:g},"
        f" seed {division.seed}"
    )
    if not given:
        return drawn
    fixed = f"the column 'split' (val: {val})"
    return fixed if given == rows else f"{fixed} for {given} of {rows} rows, others {drawn}"
