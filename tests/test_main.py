"""The command line: every mistake is one line and exit status 1, before anything is read, compiled or written."""

import subprocess
import sys

import pytest
import tiny_runs
from tiny_runs import QUICKSTART, ROOT, call, one_line

from fedjax_seg import config as configuration
from fedjax_seg import main, same_run
from fedjax_seg.core.checks import UserError

C = f"--config={QUICKSTART}"
FEDHAVG = f"--config={ROOT / 'configs' / 'fedhavg_abide.py'}"

# (words after --workdir, what the line must say)
MISTAKES = {
    "no config": ([], ["--config: missing", "usage:"]),
    "flag typo": ([C, "--chek_data"], ["chek_data", "Did you mean: check_data"]),
    "config without value": (["--config"], ["--config: no file given"]),
    "config twice": ([C, C], ["given twice"]),
    "config missing": (["--config=configs/nothing.py"], ["configs/nothing.py", "no such file"]),
    "config is a folder": ([f"--config={ROOT}"], [str(ROOT), "no such file"]),
    "words not taken": ([f"{C}:paper"], ["takes no words", "'paper'"]),
    "unknown word": ([f"{FEDHAVG}:papre,ext"], ["'papre'", "did you mean 'paper'"]),
    "override first": (["--config.rounds=2", C], ["--config.rounds=2", "before its overrides"]),
    "positional": ([C, "junk"], ["'junk'", "not a flag"]),
    "positional first": (["junk", C], ["'junk'", "not a flag"]),
    "unknown key": ([C, "--config.round=2"], ["unknown key round;", "did you mean 'rounds'"]),
    "unknown group": ([C, "--config.clinet.lr=1"], ["unknown key clinet;", "did you mean 'client'"]),
    "unknown key in a slot": ([C, "--config.client.lrr=1"], ["unknown key client.lrr;", "did you mean 'lr'"]),
    "a slot as a value": ([C, "--config.client=1"], ["group of keys", "client.lr"]),
    "a value as a slot": ([C, "--config.rounds.x=1"], ["rounds is a value"]),
    "float for int": ([C, "--config.rounds=5.0"], ["--config.rounds=5.0", "type int"]),
    "text for float": ([C, "--config.client.lr=fast"], ["--config.client.lr=fast", "type float"]),
    "text for bool": ([C, "--config.require_gpu=maybe"], ["--config.require_gpu=maybe", "type bool"]),
    "no tuple": ([C, "--config.seeds=1 2"], ["--config.seeds=1 2", "type tuple"]),
    "no value": ([C, "--config.rounds"], ["Missing value", "--config.rounds"]),
    "rounds=0": ([C, "--config.rounds=0"], ["config.rounds: 0 given", "integer"]),
    "lr=nan": ([C, "--config.client.lr=nan"], ["config.client.lr: nan given", "finite"]),
    "lr=inf": ([C, "--config.client.lr=inf"], ["config.client.lr: inf given", "finite"]),
    "seed below 0": ([C, "--config.seeds=(-1,)"], ["config.seeds: -1 given"]),
    "no seed": ([C, "--config.seeds=()"], ["config.seeds: () given", "at least one seed"]),
    "seed no integer": ([C, "--config.seeds=(0.5,)"], ["config.seeds: 0.5 given", "an integer"]),
    "seeds twice": ([C, "--config.seeds=1,1"], ["config.seeds: (1, 1)", "distinct"]),
    "negative batch": ([C, "--config.batch_size", "-3"], ["config.batch_size: -3"]),
    "devices below 0": ([C, "--config.devices=-1"], ["config.devices: -1"]),
    "unknown mode": ([C, "--config.on_empty=go"], ["config.on_empty: 'go'", "'stop', 'skip'"]),
    "unknown protocol": ([C, "--config.protocol=fed"], ["config.protocol: 'fed'", "'cross_site'"]),
    "unknown corruption": ([C, "--config.corruption.kind=flip"], ["'flip'", "'label_flip'"]),
    "unknown aggregator": ([C, "--config.aggregator.name=medain"], ["'medain'", "did you mean 'median'"]),
    "unknown sampler": ([C, "--config.sampler.name=unifrom"], ["'unifrom'", "did you mean 'uniform'"]),
    "unknown model": ([C, "--config.model.name=mpl"], ["'mpl'", "did you mean 'mlp'"]),
    "unknown data": ([C, "--config.data.name=abdie"], ["'abdie'", "did you mean 'abide'"]),
    "unknown server": ([C, "--config.server.name=adma"], ["'adma'", "did you mean 'adam'"]),
    "option of another rule": ([C, "--config.aggregator.tie=mean"], ["unknown key aggregator.tie"]),
    "flagfile missing": (["--flagfile=nowhere.txt"], ["--flagfile", "nowhere.txt"]),
    "flagfile without value": ([C, "--flagfile"], ["--flagfile"]),
}


