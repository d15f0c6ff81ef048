// Search over an index; continuations and documents in the order of a scorer.

import { ask } from "./api.js";
import { byId, element, onSubmit, settings, showHits } from "./form.js";

// Words that no search by words looks at, such as "the"; the server says which.
let stopWords = new Set();

// A character of a script without spaces between words, and a run of them; Korean has spaces, but particles on its words.
const UNSPACED = "(?:[\\p{sc=Han}\\p{sc=Hira}\\p{sc=Kana}\\p{sc=Hang}\\p{sc=Thai}\\p{sc=Laoo}\\p{sc=Khmr}\\p{sc=Mymr}\u30fc]\\p{M}*)";

// Returns what to mark of a run: pairs of neighbours, as the search compares them; a single character as it is.
function pairs(run) {
  const characters = run.match(new RegExp(UNSPACED, "gu"));
  return characters.length < 2 ? characters : characters.slice(1).map((character, place) => characters[place] + character);
}

// Returns the text in parts, with the words of the query marked.
export function marked(text, query) {
  const asked = query.normalize("NFKC").toLowerCase();
  const runs = [...new Set((asked.match(new RegExp(`${UNSPACED}+`, "gu")) ?? []).flatMap(pairs))];
  const spaced = asked.replace(new RegExp(UNSPACED, "gu"), " ").match(/[\p{L}\p{N}][\p{L}\p{N}\p{M}]{2,}/gu) ?? [];
  const words = [...new Set(spaced)].filter((word) => !stopWords.has(word));
  if (!words.length && !runs.length) return [text];
  // A longer word may end otherwise in the text; a short one is itself.
  const stems = words.map((word) => (word.length > 3 ? `${word.slice(0, Math.max(3, word.length - 2))}[\\p{L}\\p{N}\\p{M}]*` : word));
  const whole = stems.length ? [`(?<![\\p{L}\\p{N}])(?:${stems.join("|")})(?![\\p{L}\\p{N}])`] : [];
  const parts = [];
  let at = 0;
  for (const match of text.matchAll(new RegExp([...whole, ...runs].join("|"), "giu"))) {
    parts.push(text.slice(at, match.index), element("mark", match[0]));
    at = match.index + match[0].length;
  }
  return [...parts, text.slice(at)];
}

function options(select, names) {
  select.replaceChildren(...names.map(([value, text]) => {
    const made = element("option", text);
    made.value = value;
    return made;
  }));
}

export function start(state) {
  stopWords = new Set(state.stop_words);
  const form = byId("search-form");
  form.hidden = !state.index;
  byId("search-none").hidden = Boolean(state.index);
  onSubmit(form, async (signal) => {
    const query = byId("search-text").value;
    const result = await ask("v1/search", { query, ...settings(form) }, signal);
    const hits = result.data.map((hit) => ({
      score: hit.score, parts: marked(hit.text, query), head: [hit.title, hit.source, hit.heading].filter(Boolean),
    }));
    showHits(byId("search-output"), hits, "Nothing was found.");
  });

  options(byId("candidates").elements.scorer, state.scorers.map((name) => [name, name]));
  onSubmit(byId("candidates"), async (signal) => {
    const { scorer, ...sampling } = settings(byId("candidates"));
    const prompt = byId("candidates-text").value;
    const written = await ask("v1/completions", { prompt, temperature: 0.9, top_p: 0.95, ...sampling }, signal);
    const texts = [...new Set(written.choices.map((choice) => choice.text).filter((text) => text.trim()))];
    const scored = texts.length
      ? await ask("v1/score", { prefix: prompt, continuations: texts, scorer }, signal) : { data: [] };
    const hits = texts.map((text, place) => ({ text, score: scored.data[place].score }));
    showHits(byId("candidates-output"), hits.sort((a, b) => b.score - a.score), "The model wrote nothing.");
  });

  options(byId("documents").elements.by, state.measures.map((name) => [name, name]));
  onSubmit(byId("documents"), async (signal) => {
    const query = byId("documents-query").value;
    const documents = byId("documents-text").value.split("\n").map((line) => line.trim()).filter(Boolean);
    const result = await ask("v2/rerank", { query, documents, ...settings(byId("documents")) }, signal);
    const hits = result.results.map((item) => ({ score: item.relevance_score, parts: marked(documents[item.index], query) }));
    showHits(byId("documents-output"), hits, "There are no documents.");
  });
}
