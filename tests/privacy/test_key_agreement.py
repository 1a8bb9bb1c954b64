"""The real cryptography: published vectors, sizes of messages, what a client refuses, and the same sums to the bit."""

import functools
import importlib.util
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import Cohort
from fedjax_seg.privacy import key_agreement, secagg

MISSING = importlib.util.find_spec("cryptography") is None
needs_cryptography = pytest.mark.skipif(
    MISSING, reason="cryptography is not installed: pip install 'fedjax-seg[secure]'"
)
MASTER = bytes(range(32))
SHARES = np.arange(2 * key_agreement.LIMBS, dtype=np.uint32) + 1
PLACES = 7


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(UserError) as error:
        secagg.secagg(clients=3, places=3, most=1.0, prg="aes_ctr")
    assert "prg: 'aes_ctr' given" in str(error.value) and "pip install 'fedjax-seg[secure]'" in str(error.value)
    assert "\n" not in str(error.value)


@needs_cryptography
@pytest.mark.parametrize(
    "prg, first",
    [
        ("chacha20", "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"),  # RFC 8439, A.1, vector 1
        (
            "aes_ctr",
            "dc95c078a2408989ad48a21492842087",
        ),  # AES-256 of the zero block under the zero key (GCM spec, case 14's H)
    ],
)
def test_published_keystreams(prg, first):
    words = key_agreement.keystream(prg, bytes(32), 1001)
    assert words.dtype == np.uint32 and words.shape == (1001,)
    assert words.astype("<u4").tobytes().hex().startswith(first)


def parties(*clients):
    own = [key_agreement.party(MASTER, b"round", client) for client in clients]
    return own, [key_agreement.published(key_agreement.publish(party)) for party in own]


@needs_cryptography
def test_pairs_agree_and_nobody_else_does():
    (a, b, _), (to_a, to_b, to_c) = parties(4, 9, 1)
    keys = {key_agreement.pair_key(*pair) for pair in ((a, to_b), (a, to_c), (b, to_c))}
    assert len(keys) == 3
    assert key_agreement.pair_key(b, to_a) == key_agreement.pair_key(a, to_b)
    later = key_agreement.party(MASTER, b"later", 4)
    fields = [later.mask_key, later.channel_key, later.seed, later.randomness]
    assert len({*fields, a.mask_key, a.channel_key, a.seed, a.randomness, b.seed}) == 9


@needs_cryptography
def test_only_the_receiver_opens_a_packet_and_nobody_changes_it():
    from cryptography.exceptions import InvalidTag

    (a, b, c), (to_a, to_b, _) = parties(4, 9, 1)
    packet = key_agreement.lock(a, to_b, SHARES)
    np.testing.assert_array_equal(key_agreement.unlock(b, to_a, packet), SHARES)
    assert SHARES.astype("<u4").tobytes()[:16] not in packet
    # Both directions of a channel have keys of their own: a nonce is used once.
    there, back = packet[8:], key_agreement.lock(b, to_a, SHARES)[8:]
    assert there != back
    for reader, changed in ((c, packet), (b, packet[:-1] + bytes([packet[-1] ^ 1])), (b, b"\1" + packet[1:])):
        with pytest.raises(InvalidTag):
            key_agreement.unlock(reader, to_a, changed)


def test_a_client_never_reveals_both_secrets_nor_to_too_few():
    held = {1: SHARES, 2: SHARES + 100, 3: SHARES + 200}
    answers = key_agreement.reveal(held, {1, 3}, {2, 8}, 2)
    assert set(answers) == {1, 2, 3}
    for owner, answer in answers.items():
        of_key, part = key_agreement.revealed(answer)
        assert of_key == (owner == 2)
        np.testing.assert_array_equal(part, held[owner][:9] if of_key else held[owner][9:])
    with pytest.raises(ValueError, match="both secrets of client 2 asked for"):
        key_agreement.reveal(held, {1, 2, 3}, {2}, 2)
    with pytest.raises(ValueError, match="1 clients of the neighbourhood arrived, 2 expected"):
        key_agreement.reveal(held, {1}, {2, 3}, 2)


