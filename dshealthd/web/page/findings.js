// What deserves a look, as [level, where, what].
//
// Nothing here judges what only a fleet can tell. What is called out is what the node, a part or its driver says of itself: a part that
// cannot be read, a part's own limit that is passed, a source that fails, something that is nearly full.

import { h } from "./elements.js";
import { duration, known, sum, words } from "./numbers.js";
import { MARKS, NEARLY_FULL, mark } from "./pieces.js";
import { accusations } from "./probes.js";

const RECOVERY = [
  "",
  "reset the GPU",
  "reboot the node",
  "drain its peers",
  "drain and reset",
  "recover the IMEX domain",
  "reset its bus",
];
export const APPLICATION_XIDS = new Set(["13", "31", "43", "45", "68", "69", "141"]); // the application's doing by themselves, or to be ignored, after NVIDIA's catalogue

export function findings(status) {
  const found = [];
  const add = (level, where, what) => found.push([level, where, what]);
  const each = (name, test, report, labels) =>
    status
      .samples(name, labels)
      .filter((sample) => test(sample.value))
      .forEach((sample) => report(sample.labels, sample.value));
  const one = (value) => value === 1;
  const none = (value) => value === 0;

  accusations(status).forEach((finding) => add(...finding));
  const visible = status.value("gpus_visible");
  const expected = status.value("gpus_expected");
  if (known(visible) && known(expected) && visible < expected)
    add("bad", "GPUs", `${visible} of ${expected} are visible to the driver's library`);
  each("gpu_up", none, ({ gpu }) =>
    add("bad", `GPU ${gpu}`, status.labels("gpu_fault", "reason", { gpu }).map(words).join(", ") || "cannot be read"),
  );
  each(
    "gpu_recovery_action",
    (value) => value > 0,
    ({ gpu }, value) => add("bad", `GPU ${gpu}`, `the driver asks to ${RECOVERY[value] || `act (${value})`}`),
  );
  each("gpu_temperature_celsius", known, ({ gpu, sensor }, value) => {
    const limit = (name) => status.value("gpu_temperature_limit_celsius", { gpu, limit: name });
    const [slow, max] = sensor === "core" ? [limit("slowdown"), limit("max_operating")] : [undefined, limit("memory_max")];
    if (value >= slow) add("bad", `GPU ${gpu}`, `${sensor} at ${value} \u00b0C; the part slows down at ${slow} \u00b0C`);
    else if (value >= max)
      add("warn", `GPU ${gpu}`, `${sensor} at ${value} \u00b0C; its highest operating temperature is ${max} \u00b0C`);
  });
  const slowed = new Map();
  each("gpu_throttle_active", one, ({ gpu, reason }) => {
    if (reason.startsWith("hw_") || reason === "sw_thermal_slowdown")
      slowed.set(gpu, [...(slowed.get(gpu) || []), words(reason)]);
  });
  slowed.forEach((reasons, gpu) =>
    add(
      reasons.some((reason) => reason.startsWith("hw")) ? "bad" : "warn",
      `GPU ${gpu}`,
      `clocks held down: ${reasons.join(", ")}`,
    ),
  );
  each(
    "gpu_ecc_errors_total",
    (value) => value > 0,
    ({ gpu }, value) => add("bad", `GPU ${gpu}`, `${value} uncorrected memory errors since the driver was loaded`),
    { type: "uncorrected", counter: "volatile" },
  );
  each("gpu_remapped_rows_failed", one, ({ gpu }) =>
    add("bad", `GPU ${gpu}`, "a memory row could not be remapped: exchange the GPU"),
  );
  each("gpu_remapped_rows_pending", one, ({ gpu }) =>
    add("warn", `GPU ${gpu}`, "a memory row waits for the next GPU reset to be remapped"),
  );
  each("gpu_retired_pages_pending", one, ({ gpu }) =>
    add("warn", `GPU ${gpu}`, "a memory page waits for the next GPU reset to be retired"),
  );
  each("gpu_sram_threshold_exceeded", one, ({ gpu }) =>
    add("bad", `GPU ${gpu}`, "uncorrected SRAM errors have passed NVIDIA's limit for a replacement"),
  );
  each("gpu_fabric_healthy", none, ({ gpu }) => add("bad", `GPU ${gpu}`, "the NVLink fabric is not healthy"));
  const links = status.labels("nvlink_up", "gpu").map((gpu) => [gpu, sum(status.values("nvlink_up", { gpu }))]);
  const most = Math.max(...links.map(([, up]) => up));
  links
    .filter(([, up]) => up < most)
    .forEach(([gpu, up]) => {
      const down = status
        .samples("nvlink_up", { gpu })
        .filter((sample) => sample.value === 0)
        .map((sample) => sample.labels.link);
      add("warn", `GPU ${gpu}`, `${up} NVLinks up, its peers have ${most}; down: ${down.join(", ")}`);
    });
  each("pcie_link_width", known, ({ gpu }, value) => {
    const max = status.value("pcie_link_width_max", { gpu });
    if (value < max) add("warn", `GPU ${gpu}`, `PCIe runs with ${value} of ${max} lanes`);
  });
  each(
    "xid_errors_total",
    (value) => value > 0,
    (labels, value) => {
      if (APPLICATION_XIDS.has(labels.xid)) return;
      const last = status.value("xid_last_timestamp_seconds", labels);
      const where = labels.gpu === "" ? labels.pci || labels.pci_bus_id || "a GPU" : `GPU ${labels.gpu}`;
      add(
        "bad",
        where,
        `Xid ${labels.xid}, ${value}\u00d7${known(last) ? `, last ${duration(Math.max(0, status.document.time - last))} ago` : ""}`,
      );
    },
  );
  each("infiniband_port_up", none, ({ device, port }) => {
    const physical = status.info("infiniband_port_physical_state", { device, port }).state;
    if (physical !== "disabled") add("warn", `${device}/${port}`, `port is down${physical ? `: ${words(physical)}` : ""}`);
  });
  each("loopback_up", none, () => add("bad", "loopback", "a connection to 127.0.0.1 was refused or lost"));
  each("filesystem_read_only", one, ({ path }) => add("bad", path, "is read-only"));
  each("path_writable", none, ({ path }) => add("bad", path, "cannot be written to"));
  each("path_failing", one, ({ path, reason }) => add("bad", path, words(reason)));
  each("filesystem_free_bytes", known, ({ path }, value) => {
    const size = status.value("filesystem_size_bytes", { path });
    if (size > 0 && value <= (1 - NEARLY_FULL) * size) add("warn", path, `${Math.round(100 * (1 - value / size))} % full`);
  });
  each("open_files", known, (labels, value) => {
    const limit = status.value("open_files_limit", labels);
    if (value >= NEARLY_FULL * limit)
      add(
        "warn",
        labels.job ? `job ${labels.job}` : "open files",
        `${value} open files of ${limit}${labels.scope === "process" ? " in one process" : ""}`,
      );
  });
  const waiting = status.value("tcp_sockets", { state: "time_wait" });
  if (waiting >= NEARLY_FULL * status.value("tcp_time_wait_limit"))
    add("warn", "sockets", `${waiting} in TIME_WAIT, which is nearly all that the kernel keeps`);
  if (status.value("tcp_ephemeral_ports_used") >= NEARLY_FULL * status.value("tcp_ephemeral_ports"))
    add("warn", "sockets", "nearly all ephemeral ports are in use");
  each(
    "rendezvous_listeners",
    (value) => value > 0,
    (_, value) => add("warn", "rendezvous", `${value} ports held by a process whose launcher is gone`),
    { orphaned: "true" },
  );
  each("clock_synchronized", none, () => add("warn", "clock", "is not synchronised"));
  each(
    "worker_stuck",
    (value) => value > 0,
    ({ worker }, value) =>
      add(
        "bad",
        `worker ${worker}`,
        `${value} ${value > 1 ? "processes hang" : "process hangs"} in the kernel and cannot be killed`,
      ),
  );
  each("config_last_reload_successful", none, () =>
    add("warn", "configuration", "the last reload failed; the one before is in force"),
  );
  each("web_config_last_reload_successful", none, () =>
    add("warn", "web config", "the last reload failed; the one before is in force"),
  );
  status.document.collectors
    .filter((collector) => collector.state === "failing")
    .forEach((collector) =>
      add(
        "bad",
        `collector ${collector.name}`,
        [words(collector.reason || "fails"), collector.detail].filter(Boolean).join(": "),
      ),
    );
  const covered = new Set(found.map(([, where]) => where.toLowerCase()));
  const parts = new Map();
  status.document.collectors.forEach((collector) =>
    collector.faults.forEach((fault) => parts.set(`${fault.part} ${fault.reason}`, fault)),
  );
  parts.forEach((fault) => {
    if (!covered.has(fault.part.toLowerCase()))
      add("warn", fault.part, `${words(fault.reason)}${fault.detail ? `: ${fault.detail}` : ""}`);
  });
  return found.sort(([one_], [other]) => (one_ === "bad" ? 0 : 1) - (other === "bad" ? 0 : 1));
}

