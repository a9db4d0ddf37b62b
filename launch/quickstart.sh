#!/usr/bin/env bash
# Shows Holdfast at work: installs, builds, and trains a small network on Fashion-MNIST with four MPI ranks. Half-way a
# NaN is put into rank 2's gradient. Every rank must skip that attempt, the event must name where the NaN came from, and
# training must go on as if nothing had happened.
#
#   launch/quickstart.sh                    Debian 12, as root or with sudo; repeatable
#   launch/quickstart.sh --programs DIR     do not install or build: run the programs in DIR
#
# Each run leaves a folder build/runs/quickstart-*. Exit status: 0 when all of the above was seen, 64 when packages are
# missing, otherwise not 0.
set -euo pipefail

ranks=4
attempts=600
bad_rank=2
bad_attempt=$((attempts / 2))

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
programs=

while (($#)); do
  case $1 in
    --programs)
      programs=${2:?--programs needs a folder}
      shift 2
      ;;
    *)
      sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
      [[ $1 == -h || $1 == --help ]] && exit 0
      exit 64
      ;;
  esac
done

if [[ -z $programs ]]; then
  "$root/launch/install_packages.sh"
  # A file that includes libtorch takes more than 1 GB to compile.
  jobs=$(nproc)
  fitting=$(awk '/^MemAvailable:/ {print int($2 / 1500000)}' /proc/meminfo)
  ((fitting >= jobs)) || jobs=$((fitting > 1 ? fitting : 1))
  cd "$root"
  cmake --preset release
  cmake --build --preset release --target guarded_train holdfast -j "$jobs"
  programs=$root/build/bin
fi

run=$root/build/runs/quickstart-$(date +%Y%m%d-%H%M%S)-$$
mkdir -p "$root/build/runs"
output=$(mktemp)
trap 'rm -f "$output"' EXIT

if [[ $(id -u) == 0 ]]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
# Containers often forbid one process to read another's memory.
export OMPI_MCA_btl_vader_single_copy_mechanism=none

command=(mpirun --oversubscribe --bind-to none -np "$ranks" "$programs/guarded_train" --workload fashion-mnist
  --steps "$attempts" --inject "nan@backward,rank=$bad_rank,attempt=$bad_attempt" --run-dir "$run")
echo
echo "+ ${command[*]}"
"${command[@]}" | tee "$output"
echo

# The statement is made from what the job left behind.
python3 - "$run/events.jsonl" "$output" "$ranks" "$attempts" "$bad_rank" "$bad_attempt" <<'END'
import json
import re
import sys

events_path, output_path = sys.argv[1:3]
ranks, attempts, bad_rank, bad_attempt = map(int, sys.argv[3:])


def fail(why):
    sys.exit(f"quickstart: NOT AS EXPECTED: {why}. The record of the run is {events_path}")


def expect(what, wanted, found):
    if wanted != found:
        fail(f"{what} should be {wanted!r} and is {found!r}")


def refuse_constant(name):
    fail(f"{name} in the event log is not JSON")


try:
    with open(events_path, encoding="utf-8") as file:
        events = [json.loads(line, parse_constant=refuse_constant) for line in file]
    with open(output_path, encoding="utf-8") as file:
        found = re.findall(r"^test accuracy ([0-9.]+)", file.read(), re.MULTILINE)
except (OSError, ValueError) as error:
    fail(error)

try:
    skips = [event for event in events if event["event"] == "attempt_skipped"]
    expect("the number of skipped attempts", 1, len(skips))
    (skip,) = skips
    expect("the skipped attempt", bad_attempt, skip["attempt"])
    expect("its stage", "backward", skip["stage"])
    expect("its NaN count", 1, skip["nan"])
    expect("the ranks it came from", [bad_rank], [origin["rank"] for origin in skip["origins"]])
    (origin,) = skip["origins"]
    last = events[-1]
    expect("the last event", "run_finished", last["event"])
    expect("the number of attempts", attempts, last["attempt"])
    expect("the number of updates", attempts - 1, last["update"])
    expect("the number of lines with the test accuracy", 1, len(found))
    accuracy = float(found[0])
except (KeyError, TypeError, ValueError) as error:
    fail(f"an event or the accuracy cannot be read: {error!r}")
if not accuracy >= 0.85:
    fail(f"the test accuracy is {accuracy:.4f}; at least 0.85 was expected")

def shown(name):
    """Names come from elsewhere: nothing in them may steer a terminal."""
    return json.dumps(name)[1:-1]


print(f"""The event, from {events_path}:
{json.dumps(skip, indent=2)}

What happened: {ranks} ranks trained for {last["attempt"]} attempts. At attempt {skip["attempt"]}, rank {origin["rank"]} \
(host {shown(origin["host"])}) had
{skip["nan"]} NaN in {shown(origin["tensor"])}[{origin["index"]}], seen at stage {skip["stage"]} before it could reach any \
weight. All {ranks} ranks
skipped that attempt together and went on: {last["update"]} updates, test accuracy {100 * accuracy:.1f} %.""")
END

incident=$run/incidents/$(printf 'e0001-a%010d' "$bad_attempt")
echo
echo "To look further:"
echo "  $(printf '%q ' "$programs/holdfast" status "$run")"
echo "  $(printf '%q ' "$programs/holdfast" incident show "$incident")"
echo "  $(printf '%q ' "$programs/guarded_train" --replay "$incident")"
