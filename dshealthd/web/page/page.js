// The page of one node: it requests the status document every few seconds and renders it.

import { h, patch } from "./elements.js";
import { gpus } from "./gpus.js";
import { history } from "./history.js";
import { collectors, host, kernelLog } from "./host.js";
import { jobs } from "./jobs.js";
import { duration } from "./numbers.js";
import { disks, files, infiniband, memory, network, sockets } from "./panels.js";
import { leftOut, seen } from "./pieces.js";
import { poll } from "./poll.js";
import { probes } from "./probes.js";
import { Status } from "./status.js";
import { refresh } from "./trends.js";
import { absences, verdict } from "./verdict.js";

function render(last, answered, state) {
  const status = new Status(last);
  refresh(status);
  const { node, version, uptime_seconds: uptime } = last;
  document.title = `${state === "not answering" ? "\u2716 " : status.findings.length ? `(${status.findings.length}) ` : ""}${node} \u2013 dshealthd`;
  patch(
    document.getElementById("top"),
    h(
      "header",
      { id: "top" },
      h("h1", {}, node),
      h("span", { class: "quiet" }, `dshealthd ${version}, running for ${duration(uptime)}`),
      last.probe && last.probe.state !== "off" ? h("a", { href: "fleet" }, "fleet") : null,
      seen(state, answered),
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
        history(status),
        kernelLog(status),
        sockets(status),
        files(status),
        memory(status),
        disks(status),
        network(status),
        host(status),
        leftOut(last.left_out || []),
      ),
      collectors(status),
      absences(status),
    ),
  );
}

poll("api/v1/status", {
  every: 2000,
  patience: 4000,
  lostAfter: 6000,
  nothing: "No data about this node.",
  source: ({ node, version }) => `${node} ${version}`,
  render,
});
