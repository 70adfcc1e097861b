"""Ids of the Hugging Face hub in place of paths: what the cache has, what a revision allows, what is said otherwise.

The hub of these tests is a server on this machine; `huggingface_hub` itself asks it and keeps the cache.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel

from gspo_mega.base.errors import ConfigError
from gspo_mega.config import Config, load_config, render_config
from gspo_mega.config.schema.section import input_kind
from gspo_mega.launcher.prepare import differing_keys

CONFIG = Path("configs/quickstart.yaml").absolute()
COMMIT = "c0ffee" + "0" * 34
MODEL = "acme/tiny-moe"


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves `repositories` {("models" | "datasets", id): {file: bytes}} at the commit COMMIT, as branch main."""

    repositories: dict[tuple[str, str], dict[str, bytes]]
    asked: list[str]

    def do_HEAD(self):
        self.answer(has_body=False)

    def do_GET(self):
        self.answer(has_body=True)

    def answer(self, has_body):
        self.asked.append(f"{self.command} {self.path}")
        path = self.path.strip("/").split("?")[0].split("/")
        body, headers, code = b"", {}, 404
        if path[0] == "api":
            kind, name, what, revision = path[1], "/".join(path[2:4]), *[*path[4:], "", ""][:2]
            files = self.repositories.get((kind, name))
            if files is not None and revision in ("main", COMMIT):
                entries = [
                    {"type": "file", "path": file, "size": len(content), "oid": digest(content)}
                    for file, content in files.items()
                ]
                about = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
                body, code = json.dumps(entries if what == "tree" else about).encode(), 200
        else:
            kind, path = ("datasets", path[1:]) if path[0] == "datasets" else ("models", path)
            files = self.repositories.get((kind, "/".join(path[:2])), {})
            file = "/".join(path[4:])
            if path[2] == "resolve" and file in files:
                body, code = files[file], 200
                headers = {"ETag": f'"{digest(body)}"', "X-Repo-Commit": COMMIT}
        if code == 404:
            headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub():
    class Own(Hub):
        repositories = {
            ("models", MODEL): {
                "config.json": Path("configs/models/quickstart_moe.json").read_bytes(),
                "model.safetensors": b"weights",
                "pytorch_model.bin": b"the same in another format",
            },
            ("datasets", "acme/sums"): {"main/train.jsonl": b'{"prompt": "1+1=", "answer": "2"}\n', "README.md": b"-"},
            ("datasets", "acme/two"): {"train.jsonl": b"{}\n", "test.jsonl": b"{}\n"},
            ("datasets", "acme/none"): {"README.md": b"-"},
        }
        asked = []

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Own)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Own, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def resolved(hub, tmp_path):
    """resolved(*overrides, command=..., online=True): the configuration's values, or the words of its ConfigError. In a
    process of its own, because huggingface_hub reads its variables when it is imported. The file is a copy, far from
    what the quickstart may have made.
    """
    file = tmp_path / "copy" / "configs" / "quickstart.yaml"
    file.parent.mkdir(parents=True)
    shutil.copy(CONFIG, file)

    def load(*overrides, command=None, online=True, fails=False):
        code = (
            "import sys, json\nfrom gspo_mega.base.errors import GspoMegaError\nfrom gspo_mega.config import load_config\n"
            f"try:\n    loaded = load_config({str(file)!r}, {list(overrides)!r}, {command!r})\n"
            "    print(loaded.config.model_dump_json())\n"
            "except GspoMegaError as error:\n    print(json.dumps(str(error)))\n"
        )
        env = {
            **os.environ,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_ENDPOINT": hub[1] if online else "http://127.0.0.1:9",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
        }
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert isinstance(found, str) == fails, found
        return found

    return load


def test_a_revision_allows_the_download_and_the_folder_is_the_commit(resolved, hub, tmp_path):
    model = resolved(f"model.path={MODEL}", "model.revision=main", command="train")["model"]
    folder = Path(model["path"])
    assert folder.name == COMMIT and folder.is_relative_to(tmp_path / "hf")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"], "no second format"
    # From then on the cache has it, without a network and without a revision.
    assert resolved(f"model.path={MODEL}", online=False)["model"]["path"] == str(folder)
    assert resolved(f"model.path={MODEL}", "model.revision=main", online=False)["model"]["path"] == str(folder)


