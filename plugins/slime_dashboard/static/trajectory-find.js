// Search in the text of one branch, also in tokens that are not in the document.

const bytesOf = (hex) => Uint8Array.from(hex.match(/../g), (one) => parseInt(one, 16));

/** The text of a branch of `tokens` tokens. `about(index)` returns the `text` and `bytes` of a token. */
export class BranchText {
  #texts = [];
  #starts = []; // places in the whole text where the tokens with text begin
  #tokens = []; // indices of the tokens with text
  #length = 0;
  #part = null; // tokens that are no UTF-8 by themselves: `{index, decoder, text}`
  #whole = null;

  constructor(tokens, about) {
    for (let index = 0; index < tokens; index += 1) this.#add(index, about(index));
    this.#endPart();
  }

  /** `text` is null for a part of a character, whose `bytes` are hexadecimal, or not known. */
  #add(index, { text, bytes }) {
    if (text === null && bytes) {
      this.#part ??= { index, decoder: new TextDecoder(), text: "" };
      this.#part.text += this.#part.decoder.decode(bytesOf(bytes), { stream: true });
      return;
    }
    this.#endPart();
    if (text) this.#push(index, text);
  }

  /** Return the indices of the tokens in which `wanted` begins, in order. Case counts. */
  find(wanted) {
    this.#whole ??= this.#texts.join("");
    const found = [];
    let token = 0;
    for (let at = this.#whole.indexOf(wanted); wanted && at >= 0; at = this.#whole.indexOf(wanted, at + wanted.length)) {
      while (this.#starts[token + 1] <= at) token += 1;
      found.push(this.#tokens[token]);
    }
    return found;
  }

  #endPart() {
    if (!this.#part) return;
    const { index, decoder, text } = this.#part;
    this.#part = null;
    const whole = text + decoder.decode();
    if (whole) this.#push(index, whole);
  }

  #push(index, text) {
    this.#texts.push(text);
    this.#starts.push(this.#length);
    this.#tokens.push(index);
    this.#length += text.length;
  }
}
