import errno
import json
import os
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_seg.core.checks import UserError
from fedjax_seg.core.types import FederatedState
from fedjax_seg.report import checkpoint


def make_state(round=3, width=4, seed=0, layers=2):
    """Every kind of leaf a run has: NaN payloads, -0.0, bfloat16, uint32, bool, zero sizes, empty dicts, optax."""
    rng = np.random.default_rng(seed)
    params = {
        f"Dense_{i}": {"kernel": jnp.asarray(rng.standard_normal((width, 3)), jnp.float32), "bias": jnp.zeros(3)}
        for i in range(layers)
    }
    odd = np.array([0x7FC00001, 0x80000000, 0x00000001, 0x7F800000], np.uint32).view(np.float32)
    return FederatedState(
        round=jnp.int32(round),
        variables={"params": params, "batch_stats": {}},
        server_opt=optax.adam(1e-3).init(params),
        aggregator={"half": jnp.asarray(rng.standard_normal(5), jnp.bfloat16), "flags": np.array([True, False])},
        personal={"params/a.b [0]": odd, "none": np.zeros((0, 3), np.float32)},
        key=np.array([7, 2**32 - 1], np.uint32),
    )


def assert_same_bits(restored, state):
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state)):
        b = np.asarray(b)
        assert isinstance(a, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape
        assert a.tobytes() == b.tobytes()


def test_every_dtype_comes_back_bit_for_bit_with_its_meta(tmp_path):
    state = make_state()
    meta = {"position": {"metrics.csv": 72}, "eps": 0.1 + 0.2, "bound": float("inf")}
    path = checkpoint.save(tmp_path / "checkpoints", state, meta)
    assert path == tmp_path / "checkpoints" / "3" and checkpoint.latest(tmp_path / "checkpoints") == 3
    restored, back = checkpoint.restore(tmp_path / "checkpoints", make_state(round=0, seed=9))
    assert back == meta
    assert_same_bits(restored, state)
    described = json.loads((path / "fedjax_seg.json").read_text())
    assert described["format"] == 1 and described["round"] == 3
    assert ["variables/params/Dense_0/kernel", [4, 3], "float32"] in [leaf[:3] for leaf in described["leaves"]]


def test_like_may_be_shapes_only_and_the_round_may_have_replicas(tmp_path):
    state = jax.tree.map(lambda x: np.stack([x, x]), make_state(round=5))
    checkpoint.save(tmp_path, state, {})
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    assert_same_bits(checkpoint.restore(tmp_path, like)[0], state)
    with pytest.raises(ValueError, match="different rounds"):
        checkpoint.save(tmp_path, state._replace(round=np.array([5, 6])), {})


def test_relative_paths_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint.save("runs/a/checkpoints", make_state(), {})
    assert checkpoint.restore("runs/a/checkpoints", make_state())[1] == {}


def test_retention_keeps_the_newest_and_never_touches_foreign_folders(tmp_path):
    for name in ("7", "99", "notes"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "mine.txt").write_text("keep me")
    for round in (1, 2, 3):
        checkpoint.save(tmp_path, make_state(round), {}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3", "7", "99", "notes"]
    assert checkpoint.latest(tmp_path) == 3
    assert all((tmp_path / name / "mine.txt").exists() for name in ("7", "99", "notes"))
    with pytest.raises(UserError, match="7: exists and is not a checkpoint of fedjax_seg; move it"):
        checkpoint.save(tmp_path, make_state(7), {})
    assert (tmp_path / "7" / "mine.txt").exists()


def test_a_save_killed_midway_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, make_state(1), {"n": 1})

    def die(*_):
        raise KeyboardInterrupt  # nothing of save may clean up after a kill

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_publish", die)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, make_state(2), {"n": 2})
    (tmp_path / "tmp_fedjax_seg_5").mkdir()
    (tmp_path / "tmp_fedjax_seg_5" / "fedjax_seg.json").write_text("{")
    assert (tmp_path / "tmp_fedjax_seg_2" / "arrays").is_dir()
    assert checkpoint.latest(tmp_path) == 1
    assert checkpoint.restore(tmp_path, make_state())[1] == {"n": 1}
    checkpoint.save(tmp_path, make_state(2), {"n": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["2"]


def test_a_round_saved_again_is_replaced_and_never_missing(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, make_state(1), {"n": "old"})
    replace = os.replace

    def die_before_the_new_one_has_its_name(source, target):
        if str(source).endswith("tmp_fedjax_seg_1"):
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "replace", die_before_the_new_one_has_its_name)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, make_state(1), {"n": "new"})
    assert checkpoint.latest(tmp_path) == 1
    assert checkpoint.restore(tmp_path, make_state())[1] == {"n": "old"}
    checkpoint.save(tmp_path, make_state(1), {"n": "new"})
    assert checkpoint.restore(tmp_path, make_state())[1] == {"n": "new"}
    assert [p.name for p in tmp_path.iterdir()] == ["1"]


def biggest_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file() and "arrays" in p.parts), key=lambda p: p.stat().st_size)


