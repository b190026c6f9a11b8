// Sets the theme before the page is painted. "system" follows the browser; the choice stays in this browser.
"use strict";
{
  const KEY = "slime-router-theme";
  const THEMES = ["system", "light", "dark"];
  const root = document.documentElement;
  let theme = "system";
  try {
    theme = THEMES.find((name) => name === localStorage.getItem(KEY)) ?? "system";
  } catch {
    // Without storage, the theme follows the system.
  }
  const apply = () => {
    const prefersDark = matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = theme === "system" ? (prefersDark ? "dark" : "light") : theme;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${theme}`;
    root.dispatchEvent(new CustomEvent("themechange"));
  };
  apply();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", () => {
      theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
      try {
        localStorage.setItem(KEY, theme);
      } catch {
        // Without storage, the choice lasts as long as the page.
      }
      apply();
    });
  });
}
