#!/bin/sh
# Installs the package of this distribution from a folder, and tries what needs neither a GPU nor systemd: smoke.sh FOLDER. For
# throw-away containers.
set -eux
case $(uname -m) in
x86_64) arch=amd64 ;;
aarch64) arch=arm64 ;;
esac
if command -v apt-get >/dev/null; then
    apt-get update
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "$1"/dshealthd_*_"$arch".deb
else
    dnf install --assumeyes "$1"/dshealthd_*_"$arch".rpm
fi
dshealthd --version
dshealthd check-config --config.file /etc/dshealthd/dshealthd.toml
dshealthd metrics | grep -q '^dshealthd_build_info{'
# Findings of a container are no failure; a traceback or a signal is.
status=0
dshealthd doctor || status=$?
[ "$status" -le 3 ]
if command -v apt-get >/dev/null; then
    apt-get purge --yes dshealthd
else
    dnf remove --assumeyes dshealthd
fi
[ ! -e /usr/lib/dshealthd ]
