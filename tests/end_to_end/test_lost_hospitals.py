"""A run whose hospitals drop out of a secure sum, stopped and continued: the same bits, and the same ledger."""

import pytest
from tiny_runs import METRICS, assert_same_run, config, round_of, rows

from fedjax_seg import experiment

pytestmark = pytest.mark.usefixtures("quick_compile", "no_figures")
LOST = (
    *("--config.secure_sum.name=secagg", "--config.folds=0", "--config.input_span=off"),
    "--config.dropout.schedule=('1:UM:before','3:NYU:after','4:NYU:after','4:UM:after')",
)


@pytest.mark.slow
def test_killed_and_resumed_is_the_same_run(pcp_root, tmp_path):
    whole = experiment.run(config(pcp_root, *LOST), tmp_path / "whole", quiet=True)
    with pytest.raises(experiment.Preempted):
        stop = lambda: round_of(tmp_path / "cut") >= 2
        experiment.run(config(pcp_root, *LOST), tmp_path / "cut", stop=stop, quiet=True)
    experiment.run(config(pcp_root, *LOST), tmp_path / "cut", quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    ledger, again = ((tmp_path / name / "communication.csv").read_bytes() for name in ("whole", "cut"))
    assert ledger == again and "metrics.jsonl" in METRICS

    assert whole["participation"] == {"NYU": 2, "UM": 2, "UCLA": 4}
    told = {
        (row["round"], row["metric"]): row["value"]
        for row in rows(tmp_path / "whole")
        if row["split"] == "communication" and row["fold"] == "fold0"
    }
    of = lambda metric: [told[r, metric] for r in (1, 2, 3, 4)]
    assert of("dropped") == [1, 0, 1, 2]
    assert of("aborted") == [0, 0, 0, 1]  # one of three is left in round 4, and two are needed
    entries = whole["secrecy"]["entries"]
    # who is there uploads; three upload in round 2, two in rounds 1 and 3, one in vain in round 4
    sent = [up - up % (4 * entries) for up in of("bytes_up")]
    assert sent == [n * 4 * entries for n in (2, 3, 2, 1)]
    assert of("bytes_down") == [n * 4 * entries for n in (3, 3, 3, 3)]
