"""Which cases a report shows: some training slices of every site, and the worst, middle and best test cases."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.report.fets_figures import Case
from fedjax_seg.report.scans import Scan

PER_SITE, OVERLAYS = 6, 4  # slices of a site; test cases of each kind


class Pictures(NamedTuple):
    """Slices to show: (site, its scans) of every site, and segmented test cases."""

    examples: Sequence[tuple[str, Sequence[Scan]]]
    overlays: Sequence[Scan]


class VolumePictures(NamedTuple):
    """Volumes to show.

    Attributes:
      example: a training case with all its channels, float [X, Y, Z, channels], and its truth; None = no site trains.
      cases: segmented test cases.
      channels, classes: names.
      orientation: of the arrays, e.g. 'LPS'.
    """

    example: Case | None
    cases: Sequence[Case]
    channels: Sequence[str]
    classes: Sequence[str]
    orientation: str


def allowed(mode: str, data: Any) -> bool:
    """Whether cases may be shown: volumes or 2D images, and either asked for or synthetic ('auto')."""
    drawable = data.store is not None or data.arrays["x"].ndim == 4
    return drawable and (mode == "on" or (mode == "auto" and bool(data.about.get("synthetic"))))


def choose(
    data: Any,
    plan: Any,
    outputs: Mapping[str, np.ndarray],
    masks: Callable[..., tuple[np.ndarray, np.ndarray]] | None,
    case_values: Callable[..., Mapping[str, np.ndarray]],
    metric: str,
) -> Pictures:
    """The pictures of one replica. Classified images have no contour: their titles tell classes.

    Args:
      data: FederatedData.
      plan: its train [K, M], train_sizes [K], test [K, T], test_sizes [K].
      outputs: of the test cases, {name: [K, T, ...]}.
      masks: (outputs of a site, cases) -> (truth, predicted) [n, H, W]; None: a label per image.
      case_values: as in Task; `metric` is the column that ranks the cases.
    """
    rows = []
    for k, site in enumerate(data.sites):
        own = plan.train[k, : plan.train_sizes[k]]
        shown = own[np.unique(np.linspace(0, len(own) - 1, PER_SITE).astype(int))] if len(own) else own
        if len(shown):
            rows.append((site, [_example(data, i) for i in shown]))
    overlays = []
    for value, k, t in ranked(data, plan, outputs, case_values, metric, OVERLAYS) if masks else ():
        assert masks is not None
        truth, predicted = masks({name: x[k] for name, x in outputs.items()}, np.array([t]))
        title = f"{data.sites[k]}\n{metric} {value:.2f}"
        overlays.append(Scan(title, _image(data, plan.test[k, t]), truth[0], predicted[0]))
    return Pictures(rows, overlays)


def ranked(
    data: Any,
    plan: Any,
    outputs: Mapping[str, np.ndarray],
    case_values: Callable[..., Mapping[str, np.ndarray]],
    metric: str,
    each: int,
) -> list[tuple[float, int, int]]:
    """(value, site, position) of the `each` worst, middle and best test cases: of the external sites where there are
    any. Arguments as in `choose`."""
    tested = [k for k, site in enumerate(data.sites) if plan.test_sizes[k]]
    found = []
    for k in [k for k in tested if data.sites[k] in data.external] or tested:
        mine = {name: x[k] for name, x in outputs.items()}
        values = np.asarray(case_values(mine, np.arange(plan.test_sizes[k]))[metric], float)
        found += [(float(v), k, t) for t, v in enumerate(values) if np.isfinite(v)]
    found.sort()
    middle = max(0, len(found) // 2 - each // 2)
    return list(dict.fromkeys([*found[:each], *found[middle : middle + each], *found[-each:]]))


def _example(data: Any, case: int) -> Scan:
    y = data.arrays["y"][case]
    if np.ndim(y):
        return Scan("", _image(data, case), y)
    return Scan(data.classes[int(y)], _image(data, case), np.zeros(data.arrays["x"].shape[1:3], np.uint8))


def _image(data: Any, case: int) -> np.ndarray:
    """[H, W], or [H, W, 3] of a colour image; in [0, 1] where the network's input is not."""
    x = np.asarray(data.arrays["x"][case], float)
    scale = data.about.get("normalise")
    if isinstance(scale, Mapping):
        x = np.clip(x * np.asarray(scale["std"]) + np.asarray(scale["mean"]), 0, 1)
    return x if x.shape[-1] == 3 else x[..., 0]
