#!/bin/sh
# deb: configure [OLD-VERSION]; rpm: number of versions installed.
set -e
case $1 in
configure) [ -z "$2" ] && first=yes || first=no ;;
1) first=yes ;;
2) first=no ;;
*) exit 0 ;;
esac
systemd-sysusers dshealthd.conf
systemd-tmpfiles --create dshealthd.conf || true # in a chroot or container without /run
# Enabled where the distribution enables services by default (Debian), else as its preset says.
if [ $first = yes ]; then
    systemctl preset dshealthd.service || true
fi
[ -d /run/systemd/system ] || exit 0
systemctl daemon-reload
# Off unless an administrator has switched it on.
systemctl try-restart dshealthd-launches.service || true
config=/etc/dshealthd/dshealthd.toml
if [ $first = yes ]; then
    systemctl is-enabled --quiet dshealthd.service || exit 0
    start=start
else
    case $(systemctl show --property ActiveState --value dshealthd.service) in
    active | activating | reloading) start=restart ;;
    *) exit 0 ;; # stopped by an administrator
    esac
    # An agent that runs is not ended for one that cannot start.
    if [ -e $config ] && ! dshealthd check-config --config.file $config; then
        echo "dshealthd: not restarted, as its configuration is not good for this version" >&2
        exit 0
    fi
fi
# policy-rc.d has the last word on Debian. A service that does not start is no reason to leave a
# package half installed: its status says why.
if command -v deb-systemd-invoke >/dev/null; then
    deb-systemd-invoke $start dshealthd.service || echo "dshealthd: not started" >&2
else
    systemctl $start dshealthd.service || echo "dshealthd: not started" >&2
fi
