"""Builds genuine NCCL host code on a simulated CUDA runtime: `python -m tests.nccl.build 2.30.7`.

NCCL's own files are compiled as they are, but for device code: a kernel is a stub that the
simulated runtime never enters. The result is under `build/nccl/VERSION/KEY/lib`; KEY is a hash of
NCCL's sources, the simulation and this file, so that a change of any of them is a build from
scratch. One that was interrupted goes on. A build takes a minute or two on one idle core.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.nccl.sources import RELEASES, NoSource, Release, unpack

HERE = Path(__file__).parent
TOP = HERE.parents[1] / "build" / "nccl"
FIRST_OF_CUDA_13 = 25
"""Minor version of the first NCCL that compiles with the headers of CUDA 13."""
NOT_BUILT = re.compile(
    r"^/device/|ras/client\.cc|param/ncclparam\.cc|windows|_stub\.cc|enhcompat\.cc|/pkg/"
    r"|/examples/|/ext-"
)
"""Device code, the command-line client, and what is of other platforms, packages and plug-ins."""
_NOT_OURS = re.compile(r"@|^(cuda|_ITM|__cudaR)")


class BuildFailed(Exception):
    """A compiler or generator failed; the message has the end of what it said."""


@dataclass(frozen=True)
class Build:
    """The folders of one release."""

    release: Release
    source: Path
    out: Path
    cuda: int
    """Major version of CUDA's headers."""
    headers: list[Path]

    @property
    def lib(self) -> Path:
        """Where the finished libraries are."""
        return self.out / "lib"

    def flags(self) -> list[str]:
        """Return what every file of NCCL is compiled with."""
        minor = int(self.release.version.split(".")[1])
        doca = sorted(self.source.glob("src/**/doca-gpunetio/include"))
        includes = [
            self.source / "src",
            self.source / "src/device",
            self.out / "include",
            self.source / "src/include",
            self.source / "src/include/plugin",
            *doca,
            *(place.parent / "src" for place in doca),
            *self.headers,
        ]
        defines = [
            f"-DCUDA_MAJOR={self.cuda}",
            "-DCUDA_MINOR=0",
            "-DNCCL_OS_LINUX",
            "-DNCCL_GIN_PROXY_ENABLE=1",
            "-DDOCA_VERBS_USE_CUDA_WRAPPER",
            "-DDOCA_VERBS_USE_NET_WRAPPER",
            "-DPROFAPI",
            "-DNDEBUG",
        ]
        # Until 2.27 NCCL uses names of types that CUDA 13 has with a version only.
        names = ["-include", str(HERE / "sim/pfn.h")] if minor < 28 else []
        general = ["-fPIC", "-fvisibility=hidden", "-std=c++17", "-w", "-O1"]
        return [*names, *general, *defines, *(f"-I{place}" for place in includes)]


def build(version: str, jobs: int = 1) -> Path:
    """Return the folder of the libraries of a release, built if need be. Raises BuildFailed,
    NoSource.
    """
    release = RELEASES[version]
    out = TOP / version / _digest(release)[:16]
    if (out / "done").is_file():
        return out / "lib"
    cuda = 13 if int(version.split(".")[1]) >= FIRST_OF_CUDA_13 else 12
    source = unpack(release, TOP / "src")
    made = Build(release, source, out, cuda, headers(cuda))
    for name in ("include", "obj", "gensrc", "lib"):
        (made.out / name).mkdir(parents=True, exist_ok=True)
    _generate(made)
    _compile(made, jobs)
    _link(made)
    (out / "done").touch()
    return made.lib


def _digest(release: Release) -> str:
    """Return what a finished build depends on, beside the machine's compiler."""
    files = [HERE / "build.py", *sorted(HERE.glob("cuda-*.txt")), *sorted((HERE / "sim").iterdir())]
    found = hashlib.sha256(release.commit.encode())
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()


def headers(cuda: int) -> list[Path]:
    """Return the folders of CUDA's headers, fetched from the package index by hash if need be."""
    place = TOP / f"cuda-{cuda}"
    if not place.is_dir():
        part = TOP / f"cuda-{cuda}.part"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--require-hashes"]
        run([*pip, "--target", str(part), "-r", str(HERE / f"cuda-{cuda}.txt")])
        part.rename(place)
    folders = sorted(place.glob("nvidia/*/include"))
    return [*folders, *(folder / "cccl" for folder in folders if (folder / "cccl").is_dir())]


def _generate(made: Build) -> None:
    """Write the files that NCCL's own makefiles generate."""
    makefile = (made.source / "makefiles/version.mk").read_text()
    parts = dict(re.findall(r"^NCCL_(MAJOR|MINOR|PATCH) *:= *(\d+)", makefile, re.MULTILINE))
    major, minor, patch = (int(parts[name]) for name in ("MAJOR", "MINOR", "PATCH"))
    header = (made.source / "src/nccl.h.in").read_text()
    for name, value in {
        "Major": str(major),
        "Minor": str(minor),
        "Patch": str(patch),
        "Suffix": "",
        "Version": f"{major}{minor:02}{patch:02}",
    }.items():
        header = header.replace(f"${{nccl:{name}}}", value)
    (made.out / "include/nccl.h").write_text(header)
    source = made.source / "src"
    if not (made.out / "gensrc/host_table.cc").is_file():
        run([sys.executable, "device/generate.py", str(made.out / "gensrc"), ""], source)
        if (source / "device/symmetric/generate.py").is_file():
            place = made.out / "gensrc/symmetric"
            place.mkdir(exist_ok=True)
            run([sys.executable, "device/symmetric/generate.py", str(place)], source)
    if (source / "misc/generate_git_version.py").is_file():
        # Ends with an error outside of a git clone, and has then written the header all the same.
        script = [sys.executable, "misc/generate_git_version.py"]
        header_file = made.out / "include/nccl_git_version.h"
        subprocess.run([*script, str(header_file)], cwd=source, capture_output=True, check=False)


