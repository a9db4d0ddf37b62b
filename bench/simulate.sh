#!/usr/bin/env bash
# The verdict at scale, over a network that SimGrid simulates: clean against the bare all-reduce, and the bad path.
#
#   bench/simulate.sh [--ranks "64 256 1024 4096"] [--program FILE] [--save]
#
# Nodes of 8 ranks on a fat tree of two levels without oversubscription. Per message 0.2 us of processor time to send and
# 0.2 us to receive; per link 0.3 us and 25 GB/s; between ranks of a node 0.3 us and 10 GB/s. A rank's own work in an
# attempt is charged with 0.3 us, which verdict_bench measured. Algorithms are those that Open MPI chooses for so few bytes:
# recursive doubling for the all-reduce, binomial trees for gather and broadcast. They are named one by one, since SMPI's
# own selectors look at the nodes first, with a message from each rank to each.
# Prints a table. --save writes bench/data/simulated.tsv. Exit status: 1 when a result is wrong or a bar is missed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
sizes="64 256 1024 4096" program=$root/build/bin/simulate_verdict save=''
while (($#)); do
  case $1 in
    --ranks) sizes=$2; shift 2 ;;
    --program) program=$2; shift 2 ;;
    --save) save=$root/bench/data/simulated.tsv; shift ;;
    -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    *) echo "simulate.sh: unknown option $1" >&2; exit 64 ;;
  esac
done
[[ -x $program ]] || { echo "simulate.sh: $program is not there: build it first, with libsimgrid-dev" >&2; exit 64; }
ranks_per_node=8
local_ns=300

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# A leaf switch has as many links up as nodes, so no two nodes share one.
platform() { # NODES
  local nodes=$1 leaf=4
  while ((leaf * leaf < nodes)); do ((leaf *= 2)); done
  ((nodes % leaf == 0)) || { echo "simulate.sh: $((nodes * ranks_per_node)) ranks make no whole tree" >&2; exit 64; }
  cat <<XML
<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
  <cluster id="fat_tree" prefix="node" suffix="" radical="0-$((nodes - 1))" speed="1Gf" core="$ranks_per_node"
           bw="25GBps" lat="300ns" loopback_bw="10GBps" loopback_lat="300ns"
           topology="FAT_TREE" topo_parameters="2;$leaf,$((nodes / leaf));1,$leaf;1,1"/>
</platform>
XML
}

# hwloc would look at this machine's processors once for each rank.
export HWLOC_SYNTHETIC="core:1 pu:1" HWLOC_THISSYSTEM=0

for ranks in $sizes; do
  [[ $ranks =~ ^[1-9][0-9]*$ ]] && ((ranks % ranks_per_node == 0)) || {
    echo "simulate.sh: $ranks is no multiple of $ranks_per_node" >&2
    exit 64
  }
  nodes=$((ranks / ranks_per_node))
  platform "$nodes" >"$scratch/platform.xml"
  for ((n = 0; n < nodes; ++n)); do
    for ((r = 0; r < ranks_per_node; ++r)); do echo "node$n"; done
  done >"$scratch/hosts"
  # Ranks share the library's globals, as ranks that are threads do: there is nothing in them that is a rank's own.
  # Without calibration to one cluster's TCP, and with processor time charged by what the options say alone.
  smpirun -no-privatize -np "$ranks" -platform "$scratch/platform.xml" -hostfile "$scratch/hosts" \
    --cfg=smpi/simulate-computation:no --cfg=surf/precision:1e-12 \
    --cfg=smpi/allreduce:rdb --cfg=smpi/gather:ompi_binomial --cfg=smpi/bcast:binomial_tree \
    --cfg=smpi/allgather:rdb --cfg=smpi/barrier:ompi_recursivedoubling \
    --cfg=smpi/os:0:0.2e-6:0 --cfg=smpi/or:0:0.2e-6:0 --cfg=smpi/ois:0:0.2e-6:0 --cfg=smpi/init:0 \
    --cfg=smpi/lat-factor:0:1 --cfg=smpi/bw-factor:0:1 --cfg=contexts/stack-size:512 --log=root.thres:critical \
    "$program" "$local_ns" >"$scratch/out" || { echo "simulate.sh: $ranks ranks failed" >&2; cat "$scratch/out"; exit 1; }
  (($(grep -c '^clean ' "$scratch/out") == 1 && $(grep -c '^badpath ' "$scratch/out") >= 3)) || {
    echo "simulate.sh: lines are missing" >&2
    cat "$scratch/out"
    exit 1
  }
  cat "$scratch/out"
  cat "$scratch/out" >>"$scratch/all"
done

python3 - "$scratch/all" "$save" <<'PYTHON'
import os, sys
lines = [line.split() for line in open(sys.argv[1])]
rows = [(line[0], dict(word.split("=") for word in line[1:])) for line in lines]
late = [row["ranks"] for kind, row in rows if kind == "clean" and float(row["ratio"]) > 1.10]
if sys.argv[2]:
    os.makedirs(os.path.dirname(sys.argv[2]), exist_ok=True)
    with open(sys.argv[2], "w") as out:
        print("kind", "ranks", "what", "value", sep="\t", file=out)
        for kind, row in rows:
            ranks = row.pop("ranks")
            kind = f"{kind}:{row.pop('bad')}" if kind == "badpath" else kind
            for what, value in row.items():
                print(kind, ranks, what, value, sep="\t", file=out)
if late:
    sys.exit(f"simulate.sh: the clean verdict is over 1.10 of the all-reduce at {', '.join(late)} ranks")
PYTHON
