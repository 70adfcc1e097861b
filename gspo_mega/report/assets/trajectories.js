// The list of trajectories with its filters, a trajectory in its group, and one prompt's answers at several steps.
"use strict";
const PAGE = 100;
const HEADS = [["step", true], ["prompt", false], ["reward", true], ["adv.", true], ["tokens", true], ["finish", false], ["response", false]];
let matching = [], first = 0, chosen = null, store = null;

function numberIn(id) {
  const text = byId(id).value;
  return text === "" ? null : Number(text);
}

function inRange(value, low, high) {
  return (low === null || (value !== null && value >= low)) && (high === null || (value !== null && value <= high));
}

function applyFilters() {
  filterAll();
  first = 0;
  listPage();
}

function filterAll() {
  const run = byId("f-run").value, prompt = byId("f-prompt").value.toLowerCase(), text = byId("f-text").value.toLowerCase();
  const steps = [numberIn("f-step-low"), numberIn("f-step-high")], rewards = [numberIn("f-reward-low"), numberIn("f-reward-high")];
  const lengths = [numberIn("f-length-low"), numberIn("f-length-high")], version = numberIn("f-version");
  const finish = byId("f-finish").value, failed = byId("f-failed").checked;
  const promptText = (one) => `${one.p} ${store.runs[one.run].prompts[one.p].text}`.toLowerCase();
  matching = store.all.filter((one) => (run === "" || one.run === Number(run)) && inRange(one.s, ...steps) && inRange(one.r, ...rewards)
    && inRange(one.t, ...lengths) && (version === null || one.v.includes(version)) && (finish === "" || one.f === finish)
    && (!failed || one.e !== undefined) && (prompt === "" || promptText(one).includes(prompt)) && (text === "" || one.text.toLowerCase().includes(text)))
    .sort((one, other) => other.s - one.s);  // the newest step first, a step in its own order
}

// A response in one line.
const listText = (one) => (one.e ? `${one.text} [${one.e}]` : one.text).replace(/\n/g, "⏎");

// Of a response: `right`, `wrong`, or nothing where no verifier says.
function verdictOf(one) {
  return one.c === null || one.c === undefined ? "" : one.c ? "right" : "wrong";
}

function listPage() {
  const shown = matching.slice(first, first + PAGE);
  byId("count").textContent = matching.length === 0 ? "No trajectory matches."
    : `${first + 1} to ${first + shown.length} of ${matching.length} trajectories (${store.all.length} in this file)`;
  byId("earlier").disabled = first === 0;
  byId("later").disabled = first + PAGE >= matching.length;
  fill(byId("list").tBodies[0], shown.map((one) => {
    const cells = [one.s, DATA.runs.length > 1 ? `${DATA.runs[one.run].name}: ${one.p}` : one.p, number(one.r), number(one.a, 3), one.t, one.f, listText(one)];
    return el("tr", { tabindex: 0, "aria-selected": one === chosen ? "true" : "false", onclick: () => choose(one), onkeydown: (event) => { if (event.key === "Enter") choose(one); } },
      cells.map((cell, place) => el("td", { class: place === 6 ? "text" : HEADS[place][1] ? `number${place === 2 ? ` ${verdictOf(one)}` : ""}` : "" }, cell)));
  }));
}

function choose(one) {
  chosen = one;
  [...byId("list").tBodies[0].rows].forEach((row, place) => {
    const is = matching[first + place] === one;
    row.setAttribute("aria-selected", String(is));
    if (is) row.scrollIntoView({ block: "nearest" });
  });
  showDetail();
}

function facts(one) {
  const parts = [`reward ${number(one.r)}`, `advantage ${number(one.a, 3)}`, `${one.t} tokens`, one.f, `version ${one.v.join(", ") || "-"}`];
  const gaps = one.n.flatMap((node) => (node.d || []).map((code) => Math.abs(gapOf(code))));
  if (gaps.length) parts.push(`largest mismatch of a token ${number(gaps.reduce((a, b) => Math.max(a, b)), 2)} nats`);
  for (const [name, value] of Object.entries(one.parts || {})) parts.push(`${name} ${number(value)}`);
  return parts.join(" · ");
}

function card(one) {
  const verdict = verdictOf(one), mark = { right: "✓ correct", wrong: "✗ not correct" }[verdict];
  const head = el("h3", { title: `recorded as ${one.i}` }, one.i.replace(/^step\d+-/, ""));
  if (mark) head.append(el("span", { class: `verdict ${verdict}` }, mark));
  return el("div", { class: `card ${verdict}${one === chosen ? " chosen" : ""}` }, head,
    el("p", { class: "quiet" }, facts(one)),
    one.e ? el("p", { class: "warning" }, `not trained on: ${one.e}`) : null, turnBoxes(one, store.runs[one.run].vocabulary));
}

function promptBox(run, id) {
  const prompt = store.runs[run].prompts[id];
  return [el("h3", {}, "Prompt"), el("pre", {}, prompt.text), prompt.answer ? el("p", { class: "quiet asis" }, `answer: ${prompt.answer}`) : null].filter(Boolean);
}

