"""Tests on real data: the folder that the environment variable FEDJAX_SEG_DATA names."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real() -> Path:
    folder = os.environ.get("FEDJAX_SEG_DATA", "")
    if not folder:
        pytest.skip("FEDJAX_SEG_DATA is not set: no real data here")
    return Path(folder)
