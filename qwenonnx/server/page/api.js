// The server's API as this page uses it.

/** What went wrong, in terms that the page can act on. */
export class ApiError extends Error {
  constructor(kind, message, { retryAfter = 0 } = {}) {
    super(message);
    this.kind = kind; // "busy", "context", "key", "gone", "request"
    this.retryAfter = retryAfter;
  }
}

export class Api {
  constructor() {
    this.key = "";
  }

  /** The state of the server: "ready", or what it says itself, or "gone". */
  async health() {
    try {
      const response = await fetch("health", { signal: AbortSignal.timeout(5000) });
      return response.ok ? "ready" : ((await response.json()).status ?? "gone");
    } catch {
      return "gone";
    }
  }

  async model() {
    const response = await this._fetch("v1/models");
    return (await response.json()).data[0];
  }

  /** Tokens of a text, or null where the server does not tell. */
  async countTokens(text, signal) {
    try {
      const response = await this._fetch("tokenize", { prompt: text }, signal);
      return (await response.json()).count ?? null;
    } catch {
      return null;
    }
  }

  /** Yields the chunks of a streamed chat completion. */
  async *chat(body, signal) {
    const response = await this._fetch("v1/chat/completions", { ...body, stream: true, stream_options: { include_usage: true } }, signal);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "";
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (signal.aborted) throw error;
        throw new ApiError("gone", "The connection to the server was lost.");
      }
      if (part.done) throw new ApiError("gone", "The server ended the answer early.");
      held += part.value;
      const frames = held.split("\n\n");
      held = frames.pop();
      for (const frame of frames) {
        const data = frame.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
        if (data === "[DONE]") return;
        if (!data) continue;
        const chunk = JSON.parse(data);
        if (chunk.error) throw fault(500, chunk.error, 0);
        yield chunk;
      }
    }
  }

  async _fetch(path, body, signal) {
    const headers = this.key ? { Authorization: `Bearer ${this.key}` } : {};
    const options = body === undefined ? { headers } : {
      method: "POST", headers: { ...headers, "Content-Type": "application/json" }, body: JSON.stringify(body),
    };
    let response;
    try {
      response = await fetch(path, { ...options, signal });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new ApiError("gone", "The server cannot be reached.");
    }
    if (response.ok) return response;
    const error = await response.json().then((answer) => answer.error, () => null);
    throw fault(response.status, error, Number(response.headers.get("retry-after")) || 0);
  }
}

function fault(status, error, retryAfter) {
  const message = error?.message ?? `The server answered with status ${status}.`;
  if (error?.code === "context_length_exceeded") return new ApiError("context", message);
  if (status === 401) return new ApiError("key", message);
  if (status === 429) return new ApiError("busy", message, { retryAfter });
  if (status === 503) return new ApiError("gone", message);
  return new ApiError("request", message);
}
