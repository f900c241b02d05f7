"""The real Prometheus and Alertmanager, on a machine of the lab, with the files that are shipped.

Of the shipped files a lab changes only the places: where targets, Alertmanager and receivers are.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import subprocess
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from bench.processes import free_port
from generate.alert_rules import URGENT
from tests import yaml_files
from tests.lab.brief_agent import KEEP_SECONDS
from tests.lab.receiver import Receiver
from tests.lab.station import NotPermitted, Station, connect

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTMANAGER = DEPLOY / "alertmanager"
PROMETHEUS = DEPLOY / "prometheus"
PART = "dshealthd.yml"
"""Of the configuration of either: what is ours, and complete."""
RULES = ("thresholds.yml", "recording.yml", "alerts.yml")
START_SECONDS = 120.0
RESEND = "10s"
ITSELF = "1s"
"""How often Prometheus scrapes itself: before the rules that want this are evaluated first."""
KEEP_FIRING = f"{KEEP_SECONDS}s"
"""How long alerts of a lab go on firing, where those that are shipped do for minutes."""


class Server:
    """One of the two, running."""

    def __init__(
        self, name: str, process: subprocess.Popen[Any], station: Station, port: int, log: Path
    ) -> None:
        """`name` is the command's; it serves on `port` of the station."""
        self.name, self.process, self.log = name, process, log
        self.station, self.port = station, port

    @property
    def url(self) -> str:
        """Return its address, as its station and the nodes reach it."""
        return f"http://{self.station.address}:{self.port}"

    def ask(self, path: str, document: Any = None) -> Any:
        """Return the answer's JSON, or its text where it is none; with a document, POST it.

        RuntimeError for an answer that is no good.
        """
        connection = http.client.HTTPConnection(self.station.address, self.port)
        connection.sock = connect(self.station, (self.station.address, self.port))
        with contextlib.closing(connection):
            body = None if document is None else json.dumps(document)
            connection.request(
                "GET" if body is None else "POST",
                path,
                body,
                {"Content-Type": "application/json", "Connection": "close"},
            )
            answer = connection.getresponse()
            text = answer.read().decode()
        if answer.status >= http.client.BAD_REQUEST:
            message = f"{self.name}{path}: {answer.status} {text}"
            raise RuntimeError(message)
        return json.loads(text) if "json" in (answer.getheader("Content-Type") or "") else text

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the result of an instant query."""
        result: list[dict[str, Any]] = self.ask(
            "/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        )["data"]["result"]
        return result

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until it says that it is ready."""
        finish = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError, RuntimeError):
                self.ask("/-/ready")
                return
            if self.process.poll() is not None or time.monotonic() > finish:
                message = f"{self.name} is not ready:\n{self.log.read_text(encoding='utf-8')}"
                raise RuntimeError(message)
            time.sleep(0.05)


@contextlib.contextmanager
def alertmanager(
    station: Station,
    directory: Path,
    receiver: Receiver,
    adapt: Callable[[dict[str, Any]], object] = lambda _: None,
) -> Iterator[Server]:
    """Run Alertmanager with the shipped configuration, whose webhooks go to the receiver.

    `adapt` may change more of it.
    """
    # As prometheus-operator has it: the file is written into a folder of its own, beside which no
    # other file of ours is found by a relative path.
    folder = directory / "alertmanager"
    file = folder / "config_out/alertmanager.env.yaml"
    file.parent.mkdir(parents=True)
    config = yaml_files.load(ALERTMANAGER / PART)
    for found in config["receivers"]:
        for webhook in found.get("webhook_configs", ()):
            webhook["url"] = receiver.url + urllib.parse.urlsplit(webhook["url"]).path
    adapt(config)
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    flags = [
        f"--config.file={file}",
        f"--storage.path={folder / 'data'}",
        "--cluster.listen-address=",
        "--log.level=warn",
    ]
    with running_server("prometheus-alertmanager", flags, station, folder, free_port()) as server:
        yield server


@contextlib.contextmanager
def prometheus(
    station: Station,
    directory: Path,
    discovery: dict[str, Any],
    alertmanagers: Sequence[str] = (),
    *,
    pace: str | None = None,
    scrape: str | None = None,
    files: Path = PROMETHEUS,
    itself: bool = False,
) -> Iterator[Server]:
    """Run Prometheus with the shipped configuration and rules.

    `discovery` is the part of its scrape configuration that says where the agents are, such as
    `{"file_sd_configs": …}`; `alertmanagers` are HOST:PORT. `pace` is how often it scrapes and
    evaluates, and `scrape` how often it scrapes, where that is to differ from what is shipped. As
    shipped it scrapes `itself` too, and warns of its own rules where the machine is too busy.
    """
    port = free_port()
    folder = directory / "prometheus"
    shutil.copytree(files, folder)
    file = folder / PART
    config = yaml_files.load(file)
    config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": list(alertmanagers)}]}]}
    for job in config["scrape_configs"]:
        if pace is not None:
            job |= {"scrape_interval": pace, "scrape_timeout": pace}
        if scrape is not None:
            job["scrape_interval"] = scrape
        for key in [key for key in job if key.endswith("_sd_configs") or key == "static_configs"]:
            del job[key]
        if job["job_name"] == "dshealthd":
            job.update(discovery)
        elif itself:
            job["static_configs"] = [{"targets": [f"{station.address}:{port}"]}]
            job["scrape_interval"] = ITSELF
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    _hurry_rules(folder, pace)
    flags = [f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}", "--log.level=warn"]
    # An alert that fires before Alertmanager is known is sent again only after this, a minute by
    # default.
    flags.append(f"--rules.alert.resend-delay={RESEND}")
    with running_server("prometheus", flags, station, folder, port) as server:
        yield server


def routes(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every route of a configuration of Alertmanager, the top one first."""
    waiting = [config["route"]]
    for route in waiting:
        yield route
        waiting += route.get("routes", ())


def _hurry_rules(folder: Path, pace: str | None) -> None:
    """Have alerts go on firing for seconds after their cause is gone, not for minutes, and the
    urgent groups evaluated at a pace of their own, if one is given.
    """
    for name in RULES:
        content = yaml_files.load(folder / name)
        for group in content["groups"]:
            if pace is not None and group["interval"] == URGENT:
                group["interval"] = pace
            for rule in group["rules"]:
                if "keep_firing_for" in rule:
                    rule["keep_firing_for"] = KEEP_FIRING
        (folder / name).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


@contextlib.contextmanager
def running_server(
    name: str,
    flags: Sequence[str],
    station: Station,
    folder: Path,
    port: int,
    listen_flag: str = "--web.listen-address",
) -> Iterator[Server]:
    """Run a server of this name, with its log in the folder, from when it is ready. And end it."""
    command = shutil.which(name)
    if command is None:
        message = f"{name} is not installed"
        raise NotPermitted(message)
    log = folder / "log"
    with log.open("wb") as output:
        process = station.popen(
            [command, *flags, f"{listen_flag}={station.address}:{port}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        server = Server(name, process, station, port, log)
        server.wait_ready()
        yield server
    finally:
        process.terminate()
        process.wait(60)
