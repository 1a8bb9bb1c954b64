"""The shorter ways through a wide first layer (lazy_linear, blocked_linear) give what the plain way gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_federation as tiny

from fedjax_seg.clients import blocked_linear, forms, lazy_linear, local_sgd

FEATURES, ROUNDS = 150, 3  # 150 inputs, at most 3 steps of 4 rows: the lazy form pays from 4 * 12 inputs on


def trained(task, options, *, lanes=1, epochs=1, dtype=np.float64):
    """(variables, personal, the clients' records) after some rounds over uneven clients with remainder batches."""
    arrays = tiny.cases(features=FEATURES)
    arrays = {**arrays, "x": arrays["x"].astype(dtype) / 4}
    made = tiny.parts(local_sgd(task, lr=0.05, **options), arrays, epochs=epochs)
    longest = -(-max(tiny.SIZES) // tiny.BATCH) * epochs
    made = made._replace(batches_of=lambda *where, of=made.batches_of: of(*where)._replace(longest=longest))
    state = tiny.start(made, task, arrays)
    state, records, _ = tiny.runner(made, lanes)(state, tiny.plan(), ROUNDS)
    return state.variables, state.personal, records["clients"]


def ways(monkeypatch):
    """Counts how often a client is traced in each form."""
    seen = {"lazy": 0, "blocked": 0, "whole": 0}

    def counted(name, function):
        def call(*args):
            seen[name] += 1
            return function(*args)

        return call

    monkeypatch.setattr(lazy_linear, "form", counted("lazy", lazy_linear.form))
    monkeypatch.setattr(blocked_linear, "form", counted("blocked", blocked_linear.form))
    monkeypatch.setattr(forms, "whole", counted("whole", forms.whole))
    return seen


SGD = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "released": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "keep_optimizer": True},
    "proximal": {"mu": 0.5, "momentum": 0.5, "weight_decay": 0.01, "schedule": "exponential", "schedule_decay": 0.5},
}


@pytest.mark.parametrize("options", SGD.values(), ids=SGD)
@pytest.mark.parametrize(("lanes", "epochs"), [(1, 1), (4, 2)], ids=["one lane", "four lanes, two epochs"])
def test_lazy_sgd_is_sgd(monkeypatch, options, lanes, epochs):
    with jax.enable_x64(True):
        task = tiny.network(jnp.float64)
        plain = trained(task._replace(linear_input=""), options, lanes=lanes, epochs=epochs)
        seen = ways(monkeypatch)
        lazy = trained(task, options, lanes=lanes, epochs=epochs)
    assert seen["lazy"] and not seen["whole"]
    assert tiny.distance(plain[0], lazy[0]) < 1e-9
    assert (plain[1] == {}) == ("keep_optimizer" not in options)
    if plain[1]:
        assert tiny.distance(plain[1], lazy[1]) < 1e-9
    np.testing.assert_allclose(lazy[2]["loss"], plain[2]["loss"], rtol=1e-6)  # float32 sums
    np.testing.assert_allclose(lazy[2]["update_norm"], plain[2]["update_norm"], rtol=1e-6)


COORDINATEWISE = {
    "adam": {"optimizer": "adam"},
    "adam kept": {"optimizer": "adam", "keep_optimizer": True, "mu": 0.1},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1},
}


@pytest.mark.parametrize("options", COORDINATEWISE.values(), ids=COORDINATEWISE)
def test_blocks_of_rows_are_the_whole(monkeypatch, options):
    with jax.enable_x64(True):
        task = tiny.network(jnp.float64)
        plain = trained(task._replace(linear_input=""), options)
        monkeypatch.setattr(blocked_linear, "BLOCK", 64)  # 450 entries: 8 blocks of 18 or 19 rows
        seen = ways(monkeypatch)
        blocked = trained(task, options)
    assert seen["blocked"] and not seen["whole"]
    assert tiny.distance(plain[0], blocked[0]) < 1e-9
    if plain[1]:
        assert tiny.distance(plain[1], blocked[1]) < 1e-9


@pytest.mark.parametrize(
    "options",
    [{"clip": 1.0}, {"optimizer": "lamb"}, {"optimizer": "adam"}, {"local": ("params/w",)}],
    ids=["clipped gradient", "norms over tensors", "small kernel", "kernel stays at home"],
)
def test_everything_else_takes_the_plain_way(monkeypatch, options):
    seen = ways(monkeypatch)
    trained(tiny.network(), options, dtype=np.float32)
    assert seen["whole"] and not seen["lazy"] and not seen["blocked"]
