"""What a guarantee lets an attack reach at most, and whether a measured attack is above it.

A mechanism that is (epsilon, delta)-DP bounds every test of "was this unit in?": TPR <= e^epsilon FPR + delta, and the
same with both kinds of error exchanged (Wasserman and Zhou 2010; Kairouz et al. 2015). A ledger has many such pairs,
and all hold at once. A measurement above the ceiling means that the accounting is wrong, or that the attacker saw what
the ledger does not cover.

The bound is one case's, in and out. An attack's curve pools different cases; the bound holds for it on average where
who is a member was drawn without regard to the cases. Members and non-members of different kinds can be told apart
without any leak.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from fedjax_seg.attacks import membership_scores
from fedjax_seg.core import checks

FPRS = (0.01, 0.001)
COVERED = {
    "client": ("client", "patient", "case"),
    "patient": ("patient", "case"),
    "example": ("case",),
}
ABOVE = "above its ceiling: an accounting bug, or the evidence is not what the ledger covers"


class Ceiling(NamedTuple):
    """The largest ROC curve that a guarantee allows; concave, from FPR 0 to 1.

    Attributes:
      fpr, tpr: float64 [points], to draw; FPR 0.01 and 0.001 are among them.
      auc: the area under the curve, by integration on a grid of its own.
      pairs: (epsilon, delta) that it was made of; mu: of the Gaussian curve, None without one.
    """

    fpr: np.ndarray
    tpr: np.ndarray
    auc: float
    pairs: tuple[tuple[float, float], ...]
    mu: float | None


def ceiling(
    curve: Sequence[Mapping[str, Any] | tuple[float, float]], mu: float | None = None, points: int = 200
) -> Ceiling | None:
    """The ceiling of a ledger.

    The curve of a single pair (epsilon, 0) is that of randomised response, two straight lines through
    (1, e^epsilon) / (1 + e^epsilon), of area exactly e^epsilon / (1 + e^epsilon): 0.731 for 1, 0.881 for 2. Of
    mu-Gaussian DP it is Phi(Phi^-1(FPR) + mu) (Dong et al. 2022), of area Phi(mu / sqrt 2).

    Args:
      curve: the ledger's pairs, as rows {'epsilon', 'delta'} or as (epsilon, delta); what is None, NaN or infinite
        promises nothing and is left out.
      mu: of the Gaussian trade-off curve that the ledger proves; None where it proves none. The smaller curve counts.
      points: of the curve to draw, about.

    Returns: Ceiling; None where nothing is guaranteed: no ceiling is not one at 1.
    Raises: UserError for an epsilon or mu below 0 or a delta outside [0, 1].
    """
    checks.number("points", points, low=2, integer=True)
    read = [(row["epsilon"], row["delta"]) if isinstance(row, Mapping) else tuple(row) for row in curve]
    pairs = tuple((float(e), float(d)) for e, d in read if _finite(e) and _finite(d))
    for epsilon, delta in pairs:
        checks.number("ceiling: epsilon", epsilon, low=0.0)
        checks.number("ceiling: delta", delta, low=0.0, high=1.0)
    pairs, mu = tuple(pair for pair in pairs if pair[1] < 1), float(mu) if _finite(mu) else None  # type: ignore[arg-type]
    if mu is not None:
        checks.number("ceiling: mu", mu, low=0.0)
    if not pairs and mu is None:
        return None
    tails = np.geomspace(1e-12, 0.5, 4000)
    fine = np.concatenate([[0.0], tails, 1 - tails[-2::-1], [1.0]])
    if not pairs and mu is not None:
        auc = float(stats.norm.cdf(mu / math.sqrt(2)))
    else:
        auc = float(np.trapezoid(allowed(pairs, mu, fine), fine))
    half = max(points // 2, 2)
    fpr = np.unique(np.concatenate([[0.0], FPRS, np.geomspace(1e-5, 1, half), np.linspace(0, 1, half)]))
    return Ceiling(fpr, allowed(pairs, mu, fpr), auc, pairs, mu)


def allowed(pairs: Sequence[tuple[float, float]], mu: float | None, fpr: np.ndarray | float) -> np.ndarray:
    """The largest TPR at an FPR, by every pair (epsilon, delta) and, where it is not None, by mu."""
    x = np.asarray(fpr, np.float64)
    tpr = np.ones_like(x)
    for epsilon, delta in pairs:
        grown = math.exp(min(epsilon, 700.0))
        tpr = np.minimum(tpr, np.minimum(grown * x + delta, 1 - (1 - delta - x) / grown))
    if mu is not None:
        tpr = np.minimum(tpr, stats.norm.cdf(stats.norm.ppf(x) + mu))
    return tpr


def marked(
    rows: Sequence[Mapping[str, Any]], ceiling: Ceiling | None, roc: Mapping[str, Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Attack rows with their ceilings, and whether they are above.

    Above is only what cannot be chance: the lower end of a 95% interval is compared. An inverted attack counts with
    1 - AUC and its mirrored curve. A TPR at FPR x is compared with the ceiling at the upper end of the FPR's own
    interval: the threshold was set by a few non-members, and its true FPR may be well above x. A whole curve is
    compared after it is moved by the 95% bands of Dvoretzky, Kiefer, Wolfowitz and Massart in both directions.

    Args:
      rows: as attacks.membership.summary gives them.
      ceiling: None: no guarantee.
      roc: {attack: {'fpr', 'tpr'}} of the first row of every attack; None: curves are not looked at.

    Returns: the rows with 'auc_ceiling', 'tpr_at_1_percent_fpr_ceiling', 'tpr_at_0.1_percent_fpr_ceiling' (at these
      FPRs), 'above_ceiling' (bool) and 'above' (which of 'auc', '1 - auc', 'tpr at 1%', 'tpr at 0.1%', 'curve').
      All None without a ceiling; 'above_ceiling' is None where there is no reading.
    """
    names = [(f"tpr_at_{100 * fpr:g}_percent_fpr", fpr) for fpr in FPRS]
    nothing = dict.fromkeys(["auc_ceiling", *(f"{name}_ceiling" for name, _ in names), "above_ceiling", "above"])
    if ceiling is None:
        return [{**row, **nothing} for row in rows]
    result, seen = [], set()
    for row in rows:
        new = {**row, **nothing, "auc_ceiling": ceiling.auc}
        new |= {f"{name}_ceiling": float(allowed(ceiling.pairs, ceiling.mu, fpr)) for name, fpr in names}
        shape = (roc or {}).get(row["attack"]) if row["attack"] not in seen else None
        seen.add(row["attack"])
        if row["auc"] is not None:
            new["above"] = _excesses(row, ceiling, shape)
            new["above_ceiling"] = bool(new["above"])
        result.append(new)
    return result