export function worst(found) {
  return found.some(([level]) => level === "bad") ? "bad" : found.length ? "warn" : "good";
}

export function verdict(status, found) {
  const read = status.document.collectors.filter((collector) => collector.state === "ok").length;
  const apart = status.document.collectors.filter((collector) => collector.state === "not available").length;
  const pending = status.document.collectors.filter((collector) => collector.state === "pending").length;
  const rest = `${read} sources read${apart ? `, ${apart} not on this machine` : ""}${pending ? `, ${pending} not read yet` : ""}`;
  const title = found.length
    ? `${found.length} ${found.length > 1 ? "things deserve" : "thing deserves"} a look`
    : "No fault seen";
  return h(
    "section",
    { class: `verdict ${worst(found)}`, "aria-label": "Summary" },
    h("h2", {}, mark(worst(found)), title, h("span", { class: "quiet" }, `  ${rest}`)),
    found.length
      ? h(
          "ul",
          {},
          found.map(([level, where, what]) =>
            h(
              "li",
              {},
              h("span", {}, mark(level), h("span", { class: "spoken" }, MARKS[level][1])),
              h("b", {}, where),
              h("span", {}, what),
            ),
          ),
        )
      : null,
  );
}

export function absences(status) {
  const gone = status.document.collectors.filter((collector) => collector.state === "not available");
  return gone.length
    ? h(
        "p",
        { class: "absent" },
        "Not on this machine: ",
        gone.map((collector, index) => [
          index ? " \u00b7 " : "",
          h("b", {}, words(collector.name)),
          collector.detail ? ` (${collector.detail})` : "",
        ]),
      )
    : null;
}
