// Curves: every chart is drawn anew when a setting changes. All charts share one range of steps and one cursor.
"use strict";
const PALETTE = ["#0969da", "#cf222e", "#1a7f37", "#9a6700", "#8250df", "#0e8a8a", "#bf3989", "#57606a", "#bc4c00", "#4d7c0f"];
const DARK_PALETTE = ["#58a6ff", "#ff7b72", "#56d364", "#e3b341", "#bc8cff", "#39c5cf", "#f778ba", "#9da7b1", "#ffa657", "#a3e635"];
const drawn = [], charts = [], overview = [], FEW = 30;
let range = null;

function isDark() { return document.documentElement.classList.contains("dark"); }
function colour(index) { const all = isDark() ? DARK_PALETTE : PALETTE; return all[index % all.length]; }

// Exponential smoothing without the pull to the first value.
function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0, mass = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

function unionOfSteps(runs) {
  return [...new Set(runs.flatMap((run) => run.steps))].sort((a, b) => a - b);
}

function onSteps(run, values, steps) {
  const at = new Map(run.steps.map((step, place) => [step, values[place]]));
  return steps.map((step) => at.get(step) ?? null);
}

// Mean and standard error over the runs that have a value; without one where only one has.
function meanOf(columns) {
  const mean = [], low = [], high = [];
  columns[0].forEach((_, place) => {
    const values = columns.map((column) => column[place]).filter((value) => value !== null);
    const centre = values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
    const spread = values.length > 1
      ? Math.sqrt(values.reduce((a, b) => a + (b - centre) ** 2, 0) / (values.length - 1) / values.length) : null;
    mean.push(centre);
    low.push(spread === null ? null : centre - spread);
    high.push(spread === null ? null : centre + spread);
  });
  return { mean, low, high };
}

function lines(metrics, settings, limit) {
  const present = metrics.filter((name) => DATA.runs.some((run) => run.series[name]));
  const steps = unionOfSteps(DATA.runs), found = [], bands = [];
  present.forEach((name, index) => {
    const having = DATA.runs.filter((run) => run.series[name]);
    const raw = having.map((run) => onSteps(run, run.series[name], steps));
    // A few measurements, as of held-out problems, are shown as they are.
    const columns = raw.map((values) => count(values) < FEW ? values : smoothed(values, settings.smooth));
    if (settings.mean && columns.length > 1) {
      const { mean, low, high } = meanOf(columns), tint = colour(index), at = found.length + 1;
      found.push({ label: `${name} + s.e.`, values: high, colour: tint, width: 0 }, { label: `${name} - s.e.`, values: low, colour: tint, width: 0 },
        { label: `${name}, mean of ${columns.length}`, values: mean, colour: tint, width: 2 });
      bands.push({ series: [at, at + 1], fill: tint + "33" });
      return;
    }
    having.forEach((run, place) => {
      const many = DATA.runs.length > 1, tint = colour(many ? DATA.runs.indexOf(run) : index);
      if (columns[place] !== raw[place] && settings.smooth) found.push({ label: `${many ? `${run.name}: ` : ""}${name}, raw`, values: raw[place], colour: tint + "55", width: 1 });
      found.push({ label: many ? `${run.name}: ${name}` : name, values: columns[place],
        colour: tint, dash: index ? [[8, 4], [2, 3]][(index - 1) % 2] : undefined, width: 1.6 });
    });
  });
  if (limit && found.length) {
    const levels = [...new Set(DATA.runs.map((run) => run.limits[limit.setting]).filter((value) => typeof value === "number"))];
    levels.forEach((level) => found.push({ label: `${limit.label} ${number(level)}`, values: steps.map(() => level), colour: colour(7), dash: [3, 3], width: 1 }));
  }
  return { steps, found, bands };
}

function stacked(run) {
  const phases = run.phases.slice(0, 9).filter((name) => run.series[name].some((value) => value));
  const sums = run.steps.map(() => 0), found = [];
  phases.forEach((name, index) => {
    run.series[name].forEach((value, place) => { sums[place] += value || 0; });
    found.push({ label: name.slice(5).replace(/_seconds$/, ""), values: [...sums], shown: run.series[name], colour: colour(index), width: 1, filled: true });
  });
  return { steps: run.steps, found: found.reverse(), bands: [] };
}

function count(values) { return values.filter((value) => value !== null && value !== undefined).length; }

// A curve that never changes is drawn in the middle of a range of its own size.
function heights(settings, filled) {
  if (filled) return (_, __, top) => [0, 1.05 * (top || 1)];
  if (settings.log) return undefined;
  return (_, low, high) => {
    if (low === null || high === null || (low === 0 && high === 0)) return [0, 1];
    return low !== high ? uPlot.rangeNum(low, high, 0.1, true) : [low - Math.abs(low) / 2, low + Math.abs(low) / 2];
  };
}

