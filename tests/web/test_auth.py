"""Basic authentication: who is let in, what it costs, and that it costs the event loop nothing."""

from __future__ import annotations

import asyncio
import base64
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import bcrypt
import pytest

from dshealthd.web import auth
from dshealthd.web.auth import Authenticator, _nobody, problem
from tests.stopwatch import Stopwatch
from tests.web.serving import serving

REMEMBERED = 128
WAITING = 16


CLIENT, OTHER = "192.0.2.1", "192.0.2.2"


def hashed(password: bytes, cost: int = 4) -> str:
    """Return the hash of a password."""
    return bcrypt.hashpw(password, bcrypt.gensalt(cost)).decode()


def basic(name: str, password: bytes) -> str:
    """Return the Authorization header of a name and a password."""
    return "Basic " + base64.b64encode(name.encode() + b":" + password).decode()


def ask(users: Mapping[str, str], *headers: str | None) -> list[int | None]:
    """Return what an authenticator says to requests one after the other."""

    async def run() -> list[int | None]:
        authenticator = Authenticator()
        return [await authenticator.refusal(users, header, CLIENT) for header in headers]

    return asyncio.run(run())


USERS = {
    "alice": hashed(b"secret"),
    "bj\u00f6rn": hashed("pa\u00df:word".encode()),
    "long": hashed(b"x" * 72),
    "empty": hashed(b""),
}


@pytest.mark.parametrize(
    ("header", "refusal"),
    [
        (basic("alice", b"secret"), None),
        (basic("alice", b"secret").replace("Basic", "basic"), None),
        (basic("bj\u00f6rn", "pa\u00df:word".encode()), None),
        (basic("long", b"x" * 72), None),
        (basic("long", b"x" * 100), None),  # bcrypt looks no further, nor does the exporter-toolkit
        (basic("empty", b""), None),
        (basic("alice", b"Secret"), 401),
        (basic("alice", b""), 401),
        (basic("alice", b"a\x00b"), 401),
        (basic("bob", b"secret"), 401),
        (basic("", b""), 401),
        (None, 401),
        ("", 401),
        ("Basic", 401),
        ("Basic !!!", 401),
        ("Basic \u00e9", 401),
        ("Basic " + base64.b64encode(b"alice").decode(), 401),
        ("Basic " + base64.b64encode(b"\xff:secret").decode(), 401),
        ("Bearer " + base64.b64encode(b"alice:secret").decode(), 401),
    ],
)
def test_who_is_let_in(header: str | None, refusal: int | None) -> None:
    """Only the name and the password of a user let a request in, however the header is
    malformed.
    """
    assert ask(USERS, header) == [refusal]


def test_hashes_of_other_tools_are_understood() -> None:
    """The hashes that htpasswd (2y) and older tools (2a) write are the same function."""
    for kind in ("2a", "2b", "2y"):
        assert ask({"alice": USERS["alice"].replace("2b", kind, 1)}, basic("alice", b"secret")) == [
            None
        ]


@pytest.mark.parametrize(("cost", "allowed"), [(3, False), (4, True), (16, True), (17, False)])
def test_costs_of_a_login(cost: int, *, allowed: bool) -> None:
    """From bcrypt's own minimum on, up to some seconds."""
    hash = hashed(b"secret").replace("$04$", f"${cost:02}$", 1)
    assert problem(hash) == (
        None if allowed else f"is a bcrypt hash of cost {cost}; 4 to 16 are supported"
    )
    assert problem(hash[:-1]) == "is not a bcrypt hash"


