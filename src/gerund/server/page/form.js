// What the forms of the page have in common: running one request at a time, stopping it, saying what went wrong.

export const byId = (id) => document.getElementById(id);

export function element(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

// Reads the numbers and choices of settings; what is left empty is left out.
export function settings(root) {
  const values = {};
  for (const field of root.querySelectorAll(".settings [name]")) {
    if (field.value === "") continue;
    values[field.name] = field.type === "number" || field.type === "range" ? Number(field.value) : field.value;
  }
  return values;
}

// Runs `work(signal)` when the form is sent. Ctrl + Enter sends, Stop and Escape stop.
export function onSubmit(form, work) {
  const [problem, stop] = [form.querySelector(".problem"), form.querySelector("[data-stop]")];
  const submit = form.querySelector("[type=submit]");
  let running = null;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) return;
    running = new AbortController();
    problem.hidden = true;
    submit.disabled = true;
    form.setAttribute("aria-busy", "true");
    if (stop) stop.hidden = false;
    try {
      await work(running.signal);
    } catch (error) {
      if (error.name !== "AbortError") {
        problem.textContent = error.message;
        problem.hidden = false;
      }
    } finally {
      running = null;
      submit.disabled = false;
      form.removeAttribute("aria-busy");
      if (stop) stop.hidden = true;
    }
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); form.requestSubmit(); }
    if (event.key === "Escape") running?.abort();
  });
  stop?.addEventListener("click", () => running?.abort());
}

// Returns a bar of a score between the least and the greatest that is shown.
export function bar(score, least, greatest) {
  const made = element("span", undefined, "bar");
  const fill = element("span");
  const fraction = greatest > least ? (score - least) / (greatest - least) : 1;
  fill.style.width = `${Math.round(5 + 95 * fraction)}%`;
  made.append(fill);
  made.setAttribute("aria-hidden", "true");
  return made;
}

// Fills a list with scored texts: [{text, score, title, parts}], best first.
export function showHits(list, hits, nothing) {
  list.replaceChildren();
  if (!hits.length) { list.append(element("li", nothing)); return; }
  const scores = hits.map((hit) => hit.score);
  const [least, greatest] = [Math.min(...scores), Math.max(...scores)];
  hits.forEach((hit, place) => {
    const item = element("li");
    const head = element("div", undefined, "head");
    head.append(element("span", `${place + 1}.`), bar(hit.score, least, greatest), element("span", hit.score.toFixed(3)));
    for (const part of hit.head ?? []) head.append(element("span", part));
    const text = element("p", undefined, "text");
    for (const part of hit.parts ?? [hit.text]) text.append(part);
    item.append(head, text);
    list.append(item);
  });
}
