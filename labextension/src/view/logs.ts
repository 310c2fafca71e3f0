/** The log tab: whatever the ranks print, a million lines and more, each of them text and nothing else. */
import type { LogFilter, LogView } from '../logview';
import type { Change, JobSession } from '../session';
import { shownText } from './ansi';
import { copy, make, setAttribute, setText } from './dom';
import { LogBar } from './logbar';
import { LogList } from './loglist';
import { LogLoader } from './logload';
import { LogRowDrawer, LogSelection } from './logrow';
import { LogSearch } from './logsearch';
import { plural, trans } from './translate';

export interface LogsOptions {
  /** Offers a whole file (`3.out`) for download; without it there is no such button. */
  download?: (file: string) => void;
}

export class LogsTab {
  private readonly root = make('div.td-logs', { 'data-lm-suppress-shortcuts': 'true' });
  private readonly empty = make('div.td-logs-empty');
  private readonly bar: LogBar;
  private readonly list: LogList;
  private readonly view: LogView;
  private readonly search: LogSearch;
  private edits = -1;
  private readonly loader: LogLoader;
  private readonly selection: LogSelection;
  private readonly rows: LogRowDrawer;
  /** How many ranks there were when lines alike were folded. */
  private alike = 0;
  private filtered = false;
  /** The row at the upper edge, by which the place is kept when rows come in front of it. */
  private firstKey = -1;
  private firstHidden = 0;

  constructor(
    readonly element: HTMLElement,
    private readonly session: JobSession,
    private readonly signal: AbortSignal,
    options: LogsOptions = {}
  ) {
    this.bar = new LogBar(
      {
        filter: () => this.filter(),
        search: () => this.startSearch(),
        step: by => this.step(by),
        follow: on => this.follow(on),
        copy: () => void this.copyLines(),
        older: () => void this.loadOlder(),
        download: options.download ?? null,
        leave: () => this.list.scroller.focus()
      },
      signal
    );
    this.view = session.logs.view(this.filterOf(), signal);
    this.view.ready = () => this.draw();
    this.loader = new LogLoader(
      session,
      words => this.bar.say(words),
      () => this.draw(),
      signal
    );
    this.selection = new LogSelection(this.view);
    this.search = new LogSearch(session, this.view, () => this.drawHits(), signal);
    const actions = {
      loadGap: (row: number) => void this.loader.gap(row),
      copy: (text: string) => void this.copyText(text, 1)
    };
    this.rows = new LogRowDrawer(session, this.view, this.search, this.selection, actions, signal);
    this.list = new LogList(this.rows, () => this.scrolled(), signal);
    this.build();
    session.onChange(changes => this.change(changes), signal);
  }

  show(): void {
    this.list.active = true;
    this.list.measure();
    this.bar.update(this.session.state);
    this.bar.setFollow(this.list.follows);
    this.draw();
  }

  hide(): void {
    this.list.active = false;
  }

  /** Shows the lines of one rank, at their end. */
  focusRank(rank: number): void {
    this.bar.pickRank(rank);
    this.follow(true);
  }

  private build(): void {
    const { scroller } = this.list;
    // No live region: what is printed would be read aloud without an end. Counts and results are told instead.
    const frame = make('div.td-logs-frame', { role: 'log', 'aria-live': 'off', 'aria-label': trans('log') });
    setAttribute(scroller, 'role', 'grid');
    setAttribute(scroller, 'tabindex', 0);
    setAttribute(scroller, 'aria-label', trans('lines of the log'));
    setAttribute(scroller, 'aria-multiselectable', 'true');
    scroller.addEventListener('keydown', event => this.key(event), { signal: this.signal });
    scroller.addEventListener('click', event => this.click(event), { signal: this.signal });
    scroller.addEventListener('copy', event => this.copyEvent(event), { signal: this.signal });
    frame.append(scroller, this.empty);
    this.root.append(this.bar.element, frame);
    this.element.append(this.root);
  }

  private change(changes: Set<Change>): void {
    if (changes.has('state') && this.list.active) {
      this.bar.update(this.session.state);
    }
    if (changes.has('state') || changes.has('lines')) {
      const { world_size } = this.session.state;
      if (world_size !== this.alike && !this.bar.choice.apart) {
        this.filter();
      } else if (this.list.active) {
        this.draw();
      }
    }
  }