async def test_result_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request with the same credentials costs no bcrypt. A hash that has changed is
    verified anew.
    """
    verified = slow_bcrypt(monkeypatch)
    authenticator = Authenticator()
    for _ in range(2):
        assert await authenticator.refusal(USERS, basic("alice", b"secret"), CLIENT) is None
    assert verified == [b"secret"]
    monkeypatch.undo()
    users = {"alice": hashed(b"other")}
    assert await authenticator.refusal(users, basic("alice", b"secret"), CLIENT) == 401


async def test_guesses_do_not_push_out_who_is_let_in() -> None:
    """What is remembered is bounded, and wrong passwords never displace a right one."""
    authenticator = Authenticator()
    assert await authenticator.refusal(USERS, basic("alice", b"secret"), CLIENT) is None
    for number in range(2 * REMEMBERED):
        assert (
            await authenticator.refusal(USERS, basic("alice", str(number).encode()), CLIENT) == 401
        )
    assert (len(authenticator._passed), len(authenticator._failed)) == (1, REMEMBERED)


@pytest.mark.parametrize(("costs", "cost"), [((), 10), ((4, 12, 8), 12)])
def test_the_hash_of_an_unknown_name(costs: tuple[int, ...], cost: int) -> None:
    """As bcrypt has them, and as costly as the costliest known one."""
    users = {f"{cost}": f"$2b${cost:02}${'x' * 53}" for cost in costs}
    hash = _nobody(users)
    assert (problem(hash), hash[:7]) == (None, f"$2b${cost}$")


def test_unknown_name_takes_as_long_as_a_wrong_password() -> None:
    """The time of a refusal does not tell which names there are."""
    users = {"alice": hashed(b"secret", 8)}

    def seconds(name: str, number: int) -> float:
        started = time.process_time()
        assert ask(users, basic(name, str(number).encode())) == [401]
        return time.process_time() - started

    # The least of each, taken in turns: other work only ever adds.
    taken = [(seconds("alice", number), seconds("nobody", number)) for number in range(9)]
    known, unknown = (min(each) for each in zip(*taken, strict=True))
    assert 0.7 < known / unknown < 1.4


async def test_no_password_is_kept() -> None:
    """What is remembered is a keyed hash. The memory of the agent has no passwords and nothing to
    guess them by.
    """
    authenticator = Authenticator()
    await authenticator.refusal(USERS, basic("alice", b"secret"), CLIENT)
    assert "secret" not in repr(vars(authenticator))


async def test_logins_that_wait_are_bounded() -> None:
    """Beyond a number of waiting clients, a login gets "Service Unavailable". Clients whose login
    is cached are not affected.
    """
    authenticator = Authenticator()
    assert await authenticator.refusal(USERS, basic("alice", b"secret"), CLIENT) is None
    guesses = [
        asyncio.create_task(
            authenticator.refusal(USERS, basic("alice", b"guess"), f"198.51.100.{number}")
        )
        for number in range(WAITING + 3)
    ]
    await asyncio.sleep(0)
    assert await authenticator.refusal(USERS, basic("alice", b"secret"), CLIENT) is None
    answers: list[int | None] = [*await asyncio.gather(*guesses)]
    assert not authenticator._clients
    assert (answers.count(401), answers.count(503)) == (WAITING, 3)


def slow_bcrypt(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Have every verification take 20 ms, and return the passwords that were verified, in order."""
    verified: list[bytes] = []

    def matches(password: bytes, _expected: str) -> bool:
        verified.append(password)
        time.sleep(0.02)
        return password == b"secret"

    monkeypatch.setattr("dshealthd.web.auth._matches", matches)
    return verified


async def test_guesses_take_a_quarter_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that tries passwords for hours does not keep a core from a training job."""
    verified = slow_bcrypt(monkeypatch)
    authenticator, started = Authenticator(), time.monotonic()
    guesses = [basic("alice", str(number).encode()) for number in range(5)]
    answers = await asyncio.gather(
        *(authenticator.refusal(USERS, guess, CLIENT) for guess in guesses)
    )
    assert answers == [401] * 5
    assert len(verified) == 5
    assert time.monotonic() - started >= 4 * 5 * 0.02


@pytest.mark.parametrize(("took", "pause"), [(0.02, 0.06), (0.3, 0.9), (60.0, 1.0)])
async def test_the_pause_after_a_guess(
    took: float, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times as long as the guess took, and a second at most."""
    times, pauses = iter((100.0, 100.0 + took)), list[float]()

    async def sleep(seconds: float) -> None:
        pauses.append(round(seconds, 6))

    monkeypatch.setattr(auth, "_matches", lambda _password, _expected: False)
    monkeypatch.setattr(auth, "time", SimpleNamespace(monotonic=lambda: next(times)))
    authenticator = Authenticator()
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "sleep", sleep)
        await authenticator._verify(b"entry", b"guess", "", known=True)
    assert pauses == [pause]


