import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gspo_mega
from gspo_mega import __main__ as entry_point
from gspo_mega.base.errors import RankError
from gspo_mega.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[3]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
SHAPE = str(ROOT / "configs" / "models" / "quickstart_moe.json")


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gspo-mega {gspo_mega.__version__}\n"
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)
    assert main([]) == 2


def test_an_unknown_command(capsys):
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "gspo-mega: 'trian' is not a command; did you mean 'train'?\n"
    assert main(["xyz"]) == 2
    assert "valid: plan, train" in capsys.readouterr().err


def test_the_earlier_name_of_a_command_works_and_says_the_new_one(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["budget", "--help"])
    shown = capsys.readouterr()
    assert ended.value.code == 0 and "usage: gspo-mega mismatch" in shown.out
    assert "gspo-mega budget is now gspo-mega mismatch" in shown.err


@pytest.mark.parametrize("number, code", [(5, 9), (30, 9), (28, 9), (122, 9), (22, None)])
def test_a_disk_that_fails_is_an_error_for_a_person_and_another_oserror_a_defect(monkeypatch, capsys, number, code):
    def fails(args):
        raise OSError(number, os.strerror(number), "runs/x/attempts/0001/logs/rank_0.log")

    monkeypatch.setattr("gspo_mega.cli.train.run", fails)
    if code is None:
        with pytest.raises(OSError):
            main(["train", QUICKSTART])
        return
    assert main(["train", QUICKSTART]) == code
    assert capsys.readouterr().err == f"gspo-mega train: runs/x/attempts/0001/logs/rank_0.log: {os.strerror(number)}\n"


def test_plan_prints_the_layout(capsys):
    # Options may stand between the overrides.
    assert (
        main(["plan", QUICKSTART, "train.num_steps=3", "--model", SHAPE, "batch.num_mini_batches=2", "--device", "cpu"])
        == 0
    )
    out = capsys.readouterr().out
    assert "3 steps, 6 optimizer steps" in out and "clip range 0.003 / 0.004" in out


def test_plan_refuses_with_text_alone(capsys):
    assert main(["plan", QUICKSTART, "--model", SHAPE, "parallel.expert=3"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(
        "override 'parallel.expert=3': parallel.expert: 3 does not divide the model's 8 experts"
    )
    assert "Traceback" not in captured.err
    assert main(["plan", QUICKSTART, "run.nme=x"]) == 2
    assert "did you mean 'name'" in capsys.readouterr().err
    assert main(["plan"]) == 2
    assert "no configuration" in capsys.readouterr().err


def test_plan_resolved_and_json_schema(capsys):
    assert main(["plan", QUICKSTART, "--model", SHAPE, "--resolved"]) == 0
    assert "recycle_after: 10000" in capsys.readouterr().out
    assert main(["plan", "--json-schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "gspo_mega run"


def test_plan_checks_what_a_command_needs(capsys):
    assert main(["plan", QUICKSTART, "--model", SHAPE, "--command", "sft"]) == 2
    assert "sft: missing" in capsys.readouterr().err


def test_exit_codes_of_errors_and_of_ctrl_c(monkeypatch, capsys):
    from gspo_mega.cli import plan

    def fail(error):
        def run(args):
            raise error

        return run

    monkeypatch.setattr(plan, "run", fail(RankError("rank 1 failed")))
    assert main(["plan"]) == RankError.exit_code == 7
    assert capsys.readouterr().err == "rank 1 failed\n"
    noted = RankError("rank 1 failed")
    noted.add_note("failed   and what to do")
    monkeypatch.setattr(plan, "run", fail(noted))
    assert main(["plan"]) == 7
    assert capsys.readouterr().err == "rank 1 failed\n\nfailed   and what to do\n"
    monkeypatch.setattr(plan, "run", fail(KeyboardInterrupt()))
    assert main(["plan"]) == 130
    monkeypatch.setattr(plan, "run", fail(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):  # a defect of ours keeps its traceback
        main(["plan"])


def test_as_a_module_it_imports_nothing_slow_and_takes_a_closed_pipe():
    command = [sys.executable, "-m", "gspo_mega", "plan", QUICKSTART, "--model", SHAPE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stderr == "" and "experts per rank" in done.stdout
    told = subprocess.run([command[0], "-X", "importtime", *command[1:]], capture_output=True, text=True, cwd=ROOT)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in told.stderr.splitlines()}
    assert "gspo_mega" in imported and not imported & {"torch", "transformers", "megatron", "sglang"}
    piped = subprocess.run(f"{' '.join(command)} | true", shell=True, capture_output=True, text=True, cwd=ROOT)
    assert piped.stderr == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train"], "gspo-mega train: CONFIG is missing; for example: gspo-mega train CONFIG ..."),
        (
            ["train", "c.yaml", "--run.name=x"],
            "--run.name=x: keys of the configuration have no dashes; write run.name=x",
        ),
        (["plan", "c.yaml", "--train.num_steps=3", "--comand", "x"], "write train.num_steps=3"),
        (["plan", "c.yaml", "--devise=gpu"], "--devise=gpu is no option; did you mean --device?"),
        (["status", "r", "--jsn"], "--jsn is no option; did you mean --json?"),
    ],
)
def test_what_argparse_would_leave_unexplained(words, said, capsys):
    with pytest.raises(SystemExit) as left:
        main(words)
    told = capsys.readouterr().err
    assert left.value.code == 2 and said in told and "key=value" not in told, told


@pytest.mark.parametrize("script", ["launch/setup.sh", "tests/run.sh"])
def test_the_scripts_of_the_readme_say_what_they_are_for(script):
    for word in ("--help", "-h"):
        run = subprocess.run([script, word], capture_output=True, text=True, cwd=Path(__file__).parents[3], timeout=60)
        assert (run.returncode, run.stderr) == (0, "")
        assert f"  {script} [" in run.stdout and "#" not in run.stdout and "set -" not in run.stdout


def test_ctrl_c_while_the_command_line_is_imported_ends_it_without_a_traceback(monkeypatch):
    class Interrupted:
        @property
        def main(self):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "gspo_mega.cli.main", Interrupted())
    assert entry_point.main() == 130
