/** A search: in the lines held at once, newest first, then by the feed in all the rest. */
import type { LogView } from '../logview';
import type { JobSession } from '../session';
import type { FileOffsets, Hit } from '../source';
import { patternOf, type LinePattern } from '../pattern';

export interface SearchFor {
  text: string;
  regex: boolean;
  case: boolean;
}

/** Milliseconds of work before the page gets a turn. */
const SLICE_MS = 12;
const SLICE_ROWS = 500;
/** Hits outside of what is held; nobody goes through more one by one. */
const MOST = 2000;

export class LogSearch {
  /** Null: nothing is searched for, or only the feed can. */
  pattern: LinePattern | null = null;
  /** Whether only the feed can search for it: in what is held, too, and without marks. */
  byFeed = false;
  /** Why there is no search, or why it ended early. */
  error = '';
  /** Whether there are more hits than counted. */
  more = false;

  /** Rows, the newest first. */
  private found: number[] = [];
  /** Rows that came after the search began, the newest last. */
  private added: number[] = [];
  /** Outside of what is held, the newest first. */
  private remote: Hit[] = [];
  /** The chosen hit, counted from the newest; -1: none. */
  private chosen = -1;
  private scanning = false;
  private asking = false;
  private run = 0;
  private seen = 0;
  private what: SearchFor = { text: '', regex: false, case: false };

  constructor(
    private readonly session: JobSession,
    private readonly view: LogView,
    private readonly changed: () => void,
    signal: AbortSignal
  ) {
    signal.addEventListener('abort', () => this.run++, { once: true });
  }

  get busy(): boolean {
    return this.scanning || this.asking;
  }

  get total(): number {
    return this.found.length + this.added.length + this.remote.length;
  }

  /** Which hit is chosen, from 1; 0: none. The newest is the first: it is found first, whatever else is found. */
  get position(): number {
    return this.chosen + 1;
  }

  /** The row of the chosen hit, or the hit where it is not held. */
  get current(): number | Hit | null {
    const { added, found, remote, chosen } = this;
    if (chosen < 0 || chosen >= this.total) {
      return null;
    }
    const held = added.length + found.length;
    if (chosen < added.length) {
      return added[added.length - 1 - chosen]!;
    }
    return chosen < held ? found[chosen - added.length]! : remote[chosen - held]!;
  }

  /** The hits among the lines held; null: it still looks for them. */
  get held(): ReadonlySet<number> | null {
    return this.scanning ? null : new Set([...this.found, ...this.added]);
  }

  /** Begins anew. `files`: which ones the feed looks through. */
  start(what: SearchFor, files: string[]): void {
    this.what = what;
    const pattern = what.text ? patternOf(what.text, what.regex, what.case) : null;
    this.error = typeof pattern === 'string' ? pattern : '';
    this.pattern = typeof pattern === 'string' ? null : pattern;
    this.byFeed = what.text !== '' && pattern === null;
    this.chosen = -1;
    this.remote = [];
    this.again(files);
  }

  /** The rows have changed other than at the end: those held are looked through again. */
  again(files: string[]): void {
    const run = ++this.run;
    this.found = [];
    this.added = [];
    this.more = false;
    this.seen = this.view.length;
    this.scanning = this.pattern !== null;
    this.asking = this.scanning || this.byFeed;
    if (this.pattern) {
      this.scan(run, this.view.rows.view().slice(), this.seen);
    }
    if (this.asking) {
      void this.askFeed(run, files);
    }
  }

  /** Rows were added at the end. */
  appended(): void {
    const before = this.added.length;
    for (; this.pattern && this.seen < this.view.length; this.seen++) {
      const row = this.view.rows.at(this.seen);
      if (this.session.logs.matches(row, this.pattern)) {
        this.added.push(row);
      }
    }
    this.chosen += this.chosen < 0 ? 0 : this.added.length - before;
  }

  /** Chooses the next older (1) or newer (-1) hit; after the last one comes the first. */
  step(by: 1 | -1): void {
    if (this.total > 0) {
      this.chosen = this.chosen < 0 ? (by > 0 ? 0 : this.total - 1) : (this.chosen + by + this.total) % this.total;
    }
  }

  /** Chooses the hit in this row. */
  choose(row: number): void {
    const [added, found] = [this.added.lastIndexOf(row), this.found.indexOf(row)];
    if (added >= 0) {
      this.chosen = this.added.length - 1 - added;
    } else if (found >= 0) {
      this.chosen = this.added.length + found;
    }
  }

  private scan(run: number, rows: Uint32Array, left: number): void {
    if (run !== this.run) {
      return;
    }
    const end = performance.now() + SLICE_MS;
    while (left > 0 && performance.now() < end) {
      for (const stop = Math.max(0, left - SLICE_ROWS); left > stop; ) {
        const row = rows[--left]!;
        if (this.session.logs.matches(row, this.pattern!)) {
          this.found.push(row);
        }
      }
    }
    this.scanning = left > 0;
    if (left > 0) {
      setTimeout(() => this.scan(run, rows, left), 0);
    }
    this.changed();
  }

  private async askFeed(run: number, files: string[]): Promise<void> {
    const { logs } = this.session;
    const { text: pattern, regex, case: heedsCase } = this.what;
    // What was found before may be held by now, and is then among the rows. The rest stands until the answer: who
    // presses Enter at this moment means a hit that is counted on the screen.
    this.remote = this.remote.filter(hit => this.byFeed || !logs.holds(hit.file, hit.start));
    let first = true;
    const missing = logs.files.filter(file => file.first > 0 && files.includes(file.name));
    let at: FileOffsets | null = this.byFeed || logs.hasGaps() ? null : logs.starts(missing);
    try {
      while (run === this.run && (at === null || Object.keys(at).length > 0) && this.remote.length < MOST) {
        const names = at === null ? files : Object.keys(at);
        const answer = await this.session.ask({ what: 'search', pattern, regex, case: heedsCase, files: names, at });
        if (run !== this.run) {
          return;
        }
        const hits = answer.hits.filter(hit => this.byFeed || !logs.holds(hit.file, hit.start));
        this.remote = [...(first ? [] : this.remote), ...hits.slice(0, MOST)];
        first = false;
        this.more = answer.at !== null;
        if (answer.at === null) {
          break;
        }
        at = answer.at;
        this.changed();
      }
    } catch (error) {
      if (run === this.run) {
        this.error = (error as Error).message;
        this.more = true;
      }
    }
    if (run === this.run) {
      this.asking = false;
      this.changed();
    }
  }
}
