#!/usr/bin/env bash
# Installs, builds, and runs the tests through ctest. Debian 12, as root or with sudo; repeatable.
#
#   tests/run.sh                        all tests but those with the label slow
#   tests/run.sh --slow                 those too
#   tests/run.sh [--slow] -R PATTERN    whatever follows goes to ctest
#
# Exit status: ctest's; 64 when packages are missing; the build's when that fails.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
left_out=(-LE '^slow$')
note="all but the slow ones (--slow adds them)"
case ${1:-} in
  --slow)
    left_out=()
    note="the slow ones too"
    shift
    ;;
  -h | --help)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
if (($#)); then note="chosen by: $*"; fi

"$root/launch/install_packages.sh" --tests

# A file that includes libtorch takes more than 1 GB to compile.
jobs=$(nproc)
fitting=$(awk '/^MemAvailable:/ {print int($2 / 1500000)}' /proc/meminfo)
((fitting >= jobs)) || jobs=$((fitting > 1 ? fitting : 1))
cd "$root"
cmake --preset release
cmake --build --preset release -j "$jobs"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
# Two to a core: see tests/CMakeLists.txt.
ctest --preset release -j "$((2 * $(nproc)))" "${left_out[@]}" "$@" | tee "$log" || status=$?

echo
grep -E '^[0-9]+% tests passed' "$log" || true
if ((status == 0)); then
  echo "Tests passed: $note."
else
  echo "Tests FAILED (ctest's exit status is $status): $note. What failed is listed above."
fi
exit "$status"
