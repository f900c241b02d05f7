// Links, sockets, files, memory, disks.

import { h } from "./elements.js";
import { bits, bytes, count, duration, known, measure, percent, plural, said, sum, unit, unknown, words } from "./numbers.js";
import { bar, figure, flag, flow, mark, panel, share, table } from "./pieces.js";
import { rate } from "./status.js";
import { line } from "./trends.js";

// That a source has nothing; what could not be read may have anything.
const none = (status, collector, text) => (status.collectors.get(collector).state === "ok" ? h("p", { class: "quiet" }, text) : null);

const linkState = (status, up, state, speed, id) => [
  state,
  up ? h("span", { class: "flow quiet" }, measure(bits(status.value(speed, id)))) : null,
];

function traffic(status, collector, metric, id, part) {
  const [sends, receives] = ["transmit", "receive"].map((way) => rate(status, collector, `${metric}_${way}_bytes_total`, id));
  return h("td", { class: "num" }, flow(sends, receives), line(part, "sends"), line(part, "receives"));
}

export function infiniband(status) {
  if (status.absent("infiniband")) return null;
  const rows = status.samples("infiniband_port_up").map((sample) => {
    const { device, port } = sample.labels;
    const id = { device, port };
    const part = `${device}/${port}`;
    const state = status.info("infiniband_port_state", id).state;
    const errors = sum(status.values("infiniband_port_errors_total", id));
    const flaps = status.value("infiniband_port_flaps_total", id);
    const up = sample.value === 1;
    const level = status.of(part);
    const roce = status.info("infiniband_port_info", id).link_layer === "Ethernet";
    // RoCE's drivers call a port disabled that has no carrier.
    const physical = roce ? "" : status.info("infiniband_port_physical_state", id).state;
    const active = roce ? "active, RoCE" : words(state || "active");
    const inactive = words([...new Set([state, physical].filter(Boolean))].join(", ") || "down");
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, mark(level || (up ? "good" : "quiet")), part),
      h("td", { class: level || null }, linkState(status, up, up ? active : inactive, "infiniband_port_rate_bytes_per_second", id)),
      traffic(status, "infiniband", "infiniband_port", id, part),
      h(
        "td",
        { class: "num" },
        count(errors),
        h("span", { class: "flow quiet" }, known(flaps) ? plural(flaps, "flap") : "flaps unknown"),
        line(part, "errors"),
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
    const state = up ? "up" : words(status.info("network_state", id).state || "down");
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, mark(up ? "good" : "quiet"), device),
      h("td", {}, linkState(status, up, state, "network_speed_bytes_per_second", id)),
      traffic(status, "network", "network", id, device),
      h("td", { class: "num" }, count(errors), line(device, "errors")),
    );
  });
  const heads = ["interface", "state, speed", "#traffic", "#errors"];
  return panel(status, "Network", "", ["network"], rows.length ? table(heads, rows) : none(status, "network", "no physical interface"));
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
  const state = (name) => [count(status.value("tcp_sockets", { state: name })), unit(` ${words(name)}`)];
  const held = status
    .samples("rendezvous_sockets")
    .filter((sample) => sample.value > 0)
    .map((sample) => `${sample.value} ${words(sample.labels.state)}`);
  const took = status.value("loopback_connect_seconds");
  return panel(
    status,
    "Sockets",
    "",
    ["tcp", "tcp_limits", "rendezvous", "loopback"],
    [
      share("TIME_WAIT", waiting, buckets, {
        level: status.of(null, "tcp_sockets", "rendezvous_sockets"),
        label: `${said(waiting)} sockets in TIME_WAIT of ${said(buckets)}`,
        line: line("", "sockets in time_wait"),
      }),
      figure("other states", [state("established"), ", ", state("listen")]),
      share("ephemeral ports", used, ports, {
        level: status.of(null, "tcp_ephemeral_ports_used"),
        label: `${said(used)} ephemeral ports in use of ${said(ports)}`,
      }),
      figure("rendezvous ports", [
        count(status.value("rendezvous_ports_used")),
        unit(` of ${status.value("rendezvous_ports") ?? "unknown"} in use`),
        held.length ? h("div", { class: "quiet" }, held.join(", ")) : null,
      ]),
      figure("rendezvous listeners", [
        count(listeners),
        orphans > 0 ? h("span", { class: orphaned || "quiet" }, ` ${flag(orphaned)}${orphans} detached (parent process ended)`) : null,
      ]),
      figure(
        "loopback connect",
        loop === 0 ? h("span", { class: "bad" }, "\u2716 refused or lost") : known(took) ? duration(took) : unknown(),
      ),
    ],
  );
}

