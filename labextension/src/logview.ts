/** A choice among the lines held: by rank, stream and pattern, with what all ranks say alike folded into one row. */
import { copied, FREE, GAP, RowList } from './logrows';
import type { LogStore } from './logstore';
import { displayIn } from './logtext';
import type { LinePattern } from './pattern';
import { SameLines } from './samelines';

export interface LogFilter {
  /** Null: all. */
  ranks: ReadonlySet<number> | null;
  stream: string | null;
  pattern: LinePattern | null;
  /** How many ranks there are, for lines that are alike on all; 0: they are shown apart. */
  alike: number;
  /** By file. */
  folds: ReadonlyMap<string, Fold>;
}

/** Lines of a file that stand elsewhere already, from the byte where the first begins to where the last does. */
export interface Fold {
  file: string;
  from: number;
  to: number;
  lines: readonly string[];
  /** What they tell. */
  title: string;
  /** Whether they are shown; else the first alone. */
  open: boolean;
}

/** Not looked at. */
const UNSEEN = 0;
const HIDDEN = 1;
const SHOWN = 2;
/** Shown by the row of another rank. */
const FOLDED = 3;

/** Milliseconds of work before the page gets a turn, and rows between two looks at the clock. */
const SLICE_MS = 10;
const SLICE_ROWS = 2000;

export class LogView {
  /** Called when a choice that took longer than a moment is shown. */
  ready: () => void = () => undefined;

  private shown: Choice;
  /** What will be shown, once it has looked at all rows. */
  private next: Choice | null = null;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private before = 0;

  constructor(
    private readonly store: LogStore,
    filter: LogFilter,
    signal: AbortSignal
  ) {
    // The end is what is seen first.
    this.shown = new Choice(store, filter);
    this.shown.appended(store.order.view().slice(-SLICE_ROWS));
    if (store.length > SLICE_ROWS) {
      this.choose(filter);
    }
    signal.addEventListener('abort', () => clearTimeout(this.timer), { once: true });
  }

  /** The rows to be shown, in order. */
  get rows(): RowList {
    return this.shown.rows;
  }

  get length(): number {
    return this.shown.rows.length;
  }

  /** Grows whenever rows did not only come at the end. */
  get edits(): number {
    return this.before + this.shown.edits;
  }

  /** How many ranks a folded row stands for. */
  get ranks(): number {
    return this.shown.filter.alike;
  }

  /** Whether the row stands for the same line of every rank. */
  isOfAll(row: number): boolean {
    return this.shown.isOfAll(row);
  }

  /** The fold of which the row is the first line. */
  foldAt(row: number): Fold | null {
    const { folds } = this.shown.filter;
    const fold = folds.size > 0 ? folds.get(this.store.fileOf(row).name) : null;
    return fold?.from === this.store.rows.start[row] ? fold! : null;
  }

  /** Another choice. Among very many rows it takes a while; until then the one before is shown. */
  choose(filter: LogFilter): void {
    clearTimeout(this.timer);
    this.next = new Choice(this.store, filter);
    this.goOn(this.next);
  }

  appended(rows: readonly number[]): void {
    this.shown.appended(rows);
  }

  inserted(rows: readonly number[]): void {
    this.shown.inserted(rows);
    this.startAgain();
  }

  /** Lines that had no end have grown. */
  changed(rows: readonly number[]): void {
    this.shown.changed(rows);
    this.next?.changed(rows);
  }

  /** Rows are about to be released: they are `FREE`. */
  dropped(): void {
    this.shown.dropped();
    this.startAgain();
  }

  private startAgain(): void {
    if (this.next) {
      this.choose(this.next.filter);
    }
  }

  private goOn(next: Choice): void {
    if (!next.walk(performance.now() + SLICE_MS)) {
      this.timer = setTimeout(() => this.goOn(next), 0);
      return;
    }
    this.before += this.shown.edits + 1 - next.edits;
    this.shown = next;
    this.next = null;
    this.ready();
  }
}

/** Which of the rows a filter lets through. */
class Choice {
  readonly rows = new RowList();
  edits = 0;

  private state: Uint8Array;
  /** Of a folded row, the row that shows it. */
  private shownBy: Uint32Array;
  private alike: SameLines;
  /** How many rows were walked over. */
  private walked = 0;

  constructor(
    private readonly store: LogStore,
    readonly filter: LogFilter
  ) {
    this.state = new Uint8Array(store.rows.capacity);
    this.shownBy = new Uint32Array(store.rows.capacity);
    this.alike = new SameLines(store, filter.ranks || filter.alike < 2 ? 0 : filter.alike);
  }

  isOfAll(row: number): boolean {
    return this.shownBy[row] === row + 1;
  }

  /** Looks at rows until the time is up; whether all were looked at. */
  walk(until: number): boolean {
    const order = this.store.order.view();
    do {
      this.appended(order.subarray(this.walked, this.walked + SLICE_ROWS));
      this.walked = Math.min(this.walked + SLICE_ROWS, order.length);
    } while (this.walked < order.length && performance.now() < until);
    return this.walked === order.length;
  }

  appended(rows: ArrayLike<number>): void {
    this.ensureRoom();
    const folded = this.consider(rows, this.alike);
    const before = this.rows.length;
    for (let i = 0; i < rows.length; i++) {
      const row = rows[i]!;
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

  changed(grown: readonly number[]): void {
    this.unfold(grown);
    const rows = grown.filter(row => this.state[row] !== UNSEEN);
    const before = rows.filter(row => this.state[row] !== HIDDEN);
    const after = rows.filter(row => this.passes(row));
    if (before.length !== after.length || before.some((row, index) => after[index] !== row)) {
      rows.forEach(row => (this.state[row] = HIDDEN));
      after.forEach(row => (this.state[row] = SHOWN));
      this.rebuild();
    }
  }

  /** Bars of all ranks were alike, and go on: each rank has its own again. */
  private unfold(grown: readonly number[]): void {
    const firsts = new Set(grown.map(row => this.shownBy[row]!).filter(first => first > 0));
    if (firsts.size === 0) {
      return;
    }
    for (const row of this.store.order.view()) {
      if (firsts.has(this.shownBy[row]!)) {
        this.state[row] = SHOWN;
        this.shownBy[row] = 0;
      }
    }
    this.rebuild();
  }

  dropped(): void {
    const { state, shownBy } = this;
    const { kind } = this.store.rows;
    const order = this.store.order.view();
    for (let i = 0; i < order.length; i++) {
      const row = order[i]!;
      if (state[row] === FOLDED && kind[shownBy[row]! - 1] === FREE) {
        state[row] = SHOWN;
        shownBy[row] = 0;
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
    // Pictures of the same name are not the same picture.
    const same = displayIn(this.store.text(row)) === null ? alike.offer(row) : null;
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
    const fold = this.filter.folds.get(file.name);
    const start = this.store.rows.start[row]!;
    if (fold && !fold.open && start > fold.from && start < fold.to) {
      return false;
    }
    if (this.store.isOpen(row) && !this.store.text(row).trim()) {
      return false; // where a bar was
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
    const { state } = this;
    this.rows.choose(this.store.order, row => state[row] === SHOWN);
    this.edits++;
  }
}
