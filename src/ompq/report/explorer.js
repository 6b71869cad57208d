"use strict";
// The explorer: a slider over solutions that are in the page.

const data = JSON.parse(document.getElementById("data").textContent);

const byId = (id) => document.getElementById(id);

// Makes an element; children are text or elements, so that names are never markup.
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// Numbers as people read them; numbers.py has the same rules.
function short(value) {
  const size = Math.abs(value);
  return value.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}
function scaled(value, base, edge, names, gap) {
  let power = 0;
  while (Math.abs(value) >= edge && power < names.length - 1) {
    value /= base;
    power += 1;
  }
  return (power ? short(value) : value.toFixed(0)) + gap + names[power];
}
const inBytes = (value) => scaled(value, 1024, 1024, ["B", "KiB", "MiB", "GiB", "TiB"], " ");
const counted = (value) => scaled(value, 1000, 999.5, ["", "k", "M", "G", "T", "P"], "");
function digits(value, count = 3) {
  const isSmall = value !== 0 && Math.abs(value) < 1e-4;
  return isSmall ? value.toExponential(count - 1) : String(Number(value.toPrecision(count)));
}
const label = ([weight, input, rate]) => `${rate ? `C${rate}` : `W${weight}`}A${input}`;

// A choice as a unit has it: the bits of its input may be pinned.
function choiceOf(unit, column) {
  const [weight, input, ...rate] = data.choices[column];
  return [weight, data.inputs[unit] || input, ...rate];
}

const COSTS = {
  bytes: { name: "Size", text: inBytes, per: 1024, unit: "KiB" },
  bit_ops: { name: "Bit operations", text: counted, per: 1e9, unit: "GBOP" },
  weight_bits: {
    name: "Average bits",
    text: (value) => `${short(value / data.costs.weight_bits.reference)} bits`,
    difference: (value) => `${digits(value / data.costs.weight_bits.reference)} bits`,
    per: data.costs.weight_bits.reference / 100,
    unit: "0.01 bits",
  },
  milliseconds: { name: "Latency", text: (value) => `${short(value)} ms`, per: 1, unit: "ms" },
};

const DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
const decode = (solution) => Array.from(solution, (digit) => DIGITS.indexOf(digit));
const isAllowed = (unit, choice) => data.allowed[unit][choice] === "1";

function totals(columns) {
  const found = { damage: 0 };
  columns.forEach((choice, unit) => (found.damage += data.damage[unit][choice]));
  for (const [name, cost] of Object.entries(data.costs)) {
    found[name] = cost.constant;
    columns.forEach((choice, unit) => (found[name] += cost.table[unit][choice]));
  }
  return found;
}

const members = []; // of each group
data.groups.forEach((group, unit) => (members[group] ??= []).push(unit));

const axes = data.axes.map((axis) => {
  const columns = axis.solutions.map(decode);
  return { ...axis, columns, totals: columns.map(totals) };
});
const plan = { name: "the plan", columns: decode(data.plan) };
const others = Object.entries(data.others).map(([name, solution]) => ({ name, columns: decode(solution) }));
const state = { axis: axes[0], step: 0, other: others[0] ?? plan, pinned: null, unit: 0 };

const here = () => state.axis.columns[state.step];
const hereTotals = () => state.axis.totals[state.step];
const costText = (cost, value) => COSTS[cost].text(value);

// Where a value of the axis's cost stands on the slider, in percent.
function position(axis, value) {
  const { limits } = axis;
  const last = limits.length - 1;
  if (last < 1 || value <= limits[0]) return 0;
  const right = limits.findIndex((limit) => limit >= value);
  if (right < 0) return 100;
  const [a, b] = [limits[right - 1], limits[right]];
  return (100 * (right - 1 + (b > a ? (value - a) / (b - a) : 0))) / last;
}

// ---- the curve above the slider

function damageScale(axis) {
  const values = axis.totals.map((total) => total.damage);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const isLog = low > 0 && high / low > 8;
  const at = isLog ? Math.log : (value) => value;
  const span = at(high) - at(low) || 1;
  const height = (value) => 92 - (84 * (at(Math.max(value, isLog ? low / 9 : -Infinity)) - at(low))) / span;
  return { isLog, height: (value) => Math.min(97, Math.max(3, height(value))) };
}

function drawCurve() {
  const { axis } = state;
  const scale = damageScale(axis);
  const last = Math.max(1, axis.limits.length - 1);
  const points = axis.totals.map((total, step) => `${(1000 * step) / last} ${scale.height(total.damage).toFixed(2)}`);
  const line = `M${points.join("L")}`;
  document.querySelector("#curve .line").setAttribute("d", line);
  document.querySelector("#curve .area").setAttribute("d", `${line}V100H0Z`);
  const ends = [axis.totals[0], axis.totals[axis.totals.length - 1]].map((total) => digits(total.damage));
  byId("curve-label").textContent = `expected damage, ${ends.join(" to ")}${scale.isLog ? ", logarithmic" : ""}`;
}

function placeMark(mark, total) {
  mark.style.left = `${position(state.axis, total[state.axis.cost])}%`;
  mark.style.top = `${damageScale(state.axis).height(total.damage)}%`;
}

// ---- scales under the slider

function roundTicks(low, high, count) {
  const raw = (high - low) / count;
  if (!(raw > 0)) return [low];
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * unit).find((size) => size >= raw * 0.999);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high * (1 + 1e-12); n += 1) found.push(n * step);
  return found;
}

