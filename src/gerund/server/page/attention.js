// Attention maps of a typed sentence, before and after the plan.

import { ask } from "./api.js";
import { byId, element, onSubmit, settings } from "./form.js";

const LABELS = 100;

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

// Draws one map: a row a token that looks, a column a token that is looked at.
function draw(canvas, weights, tokens) {
  const context = canvas.getContext("2d");
  const side = (canvas.width - LABELS) / tokens.length;
  context.clearRect(0, 0, canvas.width, canvas.height);
  const most = Math.max(...weights.flat(), 1e-9);
  const accent = colour("--accent");
  const edge = (place) => Math.round(LABELS + place * side);
  context.fillStyle = accent;
  weights.forEach((row, at) => row.forEach((weight, seen) => {
    // The square root shows small weights too.
    context.globalAlpha = Math.sqrt(weight / most);
    context.fillRect(edge(seen), edge(at), edge(seen + 1) - edge(seen), edge(at + 1) - edge(at));
  }));
  context.globalAlpha = 1;
  context.strokeStyle = colour("--line");
  context.strokeRect(LABELS, LABELS, side * tokens.length, side * tokens.length);
  context.fillStyle = colour("--ink");
  context.font = `${Math.max(8, Math.min(14, side * 0.8))}px system-ui, sans-serif`;
  context.textBaseline = "middle";
  tokens.forEach((token, at) => {
    const middle = LABELS + (at + 0.5) * side;
    context.textAlign = "right";
    context.fillText(token, LABELS - 5, middle, LABELS - 8);
    context.save();
    context.translate(middle, LABELS - 5);
    context.rotate(-Math.PI / 2);
    context.textAlign = "left";
    context.fillText(token, 0, 0, LABELS - 8);
    context.restore();
  });
}

export function start(state) {
  const form = byId("attention-form");
  const { plan, layer } = form.elements;
  plan.replaceChildren(...state.plans.map((name) => element("option", name)));
  if (state.plans.includes(state.plan)) plan.value = state.plan;
  let result = null;
  const percent = (value) => `${Math.round(100 * value)} %`;
  const show = () => {
    byId("layer-number").textContent = layer.value;
    if (!result) return;
    const mapsOfLayer = result.layers[Number(layer.value)];
    for (const [name, maps] of [["before", [mapsOfLayer.before]], ["after", mapsOfLayer.after]]) {
      const canvas = byId(`map-${name}`);
      const mean = maps[0].map((row, at) => row.map((_, seen) => maps.reduce((sum, map) => sum + map[at][seen], 0) / maps.length));
      draw(canvas, mean, result.tokens);
      canvas.setAttribute("aria-label", `Attention of layer ${layer.value}, ${name} the conversion; the first token gets `
        + percent(mapsOfLayer[`sink_${name}`]));
    }
    const runs = mapsOfLayer.after.length > 1 ? ` Under the plan the layer runs ${mapsOfLayer.after.length} times; the mean is shown.` : "";
    byId("attention-note").textContent = `Each row is a token, and shows where it looks, averaged over heads. The first token gets `
      + `${percent(mapsOfLayer.sink_before)} of the attention in this layer, ${percent(mapsOfLayer.sink_after)} under the plan.${runs}`;
  };
  onSubmit(form, async (signal) => {
    const { layer: _, ...planSettings } = settings(form);
    result = await ask("v1/attention", { text: byId("attention-text").value, ...planSettings }, signal);
    layer.max = result.layers.length - 1;
    layer.value = Math.min(Number(layer.value), result.layers.length - 1);
    byId("map-plan").textContent = `Under ${result.plan}`;
    byId("maps").hidden = false;
    show();
  });
  layer.addEventListener("input", show);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  for (const name of ["before", "after"]) {
    byId(`map-${name}`).addEventListener("mousemove", (event) => {
      const canvas = event.target;
      const scale = canvas.width / canvas.getBoundingClientRect().width;
      const side = (canvas.width - LABELS) / result.tokens.length;
      const [seen, at] = [event.offsetX, event.offsetY].map((place) => Math.floor((place * scale - LABELS) / side));
      const mapsOfLayer = result.layers[Number(layer.value)];
      const map = name === "before" ? mapsOfLayer.before : mapsOfLayer.after[0];
      const weight = map[at]?.[seen];
      canvas.title = weight === undefined ? "" : `${result.tokens[at]} looks at ${result.tokens[seen]}: ${weight.toFixed(3)}`;
    });
  }
}
