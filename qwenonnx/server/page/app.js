// The page: keeps the conversation, asks the server, and shows what comes.

import { Api, ApiError } from "./api.js";
import { Store } from "./store.js";
import { LogView, showConversations } from "./view.js";

const PARAMETERS = ["temperature", "top_p", "max_tokens", "seed"];
const $ = (id) => document.getElementById(id);

const api = new Api();
const store = new Store();
const view = new LogView($("log"), { edit, regenerate });
let running = null; // the AbortController of the answer that is under way
let contextLength = null;

// Asking

function messagesToSend(conversation) {
  const turns = conversation.messages.slice(conversation.from ?? 0);
  const system = store.settings.system.trim() ? [{ role: "system", content: store.settings.system }] : [];
  return [...system, ...turns.map(({ role, content }) => ({ role, content }))];
}

function parameters() {
  const given = PARAMETERS.filter((name) => Number.isFinite(store.settings[name]));
  return Object.fromEntries(given.map((name) => [name, store.settings[name]]));
}

async function ask(text) {
  const conversation = store.current;
  conversation.messages.push({ role: "user", content: text });
  conversation.title ||= text.trim().slice(0, 60);
  await answer(conversation);
}

async function answer(conversation) {
  if (running) return;
  notify("");
  const body = { messages: messagesToSend(conversation), ...parameters() };
  const message = { role: "assistant", content: "" };
  conversation.messages.push(message);
  redraw();
  const controller = (running = new AbortController());
  showRunning(true);
  const started = performance.now();
  let first = 0;
  try {
    for await (const chunk of api.chat(body, controller.signal)) {
      const text = chunk.choices[0]?.delta?.content ?? "";
      if (text) {
        first ||= performance.now();
        message.content += text;
        view.update(message);
      }
      if (chunk.choices[0]?.finish_reason === "length") message.note = "The answer was cut off at the limit of tokens.";
      if (chunk.usage) message.stats = statistics(chunk.usage, started, first, performance.now());
    }
  } catch (error) {
    if (controller.signal.aborted) message.note = "Stopped.";
    else explain(error, conversation);
  } finally {
    running = null;
    if (!message.content) conversation.messages.splice(conversation.messages.indexOf(message), 1);
    showRunning(false);
    save();
    redraw();
  }
}

function statistics(usage, started, first, ended) {
  const parts = [];
  if (first) parts.push(`first token after ${((first - started) / 1000).toFixed(2)} s`);
  if (usage.completion_tokens > 1 && first) {
    parts.push(`${((1000 * (usage.completion_tokens - 1)) / Math.max(ended - first, 1)).toFixed(1)} tokens/s`);
  }
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  parts.push(`${usage.prompt_tokens} prompt tokens, ${cached} of them cached`);
  return parts.join(" · ");
}

// What can go wrong, and what can be done then

function explain(error, conversation) {
  if (!(error instanceof ApiError)) throw error;
  const retry = ["Try again", () => answer(conversation)];
  if (error.kind === "busy") {
    const wait = error.retryAfter ? ` Try again in about ${error.retryAfter} seconds.` : "";
    notify(`The server is busy: its queue is full.${wait}`, [retry]);
  } else if (error.kind === "context") {
    const choices = canDrop(conversation) ? [["Leave out the oldest turns", () => dropOldest(conversation)]] : [];
    notify(`This conversation is too long for the model. ${error.message}`, choices);
  } else if (error.kind === "key") {
    notify("The server asks for an API key.", [["Enter the key", () => $("settings").showModal()], retry]);
  } else if (error.kind === "gone") {
    notify(`${error.message} Waiting for it to come back.`, [retry]);
    watch(1000);
  } else {
    notify(error.message, [retry]);
  }
}

/** Where the conversation could begin instead, about a third further on: at a message of the user. */
function laterStart(conversation) {
  const from = conversation.from ?? 0;
  const users = conversation.messages.map((one, at) => (one.role === "user" && at > from ? at : -1)).filter((at) => at > 0);
  return users[Math.floor(users.length / 3)];
}

const canDrop = (conversation) => laterStart(conversation) !== undefined;

function dropOldest(conversation) {
  conversation.from = laterStart(conversation);
  return answer(conversation);
}

function notify(text, choices = []) {
  const notice = $("notice");
  notice.replaceChildren(text);
  notice.hidden = !text;
  for (const [label, action] of choices) {
    const button = document.createElement("button");
    button.textContent = label;
    button.addEventListener("click", () => {
      notify("");
      action();
    });
    notice.append(button);
  }
}

