"""Who sees what of a hospital's update under a secure sum: the same attacks on what every party received in one round.

The parties are curious and follow the protocol: one neighbour, all the others of a group together, and the server. All
of them know the last global model. A protocol that hides leaves them nothing but the sum, which a sum of secrets always
tells; scalar shares give the update itself to every neighbour.

The engine trains the cohort once more from the final state, without using the result, and hands over `Seen`; the
truth in it is what findings are measured against, and no attack reads it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fedjax_seg.attacks import share_attacks
from fedjax_seg.core import checks
from fedjax_seg.core.checks import UserError

ITSELF, DIRECTION, PART = "the update itself", "its direction", "a part of it"
NOTHING, SILENT, ASSUMED = "nothing above chance", "nothing is sent", "nothing, by assumption"
SUM, NO_MORE = "what the sum tells everybody", "no more than the sum tells"
VERDICTS = (ITSELF, DIRECTION, PART, NO_MORE, NOTHING, SILENT, ASSUMED)  # the worst first
CLOSE, SMALL = 0.95, 0.05  # cosine of 'its direction', relative error of 'the update itself'
ROUNDING = 1e-3  # of a cosine; so much more than the sum tells is no more
VIEWERS = ("neighbour", "colluders", "server")

Row = dict[str, Any]


class Seen(NamedTuple):
    """One round as its parties saw it. C rows of a cohort, D entries of the model; plain numpy on the host.

    Attributes:
      true: float32 [C, D], the model's part of every message as the protocol shared it: `factor` times the weights w_k
        or the update.
      server: float32 [C, D], uploads as the server reads them; zeros where nothing is sent to it.
      neighbour: float32 [C, D], what one neighbour received from each row; zeros where nothing is sent.
      colluders: float32 [C, D], what all the others of its group together received from each row.
      model: float32 [D], the last global model w_t, public.
      of: 'weights' or 'updates': what `true` is.
      group: int [C], the cluster of a row.
      counts: bool [C], rows that took part.
      names: of the sites, C.
      hides: whether the protocol claims to hide.
      protocol: its name; 'none': the server reads every message; 'assumed': nobody reads any, by assumption.
      clean: float32 [C, D], as `true`, before the client's own noise; None = there is no noise.
      factor: float32 [C], what messages were multiplied with before they were shared (a share of the examples), hidden
        from everybody but, under 'none', the server; None = 1.
    """

    true: np.ndarray
    server: np.ndarray
    neighbour: np.ndarray
    colluders: np.ndarray
    model: np.ndarray
    of: str
    group: np.ndarray
    counts: np.ndarray
    names: tuple[str, ...]
    hides: bool
    protocol: str
    clean: np.ndarray | None = None
    factor: np.ndarray | None = None


class ShareLeakage(NamedTuple):
    """The attack, ready to be run by an experiment.

    Attributes:
      entries: of the model that attackers look at; seed: of their choice and of FastICA.
      run: (seen) -> rows, see `run`.
      picture: (seen, row, start=0, count=400) -> values of a figure, see `picture`.
    """

    entries: int
    seed: int
    run: Callable[[Seen], list[Row]]
    picture: Callable[..., dict[str, Any]]


class _Finding(NamedTuple):
    """An update as somebody believes it to be; the weights likewise, where they were shared."""

    update: np.ndarray | None
    weights: np.ndarray | None = None
    plain: np.ndarray | None = None  # by the projection alone
    how: str = ""
    sized: bool = True  # whether the length means anything
    looks: int = 1  # findings that this one was picked from


def share_leakage(*, entries: int = 200_000, seed: int = 0) -> ShareLeakage:
    """Options of the attack.

    Args:
      entries: how many entries of the model attackers use, chosen at random: with all of them they find no less.
      seed: of that choice, and of FastICA.
    """
    checks.number("attack.entries", entries, low=100, integer=True)
    checks.number("attack.seed", seed, low=0, integer=True)
    return ShareLeakage(entries, seed, partial(run, entries=entries, seed=seed), picture)


def run(seen: Seen, *, seed: int = 0, entries: int = 200_000) -> list[Row]:
    """What every party recovers of every site's update.

    Returns: JSON-able rows, for every site that took part one of each viewer ('neighbour', 'colluders', 'server',
      'sum'), then one of each viewer with site 'mean':
        site, group, viewer, protocol, of, hides;
        received: cosine between what was received and what was shared;
        cosine, error: of the recovered update, with the true one (before the site's own noise): cosine, and length of
          the difference over the true length;
        plain_error: the error by the plain projection onto the last global model alone;
        weights_error: relative error of the recovered weights;
        how: 'unchanged' or 'projection' (share_attacks.recover_scale), 'unmixed' (FastICA), 'as sent', 'guess' (1 / N),
          'no scale' (a share that is no positive multiple of anything like the model);
        member, outsider: of the server: the part of the site's weights outside the span of its own group's uploads, and
          the smallest outside any other group's;
        chance: what |cosine| exceeds by chance in one row of all with probability 1e-4 (share_attacks.chance);
        uniform: p of share_attacks.uniformity on what the neighbour and the server received, of protocols that claim to
          hide; under 'mean' the smallest times their number;
        verdict: words.
      None where a number has no meaning. 'sum' is what the sum over the group alone shows, to everybody and under any
      protocol: its cosine with the site's update. 'mean' has means over sites and the worst verdict.
    Raises: UserError where the arrays do not fit each other.
    """
    _check(seen)
    size = seen.true.shape[1]
    if size > entries:
        kept = np.sort(np.random.default_rng(seed).choice(size, entries, replace=False))
        arrays = {name: getattr(seen, name)[:, kept] for name in ("true", *VIEWERS)}
        clean = None if seen.clean is None else seen.clean[:, kept]
        seen = seen._replace(**arrays, clean=clean, model=seen.model[kept])
    rows = []
    groups = {
        int(g): np.flatnonzero(seen.counts & (seen.group == g)).tolist() for g in np.unique(seen.group[seen.counts])
    }
    spans = {g: share_attacks.span(seen.server[members]) for g, members in groups.items()}
    for members in groups.values():
        unmixed = _unmixed(seen, members, seed)
        total = np.average([_shared(seen, i) for i in members], 0, [_factor(seen, i) for i in members])
        for place, i in enumerate(members):
            found = {
                "neighbour": _by_neighbour(seen, i, len(members)),
                "colluders": _by_colluders(seen, i, len(members)),
                "server": unmixed[place],
            }
            everybody = _row(seen, i, "sum", _Finding(total, how="as sent"))
            rows += [_row(seen, i, viewer, finding, everybody["cosine"]) for viewer, finding in found.items()]
            if found["server"].update is not None:
                rows[-1] |= _attribution(seen, i, spans)
            rows.append(everybody)
    return rows + means(rows)


def picture(seen: Seen, row: int, *, start: int = 0, count: int = 400) -> dict[str, Any]:
    """The neighbour's attack on one row as values to draw.

    Returns: 'site', 'protocol', 'of', 'hides'; float64 [count] of entries start to start + count: 'true' (the update),
      'received', 'reconstructed' (None where there is nothing to reconstruct from); 'cosine', 'error' over all entries.
    """
    _check(seen)
    members = int(np.sum(seen.counts & (seen.group == seen.group[row])))
    finding = _by_neighbour(seen, row, members)
    found = _row(seen, row, "neighbour", finding)
    part = slice(start, start + count)
    return {
        "site": seen.names[row],
        "protocol": seen.protocol,
        "of": seen.of,
        "hides": bool(seen.hides),
        "true": _update(seen, row)[part],
        "received": np.asarray(seen.neighbour[row][part], np.float64),
        "reconstructed": None if finding.update is None else finding.update[part],
        "cosine": found["cosine"],
        "error": found["error"],
    }


def _check(seen: Seen) -> None:
    """Raises UserError unless shapes and words fit."""
    checks.one_of("seen.of", seen.of, ("weights", "updates"))
    c, d = seen.true.shape
    shapes = dict.fromkeys(VIEWERS, (c, d)) | {"model": (d,), "group": (c,), "counts": (c,)}
    shapes |= {name: shape for name, shape in (("clean", (c, d)), ("factor", (c,))) if getattr(seen, name) is not None}
    for name, shape in shapes.items():
        if np.shape(getattr(seen, name)) != shape:
            raise UserError(f"seen.{name}: shape {np.shape(getattr(seen, name))} given, {shape} expected, as of `true`")
    if len(seen.names) != c:
        raise UserError(f"seen.names: {len(seen.names)} names given, one of each of the {c} rows expected")


def _factor(seen: Seen, i: int) -> float:
    return 1.0 if seen.factor is None else float(seen.factor[i])


def _shared(seen: Seen, i: int) -> np.ndarray:
    """The update of row i as it was shared, the site's own noise in it."""
    x = np.asarray(seen.true[i], np.float64) / _factor(seen, i)
    return x - seen.model if seen.of == "weights" else x


def _update(seen: Seen, i: int) -> np.ndarray:
    """The true update of row i, before the site's own noise."""
    return _shared(seen if seen.clean is None else seen._replace(true=seen.clean), i)


def _by_neighbour(seen: Seen, i: int, members: int) -> _Finding:
    """Row i's update by one neighbour, who knows its share and the last global model."""
    return _scaled(seen, seen.neighbour[i], 1 / members)


def _by_colluders(seen: Seen, i: int, members: int) -> _Finding:
    """Row i's update by all the others of its group, who add up their shares and know the last global model."""
    return _scaled(seen, seen.colluders[i], 1 - 1 / members)


def _scaled(seen: Seen, share: np.ndarray, guess: float) -> _Finding:
    """Undoes a scalar: by the model where weights were shared; `guess`, its mean, where nothing else is known."""
    if not np.any(share):
        return _Finding(None)
    if seen.of == "updates":
        return _Finding(np.asarray(share, np.float64) / (guess or 1.0), how="guess", sized=False)
    scale = share_attacks.best_scale(share, seen.model)
    weights, how = share_attacks.rescaled(share, scale.value), scale.how
    plain = share_attacks.rescaled(share, share_attacks.recover_scale(share, seen.model))
    if weights is None:  # a negative scale: no scalar share; the share itself is as good a guess as any
        weights, how = np.asarray(share, np.float64), "no scale"
    return _Finding(weights - seen.model, weights, None if plain is None else plain - seen.model, how)


def _unmixed(seen: Seen, members: list[int], seed: int) -> list[_Finding]:
    """The members' updates by the server, who knows all uploads and the last global model."""
    nothing = [_Finding(None) for _ in members]
    sent = [bool(np.any(seen.server[i])) for i in members]
    if seen.protocol == "assumed" or not any(sent):
        return nothing
    if seen.protocol == "none":
        return [_as_sent(seen, i) for i in members]
    if not all(sent) or len(members) < 2:
        return [_scaled(seen, seen.server[i], 1.0) if s else _Finding(None) for i, s in zip(members, sent)]
    weighted = seen.factor is not None and len(np.unique(seen.factor[members])) > 1
    model = seen.model if seen.of == "weights" else None
    size = seen.true.shape[1]
    found = share_attacks.unmix(seen.server[members], model, seed=seed, entries=size, weighted=weighted)
    if found is None:
        return [_scaled(seen, seen.server[i], 1.0) for i in members]
    truth = np.stack([_update(seen, i) for i in members])
    vectors = found.vectors[share_attacks.matched(found.vectors, truth)]
    sized = not (weighted and seen.of == "updates")
    return [
        _Finding(v, v + seen.model if model is not None else None, None, "unmixed", sized, len(members) ** 2)
        for v in vectors
    ]


def _as_sent(seen: Seen, i: int) -> _Finding:
    """An upload that is the message: the server knows the client's weight with it."""
    x = np.asarray(seen.server[i], np.float64) / _factor(seen, i)
    return _Finding(x - seen.model, x, None, "as sent") if seen.of == "weights" else _Finding(x, how="as sent")


def _row(seen: Seen, i: int, viewer: str, finding: _Finding, by_sum: float = 0.0) -> Row:
    """by_sum: cosine of the sum over the group with the true update."""
    truth, size = _update(seen, i), seen.true.shape[1]
    row: Row = {"site": seen.names[i], "group": int(seen.group[i]), "viewer": viewer, "protocol": seen.protocol}
    row |= {"of": seen.of, "hides": bool(seen.hides)}
    row |= dict.fromkeys(("received", "cosine", "error", "plain_error", "weights_error", "how", "member", "outsider"))
    looks = finding.looks * len(VIEWERS) * int(np.sum(seen.counts))  # the worst of all rows is what gets reported
    row |= {"chance": share_attacks.chance(size, looks), "uniform": None}
    if finding.update is None:
        return row | {"verdict": ASSUMED if seen.protocol == "assumed" else SILENT}
    row["cosine"] = share_attacks.direction(finding.update, truth)
    row["error"] = share_attacks.relative_error(finding.update, truth)
    row["how"] = finding.how
    if viewer == "sum":
        return row | {"verdict": SUM}
    row["received"] = share_attacks.direction(getattr(seen, viewer)[i], seen.true[i])
    if finding.plain is not None:
        row["plain_error"] = share_attacks.relative_error(finding.plain, truth)
    if finding.weights is not None:
        row["weights_error"] = share_attacks.relative_error(finding.weights, truth + seen.model)
    if viewer != "colluders" and seen.hides:  # sums of shares need not be words
        row["uniform"] = share_attacks.uniformity(getattr(seen, viewer)[i], seen.true[i]).p
    row = {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in row.items()}
    return row | {"verdict": _verdict(row, finding.sized, by_sum)}


def _verdict(row: Mapping[str, Any], sized: bool, by_sum: float) -> str:
    cosine = abs(row["cosine"])
    if cosine <= row["chance"]:
        return NOTHING
    if sized and cosine >= CLOSE and row["error"] is not None and row["error"] <= SMALL:
        return ITSELF
    if cosine <= by_sum + ROUNDING:
        return NO_MORE
    return DIRECTION if cosine >= CLOSE else PART


def _attribution(seen: Seen, i: int, spans: Mapping[int, np.ndarray]) -> Row:
    """The server's test of whether row i's vector is in the sums of its own group, and of the others."""
    candidate = np.asarray(seen.true[i], np.float64)
    residual = {g: share_attacks.outside(span, candidate) for g, span in spans.items()}
    own = residual.pop(int(seen.group[i]))
    return {"member": own, "outsider": min(residual.values(), default=None)}


def means(rows: list[Row]) -> list[Row]:
    """One row of each viewer: means over sites (of those that have a number), and the worst verdict with its count."""
    made = []
    for viewer in (*VIEWERS, "sum"):
        mine = [row for row in rows if row["viewer"] == viewer]
        if not mine:
            continue
        mean: Row = dict(mine[0]) | {"site": "mean", "group": None}
        for name in ("received", "cosine", "error", "plain_error", "weights_error", "member", "outsider"):
            values = [abs(row[name]) if name == "cosine" else row[name] for row in mine if row[name] is not None]
            mean[name] = float(np.mean(values)) if values else None
        tested = [row["uniform"] for row in mine if row["uniform"] is not None]
        mean["uniform"] = min(1.0, len(tested) * min(tested)) if tested else None
        mean["how"] = ", ".join(sorted({row["how"] for row in mine if row["how"]})) or None
        if viewer != "sum":
            worst = min((row["verdict"] for row in mine), key=VERDICTS.index)
            share = sum(row["verdict"] == worst for row in mine)
            mean["verdict"] = worst if share == len(mine) else f"{worst} ({share} of {len(mine)} sites)"
        made.append(mean)
    return made
