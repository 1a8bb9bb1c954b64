"""What hospitals see of each other under a secure sum: a figure and a table, from plain values."""

import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from fedjax_seg.report import canvas
from fedjax_seg.report.tables import Cell, Table

VIEWERS = {
    "neighbour": "one neighbouring hospital",
    "colluders": "all the other hospitals of the group together",
    "server": "the server",
    "sum": "everybody, from the sum alone",
}
KNOWN = 0.95  # cosine from which a picture is called undone
LOST = 0.3  # cosine below which nothing is recognised in it
_LINE = 41  # letters above a picture
_QUESTIONS = {
    "neighbour": "Can a neighbouring hospital see what another one learned from its patients?",
    "server": "Can the server see what a hospital learned from its patients?",
    "": "Who can see what a hospital learned from its patients?",
}


class Exchange(NamedTuple):
    """One hospital's update, what a neighbour (or the server) received of it, and what can be made of that.

    Attributes:
      protocol: a name for readers, such as 'scalar shares'.
      site: the hospital.
      true: float [n] or [H, W], entries of the update. n values are drawn as a square, in reading order.
      received: as true; zeros where nothing was; None where it is not at hand to be drawn.
      reconstructed: as true; None where nothing was received, or where it is not at hand.
      cosine: of the whole reconstructed update with the true one; None where nothing was received.
      of: 'weights' or 'updates': what was shared.
      hides: whether the protocol claims to hide.
      viewer: who received it: 'neighbour'; 'server' where there is no secure sum, so that it reads every message.
    """

    protocol: str
    site: str
    true: np.ndarray
    received: np.ndarray | None
    reconstructed: np.ndarray | None
    cosine: float | None
    of: str = "weights"
    hides: bool = False
    viewer: str = "neighbour"


def leakage(
    exchanges: Sequence[Exchange],
    cosines: Mapping[str, Mapping[str, float | None]],
    folder: str | os.PathLike[str],
    name: str = "share_leakage",
) -> Path:
    """For every protocol three pictures, and below them how much of an update each party recovers.

    Args:
      exchanges: one per protocol, three at most are legible.
      cosines: {protocol: {viewer: |cosine| of the recovered with the true update, mean over sites, or None}}; viewers
        are 'neighbour', 'colluders', 'server' and 'sum'.

    Returns: the path of the PNG; its CSV has every number drawn.
    """
    rows = len(exchanges)
    height, below = 2.95 * rows + 0.75, 1.4 + 0.5 * len(cosines)
    chart = canvas.figure(8.6, height + below)
    parts: Any = chart.subfigures(2, 1, height_ratios=[height, below])
    above, under = parts
    axes = above.subplots(rows, 3, squeeze=False)
    for line, exchange in zip(axes, exchanges):
        _exchange(line, exchange)
    viewers = {exchange.viewer for exchange in exchanges}
    above.suptitle(_QUESTIONS[viewers.pop() if len(viewers) == 1 else ""], fontsize=12)
    key = "A square is one number of the model; violet: above 0, orange: below; every picture has its own range."
    above.supxlabel(key, fontsize=8)
    _dots(under.subplots(), cosines)
    numbers: list[tuple[Any, ...]] = [
        (e.protocol, kind, index, value)
        for e in exchanges
        for kind in ("true", "received", "reconstructed")
        if (values := getattr(e, kind)) is not None
        for index, value in enumerate(np.ravel(values))
    ]
    numbers += [(p, f"cosine: {viewer}", 0, value) for p, found in cosines.items() for viewer, value in found.items()]
    return canvas.save(chart, folder, name, ("protocol", "what", "entry", "value"), numbers)


def sentences(exchange: Exchange) -> tuple[str, str, str]:
    """What stands above the three pictures."""
    site = canvas.short(exchange.site, 24)
    if exchange.viewer == "server":
        return _by_server(exchange, site)
    first = f"What {site} learned in this round,\na part of its update: secret"
    if not np.any(exchange.received):
        return first, f"A neighbour receives nothing\nfrom {site}", "So there is nothing to reconstruct"
    what = {"weights": "its model", "updates": "its update"}[exchange.of]
    content = "looks like random numbers" if exchange.hides else f"{what}, times one secret number"
    second = f"A neighbour receives this from {site}:\n{content}"
    cosine = abs(exchange.cosine or 0.0)
    if cosine >= KNOWN:
        third = f"... and can undo it: the update again\n(cosine {cosine:.3f})"
    elif cosine <= LOST:
        third = f"... and cannot undo it: noise\n(cosine {cosine:.3f})"
    else:
        third = f"... and recovers a part of the update\n(cosine {cosine:.3f})"
    return first, second, third


def _by_server(exchange: Exchange, site: str) -> tuple[str, str, str]:
    first = f"What {site} learned in this round,\na part of its update"
    cosine = f"(cosine {abs(exchange.cosine or 0.0):.3f})"
    if exchange.received is not None:
        second = f"The server receives this from {site}:\nthe update itself"
        return first, second, f"... and has nothing to undo\n{cosine}"
    second = f"The server receives this from {site}:\nthe update with noise added"
    return first, second, f"... and recovers no more than that\n{cosine}"


