"""Whatever ranks would refuse in what they read is refused before: each fault once, by the checks of the trial.

The faults are made in the quickstart's own folder and files. They are tried in this process, which imports transformers
once; that commands ask a process of its own, and end as they should, is tried on a few.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from gspo_mega.base.errors import ModelError, RankError
from gspo_mega.base.run_folder import DamagedFileError
from gspo_mega.cli.main import main
from gspo_mega.config import load_config
from gspo_mega.launcher import input_trial, local, trial_process
from gspo_mega.launcher.input_trial import CHECKS, Trial, _shown, read_weights, run_checks

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs" / "quickstart.yaml"
# With which a KL term is allowed.
CUSTOM = ("algorithm=custom", "objective.ratio=sequence", "objective.aggregation=sequence_mean_token_mean")
NORM, EXPERT = "model.norm.weight", "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    tool = [sys.executable, str(ROOT / "tools/make_quickstart.py"), str(folder), "--num-train", "64"]
    subprocess.run([*tool, "--num-heldout", "16"], check=True, stdout=subprocess.DEVNULL)
    return folder


class Inputs:
    """A copy of the model and the data, to be broken."""

    def __init__(self, made: Path, folder: Path) -> None:
        self.model, self.data = folder / "model", folder / "data"
        shutil.copytree(made / "model", self.model)
        shutil.copytree(made / "data", self.data)
        self.run_dir = folder / "runs"

    def words(self, *overrides: str) -> list[str]:
        return [
            f"run.dir={self.run_dir}",
            f"model.path={self.model}",
            f"data.path={self.data / 'train.jsonl'}",
            f"eval.path={self.data / 'heldout.jsonl'}",
            "eval.num_prompts=16",
            *overrides,
        ]

    def edit_json(self, name: str, **changes: Any) -> None:
        path = self.model / name
        raw = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))

    def edit_tensors(self, **changes: torch.Tensor | None) -> None:
        path = self.model / "model.safetensors"
        tensors = load_file(path) | {name.replace("__", "."): value for name, value in changes.items()}
        save_file({name: value for name, value in tensors.items() if value is not None}, path, {"format": "pt"})

    def tensor(self, name: str) -> torch.Tensor:
        return load_file(self.model / "model.safetensors")[name].clone()

    def rows(self, *rows: dict[str, Any], name: str = "train.jsonl") -> None:
        (self.data / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def inputs(made, tmp_path) -> Inputs:
    return Inputs(made, tmp_path)


def tried(inputs: Inputs, *overrides: str, command: str = "train", **more: Any) -> dict[str, Any]:
    loaded = load_config(CONFIG, inputs.words(*overrides), command)
    return run_checks(Trial(loaded.config, command, **more))


def test_it_says_what_was_read(inputs):
    long = {"prompt": "1" * 90, "answer": "1"}
    inputs.rows({"prompt": "12+30=", "answer": "42", "level": 3}, long)
    data, heldout = inputs.data / "train.jsonl", inputs.data / "heldout.jsonl"
    read = tried(inputs, "eval.num_prompts=4")["read"]
    limit = load_config(CONFIG, inputs.words(), "train").config.data.max_prompt_tokens
    place = read.index(f"data {data}: 2 rows, 1 left out as too long (data.max_prompt_tokens: {limit})")
    assert re.fullmatch(r'  first prompt, \d+ tokens: "12\+30="', read[place + 1])
    assert read[place + 2] == '  its answer: "42"; metadata: level'
    assert any(re.fullmatch(rf"held-out {heldout}: \d+ rows, 4 used", line) for line in read)


def test_a_long_text_is_shown_by_its_beginning_and_its_end():
    assert _shown("a" * 300) == json.dumps("a" * 300)
    assert _shown("a" * 200 + "b" * 500 + "c" * 100) == json.dumps("a" * 200 + " ... " + "c" * 100)


# --- faults: what is done to the inputs, what is asked for, and the key and words of the refusal -----------------------


class Fault(NamedTuple):
    words: tuple[str, ...]
    key: str
    said: str


CHAT = ("data.chat_template=true", "data.max_prompt_tokens=64", "batch.micro_batch_tokens=8192")
TURNS = (
    *CHAT,
    "rollout.episode=tool_loop",
    "rollout.tools=['tools:calculator']",
    "episodes={max_turns: 2, max_tokens: 200}",
)
SFT = "sft={max_steps: 1, sequences_per_step: 8, eval_every_steps: 1, stop_accuracy_low: 0.1, stop_accuracy_high: 0.9}"


def no_template(i: Inputs) -> Fault:
    (i.model / "chat_template.jinja").unlink(missing_ok=True)
    return Fault(CHAT, "data.chat_template", "the tokenizer has no chat template; add one")


def broken_template(i: Inputs) -> Fault:
    (i.model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}")
    return Fault(CHAT, "data.path", "the tokenizer's chat template refuses these messages: Unexpected end of template")


def template_that_refuses(i: Inputs) -> Fault:
    (i.model / "chat_template.jinja").write_text("{{ raise_exception('no user may speak') }}")
    return Fault(
        CHAT, "eval.path", "heldout.jsonl:1: the tokenizer's chat template refuses these messages: no user may"
    )


def no_end_token(i: Inputs) -> Fault:
    """One of its sources is enough; here none names one."""
    i.edit_json("tokenizer_config.json", eos_token=None)
    for file in ("config.json", "generation_config.json"):
        i.edit_json(file, eos_token_id=None)
    return Fault((), "model.path", "No end token is named")


def no_tokenizer(i: Inputs) -> Fault:
    (i.model / "tokenizer.json").write_text("{")
    return Fault((), "model.path", "its tokenizer cannot be loaded")


def small_vocabulary(i: Inputs) -> Fault:
    i.edit_json("config.json", vocab_size=8, eos_token_id=1)
    i.edit_json("generation_config.json", eos_token_id=1)
    return Fault(
        (), "model.path", "the tokenizer makes ids that the model has no embedding of: vocab_size in config.js"
    )


def null_role(i: Inputs) -> Fault:
    i.rows({"prompt": "1+1=", "answer": "2"}, {"prompt": [{"role": None, "content": "1+1="}], "answer": "2"})
    return Fault(CHAT, "data.path", "train.jsonl:2: 'prompt' has message 1 that has 'role' that is null, not a text")


def a_gold_at_the_end(i: Inputs) -> Fault:
    i.rows(*[{"prompt": "1+1=", "answer": "2"}] * 300, {"prompt": "1+1=", "answer": {"x": 1}})
    return Fault(("reward=math",), "data.path", "train.jsonl:301: 'answer': ")


def empty_file(i: Inputs) -> Fault:
    (i.data / "train.jsonl").write_text("\n")
    return Fault((), "data.path", "train.jsonl: no rows")


def everything_too_long(i: Inputs) -> Fault:
    return Fault(
        ("data.max_prompt_tokens=2",), "data.path", "every one of its 64 rows is too long (data.max_prompt_tok"
    )


def fewer_held_out(i: Inputs) -> Fault:
    return Fault(("eval.num_prompts=17",), "eval.path", "eval.num_prompts asks for 17 prompts, but there are 16")


def no_held_out(i: Inputs) -> Fault:
    (i.data / "heldout.jsonl").unlink()
    return Fault((), "eval.path", "heldout.jsonl: no such file")


def unknown_tool_format(i: Inputs) -> Fault:
    (i.model / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return Fault(
        TURNS, "episodes.tool_format", "auto cannot tell from the chat template how the policy writes tool calls"
    )


def missing_tensor(i: Inputs) -> Fault:
    i.edit_tensors(**{NORM: None})
    return Fault((), "model.path", f"missing: {NORM} [64]")


def misshaped_tensor(i: Inputs) -> Fault:
    i.edit_tensors(**{NORM: torch.ones(63)})
    return Fault((), "model.path", f"wrong shape: {NORM} is [63], config.json makes it [64]")


def mistyped_tensor(i: Inputs) -> Fault:
    i.edit_tensors(**{NORM: torch.ones(64, dtype=torch.int64)})
    return Fault((), "model.path", f"wrong type: {NORM} is I64; weights are one of BF16, F16, F32, F64")


def unexpected_tensor(i: Inputs) -> Fault:
    i.edit_tensors(surprise=torch.ones(3))
    return Fault((), "model.path", "unexpected: surprise")


def corrupt_header(i: Inputs) -> Fault:
    (i.model / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{broken}")
    return Fault((), "model.path", "model.safetensors: cannot be read as safetensors")


def cut_short(i: Inputs) -> Fault:
    path = i.model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return Fault((), "model.path", "model.safetensors: cannot be read as safetensors")


def pickled_weights(i: Inputs) -> Fault:
    (i.model / "model.safetensors").rename(i.model / "pytorch_model.bin")
    return Fault((), "model.path", "only safetensors checkpoints are supported")


def missing_shard(i: Inputs) -> Fault:
    names = load_file(i.model / "model.safetensors")
    (i.model / "model.safetensors").rename(i.model / "model-00001-of-00002.safetensors")
    of = {name: f"model-0000{1 + (name == NORM)}-of-00002.safetensors" for name in names}
    (i.model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of}))
    return Fault((), "model.path", "No such file or directory: ")


def index_of_absent_tensor(i: Inputs) -> Fault:
    names = dict.fromkeys(load_file(i.model / "model.safetensors"), "model.safetensors")
    i.edit_tensors(**{NORM: None})
    (i.model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return Fault((), "model.path", f"model.safetensors: the index names {NORM!r} there, the file lacks it")


def unknown_argument(i: Inputs) -> Fault:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed")
    return Fault(("server.options={schedule_polici: lpm}",), "server.options", "did you mean 'schedule_policy'?")


FAULTS = [
    unknown_argument,
    no_template,
    broken_template,
    template_that_refuses,
    no_end_token,
    no_tokenizer,
    small_vocabulary,
    null_role,
    a_gold_at_the_end,
    empty_file,
    everything_too_long,
    fewer_held_out,
    no_held_out,
    unknown_tool_format,
    missing_tensor,
    misshaped_tensor,
    mistyped_tensor,
    unexpected_tensor,
    corrupt_header,
    cut_short,
    pickled_weights,
    missing_shard,
    index_of_absent_tensor,
]


@pytest.mark.parametrize("make", FAULTS, ids=lambda make: make.__name__)
def test_a_fault_of_the_inputs_is_refused_with_its_key(inputs, make):
    fault = make(inputs)
    problems = tried(inputs, *fault.words, tools=[CALCULATOR] if fault.words == TURNS else [])["problems"]
    found = [problem for problem in problems if problem["key"] == fault.key]
    assert found and any(fault.said in problem["text"] for problem in found), problems


CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "x",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


@pytest.mark.parametrize("command", ["train", "sft", "eval"])
def test_nothing_is_refused_in_what_runs(inputs, command):
    words = () if command != "sft" else (SFT,)
    inputs.rows(*[{"prompt": "1+1=", "response": "2"} if command == "sft" else {"prompt": "1+1=", "answer": "2"}] * 3)
    found = tried(inputs, *words, command=command)
    assert (found["problems"], found["notices"]) == ([], [])


def test_demonstrations_are_tried_as_the_cold_start_reads_them(inputs):
    words = (SFT,)
    inputs.rows({"prompt": "1+1=", "response": "2"}, {"prompt": "1+1=", "response": None})
    (problem,) = tried(inputs, *words, command="sft")["problems"]
    assert problem["key"] == "data.path" and "train.jsonl:2: 'response' must be a text" in problem["text"]


def test_several_faults_are_told_at_once_and_each_check_has_its_say(inputs):
    for make in (no_held_out, empty_file, missing_tensor):
        make(inputs)
    assert [problem["key"] for problem in tried(inputs)["problems"]] == ["eval.path", "data.path", "model.path"]
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_a_run_that_goes_on_from_a_checkpoint_needs_no_weights_of_its_model(inputs):
    pickled_weights(inputs)
    assert tried(inputs, keeps_weights=True)["problems"] == []


def test_a_run_on_recorded_rollouts_reads_weights_alone(inputs):
    for make in (no_held_out, empty_file, missing_tensor):
        make(inputs)
    loaded = load_config(CONFIG, inputs.words(), "train")
    assert [one["key"] for one in run_checks(Trial(loaded.config, "replay"))["problems"]] == ["model.path"]
    loaded = load_config(
        CONFIG, inputs.words("kl.coefficient=0.1", f"kl.reference_path={inputs.model}", *CUSTOM), "train"
    )
    keys = [one["key"] for one in run_checks(Trial(loaded.config, "replay"))["problems"]]
    assert keys == ["model.path", "kl.reference_path"]


def test_the_start_of_a_run_on_recorded_rollouts_tries_what_its_ranks_read(inputs, monkeypatch):
    monkeypatch.setattr(local, "is_replay", lambda loaded, command: True)
    missing_tensor(inputs)
    loaded = load_config(CONFIG, inputs.words(), "train")
    with pytest.raises(ModelError, match="cannot be loaded as qwen3_moe:\n *missing: model.norm"):
        local.launch(loaded, "train", lambda line: None)
    assert not inputs.run_dir.exists()


def test_a_long_file_is_read_for_some_seconds_and_the_notice_says_how_far(inputs, monkeypatch):
    monkeypatch.setattr(input_trial, "READING_SECONDS", 0.0)
    inputs.rows(*[{"prompt": "1+1=", "answer": "2"}] * 1005, {"prompt": 3})
    answer = tried(inputs, "eval=null")
    assert answer["problems"] == []
    assert answer["notices"] == [
        f"{inputs.data / 'train.jsonl'}: its first 1000 rows were checked; the run checks the others when it starts"
    ]


def test_a_tokenizer_with_tokens_that_nothing_reaches_is_a_notice(inputs):
    size = json.loads((inputs.model / "config.json").read_text())["vocab_size"]
    raw = json.loads((inputs.model / "tokenizer.json").read_text())
    raw["added_tokens"].append(
        {"id": size, "content": "[PAD]", "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    )
    (inputs.model / "tokenizer.json").write_text(json.dumps(raw))
    answer = tried(inputs)
    assert answer["problems"] == [] and "special tokens of the tokenizer ('[PAD]') have ids" in answer["notices"][0]


@pytest.mark.parametrize("name", [NORM, EXPERT])
def test_every_value_is_read_where_that_is_asked_for(inputs, name):
    def read() -> dict[str, Any]:
        return read_weights(Trial(load_config(CONFIG, inputs.words(), "train").config, "train"))

    assert "every value is finite" in read()["notices"][0]
    values = inputs.tensor(name)
    values.view(-1)[-1] = float("nan")
    inputs.edit_tensors(**{name: values})
    assert tried(inputs)["problems"] == []  # headers say nothing of values
    (problem,) = read()["problems"]
    assert f"not finite: {name} in model.safetensors holds values that are NaN" in problem["text"]


# --- the commands -----------------------------------------------------------------------------------------------------


def test_commands_end_before_anything_starts(inputs, capsys):
    no_template(inputs)
    for command in (["plan", "--command", "train"], ["train"]):
        assert main([*command[:1], str(CONFIG), *command[1:], *inputs.words(*CHAT)]) == 2
        told = capsys.readouterr().err
        assert "override 'data.chat_template=true': data.chat_template: the tokenizer has no chat template" in told
        assert not inputs.run_dir.exists()


def test_the_plan_reads_weights_when_asked(inputs, capsys):
    values = inputs.tensor(NORM)
    values[0] = float("inf")
    inputs.edit_tensors(**{NORM: values})
    assert main(["plan", str(CONFIG), "--read-weights", *inputs.words()]) == 2
    told = capsys.readouterr().err
    assert f"model.path: {inputs.model} cannot be loaded as qwen3_moe:\n  not finite: {NORM} in model.saf" in told


def test_without_the_libraries_of_ranks_the_plan_says_what_it_did_not_try(inputs, monkeypatch):
    loaded = load_config(CONFIG, inputs.words(), "train")
    monkeypatch.setattr(trial_process, "_NEEDED", ("torch", "no_such_module"))
    (notice,) = trial_process.try_inputs(loaded, "train")
    assert notice.startswith("no_such_module cannot be imported here")
    monkeypatch.setattr(trial_process, "_NEEDED", ())
    monkeypatch.setattr(trial_process, "DEADLINE_SECONDS", 0.01)
    (notice,) = trial_process.try_inputs(loaded, "train")
    assert "were not read within 0.01 s" in notice


@pytest.mark.parametrize("blocked", ["file", "link"])
def test_a_run_folder_that_cannot_be_made_is_said_by_the_plan(inputs, capsys, blocked):
    if blocked == "file":
        inputs.run_dir.write_text("")
    else:
        inputs.run_dir.symlink_to(inputs.data / "nowhere")
    assert main(["plan", str(CONFIG), "--command", "train", *inputs.words()]) == 9
    assert f"run.dir: {inputs.run_dir / 'train'} cannot be written: {inputs.run_dir} is no folder" in (
        capsys.readouterr().err
    )


def test_an_error_of_another_module_is_told_as_the_class_of_errors_that_it_is(made):
    trial = Trial(load_config(CONFIG, [f"model.path={made}/model"], command="train").config, "train")
    with trial.at("run.dir"):
        raise DamagedFileError("damaged")
    assert [problem["kind"] for problem in trial.problems] == ["FolderError"]


def test_a_process_that_says_what_is_no_text_is_shown_all_the_same(monkeypatch):
    says = "import sys; sys.stderr.buffer.write(b'bad \\xff byte'); sys.exit(3)"
    monkeypatch.setattr(trial_process, "_COMMAND", (sys.executable, "-c", says))
    with pytest.raises(RankError, match="exit code 3 and no answer:\nbad \ufffd byte"):
        trial_process.read_weights(load_config(CONFIG, command="train"), "train")


# --- functions in place of built-in parts -------------------------------------------------------------------------

HOOKS = """
import torch

