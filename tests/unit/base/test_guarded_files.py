"""What a command reads from a folder that it did not make: no pipe, device, socket or depth holds it up, and none ends
it with a traceback. Through the product's own commands.
"""

import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
from report_runs import make_run

from gspo_mega.base import untrusted
from gspo_mega.base.errors import DataError, FolderError, GspoMegaError, ModelError
from gspo_mega.base.untrusted import MOST_JSON_BYTES, NoRegularFileError, open_regular, read_bytes
from gspo_mega.cli.main import main
from gspo_mega.data.chat import load_tokenizer
from gspo_mega.models.huggingface import read_model_spec, spec_from_config
from gspo_mega.rollout.server.process import log_tail

SECONDS = 60
DEEP = b"[" * 100_000
SHAPE = Path(__file__).parents[3] / "configs/models/quickstart_moe.json"


def pipe(path):
    os.mkfifo(path)


def endless(path):
    path.symlink_to("/dev/zero")


def folder(path):
    path.mkdir()


def unix_socket(path):
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def loop(path):
    path.symlink_to(path.name)


def kernel(path):
    path.symlink_to("/proc/kmsg")


def memory(path):
    path.symlink_to("/proc/self/mem")


def deep(path):
    path.write_bytes(DEEP + b"\n")


def sparse(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


KINDS = (pipe, endless, folder, unix_socket, deep, sparse)


@pytest.fixture(autouse=True)
def hurry():
    """A call that waits for a pipe, or reads without end, fails the test."""

    def late(*_):
        raise AssertionError(f"not over within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    path = make_run(tmp_path_factory.mktemp("whole") / "run")
    newest = path / "attempts" / "0002"
    (newest / "servers").mkdir(exist_ok=True)
    (newest / "servers" / "server-0.json").write_text("{}")
    for name in ("restart.json", "console.log", "command", "plan.txt", "versions.txt"):
        (newest / name).touch()
    (newest / "restart.json").unlink()
    (path / "checkpoints").mkdir(exist_ok=True)
    (path / "checkpoints" / "latest").write_text("step_00000002\n")
    return path


FILES = (
    "metrics.jsonl",
    "config.resolved.yaml",
    "journal/step_00000000",
    "checkpoints/latest",
    "attempts/0002/state.json",
    "attempts/0002/restart.json",
    "attempts/0002/servers/server-0.json",
    "attempts/0002/console.log",
    "attempts/0002/command",
    "attempts/0002/plan.txt",
)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, name) for kind in (pipe, deep) for name in FILES),
        *((kind, name) for kind in (endless, folder, unix_socket, sparse) for name in FILES[:1] + FILES[4:5]),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_no_file_of_a_run_holds_up_a_command(whole_run, tmp_path, capsys, kind, name):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    file = run / name
    file.unlink(missing_ok=True)
    kind(file)
    commands = [["status"], ["inspect"], ["inspect", "--step", "1"], ["diff", str(whole_run)]]
    if kind is pipe:
        commands.append(["report"])
    codes = {}
    for command, *more in commands:
        codes[command] = main([command, str(run), *more])
        output = capsys.readouterr()
        assert "Traceback" not in output.out + output.err
        assert codes[command] == 0 or str(file) in output.out + output.err, (command, output.err)
    wanted = {"metrics.jsonl": "status", "journal/step_00000000": "inspect", "attempts/0002/state.json": "status"}
    if name in wanted and kind is not sparse:  # of which only the end is read
        assert codes[wanted[name]] != 0


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_no_file_of_a_model_holds_up_a_plan(tmp_path, capsys, kind, name):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(SHAPE.read_text())
    (model / name).unlink(missing_ok=True)
    kind(model / name)
    if name != "tokenizer.json" or kind in (pipe, endless, unix_socket, sparse):
        code = main(["plan", "configs/quickstart.yaml", f"model.path={model}"])
        assert code == 2 and str(model / name) in capsys.readouterr().err
    if name == "tokenizer.json" and kind is not folder:  # which transformers refuses in its own words
        with pytest.raises(DataError, match="tokenizer"):
            load_tokenizer(str(model))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_configuration_or_data_holds_up_a_plan(tmp_path, capsys, kind):
    given = tmp_path / "given"
    kind(given)
    assert main(["plan", str(given)]) == 2 and str(given) in capsys.readouterr().err
    shutil.copytree(given, given.with_suffix(".jsonl")) if kind is folder else kind(given.with_suffix(".jsonl"))
    data = given.with_suffix(".jsonl")
    if kind is not sparse:  # a line without end, which is read as long as it goes on
        words = ["plan", "configs/quickstart.yaml", "--command", "train", f"model.path={SHAPE}", f"data.path={data}"]
        assert main(words) == 2 and str(data) in capsys.readouterr().err


HUGE = (10**12, 10**30, 2**63, 1e12, float("inf"), float("nan"), -1, 0, True, "8", None, [4], {}, [[[]]])


