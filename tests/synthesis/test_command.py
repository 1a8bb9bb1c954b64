"""python -m fedjax_seg.synthesis: what its flags become, and one line for every mistake."""

import pytest

from fedjax_seg import data, synthesis
from fedjax_seg.synthesis import __main__ as program
from fedjax_seg.synthesis import diffusion_sampling, diffusion_training


def run(*words):
    return program.main(["synthesis", *words])


def test_write_runs_a_generator(tmp_path, capsys):
    assert run("write", "--name=connectomes", f"--out={tmp_path / 'a'}", "--seed=3") == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "a")
    right = synthesis.make("connectomes", tmp_path / "b", seed=3)
    kept = lambda root: {p.relative_to(root): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    assert kept(tmp_path / "a") == kept(right)
    assert data.make("abide", root=str(tmp_path / "a")).sites


def test_flags_take_the_types_of_the_options():
    asked = program.parse(["", "sample", "--workdir=w", "--out=o", "--clients=100,50", "--eta=1", "--steps=20"])
    assert asked.run is diffusion_sampling.ct_diffusion
    assert asked.options["clients"] == (100, 50) and asked.options["folder"] == "o"
    assert (asked.options["eta"], asked.options["steps"], asked.options["test"]) == (1.0, 20, 200)
    asked = program.parse(["", "train", "--window=-600,1500", "--clients=GE,SIEMENS", "--minutes=0.5"])
    assert asked.run is diffusion_training.train
    assert asked.options["window"] == (-600.0, 1500.0) and asked.options["clients"] == ("GE", "SIEMENS")
    assert program.parse(["", "train", "--window="]).options["window"] == ()
    assert program.parse(["", "train"]).options["window"] is None
    asked = program.parse(["", "write", "--name=ct", "--out=o", "--clients=8,4", "--size=32"])
    assert asked.options["clients"] == (8, 4) and asked.options["size"] == 32
    asked = program.parse(["", "write", "--name=connectomes", "--out=o", "--awkward"])
    assert asked.options["awkward"] is True
    asked = program.parse(["", "write", "--name=connectomes", "--out=o", "--sites=('NYU', 8),('UM', 6)"])
    assert asked.options["sites"] == (("NYU", 8), ("UM", 6))


@pytest.mark.parametrize("name", synthesis.GENERATORS)
def test_flags_left_out_are_the_defaults_of_every_generator(name):
    asked = program.parse(["", "write", f"--name={name}", "--out=o"])
    given = {k: v for k, v in asked.options.items() if k != "folder"}
    defaults = program.checks.options(synthesis.GENERATORS[name], skip={"folder", "tell"})
    assert given == defaults and all(type(v) is type(defaults[k]) for k, v in given.items())


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "command: '' given, one of 'write', 'train', 'sample' expected"),
        (("draw",), "command: 'draw' given"),
        (("write",), "--name: missing; one of connectomes, ct"),
        (("write", "--name=cts", "--out=o"), "--name: unknown name 'cts'; did you mean 'ct'?"),
        (("write", "--name=ct"), "--out: missing"),
        (("write", "--name=ct", "--out=o", "--siz=3"), "Unknown command line flag 'siz'. Did you mean: size ?"),
        (("write", "--name=ct", "--out=o", "--size=small"), "flag --size=small"),
        (("write", "--name=ct", "--out=o", "--clients=3,many"), "--clients: '3,many' given, ints with commas expected"),
        (("write", "--name=ct", "--out=o", "--size=3"), "synthesis.size: 3 given"),
        (("sample", "--workdir=w"), "--out: missing"),
        (("train", "--data=d", "more"), "'more': not a flag"),
    ],
)
def test_a_mistake_is_one_line(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*words) == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("error: ") and told.err.count("\n") == 1
    assert message in told.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words, shown",
    [
        (("--help",), "python -m fedjax_seg.synthesis train --data=DIR"),
        (("train", "--help"), "--window=None"),
        (("sample", "--help"), "--clients=200,200,200,100,100"),
        (("write", "--help"), "names: connectomes, ct"),
        (("write", "--name=ct", "--help"), "--slices_per_patient=1"),
    ],
)
def test_help(words, shown, capsys):
    with pytest.raises(SystemExit) as end:
        run(*words)
    assert end.value.code == 0 and shown in capsys.readouterr().out


def test_a_file_in_the_place_of_the_folder_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run("write", "--name=connectomes", f"--out={tmp_path / 'file'}") == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and "file" in told
