"""The chain: exact sums, a random order, and what each station sees of a message."""

import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_sums import check_exact, encoded, flat, form_of, least_p, made, messages, quick_jit, summed

from fedjax_seg.core.checks import UserError


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_the_sum_is_exact(data):
    absent = data.draw(st.lists(st.integers(0, 6), max_size=6, unique=True))
    gone = data.draw(st.lists(st.integers(0, 6), max_size=2, unique=True))
    way = data.draw(st.sampled_from(["stays", "late"]))
    given = messages(7, seed=data.draw(st.integers(0, 99)))
    out = summed("chained", given, dealt=True, key=data.draw(st.integers(0, 99)), present=absent, **{way: gone})
    check_exact("chained", given, out)
    left = 7 - len({*absent, *gone})
    joined = 7 - len(absent)
    assert out.arrived.sum() == (left if (left if way == "stays" else joined) > 1 else 0)
    assert out.failed == (way == "late" and left == 1 and joined > 1)


def stations(out):
    """The counted rows in the order of the chain or its reverse, from the links."""
    links, counts = out.meeting.links, np.flatnonzero(out.meeting.counts)
    path = [next(k for k in counts if links[k].sum() == 1)]
    while len(path) < len(counts):
        path += [k for k in np.flatnonzero(links[path[-1]]) if k not in path[-2:-1]]
    return path


def test_only_neighbours_in_the_chain_speak_to_each_other():
    given, paths = messages(7), set()
    for key in range(6):
        out = summed("chained", given, dealt=True, key=key, present=[2])
        degree = out.meeting.links.sum(axis=1)
        assert degree[2] == 0 and sorted(degree) == [0, 1, 1, 2, 2, 2, 2]
        assert (out.meeting.links == out.meeting.links.T).all() and not out.meeting.links.diagonal().any()
        paths.add(tuple(stations(out)))
    assert len(paths) > 4


def test_what_the_stations_see():
    tree, secure = messages(7), made("chained", 7)
    out, form = summed("chained", tree, dealt=True, present=[1]), form_of(secure)
    words = flat(encoded(form, tree, out.meeting)).astype(np.int64)
    shown = jax.tree.map(np.asarray, quick_jit(secure.views)(flat(tree), out.meeting))
    integers = {name: view.astype(np.float64) * 2.0**form.frac for name, view in shown.items()}
    path = stations(out)
    path = path if shown["server"][path[-1]].any() else path[::-1]
    assert np.flatnonzero(shown["server"].any(axis=1)).tolist() == [path[-1]]
    assert not shown["neighbour"][[1, path[-1]]].any()  # absent, and the last, which speaks to the server
    modular = lambda x: (x + 2**31) % 2**32 - 2**31
    running = integers["neighbour"][path[0]] - words[path[0]]  # the server's r, as float32 shows it
    assert least_p(tops(running)) > 1e-4
    for k in path:
        running = modular(running + words[k])
        seen = integers["server" if k == path[-1] else "neighbour"][k]
        assert np.abs(modular(seen - running)).max() <= 2**8  # float32 has 24 bits of these 31
        assert least_p(tops(seen)) > 1e-4
        assert abs(np.corrcoef(seen, flat(tree)[k])[0, 1]) < 5 / 64
    for k in path[1:-1]:  # the stations before and behind together know the message
        np.testing.assert_array_equal(integers["colluders"][k], modular(words[k]))
    np.testing.assert_array_equal(shown["colluders"][path[0]], shown["neighbour"][path[0]])
    assert not shown["colluders"][path[-1]].any()
    assert least_p(tops(words[path[1]])) < 1e-10  # a message that is not hidden would be seen


def tops(signed):
    """The highest bytes of the entries, four to a word: float32 shows no lower ones reliably."""
    top = ((signed.astype(np.int64) % 2**32) >> 24).astype(np.uint8)
    return top[: len(top) // 4 * 4].view("<u4")


def test_what_it_says_of_itself():
    secure = made("chained", 6, clip=2.0, frac=20)
    assert secure.hides and secure.reads == "sum" and secure.rounding == 2.0**-20
    facts = json.loads(json.dumps(dict(secure.facts)))
    assert (facts["clip"], facts["frac"], facts["step"]) == (2.0, 20, 2.0**-20)
    threat = " ".join(facts["threat"])
    assert "before and behind another one learn its message" in threat
    assert "The server learns the message of the first hospital from the second" in threat
    with pytest.raises(UserError, match="secure_sum 'chained': frac: 30 bits given with clip 8 and 6 clients, at most"):
        made("chained", 6, frac=30)
