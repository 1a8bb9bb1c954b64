"""Reading ahead: the same batches sooner, bounded memory, and an end."""

import gc
import threading
import time
import weakref

import numpy as np
import pytest

from fedjax_seg.data.read_ahead import ReadAhead

ROWS = np.array([3, 1, 2, 0])
KEY = np.array([1, 2], np.uint32)


class Batch(np.ndarray):
    """An array that can be watched."""


class Reading:
    """A stand-in for cutting patches: what it was asked for, and how many at a time."""

    def __init__(self, seconds=0.0, fails=None):
        self.seconds, self.fails, self.asked, self.made = seconds, fails, [], []

    def __call__(self, rows, size, key, step, batch_size, epochs):
        self.asked.append(step)
        time.sleep(self.seconds)
        if step == self.fails:
            raise RuntimeError(f"step {step}")
        words = (*rows[:size].tolist(), *key.tolist(), step, batch_size, epochs)
        out = np.random.default_rng(words).random((batch_size, 4)).view(Batch)
        self.made.append(weakref.ref(out))
        return out


@pytest.fixture
def reader():
    opened = []

    def make(compute, depth=3, threads=2, **options):
        one = ReadAhead(compute, lambda n, b, e: 20 * e, lambda b: b * 32, depth=depth, threads=threads, **options)
        opened.append(one)
        return one

    yield make
    for one in opened:
        one.close()


def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


def test_the_same_bits_for_every_depth_and_order(reader):
    plain = Reading()
    requests = [(KEY + k, step) for step in range(12) for k in range(3)]
    want = [plain(ROWS, 3, key, step, 2, 1) for key, step in requests]
    for depth, threads in ((0, 1), (1, 1), (4, 3), (30, 8)):
        one = reader(Reading(0.0003), depth, threads)
        got = [one.get(ROWS, 3, key, step, 2, 1) for key, step in requests]
        assert all(np.array_equal(a, b) for a, b in zip(got, want))
        backwards = [one.get(ROWS, 3, key, step, 2, 1) for key, step in requests[::-1]]
        assert all(np.array_equal(a, b) for a, b in zip(backwards, want[::-1]))


def test_the_next_batches_are_read_and_no_more(reader):
    compute = Reading()
    one = reader(compute, depth=3)
    one.get(ROWS, 4, KEY, 0, 2, 1)
    assert until(lambda: len(compute.asked) == 4) and sorted(compute.asked) == [0, 1, 2, 3]
    one.get(ROWS, 4, KEY, 1, 2, 1)
    assert until(lambda: len(compute.asked) == 5) and sorted(compute.asked) == [0, 1, 2, 3, 4]
    one.get(ROWS, 4, KEY, 17, 2, 1)
    assert until(lambda: 19 in compute.asked)
    one.get(ROWS, 4, KEY, 18, 2, 1)
    one.get(ROWS, 4, KEY, 19, 2, 1)
    one.get(ROWS, 4, KEY, 25, 2, 1)  # an idle lane
    time.sleep(0.02)
    assert max(compute.asked) == 25 and not {20, 21, 22, 26} & set(compute.asked)
    assert len(set(compute.asked)) == len(compute.asked)  # nothing twice


def test_results_are_dropped_with_their_use(reader):
    compute = Reading()
    one = reader(compute, depth=2)
    for step in range(10):
        one.get(ROWS, 4, KEY, step, 2, 1)
        assert until(lambda done=step + 3: len(compute.made) == done)
    gc.collect()
    assert until(lambda: sum(ref() is not None for ref in compute.made) <= 2)
    for step in range(10, 13):
        one.get(ROWS, 4, KEY, step, 2, 1)
    one.close()
    gc.collect()
    assert not [ref for ref in compute.made if ref() is not None]


def test_memory_is_bounded_over_all_clients(reader):
    """Room for 5 batches: 40 clients that are never asked again do not fill the memory, and do not stop the reading."""
    compute = Reading()
    one = reader(compute, depth=4, most_bytes=5 * 64)
    for client in range(40):
        one.get(ROWS, 4, KEY + 2 + client, 0, 2, 1)
    time.sleep(0.02)
    gc.collect()
    assert sum(ref() is not None for ref in compute.made) <= 5
    for step in range(300):
        one.get(ROWS, 4, KEY, step % 20, 2, 1)
    before = len(compute.asked)
    one.get(ROWS, 4, KEY + 1, 0, 2, 1)
    assert until(lambda: len(compute.asked) == before + 5)  # the stale ones have made room


def test_an_error_reaches_who_asks_for_that_batch(reader):
    one = reader(Reading(fails=13), depth=5)
    for step in (11, 12):
        one.get(ROWS, 4, KEY, step, 2, 1)
    time.sleep(0.02)
    with pytest.raises(RuntimeError, match="step 13"):
        one.get(ROWS, 4, KEY, 13, 2, 1)
    with pytest.raises(RuntimeError, match="step 13"):
        one.get(ROWS, 4, KEY, 13, 2, 1)
    assert one.get(ROWS, 4, KEY, 14, 2, 1).shape == (2, 4)


def test_nobody_waits_behind_the_batches_of_others(reader):
    compute = Reading()
    one = reader(compute, depth=4, threads=1)
    one.get(ROWS, 4, KEY, 0, 2, 1)
    assert until(lambda: len(compute.asked) == 5)
    compute.seconds = 0.2
    one.get(ROWS, 4, KEY + 1, 0, 2, 1)  # its four next ones keep the thread busy for 0.8 s
    begun = time.monotonic()
    one.get(ROWS, 4, KEY + 1, 4, 2, 1)
    assert time.monotonic() - begun < 0.5


def test_close_is_prompt_and_not_final(reader):
    compute = Reading(0.05)
    before = threading.active_count()
    one = reader(compute, depth=15, threads=2)
    one.get(ROWS, 4, KEY, 0, 2, 1)
    mine = [t for t in threading.enumerate() if t.daemon]
    assert threading.active_count() == before + 2 and len(mine) >= 2
    begun = time.monotonic()
    one.close()
    assert time.monotonic() - begun < 0.5 and threading.active_count() == before
    done = len(compute.asked)
    time.sleep(0.12)
    assert len(compute.asked) == done < 10
    one.close()
    np.testing.assert_array_equal(one.get(ROWS, 4, KEY, 1, 2, 1), Reading()(ROWS, 4, KEY, 1, 2, 1))


def test_waited_counts_seconds_and_batches(reader):
    slow = reader(Reading(0.02), depth=0)
    for step in range(5):
        slow.get(ROWS, 4, KEY, step, 2, 1)
    seconds, batches = slow.waited()
    assert batches == 5 and 0.1 <= seconds < 1
    ahead = reader(Reading(0.02), depth=2)
    for step in range(5):
        ahead.get(ROWS, 4, KEY, step, 2, 1)
        time.sleep(0.04)  # the training step
    assert ahead.waited()[1] == 5 and ahead.waited()[0] < 0.7 * seconds


def test_callers_of_several_threads(reader):
    one = reader(Reading(0.001), depth=3, threads=3)
    wrong = []

    def client(k):
        for step in range(15):
            got = one.get(ROWS, 4, KEY + k, step, 2, 1)
            if not np.array_equal(got, Reading()(ROWS, 4, KEY + k, step, 2, 1)):
                wrong.append((k, step))

    threads = [threading.Thread(target=client, args=(k // 2,)) for k in range(8)]  # two of each
    for t in threads:
        t.start()
    for t in threads:
        t.join(10)
    assert not wrong and one.waited()[1] == 120