@pytest.mark.parametrize("key", json.loads(SHAPE.read_text()))
def test_no_number_of_a_model_holds_up_its_reader(key):
    raw = json.loads(SHAPE.read_text())
    deepest: list = []
    for _ in range(900):
        deepest = [deepest]
    for value in (*HUGE, deepest):
        try:
            spec = spec_from_config(raw | {key: value}, "config.json")
        except ModelError as error:
            assert "config.json: " in str(error) and len(str(error)) < 3000
        else:
            assert spec.num_layers < 5000


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "num_experts", "num_attention_heads", "vocab_size", "hidden_size"]
)
def test_a_huge_number_of_a_model_is_refused_by_its_key(tmp_path, capsys, key):
    model = tmp_path / "config.json"
    model.write_text(json.dumps(json.loads(SHAPE.read_text()) | {key: 10**12}))
    assert main(["plan", "configs/quickstart.yaml", f"model.path={model}"]) == 2
    assert f"{key}: is 1000000000000; no model has more than" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["cluster.ranks_per_node=1000000000", "batch.prompts_per_step=1000000000"],
        ["cluster.num_nodes=1000000000", "cluster.num_rollout_nodes=1", "batch.prompts_per_step=1000000000"],
        ["batch.prompts_per_step=1000000000000", "batch.num_mini_batches=1000000000000"],
        ["cluster.num_nodes=100000", "cluster.ranks_per_node=1000", "batch.prompts_per_step=100000000"],
        ["server.num_servers=1000000000000"],
        [f"train.num_steps={10**400}"],
        ["cluster.gpu_memory_gib=1e300"],
        ["cluster.host_memory_gib=1e300"],
    ],
)
def test_a_huge_number_of_a_configuration_is_refused_by_its_key(capsys, words):
    assert main(["plan", "configs/quickstart.yaml", f"model.path={SHAPE}", *words]) == 2
    said = capsys.readouterr().err
    assert any(word.partition("=")[0] in said for word in [words[0], words[-1]])


@pytest.mark.parametrize("kind", [loop, kernel, memory], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", [*FILES, "attempts/0002/errors/rank_0.json"])
def test_a_link_that_cannot_be_read_is_named(whole_run, tmp_path, capsys, kind, name):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).unlink(missing_ok=True)
    kind(run / name)
    for command in ("status", "report"):
        code = main([command, str(run)])
        output = capsys.readouterr()
        assert code in (0, DataError.exit_code, FolderError.exit_code), (command, output.err)
        assert code == 0 or str(run / name) in output.err


@pytest.mark.parametrize("kind", [loop, kernel, memory], ids=lambda kind: kind.__name__)
def test_a_models_link_that_cannot_be_read_is_named(tmp_path, capsys, kind):
    kind(tmp_path / "config.json")
    assert main(["plan", "configs/quickstart.yaml", f"model.path={tmp_path}"]) == 2
    assert str(tmp_path / "config.json") in capsys.readouterr().err


@pytest.mark.parametrize("kind", [pipe, endless, unix_socket, kernel, sparse], ids=lambda kind: kind.__name__)
def test_no_further_template_of_a_model_holds_up_its_reader(tmp_path, kind):
    model = tmp_path / "model"
    (model / "additional_chat_templates").mkdir(parents=True)
    (model / "config.json").write_text(SHAPE.read_text())
    file = model / "additional_chat_templates" / "tools.jinja"
    kind(file)
    for read in (load_tokenizer, read_model_spec):
        with pytest.raises(GspoMegaError, match="tools.jinja"):
            read(str(model))


def test_a_file_that_may_not_be_read_is_an_error_with_its_name(whole_run, capsys, monkeypatch):
    """As for another user's run; the tests' own user may be root, whom nothing is forbidden."""

    def forbidden(path, *_):
        raise PermissionError(13, "Permission denied", os.fspath(path))

    monkeypatch.setattr("gspo_mega.base.run_folder.read_json_file", forbidden)
    assert main(["status", str(whole_run)]) == FolderError.exit_code
    assert "state.json: Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["attempts/0002/command", "attempts/0002/versions.txt", "checkpoints/latest"])
def test_a_short_text_that_is_huge_is_not_read(whole_run, tmp_path, capsys, name):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    with (run / name).open("wb") as file:
        file.truncate(2 << 30)
    began = time.process_time()
    for command in ("status", "report"):
        code = main([command, str(run)])
        assert code == 0 or str(run / name) in capsys.readouterr().err
    assert time.process_time() - began < 5


def test_a_configuration_that_aliases_make_huge_is_a_problem_of_the_report(whole_run, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    (run / "config.resolved.yaml").write_text("\n".join(levels) + "\n")
    assert main(["report", str(run)]) == 0
    assert "aliases make the document larger" in (run / "report.html").read_text()


def test_only_the_end_of_a_servers_log_is_read(tmp_path):
    log = tmp_path / "server.log"
    with log.open("wb") as file:
        file.truncate(8 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"\none\ntwo\n")
    assert log_tail(log, 2) == "one\ntwo" and log_tail(tmp_path / "none") == ""


def test_only_regular_files_are_opened(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link") == b"abc"
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")
    for kind in (pipe, endless, folder, unix_socket, loop, kernel):
        kind(tmp_path / kind.__name__)
        with pytest.raises(NoRegularFileError) as told:
            open_regular(tmp_path / kind.__name__)
        assert told.value.filename == str(tmp_path / kind.__name__) and told.value.strerror.startswith("is a")
    with pytest.raises(NoRegularFileError, match="at most 2 are read"):
        read_bytes(tmp_path / "file", most_bytes=2)
    assert MOST_JSON_BYTES > 1024**2 and issubclass(ModelError, GspoMegaError) and read_model_spec(SHAPE)


def test_a_bound_of_gigabytes_takes_no_memory_and_holds_for_a_file_that_grows(tmp_path, monkeypatch):
    path = tmp_path / "small"
    path.write_bytes(b"line\n" * 10)
    assert read_bytes(path, 64 * 2**40) == b"line\n" * 10  # more than any machine has

    def grown(path, most_bytes=None, real=untrusted.open_regular):
        file = real(path, most_bytes)
        with path.open("ab") as more:
            more.write(b"x" * 100)
        return file

    monkeypatch.setattr(untrusted, "open_regular", grown)
    with pytest.raises(OSError, match="has more than 100 bytes"):
        read_bytes(path, 100)
