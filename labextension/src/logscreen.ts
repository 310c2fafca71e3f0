/** Lines after *cursor up*, which nested tqdm bars write: one line for each bar, in its newest state. Pure. */
import { foldOpen, foldReturns } from './logtext';

/** How many whole lines can change at most: bars inside one another. */
export const DEPTH = 8;

const UP = /\x1b\[(\d{0,4})A/;

export function goesUp(text: string): boolean {
  return text.includes('\x1b') && UP.test(text);
}

export interface ScreenLine {
  /** Null: it has none yet. */
  row: number | null;
  text: string;
}

/** The last lines of one file. */
export class LogScreen {
  /** The highest line that the cursor went up to; null: all bars have ended. */
  top: number | null = null;

  /** The cursor is at the end of the last of `lines`. */
  constructor(
    public lines: ScreenLine[],
    public at = lines.length - 1
  ) {}

  get cursor(): ScreenLine {
    return this.lines[this.at]!;
  }

  /** The text of one line, as written. Gives the lines that it changed. */
  write(text: string): Set<ScreenLine> {
    const [first, ...moves] = text.split(UP);
    const changed = new Set(this.put(first!));
    for (let i = 0; i < moves.length; i += 2) {
      this.at = Math.max(0, this.at - Number(moves[i] || 1));
      this.top = Math.min(this.top ?? this.at, this.at);
      this.put(moves[i + 1]!).forEach(line => changed.add(line));
    }
    return changed;
  }

  /** After the end of a line. */
  down(): void {
    const left = this.cursor;
    this.at++;
    if (this.at < this.lines.length) {
      const shown = foldReturns(this.cursor.text);
      this.cursor.text = shown.trim() && `${shown}\r`;
      return;
    }
    // A line that is no bar: it has no carriage return.
    if (left.text.trim() && !left.text.includes('\r')) {
      this.top = null;
    }
    this.lines.push({ row: null, text: '' });
  }

  has(row: number): boolean {
    return this.lines.some(line => line.row === row);
  }

  /** Forgets lines that can change no more. */
  settle(): void {
    const whole = this.lines.length - 1;
    const settled = this.top === null ? whole : Math.max(this.top, whole - DEPTH);
    this.lines.splice(0, settled);
    this.at = Math.max(0, this.at - settled);
    this.top = this.top === null ? null : Math.max(0, this.top - settled);
  }

  private put(text: string): ScreenLine[] {
    if (text) {
      this.cursor.text = foldOpen(this.cursor.text + text);
    }
    return text ? [this.cursor] : [];
  }
}
