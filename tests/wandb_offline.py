"""W&B offline, as a script: `write FOLDER` logs two steps, `read FOLDER` prints the history of what lies there as JSON.

Importing W&B starts threads, and ranks that are forked beside threads can crash: tests run this in its own process.
"""

import json
import struct
import sys
from pathlib import Path

from wandb.proto import wandb_internal_pb2

from longstraw_megatron.config import WandbConfig
from longstraw_megatron.logging import MetricsWriter


def wandb_records(content: bytes) -> list[bytes]:
    """Records of W&B's transaction log: LevelDB's format (blocks of 32 KiB; crc, length, type) behind 7 bytes."""
    records, parts, at = [], [], 7
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        parts.append(content[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # full, last
            records.append(b"".join(parts))
            parts = []
    return records


def write(folder: Path) -> None:
    settings = WandbConfig(
        mode="offline", project="test", entity=None, name="n", group=None, job_type=None, id=None, tags=()
    )
    with MetricsWriter(folder, settings) as writer:
        writer.log(1, {"train/loss": 0.125})
        writer.log(2, {"train/loss": 0.25})
        assert writer.wandb_id


def read(folder: Path) -> list[dict]:
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    history = []
    for data in wandb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            history.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return history


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        print(json.dumps(read(Path(sys.argv[2]))))
