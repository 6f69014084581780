#!/bin/sh
# Prints the maintainer of a package: the person who builds it, from DEBFULLNAME and DEBEMAIL, as with Debian's own tools. Without
# these variables it is an address below .invalid, so that no mail reaches a stranger.
set -eu
echo "${DEBFULLNAME:-yunion-mps-daemon} <${DEBEMAIL:-nobody@yunion-mps-daemon.invalid}>"
