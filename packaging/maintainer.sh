#!/bin/sh
# Prints the maintainer of a package: whoever builds it, known by DEBFULLNAME and DEBEMAIL as to Debian's own tools.
# Nobody reads an address below .invalid, so without the two no mail reaches a stranger.
set -eu
echo "${DEBFULLNAME:-yunion-mps-daemon} <${DEBEMAIL:-nobody@yunion-mps-daemon.invalid}>"
