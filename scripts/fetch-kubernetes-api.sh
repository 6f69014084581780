#!/bin/bash
# Fetches the interfaces of Kubernetes' kubelet into DIR (.cache/kubernetes-api unless given), as its own developers publish
# them: deviceplugin.proto, for device plugins, and runtime.proto, by which the kubelet speaks to a container runtime (CRI).
# Beside them is the Python that protoc makes of them, and Kubernetes' own types of all objects as Python (kubernetes.client),
# with which the manifests are read. They are for the tests; Debian 14 has them. The options for Go's
# generator are left out, since protoc does not know them.
set -euo pipefail
umask 022
# shellcheck source=scripts/debian-packages.sh
. "$(dirname "$0")/debian-packages.sh"

SUITE=forky

fail() {
    echo "fetch-kubernetes-api: $*" >&2
    exit 1
}

plain() { # API.PROTO
    sed -e '/^import .*gogoproto/d' -e '/^option (gogoproto/d' -e 's/ *\[(gogoproto[^]]*\]//' -e 's/ *\[debug_redact = true\]//' "$1"
}

fetch() { # MIRROR
    local work="$scratch/work" source
    rm -rf "$work"
    unpack_packages "$1" "$SUITE" main "$work" golang-github-kubernetes-kubelet-dev golang-k8s-cri-api-dev \
        python3-kubernetes || return 1
    source=$work/tree/usr/share/gocode/src/k8s.io
    rm -rf "$dir" "$dir.new" && mkdir -p "$dir.new" || return 1
    plain "$source/kubelet/pkg/apis/deviceplugin/v1beta1/api.proto" >"$dir.new/deviceplugin.proto" || return 1
    plain "$source/cri-api/pkg/apis/runtime/v1/api.proto" >"$dir.new/runtime.proto" || return 1
    # For kubelet.py, with this machine's protoc.
    (cd "$dir.new" && protoc --proto_path=. --python_out=. ./*.proto) || return 1
    # Only the types: the rest of the package connects to clusters.
    mkdir "$dir.new/kubernetes" && : >"$dir.new/kubernetes/__init__.py" || return 1
    cp -r "$work/tree/usr/lib/python3/dist-packages/kubernetes/client" "$dir.new/kubernetes/" || return 1
    # Renamed in one step: a directory with the final name is complete.
    mv -T "$dir.new" "$dir" || return 1
    echo "fetch-kubernetes-api: $(cd "$work/deb" && echo *.deb) in $dir" >&2
}

dir=${1:-.cache/kubernetes-api}
[ ! -d "$dir/kubernetes" ] || exit 0
begin_to_fetch protoc
from_a_mirror || fail "can't get the packages of Debian $SUITE; try again, or put these .proto files, what protoc makes of them, and kubernetes/client into $dir"
