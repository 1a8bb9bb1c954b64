"""Selection of clients by the divergence of their updates: the one sampler that remembers.

The rule is ours. DP-SimAgg (section V, limitations) names "adaptive selection based on update divergence" as future
work and gives no rule.

Who is chosen depends on private updates, and the choice is seen by everybody who sees a cohort. So no differential
privacy mechanism may be combined with it, and no amplification is claimed (q None).
"""

import jax
import jax.numpy as jnp

from fedjax_seg.core.types import Array, Cohort, Memory, Tree

_STREAM = 0x2B7E1516  # keeps these draws apart from the other samplers'


def by_divergence(clients: int, size: int, temperature: float, explore: float) -> Memory:
    """`size` clients without replacement: those not seen yet first, in random order, then by weight.

    The weight of client k is p_k = (1 - explore) d_k^(1/temperature) / sum_j d_j^(1/temperature) + explore / K, where
    d_k is the norm of its last update. Places are filled one after the other, each with one of the clients that are
    left, in proportion to p: the largest log p_k + Gumbel noise. Every client has p_k >= explore / K, so that nobody
    is forgotten; a client that was drawn and returned nothing usable (no training case, a non-finite update) has been
    seen and keeps the divergence that it had, 0 at first.

    Norms that differ in their last bits, as those of other lanes or devices do, could in principle swap two clients
    that are equal to that precision.

    Args:
      clients: K.
      size: in [1, K].
      temperature: > 0.
      explore: in (0, 1].

    Returns: a Memory of {'seen': bool [K], 'divergence': float32 [K]}.
    """

    def init() -> Tree:
        return {"seen": jnp.zeros(clients, bool), "divergence": jnp.zeros(clients, jnp.float32)}

    def sample(key: Array, round: Array, memory: Tree) -> Cohort:
        moved = jnp.maximum(memory["divergence"], jnp.finfo(jnp.float32).tiny)
        weight = (1 - explore) * jax.nn.softmax(jnp.log(moved) / temperature) + explore / clients
        noise = jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(key, _STREAM), round), (clients,))
        order = jnp.lexsort((-(jnp.log(weight) + noise), memory["seen"]))
        chosen = jnp.sort(order[:size]).astype(jnp.int32)
        return Cohort(chosen, jnp.ones(size, bool))

    def observe(memory: Tree, cohort: Cohort, divergence: Array, ok: Array) -> Tree:
        nobody = jnp.asarray(clients, jnp.int32)  # out of range: its writes are dropped
        drawn = jnp.where(cohort.present, cohort.clients, nobody)
        counted = jnp.where(cohort.present & ok, cohort.clients, nobody)
        return {
            "seen": memory["seen"].at[drawn].set(True, mode="drop"),
            "divergence": memory["divergence"].at[counted].set(divergence.astype(jnp.float32), mode="drop"),
        }

    return Memory(init, sample, observe)
