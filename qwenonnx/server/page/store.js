// Conversations and settings, kept in this browser.

const CONVERSATIONS = "qwenonnx.conversations";
const SETTINGS = "qwenonnx.settings";

function read(key, fallback) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? fallback;
  } catch {
    return fallback;
  }
}

/** A list of `{id, title, messages: [{role, content, note, stats}]}`, the newest first; `current` is always one of them. */
export class Store {
  constructor() {
    const kept = read(CONVERSATIONS, []);
    this.conversations = Array.isArray(kept) ? kept.filter((one) => Array.isArray(one?.messages)) : [];
    this.settings = { system: "", draft: "", ...read(SETTINGS, {}) };
    this.current = this.conversations[0] ?? this.begin();
  }

  /** A new conversation, or the empty one that is there. */
  begin() {
    const empty = this.conversations.find((one) => !one.messages.length);
    this.current = empty ?? { id: `${Date.now()}-${Math.random()}`, title: "", messages: [] };
    if (!empty) this.conversations.unshift(this.current);
    return this.current;
  }

  select(id) {
    this.current = this.conversations.find((one) => one.id === id) ?? this.current;
  }

  remove(id) {
    this.conversations = this.conversations.filter((one) => one.id !== id);
    if (this.current.id === id) this.current = this.conversations[0] ?? this.begin();
    this.save();
  }

  /** Writes everything; where there is no room, the oldest conversations go. Returns how many went. */
  save() {
    let dropped = 0;
    for (;;) {
      try {
        localStorage.setItem(SETTINGS, JSON.stringify(this.settings));
        localStorage.setItem(CONVERSATIONS, JSON.stringify(this.conversations.filter((one) => one.messages.length)));
        return dropped;
      } catch {
        const oldest = this.conversations.findLastIndex((one) => one !== this.current);
        if (oldest < 0) return dropped;
        this.conversations.splice(oldest, 1);
        dropped++;
      }
    }
  }
}
