#!/usr/bin/env bash
# Checks an example trainer by what it says: the loss falls, one pass over the data is worth an accuracy above 80 %, and
# an attempt with a NaN on the last rank leaves what a run without that update has, bit for bit and on all ranks.
#
#   tests/gpu/train_check.sh COMMAND...     nccl_minimal, or mpirun -np 4 nccl_train, and options
#
# Exit status: 0, 1 when something is not so, 77 when COMMAND says that there is no GPU.
set -euo pipefail

command=("${@:?the command of a trainer is missing}")
attempt=7
steps=20
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

fail() {
  echo "WRONG: $1"
  tail -n 20 "$out"/*
  exit 1
}
run() { # name options...
  local status=0
  timeout 100 "${command[@]}" "${@:2}" >"$out/$1" || status=$?
  if ((status == 77)); then
    cat "$out/$1"
    exit 77
  fi
  ((status == 0)) || fail "${command[*]} ${*:2}: exit status $status"
  (($(sed -n 's/^rank .* updates, parameters //p' "$out/$1" | sort -u | wc -l) == 1)) || fail "$1: ranks differ"
}
parameters() { sed -n 's/^rank 0: .* parameters //p' "$out/$1"; }
updates() { sed -n 's/^rank 0: \([0-9]*\) updates.*/\1/p' "$out/$1"; }

run pass
ranks=$(grep -c '^rank ' "$out/pass")
losses=$(sed -n 's/^attempt [0-9]*: loss //p' "$out/pass" | sed -n '1p;$p' | paste -sd ' ')
accuracy=$(sed -n 's/^accuracy //p' "$out/pass")
awk "BEGIN { split(\"$losses\", loss); exit !(loss[2] < loss[1]) }" || fail "the loss does not fall: $losses"
awk "BEGIN { exit !($accuracy > 0.8) }" || fail "accuracy $accuracy"

run whole --steps "$steps"
run skip --steps "$steps" --inject-nan "$attempt:$((ranks - 1))"
run omit --steps "$steps" --omit-update "$attempt"
grep -q "^attempt $attempt: .*rank $((ranks - 1)).*hidden\.weight\[1\]" "$out/skip" || fail "nobody says where the NaN was"
[[ "$(updates whole) $(updates skip) $(updates omit)" == "$steps $((steps - 1)) $((steps - 1))" ]] || fail "updates"
[[ $(parameters skip) == "$(parameters omit)" ]] || fail "a skip is not as if the update had been left out"
[[ $(parameters whole) != "$(parameters omit)" ]] || fail "the update that was left out makes no difference"
program=$(printf '%s\n' "${command[@]##*/}" | grep -m 1 '^nccl_')
printf '%-20s %d rank(s): loss %s, accuracy %s, a skip is the run without that update: %s\n' "$program" "$ranks" \
  "${losses/ / to }" "$accuracy" "$(parameters skip)"
