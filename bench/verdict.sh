#!/usr/bin/env bash
# The verdict beside the bare all-reduce, and the bad path, on one host and over two hosts that are network namespaces.
#
#   bench/verdict.sh [--ranks "1 2 4 8 16"] [--over-hosts "4 8"] [--save] [verdict_bench options...]
#
# --over-hosts: so many ranks on two hosts each, which needs root; "" for none. Prints verdict_bench's lines. --save
# writes bench/data/verdict.tsv. Exit status: 1 when a result is wrong; figures are not judged, see README.md.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
ranks="1 2 4 8 16" over_hosts="4 8" save=''
while (($#)); do
  case $1 in
    --ranks) ranks=$2; shift 2 ;;
    --over-hosts) over_hosts=$2; shift 2 ;;
    --save) save=$root/bench/data/verdict.tsv; shift ;;
    -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    *) break ;;
  esac
done
program=$root/build/bin/verdict_bench
[[ -x $program ]] || { echo "verdict.sh: $program is not there: build the project first" >&2; exit 64; }

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cluster=$root/launch/cluster.sh name=verdict$$
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"; [[ -z ${is_up-} ]] || "$cluster" --name "$name" down' EXIT

echo "load $(cut -d' ' -f1-3 /proc/loadavg) on $(nproc) cores"
for n in $ranks; do
  mpirun --oversubscribe -np "$n" "$program" "$@" | tee -a "$scratch/all"
done
if [[ -n $over_hosts ]]; then
  is_up=yes
  "$cluster" --name "$name" up --nodes 2 >/dev/null
  for n in $over_hosts; do
    "$cluster" --name "$name" run -np "$n" "$program" "$@" | tee -a "$scratch/all"
  done
fi
echo "load $(cut -d' ' -f1-3 /proc/loadavg)"

# Word for word, a line each: kind, ranks, hosts, what, value.
if [[ -n $save ]]; then
  mkdir -p "$(dirname "$save")"
  awk 'BEGIN {OFS = "\t"; print "kind", "ranks", "hosts", "what", "value"}
       {split($2, ranks, "="); split($3, hosts, "="); kind = $1
        for (i = 4; i <= NF; ++i) {
          split($i, word, "=")
          if (word[1] == "bad") {kind = kind ":" word[2]; continue}
          if (i == 4 && kind == "ratio") {kind = word[1]; sub("_over_allreduce", "", kind); word[1] = "ratio"}
          print kind, ranks[2], hosts[2], word[1], word[2]
        }}' "$scratch/all" >"$save"
fi