def _exchange(axes: Sequence[Axes], exchange: Exchange) -> None:
    pictures = (exchange.true, exchange.received, exchange.reconstructed)
    shape = _square(np.asarray(exchange.true, float)).shape
    for axis, picture, words in zip(axes, pictures, sentences(exchange)):
        axis.set_title("\n".join(textwrap.fill(line, _LINE) for line in words.splitlines()), fontsize=8.5)
        axis.set(xticks=[], yticks=[])
        axis.set_box_aspect(shape[0] / shape[1])  # an empty panel as well
        if picture is None or not np.any(picture):
            empty = "not drawn" if exchange.viewer == "server" else "nothing"
            axis.text(0.5, 0.5, empty, ha="center", va="center", transform=axis.transAxes, color="#999999")
            continue
        image = _square(np.asarray(picture, float))
        top = float(np.nanpercentile(np.abs(image), 98)) or 1.0  # each picture has its own range: shapes are compared
        axis.imshow(image, cmap="PuOr", vmin=-top, vmax=top, interpolation="nearest", aspect="auto")
    axes[0].set_ylabel(exchange.protocol, fontsize=11)


def _square(values: np.ndarray) -> np.ndarray:
    """[n] in reading order, as square as can be, the rest NaN; [H, W] stays."""
    if values.ndim == 2:
        return values
    across = math.ceil(math.sqrt(values.size))
    down = math.ceil(values.size / across)
    return np.concatenate([values, np.full(across * down - values.size, math.nan)]).reshape(down, across)


def _dots(axis: Axes, cosines: Mapping[str, Mapping[str, float | None]]) -> None:
    """|cosine| of every viewer, a line per protocol; equal ones stand one above the other."""
    for index, (viewer, words) in enumerate(VIEWERS.items()):
        look: dict[str, Any] = {"color": canvas.COLOURS[(5, 1, 4, 7)[index]], "marker": "osD|"[index]}
        look |= {"markersize": 6, "markeredgewidth": 1} if viewer != "sum" else {"markersize": 10, "markeredgewidth": 2}
        places = [
            (value, place + 0.2 * (index - 1.5))
            for place, found in enumerate(cosines.values())
            if (value := found.get(viewer)) is not None
        ]
        if places:
            axis.plot(*zip(*places), linestyle="none", label=words, **look)
    axis.set_yticks(range(len(cosines)), list(cosines))
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0: nothing", "0.25", "0.5", "0.75", "1: all of it"])
    axis.set(xlim=(-0.04, 1.04), ylim=(len(cosines) - 0.4, -0.6))
    axis.set_title(
        "How much like the true update is what each party recovers? (cosine, mean over hospitals)", fontsize=10
    )
    axis.grid(axis="x", alpha=0.25)
    if not axis.lines:
        return
    axis.legend(loc="upper center", bbox_to_anchor=(0.45, -0.18), ncols=2, frameon=False, fontsize=9)


def mean_cosines(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """{viewer: mean |cosine|} of the rows of one protocol, for `leakage`."""
    return {row["viewer"]: row["cosine"] for row in rows if row["site"] == "mean"}


def leakage_table(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """Who recovers what. found: {protocol: rows of the attack}, each with means under site 'mean'."""
    labels, cells, sites = [], [], 0
    for protocol, rows in found.items():
        for mean in (row for row in rows if row["site"] == "mean"):
            mine = [row for row in rows if row["viewer"] == mean["viewer"] and row["site"] != "mean"]
            sites = max(sites, len(mine))
            largest = max((abs(row["cosine"]) for row in mine if row["cosine"] is not None), default=None)
            numbers = [_number(mean["cosine"], 4), _number(largest, 4), _error(mean["error"])]
            numbers += [_number(mean["member"], 3), _number(mean["outsider"], 3)]
            labels.append(f"{protocol}: {VIEWERS[mean['viewer']]}")
            cells.append((*numbers, Cell(math.nan, text=mean["verdict"])))
    names = ("cosine", "largest", "relative error", "own group", "other groups", "finds")
    caption = (
        f"Who recovers what of a hospital's update; means over {sites} hospitals. Every party follows the protocol and"
        " is curious; it knows what it received and the last global model. cosine: of the recovered with the true"
        " update (absolute; 1 = the same up to length, 0 = nothing); largest: of a single hospital; relative error:"
        " length of the difference over the length of the true update (1 = as bad as guessing zero). own group, other"
        " groups: how far what a hospital shared lies outside all combinations of its own group's uploads, and of the"
        " nearest other group's (0 = in it: the server can test whether suspected weights took part). finds: the worst"
        " case, in words. 'from the sum alone' is what any sum of the group's updates shows, however it was computed."
    )
    return Table(caption, "Protocol and party", tuple(("", n) for n in names), tuple(labels), tuple(cells), ("",) * 6)


def _number(value: float | None, digits: int) -> Cell:
    if value is None:
        return Cell(math.nan, text="-")
    return Cell(float(value), text=f"{value:.{digits}f}" if value >= 10**-digits or value == 0 else f"{value:.0e}")


def _error(value: float | None) -> Cell:
    return Cell(float(value), text="> 1") if value is not None and value > 1 else _number(value, 4)
