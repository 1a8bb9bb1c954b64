"""The privacy card of a run, privacy.json: eight parts that a reader needs to believe a claim, or to see there is none.

threat model and unit; mechanisms; ledger; audit; attacks; secure sum; utility; warnings. Numbers that do not exist are
null and are told in words: a run without a guarantee says so, and never has an epsilon of 0.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_seg import guarantee
from fedjax_seg.assembly import Experiment, clients_of, places
from fedjax_seg.core import tree
from fedjax_seg.core.types import Mechanism, Sampler
from fedjax_seg.rehearsal import variable_shapes

NUMBERS = (
    "float32 Gaussian noise with tails of 9.4 standard deviations; attacks on floating-point rounding are"
    " outside the guarantee; pseudo-random (threefry), from a seed that a deployment must keep secret"
)
INSTEAD = (
    "differential privacy for patients instead of hospitals (client dp_sgd, unit='patient'), fewer trainable parameters"
    " (a head, the affine terms of the norms), or hundreds of clients"
)
# What of guarantee.of_run makes the ledger.
LEDGER = ("rows", "events", "curve", "per_round", "gdp_mu", "gdp_meaning", "caption", "corner", "text")
LARGE = 10.0  # an epsilon from which on little is promised
LEARNABLE = 1.0  # signal-to-noise ratio of one release below which a round moves the model mostly by noise


def card(
    experiment: Experiment,
    promised: Mapping[str, Any],
    *,
    written: Sequence[Mapping[str, Any]] = (),
    result: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All eight parts; what only a finished run knows is empty before.

    Args:
      promised: of guarantee.of_run.
      written: rows of metrics.jsonl, for who really took part.
      result: what summary.json will hold.
    """
    head = _head(experiment, promised)
    took_part = _realised(written, experiment.data.sites)
    utility = _utility(experiment, result or {})
    return {
        **{k: v for k, v in promised.items() if k not in ("lines", *LEDGER)},
        **head,
        "threat_model": _threat_model(experiment, promised),
        # Who came is no part of a card whose claim needs it to be secret.
        "mechanisms": _mechanisms(experiment, {} if _if_known(promised) is not None else took_part),
        "ledger": _ledger(experiment, promised),
        "audit": {},
        "attacks": _attacks((result or {}).get("attack") or {}),
        "secure_sum": _secure_sum(experiment),
        "utility": utility,
        "warnings": _warnings(experiment, promised, took_part, utility),
    }


