// Building blocks of panels.

import { h } from "./elements.js";
import { age, bits, clock, count, known, measure, plural, unit, words, zone } from "./numbers.js";

export function bar(value, full, { marks = [], level = "", label }) {
  if (!known(value) || !known(full) || full <= 0)
    return h("div", { class: "bar none", role: "img", "aria-label": `${label}: unknown` });
  const at = (number) => Math.min(1, Math.max(0, number / full)).toFixed(4);
  return h(
    "div",
    { class: `bar ${level}`, role: "img", "aria-label": label },
    h("i", { value: at(value) }),
    marks.map((mark) => h("b", { at: at(mark.at), class: mark.last ? "last" : null, title: mark.title })),
  );
}

// Severities of the API as classes of this page.
export const LEVELS = { ok: "good", warning: "warn", critical: "bad", unknown: "unknown" };
export const MARKS = {
  good: ["\u25cf", "ok"],
  warn: ["\u25b2", "warning"],
  bad: ["\u2716", "failure"],
  quiet: ["\u25cb", "note"],
  unknown: ["?", "unknown"],
};
const FLAGS = { bad: "\u2716 ", warn: "\u25b2 " };
// A mark before a figure that has a finding.
export const flag = (level) => FLAGS[level] || "";
export const mark = (level) => h("span", { class: `mark ${level}`, "aria-hidden": "true" }, MARKS[level][0]);

// Whether the agent answers, and of when the data is.
export const seen = (state, answered) =>
  h("span", { class: "live" }, h("span", { class: "beat" }), `${state}, last seen ${clock(new Date(answered))}`, unit(` ${zone()}`));

// A bar for each hour or day, as high as it was bad: [name, level], where the level is none if no agent watched.
export function strip(title, unit, cells) {
  const of = (level) => cells.filter(([, found]) => found === level).map(([name]) => name);
  const said = Object.entries({ bad: "failures", warn: "warnings", unknown: "unreadable" })
    .filter(([level]) => of(level).length)
    .map(([level, word]) => `${word} on ${of(level).join(", ")}`);
  if (of("none").length) said.push(`not watched on ${plural(of("none").length, unit)}`);
  return h(
    "div",
    { class: "days", role: "img", "aria-label": `${title}: ${said.join("; ") || "no findings"}` },
    cells.map(([name, level]) => h("i", { class: level, title: `${name}: ${level === "none" ? "not watched" : MARKS[level][1]}` })),
  );
}

export function figure(name, value, ...rest) {
  return h("div", { class: "figure" }, h("div", { class: "line" }, h("span", {}, name), h("span", {}, value)), rest);
}

// How much of a limit is used, with its bar and perhaps its line.
export function share(name, value, limit, look, otherwise = "") {
  const of = known(limit) ? ` of ${limit.toLocaleString("en-US")}` : otherwise;
  return figure(name, [count(value), unit(of)], bar(value, limit, look), look.line);
}

export function panel(status, title, about, collectors, content) {
  const entries = collectors.map((name) => status.collectors.get(name)).filter(Boolean);
  const [main] = entries;
  const failing = entries.filter((collector) => collector.state === "failing");
  const pending = entries.length > 0 && entries.every((collector) => collector.state === "pending");
  return h(
    "section",
    { class: "panel", "aria-label": title },
    h(
      "h2",
      {},
      h("span", {}, title),
      h("span", { class: "about" }, about || ""),
      main && main.age_seconds !== null ? h("span", { class: "age" }, `${age(main.age_seconds)} old`) : null,
    ),
    failing.map(({ name, reason, detail }) =>
      h("p", { class: "fault" }, `${name}: ${words(reason || "failing")}`, detail ? ` \u2013 ${detail}` : ""),
    ),
    pending ? h("p", { class: "unknown" }, "no sample yet") : content,
  );
}

// What the document lacks because it could not be built; nothing follows from its absence.
export const leftOut = (parts) =>
  parts.length
    ? h(
        "section",
        { class: "panel wide", "aria-label": "Left out" },
        h("h2", {}, h("span", {}, "Left out")),
        parts.map(({ part, reason }) => h("p", { class: "fault" }, `${part}: ${reason}`)),
      )
    : null;

export const flow = (sends, receives) =>
  [
    ["\u2191", "sends ", sends],
    ["\u2193", "receives ", receives],
  ].map(([sign, word, value]) =>
    h(
      "span",
      { class: "flow" },
      measure(bits(value)),
      h("span", { class: "quiet", "aria-hidden": "true" }, ` ${sign}`),
      h("span", { class: "spoken" }, ` ${word}`),
    ),
  );

export function table(heads, rows) {
  return h(
    "table",
    {},
    h(
      "thead",
      {},
      h("tr", {}, heads.map((head) => h("th", { scope: "col", class: head.startsWith("#") ? "num" : null }, head.replace("#", "")))),
    ),
    h("tbody", {}, rows),
  );
}
