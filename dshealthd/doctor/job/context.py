"""The context of a job's checks: everything that the user named, read once within limits."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from dshealthd.core.host import Host
from dshealthd.core.text import printable
from dshealthd.doctor.job.arguments import add_arguments
from dshealthd.doctor.job.sources import (
    deepspeed_config,
    inspection,
    launcher_command,
    manifest,
    programs,
    slurm_options,
    slurm_script,
)
from dshealthd.doctor.job.sources.calls import Call, calls
from dshealthd.doctor.job.sources.fields import ManifestFields
from dshealthd.doctor.job.sources.inspection import Inspection
from dshealthd.doctor.job.sources.launcher_command import LauncherCommand
from dshealthd.doctor.job.sources.layout import Layout, layout, slots
from dshealthd.doctor.job.sources.manifest import Manifest
from dshealthd.doctor.job.sources.rendezvous import Rendezvous, rendezvous
from dshealthd.doctor.job.sources.shell import ShellCommand
from dshealthd.doctor.job.sources.slurm_script import SlurmScript
from dshealthd.doctor.job.sources.source import (
    MAX_BYTES,
    Source,
    count_gpus,
    read_all,
    read_text,
    training_variables,
    variables_in_deepspeed_env,
)
from dshealthd.doctor.job.start import Start
from dshealthd.jobs import checkpoint_files
from dshealthd.jobs.checkpoint_files import Checkpoint
from dshealthd.jobs.environment import natural
from dshealthd.probe.members.hostlist import HostlistError, MembershipError, expand
from dshealthd.probe.members.membership import Member, parse_hostfile

if TYPE_CHECKING:
    import argparse


__all__ = ["JobContext", "add_arguments", "context"]

MAX_HOSTFILE = 1 << 20
_FOLDER = re.compile(r"\$\{?(SLURM_SUBMIT_DIR|PWD)\}?/")
"""The folder where a job is submitted, which most often is that of its script."""
MAX_HOSTS = 256
"""Maximum number of hosts to check, from the first on."""
DEFAULT_HOSTFILE = "/job/hostfile"
"""The hostfile that `deepspeed` uses if it exists and no other is given (launcher/runner.py)."""


@dataclass(frozen=True)
class JobContext:
    """A job that is about to start.

    Each source is None if the user named none.
    """

    host: Host = field(default_factory=Host)
    config: Source[deepspeed_config.Parsed] | None = None
    inspected: Source[Inspection] | None = None
    """What the interpreter's DeepSpeed says; None without a readable configuration or a Python."""
    hostfile: Source[str] | None = None
    command: Source[LauncherCommand] | None = None
    """The command that is given in words, which a shell has expanded."""
    script: Source[SlurmScript] | None = None
    manifest: Source[Manifest] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of this shell, which in a job's own script are the job's."""
    in_deepspeed_env: Source[list[str]] | None = None
    """Names of variables in `.deepspeed_env`; None if no launcher is given."""
    checkpoint: Source[Checkpoint] | None = None
    gpus: Source[int] | None = None
    """GPUs of this node."""
    python: str = ""
    ssh: str = "ssh"
    """The SSH client."""
    ranks: int | None = None
    """Number of ranks, as the user says."""
    model_parallel: int = 1
    """Ranks that share one copy of the model: tensor, pipeline, sequence parallelism."""
    gpus_wanted: int | None = None
    """GPUs per node, as the user says."""

    @cached_property
    def document(self) -> dict[str, Any] | None:
        """The job's configuration as a dictionary; None if it could not be read."""
        written = self.batch_script.config if self.batch_script else None
        given = self.config.value if self.config else written
        if given is None:
            return None
        found = given["document"]
        if found is None and self.inspection is not None:
            found = self.inspection.document
        return found if isinstance(found, dict) else None

    @property
    def inspection(self) -> Inspection | None:
        """What DeepSpeed says about the configuration; None if it could not be queried."""
        return self.inspected.value if self.inspected else None

    @property
    def why_not_inspected(self) -> str:
        """Why DeepSpeed could not be queried about the configuration."""
        if self.inspected is None:
            return "no interpreter with DeepSpeed is given (--python)"
        return self.inspected.problem or (self.inspection.problem if self.inspection else "")

    @property
    def inspector(self) -> str:
        """The DeepSpeed that was queried."""
        version = self.inspection.version if self.inspection else "of an unknown version"
        return f"DeepSpeed {version} of {self.python}"

    @cached_property
    def members(self) -> tuple[Member, ...]:
        """The hosts in the job's hostfile; empty without a well-formed one."""
        if self.hostfile is None or self.hostfile.value is None:
            return ()
        try:
            return parse_hostfile(self.hostfile.value, self.hostfile.name)
        except MembershipError:
            return ()  # the check `hostfile` reports what is wrong

    @property
    def batch_script(self) -> SlurmScript | None:
        """The job's script; None if it could not be read."""
        return self.script.value if self.script else None

    @cached_property
    def launcher(self) -> LauncherCommand | None:
        """The launcher in the job's command, else in its script."""
        written = self._written
        return written and launcher_command.with_defaults(written, self.variables)

    @property
    def _written(self) -> LauncherCommand | None:
        if self.command is not None and self.command.value is not None:
            return self.command.value
        return self.batch_script.command if self.batch_script else None

    @property
    def deepspeed(self) -> LauncherCommand | None:
        """The call of `deepspeed` in the launcher."""
        return self.launcher.find("deepspeed") if self.launcher else None

    @cached_property
    def variables(self) -> Mapping[str, str]:
        """The environment of the job, overridden by the script, then by the command's prefix."""
        found = dict(self.environment)
        if self.batch_script is not None:
            found |= self.batch_script.exports
        for command in self._written.chain() if self._written else ():
            found |= command.variables
        return found

    @cached_property
    def settings(self) -> Mapping[str, str]:
        """The environment of the job's ranks, or of its pods."""
        pods = self.manifest.value.pods if self.manifest and self.manifest.value else ()
        found = {name: value for pod in pods for name, value in pod.variables.items()}
        return {**self.variables, **found}

    @property
    def nodes(self) -> int:
        """Nodes of the job, or pods with GPUs; 1 if unknown."""
        if self.manifest is not None and self.manifest.value is not None:
            return sum(pod.count for pod in self.manifest.value.pods if pod.gpus)
        return self.layout.nodes or natural(self.slurm_options.get("nodes")) or 1

    @cached_property
    def start(self) -> Start:
        """What the launcher starts, and what Slurm gives it."""
        nodes, options = natural(self.slurm_options.get("nodes")), self.slurm_options
        outer = self.launcher.program if self.launcher else ""
        of_job = slurm_script.requested(None, self.batch_script, self.environment)
        together = nodes
        if self.launcher and nodes and nodes != natural(of_job.get("nodes")):  # those of one step
            is_one = self.layout.nodes == nodes  # others beside it are launches of their own
            together = nodes if is_one else self.launcher.at_once and nodes * self.launcher.at_once
        is_part = self.batch_script is not None and self.batch_script.others
        step = "a step without more of the job's components (--het-group)" if is_part else "the job"
        return Start(
            command=self.launcher,
            layout=self.layout,
            variables=self.variables,
            requested=of_job,
            nodes=together,
            given=f"Slurm gives {step} {together}",
            gpus=self.gpus_per_node,
            memory=slurm_options.memory(options) if slurm_options.gpus_per_node(options) else None,
            copies=(nodes or self.layout.nodes or 1) if outer == "srun" else 1,
            pool=slots(self.deepspeed, self.members, self.gpus_per_node),
            strange=self.batch_script.strange if self.batch_script else (),
            calls=self._calls,
            script=self.batch_script.program if self.batch_script else "",
            unset=self.batch_script.unset if self.batch_script else {},
        )

    @property
    def _calls(self) -> Sequence[Call]:
        if self.command is None:
            return self.batch_script.calls if self.batch_script else ()
        with contextlib.suppress(ValueError, ArithmeticError):  # of what is no command
            return list(calls([ShellCommand(tuple(shlex.split(self.command.name)))]))
        return ()

    @property
    def alternatives(self) -> Iterator[Start]:
        """The starts of which conditions choose one, perhaps by the nodes, or for one node."""
        if self.script is not None and self.batch_script is not None:
            for one in self.batch_script.alternatives:
                script = replace(self.batch_script, command=one, directives={}, calls=())
                other = replace(self, script=replace(self.script, value=script), gpus=None)
                yield replace(other.start, copies=1)

    @cached_property
    def layout(self) -> Layout:
        """Ranks and nodes of the job, as far as known."""
        return layout(
            ranks=self.ranks,
            command=self.launcher,
            requested=self.slurm_options,
            members=self.members,
            variables=self.variables,
            gpus=self.gpus_per_node,
        )

    @property
    def hosts(self) -> list[str]:
        """Names of the job's nodes: of the hostfile, else those that Slurm gives it, if known."""
        if self.layout.hosts:
            return [name for name, _ in self.layout.hosts]
        with contextlib.suppress(HostlistError):
            return list(expand(self.slurm_options.get("nodelist", ""))[:MAX_HOSTS])
        return []

    @property
    def runs_elsewhere(self) -> bool:
        """Whether this node, without GPUs, is none of the job's: it has several, or Slurm chooses
        them.
        """
        if self.gpus is not None and self.gpus.value is not None:
            return False
        by_slurm = self.script is not None or (
            self.launcher is not None and self.launcher.find("srun") is not None
        )
        if self.manifest is not None:
            return True
        is_of_job = self.script is None and "SLURM_JOB_ID" in self.environment
        return not is_of_job and (by_slurm or (self.layout.nodes or 1) > 1)

    @property
    def slurm_options(self) -> Mapping[str, str]:
        """What the job requests of Slurm, by the long names of options."""
        return slurm_script.requested(self.launcher, self.batch_script, self.environment)

    @property
    def gpus_per_node(self) -> int | None:
        """GPUs per node of the job: of its container, else given, else what it requests of Slurm,
        else this node's.
        """
        for one in self.launcher.chain() if self.launcher else ():
            if (count := programs.gpus_of_container(one.wrapper)) is not None:
                return count
        if self.gpus_wanted is not None:
            return self.gpus_wanted
        if (requested := slurm_options.gpus_per_node(self.slurm_options)) is not None:
            return requested
        return (self.gpus.value if self.gpus else None) or None

    @cached_property
    def rendezvous(self) -> Rendezvous:
        """Where the ranks of the job meet."""
        return rendezvous(self.launcher, self.variables)

    @property
    def by_ssh(self) -> bool:
        """Whether `deepspeed` reaches hosts over SSH; without a launcher, if there is a
        hostfile.
        """
        if self.launcher is None:
            return self.hostfile is not None
        return self.deepspeed is not None and "no-ssh" not in self.deepspeed.options

    @property
    def data_parallel(self) -> int | None:
        """Copies of the model; None if ranks are unknown or not divisible by model parallelism."""
        ranks, shared = self.layout.ranks, self.model_parallel
        if shared == 1:  # not given
            shared = self.start.model_parallel or 0
        return None if ranks is None or not shared or ranks % shared else ranks // shared


