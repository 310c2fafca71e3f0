/** Puts lines that were asked for where they belong: in front of all that is held of their file, or into its gaps. */
import type { HeldFile, Limits } from './logheld';
import type { LogLines } from './loglines';
import { CUT, GAP, LINE, type LogRows, type RowList } from './logrows';
import { clip, foldReturns, measureOf } from './logtext';
import type { Segment } from './source';

/** One insertion: `take` each segment, the last one of a file first, then `finish`. */
export class LogInsertion {
  private readonly front: number[] = [];
  private readonly filled: number[] = [];

  /** `newest`: when the newest line was written. */
  constructor(
    private readonly rows: LogRows,
    private readonly order: RowList,
    private readonly lines: LogLines,
    private readonly limits: Limits,
    private readonly newest: number
  ) {}

  take(file: HeldFile, segment: Segment): void {
    for (const gap of [...file.gaps]) {
      this.filled.push(...this.fill(file, gap, segment));
    }
    if (segment.start < file.first) {
      this.prepend(file, clip(segment, segment.start, file.first));
    }
  }

  /** Gives the new rows. */
  finish(): number[] {
    this.mergeFront(this.front);
    return [...this.front, ...this.filled];
  }

  /** Rows of `segment` in front of all that is held of its file. */
  private prepend(file: HeldFile, segment: Segment): void {
    const { front } = this;
    const after = front.findLast(row => this.rows.file[row] === file.index) ?? this.firstRow(file);
    const before = after < 0 ? this.newest : this.rows.time[after]!;
    // Within a file the order of bytes is the order: a clock that was set back does not change it.
    const time = Math.min(segment.t ?? before, before);
    let rest = segment;
    if (segment.end < file.first) {
      const gap = this.rows.add(GAP, file.index, segment.end, file.first - segment.end, time);
      file.gaps.unshift(gap);
      front.push(gap);
    } else if (!segment.text.endsWith('\n') && after >= 0 && this.isLineAt(after, file.first)) {
      rest = this.joinFront(file, segment, after);
    }
    const rows = this.lines.of(file, rest, time);
    rows.reverse().forEach(row => front.push(row));
    file.first = segment.start;
  }

  /** The end of `segment` is the beginning of the line at `row`. Gives the rest of the segment. */
  private joinFront(file: HeldFile, segment: Segment, row: number): Segment {
    const stop = segment.text.lastIndexOf('\n') + 1;
    const head = segment.text.slice(stop);
    const measure = measureOf(segment.text, segment.end - segment.start);
    const end = stop === 0 ? segment.start : segment.start + measure(segment.text, 0, stop);
    const text = foldReturns(head + this.rows.text(row));
    this.rows.replace(row, text.slice(0, this.limits.line));
    this.rows.kind[row] = text.length > this.limits.line ? CUT : LINE;
    this.rows.bytes[row]! += segment.end - end;
    this.rows.start[row] = end;
    if (file.open === row) {
      file.tail = text;
    }
    return { ...segment, text: segment.text.slice(0, stop), end };
  }

  private isLineAt(row: number, start: number): boolean {
    return this.rows.kind[row] === LINE && this.rows.start[row] === start;
  }

  private firstRow(file: HeldFile): number {
    return this.order.view().find(row => this.rows.file[row] === file.index) ?? -1;
  }

  /** What of `segment` lies in the gap takes its place in it. Gives the new rows. */
  private fill(file: HeldFile, gap: number, segment: Segment): number[] {
    const [low, high] = [this.rows.start[gap]!, this.rows.start[gap]! + this.rows.bytes[gap]!];
    const piece = clip(segment, Math.max(low, segment.start), Math.min(high, segment.end));
    const index = this.order.indexOf(gap);
    if (piece.end <= piece.start || index < 0) {
      return [];
    }
    const time = Math.min(piece.t ?? this.rows.time[gap]!, this.rows.time[gap]!);
    const lines = this.lines.of(file, piece, time);
    const rows = [...lines];
    if (piece.end < high) {
      const rest = this.rows.add(GAP, file.index, piece.end, high - piece.end, this.rows.time[gap]!);
      file.gaps.push(rest);
      rows.push(rest);
      lines.push(rest);
    }
    if (piece.start > low) {
      this.rows.bytes[gap] = piece.start - low;
      rows.unshift(gap);
    } else {
      file.gaps = file.gaps.filter(row => row !== gap);
      this.rows.release(gap);
    }
    this.order.splice(index, 1, rows);
    return lines;
  }

  /** Rows with the last one first go where their time puts them, each in front of those of the same time. */
  private mergeFront(front: number[]): void {
    const { time, file, start } = this.rows;
    front.sort((a, b) => time[a]! - time[b]! || file[a]! - file[b]! || start[a]! - start[b]!);
    const old = this.order.view();
    const merged = new Uint32Array(old.length + front.length);
    let [taken, length] = [0, 0];
    for (const row of front) {
      while (taken < old.length && time[old[taken]!]! < time[row]!) {
        merged[length++] = old[taken++]!;
      }
      merged[length++] = row;
    }
    this.order.splice(0, taken, merged.subarray(0, length));
  }
}
