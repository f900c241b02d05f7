"""What the package's own C library takes from the host: NVML, modules of NSS, authorities, time
zones; and what is said where the host's libraries need a newer C library.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.machine import LONGEST, Machine, booted
from tests.deploy.test_hardened import LIBRARY
from tests.deploy.test_package import SUITES, install
from tests.nvml.simulator import Simulator
from tests.web import certificates

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(LONGEST)]

PYTHON = "/usr/lib/dshealthd/bin/python3"
MULTIARCH = "usr/lib/x86_64-linux-gnu"
NSS = """
#include <dlfcn.h>
#include <nss.h>
#include <pthread.h>
#include <pwd.h>
#include <resolv.h>
#include <string.h>
static void *nothing(void *p) { return p; }
enum nss_status
_nss_fake_getpwnam_r(const char *name, struct passwd *p, char *b, size_t n, int *e) {
    pthread_t thread; struct __res_state state;
    if (strcmp(name, "somebody") != 0) return NSS_STATUS_NOTFOUND;
    memset(&state, 0, sizeof state);
    if (!dlsym(RTLD_DEFAULT, "malloc") || res_ninit(&state)) return NSS_STATUS_UNAVAIL;
    if (pthread_create(&thread, 0, nothing, 0) || pthread_join(thread, 0))
        return NSS_STATUS_UNAVAIL;
    p->pw_name = p->pw_passwd = p->pw_gecos = p->pw_dir = p->pw_shell = strcpy(b, "somebody");
    p->pw_uid = p->pw_gid = 4242;
    return NSS_STATUS_SUCCESS;
}
"""
"""Uses each part of glibc that once was a library of its own."""
OPTIONS = ("-shared", "-fPIC", "-Wl,--no-as-needed", "-ldl", "-lpthread", "-lresolv", "-lrt")
ASK = "import pwd; print(pwd.getpwnam('somebody').pw_uid)"
LOADED = (
    "import ctypes; ctypes.CDLL('libnvidia-ml.so.1'); "
    "print(*{line.split()[-1] for line in open('/proc/self/maps') if '.so' in line}, sep='\\n')"
)


@pytest.fixture(scope="module", params=SUITES)
def machine(request: pytest.FixtureRequest, package: Path) -> Iterator[Machine]:
    """A machine with the package, a time zone and a bundle of authorities."""
    with booted("host-node", request.param, packages=("tzdata",)) as made:
        install(made, package)
        yield made


def newer(library: Path) -> None:
    """Make a library ask for a C library that does not exist yet."""
    version, changed = b"GLIBC_2.2.5\0", b"GLIBC_2.9.9\0"
    data = library.read_bytes()
    assert version in data
    data = data.replace(version, changed)
    # .gnu.version_r has the ELF hash of each version's name, by which it is found.
    old, new = (elf_hash(name[:-1]).to_bytes(4, "little") for name in (version, changed))
    library.write_bytes(data.replace(old, new))


def elf_hash(name: bytes) -> int:
    """Return the hash of a name as the System V ABI has it."""
    value = 0
    for byte in name:
        value = (value << 4) + byte
        value = (value ^ (value & 0xF0000000) >> 24) & ~(value & 0xF0000000)
    return value


def test_nvml_of_the_host(machine: Machine, tmp_path: Path) -> None:
    """The host's NVML is loaded beside the package's C library, and beside no second one."""
    simulator = Simulator(tmp_path, 2)
    shutil.copy(simulator.directory / "lib/libnvidia-ml.so.1", machine.root / LIBRARY)
    mapped = set(machine.run(PYTHON, "-c", LOADED).stdout.split())
    assert any(name.endswith("/libnvidia-ml.so.1") for name in mapped)
    ours = {name.rpartition("/")[2] for name in mapped if name.startswith("/usr/lib/dshealthd/")}
    assert {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0"} <= ours
    others = {name.rpartition("/")[2] for name in mapped if not name.startswith("/usr/lib/dsh")}
    assert not others & ours

    newer(machine.root / LIBRARY)
    ask = (
        "import pynvml\nfrom dshealthd.nvml import codes\n"
        "try: pynvml.nvmlInit()\nexcept pynvml.NVMLError as error: print(codes.describe(error))"
    )
    said = machine.run(PYTHON, "-c", ask).stdout
    assert "version `GLIBC_2.9.9' not found (required by" in said
    assert "upgrade dshealthd" in said
    (machine.root / LIBRARY).unlink()
    assert machine.run(PYTHON, "-c", ask).stdout == (
        "NVML says 'NVML Shared Library Not Found' (12)\n"
    )


def test_nss_modules_of_the_host(machine: Machine, tmp_path: Path) -> None:
    """A module that names parts of glibc works, with a search path of its own too; one that needs
    a newer glibc is passed over, and the users of other sources remain.
    """
    source = tmp_path / "fake.c"
    source.write_text(NSS)
    place = machine.root / MULTIARCH / "libnss_fake.so.2"
    nsswitch = machine.sh("cat /etc/nsswitch.conf")
    machine.write("/etc/nsswitch.conf", "passwd: fake files\n")
    try:
        for more in ((), (f"-Wl,--enable-new-dtags,-rpath,/{MULTIARCH}",)):
            command = ["gcc", str(source), "-o", str(place), *OPTIONS, *more]
            subprocess.run(command, check=True, timeout=120)
            assert machine.run(PYTHON, "-c", ASK).stdout == "4242\n"
        newer(place)
        refused = machine.run(PYTHON, "-c", ASK, check=False)
        assert "KeyError" in refused.stderr
        root = "import pwd; print(pwd.getpwnam('root').pw_uid)"
        assert machine.run(PYTHON, "-c", root).stdout == "0\n"
        assert machine.run(
            "dshealthd", "check-config", "--config.file", "/etc/dshealthd/dshealthd.toml"
        )
    finally:
        place.unlink()
        machine.write("/etc/nsswitch.conf", nsswitch)


def test_sssd(package: Path) -> None:
    """A user that only sssd knows has a name in the agent's interpreter."""
    with booted("sssd-node", packages=("sssd-common", "libnss-sss")) as machine:
        install(machine, package)
        machine.write("/etc/sssd/users", "somebody:x:4242:4242::/home/somebody:/bin/sh\n")
        machine.write("/etc/sssd/groups", "somebody:x:4242:\n")
        machine.write(
            "/etc/sssd/sssd.conf",
            "[sssd]\nservices = nss\ndomains = site\n[domain/site]\nid_provider = files\n"
            "passwd_files = /etc/sssd/users\ngroup_files = /etc/sssd/groups\n",
            0o600,
        )
        machine.write("/etc/nsswitch.conf", "passwd: files sss\ngroup: files sss\n")
        machine.sh("systemctl restart sssd")
        machine.wait(
            lambda: machine.run("getent", "passwd", "somebody", check=False).stdout, "sssd itself"
        )
        assert machine.run(PYTHON, "-c", ASK).stdout == "4242\n"


