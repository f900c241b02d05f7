#!/bin/sh
# Starts dshealthd with the newest interpreter that its compiled parts are made for. Those are in
# /usr/lib/dshealthd, a virtual environment without packages of its own interpreter.

# Bytecode is never written beside the modules, where dpkg would not find it. It goes to the service's
# folder, and only root uses that while it is root's: it may belong to the user dshealthd.
cache=/var/cache/dshealthd
if [ -O $cache ]; then
    set -- -X pycache_prefix=$cache -m dshealthd "$@"
else
    set -- -B -m dshealthd "$@"
fi
# Isolated (-I): neither the working directory nor a user's PYTHONPATH, which `sudo -E` keeps, says
# what root imports.
for version in @VERSIONS@; do
    python=/usr/lib/dshealthd/bin/python$version
    [ -x "$python" ] && exec "$python" -I "$@"
done
echo "dshealthd: needs one of /usr/bin/python{@NAMES@}, and none is there" >&2
exit 1
