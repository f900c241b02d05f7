// Requests a document every few seconds, and shows in the banner when the agent no longer answers.

import { clock, duration } from "./numbers.js";

const HIDDEN = 15; // times as long between requests while the page is hidden

// Times are in milliseconds: `every` between requests, `patience` for an answer, `lostAfter` without an answer until the banner appears.
// `render` receives the last document, the time of its arrival, and whether the agent is lost; `nothing` is said while there is none.
export function poll(path, { every, patience, lostAfter, nothing, render }) {
  const page = { last: null, answered: 0, failed: "", timer: 0 };

  function show() {
    const silence = Date.now() - page.answered;
    const lost = silence > lostAfter;
    if (page.last) render(page.last, page.answered, lost);
    const banner = document.getElementById("banner");
    document.body.classList.toggle("lost", lost && page.last !== null);
    banner.hidden = !lost;
    if (!lost) return;
    const since = page.last
      ? `The agent has not answered for ${duration(silence / 1000)}. The data shown is from ${clock(new Date(page.answered))}.`
      : nothing;
    const text = `${since}${page.failed ? ` (${page.failed})` : ""}`;
    if (banner.textContent !== text) banner.textContent = text;
  }

  async function ask() {
    clearTimeout(page.timer);
    try {
      const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(patience) });
      if (!answer.ok) throw new Error((await answer.text()).trim());
      page.last = await answer.json();
      page.answered = Date.now();
      page.failed = "";
    } catch (error) {
      page.failed = error.name === "TimeoutError" ? "timed out" : error.message;
    }
    show();
    page.timer = setTimeout(ask, document.hidden ? HIDDEN * every : every);
  }

  document.addEventListener("visibilitychange", () => document.hidden || ask());
  ask();
}
