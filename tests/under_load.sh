#!/usr/bin/env bash
# The tests on a machine with other work: two busy loops per core beside them, three times in a row.
# Arguments go to pytest, as in `tests/under_load.sh tests/health -k breaker`. It stops at the first failure.
set -euo pipefail
cd "$(dirname "$0")/.."

busy=()
# shellcheck disable=SC2317  # the trap calls it
rest() { kill "${busy[@]}" 2>/dev/null || true; }
trap rest EXIT

for ((loop = 0; loop < 2 * $(nproc); loop++)); do
    # By itself it ends with this script, even when that is killed.
    (while kill -0 $$ 2>/dev/null; do for ((turn = 0; turn < 100000; turn++)); do :; done; done) &
    busy+=($!)
done

for run in 1 2 3; do
    echo "run $run of 3, beside ${#busy[@]} busy loops"
    pytest -x "$@"
done
