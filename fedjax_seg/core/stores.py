"""The type of cases that stay on disk. Apart from the other types, since reading data does not need jax."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class CaseStore(NamedTuple):
    """Cases that are too large for memory: they stay on disk and come to the device batch by batch, by a callback.

    Everything is numpy on the host. `patches` and `whole` are pure: the same arguments give the same bits, on any
    thread and in any order. So nothing about the order of training is state, and what comes next can be read ahead.

    Attributes:
      patches: (rows int32 [M], size, key uint32 [2], step, batch_size, epochs) -> a training batch: `patch_spec` with a
        leading axis B = batch_size, and 'mask' float32 [B]. It is local batch number `step` of a client whose cases
        are rows[:size]. An epoch is `per_case` patches of every case in an order drawn from the key; its last batch is
        masked. A step beyond the last one (an idle lane asks for it) gives a batch of mask 0.
      whole: (case) -> one case, as `whole_spec`: the volume in the corner of a buffer that holds the largest one.
      patch_spec: {name: (shape, dtype)} of one patch: 'x' [*patch, channels] float16, 'y' [*patch] uint8.
      whole_spec: {name: (shape, dtype)} of one case: 'x' [*largest, channels] float16, 'y' [*largest] uint8,
        'shape' int32 [axes] (the part of the buffer that is the volume), 'full' int32 [axes] (the file's own shape,
        before it was cropped), 'spacing' float32 [axes] (mm), 'background' float32 [channels] (what surrounds it).
      per_case: patches of a case and epoch.
      save: (case, labels uint8 [*shape], folder) -> path; a prediction in the input's own frame and label values.
      waited: () -> seconds that callers of `patches` have waited so far, and how many batches they got.
      close: () -> None; stops the threads that read ahead. A closed store may be used again.
    """

    patches: Callable[..., Mapping[str, Any]]
    whole: Callable[[int], Mapping[str, Any]]
    patch_spec: Mapping[str, Any]
    whole_spec: Mapping[str, Any]
    per_case: int
    save: Callable[..., Any]
    waited: Callable[[], tuple[float, int]]
    close: Callable[[], None]
