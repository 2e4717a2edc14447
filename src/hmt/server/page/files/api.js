// The server's API: with a key where there is one, which stays in this tab.

const KEY = "hmt-key";

/** What went wrong, in words for people.  status: of HTTP; 0 where there was no answer. */
export class Problem extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export function storedKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function storeKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  const key = storedKey();
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Problem("The server does not answer.");
  }
  if (!response.ok) throw new Problem(await complaint(response), response.status);
  return response;
}

async function complaint(response) {
  try {
    const body = await response.json();
    return sentence(body.error.message);
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

function sentence(text) {
  const message = String(text);
  return message.charAt(0).toUpperCase() + message.slice(1);
}

/** What the machine does.  model: whose; null for the server's first one. */
export async function state(model) {
  const path = "v1/hmt/state" + (model === null ? "" : `?model=${encodeURIComponent(model)}`);
  const response = await ask(path, { signal: AbortSignal.timeout(8000) }).catch((error) => {
    throw error instanceof Problem ? error : new Problem("The server does not answer.");
  });
  return response.json();
}

/** Have the server load one of its models; resolves once it can be asked. */
export async function load(model) {
  await ask("v1/models/load", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ model }),
  });
}

/** Events of a streamed chat, as OpenAI has them.  Aborting `signal` ends the answer. */
export async function* chat(body, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response.body, signal)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Problem(sentence(event.error.message));
    yield event;
  }
  throw new Problem("The connection ended before the answer did.");
}

async function* events(stream, signal) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (signal.aborted) throw error;
      throw new Problem("The connection broke before the answer ended.");
    }
    if (part.done) return;
    text += part.value;
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      const lines = text.slice(0, end).split("\n");
      text = text.slice(end + 2);
      const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
      if (data.length) yield data.join("\n");
    }
  }
}
