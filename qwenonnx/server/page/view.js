// Showing messages and the list of conversations.

import { copyText, element, renderMarkdown } from "./markdown.js";

/** The messages of one conversation. `actions` has `edit(message, text)` and `regenerate(message)`. */
export class LogView {
  constructor(log, actions) {
    this.log = log;
    this.actions = actions;
    this.articles = new Map();
    this.pending = null;
  }

  show(conversation) {
    const { messages, from = 0 } = conversation;
    const follows = this._isAtEnd() || this.conversation !== conversation;
    this.conversation = conversation;
    this.articles.clear();
    const nodes = messages.flatMap((message, at) => {
      const article = this._article(message, at === messages.length - 1);
      this.articles.set(message, article);
      const cut = at === from && from > 0;
      return cut ? [element("p", { className: "note", textContent: "The model no longer sees what is above." }), article] : [article];
    });
    this.log.replaceChildren(...nodes);
    if (follows) this._toEnd();
  }

  /** Shows a message's new text with the next frame. */
  update(message) {
    if (this.pending === message) return;
    this.pending = message;
    requestAnimationFrame(() => {
      this.pending = null;
      const article = this.articles.get(message);
      if (!article) return;
      const follows = this._isAtEnd();
      this._fill(article.querySelector(".text"), message);
      if (follows) this._toEnd();
    });
  }

  _article(message, isLast) {
    const mine = message.role === "user";
    const text = element("div", { className: "text", dir: "auto" });
    this._fill(text, message);
    const article = element("article", { "aria-label": mine ? "You" : "Answer" }, text);
    article.dataset.role = message.role;
    article.append(this._tools(article, message, isLast));
    return article;
  }

  _fill(node, message) {
    node.classList.toggle("waiting", message.role === "assistant" && !message.content);
    node.replaceChildren(message.role === "user" ? message.content : renderMarkdown(message.content));
  }

  _tools(article, message, isLast) {
    const tools = element("div", { className: "tools" });
    const add = (label, action) => {
      const button = element("button", { type: "button", textContent: label });
      button.addEventListener("click", () => action(button));
      tools.append(button);
    };
    add("Copy", async (button) => {
      button.textContent = (await copyText(message.content)) ? "Copied" : "Could not copy";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    if (message.role === "user") add("Edit", () => this._edit(article, message));
    else if (isLast) add("Regenerate", () => this.actions.regenerate(message));
    const facts = [message.note, message.stats].filter(Boolean).join(" ");
    if (facts) tools.append(element("span", { className: "stats", textContent: facts }));
    return tools;
  }

  _edit(article, message) {
    const area = element("textarea", { value: message.content, dir: "auto", rows: 3, "aria-label": "Edit message" });
    const send = element("button", { type: "button", textContent: "Send again" });
    const cancel = element("button", { type: "button", textContent: "Cancel" });
    const editor = element("div", { className: "editor" }, area, send, cancel);
    send.addEventListener("click", () => area.value.trim() && this.actions.edit(message, area.value));
    cancel.addEventListener("click", () => this.show(this.conversation));
    article.replaceChildren(editor);
    area.focus();
  }

  _isAtEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60;
  }

  _toEnd() {
    this.log.scrollTop = this.log.scrollHeight;
  }
}

/** The list of conversations with `select(id)` and `remove(id)`. */
export function showConversations(list, store, { select, remove }) {
  list.replaceChildren(
    ...store.conversations.map((one) => {
      const title = one.title || "New conversation";
      const open = element("button", { type: "button", className: "title", textContent: title, dir: "auto" });
      open.addEventListener("click", () => select(one.id));
      const gone = element("button", { type: "button", textContent: "✕", "aria-label": `Delete ${title}` });
      gone.addEventListener("click", () => remove(one.id));
      const item = element("li", {}, open, gone);
      if (one === store.current) {
        item.dataset.current = "";
        open.setAttribute("aria-current", "true");
      }
      return item;
    }),
  );
}
