"""Make and score items of the package reasoning-gym: `PYTHON reasoning_gym_worker.py`. This is run as a file, by a
Python that has the package, and imports no module of gspo_mega.

It speaks JSON lines on standard input and output. The first line out is {"ready": version} or {"error": text}. Then,
for each line in, one out: {"make": {"task", "options", "seed", "size", "first", "number"}} gives {"rows": [...]}, and
{"score": {"task", "options", "seed", "size", "index", "digest"}, "answer": text} gives {"score": number}; each may give
{"error": text} instead. An item is known by its place: the package makes it from its task's options and seed + index,
so a row needs no copy of what the package compares with. The digest says whether it is the item from which the row was
made. Some tasks iterate over sets of strings, whose order Python randomizes per process; PYTHONHASHSEED fixes it here.
"""

import hashlib
import importlib
import importlib.metadata
import json
import os
import random
import resource
import sys

# In addition to what the package takes when it is imported. Scoring processes set their own bound after they have
# started this.
MEMORY_BYTES = 4 * 1024**3


def main():
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, "-P", __file__], {**os.environ, "PYTHONHASHSEED": "0"})
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a task prints is no reply
    try:
        package = importlib.import_module("reasoning_gym")
    except Exception as error:  # a package may raise anything while it is imported
        missing = isinstance(error, ModuleNotFoundError) and error.name == "reasoning_gym"
        text = "it has no package reasoning-gym" if missing else f"reasoning-gym: {type(error).__name__}: {error}"
        say(replies, {"error": text})
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    say(replies, {"ready": version_of(package)})
    made = {}
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        try:
            reply = {"rows": rows(package, made, asked["make"])} if "make" in asked else scored(package, made, asked)
        except Exception as error:  # a task may raise anything
            reply = {"error": f"{type(error).__name__}: {error}"[:1000]}
        say(replies, reply)


def version_of(package):
    """Return the installed release; the package's own `__version__` is outdated (0.1.19 in release 0.1.25)."""
    try:
        return importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(package, "__version__", ""))


def rows(package, made, asked):
    items = dataset_of(package, made, asked)
    return [row(items, asked, index) for index in range(asked["first"], asked["first"] + asked["number"])]


def row(items, asked, index):
    item = item_of(items, asked, index)
    place = {key: asked[key] for key in ("task", "options", "seed", "size")} | {"index": index, "digest": digest(item)}
    if digest(item_of(items, asked, index)) != place["digest"]:
        raise ValueError(f"item {index} is another one when it is made again, so that no answer could be scored")
    return {"prompt": item["question"], "answer": item["answer"], "reasoning_gym": place}


def scored(package, made, asked):
    place = asked["score"]
    items = dataset_of(package, made, place)
    item = item_of(items, place, place["index"])
    if digest(item) != place["digest"]:
        return {"error": f"{place['task']} {place['index']}: this reasoning-gym makes another item of that place"}
    return {"score": float(items.score_answer(asked["answer"], item))}


def item_of(items, place, index):
    random.seed(f"{place['seed']} {index}")  # for tasks that also draw from Python's global generator
    return items[index]


def dataset_of(package, made, place):
    key = json.dumps([place[name] for name in ("task", "options", "seed", "size")], sort_keys=True)
    if key not in made:
        if len(made) >= 256:
            made.clear()
        random.seed(key)
        made[key] = package.create_dataset(place["task"], seed=place["seed"], size=place["size"], **place["options"])
    return made[key]


def digest(item):
    text = json.dumps([item["question"], item["answer"]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def say(replies, message):
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    main()
