"""A pytest plugin: which refusals do the tests reach, and does a test fail when the refusal's words are others?

Each test runs as always. Then, for every refusal that it reached and that no test was seen to read before, it runs once
more with that refusal's words replaced; if it fails, it reads them. Writes to the file named in REFUSALS_READ.

The tests that `readers.txt` names come first, and no other runs once every refusal has been read: the list saves time
and decides nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import refusals
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).parents[3]
reached: dict[str, list[str]] = {}
read: dict[str, str] = {}
_now: set[str] = set()
_spoiled: list[str] = []
_unread = set(refusals.refusals(ROOT))


def _spoil(site: str, words: str) -> str:
    _now.add(site)
    return "~~~" if site in _spoiled else words


refusals.spoil_through(ROOT, _spoil)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    listed = refusals.listed_readers()
    items.sort(key=lambda item: refusals.reader_name(item.nodeid) not in listed)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    if not _unread:
        return True
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    _now.clear()
    reports = runtestprotocol(item, nextitem=item, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    mine = sorted(_now)
    for site in mine:
        reached.setdefault(site, []).append(item.nodeid)
    if all(report.passed for report in reports):
        for site in mine:
            if site not in read:
                _spoiled[:] = [site]
                item._initrequest()
                if any(report.failed for report in runtestprotocol(item, nextitem=item, log=False)):
                    read[site] = item.nodeid
                    _unread.discard(site)
                _spoiled.clear()
    item.session._setupstate.teardown_exact(nextitem if _unread else None)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_sessionfinish():
    Path(os.environ["REFUSALS_READ"]).write_text(json.dumps({"reached": reached, "read": read}))
