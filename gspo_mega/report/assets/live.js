// New steps of runs that go on: asked for every two seconds, and put in without a change of what the reader looks at.
"use strict";
const LOOK_MS = 2000;
const token = new URLSearchParams(location.search).get("token");
const state = el("span", { id: "live", class: "quiet", role: "status" }, "live");
let looks = 0;

async function look() {
  const { stamp, after } = DATA.live;
  try {
    const answer = await fetch(`changes?token=${encodeURIComponent(token)}&stamp=${stamp}&after=${after.join()}`);
    if (answer.status === 200) await take(await answer.json());
    else if (answer.status !== 204 && answer.status !== 503) throw new Error(`the server answers ${answer.status}`);
    if (answer.status !== 503) state.textContent = "live";
  } catch (error) {
    state.textContent = `not live: ${error.message}; what is shown stays`;
  }
  looks += 1;
  setTimeout(look, LOOK_MS);
}

async function take({ data, episodes: packed }) {
  const runs = packed ? await unpackText(packed) : null;
  Object.assign(DATA, data);
  showCreated();
  const at = window.scrollY;
  showSummary();
  if (!byId("answers").hidden) showAnswers();
  fill(byId("metric-names"), Object.keys(DATA.metrics).map((name) => el("option", { value: name })));
  if (curvesDrawn && !refreshCurves()) drawCurves();
  if (runs) {
    const before = answersShown();
    addEpisodes(await episodes(), runs);
    if (store) showMore(before);
  }
  window.scrollTo({ top: at });
}

// Of the prompt whose answers at all steps are open.
function answersShown() {
  return store ? store.all.filter((one) => one.run === Number(byId("p-run").value) && one.p === byId("p-prompt").value).length : 0;
}

// The lists grow; what is chosen, filtered, focused and scrolled to stays.
function showMore(before) {
  const list = byId("list").tBodies[0], place = [...list.rows].indexOf(document.activeElement);
  const focused = place < 0 ? null : matching[first + place];
  finishChoices();
  filterAll();
  listPage();
  if (focused) list.rows[matching.indexOf(focused) - first]?.focus({ preventScroll: true });
  const prompt = byId("p-prompt").value;
  fillPrompts();
  if ([...byId("p-prompt").options].some((option) => option.value === prompt)) byId("p-prompt").value = prompt;
  if (answersShown() !== before) showPrompt();
}

document.querySelector("header").append(state);
setTimeout(look, LOOK_MS);
