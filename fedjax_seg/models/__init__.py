"""Linen modules only. MODELS is the table of contents: {name: maker}; a maker returns a linen.Module."""

from typing import Any

from fedjax_seg.core import checks
from fedjax_seg.models.attention_mil import attention_mil
from fedjax_seg.models.cnn import cnn
from fedjax_seg.models.mlp import mlp
from fedjax_seg.models.resunet3d import resunet3d
from fedjax_seg.models.unet import unet

MODELS = {
    "attention_mil": attention_mil,
    "cnn": cnn,
    "mlp": mlp,
    "resunet3d": resunet3d,
    "unet": unet,
}


def make(name: str, **options: Any) -> Any:
    """The model `name`; unknown names and options are UserErrors."""
    return checks.call(checks.lookup(MODELS, name, "model.name"), f"model {name!r}", (), options)
