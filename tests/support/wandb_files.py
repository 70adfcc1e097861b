"""Reads the rows in an offline file of W&B, for tests: a log of records in blocks, as LevelDB writes them."""

import struct
from pathlib import Path

_BLOCK, _HEADER = 32768, 7


def offline_files(folder):
    """The files of all starts, oldest first, below a sink's folder."""
    return sorted(Path(folder).glob("wandb/offline-run-*/run-*.wandb"))


def offline_rows(file):
    """(step, the values' JSON texts by name) of the rows of a file, up to where it was cut off."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in _records(Path(file).read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            rows.append((record.history.step.num, items))
    return rows


def _records(content):
    """Whole records. Each is one chunk (kind 1), or a first (2), middle (3) and last (4) one."""
    place, record = _HEADER, b""  # the file begins with a mark of W&B's own of that length
    while place + _HEADER <= len(content):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER:
            place += left
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + _HEADER])
        piece = content[place + _HEADER : place + _HEADER + length]
        place += _HEADER + length
        if len(piece) < length or kind == 0:
            return
        record = piece if kind in (1, 2) else record + piece
        if kind in (1, 4):
            yield record
