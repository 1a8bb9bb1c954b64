"""What a run makes of its volumes beside numbers: saved segmentations, and pictures of some cases."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_seg.assembly import Experiment
from fedjax_seg.core import tree
from fedjax_seg.report import pictures
from fedjax_seg.report.fets_figures import Case

EACH = 2  # worst, middle and best test cases that are drawn
EXAMPLES = 12  # sites whose first training case may be the one that is shown


def saver(experiment: Experiment, folder: Path) -> Callable[..., None]:
    """(replica, client, position, raw outputs of one case) -> None: writes the case's prediction.

    <folder>/<case>.nii.gz in the frame and the label values of the input; of several replicas, a folder for each.
    """
    data, plan, task = experiment.data, experiment.plan, experiment.task
    assert data.store is not None and task.masks is not None
    store, masks = data.store, task.masks

    def save(r: int, k: int, t: int, outputs: Mapping[str, np.ndarray]) -> None:
        case = int(plan.test[r, k, t])
        replica = experiment.replicas[r]
        own = folder / f"{replica.fold}_seed{replica.seed}" if len(experiment.replicas) > 1 else folder
        store.save(case, _within(masks(outputs, np.arange(1))[1][0], data.arrays["shape"][case]), own)

    return save


def choose(experiment: Experiment, state: Any, plan: Any, columns: Mapping[str, np.ndarray]) -> pictures.VolumePictures:
    """Pictures of the first replica: a training case, and the worst, middle and best test cases.

    Args:
      plan: on the device, of all replicas.
      columns: the reduced outputs, [R, K, T].
    """
    data, task, mine = experiment.data, experiment.task, tree.rows(experiment.plan, 0)
    assert data.store is not None and task.masks is not None
    masks = task.masks
    found = pictures.ranked(data, mine, tree.rows(columns, 0), task.case_values, task.paired, EACH)
    index, sizes = np.zeros_like(experiment.plan.test), np.zeros_like(experiment.plan.test_sizes)
    asked: dict[tuple[int, int], float] = {}
    for value, k, t in found:
        asked[k, int(sizes[0, k])] = value
        index[0, k, sizes[0, k]] = mine.test[k, t]
        sizes[0, k] += 1
    drawn: list[tuple[float, Case]] = []

    def draw(r: int, k: int, t: int, outputs: Mapping[str, np.ndarray]) -> None:
        case = int(index[r, k, t])
        image, _, spacing = _volume(data, case)
        truth, predicted = (_within(m[0], data.arrays["shape"][case]) for m in masks(outputs, np.arange(1)))
        title = f"{data.sites[k]}: {data.case_ids[case]}\n{task.paired} {asked[k, t]:.2f}"
        drawn.append((asked[k, t], Case(title, _shown_channel(data, image), truth, predicted, spacing)))

    experiment.outputs(state, index, plan.train_sizes, sizes=sizes, each=draw)
    drawn.sort(key=lambda pair: pair[0])
    facts = data.about
    channels = tuple(facts.get("channels", ()))
    return pictures.VolumePictures(
        _example(data, mine), [case for _, case in drawn], channels, data.classes, facts.get("orientation", "LPS")
    )


def _example(data: Any, plan: Any) -> Case | None:
    """The training case with the most foreground among the first ones of every site, with all its channels."""
    first = [int(plan.train[k, 0]) for k in range(len(data.sites)) if plan.train_sizes[k]]
    best: tuple[int, Case] | None = None
    for case in first[:EXAMPLES]:
        image, truth, spacing = _volume(data, case)
        size = int(np.sum(truth > 0))
        if best is None or size > best[0]:
            site = data.sites[int(data.site_of[case])]
            best = size, Case(f"{site}: {data.case_ids[case]}", image, truth, None, spacing)
    return best[1] if best else None


def waited(experiment: Experiment) -> tuple[float, int]:
    """Seconds that devices have waited for patches so far, and the batches they got; (0, 0) for data in memory."""
    return experiment.data.store.waited() if experiment.data.store is not None else (0.0, 0)


def waits(experiment: Experiment, before: tuple[float, int], seconds: float) -> dict[str, Any]:
    """What a line of timing.jsonl tells of the waiting since `before`; its share is of the devices' time."""
    if experiment.data.store is None:
        return {}
    now = waited(experiment)
    devices = experiment.how.mesh.devices.size
    lost = now[0] - before[0]
    return {
        "wait_seconds": round(lost, 3),
        "batches": now[1] - before[1],
        "wait_share": round(lost / max(seconds * devices, 1e-9), 5),
    }


def _within(volume: np.ndarray, shape: np.ndarray) -> np.ndarray:
    """The part of a buffer that is the volume."""
    return volume[tuple(slice(0, int(n)) for n in shape)]


def _volume(data: Any, case: int) -> tuple[np.ndarray, np.ndarray, Any]:
    """A case: its image [X, Y, Z, channels], its truth, its spacing in mm."""
    found = data.store.whole(case)
    image, truth = (_within(np.asarray(found[name]), found["shape"]) for name in ("x", "y"))
    return image.astype(np.float32), truth, tuple(float(v) for v in found["spacing"])


def _shown_channel(data: Any, image: np.ndarray) -> np.ndarray:
    """One channel for the eye: FLAIR where there is one, else the last."""
    channels = list(data.about.get("channels", ()))
    return image[..., channels.index("flair") if "flair" in channels else -1]
