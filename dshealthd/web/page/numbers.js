// Numbers. An unknown value is undefined here and "unknown" on the page, never 0.

import { h } from "./elements.js";

export const known = (value) => typeof value === "number" && Number.isFinite(value);
export const unknown = () => h("span", { class: "unknown" }, "unknown");
export const unit = (text) => h("span", { class: "unit" }, text);
export const show = (value, name, digits = 0) => (known(value) ? [value.toFixed(digits), unit(` ${name}`)] : [unknown()]);
export const said = (value) => (known(value) ? value.toFixed(0) : "unknown");
export const count = (value) => (known(value) ? value.toLocaleString("en-US", { maximumFractionDigits: 0 }) : unknown());
export const percent = (value) => (known(value) ? show(value * 100, "%", value < 0.0995 && value > 0 ? 1 : 0) : [unknown()]);
export const sum = (values) => (values.length ? values.reduce((total, value) => total + value, 0) : undefined);

function scaled(value, base, units) {
  if (!known(value)) return ["unknown", ""];
  let index = 0;
  while (Math.abs(value) >= base * 0.9995 && index < units.length - 1) {
    value /= base;
    index += 1;
  }
  return [value.toFixed(index === 0 || value >= 99.95 ? 0 : 1), units[index]];
}
export const bytes = (value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
export const bits = (value) => scaled(value * 8, 1000, ["bit/s", "kb/s", "Mb/s", "Gb/s", "Tb/s"]);
export const measure = ([text, name]) => (name ? [text, unit(` ${name}`)] : [unknown()]);

export function duration(seconds) {
  if (!known(seconds)) return "unknown";
  if (seconds > 0 && seconds < 0.00005) return "< 0.1 ms";
  if (seconds > 0 && seconds < 1)
    return seconds < 0.0995 ? `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms` : `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}
export const seconds = (value) => (known(value) ? duration(value) : "\u2013");
export const age = (seconds) => (seconds < 1 ? "< 1 s" : duration(seconds));
// The time of day, with the date if that is not today's.
export function clock(date) {
  const today = date.toDateString() === new Date().toDateString();
  return `${today ? "" : `${date.toLocaleDateString("en-US", { month: "short", day: "numeric" })}, `}${date.toLocaleTimeString("en-GB")}`;
}
export const zone = () =>
  new Intl.DateTimeFormat("en-GB", { timeZoneName: "short" }).formatToParts(new Date()).find((part) => part.type === "timeZoneName").value;
export const plural = (number, name) => `${number} ${name}${number === 1 ? "" : "s"}`;
export const words = (name) => name.replaceAll("_", " ");