const SCOPES = { system: "whole system", process: "process closest to its limit" };

export function files(status) {
  if (status.absent("open_files")) return null;
  const entries = status.samples("open_files").map(({ labels, value }) => {
    const limit = status.value("open_files_limit", labels);
    const name = SCOPES[labels.scope] || `job ${labels.training_job}`;
    const look = {
      level: labels.scope === "job" ? status.of(labels.training_job, "open_files") : "",
      label: `${name}: ${said(value)} open files of ${said(limit)}`,
    };
    return share(name, value, limit, look, " of unknown");
  });
  const locked = status.labels("job_locked_memory_bytes", "training_job").map((job) => {
    const [limit] = status.samples("job_locked_memory_limit_bytes", { training_job: job });
    return figure(`locked memory, job ${job}`, [
      measure(bytes(Math.max(...status.values("job_locked_memory_bytes", { training_job: job })))),
      unit(` of ${limit?.value === "+Inf" ? "unlimited" : bytes(limit?.value).join(" ")}`),
    ]);
  });
  return panel(status, "Open files", "", ["open_files"], [entries, locked]);
}

const of = (total) => unit(` of ${bytes(total).join(" ")}`);

export function memory(status) {
  const total = status.value("memory_total_bytes");
  const available = status.value("memory_available_bytes");
  const used = known(total) && known(available) ? total - available : undefined;
  const swap = status.value("swap_total_bytes");
  const free = status.value("swap_free_bytes");
  const huge = status.value("huge_pages");
  const stall = (resource, tasks) => status.value("pressure_stalled_ratio", { resource, tasks });
  const pressures = ["cpu", "memory", "io"].map((resource) =>
    figure(
      resource,
      [
        percent(stall(resource, "some")),
        unit(" some tasks "),
        stall(resource, "full") === undefined ? null : [percent(stall(resource, "full")), unit(" all tasks")],
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
          [measure(bytes(used)), of(total)],
          bar(used, total, {
            level: status.of(null, "memory_available_bytes"),
            label: `memory in use: ${bytes(used).join(" ")} of ${bytes(total).join(" ")}`,
          }),
        ),
        figure("available", measure(bytes(available)), line("", "available memory")),
        figure("shared", measure(bytes(status.value("memory_shared_bytes")))),
        figure("locked", measure(bytes(status.value("memory_locked_bytes")))),
        figure("swap", swap === 0 ? "none" : [measure(bytes(known(swap) && known(free) ? swap - free : undefined)), of(swap)]),
        figure("huge pages", huge === 0 ? "none" : [count(status.value("huge_pages_free")), unit(" free of "), count(huge)]),
        figure("OOM kills since boot", count(status.value("oom_kills_total"))),
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
      [path, kind ? unit(` ${kind}`) : null],
      [measure(bytes(used)), of(size)],
      bar(used, size, {
        level: status.of(path, "filesystem_free_bytes"),
        label: `${path}: ${bytes(used).join(" ")} used of ${bytes(size).join(" ")}`,
      }),
      trouble.length ? h("div", { class: "bad" }, `\u2716 ${trouble.join(", ")}`) : null,
      crowded ? h("div", { class: crowded }, `${flag(crowded)}${Math.round(full * 100)} % of inodes used`) : null,
    );
  });
  return panel(status, "Disks", "", ["filesystem"], entries.length ? entries : none(status, "filesystem", "no paths configured"));
}
