"""Scores per site, over sites and pooled: which cases count, what is left out, and which way is worse."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk
from tiny_federation import cases, quadratic, quick_jit

from fedjax_seg import tasks
from fedjax_seg.core.types import Client, FederatedState, Task
from fedjax_seg.federation import evaluate

SITES = ("north", "east", "south")


def table(rows):
    return {(row["site"], row["metric"]): (row["value"], row["n"]) for row in rows}


def outputs(sizes, seed=0, one_class=None):
    """Random probabilities and labels [K, T]; padding is garbage that must not be scored."""
    rng, longest = np.random.default_rng(seed), max(sizes)
    label = rng.integers(0, 2, (len(sizes), longest))
    for k, n in enumerate(sizes):
        label[k, : min(n, 2)] = [0, 1][: min(n, 2)]
        if k == one_class:
            label[k] = 1
    positive = np.clip(0.3 + 0.4 * label + 0.3 * rng.normal(size=label.shape), 0.01, 0.99)
    p = np.stack([1 - positive, positive], 2)
    loss = -np.log(np.take_along_axis(p, label[..., None], 2)[..., 0])
    for k, n in enumerate(sizes):
        p[k, n:], loss[k, n:], label[k, n:] = 1e9, 1e9, 0
    return {"probability": p, "loss": loss, "label": label}


def binary():
    return tasks.make("classification", {"name": "mlp"})


def test_sites_mean_worst_and_pooled_equal_scikit_learn():
    sizes = (9, 5, 12)
    out = outputs(sizes)
    found = table(evaluate.scores(binary(), out, sizes, SITES))
    aucs, losses, everything = [], [], []
    for k, (site, n) in enumerate(zip(SITES, sizes)):
        label, positive = out["label"][k, :n], out["probability"][k, :n, 1]
        aucs.append(sk.roc_auc_score(label, positive))
        losses.append(np.mean(out["loss"][k, :n]))
        everything += list(zip(label, positive))
        np.testing.assert_allclose(found[site, "auc"], (aucs[-1], n))
        np.testing.assert_allclose(found[site, "accuracy"], (np.mean((positive > 0.5) == label), n))
    label, positive = map(np.array, zip(*everything))
    np.testing.assert_allclose(found["mean_of_sites", "auc"], (np.mean(aucs), 3))
    np.testing.assert_allclose(found["worst_site", "auc"], (min(aucs), 3))
    np.testing.assert_allclose(found["worst_site", "cross_entropy"], (max(losses), 3))  # lower is better there
    np.testing.assert_allclose(found["pooled", "auc"], (sk.roc_auc_score(label, positive), 26))
    assert set(found) == {(s, m) for s in (*SITES, "mean_of_sites", "worst_site", "pooled") for m in binary().metrics}


def test_an_undefined_site_is_left_out_and_n_says_so():
    sizes = (6, 4, 5)
    out = outputs(sizes, one_class=1)
    found = table(evaluate.scores(binary(), out, sizes, SITES))
    assert np.isnan(found["east", "auc"][0]) and found["east", "auc"][1] == 4
    others = [found[site, "auc"][0] for site in ("north", "south")]
    np.testing.assert_allclose(found["mean_of_sites", "auc"], (np.mean(others), 2))
    np.testing.assert_allclose(found["worst_site", "auc"], (min(others), 2))
    assert found["mean_of_sites", "accuracy"][1] == 3
    label = np.concatenate([out["label"][k, :n] for k, n in enumerate(sizes)])
    positive = np.concatenate([out["probability"][k, :n, 1] for k, n in enumerate(sizes)])
    np.testing.assert_allclose(found["pooled", "auc"], (sk.roc_auc_score(label, positive), 15))


def test_a_site_without_cases_has_no_row_and_nothing_at_all_has_none():
    found = table(evaluate.scores(binary(), outputs((6, 4, 5)), (6, 0, 5), SITES))
    assert not any(site == "east" for site, _ in found)
    assert found["mean_of_sites", "accuracy"][1] == 2 and found["pooled", "accuracy"][1] == 11
    assert evaluate.scores(binary(), outputs((6, 4, 5)), (0, 0, 0), SITES) == []


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.one_of(st.floats(-5, 5), st.just(float("nan")), st.just(float("inf"))), min_size=3, max_size=3),
    direction=st.sampled_from(["max", "min"]),
)
def test_what_is_not_finite_never_wins_and_never_loses(values, direction):
    def score(outputs, rows):
        return [{"metric": "m", "value": float(outputs["v"][rows[0]]), "n": len(rows)}]

    task = Task(None, None, None, score, {"m": (direction, "")})
    found = table(evaluate.scores(task, {"v": np.array(values)[:, None]}, (1, 1, 1), SITES))
    defined = [v for v in values if np.isfinite(v)]
    if not defined:
        assert np.isnan(found["worst_site", "m"][0]) and np.isnan(found["mean_of_sites", "m"][0])
        assert found["worst_site", "m"][1] == 0
    else:
        worst = min(defined) if direction == "max" else max(defined)
        assert found["worst_site", "m"] == (worst, len(defined))
        np.testing.assert_allclose(found["mean_of_sites", "m"][0], np.mean(defined), atol=1e-12)


class Personal(NamedTuple):
    """A client whose personal row is added to the server's model."""

    client: Client = Client(
        lambda v: {}, lambda *a, **k: None, lambda v, own: {"params": {"w": v["params"]["w"] + own["shift"]}}
    )


