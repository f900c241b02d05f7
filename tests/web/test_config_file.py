"""The exporter-toolkit's web config file.

What is accepted, what is refused and how, and how a change is taken up.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from dshealthd.cli.main import main
from dshealthd.core.options import ConfigError
from dshealthd.web import config_file
from dshealthd.web.config_file import WebConfigFile
from tests.jobs.machines import Clock
from tests.stopwatch import Stopwatch

CHECK_INTERVAL = 1.0
CHECK_PATIENCE = 0.5

HASH = "$2y$04$b7qGQqGJPKFDWSlgbCyDXeN8kNqDzOXNPg1fJGcGJ04nLYKaNXK6S"
OTHER_HASH = "$2b$04$pLVNzLsrCDYhbC3hUbpRDuuVGvbPoaOJZqwNFDjGo5uUR4PfBKVWK"
TLS = "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n"

ACCEPTED = {
    "empty": "",
    "comment": "# nothing\n",
    "users": f"basic_auth_users:\n  alice: {HASH}\n  bob: {OTHER_HASH}\n",
    "no users": "basic_auth_users:\n",
    "TLS": TLS,
    "mutual TLS": (
        f"{TLS}  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"
    ),
    "names": (
        f"{TLS}  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n  "
        "client_allowed_sans: [a, b]\n"
    ),
    "optional": f"{TLS}  client_auth_type: VerifyClientCertIfGiven\n  client_ca_file: ca.pem\n",
    "none": f"{TLS}  client_auth_type: NoClientCert\n",
    "versions": f"{TLS}  min_version: TLS12\n  max_version: TLS12\n",
    "suites": (
        f"{TLS}  cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256]\n  "
        "prefer_server_cipher_suites: false\n"
    ),
    "curve": f"{TLS}  curve_preferences: [CurveP384]\n",
    "no http2": f"{TLS}http_server_config:\n  http2: false\n",
    "headers": (
        "http_server_config:\n  headers:\n    X-Frame-Options: sameorigin\n    "
        "Strict-Transport-Security: max-age=60\n"
    ),
}

REFUSED_TLS = {
    "inline": ("cert: x", "cert: not supported; put the certificate into a file "),
    "number": ("min_version: 12", "min_version: 12 is not one of "),
    "list of numbers": ("cipher_suites: [1]", "cipher_suites: must be a string, not "),
    "old version": ("min_version: TLS10", 'min_version: "TLS10" is not one of '),
    "no version": ("max_version: SSL30", 'max_version: "SSL30" is not one of "TLS12", "TLS13"'),
    "no range": (
        "min_version: TLS13\n  max_version: TLS12",
        "min_version: is later than max_version",
    ),
    "suite": (
        "cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]",
        'cipher_suites: "TLS_RSA_WITH_RC4_128_SHA" is ',
    ),
    "two curves": (
        "curve_preferences: [CurveP256, CurveP384]",
        "curve_preferences: only one curve is supported; ",
    ),
    "other curve": (
        "curve_preferences: [X25519]",
        'curve_preferences: "X25519" is not supported; ',
    ),
    "any client": (
        "client_auth_type: RequireAnyClientCert",
        'client_auth_type: "RequireAnyClientCert" is not ',
    ),
    "any client if given": (
        "client_auth_type: RequestClientCert",
        'client_auth_type: "RequestClientCert" is not ',
    ),
    "no policy": ("client_auth_type: Maybe", 'client_auth_type: "Maybe" is not one of '),
    "no authority": ("client_auth_type: RequireAndVerifyClientCert", "client_ca_file: is needed "),
    "idle authority": ("client_ca_file: ca.pem", "client_ca_file: is set, but "),
    "idle names": ("client_allowed_sans: [a]", "client_allowed_sans: needs client_auth_type "),
    "bad authority": (
        "client_auth_type: VerifyClientCertIfGiven\n  client_ca_file: server.key",
        "client_ca_file: DIR/server.key holds no certificate: ",
    ),
}
"""Further lines of `tls_server_config`, and what is wrong with which key of it."""
REFUSED = {
    "no YAML": ("a: [", ["is not YAML: "]),
    "no mapping": ("- a\n", ["must be a mapping at its top level"]),
    "unknown key": (
        "tls_server_conf: {}\n",
        ["tls_server_conf: unknown key; did you mean tls_server_config?"],
    ),
    "section of another kind": ("basic_auth_users: [a]\n", ["basic_auth_users: must be a mapping"]),
    "twice": (
        "basic_auth_users: {}\nbasic_auth_users: {}\n",
        ["basic_auth_users: is given twice, the second time on line 2"],
    ),
    "rate limit": ("rate_limit: {burst: 1}\n", ["rate_limit: not supported; web.max_connections "]),
    "no certificate": (
        "tls_server_config: {min_version: TLS12}\n",
        ["tls_server_config.cert_file: is missing", "tls_server_config.key_file: is missing"],
    ),
    "no such file": (
        TLS.replace("server.pem", "gone.pem"),
        ["tls_server_config.cert_file: DIR/gone.pem cannot be read"],
    ),
    "not that key": (
        TLS.replace("server.key", "server2.key"),
        ["tls_server_config.key_file: DIR/server2.key is not the key of DIR/server.pem"],
    ),
    "no key": (TLS.replace("server.key", "server.pem"), ["tls_server_config.key_file: DIR/server"]),
    "encrypted": (
        TLS.replace("server.key", "server.encrypted.key"),
        ["tls_server_config.key_file: DIR/server"],
    ),
    "http2": (
        "http_server_config: {http2: true}\n",
        ["http_server_config.http2: not supported; leave the key out, or set it to false"],
    ),
    "no header": (
        "http_server_config: {headers: {Foo: bar}}\n",
        ["http_server_config.headers.Foo: cannot be set; only "],
    ),
    "header value": (
        "http_server_config: {headers: {X-Frame-Options: maybe}}\n",
        ['http_server_config.headers.X-Frame-Options: "maybe" is not one of deny, '],
    ),
    "header with line": (
        'http_server_config: {headers: {X-XSS-Protection: "a\\r\\nb"}}\n',
        ["http_server_config.headers.X-XSS-Protection: must be a string of "],
    ),
    "no hash": (
        "basic_auth_users: {alice: secret}\n",
        ["basic_auth_users.alice: is not a bcrypt hash"],
    ),
    "costly": (
        f"basic_auth_users: {{alice: '{HASH.replace('$04$', '$20$')}'}}\n",
        ["basic_auth_users.alice: is a bcrypt hash of cost 20; "],
    ),
    "colon": (
        f"basic_auth_users: {{'a:b': '{HASH}'}}\n",
        ["basic_auth_users.a:b: a name with a colon cannot be sent"],
    ),
    "numbers": (
        f"basic_auth_users: {{1: '{HASH}'}}\n",
        ["basic_auth_users.1: name and hash must be strings; quote "],
    ),
    "all at once": (
        "bogus: 1\nhttp_server_config: {http2: true}\nbasic_auth_users: {a: b}\n",
        [
            "bogus: unknown key; known are ",
            "basic_auth_users.a: is not a bcrypt hash",
            "http_server_config.http2: not supported",
        ],
    ),
    **{
        name: (f"{TLS}  {line}\n", [f"tls_server_config.{message}"])
        for name, (line, message) in REFUSED_TLS.items()
    },
}


def promtool(file: Path) -> bool:
    """Tell whether Prometheus' own tool accepts a web config file."""
    return (
        subprocess.run(
            ["promtool", "check", "web-config", str(file)],
            capture_output=True,
            timeout=60,
            check=False,
        ).returncode
        == 0
    )