def test_authorities_and_time_zones_of_the_host(machine: Machine, tmp_path: Path) -> None:
    """The bundle that the distribution keeps is trusted, and its time zones are those that
    count.
    """
    certificates.authority(tmp_path, "ca")
    trusted = (
        "from dshealthd.http.exchange import verifying; print(len(verifying().get_ca_certs()))"
    )
    assert machine.run(PYTHON, "-c", trusted).stdout == "0\n"
    for place in ("/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/certs/ca-certificates.crt"):
        machine.write(place, (tmp_path / "ca.pem").read_text())
        assert machine.run(PYTHON, "-c", trusted).stdout == "1\n"
        machine.sh(f"rm {place}")
    moment = "import time; print(time.strftime('%H %Z', time.localtime(0)))"
    berlin = ["env", "TZ=Europe/Berlin", PYTHON, "-c", moment]
    assert machine.run(*berlin).stdout == "01 CET\n"
    machine.sh("ln -sf /usr/share/zoneinfo/Asia/Tokyo /etc/localtime")
    assert machine.run(PYTHON, "-c", moment).stdout == "09 JST\n"
    zone = "import zoneinfo; print(zoneinfo.ZoneInfo('Asia/Tokyo').key)"
    assert machine.run(PYTHON, "-c", zone).stdout == "Asia/Tokyo\n"
