"""Collectives that unmodified trainings launch, counted from outside by breakpoints of the kernel.

`dshealthd launches` does it, in a process of its own with rights that the agent lacks. It writes
what it counts into a file, which the agent reads.
"""

OUTPUT = "/run/dshealthd-launches/launches.json"
"""Where that file is by default: a directory of the service's own, which ends with it."""
SCHEMA = 1
"""Of that file."""
