/** Makes rows of text: a row for each line, or for each bar that stands on a screen. */
import type { HeldFile, Limits } from './logheld';
import { LINE, type LogRows } from './logrows';
import { goesUp, LogScreen, type ScreenLine } from './logscreen';
import { foldReturns, measureOf } from './logtext';
import type { Segment } from './source';

export class LogLines {
  /** `counted` is called with the number of lines that a file has more. */
  constructor(
    private readonly rows: LogRows,
    private readonly limits: Limits,
    private readonly counted: (file: HeldFile, lines: number) => void
  ) {}

  /** Writes the segment on a screen. Gives the new rows; `changed` gets all rows whose text is another. */
  on(screen: LogScreen, file: HeldFile, segment: Segment, time: number, changed: number[]): number[] {
    const { text, start, end } = segment;
    const [measure, drawn, rows] = [measureOf(text, end - start), new Set<ScreenLine>(), [] as number[]];
    let offset = start;
    for (let from = 0; from < text.length; ) {
      const stop = text.indexOf('\n', from);
      const to = stop < 0 ? text.length : stop;
      const next = stop < 0 ? end : Math.min(offset + measure(text, from, stop + 1), end);
      const lowest = screen.lines.at(-1)!;
      if (lowest.row === null) {
        lowest.row = this.rows.add(LINE, file.index, offset, 0, time);
        rows.push(lowest.row);
      }
      // Wherever a bar stands: the rows of a file are its bytes in order, and the newest bytes are in the last one.
      this.rows.bytes[lowest.row]! += next - offset;
      screen.write(text.slice(from, to)).forEach(line => drawn.add(line));
      if (stop >= 0) {
        screen.down();
      }
      offset = next;
      from = to + 1;
    }
    this.counted(file, rows.length);
    for (const { row, text } of drawn) {
      this.rows.replace(row!, foldReturns(text).slice(0, this.limits.line));
      changed.push(row!);
    }
    return rows;
  }

  /** A row for each line of the segment, in order, not yet shown anywhere. */
  of(file: HeldFile, segment: Segment, time: number): number[] {
    const { text, start, end } = segment;
    if (goesUp(text)) {
      return this.on(new LogScreen([{ row: null, text: '' }]), file, segment, time, []);
    }
    const rows: number[] = [];
    const measure = measureOf(text, end - start);
    const returns = text.includes('\r');
    const block = returns ? -1 : this.rows.addBlock(text);
    let offset = start;
    for (let from = 0; from < text.length; ) {
      const stop = text.indexOf('\n', from);
      const to = stop < 0 ? text.length : stop;
      const next = stop < 0 ? end : Math.min(offset + measure(text, from, stop + 1), end);
      const row = this.rows.add(LINE, file.index, offset, next - offset, time);
      if (returns) {
        this.rows.replace(row, foldReturns(text.slice(from, to)));
      } else {
        this.rows.show(row, block, from, to);
      }
      rows.push(row);
      offset = next;
      from = to + 1;
    }
    this.counted(file, rows.length);
    if (!returns) {
      this.rows.settle(block);
    }
    return rows;
  }
}
