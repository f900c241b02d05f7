#!/bin/sh
# Installs what the tar.gz has brought, where there is neither dpkg nor rpm: install.sh [remove|purge]
set -e
cd /usr/lib/dshealthd
case ${1:-install} in
install)
    mkdir -p /etc/dshealthd
    [ -e /etc/dshealthd/dshealthd.toml ] || cp dshealthd.toml /etc/dshealthd/
    ./postinst.sh 1
    [ ! -d /run/systemd/system ] || systemctl enable --now dshealthd # whatever the preset says
    ;;
remove | purge)
    ./prerm.sh remove
    cp postrm.sh /run/dshealthd-postrm.sh
    xargs rm -f <files
    cd /
    rm -rf /usr/lib/dshealthd /usr/share/doc/dshealthd
    sh /run/dshealthd-postrm.sh "$1"
    rm /run/dshealthd-postrm.sh
    ;;
*)
    echo "install.sh [remove|purge]" >&2
    exit 2
    ;;
esac
