"""The comparison of protocols: the closed forms and the printed table of the notes, and published ciphertext sizes."""

import math

import pytest

from fedjax_seg.core.checks import UserError
from fedjax_seg.privacy import cost_comparison
from fedjax_seg.privacy.communication import Sizes
from fedjax_seg.privacy.latency import Network


def closed_forms(places, entries, members, neighbours):
    """{row: (bytes, messages, hops)} as the notes on secure aggregation print them; ~450 bytes a pair are exact here
    but for two keys and the share of its own that a client sends, and a bit for each peer."""
    k, d, n, near = places, 4 * entries, members, min(neighbours, places - 1)
    masked = lambda peers: (k * d + 450 * k * peers + k * (64 + 66 + math.ceil(peers / 8)), 7 * k, 4)
    return {
        "none": (k * d, k, 1),
        "chained": ((k + 1) * d, k + 1, k + 1),
        "mesh": (k * k * d, k * k, 2),
        "clusters": (k * n * d, k * n, 2),
        "seeds": (k * d + 48 * k * (n - 1), k * n, 2),
        "secagg": masked(k - 1),
        "secagg_plus": masked(near),
    }


@pytest.mark.parametrize(
    "case", [(33, 1_200_000, 3, 12), (33, 33_000_000, 3, 12), (1000, 1_200_000, 4, 40), (6, 10, 2, 12)], ids=str
)
def test_the_comparison_is_the_closed_forms(case):
    rows = {row["key"]: row for row in cost_comparison.comparison(*case)}
    assert tuple(rows) == cost_comparison.ROWS
    for key, expected in closed_forms(*case).items():
        row = rows[key]
        assert (row["bytes"], row["messages"], row["hops"]) == expected, key
        assert row["bytes"] == row["bytes_up"] + row["bytes_peer"] and not row["computed"]
        assert row["bytes_down"] == 4 * case[0] * case[1]
        assert row["ratio"] == pytest.approx(row["bytes"] / (4 * case[0] * case[1]))


# notes on secure aggregation, table of 4.4, digits as printed there
PRINTED = {
    (33, 1_200_000, 12): {
        "none": ("158", "1.00"), "chained": ("163", "1.03"), "mesh": ("5.23e+03", "33.00"),
        "clusters": ("475", "3.00"), "seeds": ("158", "1.00"), "secagg": ("158.9", "1.003"),
        "secagg_plus": ("158.6", "1.001"),
    },
    (33, 33_000_000, 12): {
        "none": ("4.36e+03", ""), "chained": ("4.49e+03", ""), "mesh": ("1.44e+05", ""), "clusters": ("1.31e+04", ""),
        "seeds": ("4.36e+03", ""), "secagg": ("4.36e+03", ""), "secagg_plus": ("4.36e+03", ""),
    },
    (1000, 1_200_000, 40): {"secagg": ("", "1.094"), "secagg_plus": ("", "1.004")},
}  # fmt: skip


@pytest.mark.parametrize("case", PRINTED, ids=str)
def test_the_printed_table_comes_out(case):
    places, entries, neighbours = case
    rows = {row["key"]: row for row in cost_comparison.comparison(places, entries, 3, neighbours)}
    for key, (size, ratio) in PRINTED[case].items():
        if size:
            digits = len(size.split("e")[0].replace(".", ""))
            assert f"{rows[key]['bytes'] / 1e6:.{digits}g}" == size, key
        if ratio:
            assert f"{rows[key]['ratio']:.{len(ratio.split('.')[1])}f}" == ratio, key


def test_chains_lose_by_waiting_and_meshes_by_bytes():
    far = {r["key"]: r["seconds"] for r in cost_comparison.comparison(33, 1000, 3, 12, Network(0.1, 1e9))}
    slow = {r["key"]: r["seconds"] for r in cost_comparison.comparison(33, 1_200_000, 3, 12, Network(0.001, 1e6))}
    assert max(far, key=far.get) == "chained" and far["chained"] == pytest.approx(34 * 0.1, rel=1e-3)
    assert far["secagg"] == pytest.approx(4 * 0.1, rel=1e-3)
    # 4.8 s a model: down and 34 times on; down, 32 at once and up
    assert slow["chained"] == pytest.approx(35 * 4.8, rel=1e-3) and slow["mesh"] == pytest.approx(34 * 4.8, rel=1e-3)
    assert slow["secagg"] < 1.01 * slow["none"] < slow["clusters"]