// Where a run collapsed, fell or was started again: a line across the chart, with its word where one run is shown.
function drawMarks(plot) {
  const context = plot.ctx, { left, top, width, height } = plot.bbox;
  context.save();
  context.textAlign = "left";
  context.textBaseline = "top";
  DATA.runs.forEach((run, index) => run.marks.forEach((mark, place) => {
    const x = plot.valToPos(mark.step, "x", true);
    if (x < left || x > left + width) return;
    context.strokeStyle = context.fillStyle = colour(mark.level === "warning" ? 1 : DATA.runs.length > 1 ? index : 7);
    context.setLineDash([4, 4]);
    context.beginPath();
    context.moveTo(x, top);
    context.lineTo(x, top + height);
    context.stroke();
    if (DATA.runs.length === 1) context.fillText(mark.text, x + 4, top + 2 + (place % 2) * 14 * devicePixelRatio);
  }));
  context.restore();
}

// Labels of an axis: as few digits as keep neighbours apart.
function tickLabels(ticks) {
  const known = ticks.filter((tick) => tick !== null);
  for (let digits = 4; digits <= 12; digits += 2) {
    const labels = known.map((tick) => number(tick, digits));
    if (new Set(labels).size === known.length || digits === 12) return ticks.map((tick) => tick === null ? "" : number(tick, digits));
  }
}

