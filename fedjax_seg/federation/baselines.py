"""Baselines and protocols as plain transforms of the data: the engine that runs them is the same."""

from dataclasses import replace
from typing import Any

import numpy as np

from fedjax_seg.core import checks

PROTOCOLS = ("federated", "centralised", "local", "cross_site")


def arrange(data: Any, protocol: str) -> Any:
    """The data of a protocol.

    Args:
      data: FederatedData.
      protocol: 'federated': as it is. 'centralised': one client 'pooled' holds every site's training cases; tests stay
        per site (K + 1 clients, only the last one trains). 'local': per split and site, a model trained on that
        site's training cases alone and tested on its own test cases and those of external sites. 'cross_site': a model
        per site, trained on all its cases and tested on all cases of the others (FedHAvg, Table 2).

    External sites never train.
    """
    checks.one_of("protocol", protocol, PROTOCOLS)
    if protocol == "centralised":
        return _centralised(data)
    if protocol == "local":
        return _local(data)
    if protocol == "cross_site":
        return _cross_site(data)
    return data


def _only(parts: tuple[np.ndarray, ...], k: int) -> tuple[np.ndarray, ...]:
    return tuple(p if i == k else p[:0] for i, p in enumerate(parts))


def _centralised(data: Any) -> Any:
    splits = tuple(
        s._replace(
            train=(*(p[:0] for p in s.train), np.concatenate(s.train)), test=(*s.test, np.zeros(0, s.test[0].dtype))
        )
        for s in data.splits
    )
    return replace(data, sites=(*data.sites, "pooled_training"), splits=splits)


def _local(data: Any) -> Any:
    inside = len(data.sites) - len(data.external)
    splits = tuple(
        s._replace(
            name=f"{s.name}_{data.sites[k]}",
            train=_only(s.train, k),
            test=(*_only(s.test[:inside], k), *s.test[inside:]),
        )
        for s in data.splits
        for k in range(inside)
    )
    return replace(data, splits=splits)


def _cross_site(data: Any) -> Any:
    used = np.setdiff1d(np.arange(len(data.site_of)), data.aside)
    everyone = tuple(used[data.site_of[used] == k] for k in range(len(data.sites)))
    nobody = everyone[0][:0]
    splits = tuple(
        type(data.splits[0])(
            f"train_{site}",
            _only(everyone, k),
            tuple(nobody if i == k else cases for i, cases in enumerate(everyone)),
        )
        for k, site in enumerate(data.sites)
        if site not in data.external
    )
    return replace(data, splits=splits)
