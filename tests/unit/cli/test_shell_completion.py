"""What a shell offers after the script of `gspo-mega completion`."""

import shlex
import shutil
import subprocess

import pytest

from gspo_mega.cli.main import COMMANDS, main


@pytest.fixture
def complete(capsys, tmp_path):
    """Words -> what bash offers for the last of them, in a folder that holds `train.yaml`."""
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "train.yaml").touch()

    def offer(*words):
        code = (
            f"source {script}; COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _gspo_mega;"
            ' printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(["bash", "-eu", "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        return set(done.stdout.split())

    return offer


def test_commands(complete):
    assert complete("gspo-mega", "") == {*COMMANDS, "--help", "--version"}
    assert complete("gspo-mega", "s") == {"sft", "serve", "simulate", "status"}


def test_options_and_their_choices(complete):
    assert complete("gspo-mega", "plan", "--js") == {"--json", "--json-schema"}
    assert complete("gspo-mega", "plan", "--command", "") == {"train", "sft", "eval", "certify", "mismatch", "budget"}
    assert complete("gspo-mega", "completion", "") == {"bash", "zsh"}
    assert "--machines" in complete("gspo-mega", "doctor", "-")


def test_keys_of_the_configuration_and_files(complete):
    assert complete("gspo-mega", "train", "run.yaml", "train.num_") == {"train.num_steps="}
    # A file may begin as a key does.
    assert complete("gspo-mega", "train", "train.") >= {"train.yaml", "train.num_steps=", "train.max_restarts="}
    # Nothing is offered, so the shell offers files: a value, an unknown command, no first letter.
    for words in (("train", "a.yaml", "run.dir", "=", "r"), ("other", "x"), ("train", ""), ("status", "r")):
        assert complete("gspo-mega", *words) == set()


def test_another_shell_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["completion", "tcsh"])
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err


@pytest.fixture
def complete_in_zsh(capsys, tmp_path):
    """Words -> what zsh offers for the last of them. `files` stands for the files of the folder."""
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    assert main(["completion", "zsh"]) == 0
    script = tmp_path / "completion.zsh"
    script.write_text(capsys.readouterr().out)

    def offer(*words):
        # Outside the line editor zsh has no `compadd` and no `compdef`; what completes a line is what they are given.
        code = (
            "compdef() { registered=$1 }; _files() { print -r files };"
            ' compadd() { while [[ $1 != -- ]]; do shift; done; shift; print -rl -- "$@" };'
            f' source {script}; words=({shlex.join(words)}); CURRENT={len(words)}; "$registered"'
        )
        done = subprocess.run(["zsh", "-feu", "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        return set(done.stdout.split())

    return offer


def test_zsh_gets_the_same_words(complete_in_zsh):
    assert complete_in_zsh("gspo-mega", "") == {*COMMANDS, "--help", "--version"}
    assert {"--json", "--json-schema"} < complete_in_zsh("gspo-mega", "plan", "--")
    assert complete_in_zsh("gspo-mega", "plan", "--command", "") == {
        "train", "sft", "eval", "certify", "mismatch", "budget",
    }  # fmt: skip
    assert complete_in_zsh("gspo-mega", "completion", "") == {"bash", "zsh"}
    assert {"train.num_steps=", "run.dir=", "files"} < complete_in_zsh("gspo-mega", "train", "run.yaml", "t")
    for words in (("train", ""), ("status", "r"), ("other", "x")):
        assert complete_in_zsh("gspo-mega", *words) == {"files"}
