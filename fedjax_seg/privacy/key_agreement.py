"""Masks of a secure sum from real cryptography: X25519, HKDF-SHA256, ChaCha20 or AES-256-CTR, AES-256-GCM.

The messages between clients and server are the true bytes; who reads them is one process. Functions of the host are
pure: the secrets of a client are derived from a master secret (of the operating system, drawn when a run is built), the
meeting's key and the client's id, so that a callback needs no state, no order and no lock. A meeting's key names the
round, and serves one meeting only: with one key, two meetings would have the same masks.

Needs the package `cryptography` (extra [secure]), imported inside functions only.
"""

import os
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.core.types import Array, Meeting
from fedjax_seg.privacy import field31, shamir
from fedjax_seg.privacy.neighbourhood import Masks, Request, holders, least
from fedjax_seg.privacy.threefry_masks import point_of

CIPHERS = ("chacha20", "aes_ctr")
BYTES = 32  # of every secret
LIMBS = len(shamir.limbs(bytes(BYTES)))  # 9
_NONCE = 12
_ROUTE = struct.Struct("<II")  # sender, receiver: what the server needs to pass a packet on


class Party(NamedTuple):
    """The secrets of one client in one round, 32 bytes each.

    Attributes:
      client: its id.
      name: bytes that name the round.
      mask_key: X25519 private key of its pair masks; shared out, since it is asked for when the client drops out.
      channel_key: X25519 private key for what goes to other clients; never leaves the client.
      seed: of its self mask; shared out, asked for when its upload arrives.
      randomness: of its polynomials; never leaves the client.
    """

    client: int
    name: bytes
    mask_key: bytes
    channel_key: bytes
    seed: bytes
    randomness: bytes


class Public(NamedTuple):
    """What a client publishes: its id and two X25519 public keys."""

    client: int
    mask_key: bytes
    channel_key: bytes


def require(what: str, prg: str) -> None:
    """Raises: UserError where the package is missing."""
    try:
        import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401
    except ImportError:
        raise checks.UserError(
            f"{what}: prg: {prg!r} given, but the package 'cryptography' is not installed: pip install"
            " 'fedjax-seg[secure]', or use prg=threefry (simulation grade)"
        ) from None


def grade(prg: str) -> str:
    """For reports."""
    cipher = {"chacha20": "ChaCha20", "aes_ctr": "AES-256-CTR"}[prg]
    return f"real cryptography: X25519, HKDF-SHA256, {cipher}, AES-256-GCM; secrets from the operating system"


# The steps of a client.


def party(master: bytes, name: bytes, client: int) -> Party:
    """A client's secrets of the round `name`."""
    derive = lambda purpose: _derived(master, name, purpose, client)
    return Party(client, name, derive(b"mask key"), derive(b"channel key"), derive(b"seed"), derive(b"polynomials"))


def publish(own: Party) -> bytes:
    """Round 0: the client's id and public keys, 68 bytes."""
    return struct.pack("<I", own.client) + _public(own.mask_key) + _public(own.channel_key)


def published(message: bytes) -> Public:
    return Public(struct.unpack_from("<I", message)[0], message[4:36], message[36:68])


def pair_key(own: Party, other: Public) -> bytes:
    """The key of the mask that two clients share."""
    return _agreed(own.mask_key, other.mask_key, own.name, b"pair mask", own.client, other.client)


def lock(own: Party, receiver: Public, shares: np.ndarray) -> bytes:
    """Round 1: the shares of the mask key and the seed for one other client, sealed: 108 bytes.

    shares: uint32 [2 LIMBS]. The nonce is 0: a channel's key is used once in each direction, and has its own for each.
    """
    key = _channel(own, receiver, own.client, receiver.client)
    route = _ROUTE.pack(own.client, receiver.client)
    return route + bytes(_NONCE) + _gcm(key).encrypt(bytes(_NONCE), shares.astype("<u4").tobytes(), route + own.name)


def unlock(own: Party, sender: Public, packet: bytes) -> np.ndarray:
    """The shares in a packet, uint32 [2 LIMBS]. Raises: cryptography's InvalidTag where anything was changed."""
    route, nonce, sealed = packet[: _ROUTE.size], packet[_ROUTE.size :][:_NONCE], packet[_ROUTE.size + _NONCE :]
    key = _channel(own, sender, sender.client, own.client)
    return np.frombuffer(_gcm(key).decrypt(nonce, sealed, route + own.name), "<u4")


