#!/bin/sh
# Starts dshealthd with the interpreter of the package. Isolated (-I): neither the working directory
# nor a user's PYTHONPATH, which `sudo -E` keeps, says what root imports. Bytecode is packed, and
# none is written (-B), as nobody would remove it.
exec /usr/lib/dshealthd/bin/python3 -I -B -m dshealthd "$@"