@pytest.mark.parametrize("given, said", MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_one_line(given, said, tmp_path, capsys):
    assert call(["main.py", *given[:1], f"--workdir={tmp_path / 'run'}", *given[1:]]) == 1
    line = one_line(capsys.readouterr().err)
    assert all(text in line for text in said), line
    assert not (tmp_path / "run").exists()


def test_workdir_is_required(capsys):
    assert call(["main.py", C]) == 1
    assert one_line(capsys.readouterr().err).startswith("--workdir: missing")


CONFIGS = {
    "syntax": ("def get_config(:\n    pass\n", ["line 1", "invalid syntax"]),
    "exception": ("def get_config():\n    x = 1\n    return x / 0\n", ["line 3", "ZeroDivisionError"]),
    "import": ("import nothing_of_that_name\n", ["line 1", "nothing_of_that_name"]),
    "no get_config": ("x = 1\n", ["no function get_config"]),
    "needs words": ("def get_config(words):\n    pass\n", ["needs words"]),
    "returns nothing": ("def get_config():\n    pass\n", ["returns NoneType", "ConfigDict"]),
    "bad option": (
        "from fedjax_seg.config import slot\ndef get_config():\n    return slot('aggregator', 'median', tei='mean')\n",
        ["unknown option 'tei'", "did you mean 'tie'"],
    ),
    "bad type": (
        "from fedjax_seg import config\ndef get_config():\n    return config.slot('client', 'local_sgd', lr='fast')\n",
        ["config.client.lr: 'fast' given", "float"],
    ),
    "no slots": (
        "from fedjax_seg import config\ndef get_config():\n    return config.base()\n",
        ["config.data: missing"],
    ),
    "unread key": (
        "from fedjax_seg import config\ndef get_config():\n    c = config.load({quickstart!r})\n"
        "    c.learning_rate = 1.0\n    return c\n",
        ["config.learning_rate: nothing reads this key"],
    ),
    "missing key": (
        "from fedjax_seg import config\ndef get_config():\n    c = config.load({quickstart!r})\n"
        "    del c.lanes\n    return c\n",
        ["config.lanes: missing"],
    ),
}


@pytest.mark.parametrize("text, said", CONFIGS.values(), ids=CONFIGS)
def test_faulty_config_file_is_one_line(text, said, tmp_path, capsys):
    file = tmp_path / "own.py"
    file.write_text(text.replace("{quickstart!r}", repr(QUICKSTART)))
    assert call(["main.py", f"--config={file}", f"--workdir={tmp_path / 'run'}"]) == 1
    line = one_line(capsys.readouterr().err)
    assert all(part in line for part in said), line


def test_config_must_be_python(tmp_path, capsys):
    (tmp_path / "own.txt").write_text("rounds = 3")
    assert call(["main.py", f"--config={tmp_path / 'own.txt'}", "--workdir=run"]) == 1
    assert "must end in .py" in one_line(capsys.readouterr().err)


def test_help_lists_flags_and_keys(capsys):
    with pytest.raises(SystemExit) as stopped:
        call(["main.py", "--help"])
    out = capsys.readouterr().out
    assert stopped.value.code == 0
    for flag in ("--config", "--workdir", "--check_data", "--traceback", "--flagfile"):
        assert f"\n  {flag}" in out
    for key in configuration.flat(configuration.base()):
        assert f"--config.{key}=" in out
    for room, table in configuration.ROOMS.items():
        for name in table:
            assert f"--config.{room}.name={name}:" in out


def test_help_with_a_config_lists_its_keys(capsys):
    with pytest.raises(SystemExit) as stopped:
        call(["main.py", C, "--help"])
    assert stopped.value.code == 0
    assert "--config.synthesis.class_effect=0.45\n" in capsys.readouterr().out


def parsed(*words):
    return main.parse(["main.py", *words], "")


@pytest.mark.parametrize("form", [[C], ["--config", QUICKSTART], ["-config", QUICKSTART]])
def test_forms_of_a_flag(form):
    asked = parsed(*form, "--workdir", "runs/a", "--config.rounds", "7", "--config.require_gpu", "--check_data")
    assert (asked.file, asked.workdir, asked.check_data) == (QUICKSTART, "runs/a", True)
    assert (asked.config.rounds, asked.config.require_gpu) == (7, True)
    assert set(asked.overrides) == {"--config.rounds=7", "--config.require_gpu=True"}
    assert parsed(C, "--workdir=x", "--noconfig.require_gpu").config.require_gpu is False
    assert parsed(C, "--workdir=x", "--config.corruption.factor", "-5").config.corruption.factor == -5.0


def test_flagfile(tmp_path):
    file = tmp_path / "flags"
    file.write_text(f"# comment\n{C}\n--config.rounds=3\n--config.seeds=0,1,2\n--config.label=kept\n")
    asked = parsed(f"--flagfile={file}", "--workdir=run", "--config.rounds=4", "--config.seeds=5")
    assert (asked.config.rounds, asked.config.seeds, asked.config.label) == (4, (5,), "kept")
    assert set(asked.overrides) == {"--config.rounds=4", "--config.seeds=(5,)", "--config.label=kept"}


@pytest.mark.parametrize("text", ["NYU,UM", "NYU, UM", "('NYU','UM')", "['NYU', 'UM']"])
def test_names_need_no_quotes(text):
    assert parsed(C, "--workdir=x", f"--config.data.sites={text}").config.data.sites == ("NYU", "UM")


def test_overrides_are_given_on_as_words():
    given = ["--config.data.sites=NYU,UM", "--config.label=a, b", "--config.client.lr=1e-3", "--config.folds=(1,)"]
    asked = parsed(C, "--workdir=x", *given)
    again = main.configured(QUICKSTART, asked.overrides)
    assert configuration.plain(again) == configuration.plain(asked.config)


def test_another_rule_brings_its_own_options():
    c = parsed(C, "--workdir=x", "--config.aggregator.name=median", "--config.aggregator.tie=mean").config
    assert c.aggregator.to_dict() == {**configuration.slot("aggregator", "median", tie="mean").to_dict()}
    assert c.label == ""  # the file's label is that of the file's rule
    kept = parsed(C, "--workdir=x", "--config.aggregator.name=gyro_mean").config.aggregator
    assert (kept.c, kept.gamma, kept.of) == (2.0, 10.0, "updates")  # the quickstart's, which both rules have
    same = parsed(C, "--workdir=x", "--config.aggregator.name=extrinsic_mean").config
    assert same.label == "FedHAvg-ext"


def test_optional_and_required_options_can_be_given():
    c = parsed(C, "--workdir=x", "--config.sampler.name=uniform", "--config.sampler.size=2").config
    assert c.sampler.to_dict() == {"name": "uniform", "size": 2, "rho": None}
    c = parsed(C, "--workdir=x", "--config.sampler.name=poisson", "--config.sampler.q=1").config
    assert c.sampler.q == 1.0
    c = parsed(C, "--workdir=x", "--config.sampler.name=static", "--config.sampler.members=2,0").config
    assert c.sampler.members == (2, 0)
    with pytest.raises(UserError, match=r"size=2\.5: a value of type int"):
        parsed(C, "--workdir=x", "--config.sampler.name=uniform", "--config.sampler.size=2.5")


def test_infinite_limit_of_the_data_is_allowed_and_survives_json():
    c = parsed(C, "--workdir=x", "--config.data.max_fd=inf").config
    configuration.validate(c)
    plain = configuration.plain(c)
    assert plain["data"]["max_fd"] == "inf"
    assert same_run.first_difference(plain, c) is None
    c.data.max_fd = float("nan")
    with pytest.raises(UserError, match=r"config\.data\.max_fd: nan"):
        configuration.validate(c)


def test_traceback_only_where_asked_for(tmp_path, capsys):
    assert call(["main.py", C, f"--workdir={tmp_path}", "--config.rounds=0", "--traceback"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback():
    def command(argv):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        main.guarded(command, ["main.py"])


def test_interrupt_is_one_line(capsys):
    def command(argv):
        raise KeyboardInterrupt

    assert main.guarded(command, ["main.py"]) == 130
    assert "the same command continues" in capsys.readouterr().err


def test_every_module_imports_without_flags_parsed():
    """A notebook has argv words of its own; nothing of the package may read them."""
    code = "import fedjax_seg.main, fedjax_seg.experiment; from absl import flags; assert 'config' not in flags.FLAGS"
    done = subprocess.run(
        [sys.executable, "-c", code, "-f", "kernel.json", "--config.rounds=x"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_exit_status_of_the_process(tmp_path):
    process = tiny_runs.start(["main.py", C, f"--workdir={tmp_path / 'run'}", "--config.rounds=0"])
    status, out, err = tiny_runs.finish(process)
    assert (status, out) == (1, "")
    assert one_line(err).startswith("config.rounds: 0")