def test_homomorphic_encryption_is_computed_from_the_published_size():
    row = cost_comparison.comparison(33, 1_200_000, 3, 12)[-1]
    assert row["computed"] and "TenSEAL" in row["source"]
    # 1,200,000 / 4096 = 292.97 ciphertexts of 128.13 KB, 1 KB = 1024 bytes; as large on the way back
    assert row["bytes"] == row["bytes_down"] == pytest.approx(33 * 293 * 128.13 * 1024, rel=1e-5)
    assert row["ratio"] == pytest.approx(8.01, abs=0.005) and (row["messages"], row["hops"]) == (33, 1)
    # two polynomials of 8192 coefficients below a 60-bit prime, in words of 64 bits, and a header of about 100 bytes
    assert 0 < cost_comparison.CKKS.size - 2 * 8192 * 8 < 200


def test_other_sizes_of_keys_and_shares_can_be_given():
    rows = {r["key"]: r for r in cost_comparison.comparison(6, 10, 2, 12, None, Sizes(4, 68, 108, 41, 48))}
    # what a client causes for a peer: 68 + 2 x 108 + 41 = 325, and its own keys, its own share, a byte of bits
    assert rows["secagg"]["bytes"] == 6 * 40 + 325 * 6 * 5 + 6 * (68 + 41 + 1)


def test_uneven_clusters_one_cluster_and_too_many_neighbours():
    rows = {r["key"]: r for r in cost_comparison.comparison(8, 10, 3, 99)}
    assert rows["clusters"]["bytes"] == 8 * 4 * 40 and rows["clusters"]["name"] == "shares in clusters of 4"
    rows = {r["key"]: r for r in cost_comparison.comparison(7, 10, 3, 99)}  # 4 and 3
    assert rows["clusters"]["bytes"] == (16 + 9) * 40 and rows["clusters"]["name"] == "shares in clusters of 3 or 4"
    assert rows["secagg"]["bytes"] == rows["secagg_plus"]["bytes"]
    keys = [r["key"] for r in cost_comparison.comparison(5, 10, 5, 2)]
    assert "clusters" not in keys and "mesh" in keys
    assert cost_comparison.regular_degrees(5, 3).tolist() == [4, 3, 3, 3, 3]


def test_of_two_hospitals_each_learns_the_others_message():
    hides = {r["key"]: r["hides"] for r in cost_comparison.comparison(2, 10, 2, 1)}
    told = "server only: two learn each other's from the sum"
    assert {hides[key] for key in ("chained", "seeds", "secagg", "secagg_plus")} == {told}
    assert hides["mesh"] == f"{told}; with scalar portions: nobody" and hides["none"] == "nobody"
    pairs = {r["key"]: r["hides"] for r in cost_comparison.comparison(4, 10, 2, 1)}
    assert pairs["clusters"].startswith("server and any one neighbour (the server sees sums of clusters)")


@pytest.mark.parametrize(
    "args, message",
    [
        ((1, 10, 2, 2), "places: 1 given"),
        ((4, 10, 1, 2), "cluster_size: 1 given"),
        ((4, 10, 5, 2), r"cluster_size: 5 given, an integer in \[2, 4\]"),
        ((4, 10, 2, 0), "neighbours: 0 given"),
        ((4, 0, 2, 2), "entries: 0 given"),
    ],
    ids=str,
)
def test_comparisons_that_cannot_be(args, message):
    with pytest.raises(UserError, match=f"communication: {message}"):
        cost_comparison.comparison(*args)


def test_which_row_a_run_is():
    cases = {
        ("assumed", "", 1): "none", ("smc_scalar", "", 3): "clusters", ("smc_scalar", "", 1): "mesh",
        ("additive", "vectors", 1): "mesh", ("additive", "seeds", 1): "seeds", ("additive", "vectors", 2): "clusters",
        ("chained", "", 1): "chained", ("secagg_plus", "", 1): "secagg_plus",
    }  # fmt: skip
    assert {case: cost_comparison.row_key(*case) for case in cases} == cases
    with pytest.raises(UserError, match="unknown name 'smc'"):
        cost_comparison.row_key("smc", "", 1)
