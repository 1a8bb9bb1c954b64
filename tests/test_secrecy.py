"""What a run tells of its exchange: clusters in small cohorts, the network's file, and the sizes of real keys."""

from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_seg import config as configuration
from fedjax_seg import secrecy
from fedjax_seg.core.checks import UserError
from fedjax_seg.privacy import communication, latency

SITES = ("north", "east", "south")


def run_of(places, clusters, protocol="additive"):
    links = latency.site_links(latency.Network(), places)
    made = secrecy.Ledger(protocol, "vectors", 1000, places, links, communication.SIZES)
    secure = SimpleNamespace(name=protocol, hides=True, facts={"clusters": clusters, "neighbours": places - 1})
    experiment = SimpleNamespace(parts=SimpleNamespace(secure=secure))
    return secrecy.summary(experiment, made, [])


@pytest.mark.parametrize(
    "places, clusters, own, messages",
    [(8, 2, "clusters", 32), (8, 3, "clusters", 22), (11, 4, "clusters", 31), (3, 2, "mesh", 9), (2, 2, "mesh", 4)],
)
def test_the_own_row_has_the_runs_clusters(places, clusters, own, messages):
    """K = 8 in 3 clusters is 3 + 3 + 2: 9 + 9 + 4 messages; a cohort of 3 holds one cluster of the two."""
    told = run_of(places, clusters)
    row = {row["key"]: row for row in told["comparison"]}[told["own"]]
    assert (told["own"], row["messages"]) == (own, messages)


def test_neighbours_of_secagg_are_no_neighbours_of_secagg_plus():
    told = run_of(33, 1, "secagg")
    names = {row["key"]: row["name"] for row in told["comparison"]}
    assert "12 neighbours" in names["secagg_plus"]


def network(**values):
    c = configuration.base()
    for key, value in values.items():
        c.network[key] = value
    return secrecy.network_of(c, SITES)


def test_links_of_the_file_and_of_the_rest(tmp_path):
    file = tmp_path / "net.csv"
    file.write_text("site,rtt_ms,mbit_s\neast,200,8\n")
    found = network(rtt_ms=10.0, mbit_s=80.0, file=str(file))
    np.testing.assert_allclose(found.rtt_s, [0.01, 0.2, 0.01])
    np.testing.assert_allclose(found.bandwidth_bytes_s, [1e7, 1e6, 1e7])


@pytest.mark.parametrize(
    "text, message",
    [
        ("site,rtt\neast,1\n", "columns site, rtt found, site, rtt_ms, mbit_s expected"),
        ("site,rtt_ms,mbit_s\nwest,1,2\n", r"line 2: west, 1, 2 found, a site \(north, east, south"),
        ("site,rtt_ms,mbit_s\neast,1,-2\n", "line 2: east, 1, -2 found, .*two numbers above 0"),
        ("site,rtt_ms,mbit_s\neast,1,nan\n", "line 2: east, 1, nan found"),
        ("site,rtt_ms,mbit_s\neast,1,2\neast,1,2\n", "line 3: site east a second time"),
    ],
)
def test_faults_of_the_file(tmp_path, text, message):
    file = tmp_path / "net.csv"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        network(file=str(file))
