/** The log tab: whatever the ranks print, a million lines and more, each of them text and nothing else. */
import type { Fold, LogFilter, LogView } from '../logview';
import type { Change, JobSession } from '../session';
import { shownText } from './ansi';
import { copy, make, setText } from './dom';
import { LogBar } from './logbar';
import { fitting, LogColumns } from './logcolumns';
import { LogDisplay, type Render, renderPlainly } from './logdisplay';
import { LogFolds } from './logfold';
import { LogLoader } from './logload';
import { LogPane } from './logpane';
import { byRank, widestWho } from './logrow';
import { saveLog } from './logsave';
import { LogSearch } from './logsearch';
import { plural, trans } from './translate';

export interface LogsOptions {
  /** Offers a whole file (`3.out`) for download; without it the file is read by the feed's questions. */
  download?: (file: string) => void;
  /** Draws what ranks displayed; without it pictures and plain text are drawn. */
  render?: Render;
}

export class LogsTab {
  private readonly root = make('div.td-logs');
  // No live region: what is printed would be read aloud without an end. Counts and results are told instead.
  private readonly frame = make('div.td-logs-frame', { role: 'log', 'aria-live': 'off', 'aria-label': trans('log') });
  private readonly empty = make('div.td-logs-empty');
  private readonly bar: LogBar;
  /** The lines of all chosen ranks, whether they are shown here or side by side. */
  private readonly view: LogView;
  private readonly pane: LogPane;
  private readonly columns: LogColumns;
  private readonly search: LogSearch;
  private readonly loader: LogLoader;
  private readonly display: LogDisplay;
  private readonly folds: LogFolds;
  private active = false;
  private edits = -1;
  /** How many ranks there were when lines alike were folded. */
  private alike = 0;
  private filtered = false;
  /** Whether folded lines are shown because a search looks into them. */
  private unfolded = false;
  /** Whether the first hit of a new search is to be gone to. */
  private seeking = false;

