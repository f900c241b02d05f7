// Links, sockets, files, memory, disks.

import { h } from "./elements.js";
import { bits, bytes, count, duration, known, measure, percent, plural, said, sum, unknown, words } from "./numbers.js";
import { bar, figure, flag, flow, mark, panel, table } from "./pieces.js";
import { rate } from "./status.js";
import { line } from "./trends.js";

// That a source has nothing; what could not be read may have anything.
const none = (status, collector, text) => (status.collectors.get(collector).state === "ok" ? h("p", { class: "quiet" }, text) : null);

export function infiniband(status) {
  if (status.absent("infiniband")) return null;
  const rows = status.samples("infiniband_port_up").map((sample) => {
    const { device, port } = sample.labels;
    const id = { device, port };
    const state = status.info("infiniband_port_state", id).state;
    const errors = sum(status.values("infiniband_port_errors_total", id));
    const flaps = status.value("infiniband_port_flaps_total", id);
    const up = sample.value === 1;
    const level = status.of(`${device}/${port}`);
    const layer = status.info("infiniband_port_info", id).link_layer;
    // RoCE's drivers call a port disabled that has no carrier.
    const physical = layer === "Ethernet" ? "" : status.info("infiniband_port_physical_state", id).state;
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, mark(level || (up ? "good" : "quiet")), `${device}/${port}`),
      h(
        "td",
        { class: level || null },
        up
          ? layer === "Ethernet"
            ? "active, RoCE"
            : words(state || "active")
          : words([...new Set([state, physical].filter(Boolean))].join(", ") || "down"),
        up ? h("span", { class: "flow quiet" }, measure(bits(status.value("infiniband_port_rate_bytes_per_second", id)))) : null,
      ),
      h(
        "td",
        { class: "num" },
        flow(
          rate(status, "infiniband", "infiniband_port_transmit_bytes_total", id),
          rate(status, "infiniband", "infiniband_port_receive_bytes_total", id),
        ),
        line(`${device}/${port}`, "sends"),
        line(`${device}/${port}`, "receives"),
      ),
      h(
        "td",
        { class: "num" },
        count(errors),
        h("span", { class: "flow quiet" }, known(flaps) ? plural(flaps, "flap") : "flaps unknown"),
        line(`${device}/${port}`, "errors"),
      ),
    );
  });
  return panel(status, "InfiniBand and RoCE", "", ["infiniband"], table(["port", "state, rate", "#traffic", "#errors"], rows));
}

export function network(status) {
  if (status.absent("network")) return null;
  const rows = status.labels("network_up", "device").map((device) => {
    const id = { device };
    const up = status.value("network_up", id) === 1;
    const errors = sum(["receive_errors", "transmit_errors"].flatMap((name) => status.values(`network_${name}_total`, id)));
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, mark(up ? "good" : "quiet"), device),
      h(
        "td",
        {},
        up ? "up" : words(status.info("network_state", id).state || "down"),
        up ? h("span", { class: "flow quiet" }, measure(bits(status.value("network_speed_bytes_per_second", id)))) : null,
      ),
      h(
        "td",
        { class: "num" },
        flow(
          rate(status, "network", "network_transmit_bytes_total", id),
          rate(status, "network", "network_receive_bytes_total", id),
        ),
        line(device, "sends"),
        line(device, "receives"),
      ),
      h("td", { class: "num" }, count(errors), line(device, "errors")),
    );
  });
  return panel(
    status,
    "Network",
    "",
    ["network"],
    rows.length
      ? table(["interface", "state, speed", "#traffic", "#errors"], rows)
      : none(status, "network", "no physical interface"),
  );
}

