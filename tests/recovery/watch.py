"""Notes what every point of a process finds changed on the disk, so that a change between two operations is seen.

Looks at names, sizes, inodes and times of everything under some folders, whoever changed it: what a native library or a
child process writes is seen as well. What is flushed to the disk is not.
"""

from __future__ import annotations

import json
import os

from gspo_mega.base import failpoints


def start(folders: list[str], file: str) -> None:
    """From here on each point reached adds a line to `file`: {"point", "changed": paths since the point before}."""
    reached, last = failpoints.reached, look(folders)

    def note(point: str) -> None:
        nonlocal last
        now = look(folders)
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(json.dumps({"point": point, "changed": differing(last, now)}) + "\n")
        last = now
        reached(point)

    failpoints.reached = note


def look(folders: list[str]) -> dict[str, tuple[int, int, int]]:
    """Everything under `folders`: path -> (inode, size, time of change)."""
    found = {}
    for folder in folders:
        for parent, inner, files in os.walk(folder):
            for path in [parent, *(os.path.join(parent, name) for name in [*inner, *files])]:
                stat = os.lstat(path)
                found[path] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return found


def differing(before: dict[str, tuple[int, int, int]], now: dict[str, tuple[int, int, int]]) -> list[str]:
    return sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))


def outside_operations(lines: list[dict]) -> list[str]:
    """What changed where no operation was under way: between a point after one operation and the next."""
    problems, under_way = [], ""
    for line in lines:
        point, changed = line["point"], line["changed"]
        if not under_way and changed:
            problems.append(f"before {point}: {', '.join(changed)}")
        name, _, side = point.rpartition(".")
        if side == "before":
            if under_way:
                problems.append(f"{point} inside {under_way}")
            under_way = name
        elif side == "after":
            if under_way != name:
                problems.append(f"{point} after {under_way or 'nothing'}")
            under_way = ""
    return problems
