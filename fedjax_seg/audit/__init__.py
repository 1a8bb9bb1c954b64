"""Audits: how far one client moves an aggregate, and what its noise is worth, against what is proven.

    python -m fedjax_seg.audit --mechanism=NAME --n=6 --dim=50 --clip=1

`audit_mechanism` takes a registered name (mechanisms.MECHANISMS) or any Aggregator; `sensitivity` is the search alone.
"""

from fedjax_seg.audit.audited import Audited, of_aggregator
from fedjax_seg.audit.mechanism_audit import Findings, audit_mechanism
from fedjax_seg.audit.mechanisms import MECHANISMS
from fedjax_seg.privacy.audit import rule_of, sensitivity

__all__ = ["MECHANISMS", "Audited", "Findings", "audit_mechanism", "of_aggregator", "rule_of", "sensitivity"]
