"""Remarks: lines that speak of a failure, whatever program wrote them.

A log has more ways to fail than anybody has patterns for. What nearly all programs share is how
they speak of it: a level, a few words, an exception, an exit code. From these a line gets a weight,
and is content, which says what happened, or a wrapper, which says that something did.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import NamedTuple

DEALT, HINTS, NOTES, SAYS, LOGS, STATES = range(6)
"""Weights: a failure that was dealt with; a warning; what NCCL warns of without words of failure,
which may be an event like any other; such words; what others log as an error without them; a
failure stated as one."""
MAX_CONTENT = 200
"""Maximum characters quoted as a cause."""
MAX_BEFORE = 200
"""Maximum characters before an exception that loggers and collectors put there."""
MAX_CHAIN = 20
"""Maximum number of reasons in a chain that are read."""
MAX_READ = 1000
"""Maximum characters of a line that are read."""

WORDS = (
    "error", "Error", "ERROR", "fail", "Fail", "FAIL", "EXCEPTION", "atal", "FATAL", "bort",
    "ABORT", "rash", "xception", "anic", "illed", "KILLED", "imed out", "imes out", "imeout",
    "annot ", "an't ", "ould not", "ouldn't", "nable to", "enied", "DENIED", "efused", "nreachable",
    "o such ", "ot found", "NOT FOUND", "nvalid", "INVALID", "llegal", "ncaught", "nhandled",
    "orrupt", " stuck", "talled", "o progress", " hung", " hang", " lost", " died", " dead",
    "xceed", "nsufficient", "ot enough", "ut of memory", "OOM", "victed", "reempted", "PREEMPT",
    "ackOff", "ack-off", "nhealthy", "ot ready", "NotReady", "erminated", "ancelled", "CANCELLED",
    "anceled", "core dump", "egfault", "egmentation", "us error", "navailable", "isconnect",
    "ismatch", "nresponsive", "ncorrectable", "ssertion", "igquit", "SIGTERM", "SIGKILL", "SIGSEGV",
    "SIGABRT", "SIGQUIT", "non-zero", "closed", "exit code", "xit Code", "eturn code",
    "exited with", "exit status", "blocked for more", "rrImagePull", "Normal ", "xpelled", "xpired",
    " fault", "t match", " reset", "imedout", "NCCL WARN",
)  # fmt: skip
"""Each remark has one of these: what the search through all lines of a log looks for."""
_LEVEL = re.compile(
    r"(?<![\w/.-])(?:[A-Z]{2,10}_)?(?:(?P<calm>TRACE|DEBUG|INFO|NOTICE)|(?P<warning>WARN|WARNING)"
    r"|(?P<error>ERROR|ERR|CRITICAL|CRIT|FATAL|SEVERE|ALERT|EMERG|PANIC))(?![\w/.-])"
    r"|(?:^|[\[\]<|:=\"'(] ?)(?:(?P<calm_2>trace|debug|info|notice|Info|Notice)"
    r"|(?P<warning_2>warn|warning|Warning)"
    r"|(?P<error_2>error|err|critical|crit|fatal|alert|emerg|panic|Error|Fatal))\s{0,8}[\]>|:\"')]"
    r"|^<(?P<error_3>[0-3])>|^<(?P<warning_3>[4])>|^<(?P<calm_3>[567])>"
    r"|(?:^|: )\[(?:(?P<error_4>[EF])|(?P<warning_4>W)|(?P<calm_4>[INDV]))\] "
)
_NCCL = "NCCL WARN "
_GLOG = {"E": "error", "F": "error", "W": "warning", "I": "calm", "D": "calm", "V": "calm"}
_FAILURES = (
    r"errors?|fail(?:ed|ures?|s|ing)?|abort(?:ed|ing|s)?|crash(?:ed|es|ing)?|exceptions?"
    r"|panic(?:ked)?|killed|timed[ -]?out|times out|time-?outs?|cannot|can't|can not"
    r"|could(?: not|n't)|unable to|denied|refused|rejected|unreachable|no such|not found|invalid"
    r"|illegal|corrupt(?:ed|ion)?|stuck|stalled|no progress|hangs?|hung|lost|dead|died"
    r"|exceed(?:ed|s)?|insufficient|not enough|out of memory|oom[- ]?kill(?:ed|er|ing)?|evicted"
    r"|preempted|preemption|back-?off"
    r"|unhealthy|not ready|terminated|\w{0,30}backoff|errimagepull|oomkilled|cancell?ed|unavailable"
    r"|disconnected|mismatch(?:ed|es)?|expelled|expired|do(?:es)?(?:n't| not) match"
    r"|(?:engine|gpu|device|controller|adapter|firmware) reset|fault(?:s|ed)?(?! toleran)"
)
"""Words of failure, which may also be spoken of as possible."""
_FAILS = re.compile(
    rf"(?<![\w/@=-])(?:{_FAILURES}|fatal|unhandled|uncaught|core dumped|segfault|bus error"
    r"|segmentation fault|unresponsive|uncorrectable|assertion|failedscheduling|notready"
    r"|connection (?:to \S{1,60} )?(?:was )?closed|sig(?:term|kill|segv|abrt|quit|bus|ill|fpe)"
    r")(?![\w=/]|\.\w|-[a-z])",
    re.IGNORECASE,
)
_UNREAL = re.compile(
    r"\b(?:0|no|zero|without|any)\s+(?:\w+ ){0,2}(?:errors?|failures?|exceptions?|time-?outs?)\b"
    r"|\b(?:errors?|fail(?:ed|ures?)|time-?outs?|exceptions?|unavailable|dead|lost|preempted"
    r"|evicted)\b['\"]?(?:\(\w{1,4}\))?\s*[:=]\s*(?:\d|\[\]|None|null|[Ff]alse|[,;|)}]|$)"
    rf"|(?<![\w.])0 (?:\w+ )?(?:{_FAILURES})\b"
    r"|out of memory\b[^.]{0,40}\b(?:ok|OK)\b|\bon (?:error|failure|time-?out)s?\b"
    r"|\b(?:if|unless|in case|may|might|would|whether|when|whenever|avoid|prevent\w*|should"
    rf"|in order to|to detect)\b[^.!]{{0,80}}\b(?:{_FAILURES})\b",
    re.IGNORECASE,
)
"""Failures counted as none, set as an option, or only spoken of as possible."""
_HANDLED = re.compile(
    r"\b(?:ignor(?:ed|ing|e)|skip(?:ped|ping)?|retry(?:ing)?|retries|try(?:ing)? again|will try"
    r"|fall(?:ing|s)?[ -]?back|recover(?:ed|ing)|correct(?:ed|able)|non-?fatal|continu(?:e|es|ing)"
    r"|instead|accepting|disabl(?:ed|ing)|by default|deprecat\w+|reconnect\w*|harmless|safely"
    r"|warning|optional|EDAC \w+: \d+ CE)\b",  # the kernel's count of corrected errors
    re.IGNORECASE,
)
_ORDERLY = re.compile(
    r"\bintended|graceful|\bas requested|by (?:an? |the )?user request"
    r"|references to [^.]{1,40} removed|\b(?:normal|clean)(?:ly)? (?:exit|shut|terminat|stop)"
    r"|scal(?:e|ed|ing)[ -]down|\bexit(?:ed)?[ _]?(?:with )?(?:code|status)?[ =:]{1,3}0\b(?![.x])",
    re.IGNORECASE,
)
"""An end that somebody meant."""
_NEGATED = re.compile(
    r"\b(?:not|fail\w*|unable|cannot|never|without|instead of)\b|n't\b|un$", re.IGNORECASE
)
_UNABLE = re.compile(
    r"(?:\b(?:cannot|not|never|(?:unable|failed) to)|n't) (?:be )?$", re.IGNORECASE
)
_SPENT = re.compile(
    r"retr(?:y|ies)\b.{0,20}(?:exceed|exhaust|fail|limit|left)"
    r"|(?:exceed|exhaust|after|max).{0,30}retr",
    re.IGNORECASE,
)
"""Retries that did not help."""
_EXCEPTION = re.compile(
    r"(?<![\w.'\"`(=/-])(?:[A-Za-z_]\w*\.){0,12}[A-Z]\w*(?:Error|Exception|Fault)\b(?=: \S|$)"
    r"|\bpanicked at |^panic: |terminate called after throwing|Exception in thread "
    r"|Fatal Python error"
    r"|[\w./-]{1,80}: line \d+: \S.{0,200}: (?:command not found|No such file|Permission denied)"
    r"|\btask \S{1,40}:\d+ blocked for more than "
)
_BY = "|".join(
    rf"{word} signal:? ?\(?(?P<signal_{number}>\d+|sig[a-z]+|killed|terminated|aborted"
    r"|segmentation fault|bus error)"
    for number, word in enumerate(("on", "by", "with", "got", "received"))
)
_ENDED = re.compile(
    r"(?:exit(?:ed|ing|s)?|terminated)(?: (?!signal)\w+){0,3}? ?(?:with )?(?:code|status|value)?s?"
    r"[ :=(]{1,12}"
    r"(?:(?P<exit>-?[1-9]\d{0,4})\b|-?0x[1-9a-f]\w*\b)"
    r"|nonzero (?:exit|return|status)|non-zero (?:exit|return|status)"
    r"|return(?:ed)?[ -]?code[ :=]{1,3}(?P<exit_2>-?[1-9]\d{0,4})"
    rf"|rc(?<!\wrc)=(?P<exit_3>-?[1-9]\d{{0,4}})|core dumped|{_BY}"
)
"""How a process ended: that is not why."""
_SHELL = re.compile(
    r"\S{1,80}[:\uff1a] ?\D{0,12}\d{1,6}\D{0,8}[:\uff1a] +"
    r"(?P<pid>\d{2,10}) (?P<how>[^\W\d].{0,22}?)(?P<padding> {2,23})(?! )"
)
"""What a shell says, in the user's language, of a child that a signal ended."""
_PADDED = 24
"""Bytes to which bash (jobs.c, LONGEST_SIGNAL_DESC) pads a signal before the command."""
_AFTER_TYPE = (
    r"\s+(?P<reason>[A-Z][A-Za-z]{3,40})\s+"
    r"(?:(?:[\dsmhd]+|<\w+>)(?: \(x\d+ over \w+\))?\s+\S+|[\w.-]+/\S+)\s+(?P<message>\S.*)"
)
_TAKEN = re.compile(r"\w*(?:Evict|Preempt|Shutdown|Interrupt)")
"""A reason that takes a pod or a node from the job, whatever its message says."""
EVENT = re.compile(rf"(?:^|\s)(?:Warning|Normal(?=\s+{_TAKEN.pattern}))" + _AFTER_TYPE)
"""A row of Kubernetes' events that warns, or that has such a reason."""
_ROW = re.compile(r"(?:^|\s)(?:Warning|Normal)" + _AFTER_TYPE)
WENT_ON = re.compile(r"(?:^|\s)Normal\s+(?:Scheduled|Pulled|Created|Started)\s")
"""A row that shows that a pod got on."""
_STACK = re.compile(
    r"\s*(?:Exception raised from |frame #|#\d+ |File \"|raise\b|return\b|await\b|with\b|assert\b"
    r"|@|\^+|~+|[\w.]+ = |[\w.]+\((?:.*\))?$)"
)
"""Stacks, and the code in them."""
_KERNEL = re.compile(r"\bkernel: |\bkern +:|: kern: ")
_PROCESSES = (
    r"(?:child(?:ren)?|workers?|engines?|subprocess|process(?:es)?|ranks?|tasks?|actors?|jobs?|step"
    r"|pods?|containers?|scheduler|server|launcher|group)"
)
_OF_PEERS = (
    r"\bpeers?\b|\bremote\b|\breceiver\b|heartbeat|broken pipe|\bbarrier\b|rendezvous"
    r"|(?:connection|socket) (?:to \S{1,60} )?(?:was )?(?:reset|closed|aborted)"
    r"|\bNCCL work\b|WorkNCCL|collectives?\b|watchdog thread|ProcessGroup|\[PG |TCPStore"
)
"""What a process notices of another."""
_WRAPS = re.compile(
    # Where else to look.
    r"\bsee (?:the )?(?:\w+ ){0,2}(?:above|below|logs?|stack|trace|root cause)|root cause"
    r"|\bstack trace\b"
    r"|of the following|(?:reported|described|shown|printed) (?:as )?above"
    r"|for more (?:details|information)"
    # Who failed.
    rf"|\b{_PROCESSES}\b[^.:]{{0,40}}\b(?:failed|fails|failures?|died|dead|exited|terminated|killed"
    r"|crashed|aborted|cancell?ed|stopped|lost|unhealthy|evicted)\b"
    rf"|\b(?:failed|failure|error|died|exit\w*|killed|terminated|back-off)\b[^.:]{{0,30}}"
    rf"\b{_PROCESSES}\b|^(?:task|step|job|process|rank)s? \S{{1,60}}: |^\*\*\* (?:STEP|JOB) "
    r"|^\S{1,200} FAILED$"
    # What was done about it.
    r"|(?<!node )shut(?:ting)? ?down|terminating|exiting|killing|abort(?:ing|ed by)|stopping"
    r"|tearing down|cancel|ended|gave up|sig(?:term|quit|kill|int|abrt)"
    # That something failed, or had one, but not what.
    r"|^(?:timed out|times out|died|lost|killed|terminated|exceeded|refused|denied|aborted)\b"
    r"|(?:error|exception) (?:has )?"
    r"(?:occurred|was raised|in (?:the )?\w+ ?(?:thread|process|loop))"
    r"|\b(?:internal|unknown|unexpected|inner) (?:error|failure)\b|unexpectedly|terminate called"
    # That the attempts are used up.
    r"|(?:reach|exceed)(?:ed|es|ing)? [^.:]{0,40}\brestarts\b|\w*back-?off\b"
    rf"|{_OF_PEERS}",
    re.IGNORECASE,
)
"""What speaks of another process, or of a failure as such."""
_COLON = re.compile(r": (?=[A-Za-z])")
_WHY = re.compile(
    r"(?<!potentially )(?<!possibly )(?<!probably )\b(?:due to|because(?: of)?|caused by|owing to"
    r"|in response to)\b[ :]{1,3}(?P<why>[^\n]{3,300}?)(?: \*\*\*)?$",
    re.IGNORECASE,
)
"""Why something ended, behind that it did."""
_LETTERS = re.compile(r"[A-Za-z]{3,}")
FIELD = re.compile(r"[A-Z][\w -]{0,60}: {2,}\S")
"""A field and its value, as `kubectl describe` pads them: settings and states, no content."""
_GENERIC = frozenset(
    """error errors fail failed fails failure failing exception exceptions fatal abort aborted
    crash crashed unknown internal unexpected unhandled uncaught raised occurred happened
    encountered code codes status return returned returns exit exited non result success ok
    function call called api command process child task job run running worker rank operation
    client server service gateway bad request url runtime value type system base assertion the and
    for with from that this has have had was were are been but while when during into its your
    please see not did does terminated killed died signal unexpectedly
    unavailable""".split()  # noqa: SIM905
)
"""Words that say that something failed, of whatever kind, and those that say nothing."""
_CONTENT = 2
"""Words that say why: "permission denied" and "no space left" have as many, a code has none."""
_WORD = re.compile(r"(?<![\w./:=-])[A-Za-z][a-z]{2,}(?![\w/=(]|[.:]\w)")
"""A word of prose: no name, symbol, path, number, setting or acronym."""
_ELSEWHERE = re.compile(r"\bfor more (?:details|information)\b.*", re.IGNORECASE)
"""Where to read on."""
_CODE = re.compile(
    r"(?i:err(?:or)?|status|ret(?:urned|code)?|result|\brc)(?i: ?code)?\b"
    r"(?:: |[ =:(]|\bis\b){1,3}-?(?:0x)?\d"
    r"|\b[A-Z][A-Z\d]*(?:_[A-Z\d]+){2,}\b"
)
"""What a call returned."""
_NATIVE = re.compile(r"[\w./-]{1,200}\.(?:cc?|cpp|cxx|cu|h|hpp|rs|go)(?:::?|\()\d+")
"""A place in the source of a library that is not Python's."""
_SOURCE = re.compile("^" + _NATIVE.pattern + r"\)?(?:\([\w:~<>]{1,80}\))?:? ")
_LOGGER = re.compile(
    r"^(?:[^\w(<\[{'\"]{0,3}(?:\[[^\]]{0,60}\]|\([^()]{0,80}\)|<\d>|[\d:.,/TZ+-]{4,35}"
    r"|(?:kern|user|daemon)\s*:|[A-Z][a-z]{2} +\d{1,2}|[\w./-]{1,60}:\d+\]?"
    r"|[\w.-]{1,60}:(?= )(?! *[A-Z][a-z]+(?: [a-z/]+){1,6}$)"
    r"|(?:TRACE|DEBUG|INFO|NOTICE|WARN(?:ING)?|ERR(?:OR)?|CRIT(?:ICAL)?|FATAL|error|fatal)\b"
    r"|\w{1,20}\([\w,. -]{0,60}\):)[\s:|>-]{0,4}){1,8}"
)
"""What loggers and collectors put before a message: no part of what is quoted."""


