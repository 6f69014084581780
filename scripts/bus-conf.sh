#!/bin/sh
# Writes the configuration of a private bus, with the rules of the system bus and the shipped policy: bus-conf.sh DIRECTORY. The
# file is DIRECTORY/bus.conf, and the bus listens at DIRECTORY/socket. The user who calls this has the rights of root there, and
# the user's group those of yunion-mps.
set -eu
cd "$(dirname "$0")/.."
user=$(id -u)
sed "s/user=\"root\"/user=\"$user\"/; s/group=\"yunion-mps\"/group=\"$(id -g)\"/" config/io.yunion.Mps1.conf >"$1/policy.conf"
sed "s|DIRECTORY|$1|; s|USER|$user|" tests/support/bus.conf >"$1/bus.conf"
