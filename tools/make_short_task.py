"""Make a short task for a pretrained model: `python tools/make_short_task.py OUT_DIR [--task json|arithmetic]`.

OUT_DIR gets train.jsonl and heldout.jsonl, rows of `prompt` and `answer`; no problem is in both. The same arguments
make the same bytes. Existing files with other content are an error. Exit code 0: both files exist; 2: they cannot be
made.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import get_args

from make_quickstart import install

from gspo_mega.base.errors import DataError, GspoMegaError
from gspo_mega.base.untrusted import printable_output
from gspo_mega.data.short_tasks import TASKS, Split


@printable_output()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make_short_task", description="Make a short task for a small pretrained model."
    )
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="folder for the files; created if missing")
    parser.add_argument(
        "--task", choices=TASKS, default="json", help="JSON objects of two values, or sums and products"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the problems (default: 1)")
    parser.add_argument("--num-train", type=int, default=512, help="train problems (default: 512)")
    parser.add_argument("--num-heldout", type=int, default=96, help="held-out problems (default: 96)")
    options = parser.parse_args(arguments)
    numbers = {"train": options.num_train, "heldout": options.num_heldout}
    try:
        options.out_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=options.out_dir) as name:
            making = Path(name, "data")
            making.mkdir()
            for split in get_args(Split):
                try:
                    rows = list(TASKS[options.task].rows(split, numbers[split], options.seed))
                except ValueError as error:
                    raise DataError(str(error)) from error
                text = "".join(json.dumps(row) + "\n" for row in rows)
                (making / f"{split}.jsonl").write_text(text, encoding="utf-8")
            install(making, options.out_dir)
    except (GspoMegaError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{options.out_dir}: {options.num_train} train problems, {options.num_heldout} held-out problems")
    return 0


if __name__ == "__main__":
    sys.exit(main())
