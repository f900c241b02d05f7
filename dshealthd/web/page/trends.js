// The last hour of a figure as a small line, with the findings that began in it as marks. The API says it in words.

import { h } from "./elements.js";
import { duration } from "./numbers.js";
import { LEVELS, MARKS } from "./pieces.js";
import { get } from "./poll.js";

const EVERY = 30; // seconds between two requests: the length of a point
const known = { asked: -EVERY, lines: new Map() };
const HEIGHT = 26;

async function ask(now) {
  known.asked = now;
  try {
    const document = await get("api/v1/trends", 4000);
    known.lines = new Map(document.lines.map((line) => [`${line.part} ${line.what}`, drawn(line, document)]));
  } catch {
    known.lines = new Map(); // no line is better than one that ends in the past
  }
}

// A point is a number, the lowest and highest of its readings, or null: a gap. The scale begins no higher than a tenth below the highest.
function path(points) {
  const all = points.filter((point) => point !== null).flat();
  const top = Math.max(...all);
  const bottom = Math.min(...all, 0.9 * top);
  const y = (value) => (HEIGHT - 3 - ((value - bottom) / (top - bottom || 1)) * (HEIGHT - 6)).toFixed(1);
  let pen = "M";
  return points
    .map((point, x) => {
      if (point === null) {
        pen = "M";
        return "";
      }
      const [low, high] = Array.isArray(point) ? point : [point, point];
      const step = `${pen}${x} ${y(high)}${low === high ? "" : `V${y(low)}`}h1`;
      pen = "L";
      return step;
    })
    .join("");
}

function drawn(line, { time, step_seconds: step, marks }) {
  const { part, what, says, points } = line;
  const here = marks.filter((mark) => mark.part === part);
  const told = here.map((mark) => `${MARKS[LEVELS[mark.severity]][1]} ${duration(time - mark.begin)} ago: ${mark.says}`);
  return {
    title: [`${part || "this node"} ${what}: ${says}`, ...told].join("; "),
    d: path(points),
    marks: here.map(({ begin, severity }) => [LEVELS[severity], `M${(points.length - (time - begin) / step).toFixed(1)} 0V${HEIGHT}`]),
    width: points.length,
  };
}

// The line of a part's figure; nothing while there is none.
export function line(part, what) {
  const found = known.lines.get(`${part} ${what}`);
  if (!found) return null;
  return h(
    "svg",
    { class: "trend", viewBox: `0 0 ${found.width} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
    h("title", {}, found.title),
    found.marks.map(([level, d]) => h("path", { class: level, d })),
    h("path", { d: found.d }),
  );
}

// Requests the lines anew, if it is time to.
export function refresh(status) {
  const now = status.document.time;
  if (Math.abs(now - known.asked) >= EVERY) ask(now);
}
