// The status document, by metric and labels

import { known } from "./numbers.js";
import { LEVELS } from "./pieces.js";

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
  absent(name) {
    const collector = this.collectors.get(name);
    return !collector || collector.state === "not available";
  }
}

// A rate needs two answers.

const previous = new Map();

export function rate(key, value, time) {
  if (!known(value)) return undefined;
  const entry = previous.get(key) || { value, time, rate: undefined };
  if (value !== entry.value || time - entry.time > 15) {
    entry.rate = time > entry.time && value >= entry.value ? (value - entry.value) / (time - entry.time) : undefined;
    entry.value = value;
    entry.time = time;
  } else if (entry.rate === undefined && time - entry.time > 5) {
    entry.rate = 0;
  }
  previous.set(key, entry);
  return entry.rate;
}