def fine(inputs): return inputs.rewards
def by_group(inputs): return inputs.rewards[:3]
def term(inputs): return inputs.sequence_advantages * inputs.sequence_log_ratio.exp()
def fixed(inputs): return inputs.sequence_advantages
def root(inputs): return inputs.sequence_log_ratio.square().sqrt()
def keep(group): return len(group.rewards)

class Forgetful:
    def __init__(self, rows, *, seed): self.number, self.rows = seed, rows
    def next(self):
        self.number = (self.number + 1) % len(self.rows)
        return self.number
    def observe(self, results): pass
    def state(self): return None
    def restore(self, state): pass
"""


def term(name: str) -> list[str]:
    return ["algorithm=custom", f"objective={{ratio: sequence, function: '{name}'}}"]


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["advantage=trial_hooks:absent"], "advantage.function", "has no function 'absent'"),
        (["advantage=trial_hooks:by_group"], "advantage.function", "returned a tensor of shape [3]; [6] was expected"),
        (term("trial_hooks:fixed"), "objective.function", "its terms have no gradient"),
        (term("trial_hooks:root"), "objective.function", "the gradient is not finite where"),
        (["rollout.group_filter=trial_hooks:keep"], "rollout.group_filter", "returned 2 for the group of trial:0"),
        (["data.source=trial_hooks:Forgetful"], "data.source", "after restore(state()) the next rows are"),
    ],
)
def test_a_hook_is_tried_before_a_run_and_refused_with_its_key(inputs, tmp_path, monkeypatch, overrides, key, said):
    (tmp_path / "trial_hooks.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load_config(CONFIG, inputs.words(*overrides), "train").config
    (problem,) = run_checks(Trial(config, "train"))["problems"]
    assert (problem["key"], problem["kind"]) == (key, "HookError") and said in problem["text"]


def test_the_shipped_hooks_pass_the_trial(inputs, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    words = inputs.words(
        *term("examples.hooks:sspo"),
        "advantage=examples.hooks:maxrl",
        "rollout.group_filter={function: 'examples.hooks:keep_between', options: {lowest: 0.1}}",
        "data.source={function: 'examples.hooks:Curriculum', options: {difficulty_key: answer}}",
    )
    assert not run_checks(Trial(load_config(CONFIG, words, "train").config, "train"))["problems"]