  constructor(
    readonly element: HTMLElement,
    private readonly session: JobSession,
    signal: AbortSignal,
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
        download: options.download ?? (file => void saveLog(session, file, words => this.bar.say(words))),
        leave: () => this.panes[0]!.list.scroller.focus()
      },
      signal
    );
    this.folds = new LogFolds(session);
    this.folds.look();
    this.view = session.logs.view(this.filterOf(), signal);
    this.view.ready = () => this.draw();
    this.loader = new LogLoader(
      session,
      words => this.bar.say(words),
      () => this.draw(),
      signal
    );
    this.search = new LogSearch(session, this.view, () => this.drawHits(), signal);
    const back = (): void => this.panes[0]!.list.scroller.focus();
    this.display = new LogDisplay(session, options.render ?? renderPlainly, back, signal);
    const actions = {
      loadGap: (row: number) => void this.loader.gap(row),
      copy: (text: string) => void this.copyText(text, 1),
      moved: () => this.moved(),
      older: () => void this.loadOlder(),
      search: () => this.bar.focusSearch(),
      display: (row: number, number: number) => this.showDisplay(row, number),
      turn: (fold: Fold) => this.turn(fold)
    };
    this.pane = new LogPane(session, this.view, this.search, trans('lines of the log'), byRank, actions, signal);
    this.columns = new LogColumns(session, this.search, actions, signal);
    this.frame.append(this.pane.list.scroller, this.columns.element, this.empty);
    this.root.append(this.bar.element, make('div.td-logs-main', {}, this.frame, this.display.element));
    this.element.append(this.root);
    this.watchWidth(signal);
    session.onChange(changes => this.change(changes), signal);
  }

  show(): void {
    this.active = true;
    this.fit();
    this.showPanes();
    this.bar.update(this.session.state);
    this.draw();
  }

  hide(): void {
    this.active = false;
    this.pane.hide();
    this.columns.hide();
  }

  /** Shows the lines of one rank, at their end. */
  focusRank(rank: number): void {
    this.bar.pickRank(rank);
    this.follow(true);
  }

  private get sideBySide(): boolean {
    return this.bar.choice.beside;
  }

  /** What is on the screen: one list, or one for each rank. */
  private get panes(): LogPane[] {
    return this.sideBySide ? this.columns.panes : [this.pane];
  }

  private get follows(): boolean {
    return this.panes.every(pane => pane.list.follows);
  }

  private showPanes(): void {
    if (this.active) {
      this[this.sideBySide ? 'columns' : 'pane'].show();
      this[this.sideBySide ? 'pane' : 'columns'].hide();
    }
  }

  private watchWidth(signal: AbortSignal): void {
    if (typeof ResizeObserver !== 'undefined') {
      const sizes = new ResizeObserver(() => this.fit());
      sizes.observe(this.frame);
      signal.addEventListener('abort', () => sizes.disconnect(), { once: true });
    }
  }

  /** As many columns as there is room for. */
  private fit(): void {
    const room = fitting(this.frame.clientWidth);
    if (this.active && this.bar.setRoom(room)) {
      this.filter();
    }
  }

  private change(changes: Set<Change>): void {
    if (changes.has('state') && this.active) {
      this.bar.update(this.session.state);
    }
    if (changes.has('state') || changes.has('lines')) {
      const { world_size } = this.session.state;
      const folds = this.folds.look();
      if (folds || (world_size !== this.alike && this.bar.choice.fold)) {
        this.filter();
      } else if (this.active) {
        this.draw();
      }
    }
  }

  private filterOf(): LogFilter {
    const { ranks } = this.bar;
    const { stream, fold, only } = this.bar.choice;
    this.alike = this.session.state.world_size;
    const alike = fold && !this.sideBySide ? this.alike : 0;
    const pattern = this.search?.pattern ?? null;
    this.unfolded = pattern !== null;
    const folds = this.unfolded ? new Map<string, Fold>() : new Map(this.folds.found);
    return { ranks, stream, pattern: only ? pattern : null, alike, folds };
  }

  /** Beside its line, which stays in sight. */
  private showDisplay(row: number, number: number): void {
    void this.display.show(this.session.logs.fileOf(row).rank, number);
    this.goToRow(row);
  }

  private turn(fold: Fold): void {
    this.panes.forEach(pane => (pane.list.follows = false));
    this.folds.turn(fold);
    this.filter();
  }

  private filter(): void {
    if (!this.view) {
      return;
    }
    const filter = this.filterOf();
    const onScreen = this.columns.panes.length > 0 ? this.columns.panes : [this.pane];
    const moment = onScreen.find(pane => !pane.list.follows)?.moment ?? null;
    this.view.choose(filter);
    this.columns.choose(this.sideBySide ? [...(this.bar.ranks ?? [])] : [], filter, moment);
    this.pane.list.scroller.hidden = this.sideBySide;
    this.showPanes();
    if (!this.sideBySide && !onScreen.includes(this.pane)) {
      this.pane.begin(moment);
    }
    this.draw();
  }

  // --- drawing ---

  /** Brings lists, search and bar to what the store holds now. */
  private draw(): void {
    if (this.edits !== this.view.edits) {
      this.edits = this.view.edits;
      this.search.again(this.files());
    } else {
      this.search.appended();
    }
    const { logs } = this.session;
    logs.reading = !this.follows;
    this.bar.setFollow(this.follows);
    setText(this.empty, this.view.length > 0 ? '' : this.emptyWords());
    this.bar.setOlder(this.olderFiles().length > 0, this.loader.busy);
    this.bar.setFiles(logs.files.map(file => file.name).sort((a, b) => a.localeCompare(b, 'en', { numeric: true })));
    this.drawHits();
    if (this.sideBySide) {
      this.columns.draw();
    } else {
      this.pane.widen(widestWho(this.session.state.world_size, this.view.ranks > 1 && this.bar.ranks === null));
      this.pane.draw();
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
        ? trans('No line matches the search.')
        : trans('No line of these ranks and streams matches the search.');
    }
    return this.session.state.state === 'starting'
      ? trans('The ranks are starting; nothing was printed yet.')
      : trans('Nothing was printed yet.');
  }

  // --- moving ---

  private moved(): void {
    this.bar.setFollow(this.follows);
    this.session.logs.reading = !this.follows;
  }

  private follow(on: boolean): void {
    this.panes.forEach(pane => (pane.list.follows = on));
    this.draw();
  }

  private goToRow(row: number): boolean {
    return this.panes.some(pane => pane.goToRow(row));
  }

  // --- copying ---

  private async copyLines(): Promise<void> {
    const pane = this.panes.find(pane => pane.selected) ?? this.pane;
    const [from, to] = pane.selected ?? [0, this.view.length - 1];
    await this.copyText(pane.rows.textOf(from, to), to - from + 1);
  }

  private async copyText(text: string, lines: number): Promise<void> {
    const copied = await copy(lines === 1 ? shownText(text) : text);
    const words = plural('%1 line copied', '%1 lines copied', lines);
    this.bar.say(copied ? words : trans('The browser blocked copying: select the text and press Ctrl+C.'));
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
    this.seeking = false;
    this.search.start(this.bar.choice, this.files());
    const words = trans('The search ran beside the job: its hits are listed, but not marked in the lines.');
    this.bar.say(this.search.byFeed ? words : '');
    const folds = this.folds.found.size > 0 && this.unfolded !== (this.search.pattern !== null);
    if (this.bar.choice.only || this.filtered || folds) {
      this.filtered = this.bar.choice.only;
      this.filter();
    } else {
      this.draw();
    }
    this.seeking = this.bar.choice.text !== '';
    this.seek();
  }

  private drawHits(): void {
    const { position, total, busy, more, error } = this.search;
    this.bar.setHits(position, total, busy, more, error);
    this.seek();
  }

  /** What was typed has its nearest hit brought into sight; where no line held has one, the newest of the others. */
  private seek(): void {
    const hits = this.seeking ? this.search.held : null;
    if (!hits || (hits.size === 0 && this.search.busy)) {
      return;
    }
    this.seeking = false;
    const found = this.panes.map(pane => pane.nearest(hits)).filter(hit => hit !== null);
    const [nearest] = found.sort((a, b) => a.far - b.far);
    if (nearest) {
      this.search.choose(nearest.row);
      this.goToRow(nearest.row);
      this.draw();
    } else if (this.search.total > 0 && !this.search.byFeed) {
      this.step(1);
    }
  }

  private step(by: 1 | -1): void {
    this.search.step(by);
    const hit = this.search.current;
    if (typeof hit === 'number') {
      this.goToRow(hit);
    } else if (hit) {
      void this.jump(hit.file, hit.start);
    }
    this.draw();
  }

  /** Loads what stands around a place, and goes there. */
  private async jump(file: string, offset: number): Promise<void> {
    await this.loader.around(file, offset);
    const row = this.session.logs.find(file, offset);
    if (row >= 0 && this.goToRow(row)) {
      this.search.choose(row);
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
      this.panes.forEach(pane => (pane.list.follows = false));
      this.bar.setFollow(false);
      await this.loader.older(files);
    }
  }
}
