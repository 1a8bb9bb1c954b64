"""Which cases a report shows: some training slices of every site, and the worst, middle and best test cases."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.report.scans import Scan

PER_SITE, OVERLAYS = 6, 4  # slices of a site; test cases of each kind


class Pictures(NamedTuple):
    """Slices to show: (site, its scans) of every site, and segmented test cases."""

    examples: Sequence[tuple[str, Sequence[Scan]]]
    overlays: Sequence[Scan]


def allowed(mode: str, about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether cases may be shown: 2D slices with masks, and either asked for or synthetic ('auto')."""
    drawable = arrays["x"].ndim == 4 and arrays["y"].ndim == 3
    return drawable and (mode == "on" or (mode == "auto" and bool(about.get("synthetic"))))


def choose(
    data: Any,
    plan: Any,
    outputs: Mapping[str, np.ndarray],
    masks: Callable[..., tuple[np.ndarray, np.ndarray]],
    case_values: Callable[..., Mapping[str, np.ndarray]],
    metric: str,
) -> Pictures:
    """The pictures of one replica.

    Args:
      data: FederatedData.
      plan: its train [K, M], train_sizes [K], test [K, T], test_sizes [K].
      outputs: of the test cases, {name: [K, T, ...]}.
      masks: (outputs of a site, cases) -> (truth, predicted) [n, H, W].
      case_values: as in Task; `metric` is the column that ranks the cases.
    """
    rows = []
    for k, site in enumerate(data.sites):
        own = plan.train[k, : plan.train_sizes[k]]
        shown = own[np.unique(np.linspace(0, len(own) - 1, PER_SITE).astype(int))] if len(own) else own
        if len(shown):
            rows.append((site, [Scan("", _image(data, i), data.arrays["y"][i]) for i in shown]))
    tested = [k for k, site in enumerate(data.sites) if plan.test_sizes[k]]
    found = []
    for k in [k for k in tested if data.sites[k] in data.external] or tested:
        mine = {name: x[k] for name, x in outputs.items()}
        values = np.asarray(case_values(mine, np.arange(plan.test_sizes[k]))[metric], float)
        found += [(float(v), k, t) for t, v in enumerate(values) if np.isfinite(v)]
    found.sort()
    middle = max(0, len(found) // 2 - OVERLAYS // 2)
    chosen = [*found[:OVERLAYS], *found[middle : middle + OVERLAYS], *found[-OVERLAYS:]]
    overlays = []
    for value, k, t in dict.fromkeys(chosen):
        truth, predicted = masks({name: x[k] for name, x in outputs.items()}, np.array([t]))
        title = f"{data.sites[k]}\n{metric} {value:.2f}"
        overlays.append(Scan(title, _image(data, plan.test[k, t]), truth[0], predicted[0]))
    return Pictures(rows, overlays)


def _image(data: Any, case: int) -> np.ndarray:
    """[H, W], or [H, W, 3] of a colour image."""
    x = np.asarray(data.arrays["x"][case], float)
    return x if x.shape[-1] == 3 else x[..., 0]
