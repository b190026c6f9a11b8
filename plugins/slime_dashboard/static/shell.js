// Shared by all pages: requests with the user's key, polling, the state at the top, and elements with escaped text.

const KEY = "slime-router-key";
const base = new URL("../", import.meta.url); // the address of the dashboard, with a slash at its end
const content = document.getElementById("content");
const form = document.getElementById("sign-in");
const forget = document.getElementById("forget");

/** A data request was refused: the key is missing, wrong, or may not do this. */
export class KeyNeeded extends Error {}

/** Return the address of the page `name`, with the parameters of its query. */
export function pageAddress(name, parameters = {}) {
  const address = new URL(name, base);
  address.search = new URLSearchParams(parameters);
  return address.href;
}

/** Return the JSON of `data/NAME`. Throws KeyNeeded, or an Error whose message is for the user. */
export async function getData(name, parameters = {}) {
  const address = new URL(`data/${name}`, base);
  address.search = new URLSearchParams(parameters);
  const key = storedKey();
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  let answer;
  try {
    answer = await fetch(address, { headers, cache: "no-store", credentials: "omit", redirect: "error" });
  } catch {
    throw new Error("The router cannot be reached");
  }
  const body = await answer.json().catch(() => null);
  if (answer.ok && body !== null) return body;
  const message = body?.error?.message ?? `The router answered ${answer.status}`;
  throw answer.status === 401 || answer.status === 403 ? new KeyNeeded(message) : new Error(message);
}

/**
 * Call `task`, an async function, now, and again `interval` ms after each end, while the page is visible. If `interval`
 * is 0, call it again only when the page becomes visible, or a key is entered. Show the state at the top, and ask for a
 * key when one is needed. Return a function that calls `task` at once.
 */
export function poll(task, interval) {
  let timer = 0;
  let running = false;
  let again = false;
  const run = async () => {
    if (running) {
      again = true;
      return;
    }
    clearTimeout(timer);
    running = true;
    try {
      await task();
      setSignedIn();
    } catch (error) {
      if (error instanceof KeyNeeded) {
        askForKey(error.message);
      } else {
        console.error(error);
        setStatus("bad", error.message);
      }
    }
    running = false;
    if (again) {
      again = false;
      run();
    } else if (!document.hidden && form.hidden && interval) {
      timer = setTimeout(run, interval);
    }
  };
  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    if (!document.hidden && form.hidden) run();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const field = document.getElementById("key");
    keepKey(field.value.trim());
    field.value = "";
    run();
  });
  forget.addEventListener("click", () => {
    keepKey("");
    location.reload();
  });
  run();
  return run;
}

/** Show `text` at the top; screen readers read it out when it changes. `kind`: ok, warn, bad or wait. */
export function setStatus(kind, text) {
  const status = document.getElementById("status");
  status.dataset.kind = kind;
  if (status.textContent !== text) status.textContent = text;
}

/**
 * Make an element. `properties`: attributes; `class`, `dataset` and listeners (`onclick`) too. Children are elements
 * or text, which is never parsed as HTML; null is left out.
 */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "dataset") Object.assign(made.dataset, value);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

function storedKey() {
  try {
    return sessionStorage.getItem(KEY) ?? storedKey.memory ?? "";
  } catch {
    return storedKey.memory ?? "";
  }
}

function keepKey(key) {
  storedKey.memory = key;
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // Without storage, the key lasts as long as the page.
  }
}

function setSignedIn() {
  if (content.hidden) {
    const hadFocus = form.contains(document.activeElement);
    form.hidden = true;
    content.hidden = false;
    if (hadFocus) document.getElementById("main").focus();
    window.dispatchEvent(new Event("resize"));
  }
  forget.hidden = !storedKey();
}

function askForKey(message) {
  const hadKey = Boolean(storedKey());
  keepKey("");
  content.hidden = true;
  form.hidden = false;
  forget.hidden = true;
  setStatus("wait", "A key is needed");
  document.getElementById("sign-in-error").textContent = hadKey ? `The key is not accepted: ${message}` : "";
  document.getElementById("key").focus();
}
