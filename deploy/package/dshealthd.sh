#!/bin/sh
# Starts dshealthd with the newest interpreter that its compiled parts are made for. Those are in
# /usr/lib/dshealthd, a virtual environment without packages of its own interpreter.

# Nothing is written beside the modules, where dpkg would not find it. The service has a folder for
# bytecode; root on the command line does not use that, as it may belong to the user dshealthd.
[ -n "$PYTHONPYCACHEPREFIX" ] || export PYTHONDONTWRITEBYTECODE=1
for version in @VERSIONS@; do
    python=/usr/lib/dshealthd/bin/python$version
    [ -x "$python" ] && exec "$python" -P -m dshealthd "$@"
done
echo "dshealthd: needs one of /usr/bin/python{@NAMES@}, and none is there" >&2
exit 1
