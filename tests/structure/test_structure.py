"""The shape of the source tree: layers, one home for each danger, and what never stands in the product."""

import subprocess
import warnings
from pathlib import Path

import house
import pytest

ROOT = Path(__file__).parents[2]


def assert_none(broken):
    assert not broken, "\n" + "\n".join(sorted({str(item) for item in broken}))


def test_layers_and_homes():
    assert_none(house.check_imports(ROOT))


def test_homes_exist():
    assert_none(house.check_homes(ROOT))


def test_print_and_swallowed_errors():
    assert_none(house.check_calls(ROOT))


def test_length_and_docstrings():
    assert_none(house.check_files(ROOT))
    long = [f"{where}: {lines} lines" for where, lines in house.lengths(ROOT) if lines > house.MANY_LINES]
    if long:
        warnings.warn(f"more than {house.MANY_LINES} lines: {', '.join(long)}", stacklevel=1)


def test_words():
    assert_none(house.check_words(ROOT))


def test_names_of_test_files():
    assert_none(house.check_tests(ROOT))


def test_top_level():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert_none(house.check_top_level({line.split("/")[0] for line in listed.splitlines()}))


# Every rule can be broken, and is then reported; its neighbour that is allowed is not.


def tree(tmp_path, files):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "source", "rule"),
    [
        ("gspo_mega/models/x.py", "from gspo_mega.cpu.backend import install", "models may not import cpu"),
        ("gspo_mega/models/x.py", "import gspo_mega.plan.layout", "models may not import plan"),
        ("gspo_mega/rollout/x.py", "import gspo_mega.train.worker", "rollout may not import train"),
        ("gspo_mega/cpu/x.py", "from gspo_mega.engine import model", "cpu may not import engine"),
        ("gspo_mega/sync/x.py", "from gspo_mega import rollout", "sync may not import rollout"),
        (
            "gspo_mega/data/x.py",
            "def f():\n    from gspo_mega.rewards import scoring_pool",
            "data may not import rewards",
        ),
        ("gspo_mega/base/records.py", "from gspo_mega.config import Config", "base may not import config"),
        ("gspo_mega/train/x.py", "from gspo_mega.cli import plan", "train may not import cli"),
        ("gspo_mega/models/x.py", "from . import spec", "relative import; write the whole name"),
        ("gspo_mega/extra/x.py", "", "extra is none of the rooms"),
        (
            "gspo_mega/sync/x.py",
            "from megatron.core.models.gpt import GPTModel",
            "megatron belongs in checkpoint, cpu, engine",
        ),
        ("gspo_mega/engine/x.py", "import megatron.training", "megatron.training belongs in no file"),
        (
            "gspo_mega/engine/x.py",
            "from megatron.core import parallel_state as p",
            "megatron.core.parallel_state belongs in engine/process_groups.py",
        ),
        (
            "gspo_mega/engine/x.py",
            "import megatron.core\nmegatron.core.mpu.f()",
            "megatron.core.mpu belongs in no file",
        ),
        (
            "gspo_mega/algorithm/x.py",
            "import torch\ntorch.distributed.barrier()",
            "torch.distributed belongs in checkpoint, cpu, engine, launcher/all_reduce_probe.py, sync, train, verify",
        ),
        (
            "gspo_mega/algorithm/x.py",
            "import torch.distributed as dist",
            "torch.distributed belongs in checkpoint, cpu, engine, launcher/all_reduce_probe.py, sync, train, verify",
        ),
        (
            "gspo_mega/algorithm/x.py",
            "from torch import distributed",
            "torch.distributed belongs in checkpoint, cpu, engine, launcher/all_reduce_probe.py, sync, train, verify",
        ),
        (
            "gspo_mega/train/x.py",
            "import aiohttp",
            "aiohttp belongs in agents/adapters/openenv.py, agents/endpoint.py, report/live_page.py, rewards/remote.py, rollout",
        ),
        ("gspo_mega/train/x.py", "import sglang.srt", "sglang belongs in cpu, rollout"),
        ("gspo_mega/checkpoint/x.py", "from pickle import loads", "pickle belongs in checkpoint/safe_pickle.py"),
        ("gspo_mega/engine/x.py", "import os\nos.environ['A'] = '1'", "os.environ belongs in"),
        ("gspo_mega/engine/x.py", "from os import environ", "os.environ belongs in"),
        ("gspo_mega/engine/x.py", "import os as o\no.getenv('A')", "os.getenv belongs in no file"),
        ("gspo_mega/config/x.py", "import torch", "config works without torch"),
        ("gspo_mega/agents/x.py", "from gspo_mega.rollout import collector", "agents may not import rollout"),
        ("gspo_mega/agents/x.py", "import torch", "agents works without torch"),
        ("gspo_mega/plan/x.py", "from numpy.random import default_rng", "plan works without numpy"),
    ],
)
def test_a_forbidden_import_is_reported(tmp_path, file, source, rule):
    broken = house.check_imports(tree(tmp_path, {file: f'"""x"""\n{source}\n'}))
    assert [item.path for item in broken] != [] and all(item.path == file for item in broken)
    assert any(item.rule.startswith(rule) for item in broken)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "gspo_mega/engine/process_groups.py",
            "from megatron.core import parallel_state\nimport torch.distributed as dist",
        ),
        ("gspo_mega/rollout/x.py", "import aiohttp, sglang\nfrom gspo_mega.data.stream import PromptStream"),
        ("gspo_mega/cpu/backend.py", "import os\nos.environ['A'] = '1'\nimport megatron.core"),
        (
            "gspo_mega/plan/x.py",
            (
                "import os\nos.path.join('a')\nfrom gspo_mega.models.spec import ModelSpec\nfrom gspo_mega import"
                " __version__"
            ),
        ),
        (
            "gspo_mega/cli/x.py",
            "from gspo_mega.train.worker import main\nfrom gspo_mega.launcher import supervisor",
        ),
        ("gspo_mega/launcher/all_reduce_probe.py", "from gspo_mega.train.worker import rendezvous"),
        ("tools/x.py", "import gspo_mega.verify.certify.vectors"),
    ],
)
def test_an_allowed_import_is_not_reported(tmp_path, file, source):
    assert house.check_imports(tree(tmp_path, {file: f'"""x"""\n{source}\n'})) == []