def test_a_plan_downloads_no_weights(resolved, hub):
    folder = Path(resolved(f"model.path={MODEL}", "model.revision=main")["model"]["path"])
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert not any("safetensors" in asked for asked in hub[0].asked)


def test_without_a_revision_nothing_is_asked_and_the_reader_says_what_to_do(resolved, hub, tmp_path):
    assert resolved(f"model.path={MODEL}", command="train")["model"]["path"] == MODEL
    assert hub[0].asked == []
    done = subprocess.run(
        [sys.executable, "-m", "gspo_mega", "plan", str(CONFIG), f"model.path={MODEL}"],
        cwd=tmp_path, env={**os.environ, "HF_HOME": str(tmp_path / "hf")}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0 and f"run hf download {MODEL}" in done.stderr and "model.revision: main" in done.stderr


@pytest.mark.parametrize("key", ["model", "data"])
def test_a_pinned_commit_is_taken_from_the_cache_without_a_network(resolved, key):
    path = {"model": MODEL, "data": "acme/two/train.jsonl"}[key]
    words = (f"{key}.path={path}", f"{key}.revision={COMMIT}")
    first = resolved(*words, command="train")[key]["path"]
    assert resolved(*words, command="train", online=False)[key]["path"] == first


def test_a_slash_at_the_end_of_an_id_is_none_of_it(resolved):
    assert resolved(f"model.path={MODEL}/", "model.revision=main")["model"]["path"].endswith(COMMIT)


def test_a_cache_that_cannot_be_read_is_said(resolved, tmp_path):
    resolved(f"model.path={MODEL}", "model.revision=main")
    (reference,) = (tmp_path / "hf").rglob("refs/main")
    reference.write_bytes(b"\xff\xfe")
    assert "cache of it cannot be read" in resolved(f"model.path={MODEL}", fails=True)


def test_rows_are_a_file_of_a_dataset(resolved):
    data = resolved("data.path=acme/sums/main/train.jsonl", "data.revision=main")["data"]
    assert data["path"].endswith(f"snapshots/{COMMIT}/main/train.jsonl")
    named = resolved("data.path=acme/two/train.jsonl", "eval.path=acme/two/test.jsonl", "data.revision=main")
    assert named["data"]["path"].endswith(f"{COMMIT}/train.jsonl") and named["eval"]["path"].endswith("/test.jsonl")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("acme/two", "does not say which of its files is meant; valid: acme/two/test.jsonl, acme/two/train.jsonl"),
        (
            "acme/sums/main/test.jsonl",
            "the dataset acme/sums has no main/test.jsonl; valid: acme/sums/main/train.jsonl",
        ),
        ("acme/sums", "acme/sums does not say which of its files is meant; valid: acme/sums/main/train.jsonl"),
        ("acme/sums//etc/passwd", "is no path inside the dataset acme/sums"),
        ("acme/none", "acme/none does not say which of its files is meant; it has no JSONL or Parquet file"),
        ("acme/gone", "acme/gone cannot be downloaded: "),
        ("acme/sums/../../../secret", "is no path inside the dataset acme/sums"),
    ],
)
def test_what_is_not_there_is_said_with_its_place(resolved, path, said):
    message = resolved(f"data.path={path}", "data.revision=main", fails=True)
    assert message.startswith(f"override 'data.path={path}': data.path: ") and said in message


def test_a_revision_is_one_of_the_policys_model_and_of_no_other(resolved, hub):
    found = resolved(f"model.path={MODEL}", "model.revision=main", "kl.reference_path=acme/other")
    assert found["model"]["path"].endswith(COMMIT) and found["kl"]["reference_path"] == "acme/other"
    assert not any("acme/other" in asked for asked in hub[0].asked)


