// The page: what is served, and one panel at a time.

import { ask } from "./api.js";
import { start as startAttention } from "./attention.js";
import { start as startFill } from "./fill.js";
import { start as startFind } from "./find.js";
import { byId, element } from "./form.js";
import { start as startWrite } from "./write.js";

const tabs = [...document.querySelectorAll("[role=tab]")];

function choose(tab, focus = true) {
  for (const item of tabs) {
    const isChosen = item === tab;
    item.setAttribute("aria-selected", String(isChosen));
    item.tabIndex = isChosen ? 0 : -1;
    byId(item.getAttribute("aria-controls")).hidden = !isChosen;
  }
  history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`);
  if (focus) tab.focus();
}

tabs.forEach((tab, place) => {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const end = { Home: 0, End: tabs.length - 1 }[event.key];
    if (step === undefined && end === undefined) return;
    event.preventDefault();
    choose(tabs[end ?? (place + step + tabs.length) % tabs.length]);
  });
});
const named = tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash);
if (named) choose(named, false);

// The page is there before the model is; what it can do is asked until the model is loaded.
const UNAVAILABLE = 503, PAUSE_MS = 1000;
async function loaded() {
  for (;;) {
    try {
      return await ask("v1/playground");
    } catch (error) {
      if (error.status !== UNAVAILABLE) throw error;
      byId("model").textContent = "The model is being loaded …";
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    }
  }
}

try {
  const state = await loaded();
  byId("model").textContent = `${state.model}: ${state.plan}, ${state.dimensions} dimensions, ${state.context} tokens of context`;
  startWrite(state);
  startFill(state);
  startFind(state);
  startAttention(state);
  document.body.dataset.ready = "true";
} catch (error) {
  byId("model").replaceWith(element("p", error.message, "problem"));
}
