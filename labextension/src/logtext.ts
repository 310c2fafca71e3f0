/** Text as ranks write it: bytes and characters, carriage returns, escape sequences. Pure. */
import type { Segment } from './source';

/**
 * ECMA-48: CSI; OSC and the other strings with their end; the two-character escapes. A string without its end is no
 * match, so that nothing can hide the rest of a line.
 */
export const ESCAPE =
  /\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)|[ -/]+[0-~]|[0-OQ-WYZ\\=>`-~])/g;

const DISPLAY = /\[display (\d{1,15}): [\w.+-]+\/[\w.+-]+\]/;

/** The number of what a rank displayed, where a line of its log stands for that: `[display 3: image/png]`. */
export function displayIn(text: string): number | null {
  const found = text.includes('[display ') ? DISPLAY.exec(text) : null;
  return found && Number(found[1]);
}

const COLOUR = /^\x1b\[[0-9;:]*m$/;

/** Without escape sequences. What a search looks at. */
export function plain(text: string): string {
  return text.includes('\x1b') ? text.replace(ESCAPE, '') : text;
}

/**
 * A line as a terminal shows it after its carriage returns: what was written last stands over what was there before
 * (tqdm's bars). A trailing return is the half of a line end.
 */
export function foldReturns(line: string): string {
  if (!line.includes('\r')) {
    return line;
  }
  let shown = '';
  for (const part of line.split('\r')) {
    shown = part === '' ? shown : overwrite(shown, part);
  }
  return shown;
}

/** As `foldReturns`, but to be gone on with: what is written after the last return is still open. */
export function foldOpen(line: string): string {
  const last = line.lastIndexOf('\r');
  return last < 0 ? line : foldReturns(line.slice(0, last)) + line.slice(last);
}

function overwrite(old: string, written: string): string {
  if (/\x1b\[[02]?K/.test(written)) {
    return written;
  }
  const covered = plain(written).length;
  return covered >= plain(old).length ? written : written + from(old, covered);
}

/** What is left of `text` after its first `count` visible characters, in the colours that it had there. */
function from(text: string, count: number): string {
  const colours: string[] = [];
  let position = 0;
  let left = count;
  for (const match of text.matchAll(ESCAPE)) {
    if (match.index - position > left) {
      break;
    }
    left -= match.index - position;
    position = match.index + match[0].length;
    if (COLOUR.test(match[0])) {
      colours.push(match[0]);
    }
  }
  const rest = text.slice(position + left);
  return rest && colours.length > 0 ? '\x1b[0m' + colours.join('') + rest : rest;
}

/** How many bytes characters took in the file. */
export type Measure = (text: string, from: number, to: number) => number;

const characters: Measure = (_text, from, to) => to - from;

const utf8: Measure = (text, from, to) => {
  let bytes = 0;
  for (let i = from; i < to; i++) {
    const code = text.charCodeAt(i);
    // Each half of a pair counts two of its four bytes.
    bytes += code < 0x80 ? 1 : code < 0x800 || (code >= 0xd800 && code < 0xe000) ? 2 : 3;
  }
  return bytes;
};

const ESCAPED = /\\x[0-9a-f]{2}/g;

/** As `utf8`, where `\xff` stands for one byte that was no UTF-8. */
const escaped: Measure = (text, from, to) => {
  const marks = text.slice(from, to).match(ESCAPED)?.length ?? 0;
  return utf8(text, from, to) - 3 * marks;
};

/**
 * How to count the bytes of parts of `text`, which took `bytes` in all. Where nothing fits (some of the `\xff` were
 * written as such), the nearest: starts of lines are then a few bytes off.
 */
export function measureOf(text: string, bytes: number): Measure {
  if (text.length === bytes) {
    return characters;
  }
  const whole = utf8(text, 0, text.length);
  return whole <= bytes ? utf8 : escaped;
}

/** Where the character at byte `offset` of `text` begins. */
export function indexAt(text: string, offset: number, bytes: number): number {
  const measure = measureOf(text, bytes);
  if (measure === characters) {
    return Math.min(Math.max(offset, 0), text.length);
  }
  if (measure === escaped) {
    return afterEscaped(text, offset);
  }
  let [low, high] = [0, text.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (measure(text, 0, middle) < offset) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return splitsPair(text, low) ? low - 1 : low;
}

function afterEscaped(text: string, offset: number): number {
  let index = 0;
  for (let bytes = 0; index < text.length && bytes < offset; ) {
    const code = text.codePointAt(index)!;
    const step = text.slice(index, index + 4).search(ESCAPED) === 0 ? 4 : code > 0xffff ? 2 : 1;
    bytes += step === 4 ? 1 : utf8(text, index, index + step);
    index += step;
  }
  return index;
}

/** The part of `segment` from byte `start` to `end`. */
export function clip(segment: Segment, start: number, end: number): Segment {
  if (start <= segment.start && end >= segment.end) {
    return segment;
  }
  const bytes = segment.end - segment.start;
  const [low, high] = [Math.max(start, segment.start), Math.min(end, segment.end)];
  const from = indexAt(segment.text, low - segment.start, bytes);
  const to = indexAt(segment.text, high - segment.start, bytes);
  return { ...segment, start: low, end: high, text: segment.text.slice(from, to) };
}

/** The lines of `segment` within about so many of its characters, and the others, if there are any. */
export function cutAfter(segment: Segment, characters: number): [Segment, Segment | null] {
  const { text, start, end } = segment;
  const stop = text.length > characters ? text.indexOf('\n', characters) + 1 : 0;
  if (stop === 0 || stop === text.length) {
    return [segment, null];
  }
  const middle = Math.min(start + measureOf(text, end - start)(text, 0, stop), end);
  return [
    { ...segment, end: middle, text: text.slice(0, stop) },
    { ...segment, start: middle, text: text.slice(stop) }
  ];
}

/** Whether a cut in front of `index` would go through a character of two code units. */
export function splitsPair(text: string, index: number): boolean {
  const [before, after] = [text.charCodeAt(index - 1), text.charCodeAt(index)];
  return before >= 0xd800 && before < 0xdc00 && after >= 0xdc00 && after < 0xe000;
}