def test_a_download_that_fails_names_the_key_and_the_reason(resolved):
    message = resolved(f"model.path={MODEL}", "model.revision=v7", command="train", fails=True)
    assert message.startswith(f"override 'model.path={MODEL}': model.path: {MODEL} cannot be downloaded: ")
    message = resolved(f"model.path={MODEL}", "model.revision=main", online=False, command="train", fails=True)
    assert f"{MODEL} cannot be downloaded: " in message


def test_a_folder_that_exists_is_no_id_and_the_resolved_file_gives_the_same(tmp_path, monkeypatch, resolved):
    (tmp_path / "acme" / "tiny-moe").mkdir(parents=True)
    assert resolved(f"model.path={MODEL}", "model.revision=main")["model"]["path"] == MODEL
    config = load_config(CONFIG, ["model.path=/nowhere/at/all"]).config
    (tmp_path / "again.yaml").write_text(render_config(config))
    assert load_config(tmp_path / "again.yaml").config == config


def test_a_sets_id_among_several_and_a_revision_must_be_text(resolved):
    """And a relative path that is not there remains the reader's, although it has the form of a file in a dataset."""
    sets = "[{name: a, path: acme/two/test.jsonl}, {name: b, path: /tmp/none.jsonl}]"
    found = resolved("eval.path=null", f"eval.sets={sets}", "data.revision=main")["eval"]["sets"]
    assert found[0]["path"].endswith(f"{COMMIT}/test.jsonl") and found[1]["path"] == "/tmp/none.jsonl"
    assert resolved("data.revision=main")["data"]["path"] == "runs/quickstart/data/train.jsonl"
    assert resolved("data.revision=main", online=False)["data"]["path"] == "runs/quickstart/data/train.jsonl"
    with pytest.raises(ConfigError, match=r"model.revision"):
        load_config(CONFIG, ["model.revision=7"])


def test_other_models_are_found_in_the_cache_and_every_marked_key_is_one_of_these(resolved):
    resolved(f"model.path={MODEL}", "model.revision=main")
    assert resolved(f"kl.reference_path={MODEL}")["kl"]["reference_path"].endswith(COMMIT)
    assert resolved(f"teacher.path={MODEL}")["teacher"]["path"].endswith(COMMIT)

    def marked(section):
        for name, field in section.model_fields.items():
            if input_kind(field):
                yield f"{section.__name__}.{name}", input_kind(field)

    assert {pair for section in sections_of(Config) for pair in marked(section)} == {
        *(
            (key, "model")
            for key in (
                "Model.path",
                "Kl.reference_path",
                "Critic.path",
                "Teacher.path",
                "SourceTeacher.path",
                "Speculative.draft_path",
            )
        ),
        ("ModelReward.path", "model"),
        *((key, "dataset") for key in ("Data.path", "Source.path", "Eval.path", "EvalSet.path")),
        *((key, "local") for key in ("Run.modules_dir", "Model.weights", "Lora.path", "Train.from_rollouts")),
    }


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A project whose YAML is in a folder of its own, and another folder, in which commands run."""
    project, here = tmp_path / "project", tmp_path / "here"
    for folder in (project / "runs_of_mine", project / "rows", here):
        folder.mkdir(parents=True)
    (project / "runs_of_mine/run.yaml").write_text(CONFIG.read_text(encoding="utf-8"), encoding="utf-8")
    for file in ("rows/train.jsonl", "rows/heldout.jsonl"):
        (project / file).write_text("{}\n", encoding="utf-8")
    monkeypatch.chdir(here)
    return project, here


def in_file(project: Path, **values: str) -> Path:
    """The project's YAML with other paths in it."""
    file = project / "runs_of_mine/run.yaml"
    text = file.read_text(encoding="utf-8")
    for before, now in values.values():
        assert text.count(before) == 1
        text = text.replace(before, now)
    file.write_text(text, encoding="utf-8")
    return file


