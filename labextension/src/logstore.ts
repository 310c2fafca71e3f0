/** The lines that the browser holds: of every file the newest, and what was asked for besides. */
import { type HeldFile, type Limits, LIMITS, type LogFile, oldest, overLimits } from './logheld';
import { LogInsertion } from './loginsert';
import { LogLines } from './loglines';
import { CUT, FREE, GAP, LINE, LogRows, RowList } from './logrows';
import { DEPTH, goesUp, LogScreen, type ScreenLine } from './logscreen';
import { clip, foldOpen, foldReturns, measureOf, plain } from './logtext';
import { LogView, type LogFilter } from './logview';
import type { LinePattern } from './pattern';
import type { FileOffsets, Segment } from './source';

/** How much of a line a filter or search looks at. */
const SEARCHED = 64 * 1024;

export type { LogFile, Limits } from './logheld';

export class LogStore {
  readonly rows = new LogRows();
  /** All rows in the order they are shown in. */
  readonly order = new RowList();
  /** True: someone reads older lines, so twice as many are kept. */
  reading = false;

  private readonly held: HeldFile[] = [];
  private readonly byName = new Map<string, HeldFile>();
  private readonly counts = new Map<number, number>();
  private readonly views = new Set<LogView>();
  private readonly limits: Limits;
  private readonly lines: LogLines;
  private time = 0;

  constructor(limits: Partial<Limits> = {}) {
    this.limits = { ...LIMITS, ...limits };
    this.lines = new LogLines(this.rows, this.limits, (file, lines) => this.count(file, lines));
  }

  /** Lines and gaps held. */
  get length(): number {
    return this.order.length;
  }

  get files(): readonly LogFile[] {
    return this.held;
  }

  /** The end of what is held of each file: where the feed goes on after a lost transport. */
  offsets(): FileOffsets {
    return Object.fromEntries(this.held.map(file => [file.name, file.end]));
  }

  /** The beginning of what is held of each file: what is in front of it can be asked for. */
  starts(files: readonly LogFile[] = this.held): FileOffsets {
    return Object.fromEntries(files.map(file => [file.name, file.first]));
  }

  text(row: number): string {
    return this.rows.text(row);
  }

  fileOf(row: number): LogFile {
    return this.held[this.rows.file[row]!]!;
  }

  /** Whether more of this line may come. */
  isOpen(row: number): boolean {
    const file = this.held[this.rows.file[row]!]!;
    return file.open === row || (file.screen?.has(row) ?? false);
  }

  matches(row: number, pattern: LinePattern): boolean {
    return this.rows.kind[row] !== GAP && pattern.test(plain(this.rows.text(row).slice(0, SEARCHED)));
  }

  hasGaps(): boolean {
    return this.held.some(file => file.gaps.length > 0);
  }

  /** Whether the byte at `offset` is held. */
  holds(name: string, offset: number): boolean {
    const file = this.byName.get(name);
    const inside = file !== undefined && offset >= file.first && offset < file.end;
    return inside && !file.gaps.some(gap => this.covers(gap, offset));
  }

  /** The row with the byte at `offset`, or -1. */
  find(name: string, offset: number): number {
    const index = this.byName.get(name)?.index;
    return this.order.view().find(row => this.rows.file[row] === index && this.covers(row, offset)) ?? -1;
  }

  private covers(row: number, offset: number): boolean {
    const start = this.rows.start[row]!;
    return offset >= start && offset < start + this.rows.bytes[row]!;
  }

  /** The rows that `filter` lets through, kept up to date until `signal`. */
  view(filter: LogFilter, signal: AbortSignal): LogView {
    const view = new LogView(this, filter, signal);
    this.views.add(view);
    signal.addEventListener('abort', () => this.views.delete(view), { once: true });
    return view;
  }

  /** New lines, in the order they come in. What is held already is passed over; what is missing becomes a gap. */
  append(segments: readonly Segment[]): void {
    const added: number[] = [];
    const changed: number[] = [];
    for (const segment of segments) {
      const file = this.fileFor(segment.file, segment.start);
      if (file && segment.end > file.end) {
        this.appendTo(file, clip(segment, file.end, segment.end), added, changed);
      }
    }
    added.forEach(row => this.order.push(row));
    this.views.forEach(view => view.appended(added));
    this.views.forEach(view => view.changed(changed));
    this.dropOldest();
  }

