"""Which of DeepSpeed's operators are built in an environment, as its `setup.py` recorded.

This is read from `deepspeed/git_version_info_installed.py`; nothing is run. An operator that is not
built is compiled on first use.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dshealthd.jobs.installation import sites

if TYPE_CHECKING:
    from dshealthd.linux.process_files import Root

FILE = "deepspeed/git_version_info_installed.py"
_OPERATORS = re.compile(
    r"^installed_ops\s*=\s*\{((?:'\w{1,64}': (?:True|False)(?:, )?){1,256})\}\s*$", re.MULTILINE
)
_OPERATOR = re.compile(r"'(\w+)': (True|False)")
_LIMIT = 1 << 16


def parse_operators(source: str) -> dict[str, bool]:
    """Return for each operator whether it is built; ValueError if the file does not say."""
    match = _OPERATORS.search(source)
    if match is None:
        message = f"{FILE}: has no installed_ops"
        raise ValueError(message)
    return {name: built == "True" for name, built in _OPERATOR.findall(match[1])}


def operators(root: Root, prefix: str) -> dict[str, bool] | None:
    """Return for each DeepSpeed operator whether it is built; None without DeepSpeed.

    Raises OSError, ValueError.
    """
    for site in sites(root, prefix.rstrip("/")):
        try:
            return parse_operators(root.read(f"{site}/{FILE}", _LIMIT).decode(errors="replace"))
        except (FileNotFoundError, NotADirectoryError):
            continue
    return None
