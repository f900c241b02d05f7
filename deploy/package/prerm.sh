#!/bin/sh
# deb: remove, or upgrade VERSION; rpm: number of versions that remain.
set -e
case $1 in
remove | 0)
    if [ -d /run/systemd/system ]; then
        systemctl stop dshealthd-launches.service dshealthd.service || true
    fi
    systemctl disable --quiet dshealthd-launches.service dshealthd.service || true
    ;;
esac
