// Shows what /api/events streams. Text from a log reaches the page as textContent only.
"use strict";

const GIB = 2 ** 30;
const MOST_POINTS = 8000;
const COLOURS = ["#1f77d0", "#e8710a", "#2e9f4f", "#b455c8", "#c0392b", "#158f8f", "#8a6d1d", "#6a6fd8"];
const cards = new Map(); // run id -> card

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
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
  return { id, root, history: null, charts: {}, loading: false };
}

function showStatus(card, run) {
  const find = (selector) => card.root.querySelector(selector);
  find(".name").textContent = run.name;
  find(".state").textContent = run.state;
  find(".state").dataset.state = run.state;
  find(".where").textContent = `${run.framework}, ${run.processes} process(es), attempt ${run.attempt}`;
  find(".problems").replaceChildren(...run.problems.map((problem) => element("li", problem.message)));
  if (isNumber(run.progress_percent)) find("progress").value = run.progress_percent;
  else find("progress").removeAttribute("value");
  const figures = {
    "progress": isNumber(run.progress_percent) ? `${run.progress_percent.toFixed(1)} %` : "–",
    "step": `${run.current_step} / ${run.total_steps ?? "?"}`,
    "optimizer step": `${run.optimizer_step} / ${run.total_optimizer_steps ?? "?"}`,
    "ETA": duration(run.eta_seconds),
    "elapsed": duration(run.elapsed_seconds),
    "loss": figure(run.loss),
    "seconds a step": figure(run.step_seconds, 3),
    "learning rate": figure(run.learning_rate, 3),
  };
  find(".figures").replaceChildren(...Object.entries(figures).map(([name, value]) => {
    const pair = document.createElement("div");
    pair.append(element("dt", name), element("dd", value, { figure: name }));
    return pair;
  }));
  find("tbody").replaceChildren(...run.gpus.map((gpu) => {
    const row = document.createElement("tr");
    row.dataset.rank = gpu.rank;
    const memory = isNumber(gpu.memory_used) ? `${gib(gpu.memory_used)} / ${gib(gpu.memory_total)} GiB` : "–";
    row.append(element("td", gpu.rank), element("td", gpu.device), element("td", gpu.state, { state: gpu.state }),
      element("td", gpu.current_step), element("td", memory),
      element("td", isNumber(gpu.utilization) ? `${gpu.utilization} %` : "–"));
    if (gpu.absent) row.title = gpu.absent;
    return row;
  }));
  const anyGpu = run.gpus.some((gpu) => isNumber(gpu.memory_used));
  for (const section of card.root.querySelectorAll("[data-gpu]")) section.hidden = !anyGpu;
}

// What a chart draws: one x, and a line for each of its series.
function series(history, name) {
  if (name === "loss" || name === "seconds") {
    return { x: history.curve.x ?? [], lines: [{ label: name, values: history.curve[name] ?? [] }] };
  }
  const scale = name === "memory" ? 1 / GIB : 1;
  const tables = history.gpus.map((gpu) => [gpu.x ?? [], (gpu[name] ?? []).map((v) => (v === null ? null : v * scale))]);
  if (!tables.length) return { x: [], lines: [] };
  const [x, ...values] = uPlot.join(tables);
  return { x, lines: values.map((line, i) => ({ label: `${history.gpus[i].rank} ${history.gpus[i].device}`, values: line })) };
}

function draw(card) {
  for (const box of card.root.querySelectorAll(".chart")) {
    if (box.parentElement.hidden || !card.history) continue;
    const { x, lines } = series(card.history, box.dataset.chart);
    const data = [x, ...lines.map((line) => line.values)];
    const shown = card.charts[box.dataset.chart];
    if (shown && shown.series.length === data.length) shown.setData(data);
    else {
      if (shown) shown.destroy();
      card.charts[box.dataset.chart] = plot(box, lines, data);
    }
  }
}

function plot(box, lines, data) {
  const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 } };
  return new uPlot({
    width: box.clientWidth || 320,
    height: 150,
    scales: { x: { time: false } },
    axes: [axis, { ...axis, size: 56 }],
    legend: { show: lines.length > 1, live: false },
    cursor: { drag: { x: true, y: false } },
    series: [{ label: "step" }, ...lines.map((line, i) => ({
      label: line.label, stroke: COLOURS[i % COLOURS.length], width: 1.5, spanGaps: true,
      value: (_, value) => figure(value),
    }))],
  }, data, box);
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

function show({ runs, tails }) {
  document.getElementById("empty").hidden = runs.length > 0;
  const ids = new Set(runs.map((run) => run.id));
  for (const [id, card] of cards) {
    if (!ids.has(id)) { card.root.remove(); cards.delete(id); }
  }
  for (const run of runs) {
    const isNew = !cards.has(run.id);
    if (isNew) cards.set(run.id, makeCard(run.id));
    const card = cards.get(run.id);
    showStatus(card, run);
    if (isNew) loadHistory(card);
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
