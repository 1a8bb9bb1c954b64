"""An assumed secure sum changes no number and refuses rules that read single messages."""

import pytest

from fedjax_seg import aggregation
from fedjax_seg.core.checks import UserError
from fedjax_seg.privacy import secure_sum

PRIVATE = {"clip": 1.0, "noise_multiplier": 1.0}
REQUIRED = {"clipped_mean": {"clip": 1.0}} | dict.fromkeys(("private_sim_agg", "dp_fedavg", "local_dp"), PRIVATE)


@pytest.mark.parametrize("rule", aggregation.AGGREGATORS)
def test_only_sums_are_taken(rule):
    aggregator = aggregation.make(rule, clients=3, smallest_cohort=3, **REQUIRED.get(rule, {}))
    assert secure_sum.make("none", aggregator) is aggregator
    if aggregator.reads == "sum":
        assert secure_sum.make("assumed", aggregator, rule=rule) is aggregator
    else:
        with pytest.raises(UserError, match=f"aggregator '{rule}': secure_sum 'assumed': the .* reads single messages"):
            secure_sum.make("assumed", aggregator, rule=rule)


def test_unknown_names_and_options():
    aggregator = aggregation.make("mean")
    with pytest.raises(UserError, match=r"secure_sum.name: unknown name 'assume'; did you mean 'assumed'"):
        secure_sum.make("assume", aggregator)
    with pytest.raises(UserError, match="secure_sum 'none': unknown option 'bits'"):
        secure_sum.make("none", aggregator, bits=3)
