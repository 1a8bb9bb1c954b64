"""The table of protocols: who is refused, what they say of themselves, and that all of them add up."""

import inspect
import json

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_sums import MEAN, made, messages, quick_jit, summed

from fedjax_seg import aggregation
from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import Cohort
from fedjax_seg.privacy import secure_sum

PRIVATE = {"clip": 1.0, "noise_multiplier": 1.0}
REQUIRED = {"clipped_mean": {"clip": 1.0}} | dict.fromkeys(("private_sim_agg", "dp_fedavg", "local_dp"), PRIVATE)
REQUIRED |= {"ref_sim_agg": {"tau": 1.0, "noise_multiplier": 1.0}, "dp_fedhavg": {"noise_multiplier": 1.0}}
REQUIRED["adaptive_dp_fedavg"] = {"clip": 1.0, "noise_multiplier": 0.0}  # with noise it wants more than three clients
REQUIRED["banded_dp_fedavg"] = PRIVATE | {"bands": 1, "rounds": 4, "min_separation": 1, "max_participations": 4}
SIMULATED = [name for name in secure_sum.SECURE_SUMS if name not in ("none", "assumed")]
ENGINE = {"clients": 4, "places": 4, "most": 3.0, "site_columns": {"region": ["a", "b", "a", "b"]}}


def rule_of(name):
    return aggregation.make(name, clients=3, smallest_cohort=3, **REQUIRED.get(name, {}))


@pytest.mark.parametrize("rule", aggregation.AGGREGATORS)
def test_only_sums_are_taken(rule):
    aggregator = rule_of(rule)
    assert secure_sum.make("none", aggregator, rule=rule, **ENGINE) is None
    assert (rule in secure_sum.SUMMING) == (aggregator.reads == "sum")  # the names in the message are right
    for name in ("assumed", *SIMULATED):
        if aggregator.reads == "sum":
            secure = secure_sum.make(name, aggregator, rule=rule, **ENGINE)
            assert secure is None if name == "assumed" else secure.name == name
            continue
        message = f"^aggregator '{rule}': secure_sum '{name}': the .* reads single messages, which a secure sum shows"
        with pytest.raises(UserError, match=message) as error:
            secure_sum.make(name, aggregator, rule=rule, **ENGINE)
        assert "weighted_mean" in str(error.value) and "\n" not in str(error.value)


def test_unknown_names_and_options():
    with pytest.raises(UserError, match=r"secure_sum.name: unknown name 'assume'; did you mean 'assumed'"):
        secure_sum.make("assume", MEAN)
    with pytest.raises(UserError, match="secure_sum 'none': unknown option 'bits'"):
        secure_sum.make("none", MEAN, bits=3)
    with pytest.raises(UserError, match="secure_sum 'chained': unknown option 'size'"):
        secure_sum.make("chained", MEAN, **ENGINE, size=2)


@pytest.mark.parametrize("name", SIMULATED)
def test_a_sum_of_one_is_refused(name):
    for few, message in [
        ({"clients": 1}, "a federation of 1 client given"),
        ({"places": 1}, "rounds of 1 client given"),
    ]:
        with pytest.raises(UserError, match=f"secure_sum '{name}': {message}, at least 2 expected: a sum of one"):
            secure_sum.make(name, MEAN, **ENGINE | few)
    with pytest.raises(UserError, match=f"secure_sum '{name}': largest number of examples: 0.0 given"):
        secure_sum.make(name, MEAN, **ENGINE | {"most": 0.0})


def test_site_columns_make_clusters():
    for name in ("smc_scalar", "additive"):
        secure = secure_sum.make(name, MEAN, **ENGINE, column="region")
        group = quick_jit(lambda there, meet=secure.meet: meet(Cohort(jnp.arange(4), there), there, None).group)
        np.testing.assert_array_equal(group(np.ones(4, bool)), [0, 1, 0, 1])


@pytest.mark.parametrize("name", SIMULATED)
def test_every_protocol_tells_what_it_is(name):
    secure = made(name, 4)
    facts = json.loads(json.dumps(dict(secure.facts)))
    assert secure.name == name and secure.most == 10.0 and secure.reads in ("sum", "each")
    assert {"protocol", "grade", "threat"} <= set(facts)
    threat = " ".join(facts["threat"]).lower()
    assert len(facts["threat"]) >= 4 and "semi-honest" in threat and "differential privacy" in threat
    assert (secure.rounding == 0) == (name == "smc_scalar") == (not secure.hides)
    parameters = inspect.signature(secure_sum.SECURE_SUMS[name]).parameters.values()
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters)


@pytest.mark.parametrize("name", ["smc_scalar", "chained", "additive"])  # secagg has its own, slow to compile
def test_every_protocol_adds_up(name):
    """The same contract for all: who arrives is summed, the order of rows does not matter."""
    given, options = messages(7), {} if name == "chained" else {"size": 2, "redraw": True}
    order = np.asarray([3, 1, 4, 0, 2, 6, 5])
    out = summed(name, given, dealt=True, present=[0], key=1, **options)
    turned = {k: v[order] for k, v in given.items()}
    moved = summed(name, turned, clients=order, dealt=True, present=[3], key=1, **options)
    assert not out.failed and out.arrived.tolist() == [False] + [True] * 6
    near = 6 * max(made(name, 7).rounding, 1e-6)
    for leaf, rows in given.items():
        np.testing.assert_allclose(out.total[leaf], rows[1:].sum(0, dtype=np.float64), rtol=0, atol=near)
        np.testing.assert_allclose(out.total[leaf], moved.total[leaf], rtol=0, atol=near if name == "smc_scalar" else 0)
        assert out.total[leaf].dtype == np.float32 and out.total[leaf].shape == rows.shape[1:]
        assert out.uploads[leaf].dtype == (np.uint32 if made(name, 7).reads == "sum" else np.float32)
