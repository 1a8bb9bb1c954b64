"""Every notebook runs top to bottom, on few rounds; only the display of pictures is left to a real notebook."""

import json
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "colabs").glob("*.ipynb"))


METHODS = {"fedhavg_quickstart": "FedHAvg-ext", "fedonco_quickstart": "FedBN"}  # what each one prints at last


SLOW = ("fedonco_quickstart",)  # the run that README's first command makes as well


@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=[pytest.mark.slow] * (p.stem in SLOW), id=p.stem) for p in NOTEBOOKS]
)
def test_notebook_runs(path, ct_root, quick_compile, monkeypatch, capsys):
    shown = []
    display = types.ModuleType("IPython.display")
    display.Image, display.display = str, shown.append
    notebook = types.ModuleType("IPython")
    notebook.version_info, notebook.get_ipython = (9, 0), lambda: None  # what matplotlib asks of it
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setenv("ROUNDS", "2")
    monkeypatch.setenv("CT_ROOT", ct_root)
    monkeypatch.delenv("ABIDE_ROOT", raising=False)
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    names: dict = {"__name__": "__main__"}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "notebooks are committed without outputs"
            exec(compile("".join(cell["source"]), path.name, "exec"), names)
    printed = capsys.readouterr().out
    assert METHODS[path.stem] in printed and "report:" in printed
    assert shown and all(Path(figure).stat().st_size > 5000 for figure in shown)
