/** Columns of lines: typed arrays and blocks of text, so that a million lines are no million objects. */

export const FREE = 0;
export const LINE = 1;
/** A line whose text is kept in part; `bytes` is all of it. */
export const CUT = 2;
/** Lines that were passed over: `bytes` from `start` on. */
export const GAP = 3;

const HASHED = 256;

/** In the order in which they get more room; the last one's length is what counts. */
const COLUMNS = ['start', 'bytes', 'time', 'block', 'begin', 'stop', 'file', 'kind'] as const;

/** A row is a number; it means the same line until it is released. */
export class LogRows {
  kind = new Uint8Array(1024);
  file = new Uint16Array(1024);
  /** Bytes in the file. */
  start = new Float64Array(1024);
  bytes = new Float64Array(1024);
  /** Seconds since the epoch. */
  time = new Float64Array(1024);
  /** Characters of text held. */
  characters = 0;

  private block = new Uint32Array(1024);
  private begin = new Uint32Array(1024);
  private stop = new Uint32Array(1024);
  private used = 0;
  /** The row at which the next column gets more room. */
  private growsAt = 768;
  private grown = 0;
  private free: number[] = [];
  private blocks: string[] = [''];
  private users: number[] = [1];
  private freeBlocks: number[] = [];

  get capacity(): number {
    return this.kind.length;
  }

  /** A new row, without text. */
  add(kind: number, file: number, start: number, bytes: number, time: number): number {
    const row = this.free.pop() ?? this.used++;
    if (row >= this.growsAt) {
      this.grow();
    }
    this.kind[row] = kind;
    this.file[row] = file;
    this.start[row] = start;
    this.bytes[row] = bytes;
    this.time[row] = time;
    this.point(row, 0, 0, 0);
    return row;
  }

  /** Takes a text in; rows then show parts of it. One that none shows is to be given to `settle`. */
  addBlock(text: string): number {
    const block = this.freeBlocks.pop() ?? this.blocks.length;
    this.blocks[block] = text;
    this.users[block] = 0;
    this.characters += text.length;
    return block;
  }

  settle(block: number): void {
    if (this.users[block] === 0) {
      this.dropBlock(block);
    }
  }

  show(row: number, block: number, begin: number, stop: number): void {
    this.users[block]!++;
    this.point(row, block, begin, stop);
  }

  text(row: number): string {
    return this.blocks[this.block[row]!]!.slice(this.begin[row], this.stop[row]);
  }

  /** A number that is the same for the same text (FNV-1a of its beginning). */
  hash(row: number): number {
    const text = this.blocks[this.block[row]!]!;
    const [begin, stop] = [this.begin[row]!, this.stop[row]!];
    let hash = 0x811c9dc5 ^ (stop - begin);
    for (let i = begin; i < Math.min(stop, begin + HASHED); i++) {
      hash = Math.imul(hash ^ text.charCodeAt(i), 0x01000193);
    }
    return (hash ^ (hash >>> 15)) >>> 0;
  }

  /** Another text for one row. */
  replace(row: number, text: string): void {
    this.unlink(row);
    this.show(row, this.addBlock(text), 0, text.length);
  }

  release(row: number): void {
    this.unlink(row);
    this.kind[row] = FREE;
    this.free.push(row);
  }

  private point(row: number, block: number, begin: number, stop: number): void {
    this.block[row] = block;
    this.begin[row] = begin;
    this.stop[row] = stop;
  }

  private unlink(row: number): void {
    const block = this.block[row]!;
    if (block !== 0 && --this.users[block]! === 0) {
      this.dropBlock(block);
    }
    this.point(row, 0, 0, 0);
  }

  private dropBlock(block: number): void {
    this.characters -= this.blocks[block]!.length;
    this.blocks[block] = '';
    this.freeBlocks.push(block);
  }

  /** One column at a time, all of them in the last quarter: at half a million rows all at once are 20 ms of copying. */
  private grow(): void {
    const { capacity } = this;
    const column = COLUMNS[this.grown]!;
    this.widen(column);
    this.grown = (this.grown + 1) % COLUMNS.length;
    this.growsAt = column === 'kind' ? (this.capacity / 4) * 3 : this.growsAt + capacity / 4 / COLUMNS.length;
  }

  private widen(column: (typeof COLUMNS)[number]): void {
    const size = this[column].length * 2;
    switch (column) {
      case 'kind':
        this.kind = copied(new Uint8Array(size), this.kind);
        break;
      case 'file':
        this.file = copied(new Uint16Array(size), this.file);
        break;
      case 'start':
      case 'bytes':
      case 'time':
        this[column] = copied(new Float64Array(size), this[column]);
        break;
      default:
        this[column] = copied(new Uint32Array(size), this[column]);
    }
  }
}

export function copied<T extends { set(source: T): void }>(target: T, source: T): T {
  target.set(source);
  return target;
}

/** Row numbers in an order. */
export class RowList {
  length = 0;
  private rows = new Uint32Array(1024);

  at(index: number): number {
    return this.rows[index]!;
  }

  push(row: number): void {
    if (this.length === this.rows.length) {
      this.rows = copied(new Uint32Array(this.length * 2), this.rows);
    }
    this.rows[this.length++] = row;
  }

  /** Where `row` is, or -1. */
  indexOf(row: number): number {
    return this.view().indexOf(row);
  }

  /** The rows of `all` that `keep` says. */
  choose(all: RowList, keep: (row: number) => boolean): void {
    if (this.rows.length < all.length) {
      this.rows = new Uint32Array(all.rows.length);
    }
    this.rows.set(all.view());
    this.length = all.length;
    this.filter(keep);
  }

  /** Keeps the rows from `first` on that `keep` says. */
  filter(keep: (row: number) => boolean, first = 0): void {
    let length = first;
    for (let i = first; i < this.length; i++) {
      const row = this.rows[i]!;
      if (keep(row)) {
        this.rows[length++] = row;
      }
    }
    this.length = length;
  }

  /** `count` rows at `index` give way to `rows`. */
  splice(index: number, count: number, rows: ArrayLike<number>): void {
    const length = this.length - count + rows.length;
    const target = length > this.rows.length ? new Uint32Array(length * 2) : this.rows;
    const rest = this.rows.subarray(index + count, this.length);
    if (target !== this.rows) {
      target.set(this.rows.subarray(0, index));
    }
    target.set(rest, index + rows.length);
    target.set(rows, index);
    this.rows = target;
    this.length = length;
  }

  /** The rows; valid until the next change. */
  view(): Uint32Array {
    return this.rows.subarray(0, this.length);
  }
}
