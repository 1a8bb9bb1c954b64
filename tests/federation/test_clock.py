"""Simulated time against the challenge's own timing functions, whose results are given, and against hand sums."""

import inspect
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_seg.core.checks import DataFaults, UserError
from fedjax_seg.federation import clock, fets_times

# Patients of the 33 institutions of FeTS partitioning 2, institution 1 first.
PATIENTS = (170, 170, 171, 6, 15, 16, 15, 16, 22, 34, 12, 8, 4, 8, 14, 11, 12, 11, 12, 6, 13, 30, 9, 127, 127, 128, 4)
PATIENTS += (33, 12, 11, 12, 7, 5)
NAMES = tuple(str(i + 1) for i in range(33))
TRAIN = tuple(int(0.8 * n) for n in PATIENTS)
VAL = tuple(n - t for n, t in zip(PATIENTS, TRAIN))
BY_NAME = sorted(range(33), key=lambda k: NAMES[k])


def challenge(**options):
    return clock.make("fets", sites=NAMES, train_sizes=TRAIN, val_sizes=VAL, epochs=1, **options)


def schedule(round):
    return [BY_NAME[(6 * round + i) % 33] for i in range(6)]


# fets


@pytest.mark.parametrize(
    "options, first, minutes",
    [
        ({}, (31602.191, 37911.539, 20761.882, 37593.323), 8540.01),
        ({"patches": 1}, (2291.386, 2125.149, 2562.362, 3800.283), 786.454),
    ],
)
def test_the_challenges_own_timing_functions(options, first, minutes):
    # Both were run once on this schedule, with partitioning 2 and 40 (or one) samples of a patient.
    assert sum(PATIENTS) == 1251
    made = challenge(**options)
    rounds = [made.seconds(r, schedule(r)) for r in range(20)]
    assert rounds[:4] == pytest.approx(first, abs=6e-4)
    assert sum(rounds) / 60 == pytest.approx(minutes, abs=6e-3)
    assert "\n" not in made.text


def test_time_is_pure_and_does_not_touch_the_global_generator():
    made = challenge()
    np.random.seed(5)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    twice = [made.by_site(r, schedule(r)) for r in (3, 0, 3)]
    assert twice[0] == twice[2] != twice[1]
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002
    # who is named first, as which type of integer, does not matter
    assert made.by_site(3, np.array(schedule(3)[::-1], np.int32)) == twice[0]


def test_the_order_of_the_sites_does_not_matter():
    turned = clock.make("fets", sites=NAMES[::-1], train_sizes=TRAIN[::-1], val_sizes=VAL[::-1])
    assert turned.seconds(1, [32 - k for k in schedule(1)]) == challenge().seconds(1, schedule(1))


def test_who_does_not_train_only_downloads_and_validates():
    # Without validation cases its time is the download alone, so that a mean of many rounds is near a published mean.
    idle = clock.make("fets", sites=("a",), train_sizes=(100,), val_sizes=(0,))
    downloads = [idle.seconds(r, ()) for r in range(400)]
    means = [download[0] for download, _ in fets_times.NETWORKS]
    assert min(abs(np.mean(downloads) / m - 1) for m in means) < 0.05
    assert min(downloads) >= 1  # the floor of a draw


def test_the_published_lists():
    assert (len(fets_times.MACHINES), len(fets_times.NETWORKS)) == (21, 16)
    assert all(v[0] > t[0] for t, v in fets_times.MACHINES)  # validation reads whole volumes
    assert fets_times.NETWORKS[2][1] == (20.0, 0.0)


# sites

HEADER = "site,train_seconds_per_sample,val_seconds_per_sample,download_seconds,upload_seconds\n"
TABLE = HEADER + "a,2,3,10,20\nb,1,1,100,7\nelsewhere,9,9,9,9\n"


def of_file(tmp_path, text, sites=("a", "b"), epochs=2, **options):
    path = tmp_path / "times.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    sizes = [4, 50, 8][: len(sites)], [5, 6, 7][: len(sites)]
    return clock.make("sites", sites, *sizes, epochs, file=str(path), **options)


