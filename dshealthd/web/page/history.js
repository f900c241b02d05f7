// The node's record: a bar for each of the last days, and the last entries in words. The API has judged both.

import { h } from "./elements.js";
import { duration, plural } from "./numbers.js";
import { LEVELS, MARKS, mark, panel, strip } from "./pieces.js";
import { get } from "./poll.js";

const EVERY = 300; // seconds between two requests while findings and agent stay the same: what has ended is no news
const AGAIN = 30; // seconds until the next request after one that failed
const SHOWN = 10;
const known = { asked: -EVERY, state: "", document: null, problem: "" };

async function ask(now, state) {
  known.asked = now;
  known.state = state;
  try {
    known.document = await get("api/v1/history", 4000);
    known.problem = "";
  } catch (error) {
    known.problem = error.message;
    known.asked = now - EVERY + AGAIN;
  }
}

const date = (text, style) => new Date(text).toLocaleDateString("en-US", { timeZone: "UTC", ...style });

const named = ({ day, worst }) => [date(day, { month: "short", day: "numeric" }), worst === null ? "none" : LEVELS[worst]];

function entry(each, now) {
  const level = each.severity === null ? "quiet" : LEVELS[each.severity];
  const lasted = each.kind === "finding" || each.kind === "maintenance";
  const often = each.times > 1 ? plural(each.times, "time") : "";
  const about = [
    new Date(1000 * each.begin).toLocaleString("en-US", { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23" }),
    lasted
      ? `${often ? `${often} within` : "for"} ${duration(Math.max(0, (each.end ?? now) - each.begin))}${each.end === null ? " until now" : ""}`
      : often,
    each.job && each.job !== each.part ? `job ${each.job}` : "",
  ];
  return h(
    "li",
    {},
    mark(level),
    level === "quiet" ? null : h("span", { class: "spoken" }, MARKS[level][1]),
    each.kind === "finding" ? h("b", {}, `${each.part || "this node"}: `) : null,
    each.says,
    lasted && each.reason ? `: ${each.reason}` : "",
    h("div", { class: "quiet" }, about.filter(Boolean).join(", ")),
  );
}

export function history(status) {
  const now = status.document.time;
  const state = JSON.stringify([status.document.started, ...status.findings.map((finding) => [finding.alert, finding.part, finding.since])]);
  if (Math.abs(now - known.asked) >= EVERY || state !== known.state) ask(now, state);
  const { document: record, problem } = known;
  const last = record ? record.entries.slice(-SHOWN).reverse() : [];
  return panel(
    status,
    "History",
    record ? `${plural(record.days.length, "day")}, by UTC` : "",
    [],
    [
      problem ? h("p", { class: "unknown" }, `not read: ${problem}`) : null,
      record && record.problem ? h("p", { class: "fault" }, record.problem) : null,
      record && record.in_the_future ? h("p", { class: "quiet" }, `${record.in_the_future} dated in the future, left out`) : null,
      record ? strip(`Last ${plural(record.days.length, "day")}`, "day", record.days.map(named)) : null,
      last.length ? h("ul", { class: "past" }, last.map((each) => entry(each, now))) : null,
      record && !last.length ? h("p", { class: "quiet" }, "nothing yet") : null,
    ],
  );
}
