"""Batches computed before they are asked for, by a bounded pool of threads. It changes when, never what.

A stream is all the batches of one client and round: (rows, size, key, batch size, epochs). Whoever asks for step k of
a stream will ask for k + 1 next, so that k + 1 .. k + depth are started. Results are used once and dropped.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

_STALE = 256  # requests after which a stream that nobody asked for is given up (a stopped run, another round)


class ReadAhead:
    """`get` has the arguments and results of CaseStore.patches; `waited` and `close` are CaseStore's."""

    def __init__(
        self,
        compute: Callable[..., Any],
        steps: Callable[[int, int, int], int],
        batch_bytes: Callable[[int], int],
        *,
        depth: int,
        threads: int,
        most_bytes: int = 2 << 30,
    ):
        """Nothing is started before the first request.

        Args:
          compute: (rows, size, key, step, batch_size, epochs) -> batch; pure and thread-safe.
          steps: (size, batch_size, epochs) -> steps of a stream; nothing is read beyond them.
          batch_bytes: (batch_size) -> bytes of a batch.
          depth: batches ahead of every stream; 0 = none.
          threads: at most so many batches are computed ahead at a time.
          most_bytes: of all batches that are ready, being computed or waiting; beyond it nothing new is started.
        """
        self._compute, self._steps, self._batch_bytes = compute, steps, batch_bytes
        self._depth, self._threads, self._most_bytes = depth, threads, most_bytes
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[Future[Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._streams: dict[tuple[Any, ...], dict[int, Future[Any]]] = {}
        self._touched: dict[tuple[Any, ...], int] = {}
        self._bytes = 0
        self._requests = 0
        self._seconds = 0.0

    def get(self, rows: Any, size: Any, key: Any, step: Any, batch_size: Any, epochs: Any) -> Any:
        """The batch, from the pool where it was read ahead. Raises: what `compute` raises."""
        begun = time.perf_counter()
        size, step, batch_size, epochs = int(size), int(step), int(batch_size), int(epochs)
        rows, key = np.array(rows, np.int32)[:size], np.array(key, np.uint32)  # not a slice of a device's array
        stream = (rows.tobytes(), key.tobytes(), batch_size, epochs)
        end = self._steps(size, batch_size, epochs)
        with self._lock:
            future = self._take(stream, step, batch_size)
            self._ahead(stream, (rows, size, key), step, end, batch_size, epochs)
        if future is None or future.cancel():  # nobody has begun with it: no use in waiting behind others
            batch = self._compute(rows, size, key, step, batch_size, epochs)
        else:
            batch = future.result()
        with self._lock:
            self._requests += 1
            self._seconds += time.perf_counter() - begun
        return batch

    def waited(self) -> tuple[float, int]:
        """Seconds that callers of `get` have spent in it so far, and how many batches they got."""
        with self._lock:
            return self._seconds, self._requests

    def close(self) -> None:
        """Drops what was read ahead and ends the threads; a batch that is being computed is finished first."""
        with self._lock:
            workers, self._workers = self._workers, []
            jobs, self._jobs = self._jobs, queue.SimpleQueue()
            for stream in list(self._streams):
                self._drop(stream)
        for _ in workers:
            jobs.put(None)
        for worker in workers:
            worker.join()

    def _take(self, stream: tuple[Any, ...], step: int, batch_size: int) -> "Future[Any] | None":
        future = self._streams.get(stream, {}).pop(step, None)
        if future is not None:
            self._bytes -= self._batch_bytes(batch_size)
        return future

    def _ahead(self, stream: tuple[Any, ...], client: tuple[Any, ...], step: int, end: int, batch: int, epochs: int):
        if self._depth == 0 or step >= end - 1:
            self._drop(stream)  # the last batch (or an idle lane's): nothing will be asked for again
            return
        self._touched[stream] = self._requests
        waiting = self._streams.setdefault(stream, {})
        for old in [s for s, last in self._touched.items() if self._requests - last > _STALE]:
            self._drop(old)
        for ahead in range(step + 1, min(step + 1 + self._depth, end)):
            size = self._batch_bytes(batch)
            if ahead in waiting:
                continue
            if self._bytes + size > self._most_bytes:
                break
            self._bytes += size
            waiting[ahead] = Future()
            self._jobs.put((waiting[ahead], (*client, ahead, batch, epochs)))
        while len(self._workers) < self._threads:
            self._workers.append(threading.Thread(target=_work, args=(self._jobs, self._compute), daemon=True))
            self._workers[-1].start()

    def _drop(self, stream: tuple[Any, ...]) -> None:
        self._touched.pop(stream, None)
        for future in self._streams.pop(stream, {}).values():
            future.cancel()
            self._bytes -= self._batch_bytes(stream[2])


def _work(jobs: "queue.SimpleQueue[tuple[Future[Any], tuple[Any, ...]] | None]", compute: Callable[..., Any]) -> None:
    while True:
        job = jobs.get()
        if job is None:
            return
        future, arguments = job
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(compute(*arguments))
        except BaseException as error:  # whoever asks for this batch gets it, here it would be lost
            future.set_exception(error)
        del job, future, arguments  # a result must not live on while this thread waits
