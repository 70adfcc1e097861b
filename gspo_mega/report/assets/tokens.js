// One response token by token: coloured by a quantity, with all its numbers below the page on hover or with the keyboard.
"use strict";
const COLOURINGS = { none: "no colour", log_prob: "log-prob", advantage: "advantage", mask: "mask", version: "weight version" };
const MISMATCH = "mismatch with the trainer";
let colouring = "log_prob";

function paint(span, fact) {
  if (!fact.sampled) span.className = "masked";
  let tint = null;
  if (colouring === "log_prob" && fact.sampled) tint = `rgba(var(--hot), ${Math.min(0.75, -fact.logProb / 4).toFixed(2)})`;
  if (colouring === "advantage" && fact.sampled && fact.advantage !== null) {
    tint = `rgba(var(${fact.advantage < 0 ? "--hot" : "--cold"}), ${Math.min(0.7, Math.abs(fact.advantage) / 3).toFixed(2)})`;
  }
  // A hundredth of a nat is seen, a tenth is plain, one is as strong as it gets.
  if (colouring === "mismatch" && fact.gap) {
    const strength = Math.min(0.8, Math.max(0.04, 0.5 + 0.25 * Math.log10(Math.abs(fact.gap) / 0.1)));
    tint = `rgba(var(${fact.gap < 0 ? "--hot" : "--cold"}), ${strength.toFixed(2)})`;
  }
  if (colouring === "mask") tint = fact.sampled ? "rgba(var(--cold), .3)" : null;
  if (colouring === "version" && fact.sampled) tint = colour(fact.version) + "55";
  if (tint) span.style.backgroundColor = tint;
}

function factText(fact) {
  const parts = [`token ${JSON.stringify(fact.text)} (id ${fact.id})`];
  if (fact.sampled) parts.push(`log-prob ${fact.logProb.toFixed(3)}`, `probability ${number(Math.exp(fact.logProb), 3)}`, `weight version ${fact.version}`);
  if (fact.gap !== null) parts.push(`trainer - server ${fact.gap ? (fact.gap > 0 ? "+" : "") + number(fact.gap, 2) : "0"} nats`);
  if (fact.sampled && fact.advantage !== null) parts.push(`advantage ${fact.advantage.toFixed(3)}`);
  parts.push(fact.sampled ? "mask 1: trained" : "mask 0: not sampled");
  return parts.join("   ");
}

function show(facts, box, place) {
  box.querySelector(".here")?.classList.remove("here");
  box.children[place]?.classList.add("here");
  byId("token").textContent = factText(facts[place]);
  byId("token").hidden = false;
}

// Nats from the sign and the sixteenths of a decade above 1e-7 that the file has.
function gapOf(code) {
  return code === null || code === undefined ? null : code && Math.sign(code) * 1e-7 * 10 ** ((Math.abs(code) - 1) / 16);
}

// The tokens of a node, as facts.
function factsOf(node, episode, vocabulary) {
  const versions = (node.v || []).flatMap(([version, count]) => Array(count).fill(version));
  const advantage = node.a ?? episode.a ?? null;
  return node.t.map((id, place) => ({
    id, text: vocabulary[id] ?? `<${id}>`, sampled: Boolean(node.l), logProb: node.l ? node.l[place] / 1000 : null,
    version: versions[place] ?? null, advantage, gap: gapOf(node.d?.[place]),
  }));
}

function tokenBox(node, episode, vocabulary) {
  const facts = factsOf(node, episode, vocabulary);
  const box = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens: arrow keys move from one to the next" });
  facts.forEach((fact) => {
    const span = el("span", {}, fact.text === "" ? "∅" : fact.text.replace(/\n/g, "⏎\n"));
    paint(span, fact);
    box.append(span);
  });
  let here = -1;
  const go = (place) => { if (place >= 0 && place < facts.length) { here = place; show(facts, box, place); } };
  box.addEventListener("mouseover", (event) => { const place = [...box.children].indexOf(event.target); if (place >= 0) go(place); });
  box.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (move) { go(Math.max(0, here + move)); event.preventDefault(); }
  });
  return box;
}

function callBox(call) {
  const answer = call.error !== null && call.error !== undefined ? `error: ${call.error}` : call.result;
  return el("pre", {}, `${call.name} ${JSON.stringify(call.arguments)} → ${answer}`);
}

// An episode turn by turn, with what tools answered.
function turnBoxes(episode, vocabulary) {
  let turn = -1;
  const callsOf = (which) => (episode.k || []).filter((call) => call.turn === which).map(callBox);
  const boxes = callsOf(-1);
  episode.n.forEach((node) => {
    const sampled = Boolean(node.l), alone = episode.n.length === 1;
    if (sampled) turn += 1;
    const roles = (node.m || []).map((message) => message.role || "?").join(", ") || "template";
    const head = sampled ? `turn ${turn}, ${node.t.length} tokens, ${node.f}` : `${roles}, ${node.t.length} tokens`;
    const text = node.x ?? (node.m || []).map(messageText).join("\n");
    const after = node.p === undefined ? "" : `, after node ${node.p}`;
    boxes.push(el("div", { class: sampled ? "turn sampled" : "turn" }, alone ? null : el("p", { class: "quiet" }, head + after),
      text ? el("pre", { class: sampled ? "response" : "" }, text) : null,
      el("details", { open: episode === chosen || !text }, el("summary", {}, "Token by token"), tokenBox(node, episode, vocabulary)), sampled ? callsOf(turn) : null));
  });
  return boxes;
}

function colourChoice(redraw) {
  const known = DATA.runs.some((run) => run.has_mismatch) ? { ...COLOURINGS, mismatch: MISMATCH } : COLOURINGS;
  const choice = el("select", { id: "colouring" }, Object.entries(known).map(([value, text]) => el("option", { value, selected: value === colouring }, text)));
  choice.addEventListener("change", () => { colouring = choice.value; redraw(); byId("colouring")?.focus(); });
  return el("label", {}, "Colour tokens by ", choice);
}
