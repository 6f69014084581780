#!/bin/sh
# Prints the whole spec: packaging/rpm/spec.sh [VERSION]
set -eu
cd "$(dirname "$0")/../.."
version=${1:-$(packaging/version.sh)}
changelog=$(packaging/changelog.py rpm)
sed "s/@VERSION@/$version/" packaging/rpm/yunion-mps-daemon.spec.in
printf '%s\n' "$changelog"
