import subprocess
import sys

import pytest

from gspo_mega.base.errors import ConfigError
from gspo_mega.config import data_sources, load_config


def refused(path, overrides=(), command=None):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, command)
    return str(caught.value).splitlines()


def test_the_smallest_configuration(write):
    loaded = load_config(write())
    assert loaded.config.optimizer.lr == 1e-6
    assert loaded.config.objective.clip_low == 3e-4
    assert loaded.config.reward.functions[0].function == "gsm8k"
    assert loaded.notices == ()


def test_positions_of_given_keys_and_of_absent_ones(write):
    path = write("objective:\n  dual_clip: 3\n")
    loaded = load_config(path, ["train.num_steps=3"])
    assert loaded.where("objective.dual_clip") == f"{path}:9:3"
    assert loaded.where("objective.clip_low") == f"{path}:8:1"
    assert loaded.where("train.num_steps") == "override 'train.num_steps=3'"
    assert loaded.where("kl.coefficient") == str(path)
    assert loaded.where("reward.functions.0.function") == f"{path}:6:1"


def test_all_problems_are_reported_at_once_in_the_order_of_the_file(write):
    path = write(
        text="""\
        run: {name: test, nme: x}
        model: {path: m}
        batch: {prompts_per_step: 4, group_size: 0, micro_batch_tokens: 1_000}
        optimizer:
          lr: 1e-6
          lr: 2e-6
          betas1: 0.9
        data: {path: x.jsonl}
        reward: gsm8k
        rollout: {max_new_tokens: 1e3, filter_constant_groups: yes, temperature: -1}
        algoritm: gspo
        clip_low: 3e-3
        precision: fp16
        zzz: 1
        """
    )
    lines = refused(path)
    expected = [
        "1:19: run.nme: unknown key; did you mean 'name'?",
        "3:30: batch.group_size: is 0; must be >= 1",
        "3:45: batch.micro_batch_tokens: is '1_000'; must be a whole number; write 1000",
        "6:3: optimizer.lr: duplicate key, first at line 5; keep one",
        "7:3: optimizer.betas1: unknown key; did you mean 'beta1'?",
        "8:1: data.max_prompt_tokens: missing; it has no default (Longer prompts are left out and counted.)",
        "10:11: rollout.max_new_tokens: is 1000.0; must be a whole number; write 1000",
        "10:32: rollout.filter_constant_groups: is 'yes'; must be true or false; write true",
        "10:61: rollout.temperature: is -1; must be > 0",
        "11:1: algoritm: unknown key; did you mean 'algorithm'?",
        "12:1: clip_low: unknown key here; did you mean 'objective.clip_low'?",
        "13:1: precision: is 'fp16'; valid: 'fp32', 'bf16' or 'fp8'; did you mean 'bf16'?",
    ]
    assert lines[: len(expected)] == [f"{path}:{line}" for line in expected]
    assert lines[-1].startswith(f"{path}:14:1: zzz: unknown key; valid: run, model, algorithm,")
    assert len(lines) == len(expected) + 1


