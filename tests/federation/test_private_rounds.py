"""Rounds under a private aggregator: what a client does, or that nobody comes, does not show beside the noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_federation import CLIENTS, cases, parts, plan, quadratic, runner, start

from fedjax_seg import config as configuration
from fedjax_seg import same_run
from fedjax_seg.aggregation import make as aggregator_of
from fedjax_seg.clients import local_sgd
from fedjax_seg.federation import sampling

MINE = jax.tree.map(np.asarray, plan())


def after_a_round(aggregator, sampler=None, client=None, salt=0, seed=0):
    """(variables, record) after one round of a federation on the quadratic task."""
    task, arrays = quadratic(), cases()
    made = parts(client or task, arrays, aggregator=aggregator, sampler=sampler)._replace(salt=salt)
    state, records, done = runner(made)(start(made, task, arrays, seed), MINE, 1)
    assert int(done) == 1
    return np.asarray(state.variables["params"]["w"]), jax.tree.map(lambda x: np.asarray(x)[0], records)


def private(z, **options):
    return aggregator_of("dp_fedavg", clip=1.0, noise_multiplier=z, smallest_cohort=CLIENTS, **options)


def broken(which, value):
    """A client that trains as all others, but sends `value` where it is client `which`."""
    honest = local_sgd(quadratic(), lr=0.1)

    def train(variables, personal, batches, key, **rest):
        update, kept = honest.train(variables, personal, batches, key, **rest)
        wrong = batches.client == which
        return update._replace(delta=jax.tree.map(lambda x: jnp.where(wrong, value, x), update.delta)), kept

    return honest._replace(train=train)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_client_counts_as_nothing_and_stops_nothing(value):
    found, record = after_a_round(private(0.5), client=broken(2, value))
    silent, _ = after_a_round(private(0.5), client=broken(2, 0.0))
    np.testing.assert_array_equal(found, silent)
    assert not record["halt"] and not record["nonfinite"] and not record["clients"]["finite"][2]
    _, plain = after_a_round("mean", client=broken(2, value))
    assert plain["halt"] and plain["nonfinite"]  # without a promise the run stops and names the client


def test_a_round_without_clients_releases_its_noise():
    nobody = sampling.make("poisson", CLIENTS, q=0.0)
    before = np.asarray(quadratic().init(None, None)["params"]["w"])
    moved, record = after_a_round(private(0.5, expected_clients=2.0), sampler=nobody)
    assert not record["empty"] and np.all(moved != before)
    still, empty = after_a_round("mean", sampler=nobody)
    assert empty["empty"] and np.array_equal(still, before)


def test_runs_that_share_a_seed_do_not_share_their_noise():
    one, other, again = (after_a_round(private(0.5), salt=salt)[0] for salt in (1, 2, 1))
    np.testing.assert_array_equal(one, again)
    quiet = after_a_round(private(0.0))[0]
    noises = [one - quiet, other - quiet]
    assert np.all(noises[0] != noises[1])


def test_the_salt_follows_from_whatever_decides_the_numbers():
    c = configuration.base()
    for room, name in (("data", "abide"), ("task", "classification"), ("model", "mlp")):
        c[room] = configuration.slot(room, name)
    salt = same_run.salt(c, "digest")
    assert 0 <= salt < 2**31 and salt == same_run.salt(c, "digest")
    assert salt != same_run.salt(c, "another digest")
    c.rounds, c.lanes, c.label = 99, 3, "a name"  # a continuation goes on with the noise of its run
    assert salt == same_run.salt(c, "digest")
    c.client.lr = 0.123
    assert salt != same_run.salt(c, "digest")