def words(row: Mapping[str, Any]) -> str:
    """What a marked row says about its ceiling, in one sentence."""
    if row["auc_ceiling"] is None:
        return "no ceiling: the run guarantees nothing, so any result is possible"
    if row["above_ceiling"] is None:
        return "no reading to compare with the ceiling"
    area = f"AUC {row['auc']:.3f} where at most {row['auc_ceiling']:.3f} is possible"
    if row["above_ceiling"]:
        return f"{ABOVE} ({', '.join(row['above'])}; {area})"
    return f"not above its ceiling ({area}); this proves nothing: stronger attacks exist"


def applies(ledger_unit: str, attack_unit: str, repeated: bool = False) -> tuple[bool, str]:
    """Whether a guarantee of one unit bounds an attack on another, and why.

    Args:
      ledger_unit: 'client', 'patient' or 'example', whose data one change of the guarantee is.
      attack_unit: 'case', 'patient' or 'client', whose membership is guessed.
      repeated: whether patients have several cases; these are members or not together, so that a single case's
        evidence is that of all of them.
    """
    checks.one_of("ledger unit", ledger_unit, tuple(COVERED))
    checks.one_of("attack unit", attack_unit, ("case", "patient", "client"))
    if attack_unit not in COVERED[ledger_unit]:
        return False, (
            f"no ceiling: the guarantee is one {ledger_unit}'s, and a {attack_unit} may have several"
            f" {ledger_unit}s, which change together"
        )
    if ledger_unit == "example" and repeated:
        return False, (
            "no ceiling: the guarantee is one example's, and the cases of a patient are members or not together, so"
            " that each of them betrays the others"
        )
    if (ledger_unit, attack_unit) == ("example", "case") or ledger_unit == attack_unit:
        return True, f"the guarantee is one {ledger_unit}'s, the unit that is attacked"
    return True, f"the guarantee is one {ledger_unit}'s, which covers each {attack_unit} of that {ledger_unit}"


def _finite(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _excesses(row: Mapping[str, Any], ceiling: Ceiling, shape: Mapping[str, Any] | None) -> list[str]:
    """Which parts of a row lie above the ceiling beyond chance."""
    above = []
    if row["auc_low"] > ceiling.auc:
        above.append("auc")
    if 1 - row["auc_high"] > ceiling.auc:
        above.append("1 - auc")
    for fpr in FPRS:
        low = row.get(f"tpr_at_{100 * fpr:g}_percent_fpr_low")
        if low is not None:
            hits = math.floor(fpr * row["non_members"] + 1e-9)
            widest = membership_scores.clopper_pearson(hits, row["non_members"]).high
            if low > allowed(ceiling.pairs, ceiling.mu, widest):
                above.append(f"tpr at {100 * fpr:g}%")
    if shape is not None and len(shape["fpr"]):
        above += ["curve"] * _curve_above(shape, row["members"], row["non_members"], ceiling)
    return above


def _curve_above(shape: Mapping[str, Any], members: int, non_members: int, ceiling: Ceiling) -> bool:
    """Whether some point is above even when TPR and FPR are moved by their simultaneous bands, either way round."""
    tail = (1 - membership_scores.CONFIDENCE) / 2  # half for each of the two rates
    band = [math.sqrt(math.log(2 / tail) / (2 * count)) for count in (members, non_members)]
    fpr, tpr = np.asarray(shape["fpr"], np.float64), np.asarray(shape["tpr"], np.float64)
    return any(
        bool(np.any(y - band[0] > allowed(ceiling.pairs, ceiling.mu, np.minimum(x + band[1], 1.0))))
        for x, y in ((fpr, tpr), (1 - fpr, 1 - tpr))
    )
