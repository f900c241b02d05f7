"""Finds a 1 followed by a plural in the texts that users read."""

from __future__ import annotations

import re

_NOT_COUNTED = "of|in|on|over|a|to|at|with|is|has|was|does|says|runs|reports|hangs|hung|its|s"
_WORD = rf"(?!(?:{_NOT_COUNTED})\b)[\w'-]+"
_LAST = rf"(?!rendezvous\b){_WORD}(?<=[^\Ws]s)(?!\S*\w)"
ONE_OF_MANY = re.compile(rf"(?<![\w.:])1 (?:{_WORD} ){{0,4}}?{_LAST}")
"""A 1 and a plural, with up to four words between; "process" ends in two of them."""
