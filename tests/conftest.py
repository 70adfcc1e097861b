"""GSPO_REQUIRE=sglang,slurm,reasoning-gym,chromium,pyarrow,smollm2: a test skipped for want of one of these fails instead.

Where a machine is meant to have them, a skip would hide that it lost them. A skip names what is missing in its
reason; that is what is looked for.

What the tests import stays until the end: it is never searched for garbage.
"""

import atexit
import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A property is not a benchmark: an example may take longer on a busy machine. The examples are the same in every run;
# `--hypothesis-profile=explore` looks for others.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("any_speed", settings.get_profile("explore"), derandomize=True)
settings.load_profile("any_speed")

gc.disable()  # while tests are collected


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # compiled libraries report what Python's last collection leaves


# What several folders of tests share.
sys.path.insert(0, str(Path(__file__).parent / "support"))

# A shell that runs the tests in the background lets them ignore SIGINT, `nohup` SIGHUP, and every process they start
# would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _missed_requirement(report) -> str | None:
    """The required thing that the reason of a skipped `report` names."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return None
    reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr).lower()
    required = (word.strip().lower() for word in os.environ.get("GSPO_REQUIRE", "").split(","))
    return next((word for word in required if word and word in reason), None)


def _fail_if_required(report):
    missed = _missed_requirement(report)
    if missed is not None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"GSPO_REQUIRE names {missed}: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return _fail_if_required((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return _fail_if_required((yield))