@pytest.fixture
def write(keys: Path) -> Path:
    """Return a place for a config file among the certificates."""
    return keys / "web.yml"


@pytest.mark.parametrize("text", ACCEPTED.values(), ids=ACCEPTED)
def test_accepted_file_is_one_for_prometheus_too(write: Path, text: str) -> None:
    """What is accepted, Prometheus' own tool accepts as well."""
    write.write_text(text, encoding="utf-8")
    WebConfigFile(write)
    assert (
        promtool(write) or "client_allowed_sans" in text
    )  # a key that is younger than Debian 12's promtool


@pytest.mark.parametrize(("text", "messages"), REFUSED.values(), ids=REFUSED)
def test_refused_file_is_told_by_key(write: Path, text: str, messages: list[str]) -> None:
    """What is not supported or wrong is refused, all of it at once, each with its key and the
    file's name.
    """
    write.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        WebConfigFile(write)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(messages), lines
    for line, message in zip(lines, messages, strict=True):
        assert line.startswith(f"{write}: {message.replace('DIR', str(write.parent))}"), line


@pytest.mark.parametrize(
    "name",
    [
        "unknown key",
        "no such file",
        "not that key",
        "suite",
        "no policy",
        "idle authority",
        "no hash",
    ],
)
def test_prometheus_refuses_what_is_wrong_too(write: Path, name: str) -> None:
    """Files that are wrong, rather than beyond what is supported here, are refused by Prometheus'
    own tool as well.
    """
    write.write_text(REFUSED[name][0], encoding="utf-8")
    assert not promtool(write)