  private appendTo(file: HeldFile, segment: Segment, added: number[], changed: number[]): void {
    const time = segment.t ?? (file.time || this.time);
    this.time = Math.max(this.time, time);
    file.time = time;
    if (segment.start > file.end) {
      this.close(file);
      const gap = this.rows.add(GAP, file.index, file.end, segment.start - file.end, time);
      file.gaps.push(gap);
      added.push(gap);
    }
    file.end = segment.end;
    if (file.screen || goesUp(segment.text)) {
      this.drawBars(file, segment, time, added, changed);
      return;
    }
    let rest = segment;
    if (file.open !== null) {
      changed.push(file.open);
      const stop = segment.text.indexOf('\n');
      const head = stop < 0 ? segment.text : segment.text.slice(0, stop);
      const measure = measureOf(segment.text, segment.end - segment.start);
      const bytes = stop < 0 ? segment.end - segment.start : measure(segment.text, 0, stop + 1);
      this.extend(file, file.open, head, bytes, time);
      if (stop < 0) {
        return;
      }
      this.close(file);
      rest = { ...segment, text: segment.text.slice(stop + 1), start: segment.start + bytes };
    }
    const rows = this.lines.of(file, rest, time);
    const last = rows.at(-1);
    if (last !== undefined && !rest.text.endsWith('\n')) {
      file.open = last;
      file.tail = foldOpen(rest.text.slice(rest.text.lastIndexOf('\n') + 1));
    }
    rows.forEach(row => added.push(row));
  }

  /** More of the line that has no end yet. */
  private extend(file: HeldFile, row: number, text: string, bytes: number, time: number): void {
    this.rows.bytes[row]! += bytes;
    this.rows.time[row] = time;
    if (this.rows.kind[row] === CUT) {
      return;
    }
    const returns = text.includes('\r') || (file.tail.length < SEARCHED && file.tail.includes('\r'));
    file.tail = returns ? foldOpen(file.tail + text) : file.tail + text;
    if (file.tail.length > this.limits.line) {
      file.tail = file.tail.slice(0, this.limits.line);
      this.rows.kind[row] = CUT;
    }
    this.rows.replace(row, returns ? foldReturns(file.tail) : file.tail);
  }

  private close(file: HeldFile): void {
    file.open = null;
    file.tail = '';
    file.screen = null;
  }

  private drawBars(file: HeldFile, segment: Segment, time: number, added: number[], changed: number[]): void {
    const screen = file.screen ?? new LogScreen(this.lastLines(file));
    const rows = this.lines.on(screen, file, segment, time, changed);
    rows.forEach(row => added.push(row));
    screen.settle();
    const { row, text } = screen.cursor;
    this.close(file);
    if (screen.top !== null) {
      file.screen = screen;
    } else if (row !== null) {
      file.open = row;
      file.tail = text;
    }
  }

  /** The last lines of a file, to which the cursor may go up. */
  private lastLines(file: HeldFile): ScreenLine[] {
    const lines: ScreenLine[] = file.open === null ? [{ row: null, text: '' }] : [];
    for (let i = this.order.length - 1; i >= 0 && lines.length <= DEPTH; i--) {
      const row = this.order.at(i);
      if (this.rows.file[row] === file.index) {
        if (this.rows.kind[row] !== LINE) {
          break;
        }
        lines.unshift({ row, text: row === file.open ? file.tail : this.rows.text(row) });
      }
    }
    return lines;
  }

  /** Lines that were asked for: older ones, around a place, or those of a gap; in any order. */
  insert(segments: readonly Segment[]): void {
    const insertion = new LogInsertion(this.rows, this.order, this.lines, this.limits, this.time);
    for (const segment of [...segments].sort((a, b) => b.start - a.start)) {
      const file = this.fileFor(segment.file, segment.end);
      if (file) {
        insertion.take(file, segment);
      }
    }
    const rows = insertion.finish();
    this.views.forEach(view => view.inserted(rows));
  }

  private fileFor(name: string, start: number): HeldFile | null {
    const known = this.byName.get(name);
    const parts = /^(\d+)\.(\w+)$/.exec(name);
    if (known || !parts) {
      return known ?? null;
    }
    const [rank, stream, index] = [Number(parts[1]), parts[2]!, this.held.length];
    const file: HeldFile = {
      name,
      rank,
      stream,
      index,
      first: start,
      end: start,
      open: null,
      tail: '',
      screen: null,
      gaps: [],
      time: 0
    };
    this.held.push(file);
    this.byName.set(name, file);
    return file;
  }

  private count(file: LogFile, lines: number): void {
    this.counts.set(file.rank, (this.counts.get(file.rank) ?? 0) + lines);
  }

  private dropOldest(): void {
    const over = overLimits(this.limits, this.reading, this.length, this.rows.characters, this.counts);
    if (over) {
      this.drop(...oldest(this.order, this.rows, this.held, this.counts, over));
    }
  }

  private drop(kept: number[], dropped: number[]): void {
    this.order.splice(0, kept.length + dropped.length, kept);
    for (const row of dropped) {
      const file = this.held[this.rows.file[row]!]!;
      file.first = Math.max(file.first, this.rows.start[row]! + this.rows.bytes[row]!);
      if (this.rows.kind[row] === GAP) {
        file.gaps = file.gaps.filter(gap => gap !== row);
      } else {
        this.count(file, -1);
      }
      if (file.open === row || file.screen?.has(row)) {
        this.close(file);
      }
    }
    dropped.forEach(row => (this.rows.kind[row] = FREE));
    this.views.forEach(view => view.dropped());
    dropped.forEach(row => this.rows.release(row));
  }
}
