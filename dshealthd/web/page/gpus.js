// The GPUs: rows on a wide screen, cards on a narrow one.

import { h } from "./elements.js";
import { bytes, count, known, percent, plural, said, show, sum, unit, unknown, words } from "./numbers.js";
import { bar, flag, mark, panel } from "./pieces.js";
import { line } from "./trends.js";

const meter = (figures, ...rest) => [h("div", { class: "figures" }, figures), ...rest];

// The limits of a GPU's temperature that its bar marks.
const MARKED = { max: "highest operating temperature", slowdown: "slows down at", shutdown: "shuts down at" };

function thermometer(status, gpu, sensor, temperature, limits) {
  const top = known(limits.shutdown) ? limits.shutdown + 3 : known(limits.slowdown) ? limits.slowdown + 6 : 100;
  const low = 20; // nothing in a machine room is colder, and only the hot end matters
  const marks = Object.entries(MARKED)
    .filter(([name]) => known(limits[name]))
    .map(([name, says]) => ({ at: limits[name] - low, title: `${says} ${limits[name]} \u00b0C`, last: name === "shutdown" }));
  const hot = (finding) => finding.part === `GPU ${gpu}` && finding.source === "dshealthd_gpu_temperature_celsius";
  const level = status.level((finding) => hot(finding) && finding.value === temperature);
  const told = marks.map((each) => each.title).join(", ") || "limits unknown";
  const limit = known(limits.slowdown) ? limits.slowdown : limits.max;
  return meter(
    [
      h("span", { class: level || null }, show(temperature, "\u00b0C"), level ? ` ${flag(level).trim()}` : ""),
      known(limit) ? unit(` of ${limit}`) : "",
    ],
    bar(known(temperature) ? Math.max(0, temperature - low) : undefined, top - low, {
      marks,
      level,
      label: `GPU ${gpu} ${sensor} ${said(temperature)} \u00b0C; ${told}`,
    }),
    line(`GPU ${gpu}`, `${sensor} temperature`),
  );
}

function gpuNotes(status, id) {
  const throttles = status
    .samples("gpu_throttle_active", id)
    .filter((sample) => sample.value === 1)
    .map((sample) => sample.labels.reason);
  const held = throttles.filter((reason) => reason !== "gpu_idle");
  const clockNow = status.value("gpu_clock_hertz", { ...id, domain: "sm" });
  const part = `GPU ${id.gpu}`;
  const slow = status.of(part, "gpu_throttle_active");
  const calm = status.samples("gpu_throttle_active", id).length ? (throttles.length ? "idle" : "not throttled") : unknown();
  const clocks = [
    h("div", {}, known(clockNow) ? show(clockNow / 1e6, "MHz") : unknown()),
    held.length
      ? h("div", { class: slow || "quiet" }, `${flag(slow)}throttled: ${held.map(words).join(", ")}`)
      : h("div", { class: "quiet" }, calm),
  ];
  const ecc = (type, counter) => status.value("gpu_ecc_errors_total", { ...id, type, counter });
  const uncorrected = ecc("uncorrected", "volatile");
  const corrected = ecc("corrected", "volatile");
  const erring = status.of(part, "gpu_ecc_errors_total");
  const pending = status.value("gpu_remapped_rows_pending", id);
  const failed = status.value("gpu_remapped_rows_failed", id);
  const rows = sum(status.values("gpu_remapped_rows", id));
  const pages = sum(status.values("gpu_retired_pages", id));
  const replaced = known(rows) ? `${plural(rows, "row")} remapped` : known(pages) ? `${plural(pages, "page")} retired` : unknown();
  const errors = [
    known(uncorrected) || known(corrected)
      ? h("div", { class: erring || null }, flag(erring), count(uncorrected), unit(" uncorr. "), count(corrected), unit(" corr."))
      : unknown(),
    failed === 1
      ? h("div", { class: status.of(part, "gpu_remapped_rows_failed") }, "\u2716 row remap failed")
      : pending === 1
        ? h("div", { class: status.of(part, "gpu_remapped_rows_pending") }, "\u25b2 row remap pending")
        : h("div", { class: "quiet" }, replaced),
  ];
  const links = status.values("nvlink_up", id);
  const width = status.value("pcie_link_width", id);
  const widest = status.value("pcie_link_width_max", id);
  const narrow = status.of(part, "pcie_link_width", "pcie_link_generation");
  const linked = status.level((finding) => finding.part === part && finding.slug === "bad-link");
  const generation = status.value("pcie_link_generation", id);
  const connections = [
    links.length
      ? h("div", { class: linked || null }, flag(linked), `${sum(links)}/${links.length}`, unit(" NVLink"))
      : h("div", { class: "quiet" }, status.hasRead("nvlink", part) ? "no NVLink" : ["NVLink ", unknown()]),
    h(
      "div",
      { class: narrow || "quiet" },
      flag(narrow),
      known(width)
        ? `PCIe ${known(generation) ? `${generation}.0 ` : ""}\u00d7${width}${narrow && known(widest) ? ` of ${widest}` : ""}`
        : unknown(),
    ),
  ];
  return { clocks, errors, connections };
}

