// The page's data and how its elements are made. Text is set as text, never as HTML.
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

// An element with properties and children; a child that is no element becomes text.
function el(tag, properties, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) made.append(child instanceof Node ? child : String(child));
  }
  return made;
}

function fill(parent, ...children) {
  parent.replaceChildren(...children.flat());
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "-";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return String(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
}

function when(seconds) {
  return seconds ? new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC" : "-";
}

function table(heads, rows, caption) {
  return el("table", {}, caption ? el("caption", {}, caption) : null,
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell) => el("td", {}, cell))))));
}

// The trajectories are unpacked when they are first needed.
let unpacked = null;
function episodes() {
  unpacked = unpacked || unpack();
  return unpacked;
}

async function unpackText(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

async function unpack() {
  const runs = await unpackText(byId("episodes").textContent);
  const found = { runs: runs.map(() => ({ prompts: {}, vocabulary: {} })), all: [] };
  addEpisodes(found, runs);
  return found;
}

// Add runs' episodes to those that are there.
function addEpisodes(store, runs) {
  runs.forEach((run, index) => {
    Object.assign(store.runs[index].prompts, run.prompts);
    Object.assign(store.runs[index].vocabulary, run.vocabulary);
    run.episodes.forEach((one) => { one.run = index; one.text = textOf(one); store.all.push(one); });
  });
}

function textOf(one) {
  return one.n.map((node) => node.x ?? (node.m || []).map((message) => messageText(message)).join(" ")).join(" ");
}

function messageText(message) {
  const content = message.content;
  const calls = message.tool_calls ? " " + JSON.stringify(message.tool_calls) : "";
  return (typeof content === "string" ? content : content ? JSON.stringify(content) : "") + calls;
}
