"""`python -m dshealthd`."""

import sys

from dshealthd.cli import main

sys.exit(main())
