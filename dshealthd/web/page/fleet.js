// All members at a glance: the state that each reports, by leaf, and the jobs across nodes.

import { h, patch } from "./elements.js";
import { count, duration, known, plural, unknown, words } from "./numbers.js";
import { LEVELS, MARKS, leftOut, mark, seen, strip, table } from "./pieces.js";
import { poll } from "./poll.js";

const LISTED = 50; // nodes with problems that are listed by name
const STRIPS = 200; // nodes with findings of whom the last hours are drawn
const NAMED = 64; // nodes up to which squares have names
const STATES = { ...LEVELS, unreachable: "bad", "not asked yet": "quiet", "out of date": "quiet" };
const MILD = ["silent", "stalled", "suspended"];
const CALM = ["training", "paused"];
const SILENT = ["unreachable", "not asked yet", "out of date"]; // states of nodes whose jobs are not known

const level = (node) => STATES[node.state] || "unknown";
// Assumes that the other agents serve the same scheme and port as this one. Behind a proxy with a path, where they are is unknown.
const address = (name) =>
  location.pathname === "/fleet" ? `${location.protocol}//${name.includes(":") ? `[${name}]` : name}${location.port ? `:${location.port}` : ""}/` : null;
const RANK = { bad: 0, unknown: 1, warn: 2, quiet: 3, good: 4 };
const byState = (one, other) =>
  RANK[level(one)] - RANK[level(other)] || one.name.localeCompare(other.name, "en", { numeric: true });

function says(node, now) {
  if (node.state === "out of date") return `${node.last} ${duration(now - node.time)} ago, not asked since`;
  if (node.problem) return `unreachable: ${words(node.problem).replace(/^unreachable: /, "")}`;
  if (node.findings) {
    const more = (node.problems || 0) + (node.unreadable || 0) - node.findings.length;
    const texts = node.findings.map((finding) => `${finding.part ? `${finding.part}: ` : ""}${finding.summary}`);
    return `${texts.join("; ")}${more > 0 ? `; and ${more} more` : ""}`;
  }
  if (node.state === "ok") return node.watched ? `healthy so far, ${plural(node.watched, "sign")} watched` : "healthy";
  return node.state;
}

// The worst level among the states that are counted.
const worstOf = (states) =>
  Object.keys(states)
    .map((state) => level({ state }))
    .sort((one, other) => RANK[one] - RANK[other])[0] || "unknown";
const told = (states) =>
  [
    ["critical", "critical"],
    ["unreachable", "unreachable"],
    ["unknown", "unknown"],
    ["warning", "with warnings"],
    ["not asked yet", "not asked yet"],
    ["out of date", "not asked lately"],
  ].flatMap(([state, text]) => (states[state] ? [`${states[state]} ${text}`] : []));

const TROUBLED = ["critical", "unreachable", "unknown", "warning"];
const problems = (fleet) => TROUBLED.reduce((sum, state) => sum + (fleet.states[state] || 0), 0);

const listed = (node, now) =>
  h(
    "li",
    { "data-key": node.name },
    h("span", {}, mark(level(node)), h("span", { class: "spoken" }, MARKS[level(node)][1])),
    h("b", {}, h("a", { href: address(node.name) }, node.name)),
    h("div", {}, says(node, now)),
  );

function summary(fleet) {
  const parts = told(fleet.states);
  const worst = worstOf(fleet.states);
  const troubled = fleet.nodes.filter((node) => !["good", "quiet"].includes(level(node))).sort(byState);
  return h(
    "section",
    { class: `verdict ${worst}`, "aria-label": "Summary" },
    h("h2", {}, mark(worst), parts.length ? [parts.join(", "), h("span", { class: "quiet" }, `  of ${plural(fleet.members, "node")}`)] : "All nodes healthy"),
    troubled.length ? h("ul", {}, troubled.slice(0, LISTED).map((node) => listed(node, fleet.time))) : null,
    problems(fleet) > LISTED ? h("p", { class: "quiet" }, `and ${problems(fleet) - LISTED} more`) : null,
    fleet.suspects.map(({ kind, component, reason }) =>
      h("p", { class: "warn" }, `\u25b2 This node's probes suspect ${kind} ${component}: ${words(reason)}`),
    ),
  );
}