def test_a_mistyped_key_that_is_the_missing_one_is_one_error(write):
    """What is missing is only the consequence. Another key that is missing, too, keeps its line."""
    text = """\
        run: {name: test}
        model: {path: m}
        batch: {prompts_per_step: 4, groupsize: 4, micro_batch_tokens: 64}
        data: {paht: x.jsonl}
        reward: gsm8k
        rollout: {max_new_tokens: 16}
        optimizer: {lr: 1e-6}
        """
    path = write(text=text)
    assert refused(path) == [
        f"{path}:3:30: batch.groupsize: unknown key; did you mean 'group_size'?",
        f"{path}:4:1: data.max_prompt_tokens: missing; it has no default (Longer prompts are left out and counted.)",
        f"{path}:4:8: data.paht: unknown key; did you mean 'path'?",
    ]
    # A mistyped section is one error, too; a section that is there does not hide what it misses.
    path = write(text=text.replace("batch:", "bacth:").replace("paht", "path").replace("reward", "data.path"))
    lines = refused(path)
    assert any(": bacth: unknown key; did you mean 'batch'?" in line for line in lines)
    assert not any(": batch: missing" in line for line in lines)
    assert any(": reward: missing" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("# only a comment\n", "empty"),
        ("- a\n", "a list"),
        ("words\n", "'words'"),
        ("run: {name: 1e3}\n", "run.name: is 1000.0; must be text; quote it"),
        ("run: {name: a/b}\n", "run.name: is 'a/b'; valid: letters"),
        ("run:\n", "run: is empty (null); must be a section"),
        ("run: {name: ''}\n", "run.name: is empty; must be some text"),
        ("run: {name: a, seed: '7'}\n", "run.seed: is '7'; must be a whole number; write 7, without quotes"),
        ("server: {attention_data: '1e0'}\n", "server.attention_data: is '1e0'; must be a whole number"),
        (
            "data: {chat_template: 'True'}\n",
            "data.chat_template: is 'True'; must be true or false; write true, without",
        ),
        (
            "reward: {functions: [math]}\n",
            "reward.functions.0: is 'math'; must be a section: keys with values, indented",
        ),
        ("run: {name: a, seed: true}\n", "run.seed: is true; must be a whole number"),
        ("run: {name: a, seed: 3000000000}\n", "run.seed: is 3000000000; must be < 2147483648"),
        ("data: {reasoning_gym: {tasks: []}}\n", "data.reasoning_gym.tasks: is empty; must hold at least one entry"),
        ("data: {sources: x}\n", "data.sources: is 'x'; must be a list"),
        ("data: {sources: [{name: a, pth: b}]}\n", "data.sources.0.pth: unknown key; did you mean 'path'?"),
        ("server: {options: 3}\n", "server.options: is 3; must be keys with values"),
        ("advantage: {std_ddof: 2}\n", "advantage.std_ddof: is 2; valid: 0 or 1"),
        ("a:\n\tb: 1\n", "tab"),
    ],
)
def test_bad_files(write, text, said):
    assert any(said in line for line in refused(write(text=text)))


def test_a_file_that_cannot_be_read(tmp_path, write):
    write(name="quickstart.yaml")
    assert refused(tmp_path / "quikstart.yaml") == [
        f"{tmp_path}/quikstart.yaml: no such file; did you mean {tmp_path}/quickstart.yaml?"
    ]
    (tmp_path / ".hidden.yaml").touch()
    assert refused(tmp_path / "other.yaml") == [f"{tmp_path}/other.yaml: no such file; in {tmp_path}: quickstart.yaml"]
    assert "a folder" in refused(tmp_path)[0]
    assert "no such file" in refused(tmp_path / "none" / "x.yaml")[0]
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("a: 1\nb: é\n".encode("latin-1"))
    assert refused(latin) == [f"{latin}:2: not UTF-8 text; save the file as UTF-8"]
    long = tmp_path / ("a" * 300)
    assert refused(long) == [f"{long}: cannot be read: File name too long"]


def test_a_reward_section_and_its_shorthand_are_the_same(write):
    short = load_config(write())
    long = load_config(write("", text=write().read_text().replace("gsm8k", "{functions: [{function: gsm8k}]}")))
    assert short.config == long.config


def test_data_sources(write):
    assert [(s.name, s.path) for s in data_sources(load_config(write()).config.data)] == [("train", "train.jsonl")]
    odd = load_config(write(), ["data.path=/a/my file (1).jsonl"]).config
    assert [s.name for s in data_sources(odd.data)] == ["my-file-1-"]
    several = load_config(write(), ["data.path=", "data.sources=[{name: a, path: x}, {name: b, path: y, weight: 3}]"])
    assert [(s.name, s.weight) for s in data_sources(several.config.data)] == [("a", 1.0), ("b", 3.0)]


def test_loading_and_planning_import_neither_torch_nor_numpy(write):
    """On a login node the answer comes at once: with these imports it would take seconds."""
    script = (
        "import sys\nfrom gspo_mega.config import load_config\nimport"
        " gspo_mega.plan, gspo_mega.cli.plan,"
        f" gspo_mega.cli.main\nload_config({str(write())!r})\nprint(sorted({{'torch', 'numpy', 'transformers',"
        " 'megatron', 'aiohttp'} & {m.split('.')[0] for m in sys.modules}))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_key_that_is_gone_names_its_successor(write):
    path = write("mismatch:\n  correction: mask\n  cap: 2.0\n")
    assert refused(path) == [
        f"{path}:10:3: mismatch.cap: is no longer a key: the bound is `bound_nats` now, in nats for a response of one"
        " token and divided by sqrt(L) for one of L; docs/mismatch.md"
    ]
    assert "is no longer a key" in refused(write(), ["mismatch.cap=3"])[0]
