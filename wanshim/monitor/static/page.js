// Shows what /api/events streams. Text from a log reaches the page as textContent only.
"use strict";

const GIB = 2 ** 30;
const MOST_POINTS = 8000;
const COLOURS = ["#e8710a", "#2e9f4f", "#b455c8", "#c0392b", "#158f8f", "#8a6d1d", "#6a6fd8"];
const cards = new Map(); // run id -> card

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (i) => (i ? COLOURS[(i - 1) % COLOURS.length] : css("--accent"));
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const figure = (value, digits = 4) => (isNumber(value) ? Number(value.toPrecision(digits)).toString() : "–");
const gib = (bytes) => (isNumber(bytes) ? (bytes / GIB).toFixed(1) : "–");

function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  const whole = Math.round(seconds);
  const pad = (n) => String(n).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}`;
}

function element(tag, text, data = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  Object.assign(made.dataset, data);
  return made;
}

function makeCard(id) {
  const root = document.getElementById("run").content.firstElementChild.cloneNode(true);
  root.dataset.run = id;
  document.getElementById("runs").append(root);
  return { id, root, history: null, charts: {}, loading: false, memoryTotal: 0, attempt: null };
}

function showStatus(card, run) {
  const find = (selector) => card.root.querySelector(selector);
  find(".name").textContent = run.name;
  find(".state").textContent = run.state;
  find(".state").dataset.state = run.state;
  const processes = `${run.processes} process${run.processes === 1 ? "" : "es"}`;
  find(".where").textContent = [run.framework, processes, `attempt ${run.attempt}`,
    isNumber(run.resumed_at) && `resumed at step ${run.resumed_at}`,
    isNumber(run.resumes_at) && `resumes at optimizer step ${run.resumes_at}`].filter(Boolean).join(", ");
  find(".problems").replaceChildren(...run.problems.map((problem) => element("li", problem.message)));
  if (isNumber(run.progress_percent)) find("progress").value = run.progress_percent;
  else find("progress").removeAttribute("value");
  const figures = {
    "progress": isNumber(run.progress_percent) ? `${run.progress_percent.toFixed(1)} %` : "–",
    "step": `${run.current_step} / ${run.total_steps ?? "?"}`,
    "optimizer step": `${run.optimizer_step} / ${run.total_optimizer_steps ?? "?"}`,
    "ETA": duration(run.eta_seconds),
    "elapsed": duration(run.elapsed_seconds),
    "loss": run.problems.some((problem) => problem.kind === "nan") ? "NaN" : figure(run.loss),
    "seconds a step": figure(run.step_seconds, 3),
    "learning rate": figure(run.learning_rate, 3),
  };
  find(".figures").replaceChildren(...Object.entries(figures).map(([name, value]) => {
    const pair = document.createElement("div");
    pair.append(element("dt", name), element("dd", value, { figure: name }));
    return pair;
  }));
  find(".devices tbody").replaceChildren(...run.gpus.map((gpu) => {
    const row = document.createElement("tr");
    row.dataset.rank = gpu.rank;
    const memory = isNumber(gpu.memory_used) ? `${gib(gpu.memory_used)} / ${(gpu.memory_total / GIB).toFixed(0)}` : "–";
    row.append(element("td", gpu.rank), element("td", gpu.device), element("td", gpu.state, { state: gpu.state }),
      element("td", gpu.current_step), element("td", memory),
      element("td", isNumber(gpu.utilization) ? `${gpu.utilization} %` : "–"));
    return row;
  }));
  const absent = run.gpus.filter((gpu) => gpu.absent && !gpu.device.startsWith("cpu"));
  const notes = absent.map((gpu) => `rank ${gpu.rank} ${gpu.device}: ${gpu.absent}`);
  if (run.gpus_left_out) notes.push(`and ${run.gpus_left_out} more devices`);
  find(".absent").replaceChildren(...notes.map((note) => element("li", note)));
  card.memoryTotal = Math.max(0, ...run.gpus.map((gpu) => gpu.memory_total ?? 0)) / GIB;
}

// A running mean that follows a fiftieth of the curve.
function smooth(values) {
  const alpha = 2 / (Math.max(5, values.length / 50) + 1);
  let mean = null;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean === null ? value : mean + alpha * (value - mean);
    return mean;
  });
}

// What a chart draws: one x, a line for each of its series, where its scale ends, and a note.
const CHARTS = {
  loss(history) {
    const loss = history.curve.loss ?? [];
    const lines = [{ label: "each step", values: loss, faint: true }, { label: "smoothed", values: smooth(loss) }];
    return { x: history.curve.x ?? [], lines, note: "thin: each step, thick: smoothed" };
  },
  seconds(history) {
    const x = history.curve.x ?? [];
    const values = history.curve.seconds ?? [];
    const usual = 1.5 * quantile(values, 0.95); // the first step compiles: it would flatten all others
    const top = values.reduce((most, value, i) => (value > values[most] ? i : most), 0);
    const note = values[top] > usual ? `longest: ${figure(values[top], 3)} at step ${x[top]}` : "";
    return { x, lines: [{ label: "seconds", values }], range: [0, usual], note };
  },
  memory: (history, card) => ({ ...perDevice(history, "memory", 1 / GIB), range: [0, card.memoryTotal] }),
  utilisation: (history) => ({ ...perDevice(history, "utilisation", 1), range: [0, 100] }),
};

function quantile(values, share) {
  const sorted = values.filter(isNumber).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(share * (sorted.length - 1))] : 0;
}

function perDevice(history, name, scale) {
  const scaled = (values) => values.map((value) => (value === null ? null : value * scale));
  const devices = history.gpus.filter((gpu) => gpu[name]?.some(isNumber));
  if (!devices.length) return { x: [], lines: [] };
  const [x, ...values] = uPlot.join(devices.map((gpu) => [gpu.x, scaled(gpu[name])]));
  return { x, lines: values.map((line, i) => ({ label: `rank ${devices[i].rank} ${devices[i].device}`, values: line })) };
}

function draw(card) {
  for (const box of card.root.querySelectorAll(".chart")) {
    if (!card.history) continue;
    const shown = CHARTS[box.dataset.chart](card.history, card);
    box.parentElement.hidden = !shown.x.length;
    if (!shown.x.length) continue;
    const note = box.parentElement.querySelector(".note");
    if (note) note.textContent = shown.note ?? "";
    const data = [shown.x, ...shown.lines.map((line) => line.values)];
    const chart = card.charts[box.dataset.chart];
    if (chart && chart.series.length === data.length) {
      chart.wanted = shown.range;
      chart.setData(data);
    } else {
      if (chart) chart.destroy();
      card.charts[box.dataset.chart] = plot(card, box, shown, data);
    }
  }
}

// A dashed line where the run went on from a state.
function markResumed(chart, steps) {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.strokeStyle = css("--soft");
  ctx.setLineDash([4, 4]);
  for (const step of steps.filter((x) => x >= chart.scales.x.min && x <= chart.scales.x.max)) {
    const x = Math.round(chart.valToPos(step, "x", true)) + 0.5;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

function plot(card, box, { lines, range }, data) {
  const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 } };
  const chart = new uPlot({
    width: box.clientWidth || 320,
    height: 150,
    padding: [8, 22, 0, 0],
    scales: { x: { time: false }, y: { range: (u, low, high) => scale(u.wanted ?? range, low, high) } },
    axes: [{ ...axis, size: 30 }, { ...axis, size: 56 }],
    legend: { show: lines.length > 1 && !lines[0].faint, live: false },
    cursor: { drag: { x: true, y: false } },
    hooks: { draw: [(u) => markResumed(u, card.history.resumed_at)] },
    series: [{ label: "step" }, ...lines.map((line, i) => ({
      label: line.label, stroke: line.faint ? css("--faint") : colour(lines[0].faint ? i - 1 : i),
      width: line.faint ? 1 : 1.75, spanGaps: true, points: { fill: css("--card") }, value: (_, value) => figure(value),
    }))],
  }, data, box);
  return chart;
}

// The range asked for, or one around the values; never an empty one.
function scale(wanted, low, high) {
  if (wanted && wanted[1] > wanted[0]) return wanted;
  return isNumber(low) && isNumber(high) ? uPlot.rangeNum(low, high, 0.1, true) : [0, 1];
}

async function loadHistory(card) {
  if (card.loading) return;
  card.loading = true;
  try {
    const answer = await fetch(`api/runs/${encodeURIComponent(card.id)}/history`);
    if (answer.ok) {
      card.history = await answer.json();
      draw(card);
      card.root.dataset.drawn = "yes";
    }
  } finally {
    card.loading = false;
  }
}

function append(into, from) {
  const last = into.x?.length ? into.x[into.x.length - 1] : -1;
  const begin = from.x.findIndex((x) => x > last);
  if (begin < 0) return;
  for (const [name, values] of Object.entries(from)) {
    if (Array.isArray(values)) (into[name] ??= []).push(...values.slice(begin));
  }
}

function grow(card, tail) {
  if (!card.history || card.history.gpus.length !== tail.gpus.length || card.history.curve.x?.length > MOST_POINTS) {
    loadHistory(card);
    return;
  }
  append(card.history.curve, tail.curve);
  tail.gpus.forEach((gpu, i) => append(card.history.gpus[i], gpu));
  draw(card);
}

function show({ runs, tails, runs_left_out: leftOut }) {
  document.getElementById("empty").hidden = runs.length > 0;
  document.getElementById("left-out").hidden = !leftOut;
  document.getElementById("left-out").textContent = `${leftOut} older runs are left out`;
  const ids = new Set(runs.map((run) => run.id));
  for (const [id, card] of cards) {
    if (!ids.has(id)) { card.root.remove(); cards.delete(id); }
  }
  for (const run of runs) {
    if (!cards.has(run.id)) cards.set(run.id, makeCard(run.id));
    const card = cards.get(run.id);
    showStatus(card, run);
    const goesOn = card.attempt !== run.attempt; // points that it trains again are replaced
    card.attempt = run.attempt;
    if (goesOn) loadHistory(card);
    else if (tails[run.id]) grow(card, tails[run.id]);
    else if (run.unread_bytes > 0) loadHistory(card);
  }
}

function connect() {
  const stream = new EventSource("api/events");
  const connection = document.getElementById("connection");
  stream.onopen = () => { connection.textContent = "live"; };
  stream.onerror = () => { connection.textContent = "connection lost, trying again"; };
  stream.onmessage = (message) => show(JSON.parse(message.data));
}

function redrawAll() {
  for (const card of cards.values()) {
    for (const chart of Object.values(card.charts)) chart.destroy();
    card.charts = {};
    draw(card);
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
let resizing = 0;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(redrawAll, 150); });
connect();