def test_missing_file_is_told(tmp_path: Path) -> None:
    """A file that is not there, or is no text, is an error that names it."""
    with pytest.raises(ConfigError, match=r"nothing\.yml: cannot be read: No such file"):
        WebConfigFile(tmp_path / "nothing.yml")
    (tmp_path / "binary.yml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.yml: is not UTF-8: "):
        WebConfigFile(tmp_path / "binary.yml")


@pytest.mark.parametrize("flag", ["--web.config.file", "--web.config-file"])
def test_check_config_checks_the_web_config_file(
    flag: str, write: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`dshealthd check-config` reads the web config file too, and `run` does not start on a bad
    one. The flag may be spelt as Prometheus' own exporters spell it.
    """
    write.write_text("bogus: 1\n", encoding="utf-8")
    for command in ("check-config", "run"):
        assert main([command, flag, str(write)]) == 2
        assert f"{write}: bogus: unknown key" in capsys.readouterr().err
    write.write_text(ACCEPTED["users"], encoding="utf-8")
    assert main(["check-config", flag, str(write)]) == 0


def changed(file: WebConfigFile, clock: Clock) -> WebConfigFile:
    """Let the time pass after which the files are looked at again."""
    clock.now += CHECK_INTERVAL
    asyncio.run(file.current())
    return file


TIMES = itertools.count(1)


def put(place: Path, text: str) -> None:
    """Write a file so that it differs from before, however coarse the file system's clock is."""
    place.write_text(text, encoding="utf-8")
    stat = place.stat()
    changed = stat.st_mtime_ns + next(TIMES) * 1_000_000
    os.utime(place, ns=(stat.st_atime_ns, changed))


@pytest.fixture
def file(keys: Path, tmp_path: Path) -> Path:
    """A config file with TLS and a user, and its certificates, in a directory of its own."""
    for name in ("server.pem", "server.key", "server2.pem", "server2.key", "ca.pem"):
        (tmp_path / name).write_bytes((keys / name).read_bytes())
        (tmp_path / name).chmod(0o600)
    place = tmp_path / "web.yml"
    place.write_text(TLS + ACCEPTED["users"], encoding="utf-8")
    return place


def test_change_is_taken_up(file: Path) -> None:
    """A changed file is in force a second later at most. One that has not changed is not read
    again.
    """
    clock = Clock()
    config = WebConfigFile(file, clock)
    before = config.config
    assert set(before.users) == {"alice", "bob"}
    assert changed(config, clock).config is before
    put(file, TLS + f"basic_auth_users:\n  carol: {HASH}\n")
    assert asyncio.run(config.current()) is before
    assert set(changed(config, clock).config.users) == {"carol"}
    assert (config.ok, config.failures) == (True, 0)


def test_file_system_that_hangs_is_waited_for_once(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a look at the files hangs, the first client waits for it a moment, later ones do
    not.
    """
    hanging = threading.Event()
    clock = Clock()
    config = WebConfigFile(file, clock)
    before = config.config

    def hang(_paths: object) -> object:
        hanging.wait(60)
        return before

    async def scene() -> None:
        clock.now += CHECK_INTERVAL
        first, watch = time.monotonic(), Stopwatch()
        assert await config.current() is before
        assert time.monotonic() - first >= CHECK_PATIENCE
        assert watch.seconds() < 2 * CHECK_PATIENCE
        watch = Stopwatch()
        for _ in range(20):
            assert await config.current() is before
        assert watch.seconds() < CHECK_PATIENCE

    monkeypatch.setattr(config_file, "signatures", hang)
    try:
        asyncio.run(scene())
    finally:
        hanging.set()


def test_bad_change_keeps_the_one_before(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that cannot be used is counted and logged once. What was in force stays so until there
    is a good one.
    """
    clock = Clock()
    config = WebConfigFile(file, clock)
    before = config.config
    put(file, "tls_server_config: [\n")
    for _ in range(3):
        assert changed(config, clock).config is before
    assert (config.ok, config.failures) == (False, 1)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    put(file, TLS + f"basic_auth_users:\n  carol: {HASH}\n")
    assert set(changed(config, clock).config.users) == {"carol"}
    assert (config.ok, config.failures) == (True, 1)


def test_certificate_that_appears_later_is_found(file: Path) -> None:
    """A file that names a certificate before it is there is taken up when it is."""
    clock = Clock()
    config = WebConfigFile(file, clock)
    put(file, TLS.replace(" server.", " later.") + ACCEPTED["users"])
    assert not changed(config, clock).ok
    for suffix in ("pem", "key"):
        (file.parent / f"later.{suffix}").write_bytes(
            (file.parent / f"server2.{suffix}").read_bytes()
        )
    assert changed(config, clock).ok
    assert config.config.files[1].endswith("later.pem")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        pytest.param("", "basic_auth_users", id="empty"),
        pytest.param(TLS, "basic_auth_users", id="no users"),
        pytest.param(ACCEPTED["users"], "tls_server_config", id="no TLS"),
    ],
)
def test_change_does_not_take_protection_away(
    file: Path, caplog: pytest.LogCaptureFixture, text: str, key: str
) -> None:
    """A file of which only a part has been written must not open the agent to everybody. That needs
    a restart.
    """
    clock = Clock()
    config = WebConfigFile(file, clock)
    before = config.config
    put(file, text)
    assert changed(config, clock).config is before
    assert not config.ok
    assert f"{key}: " in caplog.records[-1].getMessage()
    assert "needs a restart" in caplog.records[-1].getMessage()


def test_change_does_not_ask_less_of_clients(file: Path) -> None:
    """The same for client certificates: what is no longer asked for needs a restart."""
    strict = (
        f"{TLS}  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n  "
        "client_allowed_sans: [a]\n"
    )
    file.write_text(strict, encoding="utf-8")
    clock = Clock()
    config = WebConfigFile(file, clock)
    before = config.config
    for text in (
        TLS,
        strict.replace("RequireAndVerify", "Verify").replace("ClientCert\n", "ClientCertIfGiven\n"),
        strict.replace("  client_allowed_sans: [a]\n", ""),
    ):
        put(file, text)
        assert changed(config, clock).config is before
    put(file, strict.replace("[a]", "[b]"))
    assert changed(config, clock).config is not before