@needs_cryptography
def test_the_sizes_of_the_messages():
    """By hand: id + 2 keys of 32; two ids, nonce 12, 2 * 9 words, tag 16; id, kind, 9 words. Beside about 450."""
    sizes = key_agreement.message_sizes()
    assert (sizes["public_keys"], sizes["packet"], sizes["answer"]) == (4 + 64, 8 + 12 + 72 + 16, 5 + 36)
    assert 450 / 2 < sizes["pair"] < 450 and sizes["pair"] == 68 + 2 * 108 + 41


def rows():
    rng = np.random.default_rng(0)
    return {
        "x": jnp.asarray(rng.normal(size=(PLACES, 11)), jnp.float32),
        "p": jnp.asarray(rng.random(PLACES), jnp.float32),
    }


MAKERS = {"secagg": secagg.secagg, "secagg_plus": functools.partial(secagg.secagg_plus, neighbours=4)}


@functools.cache
def program(maker, prg, copy=0):
    """(out [3, C]: absent, gone, late) -> (sum, failed, uploads) of a round; every copy has its own master secret."""
    secure = MAKERS[maker](clients=20, places=PLACES, most=1.0, prg=prg)

    def run(out):
        place = jnp.arange(PLACES)
        meeting = secure.meet(Cohort(place * 5 % 11 + 2, ~out[0]), ~out[1], jax.random.key(8))
        uploads = jax.vmap(secure.seal, (0, 0, None))(rows(), place, meeting)[0]  # in lanes
        keep = lambda u: jnp.where((meeting.counts & ~out[2]).reshape(-1, *[1] * (u.ndim - 1)), u, jnp.uint32(0))
        total = jax.tree.map(lambda u: jnp.sum(keep(u), 0, dtype=jnp.uint32), uploads)
        return *secure.open(total, meeting, meeting.counts & ~out[2]), uploads

    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


def played(maker, prg, copy=0, out=((0,), (6,), (3,))):
    return jax.block_until_ready(program(maker, prg, copy)(jnp.array([np.isin(np.arange(PLACES), o) for o in out])))


@needs_cryptography
@pytest.mark.parametrize(
    "maker, prg, copy", [("secagg", "chacha20", 0), ("secagg", "chacha20", 1), ("secagg_plus", "aes_ctr", 0)]
)
def test_the_sum_is_that_of_the_simulated_masks_to_the_bit(maker, prg, copy):
    total, failed, uploads = played("secagg", "threefry")
    real_total, real_failed, real_uploads = played(maker, prg, copy)
    assert not failed and not real_failed and np.any(total["x"])
    jax.tree.map(np.testing.assert_array_equal, real_total, total)
    others = [uploads] + ([played(maker, prg, 0)[2]] if copy else [])  # another master secret: other masks
    for other in others:
        assert not np.any(np.asarray(real_uploads["x"])[1:] == np.asarray(other["x"])[1:])  # row 0 never joined
    facts = json.loads(json.dumps(MAKERS[maker](clients=20, places=PLACES, most=1.0, prg=prg).facts))
    assert facts["grade"].startswith("real cryptography") and "simulation grade" not in " ".join(facts["threat"])


@needs_cryptography
def test_below_the_threshold_no_client_is_asked(monkeypatch):
    asked = []
    true = key_agreement.reveal
    monkeypatch.setattr(key_agreement, "reveal", lambda *args: asked.append(args) or true(*args))
    total, failed, _ = played("secagg", "chacha20", out=((0,), (6,), (4, 5)))  # 3 of 6, 4 needed
    assert failed and not np.any(total["x"]) and not asked
    assert not played("secagg", "chacha20")[1] and len(asked) == 4


@needs_cryptography
@pytest.mark.parametrize("part", [0, 1], ids=["mask key", "seed"])
def test_a_wrong_secret_is_a_wrong_sum(part, monkeypatch):
    """8 is the lowest bit that X25519 reads."""
    right, calls = played("secagg", "chacha20")[0], []
    true = key_agreement.shamir.from_limbs

    def wrong(words, size):  # the seeds of the four that arrived come first
        calls.append(words)
        return true(words + np.uint32(8) * (np.arange(9) == 0) * ((len(calls) <= 4) == part), size)

    monkeypatch.setattr(key_agreement.shamir, "from_limbs", wrong)
    assert np.all(np.asarray(played("secagg", "chacha20")[0]["x"]) != np.asarray(right["x"])) and len(calls) == 6
