// The training jobs of this node: progress, hangs and their culprits.

import { h } from "./elements.js";
import { count, duration, known, plural, seconds, unit, unknown, words } from "./numbers.js";
import { figure, mark, panel, table } from "./pieces.js";
import { line } from "./trends.js";

const ROOM = 16; // ranks up to which a job's table is open

function hang(job) {
  if (!job.hang) return null;
  const { says, overdue_seconds: overdue, culprits } = job.hang;
  return h(
    "div",
    { class: "fault" },
    h("b", {}, "Hung"),
    known(overdue) ? `: no progress for ${duration(overdue)} longer than expected` : "",
    `. Cause: ${says}.`,
    culprits.map((culprit) => h("div", {}, `Rank ${culprit.rank} ${culprit.says}`)),
  );
}

function stall(job) {
  if (!job.stall || job.state === "paused") return null;
  const { says, silent_seconds: silent, hung_in_seconds: left } = job.stall;
  const later = known(left) ? `; counts as hung in ${duration(left)}` : "";
  return h("div", { class: "warn" }, `${says} for ${duration(silent)}${later}`);
}

// A marked pause instead of the word for it; and no false calm while no rank is heard.
function doing(job, now) {
  if (job.state === "paused" && job.stall) return `${words(job.stall.says)} for ${duration(job.stall.silent_seconds)}`;
  const silent = now - Math.max(...job.ranks.map((rank) => rank.heartbeat).filter(known));
  if (job.state !== "silent" || !Number.isFinite(silent)) return job.state;
  const bounds = job.ranks.map((rank) => rank.bound_seconds).filter(known);
  return `no step for ${duration(silent)}${bounds.length ? `, judged from ${duration(Math.max(...bounds))} on` : ""}`;
}

function one(job, now) {
  const ranks = `${job.ranks_here}${known(job.world_size) ? ` of ${job.world_size}` : ""}`;
  const apart = known(job.step_highest) && job.step_highest !== job.step ? `\u2013${count(job.step_highest)}` : "";
  const failures = job.failures || [];
  const still = job.hang || job.stall;
  const heard = Math.max(job.ranks.length, job.followed?.heartbeat ?? 0);
  const open = Boolean(job.hang) || job.ranks.length <= ROOM;
  const calm = ["training", "paused"].includes(job.state);
  const level = job.hang || failures.length || job.loss === "not finite" ? "bad" : calm ? "good" : job.stall ? "warn" : "quiet";
  const rows = job.ranks.map((rank) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, String(rank.rank)),
      h("td", { class: "num" }, count(rank.step)),
      h("td", {}, rank.phase && rank.phase !== "training" ? words(rank.phase) : words(rank.stage || "unknown")),
      h("td", {}, words(rank.process || "unknown")),
      h("td", { class: "num" }, known(rank.step_seconds) ? duration(rank.step_seconds) : unknown()),
      h("td", { class: "num", title: rank.wait_source || null }, seconds(rank.work_seconds)),
      h("td", { class: "num" }, seconds(rank.wait_seconds)),
      h("td", { class: "num" }, known(rank.work_ratio) ? `${rank.work_ratio.toFixed(2)}\u00d7` : "\u2013"),
    ),
  );
  return h(
    "div",
    { class: "job", "data-key": job.job },
    h("h3", {}, mark(level), job.job, unit(` ${doing(job, now)}`)),
    hang(job),
    stall(job),
    failures.map(({ slug, rank, node }) =>
      figure("failure in its log", h("span", { class: "bad" }, `${slug}${known(rank) ? ` on rank ${rank}` : ""}${node ? ` (${node})` : ""}`)),
    ),
    job.script ? figure("script", `${job.script}, user ${job.user || "unknown"}, pid ${job.pid}`) : null,
    job.launcher ? figure("started by", words(job.launcher)) : null,
    figure("ranks on this node", ranks),
    job.state === "no heartbeats"
      ? null
      : [
          figure("step", [count(job.step), apart]),
          figure(
            "steps per minute",
            known(job.steps_per_minute) ? job.steps_per_minute.toFixed(1) : still ? "none" : unknown(),
            line(job.job, "step time"),
          ),
          figure("loss", job.loss === "not finite" ? h("span", { class: "bad" }, "\u2716 NaN or infinite") : job.loss),
        ],
    job.evidence ? figure("evidence", h("code", {}, job.evidence)) : null,
    rows.length
      ? h(
          "details",
          { open, "data-open": String(open) },
          h("summary", {}, `${rows.length < heard ? `${rows.length} of ` : ""}${plural(heard, "rank")}`),
          h(
            "div",
            { class: "scrolls", tabindex: "0", role: "region", "aria-label": `Ranks of ${job.job}` },
            table(["rank", "#step", "at", "process", "#step time", "#own work", "#wait", "#factor"], rows),
          ),
        )
      : null,
  );
}

export function jobs(status) {
  const found = status.document.jobs || [];
  return found.length ? panel(status, "Jobs", plural(found.length, "training job"), [], found.map((job) => one(job, status.document.time))) : null;
}