function square(tag, look, shown, spoken) {
  return h(tag, look, h("span", { "aria-hidden": "true" }, MARKS[look.class][0], shown), h("span", { class: "spoken" }, spoken));
}

function leafSquare({ leaf, states }) {
  const text = `${leaf || "leaf unknown"}: ${told(states).join(", ") || "all healthy"}`;
  return h("li", {}, square("span", { class: worstOf(states), title: text }, null, text));
}

function nodeSquare(node, named, now) {
  const look = { class: level(node), href: address(node.name), title: `${node.name}: ${says(node, now)}` };
  return h("li", { "data-key": node.name }, square("a", look, named ? ` ${node.name}` : null, `${node.name}: ${node.state}`));
}

const legend = () =>
  h(
    "p",
    { class: "legend quiet" },
    [["good", "healthy"], ["warn", "warning"], ["bad", "critical or unreachable"], ["unknown", "unknown"], ["quiet", "not asked yet or lately"]].map(([kind, text]) =>
      h("span", {}, mark(kind), `${text}  `),
    ),
  );

// A square for each node; of a fleet that is too large for that, one for each leaf.
function squares(fleet) {
  const { nodes } = fleet;
  if (nodes.length < fleet.members) {
    return h(
      "section",
      { class: "panel", "aria-label": "Leaves" },
      h("h2", {}, h("span", {}, "Leaf switches"), h("span", { class: "about" }, "each by its worst node")),
      h("ul", { class: "squares" }, fleet.leaves.map(leafSquare)),
      legend(),
    );
  }
  const leaves = new Map();
  const named = nodes.length <= NAMED;
  nodes.forEach((node) => leaves.set(node.leaf, [...(leaves.get(node.leaf) || []), node]));
  return h(
    "section",
    { class: "panel", "aria-label": "Nodes" },
    h("h2", {}, h("span", {}, "Nodes"), h("span", { class: "about" }, leaves.size > 1 ? "by leaf switch" : "")),
    [...leaves].map(([leaf, those]) =>
      h(
        "div",
        { class: "leaf" },
        leaf || leaves.size > 1 ? h("h3", {}, leaf || "leaf unknown") : null,
        h("ul", { class: named ? "squares named" : "squares" }, those.map((node) => nodeSquare(node, named, fleet.time))),
      ),
    ),
    legend(),
  );
}

const HOURS = { ".": "good", w: "warn", "?": "unknown", C: "bad", " ": "none" };
const BLANK = /^[. ]*$/;

// The last 24 hours of each node, the present one last; of many nodes, those for which something was found. Drawn once it is opened.
function hours({ nodes, members, time }) {
  const many = members > NAMED;
  const known = nodes.filter((node) => node.hours);
  const shown = known.filter((node) => !many || !BLANK.test(node.hours)).slice(0, STRIPS);
  const old = document.getElementById("hours");
  const open = old ? old.open : !many;
  const name = (at, count) => new Date(1000 * (time - 3600 * (count - 1 - at))).toLocaleTimeString("en-GB", { hour: "2-digit" });
  const cells = ({ hours: text }) => [...text].map((mark, at) => [`${name(at, text.length)} h`, HOURS[mark] || "unknown"]);
  const rows = () =>
    shown.map((node) => h("li", {}, h("span", {}, node.name), strip(`${node.name}, last 24 hours`, "hour", cells(node))));
  return h(
    "section",
    { class: "panel", "aria-label": "Last 24 hours" },
    h("h2", {}, h("span", {}, "Last 24 hours"), h("span", { class: "about" }, many ? `the worst of each hour, of ${plural(shown.length, "node")} with findings${nodes.length < members ? " now" : ""}` : "the worst of each hour")),
    h("details", { id: "hours", open, "data-open": String(!many) }, h("summary", {}, plural(shown.length, "node")), open ? h("ul", { class: "hours" }, rows()) : null),
    known.length < nodes.length ? h("p", { class: "quiet" }, `not known of ${plural(nodes.length - known.length, "node")}`) : null,
  );
}

