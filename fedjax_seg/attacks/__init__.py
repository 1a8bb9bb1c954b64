"""Attacks on what a run has learned. ATTACKS is the table of contents: {name: maker}; 'none' gives None."""

from typing import Any

from fedjax_seg.attacks.inversion import Inversion, inversion
from fedjax_seg.attacks.membership import Membership, membership
from fedjax_seg.attacks.share_leakage import ShareLeakage, share_leakage
from fedjax_seg.core import checks


def none() -> None:
    """No attack."""


ATTACKS = {
    "none": none,
    "inversion": inversion,
    "membership": membership,
    "share_leakage": share_leakage,
}


def make(name: str, **options: Any) -> Inversion | Membership | ShareLeakage | None:
    """The attack of that name, None for 'none'; an unknown name, option or value is a UserError."""
    return checks.call(checks.lookup(ATTACKS, name, "attack.name"), f"attack {name!r}", (), options)