def test_own_seconds_by_hand(tmp_path):
    made = of_file(tmp_path, TABLE)
    # a: 10 + 5 * 3, and where it trains 4 * 2 epochs * 2 s + 5 * 3 + 20; b: 100 + 6, and 50 * 2 * 1 + 6 + 7
    assert made.by_site(0, [0]) == (25 + 51, 106)
    assert made.by_site(9, [1]) == (25, 106 + 113)
    assert [made.seconds(0, who) for who in ([], [0], [1], [0, 1])] == [106, 106, 219, 219]
    patched = of_file(tmp_path, TABLE, patches=3)
    assert patched.by_site(0, [0]) == (25 + 48 + 35, 106)


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + TABLE,
        TABLE.replace("\n", "\r\n"),
        TABLE + "\n",
        TABLE.replace(",", ", "),
        "upload_seconds,site,download_seconds,val_seconds_per_sample,train_seconds_per_sample\n20,a,10,3,2\n7,b,100,1,1",
        TABLE.replace("upload_seconds\n", "upload_seconds,train_sd\n"),  # no cell: no spread
    ],
)
def test_tables_as_people_save_them(tmp_path, text):
    assert of_file(tmp_path, text).by_site(0, [0, 1]) == (76, 219)


def test_a_spread_is_drawn_per_round_and_site(tmp_path):
    text = HEADER.strip() + ",train_sd\na,2,3,10,20,0.5\nb,1,1,100,7,\n"
    made = of_file(tmp_path, text)
    times = np.array([made.by_site(r, [0, 1]) for r in range(500)])
    assert (times[:, 1] == 219).all()
    samples = (times[:, 0] - 60) / 8
    assert abs(samples.mean() - 2) < 5 * 0.5 / math.sqrt(500) and 0.4 < samples.std() < 0.6
    assert made.by_site(7, [0]) == (times[7, 0], 106)
    wild = of_file(tmp_path, text.replace("0.5", "50"))
    assert min(wild.by_site(r, [0])[0] for r in range(50)) == 60  # a draw below zero takes no time


@pytest.mark.parametrize(
    "text, lines",
    [
        (TABLE.replace("b,1", "c,1"), ["no line for site 'b'"]),
        (TABLE.replace("elsewhere,9", "a,9"), ["line 4: site 'a' is there twice"]),
        (TABLE.replace("a,2,3", "a,-2,3"), ["line 2, site 'a': train_seconds_per_sample is '-2'"]),
        (TABLE.replace("100,7", "nan,"), ["download_seconds is 'nan'", "upload_seconds is ''"]),
        (TABLE.replace("100,7", "1e3 s,inf"), ["download_seconds is '1e3 s'", "upload_seconds is 'inf'"]),
        (TABLE.replace("a,2,3,10,20", "a"), ["train_seconds", "val_seconds", "download_seconds", "upload_seconds"]),
        (TABLE.replace("upload_", "up_"), ["no column 'upload_seconds'", "unknown column 'up_seconds'"]),
        (TABLE.replace(",upload_seconds", ",upload_seconds,train_std"), ["did you mean 'train_sd'"]),
        ("", [f"no column {c!r}" for c in HEADER.strip().split(",")]),
    ],
)
def test_every_fault_of_the_file_is_one_line(tmp_path, text, lines):
    with pytest.raises(DataFaults) as caught:
        of_file(tmp_path, text)
    assert len(caught.value.faults) == len(lines)
    for fault, expected in zip(caught.value.faults, lines):
        assert expected in fault and "\n" not in fault
    assert "times.csv" in str(caught.value)


def test_a_mistyped_site_of_the_file_is_suggested(tmp_path):
    with pytest.raises(DataFaults, match="no line for site 'north'; did you mean 'nort'"):
        of_file(tmp_path, HEADER + "nort,1,1,1,1\n", sites=("north",))


@pytest.mark.parametrize("text", [b"site\xff\n", 'site,"a\n'])
def test_no_table_at_all_is_a_clear_error(tmp_path, text):
    with pytest.raises(UserError, match=r"times\.csv is no"):
        of_file(tmp_path, text)


