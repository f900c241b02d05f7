"""Recognition of events in files: lines by stream, each traceback as one exception."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from dshealthd.explain import input as logs
from dshealthd.explain import names, remarks
from dshealthd.explain import patterns as known
from dshealthd.explain.events import MAX_QUOTE, Event, Origin, Place, Stamp
from dshealthd.explain.facts import MAX_STREAMS, Bounded, Recognized, SourceFacts
from dshealthd.explain.kinds import Kind, Kinds
from dshealthd.explain.names import NAMES_RANKS, Details, process, spoken_rank
from dshealthd.explain.prefilter import Need, bare
from dshealthd.explain.reading import PATTERN as STATED
from dshealthd.explain.reading import STEP
from dshealthd.explain.streams import Line, Splitter
from dshealthd.explain.templates import MAX_MATCHED, Templates
from dshealthd.explain.tracebacks import Assembler, LauncherSummary, Traceback, as_exception

if TYPE_CHECKING:
    from dshealthd.explain.patterns import Pattern

MAX_EVENTS = 20_000
"""Maximum number of events kept from all logs.

One is kept for each pattern and stream, so this suffices for 10,000 ranks.
"""
MAX_TEXT = 1 << 13
"""Maximum characters of a line that are used: prefixes and the longest message that is kept."""
MAX_SAMPLE = 200
"""Number of lines that show which prefix a log's lines have."""

MAX_PARTS = 1000
"""Maximum number of logs in one file."""
_HEAD = re.compile(r"==> (\S.{0,250}) <==")
"""What `tail` and `head` print before each of several files."""
_BLANK = ("", " ", "\t")
_GRADIENTS = re.compile(
    r"^.*:(?:backward|_engine_run_backward|finalize_backward|allreduce_\w+|average_tensor"
    r"|reduce_\w*grad\w*|all_reduce_grad\w*|finish_grad_sync|__?reduce\w*|buffered_allreduce\w*"
    r"|reduce_ready_partitions\w*)$",
    re.MULTILINE,
)
"""A frame in which gradients are reduced."""

_PYTHON = known.Pattern(
    slug="child-failed", name="python", expression=".", need=Need(), source="CPython",
    names={name: name for name in ("exception", "message", "exit", "signal")}, layer="program",
    weak=True,
    title="{exception} in the program", says=("{exception}: {message}", "{exception}"),
    where="exception", match=(), no_match=(),
)  # fmt: skip
_PYTHON_EXIT = replace(_PYTHON, name="exit", role="consequence", layer="launcher")
_PYTHON_END = replace(_PYTHON, name="ended", role="consequence", layer="launcher")
"""A process that another one says has ended."""
_PYTHON_BARE = replace(_PYTHON, step=STEP)


