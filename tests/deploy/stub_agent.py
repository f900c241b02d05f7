"""An agent's `/api/v1/status` from a file: for scenes with more nodes than real agents fit.

`stub_agent.py ADDRESS PORT FILE`. A plain file for an interpreter without site packages.
"""

from __future__ import annotations

import http.server
import sys
from pathlib import Path


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers each path with the file."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer."""
        body = Path(sys.argv[3]).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


if __name__ == "__main__":
    http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