@pytest.mark.parametrize("chunk", [1, 3, 5, 256])
def test_outputs_are_per_client_and_do_not_depend_on_the_chunk(chunk):
    arrays, task = cases(), quadratic()
    shift = np.array([[0.0], [1.0], [-2.0]]) * np.ones(3)
    state = FederatedState(0, task.init(None, None), {}, {}, {"shift": jnp.float32(shift)}, None)
    index = np.array([[4, 2, 9, 11, 1], [7, 7, 0, 0, 0], [3, 0, 0, 0, 0]], np.int32)
    data = {name: jnp.asarray(x) for name, x in arrays.items()}
    sizes = jnp.array([3, 1, 1])
    run = lambda state, index: evaluate.case_outputs(task.outputs, Personal().client, data, state, index, sizes, chunk)
    found = quick_jit(run)(state, index)["distance"]
    w = np.asarray(state.variables["params"]["w"]) + shift
    expected = np.sum((w[:, None] - arrays["x"][index]) ** 2, axis=2)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_site_that_never_trained_predicts_with_the_mean_of_what_the_others_keep():
    arrays, task = cases(), quadratic()
    shift = np.array([[1.0], [-2.0], [50.0]]) * np.ones(3)  # the third site has trained nothing: its row is a leftover
    state = FederatedState(0, task.init(None, None), {}, {}, {"shift": jnp.float32(shift)}, None)
    index, sizes = np.array([[4, 2], [9, 11], [7, 0]], np.int32), jnp.array([6, 2, 0])
    data = {name: jnp.asarray(x) for name, x in arrays.items()}
    run = lambda state, index: evaluate.case_outputs(task.outputs, Personal().client, data, state, index, sizes, 2)
    found = quick_jit(run)(state, index)["distance"]
    own = np.stack([shift[0], shift[1], (6 * shift[0] + 2 * shift[1]) / 8])
    w = np.asarray(state.variables["params"]["w"]) + own
    np.testing.assert_allclose(found, np.sum((w[:, None] - arrays["x"][index]) ** 2, axis=2), rtol=1e-5)


def test_an_external_site_has_its_own_row_and_no_part_in_means():
    sizes = (6, 4, 5)
    out = outputs(sizes)
    found = table(evaluate.scores(binary(), out, sizes, SITES, external=("south",)))
    inside = table(evaluate.scores(binary(), {k: v[:2] for k, v in out.items()}, sizes[:2], SITES[:2]))
    assert found["south", "accuracy"][1] == 5
    for site in ("mean_of_sites", "worst_site", "pooled"):
        np.testing.assert_allclose(found[site, "accuracy"], inside[site, "accuracy"])