  private filterOf(): LogFilter {
    const { ranks } = this.bar;
    const { stream, apart, only } = this.bar.choice;
    this.alike = this.session.state.world_size;
    return { ranks, stream, pattern: only && this.search ? this.search.pattern : null, alike: apart ? 0 : this.alike };
  }

  private filter(): void {
    if (!this.view) {
      return;
    }
    this.view.choose(this.filterOf());
    this.draw();
  }

  // --- drawing ---

  /** Brings list, search and bar to what the store holds now. */
  private draw(): void {
    if (this.edits !== this.view.edits) {
      this.edits = this.view.edits;
      this.search.again(this.files());
      this.keepPlace();
    } else {
      this.search.appended();
    }
    const { logs } = this.session;
    logs.reading = !this.list.follows;
    this.list.scroller.hidden = this.view.length === 0;
    setText(this.empty, this.view.length > 0 ? '' : this.emptyWords());
    setAttribute(this.list.scroller, 'aria-rowcount', this.view.length);
    this.bar.setOlder(this.olderFiles().length > 0, this.loader.busy);
    this.bar.setFiles(logs.files.map(file => file.name).sort((a, b) => a.localeCompare(b, 'en', { numeric: true })));
    this.drawHits();
    if (this.list.active) {
      this.list.update();
      this.remember();
    }
  }

  private emptyWords(): string {
    if (this.session.logs.length > 0) {
      const { ranks } = this.bar;
      const { stream, only } = this.bar.choice;
      const all = ranks === null && stream === null;
      if (!only || !this.search.pattern) {
        return trans('These ranks and streams have printed nothing yet.');
      }
      return all
        ? trans('No line has what is searched for.')
        : trans('No line of these ranks and streams has what is searched for.');
    }
    return this.session.state.state === 'starting'
      ? trans('The ranks are starting; nothing was printed yet.')
      : trans('Nothing was printed yet.');
  }

  private remember(): void {
    const { index, hidden } = this.list.anchor;
    this.firstKey = index < this.view.length ? this.view.rows.at(index) : -1;
    this.firstHidden = hidden;
  }

  private keepPlace(): void {
    if (this.list.follows || this.firstKey < 0) {
      return;
    }
    const index = this.view.rows.indexOf(this.firstKey);
    if (index >= 0) {
      this.list.anchorAt(index, this.firstHidden);
    }
  }

  // --- moving ---

  private scrolled(): void {
    this.bar.setFollow(this.list.follows);
    this.session.logs.reading = !this.list.follows;
    this.remember();
    if (this.list.isAtTop && !this.list.follows) {
      void this.loadOlder();
    }
  }

  private follow(on: boolean): void {
    this.list.follows = on;
    this.bar.setFollow(on);
    this.draw();
  }

