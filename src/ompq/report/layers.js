// Bits of each layer as bars, and why a layer has them.

// A coded layer has its rate behind the two widths.
const bitsOf = (choice) => choice[2] ?? choice[0];
const MOST = Math.max(...data.choices.map((choice) => (choice[0] >= 32 ? 0 : bitsOf(choice))), 1);
const manyInputs = new Set([...data.choices.map((choice) => choice[1]), ...data.inputs.filter((bits) => bits)]).size > 1;

function buildBars() {
  const columns = data.names.map((name, unit) => {
    const column = make("div", { className: "col", role: "option", tabIndex: unit ? -1 : 0, id: `unit-${unit}` });
    column.dataset.kind = data.kinds[unit];
    column.dataset.unit = unit;
    if (unit && data.stages[unit] !== data.stages[unit - 1]) column.classList.add("stage");
    for (const side of ["up", "down"]) {
      column.append(make("div", { className: `half ${side}` }, make("i", {}, make("b"))));
    }
    return column;
  });
  const lines = [...new Set(data.choices.filter((choice) => !choice[2]).map((choice) => choice[0]))].filter((bits) => bits <= MOST);
  const guides = lines.flatMap((bits) =>
    [50 - (50 * bits) / MOST, 50 + (50 * bits) / MOST].map((top) => {
      const guide = make("span", { className: "guide" }, String(bits));
      guide.style.top = `${top}%`;
      guide.setAttribute("aria-hidden", "true");
      return guide;
    }),
  );
  byId("bars").replaceChildren(...guides, ...columns);
  byId("bars").style.setProperty("--units", data.names.length);
}

const columnOf = (unit) => byId(`unit-${unit}`);

function setHalf(half, choice) {
  const bar = half.firstElementChild;
  bar.style.height = `${(100 * Math.min(bitsOf(choice), MOST)) / MOST}%`;
  bar.classList.toggle("float", choice[0] >= 32);
  const text = choice[0] >= 32 ? "f" : manyInputs ? `${bitsOf(choice)}/${choice[1]}` : String(bitsOf(choice));
  bar.firstElementChild.textContent = text;
  bar.firstElementChild.classList.toggle("wide", text.length > 1);
}

function showBars() {
  const [mine, theirs] = [here(), state.other.columns];
  data.names.forEach((name, unit) => {
    const column = columnOf(unit);
    const [own, other] = [choiceOf(unit, mine[unit]), choiceOf(unit, theirs[unit])];
    setHalf(column.children[0], own);
    setHalf(column.children[1], other);
    column.classList.toggle("differs", mine[unit] !== theirs[unit]);
    column.dataset.bits = label(own);
    column.setAttribute("aria-label", `${name}: ${label(own)}; ${state.other.name}: ${label(other)}`);
  });
}

function selectUnit(unit) {
  for (const column of byId("bars").querySelectorAll(".col")) {
    const index = Number(column.dataset.unit);
    column.setAttribute("aria-selected", String(index === unit));
    column.tabIndex = index === unit ? 0 : -1;
    column.classList.toggle("tied", index !== unit && data.groups[index] === data.groups[unit]);
  }
  state.unit = unit;
  showWhy();
}

// ---- why

// The choices of a unit's group, cheapest first, with what a change to each would do.
function changes(columns, group) {
  const { cost } = state.axis;
  const units = members[group];
  const now = columns[units[0]];
  const sum = (table, choice) => units.reduce((total, unit) => total + table[unit][choice] - table[unit][now], 0);
  return data.choices
    .map((_, choice) => choice)
    .filter((choice) => units.every((unit) => isAllowed(unit, choice)))
    .map((choice) => ({ choice, cost: sum(data.costs[cost].table, choice), damage: sum(data.damage, choice) }))
    .sort((a, b) => a.cost - b.cost || b.damage - a.damage);
}

// The least damaging change of this group together with one other, within the budget:
// what was refused most narrowly. plan.explain() has the same rule.
function bestExchange(columns, group) {
  const room = state.axis.limits[state.step] - hereTotals()[state.axis.cost];
  const elsewhere = members.map((units, other) => (other === group ? [] : changes(columns, other)));
  let best = null;
  for (const mine of changes(columns, group)) {
    if (mine.choice === columns[members[group][0]]) continue;
    elsewhere.forEach((options, other) => {
      const unit = members[other][0];
      for (const theirs of options) {
        const damage = mine.damage + theirs.damage;
        const fits = theirs.choice !== columns[unit] && mine.cost + theirs.cost <= room;
        if (fits && (!best || damage < best.damage)) best = { choice: mine.choice, unit, after: theirs.choice, damage };
      }
    });
  }
  return best;
}

function exchangeText(columns, group) {
  const best = bestExchange(columns, group);
  if (!best) return "No exchange with one other layer fits the budget.";
  const here = label(choiceOf(members[group][0], best.choice));
  const [after, before] = [best.after, columns[best.unit]].map((choice) => label(choiceOf(best.unit, choice)));
  const verdict = best.damage >= 0 ? `would add ${digits(best.damage)} damage, so it was refused` : `would save ${digits(-best.damage)} damage`;
  return `The best exchange within the budget, ${here} here and ${after} instead of ${before} for ${data.names[best.unit]}, ${verdict}.`;
}

