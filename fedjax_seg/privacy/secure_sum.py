"""Who sees the single messages of a round: the protocols of secure summation, {name: maker} and `make`."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_seg.core import checks
from fedjax_seg.core.types import Aggregator, SecureSum
from fedjax_seg.privacy.additive import additive
from fedjax_seg.privacy.chained import chained
from fedjax_seg.privacy.scalar_shares import smc_scalar
from fedjax_seg.privacy.secagg import secagg, secagg_plus

SUMMING = (  # the rules that read sums, for messages
    *("mean", "weighted_mean", "clipped_mean", "dp_fedavg", "local_dp", "weight_noise", "fednova", "scaffold"),
    *("extrinsic_mean", "ref_sim_agg", "dp_fedhavg", "adaptive_dp_fedavg", "banded_dp_fedavg"),
)


def none() -> None:
    """The server sees every message."""


def assumed() -> None:
    """A secure sum is trusted, not simulated: the server is taken to see the sum of the messages and nothing else.

    As the papers do that name secure aggregation and do not build it. The numbers of a run do not change; what changes
    is that a rule which must read single messages is a contradiction, and refused.
    """


SECURE_SUMS = {
    "none": none,
    "assumed": assumed,
    "smc_scalar": smc_scalar,
    "chained": chained,
    "additive": additive,
    "secagg": secagg,
    "secagg_plus": secagg_plus,
}


def make(
    name: str,
    aggregator: Aggregator,
    *,
    rule: str = "",
    clients: int = 0,
    places: int = 0,
    most: float = 1.0,
    site_columns: Mapping[str, Sequence[Any]] | None = None,
    **options: Any,
) -> SecureSum | None:
    """The secure sum `name` for an aggregator; None for 'none' and 'assumed', where nothing is simulated.

    Args:
      rule: the aggregator's name, for error messages.
      clients: K of the federation.
      places: C, the most messages of one sum.
      most: the largest number of examples of a client, > 0; public.
      site_columns: {column: K values}, facts of sites.
      options: of the maker.
    Raises: UserError where the aggregator reads single messages ('none' takes all), where a sum would have one message,
      and for options that the protocol does not take.
    """
    maker = checks.lookup(SECURE_SUMS, name, "secure_sum.name")
    what = f"secure_sum {name!r}"
    if name != "none" and aggregator.reads != "sum":
        raise checks.UserError(
            (f"aggregator {rule!r}: " if rule else "")
            + f"{what}: the aggregation rule reads single messages, which a secure sum shows to nobody; a rule that"
            f" reads their sum expected ({', '.join(SUMMING)}): change --config.aggregator.name, or use"
            " --config.secure_sum.name=none"
        )
    if name not in ("none", "assumed"):
        for few, of in ((clients, "a federation"), (places, "rounds")):
            if few < 2:
                raise checks.UserError(
                    f"{what}: {of} of {few} client{'s' * (few != 1)} given, at least 2 expected: a sum of one message"
                    " is that message"
                )
        checks.number(f"{what}: largest number of examples", most, above=0.0, low=0.0)
    engine = {"clients": clients, "places": places, "most": most, "site_columns": site_columns}
    asked = {k: v for k, v in engine.items() if k in checks.parameters(maker)}
    return checks.call(maker, what, (), options | asked)