  private key(event: KeyboardEvent): void {
    const modified = event.ctrlKey || event.metaKey || event.altKey;
    if (modified && event.key.toLowerCase() === 'a' && !event.altKey) {
      this.select(0, this.view.length - 1);
    } else if (modified) {
      return;
    } else if (event.key === '/') {
      this.bar.focusSearch();
    } else if (event.key === 'Escape') {
      this.selection.clear();
      this.draw();
    } else if (event.key === 'Enter') {
      this.openRow();
    } else if (!this.moveBy(event)) {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }

  private moveBy(event: KeyboardEvent): boolean {
    const last = this.view.length - 1;
    const from = this.activeIndex();
    const to = {
      ArrowUp: from - 1,
      ArrowDown: from + 1,
      PageUp: from - this.list.page,
      PageDown: from + this.list.page,
      Home: 0,
      End: last
    }[event.key];
    if (to === undefined || last < 0) {
      return false;
    }
    this.goTo(Math.max(0, Math.min(to, last)), event.shiftKey);
    if (to <= from && this.list.isAtTop) {
      void this.loadOlder();
    }
    return true;
  }

  private activeIndex(): number {
    const index = this.selection.activeIndex;
    return index >= 0 ? index : this.list.follows ? this.view.length - 1 : this.list.anchor.index;
  }

  private goTo(index: number, extend = false, middle = false): void {
    this.selection.move(index, extend);
    this.list.follows = index === this.view.length - 1;
    setAttribute(this.list.scroller, 'aria-activedescendant', this.rows.idOf(this.view.rows.at(index)));
    this.list.reveal(index, middle);
    this.bar.setFollow(this.list.follows);
    this.remember();
  }

  /** What a click does with the button or the link of a row. */
  private openRow(): void {
    const { active } = this.selection;
    const element = active === null ? null : this.list.scroller.querySelector(`#${this.rows.idOf(active)}`);
    element?.querySelector<HTMLElement>('button, a')?.click();
  }

  // --- selecting and copying ---

  private click(event: MouseEvent): void {
    const target = event.target as Element;
    const row = target.closest<HTMLElement>('.td-log-row')?.dataset['row'];
    // A click into text may be the end of a selection of characters: rows are selected by their names.
    if (row === undefined || target.closest('a, button') || !(event.shiftKey || target.closest('.td-log-who'))) {
      return;
    }
    const index = this.view.rows.indexOf(Number(row));
    if (index >= 0) {
      window.getSelection()?.removeAllRanges();
      this.goTo(index, event.shiftKey);
    }
  }

  private select(from: number, to: number): void {
    if (to >= from) {
      this.selection.move(from, false);
      this.selection.move(to, true);
      this.draw();
    }
  }

  private copyEvent(event: ClipboardEvent): void {
    const { range } = this.selection;
    const characters = window.getSelection();
    if (range && (!characters || characters.isCollapsed) && event.clipboardData) {
      event.clipboardData.setData('text/plain', this.rows.textOf(...range));
      event.preventDefault();
    }
  }

  private async copyLines(): Promise<void> {
    const { range } = this.selection;
    const [from, to] = range && range[0] < range[1] ? range : [0, this.view.length - 1];
    await this.copyText(this.rows.textOf(from, to), to - from + 1);
  }

  private async copyText(text: string, lines: number): Promise<void> {
    const copied = await copy(lines === 1 ? shownText(text) : text);
    const words = plural('%1 line copied', '%1 lines copied', lines);
    this.bar.say(copied ? words : trans('The browser did not allow to copy: select the text and press Ctrl+C.'));
  }

  // --- searching ---

  private files(): string[] {
    const { ranks } = this.bar;
    const { stream } = this.bar.choice;
    return this.session.logs.files
      .filter(file => (!ranks || ranks.has(file.rank)) && (stream === null || stream === file.stream))
      .map(file => file.name);
  }

  private startSearch(): void {
    this.search.start(this.bar.choice, this.files());
    const words = trans('Searched for where the job is: what this expression finds is listed, but not marked.');
    this.bar.say(this.search.byFeed ? words : '');
    if (this.bar.choice.only || this.filtered) {
      this.filtered = this.bar.choice.only;
      this.filter();
    } else {
      this.draw();
    }
  }

  private drawHits(): void {
    const { position, total, busy, more, error } = this.search;
    this.bar.setHits(position, total, busy, more, error);
  }

  private step(by: 1 | -1): void {
    this.search.step(by);
    const hit = this.search.current;
    if (typeof hit === 'number') {
      this.goTo(this.view.rows.indexOf(hit), false, true);
      this.list.follows = false;
    } else if (hit) {
      void this.jump(hit.file, hit.start);
    }
    this.draw();
  }

  /** Loads what stands around a place, and goes there. */
  private async jump(file: string, offset: number): Promise<void> {
    await this.loader.around(file, offset);
    const row = this.session.logs.find(file, offset);
    const index = row < 0 ? -1 : this.view.rows.indexOf(row);
    if (index >= 0) {
      this.list.follows = false;
      this.search.choose(row);
      this.goTo(index, false, true);
      this.draw();
    }
  }

  // --- loading ---

  private olderFiles(): string[] {
    const chosen = new Set(this.files());
    return this.session.logs.files.filter(file => file.first > 0 && chosen.has(file.name)).map(file => file.name);
  }

  private async loadOlder(): Promise<void> {
    const files = this.olderFiles();
    if (files.length > 0) {
      this.list.follows = false;
      this.bar.setFollow(false);
      await this.loader.older(files);
    }
  }
}
