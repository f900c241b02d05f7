// The status document, by metric and labels

import { known } from "./numbers.js";
import { LEVELS } from "./pieces.js";

const SAME = 0.05; // seconds: both times are rounded to a millisecond, and no collector has a shorter interval than 0.1 s

export class Status {
  constructor(document) {
    this.document = document;
    // An agent without a verdict is unknown, not healthy.
    this.findings = document.findings || [];
    this.watched = document.watched || [];
    this.verdict = document.verdict || "unknown";
    this.collectors = new Map(document.collectors.map((collector) => [collector.name, collector]));
  }
  // The class of the worst finding that passes the test; the API lists the worst first. Empty if there is none.
  level(test) {
    const finding = this.findings.find(test);
    return finding ? LEVELS[finding.severity] : "";
  }
  of(part, ...sources) {
    return this.level(
      (finding) =>
        (part === null || finding.part === part) &&
        (!sources.length || sources.some((source) => finding.source === `dshealthd_${source}`)),
    );
  }
  samples(name, labels = {}) {
    const family = this.document.metrics[`dshealthd_${name}`];
    const wanted = Object.entries(labels);
    return family ? family.samples.filter((sample) => wanted.every(([key, value]) => sample.labels[key] === value)) : [];
  }
  value(name, labels) {
    const [sample] = this.samples(name, labels);
    return sample && known(sample.value) ? sample.value : undefined;
  }
  values(name, labels) {
    return this.samples(name, labels)
      .map((sample) => sample.value)
      .filter(known);
  }
  labels(name, key, labels) {
    const found = [...new Set(this.samples(name, labels).map((sample) => sample.labels[key]))];
    return found.sort((one, other) => one.localeCompare(other, "en", { numeric: true }));
  }
  info(name, labels) {
    const [sample] = this.samples(name, labels);
    return sample ? sample.labels : {};
  }
  // The time of a collector's last sample, by the agent's clock.
  sampled(name) {
    const age = this.collectors.get(name)?.age_seconds;
    return known(age) ? this.document.time - age : undefined;
  }
  // Whether a collector has read a part: only then does the part lack what is not among its samples.
  hasRead(name, part) {
    const collector = this.collectors.get(name);
    return collector?.state === "ok" && collector.faults.every((fault) => fault.part.toLowerCase() !== part.toLowerCase());
  }
  absent(name) {
    const collector = this.collectors.get(name);
    return !collector || collector.state === "not available";
  }
}

// A rate is that between a collector's last two samples: of one alone it is unknown.

const previous = new Map();

export function rate(status, collector, name, labels) {
  const value = status.value(name, labels);
  const at = status.sampled(collector);
  if (!known(value) || !known(at)) return undefined;
  const key = JSON.stringify([name, labels]);
  const last = previous.get(key);
  if (last && Math.abs(at - last.at) < SAME) return last.rate;
  const grown = last && at > last.at && value >= last.value;
  const entry = { value, at, rate: grown ? (value - last.value) / (at - last.at) : undefined };
  previous.set(key, entry);
  return entry.rate;
}
