"""DP-SGD: local training on sums of clipped per-example gradients with Gaussian noise."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_seg.clients import forms
from fedjax_seg.clients.local_sgd import descent, local_training
from fedjax_seg.core import checks
from fedjax_seg.core import noise as long_tailed
from fedjax_seg.core.types import Array, Batch, Batches, Client, Mechanism, Task, Tree, Variables

UNITS = ("example", "patient")
AT_ONCE = ("auto", "one", "all")


def dp_sgd(
    task: Task,
    *,
    noise_multiplier: float = 1.2,
    clip: float = 1.0,
    unit: str = "example",
    lr: float = 0.01,
    optimizer: str = "sgd",
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    mu: float = 0.0,
    schedule: str = "constant",
    schedule_rounds: int = 0,
    schedule_decay: float = 1.0,
    schedule_every: int = 1,
    keep_optimizer: bool = False,
    local: tuple[str, ...] = (),
    at_once: str = "auto",
) -> Client:
    """Every step follows (sum_i g_i min(1, C/||g_i||) + N(0, (z C)^2)) / expected over the real examples of its batch.

    Source: Abadi et al., "Deep learning with differential privacy" (2016), Algorithm 1; z is its sigma (FedOnco-Bench:
    z = 1.2, C = 1). Deviation: the divisor is the expected number of units in a batch, never the drawn one, which is
    data: `Batches.expected` under Poisson sampling, the rows B of the batch where batches are shuffled epochs. Which
    epsilon that gives, privacy.accounting tells from the sampling; the amplified one holds for Poisson batches only.

    Weight decay, FedProx's term, momentum and the optimiser come after the noise, so they cost no privacy, and neither
    does a kept optimiser state. A gradient that is not finite counts with 0 in those coordinates, so one broken example
    neither poisons the step nor leaves its bound. An empty batch is a step of noise alone. Noise is float32: attacks on
    the rounding of floating-point noise are outside the guarantee.

    The metrics 'loss' and 'clipped_fraction' (share of the step's examples whose gradient exceeded C) are computed from
    the data without noise: records of the simulation, which no hospital may publish under this guarantee.

    Args:
      noise_multiplier: z >= 0; 0 = clipping without a guarantee.
      clip: C > 0, the Euclidean norm over all parameters.
      unit: what one gradient stands for: 'example', or 'patient' where the batches hold at most one case of a patient.
      lr ... local: as in `local_sgd`.
      at_once: gradients computed side by side: 'one' (a scan over the real examples, fastest on a CPU), 'all' (vmap
        over the batch, padding included) or 'auto'. Changes no result but for rounding.

    Returns: a Client with `mechanism`: sensitivity C of the sum, in the zero-out sense (a unit's data replaced by
      nothing; the numbers of units are public). Its `init` raises a UserError for models with batch statistics.
    """
    checks.number("client.noise_multiplier", noise_multiplier, low=0.0)
    checks.number("client.clip", clip, low=0.0, above=0.0)
    checks.one_of("client.unit", unit, UNITS)
    checks.one_of("client.at_once", at_once, AT_ONCE)
    how = descent(
        lr=lr,
        optimizer=optimizer,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        mu=mu,
        schedule=schedule,
        schedule_rounds=schedule_rounds,
        schedule_decay=schedule_decay,
        schedule_every=schedule_every,
        keep_optimizer=keep_optimizer,
        local=local,
    )

    def form_of(optimizer_now: forms.Optimizer, params: Tree, state: Tree, batches: Batches) -> forms.Form:
        def step(loss: forms.Loss, now: Tree, state: Tree, batch: Batch, key: Array, number: Array) -> Any:
            del number
            value, gradient = private_gradient(
                loss, now, batch, key, clip=clip, noise=noise_multiplier, expected=batches.expected, at_once=at_once
            )
            return value, *optimizer_now.apply(gradient, state, now, params)

        return forms.whole(optimizer_now, params, state)._replace(step=step, measures=("clipped_fraction",))

    client = local_training(task, how, form_of)

    def init(variables: Variables) -> dict[str, Array]:
        refuse_batch_statistics(variables)
        return dict(client.init(variables))

    z = float(noise_multiplier)
    reasons = long_tailed.objections(z)
    proof = f"the sum of clipped gradients changes by that of one {unit}, ||g|| <= C (clipped and checked per {unit})"
    mechanism = Mechanism(unit, float(clip), z, "zero-out", not reasons, reasons=reasons, proof=proof)
    return client._replace(init=init, mechanism=mechanism)


def refuse_batch_statistics(variables: Variables) -> None:
    """Raises where the model has more than parameters, as with BatchNorm."""
    other = sorted(set(variables) - {"params"})
    if other:
        raise checks.UserError(
            f"client 'dp_sgd': the model has {', '.join(other)}, a model with parameters only expected, because batch"
            " statistics mix the examples of a batch: no clip bounds what one of them does to the others' gradients"
            " (BatchNorm); use --config.model.norm=group"
        )


def private_gradient(
    loss: Callable[..., Any],
    params: Tree,
    batch: Batch,
    key: Array,
    *,
    clip: float,
    noise: float,
    expected: Array | None,
    at_once: str = "auto",
) -> tuple[tuple[Array, dict[str, Array]], Tree]:
    """((mean loss of the real examples, {'clipped_fraction'}), noisy gradient), see `dp_sgd`.

    Args:
      loss: (params, batch, key) -> (scalar, aux), a mean over the examples of mask 1; aux must be empty.
      batch: leaves [B, ...], 'mask' [B].
      noise: the noise multiplier z.
      expected: float32 scalar, the divisor; None = B.
    """
    from jax_privacy import clipping  # here: it is most of a second of every start, and few runs are private

    real = batch["mask"] > 0
    single = at_once == "one" or (at_once == "auto" and jax.default_backend() == "cpu")
    clipped = clipping.clipped_grad(
        lambda p, example, k: loss(p, example, k)[0],
        l2_clip_norm=clip,
        return_values=True,
        return_grad_norms=True,
        microbatch_size=1 if single else None,
        prng_argnum=2,
    )
    loss_key, noise_key = jax.random.split(key)
    examples = {**batch, "mask": jnp.ones_like(batch["mask"])}  # of one example each; padding is left out below
    total, seen = clipped(params, examples, loss_key, is_padding_example=~real)
    divisor = jnp.float32(real.shape[0]) if expected is None else jnp.maximum(expected, 1)
    if noise:
        total = long_tailed.add(total, noise_key, noise * clip)
    count = jnp.maximum(jnp.sum(real), 1)
    over = real & ~(seen.grad_norms <= clip)
    measured = {"clipped_fraction": jnp.sum(over) / count}
    mean_loss = jnp.sum(jnp.where(real, seen.values, 0)) / count
    return (mean_loss, measured), jax.tree.map(lambda x: x / divisor.astype(x.dtype), total)