const cell = (label, kind, ...content) => h("div", { class: kind || null }, h("span", { class: "label" }, label), content);

function gpuRow(status, gpu) {
  const id = { gpu };
  const part = `GPU ${gpu}`;
  const faults = status.labels("gpu_fault", "reason", id);
  const title = h("h3", {}, mark(status.of(part) || "good"), part);
  if (status.value("gpu_up", id) !== 1) {
    return h(
      "li",
      {},
      title,
      h(
        "div",
        { class: "lost-gpu" },
        h("b", { class: "bad" }, faults.length ? faults.map(words).join(", ") : "cannot be read"),
        h("span", { class: "quiet" }, " \u2013 its values are unknown"),
        ["core temperature", "memory temperature", "memory", "utilization", "power"].map((what) => line(part, what)),
      ),
    );
  }
  const core = status.value("gpu_temperature_celsius", { ...id, sensor: "core" });
  const memory = status.value("gpu_temperature_celsius", { ...id, sensor: "memory" });
  const limit = (name) => status.value("gpu_temperature_limit_celsius", { ...id, limit: name });
  const limits = { max: limit("max_operating"), slowdown: limit("slowdown"), shutdown: limit("shutdown") };
  const used = status.value("gpu_memory_used_bytes", id);
  const total = status.value("gpu_memory_total_bytes", id);
  const busy = status.value("gpu_utilization_ratio", id);
  const power = status.value("gpu_power_watts", id);
  const most = status.value("gpu_power_limit_watts", { ...id, limit: "enforced" });
  const notes = gpuNotes(status, id);
  return h(
    "li",
    {},
    title,
    cell("core temp.", "", thermometer(status, gpu, "core", core, limits)),
    cell("memory temp.", "", thermometer(status, gpu, "memory", memory, { max: limit("memory_max") })),
    cell(
      "memory",
      "",
      meter(
        [
          h("span", {}, known(used) ? (used / 2 ** 30).toFixed(1) : unknown(), unit(" GiB")),
          unit(known(total) ? ` of ${(total / 2 ** 30).toFixed(0)}` : ""),
        ],
        bar(used, total, { label: `${part} memory in use: ${bytes(used).join(" ")} of ${bytes(total).join(" ")}` }),
        line(part, "memory"),
      ),
    ),
    cell(
      "utilization",
      "",
      meter(
        h("span", {}, percent(busy)),
        bar(busy, 1, { label: `${part} utilization ${said(busy * 100)} %` }),
        line(part, "utilization"),
      ),
    ),
    cell(
      "power",
      "",
      meter(
        [h("span", {}, show(power, "W")), unit(known(most) ? ` of ${most.toFixed(0)}` : "")],
        bar(power, most, { label: `${part} power ${said(power)} W of ${said(most)} W` }),
        line(part, "power"),
      ),
    ),
    cell("clock", "notes", notes.clocks),
    cell("ECC since load", "notes", notes.errors),
    cell("links", "notes", notes.connections),
  );
}

export function gpus(status) {
  const all = status.labels("gpu_up", "gpu");
  const expected = status.value("gpus_expected");
  const visible = status.value("gpus_visible");
  if (!all.length && status.absent("gpu") && !(expected > 0)) return null;
  const driver = status.info("gpu_driver_info");
  const names = status.labels("gpu_info", "name");
  const answering = sum(status.values("gpu_up"));
  const about = [
    `${answering ?? "unknown number"}${known(expected) ? ` of ${expected}` : ""} answer`,
    known(visible) && known(expected) && visible !== expected ? `${visible} listed` : "",
    names.join(", "),
    driver.driver ? `driver ${driver.driver}` : "",
    driver.cuda ? `CUDA ${driver.cuda}` : "",
  ];
  const heads = ["", "Core temperature", "Memory temperature", "Memory", "Utilization", "Power", "Clock", "ECC since load", "Links"];
  const content = all.length
    ? h(
        "ul",
        { class: "gpus" },
        h("li", { class: "heads", "aria-hidden": "true" }, heads.map((head) => h("span", {}, head))),
        all.map((gpu) => gpuRow(status, gpu)),
      )
    : h("p", { class: "unknown" }, "no GPU has been read");
  const legend = h(
    "p",
    { class: "quiet legend" },
    "Ticks on temperature bars: highest operating, slowdown and (red) shutdown temperature of the GPU itself. Lines: the last hour, with a mark where a finding began.",
  );
  return panel(status, "GPUs", about.filter(Boolean).join(" \u00b7 "), ["gpu", "ecc", "nvlink", "pcie"], [content, all.length ? legend : null]);
}