// `own.content`: the chart's lines as they are now. The chart joins `group`.
function draw(box, own, settings, name, group) {
  const { steps, found, bands } = own.content;
  const valueAt = (which, place) => {
    const values = own.content.found[which].shown || own.content.found[which].values;
    return place === null || place === undefined ? values.findLast((value) => value !== null && value !== undefined) : values[place];
  };
  const quiet = getComputedStyle(document.documentElement).getPropertyValue("--quiet").trim();
  const grid = getComputedStyle(document.documentElement).getPropertyValue("--line").trim();
  const axis = { stroke: quiet, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid } };
  const plot = new uPlot({
    width: Math.max(260, box.clientWidth - 22), height: 230, bands,
    cursor: { sync: { key: "steps" }, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: { distr: settings.log ? 3 : 1, range: heights(settings, found.some((line) => line.filled)) } },
    axes: [{ ...axis, label: undefined }, { ...axis, size: 76, values: (_, ticks) => tickLabels(ticks) }],
    series: [{ label: "step", value: (_, value) => value ?? own.content.steps[own.content.steps.length - 1] }, ...found.map((line) => ({
      label: line.label, class: line.width === 0 ? "bare" : undefined, stroke: line.colour, width: line.width, dash: line.dash, spanGaps: true,
      fill: line.filled ? line.colour : undefined,
      points: { show: count(line.values) < FEW && line.width > 0 && !line.filled, size: 5 },
      // Away from the pointer the legend has the last values.
      value: (_, value, index, place) => number(valueAt(index - 1, place)),
    }))],
    hooks: { draw: [drawMarks], setSelect: [(u) => { if (u.select.width > 2) zoom(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")); }] },
  }, plotData({ steps, found }, settings), box.querySelector(".plot"));
  plot.root.setAttribute("role", "img");
  plot.root.setAttribute("aria-label", `${name}: ${found.map((line) => line.label).join(", ")}${group === drawn ? "; the values are in the table below" : ""}`);
  plot.over.addEventListener("dblclick", () => zoom(null, null));
  if (steps.length) plot.setScale("x", range || stepsOf(plot));
  group.push(plot);
  return plot;
}

function plotData({ steps, found }, settings) {
  return [steps, ...found.map((line) => settings.log ? line.values.map((value) => value > 0 ? value : null) : line.values)];
}

function zoom(min, max) {
  range = min === null ? null : { min, max };
  drawn.forEach((plot) => plot.setScale("x", range || stepsOf(plot)));
}

// The range of all steps. uPlot would put a single step, 0, on an axis from 0 to 100.
function stepsOf(plot) {
  const steps = plot.data[0], first = steps[0], last = steps[steps.length - 1];
  return first === last ? { min: first - 1, max: last + 1 } : { min: first, max: last };
}

function showTable(details, { steps, found }) {
  details.querySelector("table")?.remove();
  if (!details.open) return;
  const every = Math.ceil(steps.length / 200);
  const rows = steps.map((step, place) => [step, ...found.map((line) => number((line.shown || line.values)[place]))]);
  details.append(table(["step", ...found.map((line) => line.label)], rows.filter((_, place) => place % every === 0)));
}

// `make`: the chart's lines from the data as it is; null where it has none.
function chart(name, make, settings, meaning, metrics = []) {
  const content = make();
  charts.push({ make, content, settings });
  if (!content) return;
  const details = el("details", {}, el("summary", {}, "Values as a table"));
  const box = el("div", { class: "chart", tabindex: -1, "data-metrics": metrics.join(" ") },
    el("h3", {}, name), meaning ? el("p", { class: "quiet" }, meaning) : null, el("div", { class: "plot" }), details);
  byId("charts").append(box);
  const left = settings.log ? content.found.reduce((sum, line) => sum + count(line.values.map((value) => value > 0 ? null : value)), 0) : 0;
  if (left) box.querySelector(".plot").before(el("p", { class: "quiet" }, `${left} value${left > 1 ? "s" : ""} of 0 or below ${left > 1 ? "are" : "is"} not on a log scale.`));
  const one = Object.assign(charts[charts.length - 1], { details });
  one.plot = draw(box, one, settings, name, drawn);
  details.addEventListener("toggle", () => showTable(details, one.content));
}

// New steps into charts that stay as they are: range, hover and open tables. False where a chart has other lines now.
function refreshCurves() {
  const made = charts.map((one) => one.make());
  const names = (content) => content && content.found.map((line) => line.label).join();
  if (made.some((content, place) => names(content) !== names(charts[place].content))) return false;
  charts.forEach((one, place) => {
    if (!one.plot) return;
    one.content = made[place];
    one.plot.setData(plotData(one.content, one.settings), range === null);
    if (range) one.plot.redraw();
    if (one.details.open) showTable(one.details, one.content);
  });
  return true;
}

const added = [];
function drawCurves() {
  drawn.splice(0).forEach((plot) => plot.destroy());
  charts.splice(0);
  fill(byId("charts"));
  const settings = { smooth: Number(byId("smooth").value), log: byId("log").checked, mean: byId("mean").checked };
  for (const name of added) chart(name, () => lines([name], settings), settings, meaningOf(name), [name]);
  for (const [name, asked, meaning, limit] of CHARTS) {
    const metrics = asked instanceof RegExp ? namesLike(asked) : asked;
    if (asked instanceof RegExp && metrics.length < 2) continue;  // one set is the chart above
    const make = () => { const content = lines(metrics, settings, limit); return content.found.some((line) => line.values.some((value) => value !== null)) ? content : null; };
    chart(name, make, settings, meaning || (metrics.length ? meaningOf(metrics[0]) : null), metrics);
  }
  DATA.runs.forEach((run, index) => {
    const make = () => DATA.runs[index].phases.length ? stacked(DATA.runs[index]) : null;
    chart(`Time by phase (s)${DATA.runs.length > 1 ? `, ${run.name}` : ""}`, make, { ...settings, log: false }, "stacked, the largest at the bottom");
  });
}

// Reward and held-out accuracy, above the summary.
function drawOverview() {
  overview.splice(0).forEach((plot) => plot.destroy());
  const boxes = [["Reward", "reward/mean"], ["Held-out accuracy", "eval/accuracy"]].map(([title, metric]) => {
    const content = lines([metric], { smooth: 0, log: false, mean: false });
    const box = el("div", { class: "chart" }, el("h3", {}, title), el("div", { class: "plot" }));
    return content.found.some((line) => count(line.values)) ? { box, title, content } : null;
  }).filter(Boolean);
  fill(byId("overview"), boxes.map((one) => one.box));
  for (const { box, title, content } of boxes) draw(box, { content }, { smooth: 0, log: false, mean: false }, title, overview);
}

function namesLike(pattern) {
  return [...new Set(DATA.runs.flatMap((run) => Object.keys(run.series)))].filter((name) => pattern.test(name)).sort();
}

function meaningOf(name) {
  const [unit, meaning] = DATA.metrics[name] || ["", ""];
  return `${meaning}${unit && unit !== "1" ? ` (${unit})` : ""}`;
}

function setUpCurves() {
  fill(byId("metric-names"), Object.keys(DATA.metrics).map((name) => el("option", { value: name })));
  byId("mean-label").hidden = DATA.runs.length < 2;
  byId("curve-controls").addEventListener("submit", (event) => event.preventDefault());
  for (const id of ["smooth", "log", "mean"]) byId(id).addEventListener("input", drawCurves);
  byId("unzoom").addEventListener("click", () => zoom(null, null));
  byId("add").addEventListener("change", () => {
    if (DATA.metrics[byId("add").value] && !added.includes(byId("add").value)) { added.unshift(byId("add").value); byId("add").value = ""; drawCurves(); }
  });
}

// The chart of a metric, in sight; one that no chart of the page has is added.
function showChartOf(metric) {
  const find = () => [...document.querySelectorAll("#charts .chart")].find((box) => box.dataset.metrics.split(" ").includes(metric));
  choosePart("curves");
  if (!find() && DATA.metrics[metric]) { added.unshift(metric); drawCurves(); }
  const box = find();
  if (!box) return;
  box.scrollIntoView({ block: "center" });
  box.focus({ preventScroll: true });
}
