"""Slices with tumour masks, dealt out to clients, an external test site and an attacker's own set."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.data.federated import FederatedData, Split, validate

TEST, SHADOW = "test", "shadow"  # the splits that are no client
CLASSES = ("background", "tumour")


def assemble(
    prepared: Mapping[str, Mapping[str, Any]],
    clients: tuple[str, ...],
    about: Mapping[str, Any],
    how: Mapping[str, Any],
) -> FederatedData:
    """FederatedData of slices with masks: one held-out share of patients per client, a test set, an attacker's slices.

    Args:
      prepared: {split: columns}; 'x' float32 [n, H, W, 1], 'y' uint8 [n, H, W], maybe 'spacing' float32 [n, 2], and
        'case', 'patient', 'site' as n strings ('site' may be empty).
      clients: the splits that are clients, in order. 'test' becomes an external site, 'shadow' is set aside.
      about: what the data set says of itself.
      how: window, test_share and split_seed of this reading.

    Returns: one split, 'holdout'.
    Raises: UserError where splits differ in size or 'site' of the shadow slices names no client.
    """
    external = (TEST,) if TEST in prepared else ()
    sites = (*clients, *external)
    order = [s for s in (*sites, SHADOW) if s in prepared]
    starts = dict(zip(order, np.cumsum([0, *(len(prepared[s]["y"]) for s in order)])))
    rows = {s: np.arange(starts[s], starts[s] + len(prepared[s]["y"]), dtype=np.int32) for s in order}
    dealt = {
        c: _deal(prepared[c]["patient"], how["test_share"], np.random.default_rng([how["split_seed"], k]))
        for k, c in enumerate(clients)
    }
    empty = np.zeros(0, np.int32)
    split = Split(
        "holdout",
        train=(*(rows[c][~dealt[c]] for c in clients), *(empty for _ in external)),
        test=(*(rows[c][dealt[c]] for c in clients), *(rows[s] for s in external)),
    )
    site_of = np.concatenate([_site_of(s, prepared[s], sites, clients) for s in order])
    shared = [name for name in ("x", "y", "spacing") if all(name in prepared[s] for s in order)]
    shapes = {s: prepared[s]["x"].shape[1:3] for s in order}
    if len(set(shapes.values())) > 1:
        raise checks.UserError(f"data.root: splits of different sizes ({shapes}); one size expected")
    flow = [_described(s, len(split.train[k]), len(split.test[k]), prepared[s]["y"]) for k, s in enumerate(sites)]
    if SHADOW in prepared:
        flow.append(_described(SHADOW, 0, 0, prepared[SHADOW]["y"]))
    data = FederatedData(
        arrays={name: np.concatenate([prepared[s][name] for s in order]) for name in shared},
        case_ids=tuple(case for s in order for case in prepared[s]["case"]),
        patient_ids=tuple(patient for s in order for patient in prepared[s]["patient"]),
        sites=sites,
        site_of=site_of,
        splits=(split,),
        classes=CLASSES,
        about={
            "generator": about.get("generator", "not stated"),
            "synthetic": about.get("synthetic") is True,  # no slice is, or is made from, a patient's: may be shown
            "generated": dict(about),
            **how,
            "image_size": list(shapes[order[0]]),
            "sites": flow,
            "table1": [{k: row[k] for k in ("site", "total", "train", "test")} for row in flow if row["site"] in sites],
        },
        summary=_summary(flow, about, how),
        external=external,
        aside=rows.get(SHADOW, empty),
    )
    validate(data)
    return data


def _deal(patients: Sequence[str], share: float, random: np.random.Generator) -> np.ndarray:
    """bool [n], True for the cases of the patients that test."""
    unique = sorted(set(patients))
    number = min(max(round(share * len(unique)), 1), len(unique) - 1) if share > 0 else 0
    chosen = {unique[i] for i in random.permutation(len(unique))[:number]}
    return np.array([p in chosen for p in patients], bool)


def _site_of(split: str, columns: Mapping[str, Any], sites: tuple[str, ...], clients: tuple[str, ...]) -> np.ndarray:
    n = len(columns["y"])
    if split != SHADOW:
        return np.full(n, sites.index(split), np.int32)
    if not columns["site"]:
        return (np.arange(n) % len(clients)).astype(np.int32)
    unknown = sorted(set(columns["site"]) - set(clients))
    if unknown:
        raise checks.UserError(
            f"data.root: feature 'site' of split {SHADOW!r} names {unknown[0]!r}; one of {', '.join(clients)} expected"
        )
    return np.array([clients.index(site) for site in columns["site"]], np.int32)


def _described(site: str, train: int, test: int, masks: np.ndarray) -> dict[str, Any]:
    pixels = masks.reshape(len(masks), -1).sum(1, dtype=np.int64)
    return {
        "site": site,
        "total": len(masks),
        "train": train,
        "test": test,
        "tumour_pixels_median": float(np.median(pixels)),
        "without_tumour": int((pixels == 0).sum()),
    }


def _summary(flow: Sequence[Mapping[str, Any]], about: Mapping[str, Any], how: Mapping[str, Any]) -> tuple[str, ...]:
    header = ("site", "cases", "train", "test", "tumour pixels (median)", "without tumour")
    rows = [header, *(tuple(f"{v:g}" if isinstance(v, float) else str(v) for v in row.values()) for row in flow)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))) for row in rows
    ]
    window = "centre {} width {} HU".format(*how["window"]) if how["window"] else "none"
    lines += ["", f"generator: {about.get('generator', 'not stated')}; window: {window}"]
    lines.append(f"test cases: {how['test_share']:g} of each client's patients, seed {how['split_seed']}")
    if any(row["site"] == SHADOW for row in flow):
        lines.append(f"{SHADOW}: an attacker's own slices, in no split")
    return tuple(lines)
