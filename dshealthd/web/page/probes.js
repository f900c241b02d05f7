// The rounds with other nodes: members, outcomes of the last ones, suspects.

import { h } from "./elements.js";
import { clock, duration, known, unknown, words } from "./numbers.js";
import { figure, mark, panel, table } from "./pieces.js";

const SHOWN = 8;
const LEVELS = { ok: "good", declined: "quiet", inconclusive: "quiet" };

export function probes(status) {
  const { probe } = status.document;
  if (!probe || probe.state === "off") return null;
  const rounds = [...probe.rounds].reverse().slice(0, SHOWN);
  const rows = rounds.map((round) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, mark(LEVELS[round.outcome] || "bad"), clock(new Date(round.time * 1000))),
      h("td", {}, words(round.kind), h("span", { class: "flow quiet" }, round.members.filter((name) => name !== probe.name).join(", "))),
      h(
        "td",
        { class: LEVELS[round.outcome] ? null : "bad" },
        words(round.outcome),
        h("span", { class: "flow quiet" }, words([round.outcome === "ok" ? "" : round.stage, round.reason].filter(Boolean).join(", "))),
      ),
      h("td", { class: "num" }, duration(round.seconds)),
    ),
  );
  return panel(
    status,
    "Probes",
    known(probe.members) ? `${probe.members} members, every ${duration(probe.period_seconds)}` : "",
    [],
    [
      probe.detail ? h("p", { class: "fault" }, probe.detail) : null,
      figure("this node's score, 1 is usual", known(probe.score) ? `${probe.score.toFixed(2)}\u00d7` : unknown()),
      probe.suspects.length
        ? probe.suspects.map(({ kind, component, reason }) => figure(`suspect ${kind}`, h("span", { class: "warn" }, `\u25b2 ${component}: ${words(reason)}`)))
        : figure("suspects", "none"),
      probe.hash ? figure("member list hash", h("span", { class: "quiet" }, probe.hash)) : null,
      rows.length ? table(["round", "with", "outcome", "#took"], rows) : h("p", { class: "quiet" }, "no rounds yet"),
    ],
  );
}