function jobs({ jobs: found, jobs_left_out: more, states, members }) {
  const silent = SILENT.reduce((sum, state) => sum + (states[state] || 0), 0);
  const rows = found.map((job) => {
    const bad = job.state === "hung" || job.state === "failed" || job.loss === "not finite";
    const apart = known(job.step) && known(job.step_highest) && job.step_highest !== job.step ? `\u2013${count(job.step_highest)}` : "";
    const culprits = job.culprits.map(({ rank, node, cause }) => `rank ${rank} on ${node} (${words(cause || "unknown")})`);
    const slow = job.slow.map(({ rank, node, ratio }) => `slow: rank ${rank} on ${node}, ${ratio.toFixed(2)}\u00d7`);
    return h(
      "tr",
      { "data-key": job.job },
      h("th", { scope: "row" }, mark(bad ? "bad" : MILD.includes(job.state) ? "warn" : CALM.includes(job.state) ? "good" : "quiet"), job.job),
      h("td", { class: bad ? "bad" : null }, job.pause ? words(job.pause) : job.state, job.loss === "not finite" ? ", loss not finite" : "", job.attempts > 1 ? `, attempt ${job.attempts}` : ""),
      h("td", {}, [...culprits, ...slow].join(", ") || "\u2013"),
      h("td", { class: "num" }, `${job.ranks}${known(job.world_size) ? ` of ${job.world_size}` : ""}`),
      h("td", { class: "num" }, String(job.nodes.length)),
      h("td", { class: "num" }, known(job.step) ? [count(job.step), apart] : unknown()),
      h("td", { class: "num" }, known(job.steps_per_minute) ? job.steps_per_minute.toFixed(1) : "\u2013"),
    );
  });
  return h(
    "section",
    { class: "panel wide", "aria-label": "Jobs" },
    h("h2", {}, h("span", {}, "Jobs"), h("span", { class: "about" }, plural(found.length + more, "training job"))),
    rows.length
      ? h("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "Table of jobs" }, table(["job", "state", "culprit or slow rank", "#ranks", "#nodes", "#step", "#steps per minute"], rows))
      : silent < members
        ? h("p", { class: "quiet" }, "no training jobs")
        : null,
    silent ? h("p", { class: "quiet" }, `not known of ${plural(silent, "node")}`) : null,
    more ? h("p", { class: "quiet" }, `and ${more} more, none of which hangs or failed`) : null,
  );
}

function render(fleet, answered, state) {
  document.title = `${state === "not answering" ? "\u2716 " : problems(fleet) ? `(${problems(fleet)}) ` : ""}Fleet \u2013 dshealthd`;
  patch(
    document.getElementById("top"),
    h(
      "header",
      { id: "top" },
      h("h1", {}, "Fleet"),
      h("span", { class: "quiet" }, `${plural(fleet.members, "node")}, as seen from ${fleet.node}`),
      seen(state === "live" && fleet.asking ? "live, querying" : state, answered),
    ),
  );
  patch(document.getElementById("page"), h("main", { id: "page" }, summary(fleet), squares(fleet), hours(fleet), jobs(fleet), leftOut(fleet.left_out || [])));
}

patch(document.getElementById("page"), h("main", { id: "page" }, h("p", { class: "quiet" }, "asking all nodes")));
// The agent waits up to 4.5 s for all nodes.
poll("api/v1/fleet", {
  every: 3000,
  patience: 8000,
  lostAfter: 15000,
  nothing: "No data about the fleet.",
  source: ({ node }) => node,
  render,
});
