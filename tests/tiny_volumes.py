"""Federations of volumes in seconds: a network of single voxels in the place of a U-Net, and what ends a run midway.

Programs with callbacks to the host are compiled anew in every run: a U-Net takes 20 s of it, two dense layers one.
"""

import os

from flax import linen as nn
from tiny_runs import ROOT

from fedjax_seg import config as configuration
from fedjax_seg import models
from fedjax_seg.data import volumes

CONFIG = ROOT / "configs" / "dp_simagg_fets.py"
SITES = ("1", "2", "3", "4")


class Voxelwise(nn.Module):
    """[B, ..., channels] -> logits of every voxel by itself; with `tracked` a running mean of the input."""

    width: int
    classes: int
    tracked: bool

    @nn.compact
    def __call__(self, x, train=False):
        if self.tracked:
            mean = self.variable("batch_stats", "mean", lambda: x.mean((0, 1, 2, 3)))
            if train:
                mean.value = 0.9 * mean.value + 0.1 * x.mean((0, 1, 2, 3))
            x = x - mean.value
        return nn.Dense(self.classes, name="head")(nn.relu(nn.Dense(self.width)(x)))


def voxelwise(*, width: int = 4, classes: int = 4, tracked: bool = False) -> Voxelwise:
    """The module, as a maker of models.MODELS."""
    return Voxelwise(width, classes, tracked)


def config(root, cache, method="simagg", **changes):
    """The config of a method on four sites of two subjects, of which every round draws two: four steps a round."""
    c = configuration.load(CONFIG, f"ci,{method}")
    c.data.root, c.data.cache, c.data.sites, c.devices = str(root), str(cache), SITES, 1
    c.data.patch = c.task.tile = (8, 8, 8)
    c.model = configuration.slot("model", "voxelwise")
    with c.unlocked():
        c.update_from_flattened_dict(changes)
    return c


def register(patch=None):
    """Puts the model into the table, for as long as `patch` (a pytest.MonkeyPatch) lasts."""
    if patch:
        patch.setitem(models.MODELS, "voxelwise", voxelwise)
    else:
        models.MODELS["voxelwise"] = voxelwise


def signalling(step, number, maker=volumes.volume_store):
    """A maker of stores for `volumes.volume_store`: the process gets a signal as it asks for its step-th patches."""
    asked = []

    def made(*args, **options):
        store = maker(*args, **options)

        def patches(*of):
            asked.append(of)
            if len(asked) == step:
                os.kill(os.getpid(), number)
            return store.patches(*of)

        return store._replace(patches=patches)

    return made


def words(root, cache, workdir, *overrides, method="simagg", config=CONFIG):
    """The command line of `config`."""
    settings = {
        "data.root": root,
        "data.cache": cache,
        "data.sites": ",".join(SITES),
        "data.patch": "8,8,8",
        "task.tile": "8,8,8",
        "model.name": "voxelwise",
        "devices": 1,
    }
    tiny = [f"--config.{key}={value}" for key, value in settings.items()]
    return ["main.py", f"--config={config}:ci,{method}", f"--workdir={workdir}", *tiny, *overrides]
