#!/usr/bin/env python3
"""Checks that an #include never points upwards.

  collectives/  includes only its own
  coord/        may include collectives/
  ranks/        may include coord/, collectives/
  launch/       may include all of these
  tests/, bench/  may include everything; nothing includes them

Also: collectives/ and the scan include neither MPI (but in the MPI backend), CUDA, NCCL, Protobuf nor libtorch.
"""

import argparse
import pathlib
import re
import sys
import tempfile

MAY_INCLUDE = {
    "collectives": {"collectives"},
    "coord": {"coord", "collectives"},
    "ranks": {"ranks", "coord", "collectives"},
    "launch": {"launch", "ranks", "coord", "collectives"},
}
FOLDERS = set(MAY_INCLUDE) | {"tests", "bench"}
SUFFIXES = {".h", ".cc", ".cu", ".proto"}

FOREIGN = re.compile(r"^(mpi\.h|cuda|nccl|google/protobuf|torch|ATen|c10)|\.pb\.h$")
# A backend's own files, and what they are there to include.
NCCL = re.compile(r"^(nccl|cuda)")
BACKENDS = {
    "mpi_collective": re.compile(r"^mpi\.h$"),
    "nccl_collective": NCCL,
    "nccl_link": NCCL,
    "nccl_verdict": NCCL,
}
SCAN = pathlib.PurePosixPath("ranks/scan.cc")

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
IMPORT = re.compile(r'^\s*import\s+(?:public\s+|weak\s+)?"([^"]+)"', re.MULTILINE)
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def includes(path):
    # A comment could hide nothing that a compiler would see; an include's own "//" does not occur.
    text = COMMENT.sub("", path.read_text(encoding="utf-8", errors="replace").replace("\\\n", ""))
    return (IMPORT if path.suffix == ".proto" else INCLUDE).findall(text)


def resolve(root, source, name):
    """The project's file that `name` means in `source`, relative to root; None when it is not ours."""
    bases = [source.parent, root] + [root / layer / sub for layer in sorted(FOLDERS) for sub in ("include", ".")]
    for base in bases:
        found = (base / name).resolve()
        if found.is_file() and found.is_relative_to(root):
            return found.relative_to(root)
    # Generated, or not there: by its name.
    parts = pathlib.PurePosixPath(name).parts
    if parts[0] in FOLDERS:
        return pathlib.PurePosixPath(name)
    if parts[0] == "holdfast":
        return pathlib.PurePosixPath(parts[1] if parts[1] in FOLDERS else "ranks", name)
    return None


def sources(root, folder):
    return sorted(p for p in (root / folder).rglob("*") if p.suffix in SUFFIXES and p.is_file())


def upward(root):
    for folder, allowed in MAY_INCLUDE.items():
        for path in sources(root, folder):
            for name in includes(path):
                target = resolve(root, path, name)
                if target is not None and target.parts[0] in FOLDERS and target.parts[0] not in allowed:
                    yield f"{path.relative_to(root)} includes {name}, which is in {target.parts[0]}/"


def foreign(root):
    """Unwanted dependencies of collectives/, and of the scan with every header of ours that it reaches."""
    todo = sources(root, "collectives")
    if (root / SCAN).is_file():
        todo.append(root / SCAN)
    seen = set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        own = BACKENDS.get(path.stem)
        for name in includes(path):
            if FOREIGN.search(name) and not (own and own.search(name)):
                yield f"{path.relative_to(root)} includes {name}, which this layer must do without"
            target = resolve(root, path, name)
            if target is not None and (root / target).is_file():
                todo.append(root / target)


def check(root):
    root = root.resolve()
    return sorted(set(upward(root)) | set(foreign(root)))


def self_test():
    """Plants each kind of violation in a small tree and expects it, and only it, to be found."""
    clean = {
        "collectives/include/holdfast/collectives/record.h": "#include <mutex>\n",
        "collectives/record.cc": '#include "holdfast/collectives/record.h"\n// #include "holdfast/coord/policy.h"\n',
        "collectives/include/holdfast/collectives/mpi_collective.h": "#include <mpi.h>\n",
        "coord/include/holdfast/coord/policy.h": '#include "holdfast/collectives/record.h"\n',
        "coord/policy.proto": 'import "google/protobuf/any.proto";\n',
        "ranks/include/holdfast/scan.h": '#include "holdfast/collectives/record.h"\n',
        "ranks/scan.cc": '#include "holdfast/scan.h"\n/*\n#include <mpi.h>\n*/\n',
        "ranks/step_guard.cc": '#include "holdfast/coord/policy.h"\n#include "holdfast/coord/policy.pb.h"\n',
        "launch/main.cc": '#include "holdfast/scan.h"\n#include "holdfast/coord/policy.h"\n',
        "tests/scan_test.h": '#include "holdfast/scan.h"\n',
        "bench/bench.h": "#include <vector>\n",
    }
    planted = [
        ("collectives/record.cc", '#include "holdfast/coord/policy.h"\n', "coord/"),
        ("collectives/record.cc", '#include "holdfast/scan.h"\n', "ranks/"),
        ("collectives/record.cc", '#include "../launch/main.cc"\n', "launch/"),
        ("coord/policy.cc", "#  include <holdfast/scan.h>\n", "ranks/"),
        ("coord/extra.proto", 'import "holdfast/launch/config.proto";\n', "launch/"),
        ("coord/policy.cc", '#include "holdfast/not_written_yet.h"\n', "ranks/"),
        ("ranks/kernel.cu", '#include "launch/main.cc"\n', "launch/"),
        ("ranks/step_guard.cc", '#include "tests/scan_test.h"\n', "tests/"),
        ("launch/tool.h", '#include "bench/bench.h"\n', "bench/"),
        ("collectives/record.cc", "#include <mpi.h>\n", "do without"),
        ("collectives/mpi_collective.cc", "#include <nccl.h>\n", "do without"),
        ("collectives/record.cc", "#include <cuda_runtime.h>\n", "do without"),
        ("collectives/record.cc", "#include <google/protobuf/message.h>\n", "do without"),
        ("ranks/scan.cc", "#include <torch/torch.h>\n", "do without"),
        ("ranks/include/holdfast/scan.h", '#include "holdfast/coord/policy.pb.h"\n', "do without"),
    ]

    def violations(files):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            return check(root)

    failures = 0
    if found := violations(clean):
        failures += 1
        print("a clean tree was refused:", *found, sep="\n  ")
    for name, text, expected in planted:
        found = violations({**clean, name: clean.get(name, "") + text})
        if len(found) != 1 or not found[0].startswith(name) or expected not in found[0]:
            failures += 1
            print(f"planted in {name}: {text.strip()}; found: {found}")
    print(f"{len(planted)} violations planted, {failures} failures")
    return failures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, help="the project's folder")
    parser.add_argument("--self-test", action="store_true", help="check the check")
    options = parser.parse_args()
    if options.self_test:
        return 1 if self_test() else 0
    if options.root is None:
        parser.error("--root or --self-test")
    scanned = sum(len(sources(options.root, folder)) for folder in MAY_INCLUDE)
    found = check(options.root)
    print(f"{scanned} files, {len(found)} upward or unwanted includes", *found, sep="\n  ")
    return 1 if found or scanned == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
