#!/usr/bin/env bash
# What the guard costs a whole trainer: guarded_train guarded against unguarded, in turns, in one run.
#
#   bench/overhead.sh [--ranks N] [--pairs P] [--attempts A] [guarded_train options...]
#
# Prints a line for each round and then the medians over the rounds of what is a ratio within each of them, of median
# attempts; guarded comes between the two unguarded runs:
#
#   ratio ranks=2 guarded_over_unguarded=1.004 control=1.002 spread=0.98..1.03
#
# `control` is unguarded over unguarded, from the same rounds; `spread` is that ratio's range over the rounds. A ratio
# within it means no more than that the cost is smaller than what the machine does by itself. Each run's final digests
# have to be equal: the guard must not change what is trained.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
ranks=2 pairs=7 attempts=300
while (($#)); do
  case $1 in
    --ranks) ranks=$2; shift 2 ;;
    --pairs) pairs=$2; shift 2 ;;
    --attempts) attempts=$2; shift 2 ;;
    -h | --help) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) break ;;
  esac
done
[[ $ranks =~ ^[1-9][0-9]*$ && $pairs =~ ^[1-9][0-9]*$ && $attempts =~ ^[1-9][0-9]*$ ]] || {
  echo "overhead.sh: --ranks, --pairs and --attempts take a number above 0" >&2
  exit 64
}
trainer=$root/build/bin/guarded_train
[[ -x $trainer ]] || { echo "overhead.sh: $trainer is not there: build the project first" >&2; exit 64; }

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Prints the median attempt in seconds; leaves the digests in $scratch/NAME.
run() { # NAME options...
  local name=$1 log=$scratch/log
  shift
  rm -rf "$scratch/run" "$scratch/$name"
  mpirun --oversubscribe -np "$ranks" "$trainer" --steps "$attempts" --progress off --evaluate 0 --print-timing \
    --print-digests --run-dir "$scratch/run" "$@" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
  grep -o 'parameters=.* rng=' "$log" | sort -u >"$scratch/$name"
  (($(wc -l <"$scratch/$name") == 1)) || { echo "overhead.sh: replicas differ" >&2; cat "$log" >&2; exit 1; }
  sed -n 's/^timing .*median=\([0-9.]*\).*/\1/p' "$log"
}

for ((round = 1; round <= pairs; ++round)); do
  # In another order every other round, so that a machine that warms up favours nobody.
  if ((round % 2)); then
    a=$(run a --guard off "$@")
    g=$(run g "$@")
    b=$(run b --guard off "$@")
  else
    b=$(run b --guard off "$@")
    g=$(run g "$@")
    a=$(run a --guard off "$@")
  fi
  cmp -s "$scratch/a" "$scratch/g" && cmp -s "$scratch/a" "$scratch/b" || {
    echo "overhead.sh: guarded and unguarded state differ" >&2
    exit 1
  }
  echo "round $round unguarded=$a guarded=$g unguarded=$b s"
  echo "$a $g $b" >>"$scratch/rounds"
done

python3 - "$ranks" "$scratch/rounds" <<'PYTHON'
import statistics, sys
rows = [list(map(float, line.split())) for line in open(sys.argv[2])]
ratios = [2 * g / (a + b) for a, g, b in rows]
control = [b / a for a, g, b in rows]
print(f"ratio ranks={sys.argv[1]} guarded_over_unguarded={statistics.median(ratios):.3f} "
      f"control={statistics.median(control):.3f} spread={min(control):.3f}..{max(control):.3f}")
PYTHON
