#!/bin/sh
# The architecture of the packages: ARCH, in Debian's words, or else that of this machine. This file is to be sourced.
#   DEB_ARCH, RPM_ARCH  its names
#   FOREIGN             /ARCH if it is not that of this machine: programs and packages are in folders of this name then

DEB_ARCH=$(dpkg --print-architecture)
RPM_ARCH=$(uname -m)
FOREIGN=
case ${ARCH:-$DEB_ARCH} in
"$DEB_ARCH") ;;
amd64) DEB_ARCH=amd64 RPM_ARCH=x86_64 FOREIGN=/amd64 ;;
arm64) DEB_ARCH=arm64 RPM_ARCH=aarch64 FOREIGN=/arm64 ;;
*)
    echo "ARCH=$ARCH: packages are for amd64 and arm64" >&2
    exit 1
    ;;
esac