def reveal(held: Mapping[int, np.ndarray], seeds: set[int], keys: set[int], threshold: int) -> dict[int, bytes]:
    """Round 4: the client's answer to the server, 41 bytes for every owner asked for.

    Args:
      held: {owner: uint32 [2 LIMBS]}, the shares it holds.
      seeds: owners whose upload arrived, as the server says; keys: owners whose upload did not.
      threshold: t of this client's neighbourhood.

    Raises: ValueError where both secrets of one client are asked for, or fewer than t of the neighbourhood arrived.
    """
    both = sorted(seeds & keys)
    if both:
        raise ValueError(f"both secrets of client {both[0]} asked for, one at most is revealed")
    alive = len(seeds & set(held))
    if alive < threshold:
        raise ValueError(f"{alive} clients of the neighbourhood arrived, {threshold} expected: nothing is revealed")
    parts = {o: held[o][:LIMBS] for o in keys & set(held)} | {o: held[o][LIMBS:] for o in seeds & set(held)}
    return {o: struct.pack("<IB", o, o in keys) + part.astype("<u4").tobytes() for o, part in parts.items()}


def revealed(answer: bytes) -> tuple[bool, np.ndarray]:
    """(whether it is of the mask key, uint32 [LIMBS])."""
    return bool(answer[4]), np.frombuffer(answer, "<u4", offset=5)


