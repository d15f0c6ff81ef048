// A text editor with gaps that are filled.

import { ask } from "./api.js";
import { byId, element, onSubmit, settings } from "./form.js";

const GAP = "[blank]";

export function start() {
  const [form, field, output, keep] = ["fill-form", "fill-text", "fill-output", "fill-keep"].map(byId);
  let filled = "";
  const putGap = () => {
    field.setRangeText(GAP, field.selectionStart, field.selectionEnd, "end");
    field.focus();
  };
  byId("fill-gap").addEventListener("click", putGap);
  field.addEventListener("keydown", (event) => {
    if (event.altKey && event.key.toLowerCase() === "g") { event.preventDefault(); putGap(); }
  });
  onSubmit(form, async (signal) => {
    keep.hidden = true;
    const pieces = field.value.split(GAP);
    const result = await ask("infill", { text: field.value, ...settings(form) }, signal);
    output.replaceChildren();
    pieces.forEach((piece, place) => {
      output.append(piece);
      if (place < result.spans.length) output.append(element("mark", result.spans[place]));
    });
    filled = result.text;
    keep.hidden = false;
  });
  keep.addEventListener("click", () => { field.value = filled; output.replaceChildren(); keep.hidden = true; field.focus(); });
}