def context(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> JobContext:
    """Read everything that the user named and return it for the checks.

    Takes as long as the slowest source, at most its deadline.
    """
    readers: dict[str, Callable[[], Any]] = {"gpus": count_gpus}
    file, suffix = args.file, os.path.splitext(args.file or "")[1]
    config = args.deepspeed_config or (file if suffix == ".hjson" else "")
    if suffix in {".yaml", ".yml", ".json"}:
        readers["manifest"] = partial(_read_manifest, file)
    elif file and file != config:
        readers["script"] = partial(_read_script, file, environment)
    found = read_all(readers)
    if suffix == ".json" and found["manifest"].value is None:
        del found["manifest"]
        config = config or file
    command = _command(args.launch, environment) if args.launch else None
    if "manifest" in found and (settings := (found["manifest"].value or {}).get("accelerate")):
        del found["manifest"]
        command = Source(file, launcher_command.of_accelerate(settings))
    script = _mapped(found.get("script"), file, slurm_script.from_json)
    named = JobContext(command=command, script=script)
    directory = os.path.dirname(file or "")
    hostfile = args.hostfile or _named_hostfile(named, directory)
    config = config or (named.launcher and _beside(named.launcher.config, directory)) or ""
    readers = {}
    if command is not None or script is not None:
        readers["deepspeed_env"] = variables_in_deepspeed_env
    if config:
        readers["config"] = partial(_read_config, config)
    if hostfile:
        readers["hostfile"] = partial(read_text, hostfile, MAX_HOSTFILE)
    found |= read_all(readers)
    if args.checkpoint:
        universal = _loads_universal(found.get("config"))
        read = partial(checkpoint_files.read, args.checkpoint, args.tag, universal=universal)
        found |= read_all({"checkpoint": read})
    written = (
        named.batch_script.config if named.batch_script and not args.deepspeed_config else None
    )
    if written:
        found["config"], config = Source(file, written), file
    made = JobContext(
        config=_mapped(found.get("config"), config, dict),
        hostfile=_mapped(found.get("hostfile"), hostfile, str),
        command=command,
        script=script,
        manifest=_mapped(found.get("manifest"), file, manifest.from_json),
        environment=training_variables(environment),
        in_deepspeed_env=found.get("deepspeed_env"),
        checkpoint=_mapped(found.get("checkpoint"), args.checkpoint, checkpoint_files.from_json),
        gpus=_mapped(found["gpus"], "NVML", int),
        python=args.python[0] if args.python else "",
        ssh=getattr(args, "ssh", "ssh"),
        ranks=args.ranks,
        model_parallel=args.model_parallel,
        gpus_wanted=args.gpus_per_node,
    )
    return _inspected(made)


def _inspected(made: JobContext) -> JobContext:
    """Return the context with what the interpreter's DeepSpeed says about the configuration."""
    if not made.python or made.config is None or made.config.value is None:
        return made
    request: dict[str, Any] = {"ranks": made.data_parallel}
    if made.config.value["document"] is None:
        request["text"] = made.config.value["text"]
    else:
        request["document"] = made.config.value["document"]
    answer = read_all(
        {"inspection": partial(inspection.inspect, made.python, request)}, inspection.DEADLINE
    )["inspection"]
    return replace(made, inspected=_mapped(answer, made.python, inspection.from_json))


def _mapped(source: Source[Any] | None, name: str, make: Callable[[Any], Any]) -> Any:
    """Return a source under the user's name for it, with its JSON value made into an object."""
    if source is None:
        return None
    value = None if source.value is None else make(source.value)
    return replace(source, name=printable(name), value=value)


def _read_config(path: str) -> deepspeed_config.Parsed:
    return deepspeed_config.parse(read_text(path, MAX_BYTES))


def _read_script(path: str, environment: Mapping[str, str]) -> dict[str, Any]:
    def read(name: str) -> str:
        """Return the text of a file that the script names; empty if it cannot be read."""
        with contextlib.suppress(OSError, ValueError, ArithmeticError):
            return read_text(_beside(name, os.path.dirname(path)), MAX_BYTES)
        return ""

    try:
        text = read_text(path, MAX_BYTES)
        return asdict(slurm_script.parse(text, environment, read))
    except (ValueError, ArithmeticError) as error:
        message = str(error) if str(error).startswith(path) else f"{path}: {error}"
        raise ValueError(message) from error


def _read_manifest(path: str) -> dict[str, Any]:
    return manifest.parse(read_text(path, MAX_BYTES))


def _command(words: Sequence[str], environment: Mapping[str, str]) -> Source[LauncherCommand]:
    found = launcher_command.parse(words, environment)
    problem = "" if found else "does not call deepspeed, torchrun or srun"
    return Source(shlex.join(words), found, problem)


def _loads_universal(config: Source[deepspeed_config.Parsed] | None) -> bool:
    document = config.value["document"] if config and config.value else None
    return ManifestFields(document).stated("checkpoint.load_universal") is True


def _named_hostfile(made: JobContext, directory: str) -> str:
    """Return the hostfile that the launcher uses; "" if none is known."""
    if made.deepspeed is None:
        return ""
    name = made.deepspeed.options.get("hostfile", "")
    if not name and os.path.exists(DEFAULT_HOSTFILE):
        return DEFAULT_HOSTFILE
    return _beside(name, directory) or ("" if "$" in name else name)


def _beside(name: str, directory: str) -> str:
    """Return where a file is that a script in a directory names; "" if it is not here."""
    name = _FOLDER.sub("", name)
    places = (name, os.path.join(directory, name))
    return next((one for one in places if name and "$" not in name and os.path.isfile(one)), "")
