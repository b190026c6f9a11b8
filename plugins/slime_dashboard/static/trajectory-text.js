// Texts of tokens in a form that can be seen: control characters, directions and bytes are spelt out.

/** Characters that change the direction of text, or cannot be seen. A space is seen by the background of its token. */
const HIDDEN = /[\p{Cc}\p{Cf}\p{Co}\p{Cn}\u2028\u2029\u115f\u1160\u3164\uffa0\ufe00-\ufe0f]/u;
const MARK = /^\p{M}/u;

/**
 * Return the parts of `text`: `{text, kind}`. `kind` is "text", "sign" (stands for a character that cannot be seen) or
 * "break" (a line ends after its sign).
 */
export function visible(text) {
  const parts = [];
  let plain = "";
  const add = (kind, sign) => {
    if (plain) parts.push({ kind: "text", text: plain });
    plain = "";
    parts.push({ kind, text: sign });
  };
  if (MARK.test(text)) plain = "\u25cc"; // else the accent would stand on the token before
  for (const character of text) {
    if (character === "\n") add("break", "\u21b5");
    else if (character === "\t") add("sign", "\u21e5");
    else if (character === "\u00a0") add("sign", "U+00A0");
    else if (HIDDEN.test(character) && !isJoiner(character, text)) add("sign", sign(character));
    else plain += character;
  }
  if (plain) parts.push({ kind: "text", text: plain });
  return parts;
}

/** Emoji are joined by a character that cannot be seen, and coloured by another one. */
function isJoiner(character, text) {
  return (character === "\u200d" || character === "\ufe0f") && text.length > 1 && /\p{Extended_Pictographic}/u.test(text);
}

function sign(character) {
  const code = character.codePointAt(0);
  if (code < 0x80) return `\\x${code.toString(16).padStart(2, "0")}`; // fonts often lack the pictures of controls
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

/** Return the text of a token, quoted; every character that cannot be seen is an escape. */
export function quoted(text) {
  const inner = [...text].map((character) => {
    if (character === "\n") return "\\n";
    if (character === "\t") return "\\t";
    if (character === "\r") return "\\r";
    if (character === '"' || character === "\\") return `\\${character}`;
    return HIDDEN.test(character) ? `\\u{${character.codePointAt(0).toString(16)}}` : character;
  });
  return `"${inner.join("")}"`;
}

/** Return bytes, given in hexadecimal, as `f0 9f`. */
export function spaced(hex) {
  return hex.match(/../g).join(" ");
}

/** Add the shown form of a token, `{id, text, bytes}`, to `parent`. `spaces`: a space is shown as a sign, too. */
export function writeToken(parent, { id, text, bytes }, spaces = false) {
  if (text) {
    for (const part of visible(spaces ? text.replaceAll(" ", "\u2423") : text)) {
      if (part.kind === "text") {
        parent.append(part.text);
        continue;
      }
      const made = document.createElement("span");
      made.className = "sign";
      made.textContent = part.text;
      parent.append(made);
      if (part.kind === "break") parent.append("\n");
    }
    return;
  }
  const made = document.createElement("span");
  made.className = "sign bytes";
  made.textContent = bytes ? spaced(bytes) : `#${id}`;
  parent.append(made);
}

/** Return a short name of a token for screen readers and messages. */
export function nameOf({ id, text, bytes }) {
  if (text) return quoted(text);
  return bytes ? `bytes ${spaced(bytes)}` : `token ${id}`;
}
