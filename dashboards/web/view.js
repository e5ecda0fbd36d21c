// The status document as DOM. A part is rebuilt only when its data changed, so that focus,
// selection and scroll positions stay.

const SVG = "http://www.w3.org/2000/svg";
const MAX_CELLS = 4096;
const MAX_DECISIONS = 12;
const shown = new Map();

export function render(status, now) {
  text("name", status.name);
  text("model", status.model || "");
  document.title = `${status.name}: ${status.state}`;
  renderState(status.state + (status.reason ? `: ${status.reason}` : ""), tone(status.state));
  const actors = status.actors || [];
  part("figures", figures(status, actors), (box, rows) => box.replaceChildren(...rows.map(figure)));
  part("groups", groupsOf(actors), drawLegend);
  part("experts", groupsOf(actors), drawExperts);
  part("training", status.training || {}, drawTraining);
  part("versions", status.versions || [], (box, list) => box.replaceChildren(...list.map(versionRow)));
  part("actors", actors.map(actorCells), (box, list) => box.replaceChildren(...list.map(row)));
  part("nodes", nodesOf(actors), drawNodes);
  part("decisions", (status.decisions || []).slice(-MAX_DECISIONS).reverse(), drawDecisions);
  const updated = document.getElementById("updated");
  updated.dateTime = now.toISOString();
  updated.textContent = now.toLocaleTimeString();
}

export function renderState(words, toneName) {
  const state = document.getElementById("state");
  if (state.textContent !== words) state.textContent = words;
  state.className = `pill ${toneName}`;
}

function part(id, data, draw) {
  const key = JSON.stringify(data);
  if (shown.get(id) === key) return;
  shown.set(id, key);
  draw(document.getElementById(id), data);
}

function tone(state) {
  if (state === "ready") return "good";
  return state === "failed" || state === "lost" ? "bad" : "warn";
}