# options


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("none", {"patches": 1}, "unknown option 'patches'"),
        ("fets", {"patches": 0}, "patches: 0 given"),
        ("fets", {"pathces": 1}, "did you mean 'patches'"),
        ("sites", {}, "no file given"),
        ("sites", {"file": "nowhere.csv"}, "nowhere.csv cannot be read"),
        ("fet", {}, "did you mean 'fets'"),
    ],
)
def test_bad_options_are_one_line(name, options, message):
    with pytest.raises(UserError, match=message) as caught:
        clock.make(name, sites=("a",), train_sizes=(1,), val_sizes=(1,), epochs=1, **options)
    assert "\n" not in str(caught.value)


def test_makers_take_the_engines_values_first():
    for maker in clock.CLOCKS.values():
        own = [p for p in inspect.signature(maker).parameters.values() if p.kind is p.KEYWORD_ONLY]
        assert list(inspect.signature(maker).parameters)[:4] == ["sites", "train_sizes", "val_sizes", "epochs"]
        assert all(p.default is not p.empty for p in own)
    assert clock.make("none", ("a",), (1,), (1,)) is None


# the projected convergence score


def test_scores_by_hand():
    week = clock.WEEK
    assert week == 7 * 24 * 3600
    # Half a week at .4, a tenth at .2 (the best stays .4), a tenth at .6; then .6 for the rest of the week.
    made = clock.scores([(0.5 * week, 0.4), (0.1 * week, 0.2), (0.1 * week, 0.6)])
    assert [s.projected for s in made] == pytest.approx([0.4, 0.4, 0.6 * 0.4 + 0.4 * 0.6])
    assert [s.best for s in made] == [0.4, 0.4, 0.6]
    assert [s.seconds / week for s in made] == pytest.approx([0.5, 0.6, 0.7])
    assert [s.area / week for s in made] == pytest.approx([0.2, 0.24, 0.3])
    assert clock.scores([]) == []


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_one_round_scores_its_best_however_long_it_took(share):
    assert clock.scores([(share * clock.WEEK, 0.5)])[0].projected == pytest.approx(0.5)


def test_a_round_beyond_the_week_counts_to_the_end_of_the_week():
    # .5 for 3/4 of the week; .9 from there on, by a round that ends after 5/4: .75 * .5 + .25 * .9
    made = clock.scores([(0.75 * clock.WEEK, 0.5), (0.5 * clock.WEEK, 0.9)])
    assert made[-1].projected == pytest.approx(0.6)
    assert [clock.exceeded(s.seconds, 168) for s in made] == [False, True]


def test_the_best_starts_at_minus_one_and_a_missing_score_leaves_it():
    made = clock.scores([(1.0, math.nan), (1.0, -2.0), (1.0, 0.25), (1.0, math.nan)])
    assert [s.best for s in made] == [-1, -1, 0.25, 0.25]
    assert made[0].projected == pytest.approx(-1)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(1e3, 6e4), st.floats(0, 1)),
        min_size=1,
        max_size=8,
    )
)
def test_the_score_is_the_mean_of_the_running_best_over_the_week(rounds):
    # Independently: a staircase over the week whose steps are the rounds, its last one prolonged to the end.
    ends = np.cumsum([t for t, _ in rounds])
    heights = np.maximum.accumulate([s for _, s in rounds])
    widths = np.diff(np.concatenate([[0], ends[:-1], [clock.WEEK]]))
    assert clock.scores(rounds)[-1].projected == pytest.approx(float(widths @ heights) / clock.WEEK, abs=1e-12)


def test_a_round_scores_the_model_it_starts_from():
    values = {0: 0.1, 1: 0.5, 2: 0.4, 3: 0.9}
    assert clock.fets_scores(values, 3) == [0.1, 0.5, 0.4]
    with pytest.raises(UserError, match=r"no value after 1 round\(s\), one after each of 0..2 expected"):
        clock.fets_scores({0: 0.1, 2: 0.4}, 3)


def test_budgets():
    assert not clock.exceeded(3600, 1) and clock.exceeded(3600.001, 1)
    with pytest.raises(UserError, match="budget_hours: 0 given"):
        clock.exceeded(1, 0)
