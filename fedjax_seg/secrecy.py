"""What the exchange of a run costs, round by round, and who could read what: the ledger and the leak demonstration."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from fedjax_seg.assembly import Experiment
from fedjax_seg.attacks.share_leakage import Seen, ShareLeakage
from fedjax_seg.core import checks, tree
from fedjax_seg.data import csv_table
from fedjax_seg.privacy import communication, cost_comparison, latency
from fedjax_seg.rehearsal import message_entries
from fedjax_seg.report.rows import SERVER
from fedjax_seg.report.secrecy_report import SPLIT

NETWORK_COLUMNS = ("site", "rtt_ms", "mbit_s")
NEIGHBOURS = 12  # of SecAgg+ in comparisons of runs without it
SHOWN = 400  # entries of an update in the figure of the leak


class Ledger(NamedTuple):
    """What stays the same over a run.

    Attributes:
      protocol, transport: as privacy.communication.Exchange.
      entries: numbers in a message.
      places: clients of a round at most.
      network: links of all sites.
      sizes: bytes of keys and shares: as measured where real ones are made, else as published.
    """

    protocol: str
    transport: str
    entries: int
    places: int
    network: latency.Network
    sizes: communication.Sizes


def ledger(experiment: Experiment) -> Ledger | None:
    """None for a run that asks for nothing of this: no secure sum that is simulated, no dropouts, no leak shown."""
    parts, config = experiment.parts, experiment.config
    links = network_of(config, experiment.data.sites)  # read in any case: a wrong file is told
    if not (parts.secure or parts.dropout or isinstance(experiment.attack, ShareLeakage)):
        return None
    name = parts.secure.name if parts.secure else config.secure_sum.name
    transport = config.secure_sum.get("transport", "vectors")
    sizes = communication.SIZES
    if parts.secure and parts.secure.facts.get("prg", "threefry") != "threefry":
        from fedjax_seg.privacy import key_agreement  # here: its library is optional

        real = key_agreement.message_sizes()
        sizes = sizes._replace(public_keys=real["public_keys"], encrypted_shares=real["packet"], share=real["answer"])
    return Ledger(name, transport, message_entries(experiment), parts.sampler.capacity, links, sizes)


def network_of(config: ml_collections.ConfigDict, sites: Sequence[str]) -> latency.Network:
    """Round trips and bandwidths of all sites: of its file, or, where no row names the site, of the config."""
    rtt = np.full(len(sites), config.network.rtt_ms / 1e3)
    rate = np.full(len(sites), config.network.mbit_s * 1e6 / 8)
    if config.network.file:
        path = Path(config.network.file).expanduser()
        what = f"config.network.file: {path}"
        table = csv_table.read(path)
        if tuple(table.header) != NETWORK_COLUMNS:
            raise checks.UserError(
                f"{what}: columns {', '.join(table.header)} found, {', '.join(NETWORK_COLUMNS)} expected"
            )
        seen: set[str] = set()
        for line, cells in table.lines:  # the first fault is told: the file is a few lines of one's own
            try:
                site, milliseconds, megabits = cells
                k, values = list(sites).index(site), (float(milliseconds), float(megabits))
                if not (np.isfinite(values).all() and min(values) > 0):
                    raise ValueError
            except ValueError:
                raise checks.UserError(
                    f"{what}, line {line}: {', '.join(cells)} found, a site ({', '.join(sites[:3])}, ...) and two"
                    " numbers above 0 expected"
                ) from None
            if site in seen:
                raise checks.UserError(f"{what}, line {line}: site {site} a second time, one line per site expected")
            seen.add(site)
            rtt[k], rate[k] = values[0] / 1e3, values[1] * 1e6 / 8
    return latency.site_links(latency.Network(rtt, rate), len(sites))


def lines(experiment: Experiment) -> list[str]:
    """For the log: who sees what."""
    secure = experiment.parts.secure
    if secure is None:
        return []
    if not secure.hides:
        return [f"secure sum {secure.name}: HIDES NOTHING; {secure.facts['threat'][0]}"]
    return [f"secure sum {secure.name}: {secure.facts['protocol']}; random numbers: {secure.facts['grade']}"]


def rows(made: Ledger, records: Mapping[str, Any], done: np.ndarray, replicas: Sequence[Any]) -> list[dict[str, Any]]:
    """Metrics rows of the ledger, one per round, replica and number; `records` as in report.rows.training."""
    found = []
    for r, replica in enumerate(replicas):
        for i in range(int(done[r])):
            record = jax.tree.map(lambda x, r=r, i=i: x[r, i], records)
            exchange = _exchange(made, record)
            cost = communication.cost_of(exchange, made.sizes)
            taken = latency.seconds(cost, made.network, record["cohort"]["clients"])
            saturated = int(np.sum(record["clients"].get("saturated", 0)))
            told, trained = record.get("exchange"), record["cohort"]["present"]
            lost = trained & ~record["clients"]["ok"]
            gone = told["before"] | told["after"] | told["left_out"] if told else lost
            dropped = int(np.sum(lost | gone))
            entry = communication.ledger_entry(exchange, cost, taken, dropped=dropped, saturated=saturated)
            place = {"round": int(record["round"]) + 1, "fold": replica.fold, "seed": replica.seed}
            place |= {"site": SERVER, "split": SPLIT}
            n = int(np.sum(exchange.joined))
            found += [{**place, "metric": name, "value": float(value), "n": n} for name, value in entry.items()]
    return found


def _exchange(made: Ledger, record: Mapping[str, Any]) -> communication.Exchange:
    """Who met whom in one round, on the host."""
    present, ok = record["cohort"]["present"], record["clients"]["ok"]
    told = record.get("exchange", {})
    lost = told["before"] | told["after"] if told else np.zeros_like(present)
    joined = told.get("joined", present | told["after"] if told else present)
    nowhere = np.zeros(len(present), np.int32)
    return communication.Exchange(
        protocol=made.protocol,
        transport=made.transport,
        entries=made.entries,
        joined=joined,
        counts=told.get("counts", present),
        arrived=ok,
        group=told.get("group", nowhere),
        degree=told.get("degree", nowhere),
        failed=bool(record["failed"]),
        present=present | joined | lost | told.get("left_out", False),
        place=told.get("place"),
    )


def summary(experiment: Experiment, made: Ledger | None, written: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The ledger's part of summary.json; {} without one. Rounds are means over rounds and replicas."""
    if made is None:
        return {}
    secure, mine = experiment.parts.secure, [row for row in written if row["split"] == SPLIT]
    names = list(dict.fromkeys(row["metric"] for row in mine))
    totals = {name: float(np.sum([row["value"] for row in mine if row["metric"] == name])) for name in names}
    rounds = max(1, len({(row["round"], row["fold"], row["seed"]) for row in mine}))
    groups = min(_groups(secure), max(1, made.places // 2))
    compared = []
    if made.places >= 2:
        # The mean site stands for all in the comparison, whose hospitals are K alike.
        mean = latency.Network(float(made.network.rtt_s.mean()), float(made.network.bandwidth_bytes_s.mean()))
        sparse = secure is not None and secure.name == "secagg_plus"
        neighbours = int(secure.facts["neighbours"]) if secure and sparse else NEIGHBOURS
        compared = cost_comparison.comparison(
            made.places, made.entries, made.places // groups, neighbours, mean, made.sizes, groups
        )
    return {
        "protocol": made.protocol,
        "hides": bool(secure.hides) if secure else made.protocol == "assumed",
        "facts": dict(secure.facts) if secure else {},
        "entries": made.entries,
        "places": made.places,
        "own": cost_comparison.row_key(made.protocol, made.transport, groups),
        "per_round": {name: total / rounds for name, total in totals.items()},
        "totals": totals,
        "comparison": compared,
    }


def _groups(secure: Any) -> int:
    """Clusters of a full round."""
    return int(secure.facts.get("clusters", 1)) if secure else 1


def leakage(experiment: Experiment, state: Any, plan: Any) -> dict[str, Any]:
    """What every party recovers in one more round from the final state, of the first replica: 'rows' and 'picture'.

    {} where the run does not ask for it.
    """
    attack = experiment.attack
    if not isinstance(attack, ShareLeakage):
        return {}
    found = jax.tree.map(np.asarray, experiment.witness(state, plan, attack.entries))
    seen = seen_of(experiment, tree.rows(found, 0))
    if not seen.counts.any():
        return {}
    parts, one = experiment.parts, int(np.flatnonzero(seen.counts)[0])
    drawn = None  # beside a privacy claim: numbers of an update, without noise, belong in no report
    if not any(part.mechanism and part.mechanism.formal for part in (parts.client, parts.aggregator)):
        picture = attack.picture(seen, one, count=SHOWN)
        drawn = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in picture.items()}
    return {"rows": attack.run(seen), "picture": drawn}


def seen_of(experiment: Experiment, found: Mapping[str, np.ndarray]) -> Seen:
    """What federation.witness shows, as the attacks take it; of one replica."""
    config, secure = experiment.config, experiment.parts.secure
    message, nothing = found["message"], np.zeros_like(found["message"])
    rule = config.aggregator
    weights = rule.name in ("mean", "weighted_mean") and rule.of == "weights"
    protocol = secure.name if secure else config.secure_sum.name
    return Seen(
        true=message,
        server=found["server"] if secure else message if protocol == "none" else nothing,
        neighbour=found["neighbour"] if secure else nothing,
        colluders=found["colluders"] if secure else nothing,
        model=found["model"],
        of="weights" if weights else "updates",
        group=found.get("group", np.zeros(len(message), np.int32)),
        counts=found["counts"],
        names=tuple(experiment.data.sites[k] for k in found["clients"]),
        hides=bool(secure.hides) if secure else protocol == "assumed",
        protocol=protocol,
        clean=found["clean"] + (found["model"] if weights else 0),
    )
