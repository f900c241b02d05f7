#!/bin/sh
# deb: remove, purge, upgrade; rpm: number of versions that remain.
set -e
case $1 in
purge)
    rm -rf /var/lib/dshealthd /etc/dshealthd /run/dshealthd /run/dshealthd-slurm
    rm -f /etc/systemd/system/dshealthd.service.d/unprivileged.conf
    rm -f /etc/systemd/system/dshealthd.service.d/evidence.conf
    rmdir /etc/systemd/system/dshealthd.service.d 2>/dev/null || true
    if getent passwd dshealthd >/dev/null; then
        userdel dshealthd
    fi
    ;;
esac
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
fi