class Recognizer:
    """Recognizer that reads logs one after another."""

    def __init__(self, *, max_events: int = MAX_EVENTS) -> None:
        self.found = Recognized()
        self._max_events = max_events
        self.find: logs.Finder = Templates()
        self.kinds = Kinds()
        self._kept: dict[tuple[str, str, Origin], Event] = {}

    def add(
        self,
        name: str,
        items: Iterable[logs.Raw | logs.Skipped] | None = None,
        rank: int | None = None,
    ) -> None:
        """Recognize the events in one log; InputError if it cannot be read.

        `rank` is the only rank that writes it, if known.
        """
        readers: dict[str, Reader] = {}
        part = name
        if items is None:
            items = logs.read(name, self.find, self.found.statistics)
        for item in items:
            text = item.text if isinstance(item, logs.Raw) else ""
            if text.startswith("==> ") and (head := _HEAD.fullmatch(text)):
                part = head[1] if len(readers) < MAX_PARTS else part
                continue
            if part not in readers:
                readers[part] = self.open(part, rank, name)
            deque(readers[part].take(item), maxlen=0)
        for reader in readers.values() or [self.open(name, rank)]:
            deque(reader.pause(), maxlen=0)
        self.found.sources[-1].is_cut = name in self.found.statistics.unfinished

    def open(self, name: str, rank: int | None = None, file: str | None = None) -> Reader:
        """Begin a log that arrives in lines; `rank` is the only rank that writes it, if known.

        `file` is where its lines are, if it is part of a file.
        """
        self.found.sources.append(SourceFacts(name))
        number = len(self.found.sources) - 1
        return Reader(self, number, self.found.sources[-1], rank, file or name)

    def again(
        self,
        key: tuple[str, str, Origin],
        fields: Mapping[str, str],
        place: Place,
        order: int,
        facts: SourceFacts,
        *,
        is_warning: bool,
    ) -> Event | None:
        """Count an event that its stream has had before; None if it is new."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        # Of hints that any line may give, and of states, the first one is enough.
        is_hint = kept.weak and kept.role == "consequence"
        is_hint |= kept.slug == "nccl-timeout" and kept.role == "confirmation"
        if kept.fields != fields and not is_hint:
            return None
        kept.count += 1
        kept.last, kept.last_order = place, order
        kept.progress, kept.calm, kept.is_warning = facts.progress, facts.calm, is_warning
        return kept

    def keep(self, event: Event) -> None:
        """Keep an event that its stream has not had before."""
        if len(self.found.events) >= self._max_events:
            self.found.dropped += 1
            return
        self._kept[event.pattern, event.role, event.origin] = event
        self.found.events.append(event)

    def subordinate(self, event: Event) -> None:
        """Turn a cause into a consequence; the next event of its pattern is one of its own."""
        self._kept.pop((event.pattern, event.role, event.origin), None)
        event.role = "consequence"


class Reader:
    """Reader of one log.

    Its work comes in steps that are each done in milliseconds, whatever is in the log, so that a
    caller can stop after any of them and continue later.
    """

    def __init__(
        self, parent: Recognizer, source: int, facts: SourceFacts, rank: int | None, file: str
    ) -> None:
        self._parent = parent
        self._file = file
        self._found = parent.found
        self._facts = facts
        self._source = source
        self._splitter = Splitter(source, facts.name, rank)
        self._details = Details()
        if self._splitter.base.rank is not None:
            self._found.see(self._splitter.base.rank)
        self._assembler = Assembler(self._date)
        self._sample: list[logs.Raw] | None = []
        self._held: tuple[Line, str, Place] | None = None
        """A line that the next one may continue, its last part, and its place in the file."""
        self._summary = LauncherSummary(self._found, source)
        self._last: dict[Origin, Event] = Bounded(MAX_STREAMS)
        self._in_stack = self._begins_in_stack = self._of_kernel = False
        self._order = self._opened = 0

    def take(self, item: logs.Raw | logs.Skipped) -> Iterator[None]:
        """Recognize a line, or count lines that were skipped; yield after each step."""
        if isinstance(item, logs.Skipped):
            yield from self._flush_sample()
            self._flush()
            self._facts.calm += item.lines
            if item.is_progress:
                self._facts.progress += item.lines
            if not self._facts.is_troubled:
                self._facts.lines_before += item.lines
                self._facts.progress_before |= item.is_progress
            self._order += 1
            self._head(names.Heading())  # another may be among these lines
            if item.has_loss:
                self._facts.finite = self._order
            return
        if self._sample is not None:
            self._sample.append(item)
            if len(self._sample) >= MAX_SAMPLE:
                yield from self._flush_sample()
            return
        yield from self._line(item)

    def pause(self) -> Iterator[None]:
        """Recognize what is at the end so far, although more may follow; yield after each step."""
        yield from self._flush_sample()
        self._flush()
        yield from self._finish_tracebacks()
        facts = self._facts
        is_last = self._opened > max(facts.finished, facts.alive)
        facts.unfinished = self._assembler.unfinished if is_last else None
        if self._begins_in_stack or self._in_stack:  # an empty line follows each stack of c10
            self._found.ledger.cut.add(self._source)
        else:
            self._found.ledger.cut.discard(self._source)

    def _flush_sample(self) -> Iterator[None]:
        if self._sample is not None:
            sample, self._sample = self._sample, None
            told = self._splitter
            told.mark(raw.text for raw in sample)
            texts = (text for raw in sample for text in logs.lines(told.unmarked(raw.text)))
            told.learn(islice(texts, MAX_SAMPLE))
            if told.column is not None:
                self._head(names.Heading(frozenset({told.column}), is_name=True))
            yield
            for raw in sample:
                yield from self._line(raw)

    def _finish_tracebacks(self) -> Iterator[None]:
        for traceback in self._assembler.finish():
            self._exception(traceback)
            yield

    def _line(self, raw: logs.Raw) -> Iterator[None]:
        told = self._splitter.unmarked(raw.text)
        place = Place(self._file, raw.number, told.strip()[:MAX_QUOTE])
        for text in logs.lines(told):
            self._text(text[:MAX_TEXT], place)
            yield

    def _text(self, told: str, place: Place) -> None:
        """Recognize one line of text, once it is known where it ends."""
        line = self._splitter.split(told)
        if self._held is not None:
            held, end, began = self._held
            whole = self._splitter.continues(held, end, line)
            if whole is not None and len(whole) < MAX_MATCHED:
                self._held = held._replace(text=whole, shape=None), told, began
                return
            self._flush()
        if self._splitter.may_continue(line, told):
            self._held = line, told, place
        else:
            self._whole(line, place)

    def _flush(self) -> None:
        if self._held is not None:
            (line, _, place), self._held = self._held, None
            self._whole(line, place)

    def _whole(self, line: Line, place: Place) -> None:
        kind = self._kind(line, place)
        if kind.is_exception:
            line = as_exception(line)
            kind = self._kind(line, place)
        tells = self._recognize(line, kind, place)
        facts = self._facts
        if facts.is_troubled:
            return
        if tells or line.level in {"E", "F"}:
            facts.is_troubled = True
        elif line.text[:1] not in _BLANK:  # otherwise it is the rest of a stack or of a summary
            facts.lines_before += 1

    def _kind(self, line: Line, place: Place) -> Kind:
        """Return the kind of a line, once for all of its shape."""
        shape = line.shape
        kind: Kind | None = None if shape is None else shape.kind
        if kind is not None:
            return kind
        kind = self._parent.kinds.of(line, place.quote)
        # A number of syslog's tells the level of a line.
        if shape is not None and not place.quote.startswith("<"):
            shape.kind = kind
        return kind

    def _recognize(self, line: Line, kind: Kind, place: Place) -> bool:
        """Process a line; return whether it reports a failure or its end."""
        text, facts = line.text, self._facts
        self._of_kernel = kind.of_kernel
        self._in_stack = kind.is_stack
        if self._in_stack and not self._order:
            self._begins_in_stack = True
        self._order += 1
        self._details.feed(text, is_detail=kind.is_detail)
        described = self._details.described
        if kind.is_detail and {"pod", "host"} <= described.keys():
            self._found.nodes.setdefault(described["pod"], described["host"])
        if kind.heads and (heading := names.heading(text)):
            self._head(heading)
        self._found.learn(line, ranks=kind.ranks, pairs=kind.pairs, launches=kind.launches)
        if (kind.begins or self._summary.is_open) and self._summary.take(line, place):
            return True
        consumed = False
        if kind.begins or self._assembler.expects(line.origin):
            consumed, done = self._assembler.feed(line, place)
            for traceback in done:
                self._exception(traceback)
        if kind.opens:
            self._opened = self._order
        if consumed:
            return True
        text = text[:MAX_MATCHED]
        self._progress(line, text, kind)
        if kind.embeds and facts.is_plain and _is_of_service(line):
            return False
        if kind.embeds:
            for traceback in self._assembler.feed_bare(self._embedded(line, text), place):
                self._exception(traceback)
            return True
        found = None
        if kind.near_named:
            found = _match(kind.near_named, line.named[:MAX_MATCHED], line.level)
        if found is None and kind.near:
            found = _match(kind.near, text, line.level)
        # What ended as it was meant to is no failure, whatever noticed it.
        if found is not None and found[0].layer == "launcher" and remarks.is_orderly(text):
            return False
        if found is not None:
            pattern, match = found
            is_warning = kind.level in {"calm", "warning"}
            self._keep(pattern, match.groupdict(), line, place, is_warning=is_warning)
            if not _is_retry(pattern, line.level):
                return pattern.slug == "nccl-timeout"
        if facts.statements.again(kind.template, place, self._order, facts.calm, line.origin):
            return False
        if kind.is_remark:
            self._state(line, text, kind, place)
        else:
            facts.calm += kind.level == "calm"
        return False

    def _head(self, heading: names.Heading) -> None:
        """Begin a part of another host or process, or one of nobody known."""
        headings = self._facts.headings
        if not headings or headings[-1][1] != heading:
            headings.append((self._order, heading))

    def _embedded(self, line: Line, text: str) -> Line:
        """Return the exception in a line as one of its own."""
        for whole in (text, line.named):
            if (place := remarks.embedded(whole)) is not None:
                origin = self._splitter.follow(whole[:place], line.origin)
                return line._replace(text=whole[place:], origin=origin, shape=None)
        return line

    def _progress(self, line: Line, text: str, kind: Kind) -> None:
        """Learn how a line shows the job at work."""
        facts = self._facts
        if kind.ends:
            facts.finished, facts.finished_at = self._order, self._stamp(line)
            facts.finished_progress = facts.progress + kind.advances
        elif kind.works:
            facts.alive = self._order
        if not kind.advances:
            return
        facts.progress += 1
        facts.is_plain = not line.named
        facts.alive = self._order
        facts.progress_before |= not facts.is_troubled
        if kind.step is not None:
            facts.last_step = int(text[kind.step])
        if kind.is_finite:
            facts.finite = self._order

    def _state(self, line: Line, text: str, kind: Kind, place: Place) -> None:
        """Keep what a line says of a failure, or count it as healthy."""
        facts = self._facts
        is_beneath = (
            kind.of_kernel
            or (facts.is_plain and _is_of_service(line))
            or (bool(facts.headings) and facts.headings[-1][1].is_foreign)
        )
        remark = remarks.read(text, kind.level, of_kernel=kind.of_kernel)
        if remark is None:
            facts.calm += kind.level == "calm"
            facts.statements.settle(text, self._order)
            return
        ended = remarks.end_of(text) if remark.wraps else {}
        event = Event(
            slug="child-failed", pattern=STATED, role="cause",
            layer="hardware" if is_beneath else "program", title=remark.content,
            says=remark.content, steps=STEP, place=place, origin=line.origin,
            order=self._order, stamp=self._stamp(line), exact=line.stamp is not None, weak=True,
            fields={**self._details.fields, **spoken_rank(text), **ended},
            progress=facts.progress, calm=facts.calm, of_kernel=kind.of_kernel,
        )  # fmt: skip
        facts.statements.add(kind.template, remark, event)

    def _stamp(self, line: Line) -> Stamp | None:
        """Return the stamp of a line, or else the last one before it, whoever wrote that: the
        last of its own process may be hours old.
        """
        return line.stamp or self._facts.final

    def _date(self, traceback: Traceback) -> None:
        """Give an exception its place among the lines, as its end may show only much later."""
        traceback.order, traceback.progress = self._order, self._facts.progress
        traceback.stamp, traceback.of_kernel = self._stamp(traceback.line), self._of_kernel

    def _keep(
        self, pattern: Pattern, fields: dict[str, str | None], line: Line, place: Place,
        traceback: Traceback | None = None, *, is_warning: bool = False,
    ) -> Event:  # fmt: skip
        known_fields = {pattern.names[name]: value for name, value in fields.items() if value}
        role = "confirmation" if _is_retry(pattern, line.level) else pattern.role
        # Watchdogs give the rank in their group; the ledger reads it.
        is_watchdog = pattern.slug == "nccl-timeout"
        if is_watchdog:
            self._found.ledger.add_line(pattern.id, known_fields, line.origin, place, line.text)
        elif (
            pattern.role in {"cause", "consequence"}
            and not line.origin.labeled
            and not known_fields.keys() & NAMES_RANKS
        ):
            head = "" if traceback is None else traceback.head
            known_fields = {
                **self._details.fields,
                **process(line.text),
                **known_fields,
                **(spoken_rank(line.text) or spoken_rank(head)),
            }
        order = self._order if traceback is None else traceback.order
        key = pattern.id, role, line.origin
        kept = self._parent.again(
            key, known_fields, place, order, self._facts, is_warning=is_warning
        )
        if kept is not None:
            return kept
        event = Event(
            slug=pattern.slug,
            pattern=pattern.id,
            role=role,
            layer=pattern.layer,
            says=known.said(pattern.says, known_fields),
            texts=pattern.says,
            steps=pattern.step,
            title=known.said((pattern.title,), known_fields),
            place=place,
            origin=line.origin,
            order=order,
            stamp=self._stamp(line),
            exact=line.stamp is not None,
            weak=pattern.weak,
            first=pattern.first,
            fields=known_fields,
            progress=self._facts.progress,
            calm=self._facts.calm,
            is_warning=is_warning,
            of_kernel=self._of_kernel,
        )
        if traceback is not None:
            event.stamp, event.of_kernel = traceback.stamp, traceback.of_kernel
            event.progress = traceback.progress
            event.frames, event.bare = tuple(traceback.frames), traceback.bare
            event.is_hollow = pattern.weak and remarks.is_hollow(traceback.text)
        # Ranks that run different collectives do not merely take long.
        is_compared = bool(self._found.ledger.running)
        if is_watchdog and traceback and not is_compared and _GRADIENTS.search(traceback.stack):
            event.slug = "gradient-sync-timeout"
        self._parent.keep(event)
        return event

    def _exception(self, traceback: Traceback) -> None:
        """Recognize an exception by the first matching pattern, else as the program's own."""
        text = traceback.text
        chosen, fields = None, {}
        for pattern in known.load().candidates(bare(text))[0]:
            # What a process still says at its end may stand below its exception.
            told = text.partition("\n")[0] if pattern.role == "consequence" else text
            if pattern.role != "loss" and (match := _fullest(pattern, told)):
                chosen, fields = pattern, match.groupdict()
                break
        place, line = traceback.place, traceback.line
        previous = self._last.get(line.origin)
        if chosen is None:
            name = text.partition(":")[0].strip()[:120] or "exception"
            is_end = traceback.ignored or name.endswith(("SystemExit", "KeyboardInterrupt"))
            is_end = is_end or remarks.is_orderly(name)
            ended = remarks.end_of(text) if remarks.is_hollow(text) else {}
            chosen = (
                _PYTHON_EXIT
                if is_end
                else _PYTHON_END
                if ended
                else _PYTHON
                if traceback.frames
                else _PYTHON_BARE
            )
            fields = {"exception": name, "message": text.partition(":")[2].strip()[:200]}
            fields |= {key: value for key, value in ended.items() if key in _PYTHON.names}
        if traceback.chained and previous is not None and previous.role == "cause":
            # Raised while the first was handled, which is the cause unless this one says more.
            says_more = previous.weak and not chosen.weak
            says_more |= previous.is_hollow and not remarks.is_hollow(text)
            if chosen.role != "cause" or not says_more:
                return
            self._parent.subordinate(previous)
        event = self._keep(chosen, fields, line, place, traceback)
        if event.place is place:
            self._last[line.origin] = event
            event.says += event.whence


def _is_of_service(line: Line) -> bool:
    """Return whether a line has syslog's host and tag, as another service's in the journal has."""
    host = line.origin.host
    return host is not None and line.named.startswith(f"{host} ")


def _match(near: Iterable[Pattern], text: str, level: str) -> tuple[Pattern, re.Match[str]] | None:
    """Return the first pattern that matches a line's text, and its match."""
    for pattern in near:
        if pattern.where == "any" or level in {"E", "F"} or _is_retry(pattern, level):
            match = _fullest(pattern, text)
            if match:
                return pattern, match
    return None


def _is_retry(pattern: Pattern, level: str) -> bool:
    """Return whether the words of an error are those of a warning: of an attempt that is made
    again, which says why only if the attempts end in an error.
    """
    return pattern.where == "error" and level == "W"


def _fullest(pattern: Pattern, text: str) -> re.Match[str] | None:
    """Return the match that says most: a reason often stands behind its own summary."""
    fullest, fewest = None, 0
    for match in pattern.regex.finditer(text):
        missing = match.groups().count(None)
        if fullest is None or missing < fewest:
            fullest, fewest = match, missing
    return fullest
