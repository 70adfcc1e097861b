"""No text of a model, a server, a file or an error acts on the terminal of a command."""

import io
import json
import sys
import time
from pathlib import Path

import pytest
from report_runs import make_run

from gspo_mega.base.run_folder import RunFolder, atomic_write_json
from gspo_mega.base.untrusted import printable, printable_output
from gspo_mega.cli.main import main
from gspo_mega.rollout.registration import Registration

ACTS = "\x1b[2J\x1b]52;c;cm0gLXJm\x07\x9b31m\x08\r\x7f\u202eevil\u2066\u200b\udc80"


def acts(text):
    return [c for c in text if not c.isprintable() and c not in "\n\t"]


@pytest.fixture
def hostile_run(tmp_path):
    def change(step, group):
        group.prompt = type(group.prompt)(**{**group.prompt.__dict__, "text": ACTS[:-1], "answer": ACTS[:-1]})
        for episode in group.episodes:
            episode.prompt = group.prompt
            for node in episode.nodes:
                node.text = ACTS[:-1]

    run = RunFolder(make_run(tmp_path / "run", change=change))
    attempt = run.latest_attempt()
    attempt.servers_dir.mkdir(exist_ok=True)
    registration = Registration("server-0", "", 1, "failed", 1, None, time.time(), error=ACTS[:-1])
    registration.write(attempt.servers_dir)
    state = json.loads(attempt.state_file.read_text())
    atomic_write_json(attempt.state_file, state | {"error": ACTS[:-1], "note": ACTS[:-1], "host": ACTS[:-1]})
    return run.path


@pytest.mark.parametrize("words", [["status"], ["inspect"], ["inspect", "--step", "1"], ["status", "--watch"]])
def test_what_a_command_prints_acts_on_no_terminal(hostile_run, capsys, words):
    main([words[0], str(hostile_run), *words[1:]])
    output = capsys.readouterr()
    assert acts(output.out + output.err) == []
    if words != ["inspect"]:
        assert "\\x1b[2J" in output.out


def test_an_error_acts_on_no_terminal(tmp_path, capsys):
    assert main(["status", str(tmp_path / ACTS[:-1])]) == 2
    assert acts(capsys.readouterr().err) == []


def test_json_stays_json_of_the_same_value(hostile_run, capsys):
    assert main(["inspect", str(hostile_run), "--step", "1", "--json"]) == 0
    text = capsys.readouterr().out
    assert acts(text) == [] and json.loads(text)["groups"][0]["prompt"] == ACTS[:-1]


def test_what_is_written_out_and_what_is_kept(capsys):
    assert printable("a\tb\nc é 漢 🙂") == "a\tb\nc é 漢 🙂"
    assert acts(printable(ACTS)) == [] and printable("\x1b[0m") == "\\x1b[0m"
    before = sys.stdout
    with printable_output():
        print("\x1b", "x", end="\r\n")
        sys.stdout.writelines(["\x07", "\n"])
    assert sys.stdout is before
    assert capsys.readouterr().out == "\\x1b x\\r\n\\x07\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_progress_bar_of_a_tool_draws_on_the_terminal_itself(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "tools"))
    from gspo_mega.cli.checkpoint_tools import ProgressBar

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with printable_output(), printable_output():  # a tool's main, and what guards it
        bar = ProgressBar()
        bar(1, 1, "name\x1b[2J")
    assert terminal.getvalue().startswith("\r\x1b[K[####") and terminal.getvalue().endswith("name\\x1b[2J\n")