_EMBEDDED = re.compile(
    r"(?:^|(?<=[\s:|>\]\"'=-]))(?:[A-Za-z_]\w*\.){0,12}[A-Z]\w*"
    r"(?:Error|Exception|Interrupt)(?::(?: |$)|$)"
)
_PROSE = re.compile(
    r"caught|catch|ignor|retry|skip|handl|suppress|swallow|warn|except|raise|unless|\bif\b|when|try"
    r"|(?<!=)[({'\"`]$|\w:\s{2,}$",
    re.IGNORECASE,
)


def embedded(text: str) -> int | None:
    """Return where an exception begins in a line, if nothing before it is a sentence about it."""
    if "Error" not in text and "Exception" not in text and "Interrupt" not in text:
        return None
    match = _EMBEDDED.search(text)
    if match is None or match.start() > MAX_BEFORE or _PROSE.search(text[: match.start()]):
        return None
    return match.start()


class Remark(NamedTuple):
    """What a line says of a failure."""

    weight: int
    content: str
    """What happened, without what stands before it."""
    wraps: bool
    """Whether it only says that something failed, not what."""


def level_of(text: str, level: str = "") -> str:
    """Return `error`, `warning` or `calm`, as the line says; empty if it has no level.

    `level` is glog's letter, if a prefix had one.
    """
    if _NCCL in text:  # NCCL says so of what ends it
        return "error"
    if level in _GLOG:
        return _GLOG[level]
    match = _LEVEL.search(text[:200])
    return "" if match is None else str(match.lastgroup).partition("_")[0]


