"""Makes `/usr/lib/dshealthd/training`: the package for trainings, and a site's switches for it."""

from __future__ import annotations

import io
import shutil
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "dshealthd/training"
ARCHIVE = "dshealthd_site-3-py3-none-any.whl"
"""On PYTHONPATH torch finds it, as `importlib.metadata` reads archives. pip skips archives that are
named as wheels (`_looks_like_wheel`), so that `pip list` and `pip freeze` are as they were.

Its number changes with its bytes: Python keeps the offsets of an archive's files, and a process
that imports torch after the archive was replaced would read others there.
"""
HEADERS = (b"PK\3\4\x14\0", b"PK\1\2\x14\3\x14\0")
"""What stands before the flags of an entry, one of which says that its name is UTF-8: for any other
name, `zipfile` imports a table of DOS's letters, which a program may not have.
"""
SCRIPTS = ("task-prolog", "enroot-hook.sh")


def make(directory: Path) -> None:
    """Make the directory, which may not exist; the same sources give the same bytes."""
    ignored = shutil.ignore_patterns("__pycache__", "__main__.py", "watch.py", "py.typed")
    shutil.copytree(PACKAGE, directory / "dshealthd/training", ignore=ignored)
    for source in (HERE / "site").iterdir():
        if source.suffix != ".py" and source.is_file():
            target = shutil.copyfile(source, directory / source.name)
            target.chmod(0o755 if source.name in SCRIPTS else 0o644)
    distribution, version, _ = ARCHIVE.split("-", 2)
    files = {
        "dshealthd_site.py": (HERE / "site/dshealthd_site.py").read_text(encoding="utf-8"),
        "METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n",
        "entry_points.txt": "[torch.backends]\ndshealthd = dshealthd_site:load\n",
    }
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in files.items():
            place = "" if name.endswith(".py") else f"{distribution}-{version}.dist-info/"
            # stored, with the time that an entry has by default: as any Python packs it
            archive.writestr(zipfile.ZipInfo(place + name), text)
    data = packed.getvalue()
    for header in HEADERS:
        data = data.replace(header + b"\0\0", header + b"\0\x08")
    (directory / ARCHIVE).write_bytes(data)
