"""How the updates of a round become one: {name: maker} and make(name, **options)."""

from typing import Any

from fedjax_seg.aggregation.adaptive_clipping import adaptive_dp_fedavg
from fedjax_seg.aggregation.averages import clipped_mean, mean, weighted_mean
from fedjax_seg.aggregation.banded import banded_dp_fedavg
from fedjax_seg.aggregation.control_variates import check_pair, scaffold
from fedjax_seg.aggregation.dp_simagg import dp_simagg
from fedjax_seg.aggregation.hyperbolic import extrinsic_mean, gyro_mean
from fedjax_seg.aggregation.lift import lift, lift_sum
from fedjax_seg.aggregation.normalised import fednova
from fedjax_seg.aggregation.private import dp_fedavg, geyer, local_dp, private_sim_agg
from fedjax_seg.aggregation.private_ball import dp_fedhavg
from fedjax_seg.aggregation.ref_sim_agg import ref_sim_agg
from fedjax_seg.aggregation.robust import geometric_median, krum, median, multi_krum, trimmed_mean
from fedjax_seg.aggregation.similarity import reg_sim_agg, sim_agg
from fedjax_seg.aggregation.weight_noise import weight_noise
from fedjax_seg.core import checks
from fedjax_seg.core.types import Aggregator

__all__ = ["AGGREGATORS", "check_pair", "lift", "lift_sum", "make"]

AGGREGATORS = {
    "mean": mean,
    "weighted_mean": weighted_mean,
    "clipped_mean": clipped_mean,
    "median": median,
    "trimmed_mean": trimmed_mean,
    "geometric_median": geometric_median,
    "krum": krum,
    "multi_krum": multi_krum,
    "extrinsic_mean": extrinsic_mean,
    "gyro_mean": gyro_mean,
    "fednova": fednova,
    "scaffold": scaffold,
    "sim_agg": sim_agg,
    "reg_sim_agg": reg_sim_agg,
    "dp_simagg": dp_simagg,
    "private_sim_agg": private_sim_agg,
    "dp_fedavg": dp_fedavg,
    "adaptive_dp_fedavg": adaptive_dp_fedavg,
    "banded_dp_fedavg": banded_dp_fedavg,
    "ref_sim_agg": ref_sim_agg,
    "dp_fedhavg": dp_fedhavg,
    "geyer": geyer,
    "local_dp": local_dp,
    "weight_noise": weight_noise,
}


def make(
    name: str,
    *,
    clients: int | None = None,
    smallest_cohort: int | None = None,
    rounds: int | None = None,
    min_separation: int | None = None,
    max_participations: int | None = None,
    **options: Any,
) -> Aggregator:
    """The registered aggregator of that name; an unknown name, option or value is a UserError.

    Args:
      clients: all clients of the federation, for the rules that ask for it (scaffold).
      smallest_cohort: the fewest clients a round can have, for the rules whose sensitivity rests on it.
      rounds, min_separation, max_participations: of the run, and what its sampler guarantees over so many rounds, for
        noise that is correlated over rounds.
    """
    maker = checks.lookup(AGGREGATORS, name, "aggregator")
    known = {"clients": clients, "smallest_cohort": smallest_cohort, "rounds": rounds}
    known |= {"min_separation": min_separation, "max_participations": max_participations}
    options |= {k: v for k, v in known.items() if k in checks.parameters(maker)}
    return checks.call(maker, f"aggregator {name}", (), options)
