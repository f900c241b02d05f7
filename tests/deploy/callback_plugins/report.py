"""A callback of Ansible that writes each result as a line of JSON to the file in $REPORT."""

from __future__ import annotations

import json
import os
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: report
type: stdout
short_description: results as lines of JSON
description: Writes node, task and result to the file that the environment names.
"""


class CallbackModule(CallbackBase):  # type: ignore[misc] # Ansible has no types here
    """Writes a line for each result."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "report"

    def _write(self, result: Any, *, failed: bool = False) -> None:
        entry = {
            "node": result._host.get_name(),
            "task": result._task.get_name(),
            "changed": bool(result._result.get("changed")),
            "failed": failed,
            "text": self._dump_results(result._result),
        }
        with open(os.environ["REPORT"], "a", encoding="utf-8") as report:
            report.write(json.dumps(entry) + "\n")

    def v2_runner_on_ok(self, result: Any) -> None:
        """Write what was done."""
        self._write(result)

    # Ansible's own
    def v2_runner_on_failed(
        self,
        result: Any,
        ignore_errors: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Write what failed."""
        self._write(result, failed=not ignore_errors)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """Write who could not be reached."""
        self._write(result, failed=True)
