"use strict";
// The run browser: ticked values filter the table and the chart; none ticked in a group means all of it.

// Figures, runs and the library that draws curves are packed (gzip), and unpacked when somebody comes to see them.
async function unpacked(name) {
  const bytes = Uint8Array.from(atob(document.getElementById(`packed-${name}`).textContent), (sign) => sign.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

async function showFigures() {
  const drawings = await unpacked("figures");
  for (const image of document.querySelectorAll("img[data-figure]")) {
    image.src = URL.createObjectURL(new Blob([drawings[image.dataset.figure]], { type: "image/svg+xml" }));
  }
}

async function showRuns() {
  [facets, runs] = await Promise.all([unpacked("facets"), unpacked("runs")]);
  const script = document.createElement("script");
  script.textContent = await unpacked("plotly");
  document.head.append(script);
  restoreSelection();
  await update();
  chart.removeAttribute("aria-busy");
}

// Called once, when the section comes near the part of the page that is seen; not every page has each section.
function whenNear(id, show) {
  const section = document.getElementById(id);
  if (!section) return;
  const observer = new IntersectionObserver(
    (entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      observer.disconnect();
      show().catch(fail);
    },
    { rootMargin: "400px" },
  );
  observer.observe(section);
}

let [facets, runs] = [{}, []];
const filters = document.getElementById("filters");
const chart = document.getElementById("chart");
const controls = Object.fromEntries(["loss", "against", "color"].map((id) => [id, document.getElementById(id)]));
const table = document.querySelector("#run-table tbody");
const rows = [...table.rows];
const darkness = matchMedia("(prefers-color-scheme: dark)");
let marked = null; // a run's number

function fail(error) {
  document.documentElement.dataset.scriptError = error.message;
  document.getElementById("count").textContent = `The run browser does not work here: ${error.message}`;
}
window.addEventListener("error", fail);

function tickedValues() {
  const ticked = {};
  for (const [name, value] of new FormData(filters)) (ticked[name] ??= []).push(value);
  return ticked;
}

function isShown(run, ticked) {
  if (ticked.chosen && !run.is_chosen) return false;
  return Object.keys(facets).every((name) => !ticked[name] || ticked[name].includes(run.facets[name]));
}

// plotly reads some HTML in its labels.
const escaped = (text) => text.replace(/[&<>]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[sign]);

// Colours were chosen for white paper; on dark paper they are mixed with white.
function themed(color) {
  if (!darkness.matches) return color;
  const parts = [1, 3, 5].map((place) => parseInt(color.slice(place, place + 2), 16));
  return `rgb(${parts.map((part) => Math.round(part + 0.4 * (255 - part))).join()})`;
}

function colorFacet(shown) {
  const differs = (name) => new Set(shown.map((run) => run.facets[name])).size > 1;
  return controls.color.value || Object.keys(facets).find(differs) || "method";
}

function tracesOf(shown, facet) {
  const loss = controls.loss.value;
  const against = (loss === "val" ? "val_" : "") + controls.against.value;
  return shown.map((run) => {
    const isMarked = runs[marked] === run;
    return {
      type: "scatter",
      mode: loss === "val" ? "lines+markers" : "lines",
      x: run.curves[against],
      y: run.curves[loss],
      opacity: marked === null || isMarked ? 1 : 0.25,
      line: { color: themed(facets[facet][run.facets[facet]]), width: isMarked ? 3.5 : 1.6, dash: facet === "method" ? run.dash : "solid" },
      marker: { size: 4 },
      hovertemplate: `<b>${escaped(run.name)}</b><br>%{x:,.6~g}: %{y:.4f}<extra></extra>`,
    };
  });
}

// Below the chart, not in it: a long legend would leave no room for the curves on a phone.
function drawLegend(shown, facet) {
  const occurring = new Set(shown.map((run) => run.facets[facet]));
  const entries = Object.entries(facets[facet]).filter(([value]) => occurring.has(value));
  document.getElementById("legend").replaceChildren(
    ...entries.map(([value, color]) => {
      const entry = document.createElement("li");
      entry.textContent = facet === "stages" ? `P = ${value}` : value;
      entry.style.setProperty("--color", themed(color));
      const dash = facet === "method" && shown.find((run) => run.facets.method === value).dash;
      if (dash && dash !== "solid") entry.textContent += ` (${dash})`;
      return entry;
    }),
  );
}

// The first steep fall would take most of the height: the range begins where a twentieth of a run is over.
function lossRange(traces) {
  const known = traces.flatMap(({ y }) => y.filter((loss, place) => loss !== null && place >= y.length / 20));
  if (!known.length) return undefined;
  const lowest = known.reduce((one, other) => Math.min(one, other));
  const highest = known.reduce((one, other) => Math.max(one, other));
  const margin = 0.04 * (highest - lowest) + 0.01;
  return [lowest - margin, highest + margin];
}

function draw(shown) {
  const style = getComputedStyle(document.documentElement);
  const [ink, soft, line] = ["--ink", "--soft", "--line"].map((name) => style.getPropertyValue(name).trim());
  const facet = colorFacet(shown);
  const traces = tracesOf(shown, facet);
  drawLegend(shown, facet);
  const axis = { gridcolor: line, zeroline: false, linecolor: line, automargin: true };
  const against = { iterations: "iteration", minutes: "device time (minutes)" }[controls.against.value];
  const loss = { train: "training loss (nats)", val: "validation loss (nats)" }[controls.loss.value];
  const layout = {
    xaxis: { ...axis, title: { text: against, standoff: 8 } },
    yaxis: { ...axis, title: { text: loss }, range: lossRange(traces) },
    showlegend: false,
    modebar: { bgcolor: "transparent", color: soft, activecolor: ink },
    hovermode: "closest",
    hoverlabel: { namelength: -1 },
    margin: { l: 50, r: 10, t: 10, b: 40 },
    font: { family: style.fontFamily, color: ink },
    paper_bgcolor: "transparent",
    plot_bgcolor: "transparent",
  };
  // The buttons by name, for plotly's own choice has one that sends the data to its makers.
  const buttons = ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"];
  const config = { responsive: true, displaylogo: false, plotlyServerURL: "", modeBarButtons: [buttons] };
  return Plotly.react(chart, traces, layout, config);
}

function update() {
  const ticked = tickedValues();
  const shown = runs.filter((run) => isShown(run, ticked));
  if (marked !== null && !shown.includes(runs[marked])) mark(null);
  for (const row of rows) row.hidden = !isShown(runs[row.dataset.run], ticked);
  document.getElementById("count").textContent = `${shown.length} of ${runs.length} runs`;
  return draw(shown);
}

function mark(number) {
  marked = number;
  for (const row of rows) {
    row.querySelector(".name").setAttribute("aria-pressed", String(number !== null && Number(row.dataset.run) === number));
  }
  const settings = document.getElementById("settings");
  settings.hidden = number === null;
  if (number === null) return;
  const text = document.createElement("pre");
  text.textContent = runs[number].settings;
  settings.replaceChildren(`${runs[number].name}: settings other than brx's defaults`, text);
}

function sortBy(heading) {
  const place = heading.cellIndex;
  const isAscending = heading.getAttribute("aria-sort") !== "ascending";
  for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", isAscending ? "ascending" : "descending");
  const order = new Intl.Collator("en", { numeric: true });
  const number = (text) => (text === "-" ? Infinity : Number(text));
  rows.sort((one, other) => {
    const [left, right] = [one, other].map((row) => row.cells[place].textContent);
    const areNumbers = !Number.isNaN(number(left)) && !Number.isNaN(number(right));
    const found = areNumbers ? number(left) - number(right) || 0 : order.compare(left, right);
    return isAscending ? found : -found;
  });
  table.append(...rows);
}

// The address tells what is shown, so that a selection can be kept and shared: report.html#stages=32&chosen=yes
function restoreSelection() {
  const names = [...Object.keys(facets), "chosen"];
  const wanted = new URLSearchParams(location.hash.slice(1));
  const isGiven = names.some((name) => wanted.has(name)) || wanted.has("all");
  if (!isGiven) for (const [name, value] of new URLSearchParams(filters.dataset.selection)) wanted.set(name, value);
  for (const box of filters.elements) {
    if (box.type === "checkbox") box.checked = wanted.getAll(box.name).includes(box.value);
  }
}

function keepSelection() {
  const selected = new URLSearchParams(new FormData(filters)).toString();
  history.replaceState(null, "", `#${selected || "all"}`);
}

filters.addEventListener("change", () => (keepSelection(), update()));
filters.addEventListener("reset", () => setTimeout(() => (keepSelection(), update()))); // after the boxes are cleared
filters.addEventListener("submit", (event) => event.preventDefault());
for (const control of Object.values(controls)) control.addEventListener("change", update);
darkness.addEventListener("change", update);
document.querySelector("#run-table thead").addEventListener("click", (event) => {
  if (event.target.matches("button")) sortBy(event.target.closest("th"));
});
table.addEventListener("click", (event) => {
  if (!event.target.matches(".name")) return;
  const number = Number(event.target.closest("tr").dataset.run);
  mark(marked === number ? null : number);
  update();
});

document.getElementById("filter-box").open = !matchMedia("(max-width: 40rem)").matches;
const large = document.getElementById("large");
document.addEventListener("click", (event) => {
  const canvas = event.target.closest(".canvas");
  if (!canvas) return;
  const image = canvas.querySelector("img").cloneNode();
  image.style.setProperty("--panels", getComputedStyle(canvas).getPropertyValue("--panels"));
  large.querySelector("div").replaceChildren(image);
  large.showModal();
});
whenNear("figures", showFigures);
if (location.hash.includes("=") || location.hash === "#all") showRuns().catch(fail);
else whenNear("runs", showRuns);
