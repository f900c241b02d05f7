// The kernel log, the host, its software, and the collectors.

import { h } from "./elements.js";
import { age, count, duration, known, plural, sum, unit, unknown, words } from "./numbers.js";
import { figure, flag, mark, panel, table } from "./pieces.js";
import { line } from "./trends.js";

export function kernelLog(status) {
  if (status.absent("kernel_log")) return null;
  const now = status.document.time;
  const xids = status
    .samples("xid_errors_total")
    .filter((sample) => sample.value > 0)
    .map(({ labels, value }) => {
      const last = status.value("xid_last_timestamp_seconds", labels);
      const where = labels.gpu === "" ? labels.pci || labels.pci_bus_id || "gone" : `GPU ${labels.gpu}`;
      return h(
        "tr",
        {},
        h("th", { scope: "row" }, mark(status.of(where) || "quiet"), where),
        h("td", {}, `Xid ${labels.xid}`),
        h("td", { class: "num" }, `${count(value)}\u00d7`),
        h("td", { class: "num" }, known(last) ? `${duration(Math.max(0, now - last))} ago` : unknown()),
      );
    });
  const events = status
    .samples("kernel_events_total")
    .filter((sample) => sample.value > 0)
    .map(({ labels, value }) => figure(`${words(labels.event)} ${labels.device}`.trim(), `${count(value)}\u00d7`));
  const lost = status.value("kernel_log_records_lost_total");
  const quiet = !xids.length && !events.length && status.collectors.get("kernel_log").state === "ok";
  return panel(
    status,
    "Kernel log",
    "since boot",
    ["kernel_log"],
    [
      xids.length ? table(["device", "error", "#times", "#last"], xids) : null,
      events,
      quiet ? h("p", { class: "quiet" }, "no errors logged") : null,
      lost > 0 ? h("p", { class: "quiet" }, `${plural(lost, "record")} overwritten before being read`) : null,
    ],
  );
}

export function host(status) {
  const load = ["1", "5", "15"].map((minutes) => status.value("load_average", { minutes }));
  const cpus = status.value("cpus_online");
  const synchronized = status.value("clock_synchronized");
  const offset = status.value("clock_offset_seconds");
  const clock = status.of(null, "clock_synchronized");
  const software = status.samples("software_info").map(({ labels }) => labels);
  const versions = software.map(({ component, environment, version }) =>
    figure([words(component), environment ? unit(` ${environment}`) : null], version || unknown()),
  );
  const shift = known(offset) ? unit(` ${offset < 0 ? "\u2212" : "+"}${duration(Math.abs(offset))}`) : null;
  const told = { 0: h("span", { class: clock }, `${flag(clock)}not synchronized`), 1: ["synchronized", shift] };
  return [
    status.absent("kernel")
      ? null
      : panel(
          status,
          "Host",
          "",
          ["kernel", "clock"],
          [
            figure("up", duration(status.value("uptime_seconds"))),
            figure(
              "load",
              load.map((each, index) => [index ? " \u00b7 " : "", known(each) ? each.toFixed(2) : unknown()]),
              line("", "load over 1 min"),
            ),
            figure("CPUs", count(cpus)),
            figure("threads", [
              count(status.value("threads")),
              unit(` of ${status.value("threads_limit")?.toLocaleString("en-US") ?? "unknown"}`),
            ]),
            status.absent("clock") ? null : figure("clock", told[synchronized] || unknown()),
          ],
        ),
    status.absent("software") || !versions.length
      ? null
      : panel(
          status,
          "Software",
          "",
          ["software"],
          versions.length > 7
            ? [versions.slice(0, 6), h("details", {}, h("summary", {}, `${versions.length - 6} more`), versions.slice(6))]
            : versions,
        ),
  ];
}

export function collectors(status) {
  const level = (collector) =>
    collector.state === "failing" ? "unknown" : collector.state === "pending" ? "quiet" : collector.faults.length ? "unknown" : "good";
  const rows = status.document.collectors
    .filter((collector) => collector.state !== "not available")
    .map((collector) => {
      const parts = collector.faults.map(
        (fault) => `${fault.part}: ${words(fault.reason)}${fault.detail ? `, ${fault.detail}` : ""}`,
      );
      const why = [collector.reason ? words(collector.reason) : "", collector.detail, ...parts].filter(Boolean);
      const state =
        collector.state === "ok" && collector.faults.length ? `${plural(collector.faults.length, "part")} unreadable` : collector.state;
      return h(
        "li",
        {},
        h("b", {}, mark(level(collector)), collector.name),
        h("span", { class: state === "ok" ? "quiet" : level(collector) }, state),
        h("span", { class: "num" }, collector.age_seconds === null ? "" : [age(collector.age_seconds), unit(" ago")]),
        h("span", { class: "num quiet" }, collector.duration_seconds === null ? "" : duration(collector.duration_seconds)),
        why.length ? h("p", {}, why.join(" \u00b7 ")) : null,
      );
    });
  const workers = status.document.workers.map((worker, index) => {
    const failures = sum(Object.values(worker.failures)) || 0;
    const what = [
      worker.up ? "running" : "idle: nothing to do on this node",
      failures ? `restarted ${failures}\u00d7` : "",
      worker.stuck ? `${worker.stuck} stuck` : "",
      worker.quarantined ? `${worker.quarantined} quarantined` : "",
    ];
    return [
      index ? " \u00b7 " : "",
      h("b", {}, worker.name),
      h("span", { class: worker.stuck ? "bad" : null }, ` ${what.filter(Boolean).join(", ")}`),
    ];
  });
  return panel(
    status,
    "Collectors",
    "state, last update, duration",
    [],
    [h("ul", { class: "collectors" }, rows), workers.length ? h("p", { class: "absent" }, "Workers: ", workers) : null],
  );
}
