// Requests to the server: answers, streams, and errors in the server's own words.

export class Problem extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function send(path, body, signal) {
  let answer;
  try {
    answer = await fetch(path, body === undefined ? { signal } : {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server does not answer. Is it still running?");
  }
  if (!answer.ok) {
    let said = `The server answered ${answer.status}.`;
    try { said = (await answer.json()).error.message; } catch { /* not the server's own answer */ }
    const wait = answer.headers.get("Retry-After");
    throw new Problem(answer.status === 429 && wait ? `${said} Try again in ${wait} s.` : said, answer.status);
  }
  return answer;
}

export async function ask(path, body, signal) {
  return (await send(path, body, signal)).json();
}

// Yields the objects of a stream of server-sent events.
export async function* stream(path, body, signal) {
  const answer = await send(path, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const content = JSON.parse(data);
      if (content.error) throw new Problem(content.error.message);
      yield content;
    }
  }
}
