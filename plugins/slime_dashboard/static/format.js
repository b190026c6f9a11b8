// Numbers and durations as people read them.

const plain = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

const isMissing = (number) => number === null || number === undefined || Number.isNaN(number);

/** 0.25, 12.3, 1,204, 15.3k, 2.1M */
export function amount(number) {
  if (isMissing(number)) return "–";
  if (Math.abs(number) >= 1e6) return `${plain.format(number / 1e6)}M`;
  if (Math.abs(number) >= 1e4) return `${plain.format(number / 1e3)}k`;
  return Math.abs(number) >= 100 ? whole.format(number) : plain.format(number);
}

/** 1,204 without rounding. */
export const count = (number) => (isMissing(number) ? "–" : whole.format(number));

/** 820 µs, 12 ms, 3.4 s, 2 min */
export function duration(seconds) {
  if (isMissing(seconds)) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return `${plain.format(seconds * 1e6)} µs`;
  if (seconds < 1) return `${plain.format(seconds * 1e3)} ms`;
  return seconds < 120 ? `${plain.format(seconds)} s` : age(seconds);
}

/** 4 s, 3 min, 2 h 5 min, 3 d 4 h */
export function age(seconds) {
  if (isMissing(seconds)) return "–";
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.floor(seconds)} s`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** 93.4 % */
export function share(part) {
  if (isMissing(part)) return "–";
  const percent = part * 100;
  // Never 100 % unless it is all.
  const shown = part < 1 ? Math.min(percent, 99.9) : 100;
  return `${new Intl.NumberFormat("en", { maximumFractionDigits: shown < 10 ? 2 : 1 }).format(shown)} %`;
}

/** 1.2 MiB */
export function bytes(number) {
  if (isMissing(number)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (number >= 1024 && place < units.length - 1) {
    number /= 1024;
    place += 1;
  }
  return `${plain.format(number)} ${units[place]}`;
}

/** 1 worker, 2 workers */
export const counted = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