function showTicks(element, entries) {
  element.replaceChildren(
    ...entries.map(([at, text]) => {
      const tick = make("i", {}, text);
      tick.style.left = `${at}%`;
      return tick;
    }),
  );
}

function drawScales() {
  const { axis } = state;
  const [low, high] = [axis.limits[0], axis.limits[axis.limits.length - 1]];
  const power = 1024 ** Math.floor(Math.log(Math.max(high, 1)) / Math.log(1024));
  const unit = { bytes: power, bit_ops: 1e9, weight_bits: data.costs.weight_bits.reference }[axis.cost] ?? 1;
  const names = { bytes: inBytes(power).split(" ")[1], bit_ops: "G", weight_bits: "bits", milliseconds: "ms" };
  showTicks(
    byId("scale"),
    roundTicks(low / unit, high / unit, 6).map((tick) => [position(axis, tick * unit), `${digits(tick)} ${names[axis.cost]}`]),
  );
  const average = axis.totals.map((total) => total.weight_bits / data.costs.weight_bits.reference);
  const ticks = [];
  for (let bits = Math.ceil(average[0]); axis.cost !== "weight_bits" && bits <= average[average.length - 1]; bits += 1) {
    const step = average.findIndex((value) => value >= bits - 1e-9);
    ticks.push([(100 * step) / Math.max(1, average.length - 1), `${bits} bits`]);
  }
  showTicks(byId("scale-bits"), ticks);
  byId("scale-bits").hidden = !ticks.length;
}

// ---- totals, side by side

function totalRow(key, name, text) {
  const [mine, theirs] = [hereTotals()[key], state.otherTotals[key]];
  const change = theirs ? (mine - theirs) / Math.abs(theirs) : 0;
  const sign = change > 0 ? "+" : change < 0 ? "−" : "±";
  const row = make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, text(mine)), make("td", {}, text(theirs)));
  row.append(make("td", {}, `${sign}${(100 * Math.abs(change)).toFixed(1)}%`));
  row.dataset.total = key;
  row.dataset.value = mine;
  return row;
}

function showTotals() {
  const costs = Object.keys(data.costs).map((key) => totalRow(key, COSTS[key].name, COSTS[key].text));
  byId("totals").replaceChildren(...costs, totalRow("damage", "Expected damage", (value) => digits(value, 4)));
  byId("other-head").textContent = state.other.name;
  byId("other-name").textContent = state.other.name;
}

// ---- everything that follows the slider

function update() {
  const { axis, step } = state;
  const limit = axis.limits[step];
  const average = hereTotals().weight_bits / data.costs.weight_bits.reference;
  state.otherTotals = totals(state.other.columns);
  byId("budget").value = step;
  byId("budget").setAttribute("aria-valuetext", costText(axis.cost, limit));
  byId("limit").textContent = costText(axis.cost, limit);
  byId("limit").dataset.limit = limit;
  byId("limit-more").textContent = `uses ${costText(axis.cost, hereTotals()[axis.cost])}, ${short(average)} bits on average`;
  byId("copied").textContent = "";
  byId("copy-text").hidden = true;
  placeMark(byId("mark-now"), hereTotals());
  placeMark(byId("mark-other"), state.otherTotals);
  showTotals();
  showBars();
  showWhy();
}

function chooseAxis(axis) {
  state.axis = axis;
  const cost = totals(plan.columns)[axis.cost];
  const near = axis.limits.findIndex((limit) => limit >= cost);
  state.step = axis.plan >= 0 ? axis.plan : near < 0 ? axis.limits.length - 1 : near;
  byId("budget").max = axis.limits.length - 1;
  for (const button of byId("axes").children) {
    button.setAttribute("aria-pressed", String(button.dataset.cost === axis.cost));
  }
  drawCurve();
  drawScales();
  update();
}

// ---- what to compare with

function uniform(choice) {
  return plan.columns.map((own, unit) => (isAllowed(unit, choice) ? choice : own));
}

function comparisons() {
  const found = [plan, ...others, ...(state.pinned ? [state.pinned] : [])];
  data.choices.forEach((choice, column) => {
    const free = data.allowed.filter((row) => row[column] === "1").length;
    if (2 * free > data.allowed.length) found.push({ name: `all ${label(choice)}`, columns: uniform(column) });
  });
  return found;
}

function showComparisons() {
  const found = comparisons();
  byId("compare").replaceChildren(...found.map((one) => make("option", { value: one.name, selected: one.name === state.other.name }, one.name)));
}

// Written line by line, since an object would put names that are numbers first.
function allocationText() {
  const lines = data.names.map((name, unit) => ` ${JSON.stringify(name)}: ${JSON.stringify(data.saved[data.inputs[unit]][here()[unit]])}`);
  return `{\n${lines.join(",\n")}\n}\n`;
}

// Pages opened from a file may have no clipboard: then the old way, then by hand.
async function copyAllocation() {
  const text = allocationText();
  const area = byId("copy-text");
  area.value = text;
  let done = false;
  try {
    await navigator.clipboard.writeText(text);
    done = true;
  } catch {
    area.hidden = false;
    area.focus();
    area.select();
    done = document.execCommand("copy");
    area.hidden = done;
    if (done) byId("copy").focus();
  }
  byId("copied").textContent = done ? `Copied: ${data.names.length} layers, ${byId("limit").textContent}` : "Press Ctrl+C or ⌘C to copy";
}
