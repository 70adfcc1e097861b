// The summary, and which part of the page is shown.
"use strict";
const PARTS = ["summary", "curves", "trajectories", "prompt", "answers"];
const MARKS = { good: "✓ good", note: "· note", warning: "! look" };
const ENDED = { finished: "took all its steps", stopped: "was asked to stop", requeued: "gave its allocation back", running: "is at work" };
const WORDS = [
  ["group", "the responses to one prompt in one step; advantages compare them with each other. A group with one reward gives no gradient."],
  ["advantage (adv.)", "how much better a response's reward is than its group's mean, in standard deviations of the group unless configured otherwise."],
  ["ratio, log-ratio", "new policy's probability of a response over the old one's; its logarithm, per token. GSPO takes one ratio per response."],
  ["clip range, clip fraction", "the ratios within which a response gives a gradient, and the share of responses outside."],
  ["k3", "an estimate of the KL divergence in nats per token that is never negative: of the update (new against old policy) or of the mismatch."],
  ["mismatch", "what trainer and server make of the same token with the same weights, as a difference of log-probs."],
  ["budget (mismatch.budget)", "which share of the clip range the mismatch may take on the mean before the page warns."],
  ["staleness", "how many weight versions lie between the policy that sampled and the trained one."],
  ["entropy", "of the policy's next token, in nats: near 0 it answers the same each time."],
  ["held-out", "problems that are never trained on; avg@k is the accuracy over k samples of each, pass@k counts a problem where one of k is correct."],
  ["truncated", "ended by rollout.max_new_tokens and not by the policy."],
  ["s.e., ±", "standard error of a mean."],
];
let curvesDrawn = false, trajectoriesReady = null;

function attempts(run) {
  if (!run.attempts.length) return [];
  const known = run.attempts.filter((one) => one.started);
  const start = Math.min(...known.map((one) => one.started)), end = Math.max(...known.map((one) => one.ended));
  const line = el("div", { class: "timeline", role: "img", "aria-label": "Attempts on a time line; the table has the same" },
    known.map((one, place) => {
      const before = place ? known[place - 1].ended : start;
      const share = (from, to) => `${(100 * Math.max(0, to - from)) / Math.max(1, end - start)}`;
      const gap = el("div", {}), bar = el("div", { title: `attempt ${one.number}: ${one.state}` });
      gap.style.flexGrow = share(before, one.started); gap.style.minWidth = "0";
      bar.style.flexGrow = share(one.started, one.ended); bar.style.background = colour(one.error || one.state === "lost" ? 1 : 2);
      return [gap, bar];
    }).flat());
  const rows = run.attempts.map((one) => [one.number, one.state, when(one.started), when(one.ended), one.host || "-", one.error || one.restart || ENDED[one.state] || ""]);
  const legend = el("p", { class: "quiet" }, "Green: at work; red: ended by a failure; grey: nothing ran.");
  return [el("h2", {}, "Attempts"), line, legend, el("div", { class: "wide" }, table(["attempt", "state", "began", "last sign of life", "host", "what happened"], rows))];
}

function summaryOf(run) {
  const verdicts = run.verdicts.map((one) => el("li", {}, el("span", { class: `level ${one.level}` }, MARKS[one.level]), el("span", {}, one.topic),
    el("span", {}, one.text, one.metric && run.series[one.metric] ? [" ", el("button", { type: "button", class: "link", onclick: () => showChartOf(one.metric) }, "curve")] : null)));
  const span = run.steps.length ? `steps ${run.steps[0]} to ${run.steps[run.steps.length - 1]}, last at ${when(run.times[run.times.length - 1])}` : "no step yet";
  return el("article", {}, el("h2", {}, run.name), el("p", { class: "quiet" }, `${run.path} · ${run.command || "train"} · ${span}`),
    el("ul", { class: "verdicts" }, verdicts),
    run.notes.length ? el("ul", {}, run.notes.map((note) => el("li", { class: "quiet" }, note))) : null,
    attempts(run),
    el("h2", {}, "Configuration: what differs from the defaults"),
    el("p", { class: "quiet" }, "A key without a default has to be given, or stands in a section that is absent by default."),
    el("div", { class: "wide" }, table(["key", "value", "default"], run.changed.map(([key, value, standard]) => [key, value, standard || "-"]))),
    el("details", {}, el("summary", {}, "Words of this page"), el("dl", {}, WORDS.map(([word, meaning]) => [el("dt", {}, word), el("dd", {}, meaning)]).flat())),
    run.versions ? el("details", {}, el("summary", {}, "Versions"), el("pre", {}, run.versions)) : null,
    run.layout ? el("details", {}, el("summary", {}, "Layout and plan"), el("pre", {}, run.layout)) : null);
}

function choosePart(part) {
  for (const name of PARTS) {
    byId(name).hidden = name !== part;
    byId(`tab-${name}`).setAttribute("aria-selected", String(name === part));
    byId(`tab-${name}`).tabIndex = name === part ? 0 : -1;
  }
  byId("token").hidden = true;
  if (part === "summary") drawOverview();
  if (part === "answers") showAnswers();
  if (part === "curves" && !curvesDrawn) { curvesDrawn = true; drawCurves(); }
  if (part === "trajectories" || part === "prompt") trajectoriesReady = trajectoriesReady || setUpTrajectories();
  return trajectoriesReady;
}

function setTheme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  if (curvesDrawn) drawCurves();
  showSummary();
  if (store) showDetail();
}

function showSummary() {
  const open = [...byId("summary").querySelectorAll("details")].map((one) => one.open);
  fill(byId("summary"), el("div", { id: "overview", class: "grid" }), el("div", { class: "runs" }, DATA.runs.map(summaryOf)));
  if (!byId("summary").hidden) drawOverview();
  byId("summary").querySelectorAll("details").forEach((one, place) => { one.open = Boolean(open[place]); });
}

function setUpKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const place = PARTS.indexOf(event.target.id?.replace("tab-", ""));
    if (place >= 0 && ["ArrowRight", "ArrowLeft"].includes(event.key)) {
      const part = PARTS[(place + (event.key === "ArrowRight" ? 1 : PARTS.length - 1)) % PARTS.length];
      choosePart(part);
      byId(`tab-${part}`).focus();
    }
    if (["1", "2", "3", "4", "5"].includes(event.key)) choosePart(PARTS[Number(event.key) - 1]);
    if (!byId("trajectories").hidden && store && (event.key === "j" || event.key === "k")) next(event.key === "j" ? 1 : -1);
  });
}

function showCreated() {
  byId("created").textContent = `${DATA.runs.length === 1 ? DATA.runs[0].name : `${DATA.runs.length} runs`} · gspo-mega ${DATA.version} · ${DATA.created}`;
}

showCreated();
for (const part of PARTS) byId(`tab-${part}`).addEventListener("click", () => choosePart(part));
byId("theme").addEventListener("click", () => setTheme(!isDark()));
setUpCurves();
setUpKeys();
setTheme(window.matchMedia("(prefers-color-scheme: dark)").matches);
choosePart(PARTS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "summary");
let widthTimer = null;
window.addEventListener("resize", () => {
  clearTimeout(widthTimer);
  widthTimer = setTimeout(() => {
    if (curvesDrawn && !byId("curves").hidden) drawCurves();
    if (!byId("summary").hidden) drawOverview();
  }, 200);
});