// The budgets at which the unit's bits change: one step to each side on the curve.
function turningPoints(unit) {
  const { axis, step } = state;
  const now = axis.columns[step][unit];
  const last = axis.columns.length;
  let [up, down] = [step + 1, step - 1];
  while (up < last && axis.columns[up][unit] === now) up += 1;
  while (down >= 0 && axis.columns[down][unit] === now) down -= 1;
  const parts = [];
  if (up < last) parts.push(`${label(choiceOf(unit, axis.columns[up][unit]))} at ${costText(axis.cost, axis.limits[up])} with a larger budget`);
  if (down >= 0) parts.push(`${label(choiceOf(unit, axis.columns[down][unit]))} at ${costText(axis.cost, axis.limits[down])} with a smaller one`);
  return parts.length ? `Next it gets ${parts.join(", ")}.` : "It has the same bits at every budget.";
}

function reasons(unit) {
  const { cost } = state.axis;
  const kind = COSTS[cost];
  const amount = (value) => (kind.difference ?? kind.text)(Math.abs(value));
  const rate = (value) => `${digits(value * kind.per)} per ${kind.unit}`;
  const options = changes(here(), data.groups[unit]);
  if (options.length === 1) return ["Its bits are pinned."];
  // Several choices may cost the same; the least damaging of the nearest cost counts.
  const down = options.filter((option) => option.cost < 0).pop();
  const next = options.find((option) => option.cost > 0);
  const up = next && options.filter((option) => option.cost === next.cost).pop();
  const found = [];
  if (up) {
    const left = state.axis.limits[state.step] - hereTotals()[cost];
    const saved = -up.damage;
    found.push(`${label(choiceOf(unit, up.choice))} would take ${amount(up.cost)} more and save ${digits(saved)} damage, ${rate(saved / up.cost)}; ${amount(left)} of the budget are free.`);
  } else found.push("It has the most bits of its choices.");
  if (down) found.push(`${label(choiceOf(unit, down.choice))} would free ${amount(down.cost)} and add ${digits(down.damage)} damage, ${rate(down.damage / -down.cost)}.`);
  else found.push("It has the fewest bits of its choices.");
  found.push(exchangeText(here(), data.groups[unit]), turningPoints(unit));
  return found;
}

function choiceRow(unit, choice) {
  const [mine, theirs] = [here()[unit], state.other.columns[unit]];
  const cells = [data.damage[unit][choice], data.damage[unit][choice] - data.damage[unit][mine]];
  const row = make("tr", { className: choice === mine ? "chosen" : "" }, make("th", { scope: "row" }, label(choiceOf(unit, choice))));
  row.append(make("td", {}, digits(cells[0])), make("td", {}, choice === mine ? "" : (cells[1] > 0 ? "+" : "") + digits(cells[1])));
  row.append(make("td", {}, inBytes(data.costs.bytes.table[unit][choice])), make("td", {}, counted(data.costs.bit_ops.table[unit][choice])));
  row.append(make("td", {}, [choice === mine ? "this budget" : "", choice === theirs ? state.other.name : ""].filter(Boolean).join(", ")));
  return row;
}

function showWhy() {
  const { unit } = state;
  const tied = members[data.groups[unit]].filter((other) => other !== unit).map((other) => data.names[other]);
  const swatch = make("i", { className: "swatch" });
  swatch.dataset.kind = data.kinds[unit];
  const facts = [data.kinds[unit], data.shapes[unit]];
  if (data.gamma) facts.push(`γ ${digits(data.gamma[unit], 4)}`);
  const about = make("div", {}, make("h3", {}, swatch, data.names[unit], " ", make("span", { className: "bits" }, label(choiceOf(unit, here()[unit])))));
  about.append(make("p", { className: "muted small" }, facts.join(" · ")));
  if (tied.length) about.append(make("p", {}, `Shares its bits with ${tied.join(", ")}; what follows counts them together.`));
  about.append(make("ul", {}, ...reasons(unit).map((reason) => make("li", {}, reason))));
  const head = ["choice", "damage", "change", "size", "BOPs", ""].map((name) => make("th", { scope: "col" }, name));
  const allowed = data.choices.map((_, choice) => choice).filter((choice) => isAllowed(unit, choice));
  const table = make("table", { className: "choices" }, make("thead", {}, make("tr", {}, ...head)));
  table.append(make("tbody", {}, ...allowed.map((choice) => choiceRow(unit, choice))));
  const box = make("div", { className: "scroll" }, table);
  byId("why").replaceChildren(about, box);
  fadeEdge(box);
}

function barKeys(event) {
  const last = data.names.length - 1;
  const moves = { ArrowRight: state.unit + 1, ArrowLeft: state.unit - 1, Home: 0, End: last };
  if (!(event.key in moves)) return;
  event.preventDefault();
  columnOf(Math.min(last, Math.max(0, moves[event.key]))).focus();
}

function listenToBars() {
  const bars = byId("bars");
  const unitOf = (event) => event.target.closest?.(".col")?.dataset.unit;
  for (const name of ["pointermove", "focusin", "click"]) {
    bars.addEventListener(name, (event) => {
      const unit = unitOf(event);
      if (unit !== undefined && Number(unit) !== state.unit) selectUnit(Number(unit));
    });
  }
  bars.addEventListener("keydown", barKeys);
}
