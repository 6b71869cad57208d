// Starts the page: the explorer, the theme, sorting, reading off the matrix.

function startExplorer() {
  buildBars();
  listenToBars();
  byId("explorer-body").hidden = false;
  byId("axes").hidden = axes.length < 2;
  for (const axis of axes) {
    const button = make("button", { type: "button", onclick: () => chooseAxis(axis) }, COSTS[axis.cost].name);
    button.dataset.cost = axis.cost;
    byId("axes").append(button);
  }
  byId("budget").addEventListener("input", (event) => {
    state.step = Number(event.target.value);
    update();
  });
  byId("curve").addEventListener("click", (event) => {
    const box = byId("curve").getBoundingClientRect();
    state.step = Math.round(((event.clientX - box.left) / box.width) * (state.axis.limits.length - 1));
    update();
  });
  byId("pin").addEventListener("click", () => {
    state.pinned = { name: `pinned ${byId("limit").textContent}`, columns: here() };
    state.other = state.pinned;
    showComparisons();
    update();
  });
  byId("compare").addEventListener("change", (event) => {
    state.other = comparisons().find((one) => one.name === event.target.value);
    update();
  });
  byId("reset").addEventListener("click", () => {
    state.other = plan;
    showComparisons();
    chooseAxis(axes[0]);
  });
  byId("copy").addEventListener("click", copyAllocation);
  showComparisons();
  chooseAxis(axes[0]);
  const bytes = data.names.map((_, unit) => data.costs.bytes.table[unit][plan.columns[unit]]);
  selectUnit(bytes.indexOf(Math.max(...bytes)));
}

// ---- theme

function stored(value) {
  try {
    if (value) localStorage.setItem("ompq-theme", value);
    return localStorage.getItem("ompq-theme");
  } catch {
    return null; // some browsers give pages from files no storage
  }
}

// Links to a part that is folded away open it.
function startFolds() {
  for (const link of document.querySelectorAll("nav a")) {
    const fold = document.querySelector(`${link.hash} details`);
    if (fold) link.addEventListener("click", () => { fold.open = true; });
  }
}

function startTheme() {
  const root = document.documentElement;
  const chosen = stored();
  if (chosen) root.dataset.theme = chosen;
  byId("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    stored(root.dataset.theme);
  });
}

// ---- sortable tables

function sortTable(table, heading) {
  const rows = [...table.tBodies[0].rows];
  const column = Number(heading.dataset.column);
  const rising = heading.getAttribute("aria-sort") !== "ascending";
  const key = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent;
  const isNumber = rows.every((row) => key(row) === "" || !Number.isNaN(Number(key(row))));
  const order = isNumber ? (a, b) => Number(key(a)) - Number(key(b)) : (a, b) => key(a).localeCompare(key(b), undefined, { numeric: true });
  rows.sort((a, b) => (rising ? order(a, b) : order(b, a)));
  for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
  table.tBodies[0].append(...rows);
}

function startSorting() {
  for (const table of document.querySelectorAll("table.sortable")) {
    // Headings in reading order of their columns: those of two rows stand first.
    [...table.querySelectorAll("thead th:not(.group)")].forEach((heading, column) => {
      heading.dataset.column = column;
      heading.firstElementChild.addEventListener("click", () => sortTable(table, heading));
    });
  }
}

// ---- boxes that scroll

// While a box hides something to the right, it fades there.
function fadeEdge(box) {
  const show = () => box.classList.toggle("more", box.scrollWidth - box.clientWidth - box.scrollLeft > 1);
  box.addEventListener("scroll", show, { passive: true });
  new ResizeObserver(show).observe(box);
}

// ---- the ORM matrix

function matrixReader({ labels, values }) {
  const bytes = Uint8Array.from(atob(values), (character) => character.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  const size = labels.length;
  return (row, column) => {
    const [i, j] = row < column ? [row, column] : [column, row];
    return view.getUint16(2 * (i * size - (i * (i - 1)) / 2 + j - i)) / 65535;
  };
}

function startMatrix() {
  const map = byId("orm-map");
  if (!map) return;
  const { labels, strips } = data.orm;
  const size = labels.length;
  const read = matrixReader(data.orm);
  const at = { row: 0, column: 0 };
  const show = (row, column) => {
    Object.assign(at, { row, column });
    map.classList.add("reading");
    map.style.setProperty("--size", size);
    map.style.setProperty("--row", row);
    map.style.setProperty("--column", column);
    const line = (at) => {
      const more = strips.map((strip) => `${strip.title} ${strip.values[at]}`).join(", ");
      return make("p", {}, make("code", {}, labels[at]), make("span", { className: "muted small" }, more));
    };
    const pair = row === column ? [row] : [row, column];
    byId("orm-read").replaceChildren(make("b", {}, read(row, column).toFixed(3)), ...pair.map(line));
  };
  map.addEventListener("pointermove", (event) => {
    const box = map.querySelector(".heat").getBoundingClientRect();
    const clamp = (value) => Math.min(size - 1, Math.max(0, Math.floor(value * size)));
    const inside = event.clientX >= box.left && event.clientX <= box.right;
    if (event.clientY < box.top || event.clientY > box.bottom) return;
    const row = clamp((event.clientY - box.top) / box.height);
    show(row, inside ? clamp((event.clientX - box.left) / box.width) : row);
  });
  map.addEventListener("focus", () => show(at.row, at.column));
  map.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    const clamp = (value) => Math.min(size - 1, Math.max(0, value));
    show(clamp(at.row + move[0]), clamp(at.column + move[1]));
  });
}

startFolds();
startTheme();
document.querySelectorAll(".scroll, .chart-scroll, .top nav").forEach(fadeEdge);
startExplorer();
startSorting();
startMatrix();
