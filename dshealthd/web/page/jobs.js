// The training jobs of this node: progress, hangs and their culprits.

import { h } from "./elements.js";
import { count, duration, known, plural, unknown, words } from "./numbers.js";
import { figure, mark, panel, table } from "./pieces.js";
import { trend } from "./status.js";

const CAUSES = {
  process: "a rank's process is stopped or gone",
  checkpoint: "checkpoint",
  input: "input",
  desync: "ranks are at different points",
  waiting: "not on this node: the ranks wait for another node or for the network",
};
const REASONS = {
  stopped: "is stopped (SIGSTOP or a debugger)",
  gone: "has ended",
  blocked: "is blocked in the kernel",
  checkpoint: "has not returned from a checkpoint",
  paused: "has not returned from a marked pause",
  input: "is waiting for its next batch",
  behind: "is behind the others",
  ahead: "is ahead of the others",
};
const SLOWER = 1.05; // below this ratio the slowest rank of a job is not worth naming

function hang(job) {
  if (!job.hang) return null;
  const { cause, overdue_seconds: overdue, culprits } = job.hang;
  return h(
    "div",
    { class: "fault" },
    h("b", {}, "Hung"),
    known(overdue) ? `: no progress for ${duration(overdue)} longer than expected` : "",
    `. Cause: ${CAUSES[cause] || words(cause)}.`,
    culprits.map(({ rank, reason }) => h("div", {}, `Rank ${rank} ${REASONS[reason] || words(reason)}`)),
  );
}

function one(job) {
  const { slowest_rank: slowest } = job;
  const ranks = `${job.ranks_here}${known(job.world_size) ? ` of ${job.world_size}` : ""}`;
  const apart = known(job.step_highest) && job.step_highest !== job.step ? `\u2013${count(job.step_highest)}` : "";
  const failures = job.failures || [];
  const level = job.hang || failures.length || job.loss === "not finite" ? "bad" : job.state === "training" ? "good" : "quiet";
  const rows = job.ranks.map((rank) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, String(rank.rank)),
      h("td", { class: "num" }, count(rank.step)),
      h("td", {}, rank.phase && rank.phase !== "training" ? words(rank.phase) : words(rank.stage || "unknown")),
      h("td", {}, words(rank.process || "unknown")),
      h("td", { class: "num" }, known(rank.step_seconds) ? duration(rank.step_seconds) : unknown()),
    ),
  );
  return h(
    "div",
    { class: "job" },
    h("h3", {}, mark(level), job.job, h("span", { class: "unit" }, ` ${job.state}`)),
    hang(job),
    failures.map(({ slug, rank, node }) =>
      figure("failure in its log", h("span", { class: "bad" }, `${slug}${known(rank) ? ` on rank ${rank}` : ""}${node ? ` (${node})` : ""}`)),
    ),
    job.launcher ? figure("started by", words(job.launcher)) : null,
    figure("ranks on this node", ranks),
    job.state === "no heartbeats"
      ? null
      : [
          figure("step", [count(job.step), apart]),
          figure(
            "steps per minute",
            known(job.steps_per_minute) ? job.steps_per_minute.toFixed(1) : job.hang ? "none" : unknown(),
            trend(`job ${job.job}`, job.hang ? 0 : job.steps_per_minute, "steps per minute, the last minutes"),
          ),
          figure("loss", job.loss === "not finite" ? h("span", { class: "bad" }, "\u2716 NaN or infinite") : job.loss),
        ],
    slowest && slowest.ratio >= SLOWER ? figure("slowest rank", `${slowest.rank}, ${slowest.ratio.toFixed(2)}\u00d7 the median here`) : null,
    job.evidence ? figure("evidence", h("code", {}, job.evidence)) : null,
    rows.length
      ? h("details", {}, h("summary", {}, plural(rows.length, "rank")), table(["rank", "#step", "at", "process", "#step time"], rows))
      : null,
  );
}

export function jobs(status) {
  const found = status.document.jobs || [];
  return found.length ? panel(status, "Jobs", plural(found.length, "training job"), [], found.map(one)) : null;
}