def keystream(prg: str, key: bytes, size: int) -> np.ndarray:
    """uint32 [size], the cipher's stream as little-endian words. The nonce is 0: a key is used for one stream."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    cipher = (
        Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None)
        if prg == "chacha20"
        else Cipher(algorithms.AES256(key), modes.CTR(bytes(16)))
    )
    return np.frombuffer(cipher.encryptor().update(bytes(4 * size)), "<u4")


def message_sizes() -> dict[str, int]:
    """Bytes of the protocol's messages, of messages that are made here, not of a formula.

    Returns: 'public_keys' (client to server; the server passes them on to every neighbour), 'packet' (the sealed shares
      of both secrets, client to server to client), 'answer' (one share that is revealed); 'pair': what a client causes
      for each of its neighbours: keys passed on, a packet up and down, an answer.
    """
    first, second = (party(bytes(BYTES), b"size", client) for client in (0, 1))
    keys = publish(first)
    packet = lock(first, published(publish(second)), np.zeros(2 * LIMBS, np.uint32))
    answer = reveal({0: np.zeros(2 * LIMBS, np.uint32)}, {0}, set(), 1)[0]
    sizes = {"public_keys": len(keys), "packet": len(packet), "answer": len(answer)}
    return sizes | {"pair": len(keys) + 2 * len(packet) + len(answer)}


# The same inside jit: three callbacks, between which shares are made and put together by `shamir`.


def masks(what: str, prg: str, table: np.ndarray) -> Masks:
    """Masks whose secrets come from the operating system; they differ from run to run, the sums do not.

    Args:
      table: int32 [H + 1], the threshold by the number of holders.
    """
    require(what, prg)
    master, most = os.urandom(BYTES), len(table) - 1

    def of(meeting: Meeting, row: Array, size: int) -> Array:
        return _host(lambda *seen: _mask(master, prg, size, *seen), (size,), *_known(meeting), meeting.links, row)

    def left(meeting: Meeting, request: Request, size: int) -> Array:
        known, count = _known(meeting), meeting.clients.shape[0]
        other, real = holders(meeting, most)
        points, needed = point_of(meeting.clients)[other], least(meeting, table)
        dealt = _host(lambda *seen: _deal(master, prg, most, *seen), (count, most, 2 * LIMBS), *known)
        shares = jax.vmap(shamir.share)(dealt[:, 1:], dealt[:, 0], needed, points)
        kept = (shares, other, real, needed)
        shown = _host(lambda *seen: _exchange(master, *seen), shares.shape, *known, *kept, *request)
        found = jax.vmap(shamir.reconstruct)(points, shown, real & request.arrived[other])
        return _host(lambda *seen: _unmask(master, prg, size, *seen), (size,), *known, meeting.links, found, *request)

    return Masks(of, left)


def _host(compute: Any, shape: tuple[int, ...], *seen: Array) -> Array:
    """uint32 [shape] of a function of the host; one call at a time for lanes and replicas."""
    spec = jax.ShapeDtypeStruct(shape, np.uint32)
    call = lambda *args: np.ascontiguousarray(compute(*map(np.asarray, args)), np.uint32)
    return jax.pure_callback(call, spec, *seen, vmap_method="sequential")


def _known(meeting: Meeting) -> tuple[Array, Array, Array]:
    return jax.random.key_data(meeting.key), meeting.clients, meeting.joined


def _parties(master: bytes, name: Any, clients: Any, joined: Any) -> tuple[dict[int, Party], dict[int, Public]]:
    """{row: ...} of the joined rows."""
    parties = {int(row): party(master, name.tobytes(), int(clients[row])) for row in np.flatnonzero(joined)}
    return parties, {row: published(publish(own)) for row, own in parties.items()}


def _mask(master: bytes, prg: str, size: int, name: Any, clients: Any, joined: Any, links: Any, row: Any) -> np.ndarray:
    """Round 2: what the client of a row adds to its message."""
    if not joined[row]:
        return np.zeros(size, np.uint32)
    own = party(master, name.tobytes(), int(clients[row]))
    total = keystream(prg, own.seed, size).copy()
    for other in np.flatnonzero(links[row]):
        public = published(publish(party(master, own.name, int(clients[other]))))
        _accumulate(total, keystream(prg, pair_key(own, public), size), own.client < public.client)
    return total


def _deal(master: bytes, prg: str, most: int, name: Any, clients: Any, joined: Any) -> np.ndarray:
    """Of every row its secrets as limbs, and the coefficients of their polynomials below: uint32 [C, H, 2 LIMBS]."""
    out = np.zeros((len(clients), most, 2 * LIMBS), np.uint32)
    for row, own in _parties(master, name, clients, joined)[0].items():
        out[row, 0] = np.concatenate([shamir.limbs(own.mask_key), shamir.limbs(own.seed)])
        wide = keystream(prg, own.randomness, 4 * LIMBS * (most - 1)).view("<u8")  # 64 bits: uniform but for 2^-33
        out[row, 1:] = (wide % field31.P).reshape(most - 1, 2 * LIMBS)
    return out


def _exchange(
    master: bytes, name: Any, clients: Any, joined: Any, shares: Any, other: Any, real: Any, needed: Any, *request: Any
) -> np.ndarray:
    """Shares travel sealed to their holders; those that arrived answer the server. Returns the answers, as `shares`."""
    shown, (seeds, keys, arrived) = np.zeros_like(shares), request
    parties, public = _parties(master, name, clients, joined)
    for holder in np.flatnonzero(arrived).tolist():
        held: dict[int, np.ndarray] = {}
        slots: dict[int, tuple[int, int]] = {}
        for owner in other[holder][real[holder]].tolist():  # links are symmetric
            slot = int(np.flatnonzero((other[owner] == holder) & real[owner])[0])
            share, owner_id = shares[owner, slot], public[owner].client
            if owner != holder:
                share = unlock(parties[holder], public[owner], lock(parties[owner], public[holder], share))
            held[owner_id], slots[owner_id] = share, (owner, slot)
        asked = [set(clients[rows].tolist()) for rows in (seeds, keys)]
        for owner_id, answer in reveal(held, asked[0], asked[1], int(needed[holder])).items():
            of_key, part = revealed(answer)
            shown[slots[owner_id]][slice(0, LIMBS) if of_key else slice(LIMBS, None)] = part
    return shown


def _unmask(
    master: bytes, prg: str, size: int, name: Any, clients: Any, joined: Any, links: Any, found: Any, *request: Any
) -> np.ndarray:
    """The masks that are left in the sum, from secrets put together from shares and from public keys."""
    seeds, keys, arrived = request
    total = np.zeros(size, np.uint32)
    for row in np.flatnonzero(seeds):
        _accumulate(total, keystream(prg, shamir.from_limbs(found[row, LIMBS:], BYTES), size), True)
    public = _parties(master, name, clients, arrived if keys.any() else keys)[1]
    for row in np.flatnonzero(keys):
        secret = shamir.from_limbs(found[row, :LIMBS], BYTES)
        gone = Party(int(clients[row]), name.tobytes(), secret, b"", b"", b"")
        for other in np.flatnonzero(links[row] & arrived).tolist():
            stream = keystream(prg, pair_key(gone, public[other]), size)
            _accumulate(total, stream, public[other].client < gone.client)
    return total


def _accumulate(total: np.ndarray, stream: np.ndarray, positive: bool) -> None:
    (np.add if positive else np.subtract)(total, stream, out=total)


def _channel(own: Party, other: Public, sender: int, receiver: int) -> bytes:
    """The key of the packet from one client to another."""
    purpose = b"shares up" if sender < receiver else b"shares down"
    return _agreed(own.channel_key, other.channel_key, own.name, purpose, sender, receiver)


def _derived(secret: bytes, name: bytes, purpose: bytes, *clients: int) -> bytes:
    """HKDF-SHA256; the info is the round, the purpose and the ids of the clients, in ascending order."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    ids = struct.pack(f"<{len(clients)}I", *sorted(clients))
    info = b"".join(struct.pack("<I", len(part)) + part for part in (name, purpose, ids))
    return HKDF(SHA256(), BYTES, None, info).derive(secret)


def _public(private: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def _agreed(private: bytes, public: bytes, name: bytes, purpose: bytes, *clients: int) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    return _derived(secret, name, purpose, *clients)


def _gcm(key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)
