"""Who fails in a round: by chance as often as asked, by schedule exactly, and the same whatever the others do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_seg.core.checks import UserError
from fedjax_seg.federation import dropout

SITES = ("north", "east:2", "south")
WHO = jnp.arange(3)


def test_nobody_fails_unless_asked():
    assert dropout.make(SITES) is None


def test_the_schedule_is_kept_to_the_letter():
    fails = dropout.make(SITES, schedule=("1:north", "3:east:2:before", "3:south:after"))
    seen = [[np.asarray(x).tolist() for x in fails(WHO, jnp.int32(r), jax.random.key(r))] for r in range(4)]
    nobody = [False, False, False]
    assert seen == [
        [nobody, [True, False, False]],
        [nobody, nobody],
        [[False, True, False], [False, False, True]],
        [nobody, nobody],
    ]
    # it is about clients, not about rows of the cohort
    before, after = fails(jnp.array([2, 1]), jnp.int32(2), jax.random.key(0))
    np.testing.assert_array_equal(before, [False, True])
    np.testing.assert_array_equal(after, [True, False])


@pytest.mark.parametrize("when, early", [("before", 1.0), ("after", 0.0), ("either", 0.5)])
def test_by_chance(when, early):
    fails = dropout.make(SITES, probability=0.3, when=when)
    keys = jax.random.split(jax.random.key(5), 4000)
    before, after = jax.vmap(lambda key: fails(WHO, jnp.int32(0), key))(keys)
    assert not np.any(before & after)
    lost = np.asarray(before | after)
    # 12,000 draws: the standard deviation of the share is 0.0042
    assert abs(lost.mean() - 0.3) < 0.017
    assert abs(np.asarray(before).sum() / lost.sum() - early) < 0.04
    assert abs(np.corrcoef(lost[:, 0], lost[:, 1])[0, 1]) < 0.07
    # a client's fate does not depend on who else was drawn
    alone = jax.vmap(lambda key: fails(jnp.array([2]), jnp.int32(0), key))(keys)
    np.testing.assert_array_equal(alone[0][:, 0] | alone[1][:, 0], lost[:, 2])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"probability": 1.0}, "dropout.probability: 1.0 given"),
        ({"probability": -0.1}, "dropout.probability: -0.1 given"),
        ({"when": "later", "probability": 0.1}, "dropout.when: .*'later'"),
        ({"schedule": ("0:north",)}, "dropout.schedule: '0:north' given, 'ROUND:SITE'"),
        ({"schedule": ("north",)}, "dropout.schedule: 'north' given, 'ROUND:SITE'"),
        ({"schedule": ("2:nort",)}, "dropout.schedule: '2:nort': unknown site 'nort'; did you mean 'north'"),
        ({"schedule": ("2:north",), "when": "either"}, "when=either leaves the moment open"),
    ],
)
def test_faults(options, message):
    with pytest.raises(UserError, match=message):
        dropout.make(SITES, **options)