def truncate(folder):
    for path in [p for p in (folder / "arrays").rglob("*") if p.is_file()]:
        os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(folder):
    # the largest file holds the arrays; its middle is array bytes, so orbax alone reads it without complaint
    path = biggest_file(folder)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def lose_the_arrays(folder):
    shutil.rmtree(folder / "arrays")


def cut_the_marker(folder):
    os.truncate(folder / "fedjax_seg.json", 40)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, lose_the_arrays, cut_the_marker])
def test_a_damaged_newest_checkpoint_falls_back_to_the_previous_one(tmp_path, damage):
    first, second = make_state(1, width=400), make_state(2, width=400, seed=1)
    checkpoint.save(tmp_path, first, {"n": 1}, keep=2)
    checkpoint.save(tmp_path, second, {"n": 2}, keep=2)
    damage(tmp_path / "2")
    restored, meta = checkpoint.restore(tmp_path, second)
    assert meta == {"n": 1}
    assert_same_bits(restored, first)
    # going on from round 1: the damaged future neither survives nor pushes out what was just saved
    checkpoint.save(tmp_path, make_state(2, width=400, seed=2), {"n": 3}, keep=1)
    assert checkpoint.restore(tmp_path, second)[1] == {"n": 3}


def test_a_damaged_later_round_does_not_push_out_the_new_one(tmp_path):
    checkpoint.save(tmp_path, make_state(1), {}, keep=2)
    checkpoint.save(tmp_path, make_state(5), {}, keep=2)
    lose_the_arrays(tmp_path / "5")
    checkpoint.save(tmp_path, make_state(2), {"n": 2}, keep=1)
    assert checkpoint.latest(tmp_path) == 2 and checkpoint.restore(tmp_path, make_state())[1] == {"n": 2}


def test_only_damaged_or_no_checkpoints_are_an_error_naming_the_folder(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}: no checkpoint"):
        checkpoint.restore(tmp_path, make_state())
    assert checkpoint.latest(tmp_path) is None and checkpoint.latest(tmp_path / "missing") is None
    checkpoint.save(tmp_path, make_state(), {})
    truncate(tmp_path / "3")
    with pytest.raises(UserError, match=f"{tmp_path}: every checkpoint is damaged") as caught:
        checkpoint.restore(tmp_path, make_state())
    assert "\n" not in str(caught.value)


def test_a_copy_of_the_folder_works(tmp_path):
    state = make_state()
    checkpoint.save(tmp_path / "a", state, {})
    shutil.copytree(tmp_path / "a", tmp_path / "b" / "elsewhere")
    shutil.rmtree(tmp_path / "a")
    assert_same_bits(checkpoint.restore(tmp_path / "b" / "elsewhere", state)[0], state)


def other_dtype():
    state = make_state()
    return state._replace(key=state.key.astype(np.int32))


@pytest.mark.parametrize(
    ("like", "message"),
    [
        # bias comes before kernel, and Dense_0/bias [3] is the same in both
        (
            make_state(width=8),
            r"variables/params/Dense_0/kernel is float32 \[4, 3\] in the .* float32 \[8, 3\] in this",
        ),
        (make_state(layers=3), r"variables/params/Dense_2/bias \[3\] is missing in checkpoint"),
        (make_state(layers=1), r"variables/params/Dense_1/bias \[3\] is not in this model"),
        (other_dtype(), r"key is uint32 \[2\] in the checkpoint and int32 \[2\]"),
        (make_state()._replace(server_opt={}), r"server_opt/0/count \[\] is not in this model"),
    ],
)
def test_another_model_is_an_error_naming_the_first_path(tmp_path, like, message):
    checkpoint.save(tmp_path, make_state(), {})
    with pytest.raises(UserError, match=message):
        checkpoint.restore(tmp_path, like)


def test_another_format_says_so(tmp_path):
    marker = checkpoint.save(tmp_path, make_state(), {}) / "fedjax_seg.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format": 2}))
    with pytest.raises(UserError, match="checkpoint format 2, this version reads 1"):
        checkpoint.restore(tmp_path, make_state())


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("x: No space left on y")]
)
def test_a_full_disk_is_one_line_and_keeps_the_previous_checkpoint(tmp_path, monkeypatch, error):
    checkpoint.save(tmp_path, make_state(1), {"n": 1})

    def full(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.ocp.Checkpointer, "save", full)
        with pytest.raises(UserError, match="2: no space left on the disk"):
            checkpoint.save(tmp_path, make_state(2), {"n": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["1"]
    assert checkpoint.restore(tmp_path, make_state())[1] == {"n": 1}


def test_a_disk_known_to_be_too_small_is_not_written_to(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
        patch.setattr(checkpoint.ocp.Checkpointer, "save", lambda *_: pytest.fail("orbax was asked to write"))
        with pytest.raises(UserError, match="3: no space left on the disk"):
            checkpoint.save(tmp_path, make_state(), {})
    assert not list(tmp_path.iterdir())