def may_be(template: str) -> bool:
    """Return whether a line may be a remark; `template` is the line without its digits."""
    text = template[:MAX_READ]
    return (
        _EXCEPTION.search(text) is not None
        or _NCCL in text
        or (_fails(text) and level_of(text) != "calm")
        or WENT_ON.search(text) is not None
        or EVENT.search(text) is not None
    )


def is_orderly(text: str) -> bool:
    """Return whether a line says that a process ended as it was meant to."""
    match = _ORDERLY.search(text)
    return match is not None and _NEGATED.search(text[: match.start()]) is None


def is_hollow(text: str) -> bool:
    """Return whether a message only says that something failed, in names, codes and symbols."""
    words = _WORD.findall(_ELSEWHERE.sub("", text))
    told = sum(word.lower() not in _GENERIC for word in words)
    return told < _CONTENT and text.isascii() and "assert " not in text


def is_code(text: str) -> bool:
    """Return whether a message passes on what a call returned, whatever it says besides."""
    return _CODE.search(text) is not None


def is_native(quote: str) -> bool:
    """Return whether a line is an error of a library that is not Python's."""
    return level_of(quote) == "error" or names_source(quote)


def names_source(text: str) -> bool:
    """Return whether a text names a place in the source of a library that is not Python's."""
    return _NATIVE.search(text) is not None


