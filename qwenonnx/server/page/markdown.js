// Markdown as DOM nodes. Text only ever becomes text nodes, so nothing that a model writes can become markup, and images
// become links, so nothing is fetched from anywhere.

const SAFE_LINK = /^(https?:|mailto:)/i;
const LIST_ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const FENCE = /^\s*(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

export function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("aria-") || key === "role") node.setAttribute(key, value);
    else node[key] = value;
  }
  node.append(...children);
  return node;
}

/** The text as a document fragment; a code block that is not closed yet reaches to the end. */
export function renderMarkdown(text) {
  const fragment = document.createDocumentFragment();
  fragment.append(...blocks(text.replace(/\r\n?/g, "\n").split("\n")));
  return fragment;
}

function blocks(lines) {
  const nodes = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (fence) {
      const start = ++at;
      while (at < lines.length && !closes(lines[at], fence[1])) at++;
      nodes.push(codeBlock(lines.slice(start, at).join("\n"), fence[2]));
      at++;
    } else if (!line.trim()) {
      at++;
    } else if (/^#{1,6}\s/.test(line)) {
      const level = line.match(/^#+/)[0].length;
      // The page's own headings are the first two levels.
      const heading = element("h" + Math.min(level + 2, 6), { dir: "auto" });
      heading.append(...inline(line.slice(level).replace(/\s+#+\s*$/, "").trim()));
      nodes.push(heading);
      at++;
    } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
      nodes.push(element("hr"));
      at++;
    } else if (/^\s*>/.test(line)) {
      const start = at;
      while (at < lines.length && /^\s*>/.test(lines[at])) at++;
      const inner = lines.slice(start, at).map((quoted) => quoted.replace(/^\s*>\s?/, ""));
      nodes.push(element("blockquote", { dir: "auto" }, ...blocks(inner)));
    } else if (LIST_ITEM.test(line)) {
      const start = at;
      while (at < lines.length && continuesList(lines, at, start)) at++;
      nodes.push(list(lines.slice(start, at)));
    } else if (line.includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && DIVIDER.test(lines[at + 1])) {
      const start = at;
      while (at < lines.length && lines[at].includes("|")) at++;
      nodes.push(table(lines.slice(start, at)));
    } else {
      const start = at++;
      while (at < lines.length && lines[at].trim() && !beginsBlock(lines[at])) at++;
      const paragraph = element("p", { dir: "auto" });
      paragraph.append(...inline(lines.slice(start, at).join("\n")));
      nodes.push(paragraph);
    }
  }
  return nodes;
}

function closes(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text === fence[0].repeat(text.length);
}

function beginsBlock(line) {
  return FENCE.test(line) || /^#{1,6}\s/.test(line) || /^\s*>/.test(line) || LIST_ITEM.test(line);
}

function continuesList(lines, at, start) {
  if (at === start || LIST_ITEM.test(lines[at]) || /^\s{2,}\S/.test(lines[at])) return true;
  if (lines[at].trim()) return !beginsBlock(lines[at]) && lines[at - 1].trim() !== "";
  const next = lines[at + 1] ?? "";
  return LIST_ITEM.test(next) || /^\s{2,}\S/.test(next);
}

function list(lines) {
  const [, indent, marker] = LIST_ITEM.exec(lines[0]);
  const ordered = /\d/.test(marker);
  const node = element(ordered ? "ol" : "ul", { dir: "auto" });
  if (ordered) node.start = parseInt(marker, 10);
  let item = [];
  const finish = () => {
    if (!item.length) return;
    const children = blocks(item);
    // A single line needs no paragraph of its own.
    const only = children.length && children[0].tagName === "P" ? [...children.shift().childNodes] : [];
    node.append(element("li", {}, ...only, ...children));
  };
  for (const line of lines) {
    const match = LIST_ITEM.exec(line);
    if (match && match[1].length <= indent.length) {
      finish();
      item = [match[3]];
    } else {
      item.push(line.replace(new RegExp(`^\\s{0,${indent.length + 2}}`), ""));
    }
  }
  finish();
  return node;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, kind) => element("tr", {}, ...cells(line).map((cell) => element(kind, { dir: "auto" }, ...inline(cell))));
  const head = element("thead", {}, row(lines[0], "th"));
  const body = element("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  return element("div", { className: "table" }, element("table", {}, head, body));
}

function codeBlock(code, language) {
  const copy = element("button", { type: "button", textContent: "Copy code" });
  copy.addEventListener("click", async () => {
    copy.textContent = (await copyText(code)) ? "Copied" : "Could not copy";
    setTimeout(() => (copy.textContent = "Copy code"), 1500);
  });
  const bar = element("div", {}, element("span", { textContent: language || "text" }), copy);
  const body = element("pre", { tabIndex: 0 }, element("code", { textContent: code }));
  return element("div", { className: "code" }, bar, body);
}

/** Puts text on the clipboard; without a secure origin the old way is the only one. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = element("textarea", { value: text });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

const INLINE = [
  [/^\\([\\`*_{}[\]()#+\-.!|~>])/, (m) => [m[1]]],
  [/^(`+)([^]*?[^`])\1(?!`)/, (m) => [element("code", { textContent: m[2].replace(/\n/g, " ") })]],
  [/^\*\*(?=\S)([^]*?\S)\*\*/, (m) => [element("strong", {}, ...inline(m[1]))]],
  [/^__(?=\S)([^]*?\S)__(?!\w)/, (m) => [element("strong", {}, ...inline(m[1]))]],
  [/^\*(?=[^\s*])([^*]*?[^\s*])\*(?!\*)/, (m) => [element("em", {}, ...inline(m[1]))]],
  [/^_(?=[^\s_])([^_]*?[^\s_])_(?!\w)/, (m) => [element("em", {}, ...inline(m[1]))]],
  [/^~~(?=\S)([^]*?\S)~~/, (m) => [element("del", {}, ...inline(m[1]))]],
  [/^!?\[([^\]]*)\]\(\s*<?([^)\s>]*)>?(?:\s+"[^"]*")?\s*\)/, (m) => link(m[2], m[1] || m[2], m[0])],
  [/^<(https?:\/\/[^>\s]+)>/i, (m) => link(m[1], m[1], m[0])],
  [/^https?:\/\/[^\s<>"')\]]*[^\s<>"')\].,;:!?]/i, (m) => link(m[0], m[0], m[0])],
  [/^ {2,}\n/, () => [element("br")]],
];

function link(target, label, source) {
  if (!SAFE_LINK.test(target)) return [source];
  const properties = { href: target, target: "_blank", rel: "noopener noreferrer nofollow" };
  return [element("a", properties, ...(label === target ? [label] : inline(label)))];
}

function inline(text) {
  const nodes = [];
  let plain = "";
  let rest = text;
  const flush = () => {
    if (plain) nodes.push(plain);
    plain = "";
  };
  while (rest) {
    const word = /[A-Za-z0-9]$/.test(plain) && /^[_hH]/.test(rest); // snake_case and words that end in "http"
    const rule = word ? undefined : INLINE.find(([pattern]) => pattern.test(rest));
    if (rule) {
      const match = rule[0].exec(rest);
      flush();
      nodes.push(...rule[1](match));
      rest = rest.slice(match[0].length);
    } else {
      const next = rest.slice(1).search(/[\\`*_~![<]|https?:| {2,}\n/i);
      const length = next < 0 ? rest.length : next + 1;
      plain += rest.slice(0, length);
      rest = rest.slice(length);
    }
  }
  flush();
  return nodes;
}