export function sockets(status) {
  if (status.absent("tcp")) return null;
  const waiting = status.value("tcp_sockets", { state: "time_wait" });
  const buckets = status.value("tcp_time_wait_limit");
  const ports = status.value("tcp_ephemeral_ports");
  const used = status.value("tcp_ephemeral_ports_used");
  const loop = status.value("loopback_up");
  const orphans = status.value("rendezvous_listeners", { orphaned: "true" });
  const orphaned = status.of(null, "rendezvous_listener_age_seconds");
  const listeners = sum(status.values("rendezvous_listeners"));
  const state = (name) => [count(status.value("tcp_sockets", { state: name })), h("span", { class: "unit" }, ` ${words(name)}`)];
  const held = status
    .samples("rendezvous_sockets")
    .filter((sample) => sample.value > 0)
    .map((sample) => `${sample.value} ${words(sample.labels.state)}`);
  return panel(
    status,
    "Sockets",
    "",
    ["tcp", "tcp_limits", "rendezvous", "loopback"],
    [
      figure(
        "TIME_WAIT",
        [count(waiting), h("span", { class: "unit" }, known(buckets) ? ` of ${buckets.toLocaleString("en-US")}` : "")],
        bar(waiting, buckets, {
          level: status.of(null, "tcp_sockets", "rendezvous_sockets"),
          label: `${said(waiting)} sockets in TIME_WAIT of ${said(buckets)}`,
        }),
        line("", "sockets in time_wait"),
      ),
      figure("other states", [state("established"), ", ", state("listen")]),
      figure(
        "ephemeral ports",
        [count(used), h("span", { class: "unit" }, known(ports) ? ` of ${ports.toLocaleString("en-US")}` : "")],
        bar(used, ports, { level: status.of(null, "tcp_ephemeral_ports_used"), label: `${said(used)} ephemeral ports in use of ${said(ports)}` }),
      ),
      figure("rendezvous ports", [
        count(status.value("rendezvous_ports_used")),
        h("span", { class: "unit" }, ` of ${status.value("rendezvous_ports") ?? "unknown"} in use`),
        held.length ? h("div", { class: "quiet" }, held.join(", ")) : null,
      ]),
      figure("rendezvous listeners", [
        count(listeners),
        orphans > 0 ? h("span", { class: orphaned || "quiet" }, ` ${flag(orphaned)}${orphans} detached (parent process ended)`) : null,
      ]),
      figure(
        "loopback connect",
        loop === 0
          ? h("span", { class: "bad" }, "\u2716 refused or lost")
          : known(status.value("loopback_connect_seconds"))
            ? duration(status.value("loopback_connect_seconds"))
            : unknown(),
      ),
    ],
  );
}

export function files(status) {
  if (status.absent("open_files")) return null;
  const entries = status.samples("open_files").map(({ labels, value }) => {
    const limit = status.value("open_files_limit", labels);
    const name =
      labels.scope === "system" ? "whole system" : labels.scope === "process" ? "process closest to its limit" : `job ${labels.training_job}`;
    return figure(
      name,
      [count(value), h("span", { class: "unit" }, known(limit) ? ` of ${limit.toLocaleString("en-US")}` : " of unknown")],
      bar(value, limit, { level: labels.scope === "job" ? status.of(labels.training_job, "open_files") : "", label: `${name}: ${said(value)} open files of ${said(limit)}` }),
    );
  });
  const locked = status
    .labels("job_locked_memory_bytes", "training_job")
    .map((job) => {
      const [limit] = status.samples("job_locked_memory_limit_bytes", { training_job: job });
      return figure(`locked memory, job ${job}`, [
        measure(bytes(Math.max(...status.values("job_locked_memory_bytes", { training_job: job })))),
        h("span", { class: "unit" }, ` of ${limit?.value === "+Inf" ? "unlimited" : bytes(limit?.value).join(" ")}`),
      ]);
    });
  return panel(status, "Open files", "", ["open_files"], [entries, locked]);
}