def test_other_rules_report_and_allow(tmp_path):
    root = tree(
        tmp_path,
        {
            "gspo_mega/data/a.py": '"""x"""\nprint(1)\ntry:\n    f()\nexcept Exception:\n    pass\n',
            "gspo_mega/data/b.py": (
                '"""x"""\ntry:\n    f()\nexcept (OSError, BaseException):\n    ...\nwith'
                " contextlib.suppress(Exception):\n    f()\n"
            ),
            "gspo_mega/data/c.py": (
                '"""x"""\ntry:\n    f()\nexcept OSError:\n    pass\ntry:\n    f()\nexcept Exception as error:\n   '
                " record(error)\n"
            ),
            "gspo_mega/cli/d.py": '"""x"""\nprint(1)\n',
            "gspo_mega/data/long.py": '"""x"""\n' + "x = 1\n" * 1000,
            "gspo_mega/data/just.py": '"""x"""\n' + "x = 1\n" * 999,
            "gspo_mega/data/bare.py": "x = 1\n",
            "gspo_mega/data/__init__.py": "",
            "configs/a.yaml": "path: /work/x\n# the next session\nkey: session\n",
            "launch/a.sh": "# as in DESIGN\n# a new session of its own\n# TODO: see issue 7\n",
            "gspo_mega/models/a.py": '"""x"""\n',
            "gspo_mega/rollout/x.py": '"""x"""\n',
            "gspo_mega/report/live_page.py": '"""x"""\n',
            "tests/unit/test_a.py": "x = 1\n" * 1001,
            "tests/numerics/test_a.py": "",
            "tests/numerics/conftest.py": "",
            "tests/unit/conftest.py": "",
            "tests/unit/__init__.py": "",
            "tests/unit/test_prepared.py": "from x import sglang_hooks\nsglang_hooks.activate()\n",
            "tests/unit/test_layers.py": "from x import sglang_hooks, sglang_layers\nsglang_hooks.activate()\n",
        },
    )
    assert [(item.path, item.line) for item in house.check_calls(root)] == [
        ("gspo_mega/data/a.py", 2),
        ("gspo_mega/data/a.py", 5),
        ("gspo_mega/data/b.py", 4),
        ("gspo_mega/data/b.py", 6),
    ]
    assert [item.path for item in house.check_files(root)] == [
        "gspo_mega/data/long.py",
        "tests/unit/test_a.py",
        "gspo_mega/data/bare.py",
    ]
    homes = {item.path: item.rule for item in house.check_homes(root)}
    assert "gspo_mega/report/live_page.py" not in homes and "gspo_mega/rollout" not in homes
    assert homes["gspo_mega/train/gpu_variables.py"] == "a home that does not exist"
    assert [(item.path, item.line) for item in house.check_words(root)] == [
        ("configs/a.yaml", 1),
        ("configs/a.yaml", 2),
        ("launch/a.sh", 1),
    ]
    assert [(item.path, item.line) for item in house.check_tests(root)] == [
        ("tests/unit/__init__.py", 1),
        ("tests/unit/test_a.py", 1),
        ("tests/unit/test_prepared.py", 2),
    ]
    assert [item.path for item in house.check_top_level({"gspo_mega", "notes.md"})] == ["notes.md"]