def _attacks(attack: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict without its curves."""
    if not attack:
        return {}
    limit = {k: v for k, v in (attack.get("ceiling") or {}).items() if k in ("auc", "source")}
    found = {"rows": attack.get("final", []), "text": attack.get("text", ""), "ceiling": limit}
    return found | {k: attack[k] for k in ("one_run", "source") if k in attack}


def _head(experiment: Experiment, promised: Mapping[str, Any]) -> dict[str, Any]:
    epsilon, delta = promised.get("epsilon"), promised.get("delta", experiment.config.privacy.delta)
    models = len(experiment.replicas)
    both = [m for m in (experiment.client.mechanism, experiment.parts.aggregator.mechanism) if m]
    unit, adjacency = (both[0].unit, both[0].adjacency) if both else (None, None)
    if epsilon is None:
        reasons = [r for part in (promised, promised.get("clients") or {}) for r in part.get("reasons", ())]
        reasons += [r for m in both for r in m.reasons]
        reasons += [row["rests_on"] for row in promised.get("rows", ()) if "rests_on" in row]
        why = reasons[0] if reasons else "nothing in it adds calibrated noise"
        sentence = f"No differential-privacy guarantee (epsilon is infinite): {why}."
    else:
        sentence = (
            f"Differential privacy of every {unit} ({adjacency}): epsilon {epsilon:.3g} at delta {delta:.3g} over all"
            f" rounds{f', of each of {models} models' if models > 1 else ''}."
        )
    told = "infinite" if epsilon is None else f"{epsilon:.6g}"
    about = {"unit": unit, "adjacency": adjacency, "sentence": sentence, "epsilon_text": told}
    return {"epsilon": epsilon, "delta": delta, **about}


def _threat_model(experiment: Experiment, promised: Mapping[str, Any]) -> dict[str, Any]:
    client, central = experiment.client.mechanism, experiment.parts.aggregator.mechanism
    secure, config = experiment.parts.secure, experiment.config
    if client and not central:
        trusted = "each hospital, with its own data; neither the server nor the other hospitals"
    elif central and central.local:
        trusted = "each hospital, with its own data; the server need not be trusted"
    elif central:
        trusted = "the server: it sees what the hospitals send and adds the noise"
        if secure.hides if secure else config.secure_sum.name == "assumed":
            trusted = "the server with the sum of what the hospitals send, to which it adds the noise"
    else:
        trusted = "everybody who sees an update or a model: nothing is promised"
    units = {"client": "a hospital's whole data", "patient": "all images of a patient", "example": "one image"}
    mechanism = client or central
    if config.protocol == "centralised":
        trusted = "whoever holds the pooled data"
    released = [f"the model after each of {config.rounds} rounds", "scores on the hospitals' test cases, without noise"]
    shown = config.protocol == "federated" and config.secure_sum.name == "none"
    if shown and not (central and central.local):
        released.append("every hospital's message, to the server")
    return {
        "unit": units[mechanism.unit] if mechanism else "none",
        "adjacency": mechanism.adjacency if mechanism else "none",
        "trusted": trusted,
        "released": released,
        "not_protected": _not_accounted(experiment, promised),
    }


def _not_accounted(experiment: Experiment, promised: Mapping[str, Any]) -> list[str]:
    config, secret = experiment.config, _if_known(promised) is not None
    found = [
        "losses, norms of updates and the like: records of the simulation, without noise",
        "scores of the evaluations on the hospitals' own test cases",
        "numbers of cases: public by assumption",
        "who took part in which round: "
        + ("it must stay secret, or the epsilon is larger" if secret else "public by assumption"),
        "other runs on the same data, and the choice of settings by looking at them: they add up",
    ]
    if experiment.client.mechanism is None and config.client.get("local"):
        found.append(
            "what stays at home (layers of its own): it leaves no hospital, and an external site uses its mean"
        )
    if len(experiment.replicas) > 1:
        found.append(f"that {len(experiment.replicas)} models (folds x seeds) were made from the same data")
    return found if promised else found[:4]


def _if_known(promised: Mapping[str, Any]) -> float | None:
    """Epsilon towards those who know who took part, where the claim needs that to be secret; None where it does not."""
    clients = promised.get("clients") or promised
    return clients.get("epsilon_if_known")


def _mechanisms(experiment: Experiment, took_part: Mapping[str, int]) -> list[dict[str, Any]]:
    config, sampler, found = experiment.config, experiment.parts.sampler, []
    if client := experiment.client.mechanism:
        how = f"{config.batch_sampling} batches of {config.batch_size}; clients by {_sampling(experiment, sampler)}"
        about = {"where": "client", "name": config.client.name, "clips": f"the gradient of every {client.unit}"}
        found.append(about | _mechanism(client, how, sampler.max_participations(config.rounds), took_part))
    if central := guarantee.mechanism_of_rounds(experiment):
        clips = "the update of the whole model, flattened" if central.formal else "see the reasons"
        if central.per == "tensor":
            clips = "every tensor on its own"
        about = {"where": "client" if central.local else "server", "name": config.aggregator.name, "clips": clips}
        most = sampler.max_participations(config.rounds)
        found.append(about | _mechanism(central, _sampling(experiment, sampler), most, took_part))
    return found


def _mechanism(mechanism: Mechanism, sampling: str, most: int, took_part: Mapping[str, int]) -> dict[str, Any]:
    known = math.isfinite(mechanism.sensitivity)
    return {
        "sensitivity": mechanism.sensitivity if known else None,
        "proof": mechanism.proof if mechanism.formal else "none: see the reasons",
        "adjacency": mechanism.adjacency,
        "unit": mechanism.unit,
        "noise_multiplier": mechanism.noise_multiplier,
        "stddev": mechanism.noise_multiplier * mechanism.sensitivity if known else None,
        "sampling": sampling,
        "participations": most,
        "realised": dict(took_part) or None,
        "numbers": NUMBERS,
        "formal": mechanism.formal,
        "reasons": list(mechanism.reasons),
    }


def _sampling(experiment: Experiment, sampler: Sampler) -> str:
    """What the sampler object guarantees, in words."""
    clients, rounds = clients_of(experiment.data), experiment.config.rounds
    most = sampler.max_participations(rounds)
    tail = f"one of them is in at most {most} of {rounds} rounds"
    if sampler.q is not None:
        cut = f", draws cut at {sampler.capacity}" if sampler.truncated else ""
        return f"Poisson sampling, every one of {clients} clients with q = {sampler.q:.4g} in every round{cut}"
    if sampler.bins:
        return f"balls in bins, {clients} clients in {sampler.bins} bins that take turns; {tail}"
    if sampler.drawn:
        return f"a fresh uniform subset of {sampler.drawn[0]} of {sampler.drawn[1]} clients in every round; {tail}"
    name, places_ = experiment.config.sampler.name, places(sampler)
    apart = f", at least {sampler.min_separation} rounds apart" if sampler.min_separation > 1 else ""
    return f"{name}: {places_} of {clients} clients a round; {tail}{apart}"


def _ledger(experiment: Experiment, promised: Mapping[str, Any]) -> dict[str, Any]:
    nothing = dict.fromkeys(LEDGER, None) | {"rows": [], "events": [], "curve": [], "per_round": []}
    nothing["text"] = "Nothing to account: no mechanism adds noise, so epsilon is infinite."
    found = {key: promised.get(key, value) for key, value in nothing.items()}
    return found | {"not_accounted": _not_accounted(experiment, promised)}


def _secure_sum(experiment: Experiment) -> dict[str, Any]:
    secure, name = experiment.parts.secure, experiment.config.secure_sum.name
    if secure is None:
        text = "trusted, not simulated" if name == "assumed" else "none: the server sees every message"
        return {"name": name, "hides": name == "assumed", "text": text}
    text = "hides single messages" if secure.hides else "HIDES NOTHING: " + str(secure.facts["threat"][0])
    return {"name": name, "hides": secure.hides, "text": text, "facts": dict(secure.facts)}


def _utility(experiment: Experiment, result: Mapping[str, Any]) -> dict[str, Any]:
    """Scores beside the epsilon, and the feasibility law: signal / noise of one release <= n / (z sqrt d)."""
    shown = result.get("headline", ())
    rows = [
        {"metric": row["metric"], "site": row["site"], "fold": row["fold"], "seed": row["seed"], "value": row["value"]}
        for row in result.get("results", ())
        if row["metric"] in shown and row["site"] in ("mean_of_sites", "pooled")
    ]
    central = experiment.parts.aggregator.mechanism
    if central is None or not central.formal:
        return {"rows": rows, "snr": None, "text": ""}
    entries = tree.size(variable_shapes(experiment)["params"])  # traces the network: only where it is needed
    n = clients_per_round(experiment)
    snr = _signal(experiment, n) / (central.noise_multiplier * central.sensitivity * math.sqrt(entries))
    law = " = n / (z sqrt d)" if central.adjacency != "replace-one" and not central.span else ""
    text = (
        f"Feasibility: the signal of one release is at most {snr:.3g}{law} of its noise (n = {n:.3g} clients a round,"
        f" noise multiplier z = {central.noise_multiplier:.3g}, d = {entries} parameters)."
    )
    if snr < LEARNABLE:
        text += f" Below 1 a round moves the model mostly by noise. What to do instead: {INSTEAD}."
    return {"rows": rows, "snr": snr, "parameters": entries, "clients_per_round": n, "text": text}


def clients_per_round(experiment: Experiment) -> float:
    """Expected where it is drawn."""
    sampler, clients = experiment.parts.sampler, clients_of(experiment.data)
    if sampler.q is not None:
        return sampler.q * clients
    return clients / sampler.bins if sampler.bins else float(places(sampler))


def _signal(experiment: Experiment, n: float) -> float:
    """The largest norm of what is noised: of a sum of n messages, or of an aggregate inside the clip ball; of local
    noise, whose standard deviation grows with sqrt n, in the units of one client's."""
    aggregator, central = experiment.parts.aggregator, experiment.parts.aggregator.mechanism
    assert central is not None
    if central.local:
        return math.sqrt(n) * central.sensitivity / 2  # two messages differ by twice the norm of one
    if aggregator.reads == "each":
        return float(experiment.config.aggregator.clip)
    assert aggregator.bound is not None
    return n * aggregator.bound.value / (2 if aggregator.bound.adjacency == "replace-one" else 1)


def _realised(written: Sequence[Mapping[str, Any]], sites: Sequence[str]) -> dict[str, int]:
    """{site: the most rounds that it trained in, of any fold and seed}; {} before the run."""
    seen: dict[tuple[str, Any, Any], int] = {}
    for row in written:
        if row["split"] == "train" and row["metric"] == "update_norm":
            place = (row["site"], row["fold"], row["seed"])
            seen[place] = seen.get(place, 0) + 1
    most = {site: max((n for (name, _, _), n in seen.items() if name == site), default=0) for site in sites}
    return most if seen else {}


def _warnings(
    experiment: Experiment, promised: Mapping[str, Any], took_part: Mapping[str, int], utility: Mapping[str, Any]
) -> list[str]:
    """What a reader must not overlook, in words."""
    config, data, found = experiment.config, experiment.data, []
    epsilon, mechanisms = promised.get("epsilon"), [experiment.client.mechanism, experiment.parts.aggregator.mechanism]
    if epsilon is None:
        found.append("no guarantee: whatever these models reveal of a patient is not bounded by anything")
        found += [f"no guarantee: {reason}" for m in mechanisms if m for reason in m.reasons]
    elif epsilon > LARGE:
        found.append(f"epsilon {epsilon:.3g} is large: an attacker who is sure with odds of e^{epsilon:.3g} is allowed")
    client = experiment.client.mechanism
    patients = len(set(data.patient_ids))
    if client and client.unit == "example" and patients < len(data.patient_ids):
        found.append(
            f"the unit is one image, and {patients} patients have {len(data.patient_ids)} of them: a patient with"
            " several is promised less; set --config.client.unit=patient"
        )
    count = patients if client and client.unit == "patient" else len(data.patient_ids)
    if not client and any(mechanisms):
        count = clients_of(data)
    if any(mechanisms) and config.privacy.delta > 1 / (10 * max(count, 1)):
        found.append(f"delta {config.privacy.delta:g} is above 1/(10 N) for N = {count}")
    most = experiment.parts.sampler.max_participations(config.rounds)
    beyond = {site: n for site, n in took_part.items() if n > most}
    if beyond and any(mechanisms):
        found.append(f"ACCOUNTING BUG: took part more often than the {most} rounds that were accounted: {beyond}")
    if utility["snr"] is not None and utility["snr"] < LEARNABLE:
        found.append(f"mostly noise: the signal of one release is at most {utility['snr']:.3g} of its noise")
    if (known := _if_known(promised)) is not None:
        found.append(f"who took part in which round must stay secret: who knows it is told epsilon {known:.3g} at most")
    if epsilon is not None and len(experiment.replicas) > 1:
        found.append(f"epsilon is of one model; {len(experiment.replicas)} were made of the same data, see the ledger")
    secure = experiment.parts.secure
    if secure is not None and not secure.hides:
        found.append(f"the secure sum {secure.name} hides nothing")
    central = mechanisms[1]
    if central and central.formal and not central.local and config.secure_sum.name == "none":
        found.append("central noise: the server sees every hospital's message without noise")
    return found
