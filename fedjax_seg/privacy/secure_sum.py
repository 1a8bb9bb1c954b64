"""Who sees the single messages of a round: a slot around the aggregator."""

from typing import Any

from fedjax_seg.core import checks
from fedjax_seg.core.types import Aggregator


def none(aggregator: Aggregator) -> Aggregator:
    """The server sees every message."""
    return aggregator


def assumed(aggregator: Aggregator) -> Aggregator:
    """A secure sum is trusted, not simulated: the server is taken to see the sum of the messages and nothing else.

    As the papers do that name secure aggregation and do not build it. The numbers of a run do not change; what changes
    is that a rule which must read single messages is a contradiction, and refused.

    Raises: UserError unless the aggregator reads the sum.
    """
    if aggregator.reads != "sum":
        raise checks.UserError(
            "secure_sum 'assumed': the aggregation rule reads single messages, a rule that reads their sum expected"
            " (mean, weighted_mean, clipped_mean, dp_fedavg, local_dp, fednova, scaffold, extrinsic_mean); change"
            " --config.aggregator.name, or use --config.secure_sum.name=none"
        )
    return aggregator


SECURE_SUMS = {"none": none, "assumed": assumed}


def make(name: str, aggregator: Aggregator, *, rule: str = "", **options: Any) -> Aggregator:
    """The aggregator with the secure sum `name` around it.

    Args:
      rule: the aggregator's name, for error messages.
    """
    maker = checks.lookup(SECURE_SUMS, name, "secure_sum.name")
    try:
        return checks.call(maker, f"secure_sum {name!r}", (aggregator,), options)
    except checks.UserError as error:
        raise checks.UserError(f"aggregator {rule!r}: {error}" if rule else str(error)) from None