function showDetail() {
  if (!chosen) { fill(byId("detail"), el("p", { class: "quiet" }, "Choose a trajectory to see it beside its group.")); return; }
  const group = store.all.filter((one) => one.run === chosen.run && one.s === chosen.s && one.g === chosen.g);
  const through = el("button", { type: "button", onclick: () => { openPrompt(chosen.run, chosen.p); } }, "This prompt through time");
  fill(byId("detail"), el("h2", {}, `Step ${chosen.s}, ${chosen.p}${DATA.runs.length > 1 ? `, ${DATA.runs[chosen.run].name}` : ""}`), promptBox(chosen.run, chosen.p),
    el("div", { class: "bar" }, colourChoice(showDetail), through, el("span", { class: "quiet" }, DATA.runs[chosen.run].has_mismatch
      ? "Mismatch: trainer - server before any update; blue above, red below; a tenth of a nat is plain."
      : "Each token's mismatch with the trainer is recorded with diagnostics.token_mismatch.")),
    card(chosen), el("h3", {}, `The rest of its group (${group.length - 1})`), el("div", { class: "group" }, group.filter((one) => one !== chosen).map(card)));
}

function next(move) {
  if (!matching.length) return;
  const place = matching.indexOf(chosen) + move;
  const at = chosen === null ? 0 : Math.max(0, Math.min(matching.length - 1, place));
  if (at < first || at >= first + PAGE) { first = Math.floor(at / PAGE) * PAGE; listPage(); }
  choose(matching[at]);
}

function runChoices(everything) {
  const options = DATA.runs.map((run, index) => el("option", { value: index }, run.name));
  return everything ? [el("option", { value: "" }, "all"), ...options] : options;
}

function finishChoices() {
  const before = byId("f-finish").value;
  fill(byId("f-finish"), ["", ...new Set(store.all.map((one) => one.f))].map((name) => el("option", { value: name }, name || "all")));
  byId("f-finish").value = before;
}

async function setUpTrajectories() {
  store = await episodes();
  fill(byId("f-run"), runChoices(true));
  finishChoices();
  fill(byId("list").tHead, el("tr", {}, HEADS.map(([name, right]) => el("th", { scope: "col", class: right ? "number" : "" }, name))));
  byId("filters").addEventListener("input", applyFilters);
  byId("filters").addEventListener("reset", () => setTimeout(applyFilters));
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("earlier").addEventListener("click", () => { first = Math.max(0, first - PAGE); listPage(); });
  byId("later").addEventListener("click", () => { first += PAGE; listPage(); });
  applyFilters();
  if (matching.length) choose(matching[0]); else showDetail();
  setUpPrompts();
}

// Prompts in the order of how many steps have answers to them.
function promptsOf(run) {
  const steps = new Map();
  store.all.filter((one) => one.run === run).forEach((one) => steps.set(one.p, (steps.get(one.p) || new Set()).add(one.s)));
  return [...steps].map(([id, at]) => [id, at.size]).sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1));
}

function fillPrompts() {
  const run = Number(byId("p-run").value), all = promptsOf(run);
  const wanted = byId("p-find").value.toLowerCase();
  const having = all.filter(([id]) => `${id} ${store.runs[run].prompts[id].text}`.toLowerCase().includes(wanted));
  const again = all.filter(([, count]) => count > 1).length;
  byId("p-count").textContent = `${having.length} of ${all.length} prompts${having.length > 2000 ? ", the first 2000 are listed" : ""}; `
    + (again ? `${again} of them have answers at several steps` : "none has answers at more than one step in this file");
  const options = having.slice(0, 2000).map(([id, count]) => el("option", { value: id }, `${id} (${count} step${count > 1 ? "s" : ""}): ${store.runs[run].prompts[id].text.slice(0, 60)}`));
  fill(byId("p-prompt"), options);
}

function showPrompt() {
  const run = Number(byId("p-run").value), id = byId("p-prompt").value;
  if (!id) { fill(byId("through-time"), el("p", { class: "quiet" }, store.all.length ? "No prompt matches." : "No trajectories are recorded.")); return; }
  const steps = new Map();
  store.all.filter((one) => one.run === run && one.p === id).forEach((one) => steps.set(one.s, [...(steps.get(one.s) || []), one]));
  const parts = [...steps].sort((a, b) => a[0] - b[0]).map(([step, all]) => {
    const scored = all.filter((one) => one.r !== null);
    const mean = scored.length ? scored.reduce((sum, one) => sum + one.r, 0) / scored.length : null;
    return [el("h2", {}, `Step ${step}: mean reward ${number(mean)}`), el("div", { class: "group" }, all.map(card))];
  });
  fill(byId("through-time"), promptBox(run, id), el("div", { class: "bar" }, colourChoice(showPrompt)), parts.flat());
}

function openPrompt(run, id) {
  byId("p-run").value = run;
  byId("p-find").value = "";
  fillPrompts();
  if (![...byId("p-prompt").options].some((option) => option.value === id)) byId("p-prompt").append(el("option", { value: id }, id));
  byId("p-prompt").value = id;
  choosePart("prompt");
  showPrompt();
}

function setUpPrompts() {
  fill(byId("p-run"), runChoices(false));
  byId("p-run").addEventListener("change", () => { fillPrompts(); showPrompt(); });
  byId("p-find").addEventListener("input", () => { fillPrompts(); showPrompt(); });
  byId("p-find").form.addEventListener("submit", (event) => event.preventDefault());
  byId("p-prompt").addEventListener("change", showPrompt);
  fillPrompts();
  showPrompt();
}
