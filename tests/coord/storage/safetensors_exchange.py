#!/usr/bin/env python3
"""Exchanges safetensors files with safetensors_exchange.cc, both ways: a reader and a writer made here from the format's
description alone (https://github.com/huggingface/safetensors#format). Usage: safetensors_exchange.py PROGRAM"""

import json
import math
import pathlib
import struct
import subprocess
import sys
import tempfile

SIZES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
         "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "BOOL": 1}


def refuse_twice(pairs):
    assert len({name for name, _ in pairs}) == len(pairs), pairs
    return dict(pairs)


def read(blob):
    """{name: (dtype, shape, bytes)}, in the order of the bytes, and the metadata."""
    (length,) = struct.unpack("<Q", blob[:8])
    text = blob[8:8 + length].decode("utf-8")
    assert text[0] == "{" and text.rstrip(" ")[-1] == "}", text
    header = json.loads(text, object_pairs_hook=refuse_twice)
    metadata = header.pop("__metadata__", {})
    data, at, found = blob[8 + length:], 0, {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        assert set(entry) == {"dtype", "shape", "data_offsets"}, entry
        begin, end = entry["data_offsets"]
        assert begin == at and end - begin == math.prod(entry["shape"]) * SIZES[entry["dtype"]], entry
        found[name] = (entry["dtype"], entry["shape"], data[begin:end])
        at = end
    assert at == len(data)
    return found, metadata


def write(tensors, metadata=None, **style):
    header, data = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, shape, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header, **style).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def main():
    program = sys.argv[1]
    folder = pathlib.Path(tempfile.mkdtemp(prefix="holdfast_test_"))
    try:
        # Theirs, read here.
        ours = folder / "theirs"
        subprocess.run([program, "write", ours], check=True)
        blob = ours.read_bytes()
        found, metadata = read(blob)
        assert metadata == {"format": "pt", "k\n": "\u20ac"}, metadata
        assert len(found) == 3 * len(SIZES) + 1, len(found)
        for dtype in SIZES:
            assert found[f"of/{dtype}"][:2] == (dtype, [2, 3])
            assert found[f"scalar of {dtype}"][:2] == (dtype, [])
            assert found[f"none of {dtype}"] == (dtype, [3, 0], b"")
        assert found["\u00e9 \"\\\n\x01"][:2] == ("U8", [1])
        data = b"".join(values for _, _, values in found.values())
        assert data == bytes(i * 7 % 256 for i in range(len(data))), "other bytes"
        # The bytes are those that the description leaves no choice in, once order and spacing are chosen.
        assert blob == write(found, metadata, ensure_ascii=False, separators=(",", ":")), "another encoding"

        # Ours, read there, in spellings of JSON that other writers use.
        tensors = {"a": ("F32", [2], struct.pack("<2f", 1.5, -2)), "\u00e9\x1b\n": ("BOOL", [], b"\x01"),
                   "nothing": ("I64", [0], b""), "\U0001f600": ("C64", [1], struct.pack("<2f", 0, math.inf))}
        for style in ({}, {"indent": 1}, {"ensure_ascii": False}, {"separators": (",", ":")}):
            (folder / "mine").write_bytes(write(tensors, {"\u00fc": "x\x00"}, **style))
            done = subprocess.run([program, "read", folder / "mine"], capture_output=True, text=True)
            expected = ["metadata " + "\u00fc".encode().hex() + " 7800"] + [
                f"tensor {name.encode().hex()} {dtype} [{','.join(map(str, shape))}] {values.hex()}"
                for name, (dtype, shape, values) in tensors.items()]
            assert done.returncode == 0 and done.stdout.splitlines() == expected, (style, done)

        # And refused there when one byte is missing or too many.
        blob = write(tensors)
        for damaged in (blob[:-1], blob + b"\0", b""):
            (folder / "mine").write_bytes(damaged)
            done = subprocess.run([program, "read", folder / "mine"], capture_output=True, text=True)
            assert done.returncode == 1 and done.stdout == "" and "no safetensors file" in done.stderr, done
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


if __name__ == "__main__":
    main()
