"""What a run's privacy rests on: who sees single messages (secure_sum), and what the noise is worth (accounting).

Secure sums: `smc_scalar` (scalar_shares), `chained`, `additive`, `secagg` and `secagg_plus` (secagg), as values of
core.types.SecureSum; `clusters` deals hospitals, `fixed_point` is the ring that hides. `accounting` is imported where
it is used: its library is slow to load and most runs have no mechanism.
"""

from fedjax_seg.privacy.secure_sum import SECURE_SUMS, make

__all__ = ["SECURE_SUMS", "make"]
