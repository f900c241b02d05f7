// Requests a document every few seconds, and shows in the banner when the agent no longer answers.

import { clock } from "./numbers.js";

const HIDDEN = 15; // times as long between requests while the page is hidden

// The document at a path; the error says why there is none. Of ours, the text of the answer does; a proxy's is a page.
export async function get(path, patience) {
  try {
    const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(patience) });
    if (answer.ok) return await answer.json();
    const text = (await answer.text()).trim();
    throw new Error(text && !text.startsWith("<") ? text : `${answer.status} ${answer.statusText}`.trim());
  } catch (error) {
    throw error.name === "TimeoutError" ? new Error("timed out") : error;
  }
}

// Times are in milliseconds: `every` between requests, `patience` for an answer, `lostAfter` without an answer until the banner appears.
// `render` receives the last document, the time of its arrival, and "live", "asking" or "not answering"; `nothing` is said while there is no
// document. `source` is whose document it is: the page, with all that it remembers, begins anew for another agent or release.
export function poll(path, { every, patience, lostAfter, nothing, source, render }) {
  const page = { last: null, answered: 0, failed: "", timer: 0 };
  const isOld = () => Date.now() - page.answered > lostAfter; // also once the computer has slept

  function show() {
    const lost = isOld() && page.failed !== "";
    if (page.last) render(page.last, page.answered, lost ? "not answering" : isOld() ? "asking" : "live");
    document.body.classList.toggle("lost", isOld() && page.last !== null);
    const banner = document.getElementById("banner");
    banner.hidden = !lost;
    // A screen reader says the banner whenever it changes, so that no figure in it grows.
    const since = page.last ? `No data from the agent since ${clock(new Date(page.answered))}; what is shown is from then.` : nothing;
    const text = `${since} (${page.failed})`;
    if (lost && banner.textContent !== text) banner.textContent = text;
  }

  // An answer that cannot be shown counts as none.
  function accept(last) {
    const before = { ...page };
    Object.assign(page, { last, answered: Date.now(), failed: "" });
    try {
      show();
    } catch (error) {
      reportError(error);
      Object.assign(page, before, { failed: `its answer cannot be shown: ${error.message}; reload the page` });
    }
  }

  async function ask() {
    clearTimeout(page.timer);
    try {
      if (isOld()) show();
      const last = await get(path, patience);
      if (page.last && source(last) !== source(page.last)) location.reload();
      else accept(last);
    } catch (error) {
      page.failed = error.message;
    } finally {
      page.timer = setTimeout(ask, document.hidden ? HIDDEN * every : every);
    }
    if (page.failed) show();
  }

  document.addEventListener("visibilitychange", () => document.hidden || ask());
  // What is drawn once it is opened does not wait for another answer.
  document.addEventListener("toggle", show, true);
  ask();
}
