// The page of one node: it requests the status document every few seconds and renders it.

import { h, patch } from "./elements.js";
import { gpus } from "./gpus.js";
import { collectors, host, kernelLog } from "./host.js";
import { jobs } from "./jobs.js";
import { clock, duration, zone } from "./numbers.js";
import { disks, files, infiniband, memory, network, sockets } from "./panels.js";
import { probes } from "./probes.js";
import { Status } from "./status.js";
import { absences, verdict } from "./verdict.js";

const LOST_AFTER = 6000; // milliseconds without an answer until the banner appears
const PATIENCE = 4000; // milliseconds for an answer
const EVERY = 2000; // milliseconds between requests
const page = { last: null, answered: 0, failed: "", timer: 0 };

function render() {
  const status = new Status(page.last);
  const { node, version, uptime_seconds: uptime } = page.last;
  const lost = Date.now() - page.answered > LOST_AFTER;
  document.title = `${lost ? "\u2716 " : status.findings.length ? `(${status.findings.length}) ` : ""}${node} \u2013 dshealthd`;
  patch(
    document.getElementById("top"),
    h(
      "header",
      { id: "top" },
      h("h1", {}, node),
      h("span", { class: "quiet" }, `dshealthd ${version}, running for ${duration(uptime)}`),
      page.last.probe && page.last.probe.state !== "off" ? h("a", { href: "fleet" }, "fleet") : null,
      h(
        "span",
        { class: "live" },
        h("span", { class: "beat" }),
        lost ? "not answering, last seen " : "live, last seen ",
        clock(new Date(page.answered)),
        h("span", { class: "unit" }, ` ${zone()}`),
      ),
    ),
  );
  patch(
    document.getElementById("page"),
    h(
      "main",
      { id: "page" },
      verdict(status),
      gpus(status),
      h(
        "div",
        { class: "panels" },
        jobs(status),
        infiniband(status),
        probes(status),
        kernelLog(status),
        sockets(status),
        files(status),
        memory(status),
        disks(status),
        network(status),
        host(status),
      ),
      collectors(status),
      absences(status),
    ),
  );
}

function watch() {
  const silence = Date.now() - page.answered;
  const lost = silence > LOST_AFTER;
  const banner = document.getElementById("banner");
  document.body.classList.toggle("lost", lost && page.answered > 0);
  banner.hidden = !lost;
  if (!lost) return;
  const since = page.answered
    ? `The agent has not answered for ${duration(silence / 1000)}. The data shown is from ${clock(new Date(page.answered))}.`
    : "The agent does not answer.";
  const text = `${since}${page.failed ? ` (${page.failed})` : ""}`;
  if (banner.textContent !== text) banner.textContent = text;
}

async function ask() {
  clearTimeout(page.timer);
  try {
    const answer = await fetch("api/v1/status", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    page.last = await answer.json();
    page.answered = Date.now();
    page.failed = "";
  } catch (error) {
    page.failed = error.name === "TimeoutError" ? "timed out" : error.message;
  }
  if (page.last) render();
  watch();
  page.timer = setTimeout(ask, document.hidden ? 15 * EVERY : EVERY);
}

document.addEventListener("visibilitychange", () => document.hidden || ask());
ask();