// Editing

function edit(message, text) {
  if (running) return;
  const { messages } = store.current;
  store.current.messages = messages.slice(0, messages.indexOf(message));
  store.current.from = Math.min(store.current.from ?? 0, store.current.messages.length);
  ask(text);
}

function regenerate(message) {
  if (running) return;
  const { messages } = store.current;
  store.current.messages = messages.slice(0, messages.indexOf(message));
  answer(store.current);
}

// The server's state

let timer = 0;
async function watch(delay) {
  clearTimeout(timer);
  timer = setTimeout(async () => {
    const before = $("state").dataset.state;
    const state = document.hidden ? before : await api.health();
    $("state").dataset.state = state;
    $("state").textContent = state === "gone" ? "not reachable" : state;
    if (state === "ready" && before !== "ready") await greet(before);
    watch(state === "ready" ? 15000 : 2000);
  }, delay);
}

async function greet(before) {
  const waiting = before === "gone" && store.current.messages.at(-1)?.role === "user" && !running;
  if (waiting) notify("The server is back.", [["Try again", () => answer(store.current)]]);
  try {
    const model = await api.model();
    contextLength = model.max_model_len ?? null;
    $("model").textContent = model.id;
  } catch (error) {
    explain(error, store.current);
  }
}

// Controls

function showRunning(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  $("log").setAttribute("aria-busy", String(is));
}

function redraw() {
  view.show(store.current);
  showConversations($("conversations"), store, {
    select(id) {
      if (running) return;
      store.select(id);
      closeMenu();
      notify("");
      redraw();
    },
    remove(id) {
      if (running) return;
      store.remove(id);
      redraw();
    },
  });
}

function save() {
  const dropped = store.save();
  if (dropped) notify(`The browser's storage is full: ${dropped} of the oldest conversations were deleted.`);
}

function closeMenu() {
  delete $("sidebar").dataset.open;
  $("menu").setAttribute("aria-expanded", "false");
}

function fit() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

let pause = 0;
let counting = null;
function typed() {
  fit();
  clearTimeout(pause);
  pause = setTimeout(async () => {
    store.settings.draft = $("input").value;
    save();
    counting?.abort();
    counting = new AbortController();
    const text = $("input").value;
    const count = text.trim() ? await api.countTokens(text, counting.signal) : null;
    if (text !== $("input").value) return;
    $("count").textContent = count === null ? "" : `${count} tokens${contextLength ? ` of ${contextLength}` : ""}`;
  }, 300);
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("input").value;
  if (!text.trim() || running) return;
  $("input").value = "";
  typed();
  ask(text);
});
$("input").addEventListener("keydown", (event) => {
  // While an input method composes, Enter chooses characters (keyCode 229 in browsers that say so only there).
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
$("input").addEventListener("input", typed);
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", () => {
  if (running) return;
  store.begin();
  closeMenu();
  notify("");
  redraw();
  $("input").focus();
});
$("menu").addEventListener("click", () => {
  const open = $("sidebar").toggleAttribute("data-open");
  $("menu").setAttribute("aria-expanded", String(open));
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("settings").open) running ? running.abort() : closeMenu();
});
document.addEventListener("visibilitychange", () => document.hidden || watch(0));

// Settings

function showSettings() {
  $("system").value = store.settings.system;
  for (const name of PARAMETERS) $(name).value = store.settings[name] ?? "";
  $("key").value = api.key;
}

$("open-settings").addEventListener("click", () => {
  showSettings();
  $("settings").showModal();
});
$("settings").addEventListener("input", (event) => {
  const { id, value, valueAsNumber } = event.target;
  if (id === "system") store.settings.system = value;
  else if (id === "key") sessionStorage.setItem("qwenonnx.key", (api.key = value.trim()));
  else if (id === "preset" && value) $("system").value = store.settings.system = value;
  else if (PARAMETERS.includes(id)) store.settings[id] = Number.isFinite(valueAsNumber) ? valueAsNumber : undefined;
  save();
});
$("settings").addEventListener("close", () => watch(0));

async function loadPresets() {
  try {
    const presets = await (await fetch("page/presets.json")).json();
    for (const [name, preset] of Object.entries(presets)) $("preset").append(new Option(preset.title ?? name, preset.system));
  } catch {
    $("preset").parentElement.hidden = true; // the page works without them
  }
}

api.key = sessionStorage.getItem("qwenonnx.key") ?? "";
$("input").value = store.settings.draft ?? "";
fit();
redraw();
loadPresets();
watch(0);
$("input").focus();
