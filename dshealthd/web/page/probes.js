// Probe rounds with other nodes: members, recent outcomes, suspects.

import { h } from "./elements.js";
import { clock, duration, known, unknown, words } from "./numbers.js";
import { figure, mark, panel, table } from "./pieces.js";

const SHOWN = 8;
const LEVELS = { ok: "good", declined: "quiet", inconclusive: "quiet" };

// The newest failed round that included the suspect. A slow suspect is judged over many rounds, so no single one shows it.
function shows({ component }, rounds, me) {
  const names = component.split(/--|->|\//);
  const about = (round) => round.members.some((name) => name !== me && names.includes(name)) || names[0] === me;
  const round = rounds.find((each) => !LEVELS[each.outcome] && about(each));
  if (!round) return null;
  const problem = words([round.stage, round.reason].filter(Boolean).join(", ")) || words(round.outcome);
  return h("span", { class: "flow quiet" }, `last seen in the round at ${clock(new Date(round.time * 1000))}: ${problem}`);
}

// What became of a round. An echo that is well is no fault of the GPUs: it says why they were left alone.
function became(round) {
  if (round.outcome !== "ok") return words([round.stage, round.reason].filter(Boolean).join(", "));
  return round.reason ? `GPUs not used: ${words(round.reason)}` : "";
}

export function probes(status) {
  const { probe } = status.document;
  if (!probe || probe.state === "off") return null;
  const newest = [...probe.rounds].reverse();
  const rows = newest.slice(0, SHOWN).map((round) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, mark(LEVELS[round.outcome] || "bad"), clock(new Date(round.time * 1000))),
      h("td", {}, words(round.kind), h("span", { class: "flow quiet" }, round.members.filter((name) => name !== probe.name).join(", "))),
      h(
        "td",
        { class: LEVELS[round.outcome] ? null : "bad" },
        words(round.outcome),
        h("span", { class: "flow quiet" }, became(round)),
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
      probe.detail ? probe.detail.split("\n").map((each) => h("p", { class: "fault" }, each)) : null,
      figure("this node's score (1 is normal)", known(probe.score) ? `${probe.score.toFixed(2)}\u00d7` : unknown()),
      probe.suspects.length
        ? probe.suspects.map((suspect) =>
            figure(
              `suspect ${suspect.kind}`,
              h("span", { class: "warn" }, `\u25b2 ${suspect.component}: ${words(suspect.reason)}`, shows(suspect, newest, probe.name)),
            ),
          )
        : figure("suspects", "none"),
      probe.hash ? figure("member list hash", h("span", { class: "quiet" }, probe.hash)) : null,
      rows.length ? table(["round", "with", "outcome", "#took"], rows) : h("p", { class: "quiet" }, "no rounds yet"),
    ],
  );
}