def is_of_peers(text: str) -> bool:
    """Return whether a message speaks of what a process notices of another."""
    return re.search(_OF_PEERS, text, re.IGNORECASE) is not None


def is_of_others(text: str) -> bool:
    """Return whether a message speaks of another process, or only of a failure as such."""
    return _WRAPS.search(text) is not None


def _fails(text: str) -> bool:
    return _FAILS.search(text) is not None and _FAILS.search(_UNREAL.sub(" ", text)) is not None


def _is_handled(text: str) -> bool:
    """Return whether a text says that a failure was dealt with, not that it could not be."""
    match = _HANDLED.search(text)
    if match is None or _SPENT.search(text):
        return False
    return _UNABLE.search(text[: match.start()]) is None


def is_kernel(quote: str) -> bool:
    """Return whether a line of a file names the kernel as its writer; `dmesg` does not."""
    return _KERNEL.search(quote[:200]) is not None


def is_of_shell(text: str) -> bool:
    """Return whether a line is a shell's report of a child that a signal ended."""
    match = _SHELL.match(text) if "  " in text else None
    return match is not None and len(match["how"].encode()) + len(match["padding"]) == _PADDED


def is_row(quote: str) -> bool:
    """Return whether a line is a row of Kubernetes' events, which are printed after the job."""
    return _ROW.search(quote) is not None