export function memory(status) {
  const total = status.value("memory_total_bytes");
  const available = status.value("memory_available_bytes");
  const used = known(total) && known(available) ? total - available : undefined;
  const swap = status.value("swap_total_bytes");
  const free = status.value("swap_free_bytes");
  const huge = status.value("huge_pages");
  const ooms = status.value("oom_kills_total");
  const stall = (resource, tasks) => status.value("pressure_stalled_ratio", { resource, tasks });
  const pressures = ["cpu", "memory", "io"].map((resource) =>
    figure(
      resource,
      [
        percent(stall(resource, "some")),
        h("span", { class: "unit" }, " some tasks "),
        stall(resource, "full") === undefined ? null : [percent(stall(resource, "full")), h("span", { class: "unit" }, " all tasks")],
      ],
      bar(stall(resource, "some"), 1, { label: `share of time in which some tasks waited for ${resource}` }),
    ),
  );
  return [
    panel(
      status,
      "Memory",
      "",
      ["memory"],
      [
        figure(
          "in use",
          [measure(bytes(used)), h("span", { class: "unit" }, ` of ${bytes(total).join(" ")}`)],
          bar(used, total, {
            level: status.of(null, "memory_available_bytes"),
            label: `memory in use: ${bytes(used).join(" ")} of ${bytes(total).join(" ")}`,
          }),
        ),
        figure("available", measure(bytes(available)), line("", "available memory")),
        figure("shared", measure(bytes(status.value("memory_shared_bytes")))),
        figure("locked", measure(bytes(status.value("memory_locked_bytes")))),
        figure(
          "swap",
          swap === 0
            ? "none"
            : [
                measure(bytes(known(swap) && known(free) ? swap - free : undefined)),
                h("span", { class: "unit" }, ` of ${bytes(swap).join(" ")}`),
              ],
        ),
        figure(
          "huge pages",
          huge === 0 ? "none" : [count(status.value("huge_pages_free")), h("span", { class: "unit" }, " free of "), count(huge)],
        ),
        figure(
          "OOM kills since boot",
          count(ooms),
        ),
      ],
    ),
    status.absent("pressure") ? null : panel(status, "Pressure (PSI)", "share of time stalled", ["pressure"], pressures),
  ];
}

export function disks(status) {
  if (status.absent("filesystem")) return null;
  const paths = [...new Set([...status.labels("filesystem_size_bytes", "path"), ...status.labels("path_failing", "path")])];
  const entries = paths.map((path) => {
    const id = { path };
    const size = status.value("filesystem_size_bytes", id);
    const free = status.value("filesystem_free_bytes", id);
    const used = known(size) && known(free) ? size - free : undefined;
    const inodes = status.value("filesystem_files", id);
    const left = status.value("filesystem_files_free", id);
    const trouble = status.labels("path_failing", "reason", id).map(words);
    if (status.value("filesystem_read_only", id) === 1) trouble.push("read-only");
    if (status.value("path_writable", id) === 0) trouble.push("not writable");
    const full = known(inodes) && known(left) && inodes > 0 ? 1 - left / inodes : undefined;
    const crowded = known(full) ? status.of(path, "filesystem_files_free") : "";
    const kind = status.info("filesystem_info", id).fstype;
    return figure(
      [path, kind ? h("span", { class: "unit" }, ` ${kind}`) : null],
      [measure(bytes(used)), h("span", { class: "unit" }, ` of ${bytes(size).join(" ")}`)],
      bar(used, size, {
        level: status.of(path, "filesystem_free_bytes"),
        label: `${path}: ${bytes(used).join(" ")} used of ${bytes(size).join(" ")}`,
      }),
      trouble.length ? h("div", { class: "bad" }, `\u2716 ${trouble.join(", ")}`) : null,
      crowded ? h("div", { class: crowded }, `${flag(crowded)}${Math.round(full * 100)} % of inodes used`) : null,
    );
  });
  return panel(
    status,
    "Disks",
    "",
    ["filesystem"],
    entries.length ? entries : none(status, "filesystem", "no paths configured"),
  );
}
