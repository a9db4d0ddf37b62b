#!/usr/bin/env bash
# Jobs over several hosts, with faults of all kinds put in, each of which must be found at its place.
#
#   bench/stress.sh [--hosts K] [--ranks-per-host R] [--minutes M] [--seed S] [--attempts A] [--replays N]
#                   [--only ROUND] [--json FILE]
#
# Hosts are network namespaces of this machine (launch/cluster.sh), which needs root; 2 of 2 ranks by default, for a
# minute. All that goes wrong is planned from the seed, and judged by what the jobs leave behind: see README.md. Ends
# with `stress: PASS`, or `stress: FAIL` and the reasons.
#
#   --attempts A    of each job (200; 100 with more than 8 ranks)
#   --replays N     bundles of each round that are made again (4)
#   --only ROUND    this one round of the plan, to see a failure again with the same --seed; -1: all
#   --json FILE     the same figures, for programs
#
# No round is begun that would not fit into the minutes; at most one minute more is used. Trouble with the hosts is a
# finding, and no round is begun after it. The folders of rounds that failed are kept. Exit status: 0 passed, 1 failed,
# 64 wrong usage or something missing, 130 interrupted.
set -euo pipefail

case ${1-} in
  -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
type -t python3 >/dev/null || { echo "stress.sh: python3 is missing: install the package python3" >&2; exit 64; }
# In place of this shell: signals reach the program that ends the jobs and the hosts.
exec python3 -B "$(dirname "${BASH_SOURCE[0]}")/stress" "$@"