function make(tag, fields = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(fields)) {
    if (name === "class") element.className = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function text(id, words) {
  const element = document.getElementById(id);
  if (element.textContent !== String(words)) element.textContent = words;
}

function figures(status, actors) {
  const endpoint = status.endpoint || {};
  const stacks = actors.filter((actor) => actor.role === "attention_stack");
  const sum = (key) => stacks.reduce((total, stack) => total + (stack[key] || 0), 0);
  const latest = (status.versions || []).find((version) => version.latest);
  return [
    ["requests running", sum("running")],
    ["requests waiting", sum("waiting")],
    ["tokens per second", endpoint.tokens_per_s ?? "-"],
    ["tokens served", endpoint.tokens_total ?? "-"],
    ["hand-overs", endpoint.handovers_total ?? "-"],
    ["plan version", status.plan_version ?? "-"],
    ["weight version", latest ? latest.version : "none"],
  ];
}

function figure([label, value]) {
  const long = String(value).length > 12;
  return make("div", {}, make("dt", {}, label),
    make("dd", { class: long ? "text" : "", "data-figure": label }, String(value)));
}

function groupsOf(actors) {
  return actors
    .filter((actor) => actor.role === "expert_group")
    .map(({ id, state, term, experts }) => ({ id, state, term, experts: experts || {} }));
}

function drawLegend(box, groups) {
  box.replaceChildren(...groups.map((group, index) => {
    const count = Object.values(group.experts).reduce((total, list) => total + list.length, 0);
    const label = `${group.id} #${group.term}: ${count} experts, ${group.state}`;
    return make("span", {}, make("span", { class: `swatch g${index % 8}` }), label);
  }));
}

function drawExperts(box, groups) {
  const layers = [...new Set(groups.flatMap((group) => Object.keys(group.experts)))];
  layers.sort((a, b) => Number(a) - Number(b));
  const total = groups.reduce((sum, g) => sum + Object.values(g.experts).reduce((n, l) => n + l.length, 0), 0);
  box.replaceChildren(...layers.map((layer) => {
    const owned = groups.flatMap((group, index) =>
      (group.experts[layer] || []).map((expert) => ({ expert, index, group })));
    owned.sort((a, b) => a.expert - b.expert);
    const line = make("div", { class: "layer" }, make("b", {}, `layer ${layer}`));
    for (const run of runs(owned, total <= MAX_CELLS)) {
      const down = run.group.state === "ready" ? "" : " down";
      const range = run.first === run.last ? `expert ${run.first}` : `experts ${run.first}-${run.last}`;
      const cell = make("i", { class: `g${run.index % 8}${down}`, title: `${range}: ${run.group.id} (${run.group.state})` });
      cell.style.flexGrow = run.last - run.first + 1;
      line.append(cell);
    }
    return line;
  }));
  const words = groups.map((group) => `${group.id} ${group.state}`).join(", ");
  box.setAttribute("aria-label", `${layers.length} layers of experts, held by ${words || "no group"}`);
}

function runs(owned, single) {
  const found = [];
  for (const { expert, index, group } of owned) {
    const last = found[found.length - 1];
    if (!single && last && last.index === index && last.last === expert - 1) last.last = expert;
    else found.push({ first: expert, last: expert, index, group });
  }
  return found;
}

function drawTraining(box, lines) {
  const names = Object.keys(lines);
  if (!names.length) {
    box.replaceChildren(make("p", { class: "note" }, "No training has reported yet."));
    return;
  }
  box.replaceChildren(...names.flatMap((name) => {
    const line = lines[name];
    const history = line.loss_history || [];
    const loss = typeof line.loss === "number" ? line.loss.toFixed(4) : "-";
    const words = `line ${name}: step ${line.committed_step ?? line.step ?? "-"}, loss ${loss}`;
    const head = make("p", { class: "note", "data-line": name }, words);
    return history.length > 1 ? [head, sparkline(history, words)] : [head];
  }));
}

function sparkline(history, label) {
  const steps = history.map(([step]) => step);
  const losses = history.map(([, loss]) => loss);
  const [low, high] = [Math.min(...losses), Math.max(...losses)];
  const [first, last] = [steps[0], steps[steps.length - 1]];
  const points = history.map(([step, loss]) => {
    const x = (600 * (step - first)) / Math.max(1, last - first);
    const y = 4 + (82 * (high - loss)) / Math.max(1e-9, high - low);
    return `${x.toFixed(1)},${y.toFixed(1)}`;
  });
  const svg = document.createElementNS(SVG, "svg");
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("points", points.join(" "));
  for (const [key, value] of Object.entries({
    viewBox: "0 0 600 90", preserveAspectRatio: "none", class: "spark", role: "img",
    "aria-label": `${label}; from ${losses[0].toFixed(3)} at step ${first}, lowest ${low.toFixed(3)}`,
  })) svg.setAttribute(key, value);
  svg.append(line);
  return svg;
}

function versionRow(version) {
  const state = version.latest ? "latest" : version.active === false ? "loading" : "live";
  return row([[version.version], [state, version.latest ? "good" : ""], [version.pins, "number"]]);
}

function actorCells(actor) {
  return [
    [actor.id], [actor.role.replaceAll("_", " ")], [actor.state, tone(actor.state)],
    [actor.term, "number"], [actor.pid || "-", "number"], [actor.node || "-"], [actor.version || "-"],
  ];
}

function row(cells) {
  return make("tr", {}, ...cells.map(([value, name], index) =>
    make(index ? "td" : "th", index ? { class: name || "" } : { scope: "row" }, String(value))));
}

function nodesOf(actors) {
  const nodes = {};
  for (const actor of actors) if (actor.node) (nodes[actor.node] ||= []).push(actor.id);
  return nodes;
}

function drawNodes(box, nodes) {
  box.replaceChildren(...Object.entries(nodes).map(([node, ids]) =>
    make("li", {}, make("strong", {}, node), ` ${ids.length} actors: ${ids.join(", ")}`)));
}

function drawDecisions(box, decisions) {
  if (!decisions.length) {
    box.replaceChildren(make("li", { class: "note" }, "Nothing was decided yet."));
    return;
  }
  box.replaceChildren(...decisions.map((decision) => {
    const time = typeof decision.time === "number"
      ? new Date(decision.time * 1000).toLocaleTimeString() : decision.time || "";
    return make("li", {}, make("strong", {}, decision.command), ` ${time} `,
      make("span", { class: "why" }, decision.reason || ""));
  }));
}
