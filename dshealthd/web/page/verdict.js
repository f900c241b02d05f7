// The agent's verdict on this node, and its findings. The API supplies both; nothing is judged here.

import { h } from "./elements.js";
import { duration, plural, words } from "./numbers.js";
import { LEVELS, MARKS, mark } from "./pieces.js";

const code = (text) => text.split("`").map((piece, index) => (index % 2 ? h("code", {}, piece) : piece));

function title(status) {
  const { verdict, findings } = status;
  const problems = findings.filter((finding) => finding.severity !== "unknown").length;
  const starting = findings.filter((finding) => !finding.alert).length;
  const unread = findings.length - problems - starting;
  const hidden = [unread ? `${plural(unread, "source")} not readable` : "", starting ? "not all sources read yet" : ""].filter(Boolean).join(", ");
  if (problems) return `${plural(problems, "problem")} found${hidden && `, ${hidden}`}`;
  if (verdict === "ok") return status.watched.length ? "Healthy so far" : "Healthy";
  return `State unknown${hidden && `: ${hidden}`}`;
}

function about(status) {
  const count = (state) => status.document.collectors.filter((collector) => collector.state === state).length;
  const parts = [`${plural(count("ok"), "collector")} OK`];
  if (count("not available")) parts.push(`${count("not available")} not applicable`);
  if (count("pending")) parts.push(`${count("pending")} starting`);
  return parts.join(", ");
}

function item(finding, now) {
  const level = LEVELS[finding.severity];
  const lasts = finding.since === null ? "" : ` for ${duration(Math.max(0, now - finding.since))}`;
  const since = `${lasts}${finding.trend ? `, ${finding.trend}` : ""}`;
  return h(
    "li",
    { "data-key": `${finding.alert} ${finding.part} ${finding.reason}` },
    h("span", {}, mark(level), h("span", { class: "spoken" }, MARKS[level][1])),
    h("b", {}, finding.part || "this node"),
    h(
      "div",
      {},
      h("div", {}, h("b", {}, finding.summary), h("span", { class: "quiet" }, since)),
      h("div", {}, code(finding.detail)),
      h("div", { class: "quiet" }, "First step: ", code(finding.first_step), " ", h("a", { href: finding.runbook.slice(1) }, "runbook")),
    ),
  );
}

// A sign that has not lasted for its hold yet: what it is about, for how long, and when it counts.
function sign(watched, now) {
  const seconds = Math.max(0, now - watched.since);
  const when = `for ${duration(seconds)}; a finding after ${duration(watched.hold_seconds)}`;
  return h("p", { class: "quiet" }, `Watched: ${watched.part || "this node"}: ${watched.summary}, ${when}`);
}

export function verdict(status) {
  const level = LEVELS[status.verdict];
  return h(
    "section",
    { class: `verdict ${level}`, "aria-label": "Summary" },
    h("h2", {}, mark(level), title(status), h("span", { class: "quiet" }, `  ${about(status)}`)),
    status.findings.length ? h("ul", {}, status.findings.map((finding) => item(finding, status.document.time))) : null,
    status.watched.map((watched) => sign(watched, status.document.time)),
  );
}

export function absences(status) {
  const gone = status.document.collectors.filter((collector) => collector.state === "not available");
  if (!gone.length) return null;
  const reasons = new Map();
  gone.forEach((each) => reasons.set(each.detail, [...(reasons.get(each.detail) || []), each]));
  return h(
    "details",
    { class: "absent" },
    h("summary", {}, `${gone.length} not applicable or disabled: `, gone.map((collector) => words(collector.name)).join(", ")),
    [...reasons].map(([detail, collectors]) =>
      h("p", {}, h("b", {}, collectors.map((collector) => words(collector.name)).join(", ")), detail ? `: ${detail}` : ""),
    ),
  );
}
