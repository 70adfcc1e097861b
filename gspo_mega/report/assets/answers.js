// What the model answered to held-out prompts at the first and at the last evaluation, next to each other.
"use strict";
const ANSWER_MARKS = { right: "✓ correct", wrong: "✗ not correct", "": "not scored" };

function answerVerdict(row) {
  return row.correct === null || row.correct === undefined ? "" : row.correct ? "right" : "wrong";
}

function answerFacts(row) {
  const parts = [`reward ${number(row.reward)}`, `${number(row.num_tokens)} tokens`];
  if (row.is_truncated) parts.push("cut off");
  if (row.num_scored > 1) parts.push(`${row.num_correct} of ${row.num_scored} samples correct; this is the first`);
  return parts.join(" · ");
}

function answerCard(row, step) {
  if (!row) return el("div", { class: "card" }, el("h3", {}, step === null ? "measured once" : `step ${step}`), el("p", { class: "quiet" }, "Not asked then."));
  const verdict = answerVerdict(row), head = el("h3", {}, `step ${step}`);
  head.append(el("span", { class: `verdict ${verdict}` }, ANSWER_MARKS[verdict]));
  return el("div", { class: `card ${verdict}` }, head, el("p", { class: "quiet" }, answerFacts(row)),
    row.failure ? el("p", { class: "warning" }, row.failure) : null, el("pre", { class: "response" }, row.response));
}

function answerText(answer) {
  return answer === null || answer === undefined ? "" : typeof answer === "string" ? answer : JSON.stringify(answer);
}

function countRight(set, side) {
  return set.prompts.filter((one) => one[side] && one[side].correct).length;
}

function answersOf(run) {
  const sets = run.answers.map((set) => {
    const compared = set.first_step !== null, count = set.prompts.length;
    const kept = count < set.num_prompts ? `${count} of the ${set.num_prompts} kept prompts fit here` : `${count} prompts kept of the set`;
    const right = compared ? `correct: ${countRight(set, "before")} at step ${set.first_step}, ${countRight(set, "after")} at step ${set.last_step}`
      : `correct: ${countRight(set, "after")} at step ${set.last_step}, the only evaluation so far`;
    const rows = set.prompts.map((one) => el("article", { class: "asked" }, el("h3", {}, `Row ${one.row}`), el("pre", {}, one.prompt),
      answerText(one.answer) ? el("p", { class: "quiet asis" }, `answer: ${answerText(one.answer)}`) : null,
      el("div", { class: "pair" }, compared ? answerCard(one.before, set.first_step) : null, answerCard(one.after, set.last_step))));
    return [el("h2", {}, `${DATA.runs.length > 1 ? `${run.name}: ` : ""}${set.name}`), el("p", { class: "quiet" }, `${kept}; ${right}.`), rows];
  });
  if (sets.length) return sets.flat(2);
  const why = "No held-out answers are recorded: the run has no section eval, was not measured yet, or was recorded by an earlier release.";
  return [el("p", { class: "quiet" }, DATA.runs.length > 1 ? `${run.name}: ${why}` : why)];
}

function showAnswers() {
  fill(byId("answers"), DATA.runs.map(answersOf).flat());
}
