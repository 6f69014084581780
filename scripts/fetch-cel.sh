#!/bin/bash
# Fetches the language of Kubernetes' policies, CEL, for the system's python into DIR (.cache/cel unless given). It is for the test
# of docs/kubernetes/policy.yaml, and comes from PyPI, pinned by scripts/cel-requirements.txt.
set -euo pipefail
# shellcheck source=scripts/pypi-packages.sh
. "$(dirname "$0")/pypi-packages.sh"

fail() {
    echo "fetch-cel: $*" >&2
    exit 1
}

dir=${1:-.cache/cel}
[ ! -d "$dir" ] || exit 0
mkdir -p "$(dirname "$dir")"
from_pypi "$(dirname "$0")/cel-requirements.txt" "$dir" /usr/bin/python3