def test_a_path_in_the_file_starts_in_the_working_directory_or_the_files_folder_or_the_one_above(elsewhere):
    project, here = elsewhere
    file = in_file(
        project,
        data=("runs/quickstart/data/train.jsonl", "rows/train.jsonl"),
        eval=("runs/quickstart/data/heldout.jsonl", "../rows/heldout.jsonl"),
    )
    loaded = load_config(file, [], "train")
    assert loaded.config.data is not None and loaded.config.eval is not None
    assert loaded.config.data.path == str(project / "rows/train.jsonl")
    assert Path(loaded.config.eval.path).resolve() == project / "rows/heldout.jsonl"
    assert f"data.path: rows/train.jsonl is not in {here}; {project / 'rows/train.jsonl'} is read" in loaded.notices
    # What is not anywhere stays, and so does where results go.
    assert (loaded.config.model.path, loaded.config.run.dir) == ("runs/quickstart/sft/hf", "runs/quickstart")

    (project / "runs_of_mine/rows").mkdir()
    (project / "runs_of_mine/rows/train.jsonl").touch()
    assert load_config(file).config.data.path == str(project / "runs_of_mine/rows/train.jsonl")
    (here / "rows").mkdir()
    (here / "rows/train.jsonl").touch()
    loaded = load_config(file)
    assert loaded.config.data.path == "rows/train.jsonl"
    assert [notice for notice in loaded.notices if notice.startswith("data.path")] == []


def test_modules_are_looked_for_in_the_files_folder_also_where_the_run_continues_elsewhere(elsewhere):
    project, here = elsewhere
    file = in_file(project)
    own = str(project / "runs_of_mine")
    (project / "runs_of_mine/my_gym.py").touch()
    talk = "rollout.episode={function: 'my_talk:f', options: {environment: 'my_gym:Env', mode: 'a:b:c'}}"
    loaded = load_config(file, [talk, "episodes.max_tokens=64", "data.chat_template=true"])
    assert loaded.config.run.modules_dir == own
    said = [notice for notice in loaded.notices if "modules_dir" in notice]
    assert said == [f"rollout.episode.options.environment: {own}/my_gym.py is read (run.modules_dir)"]
    (here / "config.resolved.yaml").write_text(render_config(loaded.config), encoding="utf-8")
    again = load_config(here / "config.resolved.yaml").config
    assert again == loaded.config
    moved = load_config(here / "config.resolved.yaml", [f"run.modules_dir={project}"]).config
    assert moved.run.modules_dir == str(project) and differing_keys(again, moved) == {}
    (here / "lib").mkdir()
    assert load_config(file, ["run.modules_dir=lib"]).config.run.modules_dir == str(here / "lib")


def test_a_path_on_the_command_line_starts_in_the_working_directory_only(elsewhere):
    project, _ = elsewhere
    file = in_file(project)
    assert load_config(file, ["data.path=rows/train.jsonl"]).config.data.path == "rows/train.jsonl"
    assert (
        load_config(file, ["data={path: rows/train.jsonl, max_prompt_tokens: 9}"]).config.data.path
        == "rows/train.jsonl"
    )


def test_entries_of_lists_are_found_and_the_home_folder_is_known(elsewhere, monkeypatch):
    project, _ = elsewhere
    file = in_file(
        project,
        data=("path: runs/quickstart/data/train.jsonl", "sources: [{name: a, path: rows/train.jsonl}]"),
        model=("runs/quickstart/sft/hf", "~/model"),
        dir=("dir: runs/quickstart", "dir: ~/results"),
    )
    monkeypatch.setenv("HOME", str(project))
    config = load_config(file).config
    assert [source.path for source in config.data.sources] == [str(project / "rows/train.jsonl")]
    assert (config.model.path, config.run.dir) == (f"{project}/model", f"{project}/results")
    assert load_config(file, ["model.path=~/other"]).config.model.path == f"{project}/other"


def test_a_shipped_configuration_finds_its_shape_from_any_working_directory(tmp_path, monkeypatch):
    file = Path("configs/qwen3_06b_1gpu.yaml").absolute()
    shape = load_config(file).config.model.path
    monkeypatch.chdir(tmp_path)
    assert load_config(file).config.model.path == str(file.parent.parent / shape)


def sections_of(model):
    """The class of a section and of all sections in it, of unions too."""
    yield model
    for field in model.model_fields.values():
        waiting = [field.annotation]
        while waiting:
            annotation = waiting.pop()
            waiting += typing.get_args(annotation)
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                yield from sections_of(annotation)