def ended(text: str) -> re.Match[str] | None:
    """Return the match of how a line says that a process ended; None if it does not.

    The text is lowered, as an expression that ignores case takes ten times as long.
    """
    return _ENDED.search(text.lower())


def end_of(text: str) -> dict[str, str]:
    """Return how a line says that a process ended, as fields."""
    match = _SHELL.match(text) if is_of_shell(text) else ended(text)
    fields = match.groupdict() if match else {}
    return {
        name.partition("_")[0]: value for name, value in fields.items() if value and value.strip()
    }


def read(text: str, level: str, *, of_kernel: bool = False) -> Remark | None:
    """Return what a line says of a failure; None if nothing.

    `text` is the line without the prefixes that are known, `level` one of `level_of`. Beneath the
    kernel is nothing that could say more, so it wraps nothing.
    """
    if is_of_shell(text):
        return Remark(STATES, " ".join(text.split())[:MAX_CONTENT], wraps=True)
    of_nccl = _NCCL in text[:MAX_READ]
    text = text[:MAX_READ].partition(_NCCL)[2] or text[:MAX_READ]
    text = text.partition(" [repeated ")[0]  # Ray's count of equal lines
    text = _SOURCE.sub("", _LOGGER.sub("", text.strip(), count=1).strip(), count=1)
    if _STACK.match(text) or is_orderly(text):
        return None
    exception = _EXCEPTION.search(text)
    event = EVENT.search(text)
    end = ended(text)
    is_plain = exception is None and end is None and event is None
    fails = _fails(text)
    if is_plain and ((not fails and level != "error") or level == "calm"):
        return None
    weight = STATES
    if is_plain:
        weight = SAYS if level != "error" else STATES if fails else NOTES if of_nccl else LOGS
    if not event and _is_handled(text):
        weight = DEALT if is_plain or level in {"warning", "calm"} else weight - 1
    elif level in {"warning", "calm"} and event is None:
        weight = HINTS
    if event is not None:
        text = f"{event['reason']}: {event['message']}"
    elif exception is not None:
        text = text[exception.start() :]
    wraps = (
        is_hollow(text)
        or text.endswith(":")
        or (event is None and ended(text) is not None)
        or is_of_peers(text)
        or (_WRAPS.search(text) or FIELD.match(text)) is not None
    )
    wraps = wraps and not (of_kernel or (event and _TAKEN.match(event["reason"])))
    if wraps and exception is None and (reason := _reason(text) or _why(text)):
        return Remark(weight, " ".join(reason.split())[:MAX_CONTENT], wraps=False)
    return Remark(weight, " ".join(text.split())[:MAX_CONTENT], wraps)


def _reason(text: str) -> str:
    """Return the innermost reason of a failure in a chain of them; empty if it has none.

    Go's programs put a reason behind what failed of it, parted by a colon.
    """
    found = ""
    for colon in islice(_COLON.finditer(text), MAX_CHAIN):
        rest = text[colon.end() :]
        says_why = _fails(rest) or rest.startswith(("no ", "not ", "missing "))
        if says_why and _fails(text[: colon.start()]) and not _says_nothing(rest):
            found = rest
    return "" if FIELD.match(text) else found


def _why(text: str) -> str:
    """Return a text that says why something ended, not only that it did; else an empty one."""
    match = _WHY.search(text)
    if match is None or ended(match["why"]) or _WRAPS.search(match["why"]):
        return ""
    is_told = any(word.lower() not in _GENERIC for word in _LETTERS.findall(match["why"]))
    return text if is_told else ""


def _says_nothing(text: str) -> bool:
    return is_hollow(text) or ended(text) is not None or _WRAPS.search(text) is not None
