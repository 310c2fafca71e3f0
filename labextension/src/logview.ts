/** A choice among the lines held: by rank, stream and pattern, with what all ranks say alike folded into one row. */
import { copied, FREE, GAP, RowList } from './logrows';
import type { LogStore } from './logstore';
import { SameLines } from './samelines';

export interface LogFilter {
  /** Null: all. */
  ranks: ReadonlySet<number> | null;
  stream: string | null;
  pattern: RegExp | null;
  /** How many ranks there are, for lines that are alike on all; 0: they are shown apart. */
  alike: number;
}

const HIDDEN = 0;
const SHOWN = 1;
/** Shown by the row of another rank. */
const FOLDED = 2;

export class LogView {
  /** The rows to be shown, in order. */
  readonly rows = new RowList();
  /** Grows whenever rows did not only come at the end. */
  edits = 0;

  private state: Uint8Array;
  /** Of a folded row, the row that shows it. */
  private shownBy: Uint32Array;
  private alike: SameLines;

  constructor(
    private readonly store: LogStore,
    private filter: LogFilter
  ) {
    this.state = new Uint8Array(store.rows.capacity);
    this.shownBy = new Uint32Array(store.rows.capacity);
    this.alike = new SameLines(store, filter.alike);
    this.choose(filter);
  }

  get length(): number {
    return this.rows.length;
  }

  /** How many ranks a folded row stands for. */
  get ranks(): number {
    return this.filter.alike;
  }

  /** Whether the row stands for the same line of every rank. */
  isOfAll(row: number): boolean {
    return this.shownBy[row] === row + 1;
  }

  /** Another choice. */
  choose(filter: LogFilter): void {
    this.filter = filter;
    this.alike = new SameLines(this.store, filter.ranks || filter.alike < 2 ? 0 : filter.alike);
    this.ensureRoom();
    this.state.fill(HIDDEN);
    this.shownBy.fill(0);
    this.consider(this.store.order.view(), this.alike);
    this.rebuild();
  }

  appended(rows: readonly number[]): void {
    this.ensureRoom();
    const folded = this.consider(rows, this.alike);
    const before = this.rows.length;
    for (const row of rows) {
      folded.delete(row);
      if (this.state[row] === SHOWN) {
        this.rows.push(row);
      }
    }
    if (folded.size > 0) {
      this.takeOut(folded, before);
    }
  }

  inserted(rows: readonly number[]): void {
    this.ensureRoom();
    const inOrder = new Set(rows);
    const sorted = this.store.order.view().filter(row => inOrder.has(row));
    this.consider(sorted, new SameLines(this.store, this.alike.ranks));
    this.rebuild();
  }

  /** Lines that had no end have grown. */
  changed(rows: readonly number[]): void {
    const before = rows.filter(row => this.state[row] !== HIDDEN);
    const after = rows.filter(row => this.passes(row));
    if (before.length !== after.length || before.some((row, index) => after[index] !== row)) {
      rows.forEach(row => (this.state[row] = HIDDEN));
      after.forEach(row => (this.state[row] = SHOWN));
      this.rebuild();
    }
  }

  /** Rows are about to be released: they are `FREE`. */
  dropped(): void {
    const { kind } = this.store.rows;
    for (const row of this.store.order.view()) {
      if (this.state[row] === FOLDED && kind[this.shownBy[row]! - 1] === FREE) {
        this.state[row] = SHOWN;
        this.shownBy[row] = 0;
      }
    }
    // Lines that waited for their likes may be gone, and their numbers given to others.
    this.alike = new SameLines(this.store, this.alike.ranks);
    this.rebuild();
  }

  private ensureRoom(): void {
    const { capacity } = this.store.rows;
    if (this.state.length < capacity) {
      this.state = copied(new Uint8Array(capacity), this.state);
      this.shownBy = copied(new Uint32Array(capacity), this.shownBy);
    }
  }

  /** Says of each row whether it is shown. Gives those that were shown and are no more. */
  private consider(rows: ArrayLike<number>, alike: SameLines): Set<number> {
    const folded = new Set<number>();
    for (let i = 0; i < rows.length; i++) {
      const row = rows[i]!;
      const shown = this.passes(row);
      this.state[row] = shown ? SHOWN : HIDDEN;
      this.shownBy[row] = 0;
      if (shown && alike.ranks > 1 && this.store.rows.kind[row] !== GAP && !this.store.isOpen(row)) {
        this.foldSame(row, alike, folded);
      }
    }
    return folded;
  }

  private foldSame(row: number, alike: SameLines, folded: Set<number>): void {
    const same = alike.offer(row);
    if (!same) {
      return;
    }
    const [first, ...others] = same;
    this.shownBy[first!] = first! + 1;
    for (const other of others) {
      this.state[other] = FOLDED;
      this.shownBy[other] = first! + 1;
      folded.add(other);
    }
  }

  private passes(row: number): boolean {
    const { ranks, stream, pattern } = this.filter;
    const file = this.store.fileOf(row);
    if ((ranks && !ranks.has(file.rank)) || (stream !== null && stream !== file.stream)) {
      return false;
    }
    return !pattern || this.store.rows.kind[row] === GAP || this.store.matches(row, pattern);
  }

  /** Takes rows out that were folded into others; they are near the end of the first `before`. */
  private takeOut(folded: Set<number>, before: number): void {
    let first = before;
    for (let left = folded.size; left > 0 && first > 0; ) {
      left -= folded.has(this.rows.at(--first)) ? 1 : 0;
    }
    this.edits++;
    this.rows.filter(row => this.state[row] === SHOWN, first);
  }

  private rebuild(): void {
    this.rows.clear();
    for (const row of this.store.order.view()) {
      if (this.state[row] === SHOWN) {
        this.rows.push(row);
      }
    }
    this.edits++;
  }
}