async def test_a_guesser_delays_another_client_by_one_verification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many logins of one client wait, the next turn is another client's."""
    verified = slow_bcrypt(monkeypatch)
    authenticator = Authenticator()
    guesses = [
        asyncio.create_task(
            authenticator.refusal(USERS, basic("alice", str(number).encode()), CLIENT)
        )
        for number in range(2 * WAITING)
    ]
    await asyncio.sleep(0)
    assert await authenticator.refusal(USERS, basic("alice", b"secret"), OTHER) is None
    for guess in guesses:
        guess.cancel()
    await asyncio.gather(*guesses, return_exceptions=True)
    assert verified[:2] == [b"0", b"secret"]


async def test_a_login_of_several_connections_is_verified_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A browser that loads a page sends the same credentials over several connections."""
    verified = slow_bcrypt(monkeypatch)
    authenticator, header = Authenticator(), basic("alice", b"secret")
    requests = [authenticator.refusal(USERS, header, CLIENT) for _ in range(6)]
    assert await asyncio.gather(*requests) == [None] * 6
    assert verified == [b"secret"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A web config file with a user whose hash is of the usual cost, and with headers."""
    place = tmp_path / "web.yml"
    headers = (
        "http_server_config:\n  headers:\n    X-Frame-Options: sameorigin\n    "
        "Content-Security-Policy: ''\n"
    )
    place.write_text(
        f"basic_auth_users:\n  alice: {hashed(b'secret', 10)}\n{headers}", encoding="utf-8"
    )
    return place


def test_everything_but_health_asks_for_a_password(config: Path) -> None:
    """With users configured every path is for them, existing or not, except /-/healthy, which
    liveness probes ask.
    """
    with serving(config_file=config) as served:
        for path in ("/", "/metrics", "/api/v1/status", "/-/ready", "/nothing", "/page/page.js"):
            answer, body = served.ask(path)
            assert (answer.status, body) == (401, b"Unauthorized\n"), path
            assert answer.headers["WWW-Authenticate"].startswith("Basic ")
        assert served.ask("/-/healthy")[0].status == 200
        assert served.ask("/metrics", {"Authorization": basic("alice", b"wrong")})[0].status == 401
        assert served.ask("/metrics", {"Authorization": basic("alice", b"secret")})[0].status == 200


def test_configured_headers_replace_the_own_ones(config: Path) -> None:
    """Headers of the web config file are in every answer and stand for the server's own. An empty
    one takes its own away.
    """
    with serving(config_file=config) as served:
        answer, _ = served.ask("/", {"Authorization": basic("alice", b"secret")})
        assert answer.headers.get_all("X-Frame-Options") == ["sameorigin"]
        assert "Content-Security-Policy" not in answer.headers
        assert served.ask("/-/healthy")[0].headers["X-Frame-Options"] == "sameorigin"


def test_logins_do_not_hold_up_the_others(config: Path) -> None:
    """While passwords are guessed, a client with the right one is served without waiting for
    bcrypt.
    """
    with (
        serving(config_file=config, max_connections_per_address=64) as served,
        ThreadPoolExecutor(8) as threads,
    ):
        right = {"Authorization": basic("alice", b"secret")}
        served.ask("/metrics", right)
        guesses = [
            threads.submit(
                served.ask, "/metrics", {"Authorization": basic("alice", str(n).encode())}
            )
            for n in range(12)
        ]
        for _ in range(20):
            watch = Stopwatch(os.getpid())
            assert served.ask("/metrics", right, source="127.0.0.2")[0].status == 200
            assert watch.seconds() < 0.2
        assert {guess.result()[0].status for guess in guesses} <= {401, 503}
