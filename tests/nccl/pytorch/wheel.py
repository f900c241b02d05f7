"""PyTorch's CUDA wheel, made to run without a GPU: `python -m tests.nccl.pytorch.wheel`.

The wheel is unpacked where `DSHEALTHD_CUDA_TORCH` says, without the packages of CUDA's libraries.
One library of ours stands for all of these: the simulated runtime, what `cuda.c` adds to it, and
for every other call that PyTorch links to, or looks up in the driver, one that answers "not
supported".
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.nccl import build

FOLDER = "DSHEALTHD_CUDA_TORCH"
"""Environment variable: the folder into which the wheel is installed or unpacked."""
NCCL = "2.30.7"
HERE = Path(__file__).parent
_CUDA = re.compile(r"^lib(cu|nv)")
_DRIVER = re.compile(rb"\0(cu[A-Z][A-Za-z0-9_]{4,60})(?=\0)")
_OTHERS = re.compile(r"^(_|Py|nccl|GOMP|omp_)")


class NoWheel(Exception):
    """There is no CUDA wheel of PyTorch; the message says why."""


@dataclass(frozen=True)
class Wheel:
    """A wheel, and what it runs on."""

    folder: Path
    version: str
    """Of PyTorch, without what follows a plus sign."""
    cuda: Path
    """The folder of the library that stands for CUDA's, under all of their names."""
    nccl: Path
    """The folder of NCCL and NVML."""

    def environment(self) -> dict[str, str]:
        """Return the variables with which a Python of this version imports it."""
        return {"PYTHONPATH": str(self.folder), "LD_LIBRARY_PATH": f"{self.cuda}:{self.nccl}"}


def version() -> str:
    """Return the version of the wheel that is there. Raises NoWheel."""
    folder = Path(os.environ.get(FOLDER) or "/nowhere")
    tag = sys.implementation.cache_tag
    for needed in ("lib/libtorch_cuda.so", f"_C.{tag}-x86_64-linux-gnu.so"):
        if not (folder / "torch" / needed).is_file():
            message = f"{FOLDER} names no folder with PyTorch's CUDA wheel for {tag}: no {needed}"
            raise NoWheel(message)
    text = (folder / "torch/version.py").read_text()
    return str(re.findall(r"^__version__ = '([\d.]+)", text, re.MULTILINE)[0])


def prepare() -> Wheel:
    """Return the wheel, with libraries built if need be. Raises NoWheel, BuildFailed, NoSource."""
    found = version()
    nccl = build.build(NCCL)
    folder = Path(os.environ[FOLDER]).resolve()
    return Wheel(folder, found, _library(folder, found, nccl), nccl)


def _library(folder: Path, version: str, nccl: Path) -> Path:
    """Return the folder of the library that stands for CUDA's."""
    simulation = build.HERE / "sim/cudart.c"
    sources = [simulation, HERE / "cuda.c", Path(__file__)]
    key = hashlib.sha256(b"".join(file.read_bytes() for file in sources) + str(nccl).encode())
    out = build.TOP / "torch" / version / key.hexdigest()[:16]
    if (out / "done").is_file():
        return out
    out.mkdir(parents=True, exist_ok=True)
    headers = [f"-I{place}" for place in build.headers(13)]
    command = ["gcc", "-std=gnu11", "-O1", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden"]
    command += ["-Wno-deprecated-declarations", *headers]
    # Two calls of the simulation are PyTorch's own here, and go on to it.
    renamed = {
        "cudaEventQuery": "ncclsim_event_query",
        "cudaGetDriverEntryPointByVersion": "ncclsim_entry_point",
    }
    names = [f"-D{name}={other}" for name, other in renamed.items()]
    build.run([*command, *names, "-c", str(simulation), "-o", str(out / "cudart.o")])
    build.run([*command, "-c", str(HERE / "cuda.c"), "-o", str(out / "cuda.o")])
    libraries = sorted({*folder.glob("torch/lib/*.so"), *folder.glob("torch/_C*.so")})
    link = [*command, "-shared", "-o", str(out / "libcuda.so"), str(out / "cudart.o")]
    link += [str(out / "cuda.o"), "-lpthread", "-ldl"]
    build.run(link)
    here = set(build.symbols(out / "libcuda.so", "--defined-only"))
    for library in [*libraries, nccl / "libnccl.so.2"]:
        here |= {name.split("@")[0] for name in build.symbols(library, "--defined-only")}
    missing = _driver(folder)
    for library in [*libraries, nccl / "libnccl.so.2"]:
        for name in build.symbols(library, "--undefined-only"):
            plain, _, release = name.partition("@")
            if not release.startswith(("GLIBC", "GCC", "CXXABI", "GOMP", "OMP")):
                missing.add(plain)
    rest = out / "unsupported.c"
    rest.write_text(
        "".join(
            f'__attribute__((visibility("default"))) long {name}(void) {{ return 801; }}\n'
            for name in sorted(missing - here)
            if not _OTHERS.match(name) or name.startswith("__cuda")
        )
    )
    build.run([*link, str(rest)])
    for name in sorted(_needed(libraries) | {"libcudart.so"}):
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to("libcuda.so")
    (out / "done").touch()
    return out


def _driver(folder: Path) -> set[str]:
    """Return the calls of the driver that PyTorch looks up by name."""
    data = (folder / "torch/lib/libc10_cuda.so").read_bytes()
    return {name.decode() for name in _DRIVER.findall(data)}


def _needed(libraries: list[Path]) -> set[str]:
    """Return the names of CUDA's libraries that these are linked to."""
    lines = "".join(build.run(["readelf", "-d", str(library)]) for library in libraries)
    found = set(re.findall(r"\(NEEDED\).*\[(.+)\]", lines))
    return {name for name in found if _CUDA.match(name) and "nccl" not in name}


if __name__ == "__main__":
    print(prepare())
