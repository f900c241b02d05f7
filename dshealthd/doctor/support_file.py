"""The support file for a bug report: versions, findings and configuration, without secrets."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

from dshealthd.config.config import SECTIONS
from dshealthd.core.options import Section, encode

if TYPE_CHECKING:
    from dshealthd.config.config import Config
    from dshealthd.doctor.report import Report

REMOVED = "(removed)"
_SECRET_NAME = re.compile(
    r"passw|secret|token|credential|api_?key|private|environment", re.IGNORECASE
)
"""Names of options whose values are removed; paths of key files are not secret."""
_IN_TEXT = (
    (re.compile(r"(?<=://)[^/@\s:]+:[^/@\s]+(?=@)"), REMOVED),
    (
        re.compile(
            r"(?i)\b([\w-]*(?:password|passwd|secret|token|api[_-]?key|authorization)[\w-]*)"
            r"(\s*[=:]\s*)(?:(?:bearer|basic)\s+)?[^\s,;\"']+"
        ),
        rf"\1\2{REMOVED}",
    ),
    (re.compile(r"\b(?:hf_|ghp_|gho_|glpat-|sk-|xox[abp]-|AKIA)[A-Za-z0-9_-]{8,}"), REMOVED),
    (
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL
        ),
        REMOVED,
    ),
)
"""Text that looks like a secret: credentials in a URL, assignments, well-known tokens."""


def without_secrets(value: Any, name: str = "") -> Any:
    """Return the support file's content without what is or may be a secret."""
    if isinstance(value, dict):
        return {key: without_secrets(item, str(key)) for key, item in value.items()}
    if _SECRET_NAME.search(name) and not name.endswith("_file") and value:
        return REMOVED
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    if not isinstance(value, str):
        return value
    for pattern, replacement in _IN_TEXT:
        value = pattern.sub(replacement, value)
    return value


def write(path: str, report: Report, loaded: Config) -> None:
    """Write a new support file that only its owner can read. FileExistsError; OSError."""
    document = {
        "versions": _versions(),
        "doctor": report.document(),
        "configuration": {
            name: encode(
                loaded.section(schema) if issubclass(schema, Section) else getattr(loaded, name)
            )
            for name, schema in SECTIONS.items()
        }
        | {"collectors": {name: encode(one) for name, one in loaded.collectors.items()}},
    }
    body = json.dumps(without_secrets(document), indent=1, default=str) + "\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(body)


def _versions() -> dict[str, str]:
    return {
        "dshealthd": metadata.version("dshealthd"),
        "python": sys.version.partition(" ")[0],
        "kernel": platform.release(),
        "architecture": platform.machine(),
    }
