"""The worker of the tests: the real one, with this package's collectors beside the real ones."""

import sys

import dshealthd.collectors
from dshealthd.collection import worker

dshealthd.collectors.__path__.append(sys.argv[1])
worker.main(int(sys.argv[2]), int(sys.argv[3]))