def _compile(made: Build, jobs: int) -> None:
    source = made.source / "src"
    files = sorted(
        file
        for file in source.rglob("*.cc")
        if not NOT_BUILT.search(f"/{file.relative_to(source)}")
    )
    files += sorted(source.glob("transport/**/doca-gpunetio/src/*.cpp"))
    files += [made.out / "gensrc/host_table.cc", *sorted(made.out.glob("gensrc/symmetric/*.cc"))]
    flags = made.flags()

    def one(file: Path) -> None:
        root = source if file.is_relative_to(source) else made.out
        target = made.out / "obj" / (str(file.relative_to(root)).replace("/", "_") + ".o")
        if not target.is_file():
            part = target.with_suffix(".part")
            run(["g++", *flags, "-c", str(file), "-o", str(part)], source)
            part.rename(target)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for done in pool.map(one, files):
            assert done is None


def _link(made: Build) -> None:
    objects = sorted(map(str, (made.out / "obj").glob("*.o")))
    runtime, nccl = made.lib / "libcudart.so", made.lib / "libnccl.so.2"
    library = ["gcc", "-std=gnu11", "-O1", "-Wall", "-Wextra", "-fPIC", "-shared"]
    library += ["-fvisibility=hidden", "-Wno-deprecated-declarations"]
    library += [f"-I{folder}" for folder in made.headers]
    for name, file in (("libcuda.so.1", "cuda.c"), ("libnvidia-ml.so.1", "nvml.c")):
        output = ["-o", str(made.lib / name), str(HERE / "sim" / file)]
        run([*library, f"-Wl,-soname,{name}", *output])
    cudart = [*library, "-Wl,-soname,libcudart.so", "-o", str(runtime)]
    cudart += [str(HERE / "sim/cudart.c")]
    run([*cudart, "-lpthread"])
    # What is left undefined but for CUDA and the system is what device code defines.
    trial = made.out / "trial.so"
    run(["g++", "-shared", "-o", str(trial), *objects, "-Wl,--unresolved-symbols=ignore-all"])
    kernels = [name for name in symbols(trial, "--undefined-only") if not _NOT_OURS.search(name)]
    trial.unlink()
    stubs = made.out / "kernels.s"
    lines = (f".globl {name}\n.hidden {name}\n{name}: xorl %eax, %eax\n ret" for name in kernels)
    end = '.section .note.GNU-stack,"",@progbits'
    stubs.write_text("\n".join([".text", *lines, end, ""]))
    run(["gcc", "-c", "-o", str(made.out / "kernels.o"), str(stubs)])
    extra = [str(made.out / "kernels.o")]
    if "ncclKernelCommAndChannels" in (made.source / "src/include/device.h").read_text():
        extra.append(str(made.out / "progress.o"))
        run(["g++", *made.flags(), "-c", str(HERE / "sim/progress.cc"), "-o", extra[-1]])
    command = ["g++", "-shared", "-Wl,-soname,libnccl.so.2", "-o", str(nccl), *objects, *extra]
    run([*command, str(runtime), "-ldl", "-lpthread", "-lrt"])
    # Calls that NCCL links to and that no scene reaches answer "not supported".
    missing = set(symbols(nccl, "--undefined-only")) - set(symbols(runtime, "--defined-only"))
    rest = made.out / "unsupported.c"
    rest.write_text(
        "".join(
            f'__attribute__((visibility("default"))) int {name}(void) {{ return 801; }}\n'
            for name in sorted(missing)
            if name.startswith("cuda")
        )
    )
    run([*cudart, str(rest), "-lpthread"])


def symbols(library: Path, which: str) -> list[str]:
    """Return the names in a library's table of dynamic symbols, but for weak ones."""
    listed = run(["nm", "-D", which, str(library)]).splitlines()
    return sorted({line.split()[-1] for line in listed if line.split()[-2] != "w"})


def run(command: list[str], place: Path | None = None) -> str:
    """Return what a command prints. Raises BuildFailed."""
    done = subprocess.run(
        command,
        cwd=place,
        env=os.environ | {"CCACHE_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: os.nice(10),
    )
    if done.returncode:
        message = f"{' '.join(command)[:200]} … failed:\n{done.stderr[-3000:]}"
        raise BuildFailed(message)
    return done.stdout


def main() -> None:
    """Build the releases that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", default=list(RELEASES))
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    for version in arguments.versions:
        try:
            print(version, build(version, arguments.jobs), flush=True)
        except (BuildFailed, NoSource) as error:
            sys.exit(f"{version}: {error}")


if __name__ == "__main__":
    main()
