"""`python -m dshealthd`."""

import sys

from dshealthd.cli.main import main

sys.exit(main())
