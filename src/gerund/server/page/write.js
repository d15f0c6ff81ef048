// Completion beside chat.

import { stream } from "./api.js";
import { byId, element, onSubmit, settings } from "./form.js";

export function start(state) {
  const shared = () => settings(byId("write"));
  const output = byId("complete-output");
  onSubmit(byId("complete"), async (signal) => {
    const prompt = byId("complete-text").value;
    const note = byId("complete-note");
    const written = document.createTextNode("");
    output.replaceChildren(element("span", prompt, "given"), written);
    note.textContent = "";
    const began = performance.now();
    const body = { prompt, stream: true, stream_options: { include_usage: true }, ...shared() };
    for await (const event of stream("v1/completions", body, signal)) {
      written.data += event.choices[0]?.text ?? "";
      if (event.usage) {
        const seconds = (performance.now() - began) / 1000;
        note.textContent = `${event.usage.completion_tokens} tokens in ${seconds.toFixed(1)} s`;
      }
    }
  });

  byId("chat-none").hidden = state.chat;
  byId("chat-own").hidden = !state.chat;
  const messages = [];
  const list = byId("chat-messages");
  const show = (role, text) => {
    const item = element("li", text, role);
    item.setAttribute("aria-label", role === "user" ? "You" : "The model");
    list.append(item);
    list.scrollTop = list.scrollHeight;
    return item;
  };
  onSubmit(byId("chat"), async (signal) => {
    const field = byId("chat-text");
    const asked = { role: "user", content: field.value };
    const [question, answer] = [show("user", asked.content), show("assistant", "")];
    field.value = "";
    try {
      const body = { messages: [...messages, asked], stream: true, ...shared() };
      for await (const event of stream("v1/chat/completions", body, signal)) {
        answer.textContent += event.choices[0]?.delta?.content ?? "";
        list.scrollTop = list.scrollHeight;
      }
    } catch (error) {
      // What was not answered is not part of the conversation, unless it was stopped on the way.
      if (!answer.textContent) {
        question.remove(); answer.remove();
        field.value = asked.content;
        throw error;
      }
      if (error.name !== "AbortError") throw error;
    }
    messages.push(asked, { role: "assistant", content: answer.textContent });
  });
  byId("chat-new").addEventListener("click", () => { messages.length = 0; list.replaceChildren(); byId("chat-text").focus(); });
}
