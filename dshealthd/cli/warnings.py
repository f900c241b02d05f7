"""Warnings about a configuration: missing files, values that conflict, names that mean nothing.

None keeps the agent from starting: a hostfile may come with its job, a key with a volume.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dshealthd.core.options import settable
from dshealthd.doctor.options import DoctorOptions
from dshealthd.probe.options import ProbeOptions
from dshealthd.slurm.options import SlurmOptions
from dshealthd.symptoms import all_symptoms

if TYPE_CHECKING:
    from dshealthd.config.config import Config


def of(config: Config) -> Iterator[str]:
    """Yield a warning for each missing configured file, each deadline that is too long, each member
    that cannot be one, and each check or alert that this release does not have.
    """
    from dshealthd.doctor.choice import not_checks  # only this needs the checks
    from dshealthd.probe.members.hostlist import MembershipError
    from dshealthd.probe.members.membership import load

    probe, slurm = config.section(ProbeOptions), config.section(SlurmOptions)
    peer = probe.peer
    for key, path in (
        ("probe.python", probe.python),
        ("probe.members.hostfile", probe.members.hostfile),
        ("probe.members.topology", probe.members.topology),
        ("probe.peer.key_file", peer.key_file),
        ("slurm.conf_file", slurm.conf_file),
        ("slurm.bin_directory", slurm.bin_directory),
    ):
        if path is None or "/" not in str(path):  # without a slash: a systemd credential
            continue
        try:
            os.stat(path)
        except OSError as error:
            yield f"{key}: {path}: {error.strerror}"
    if probe.members.nodes or probe.members.slurm:
        try:
            load(dataclasses.replace(probe.members, topology=None))
        except MembershipError as error:
            yield from error.errors
    doctor = config.section(DoctorOptions)
    for key, names in (
        ("doctor.skip", doctor.skip),
        ("doctor.accept", [one.check for one in doctor.accepted()]),
    ):
        yield from (f"{key}: `dshealthd doctor` fails: {error}" for error in not_checks(names))
    python = probe.python
    if python is not None and os.path.isfile(python) and not os.access(python, os.X_OK):
        yield f"probe.python: {python} is not executable"
    for name, options in config.collectors.items():
        usual = type(options)()
        changed = (options.interval, options.deadline) != (usual.interval, usual.deadline)
        can_be_set = any(option.name == "deadline" for option in settable(options))
        if changed and can_be_set and options.deadline > options.interval:
            yield (
                f"collectors.{name}.deadline: {options.deadline} is longer than the interval, "
                f"{options.interval}: one hung source delays the next samples"
            )
    findings = {finding.name for symptom in all_symptoms().values() for finding in symptom.findings}
    for alert in slurm.drain_for:
        if alert not in findings:
            yield f"slurm.drain_for: no finding is called {alert}, so no node is drained for it"
