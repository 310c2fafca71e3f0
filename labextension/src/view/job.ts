/** The view of one job: the same under a cell, in a tab of the main area and in a widget. */
import type { Change, JobSession } from '../session';
import { failures } from '../state';
import { CommunicationTab } from './communication';
import { CurvesTab } from './curves';
import { effectiveState, firstTab, titleOf } from './describe';
import { make, setAttribute, setText } from './dom';
import { Failure, type Reveal } from './failure';
import { grouped } from './format';
import { Header } from './header';
import { heightHandle } from './height';
import { tone } from './icons';
import { keepKeys } from './keys';
import type { Render } from './logdisplay';
import { LogsTab } from './logs';
import { RanksTab } from './ranks';
import { ReceiptTab } from './receipt';
import { Tabs } from './tabs';
import { trans } from './translate';

export interface JobViewOptions {
  signal: AbortSignal;
  /** The picture that was saved with the notebook: shown when there is no such job here. */
  still?: HTMLElement | null;
  /** Whether the name of the job is shown (default: yes). */
  heading?: boolean;
  /** Gives the reader a whole log file, named as in the feed (`3.out`); default: by way of the feed. */
  download?: (file: string) => void;
  /** Draws what ranks displayed; default: pictures and plain text. */
  render?: Render;
  /** Shows a line of the notebook; without it the places in a traceback are no links. */
  reveal?: Reveal;
  /** The cell of the view; without it there is none. */
  cell?: () => CellNow;
}

/** `waits`: it waits for the job, or may; `failed`: it has an error with its traceback; `idle`: neither. */
export type CellNow = 'waits' | 'failed' | 'idle';

interface Part {
  show(): void;
  hide(): void;
}

type TabName = 'curves' | 'logs' | 'ranks' | 'communication' | 'receipt';

export class JobView {
  private readonly root = make('div.td-view');
  private readonly connection = make('div.td-connection', { role: 'status' });
  private readonly body = make('div.td-body');
  private readonly parts = new Map<string, Part>();
  private readonly tabs: Tabs;
  private readonly header: Header;
  private readonly failure: Failure;
  /** Once the reader has touched the view, nothing moves under their hands. */
  private touched = false;
  private logs: LogsTab | null = null;
  private shownFailure: number | null = null;

  constructor(
    readonly element: HTMLElement,
    private readonly session: JobSession,
    private readonly options: JobViewOptions
  ) {
    const { signal } = options;
    setAttribute(this.root, 'role', 'region');
    this.root.dataset['job'] = session.job;
    const { heading = true, reveal = null, cell } = options;
    this.header = new Header(this.body, session, { heading, unawaited: () => cell?.() === 'idle' }, signal);
    const told = () => cell !== undefined && cell() !== 'idle';
    this.failure = new Failure(this.body, session, rank => this.showLog(rank), reveal, told, signal);
    this.tabs = new Tabs(
      this.body,
      trans('views of the job'),
      tabNames(),
      (tab, before) => this.turn(tab, before),
      signal
    );
    this.root.append(this.connection, this.body, heightHandle(this.root, signal));
    for (const kind of ['pointerdown', 'click', 'keydown', 'wheel']) {
      this.root.addEventListener(kind, () => (this.touched = true), { signal, passive: true });
    }
    keepKeys(this.root, signal);
    signal.addEventListener('abort', () => this.end(), { once: true });
    element.append(this.root);
    session.onChange(changes => this.update(changes), signal);
    this.update(new Set<Change>(['connection', 'state', 'status']));
  }

  /** Brings the log of `rank` to the front. */
  showLog(rank: number): void {
    this.tabs.select('logs');
    this.logs?.focusRank(rank);
  }

  /** Brings a tab to the front. */
  show(tab: TabName): void {
    this.tabs.select(tab);
  }

  private update(changes: Set<Change>): void {
    if (changes.has('connection') || changes.has('state')) {
      this.drawConnection();
    }
    if (changes.has('connection') || changes.has('state') || changes.has('status')) {
      const { state, status } = this.session;
      setAttribute(this.root, 'data-tone', tone(effectiveState(state, status)));
      setAttribute(this.root, 'aria-label', trans('job %1', titleOf(this.session)));
      this.header.update();
      this.failure.update();
      this.mark();
      this.open();
    }
  }

  /** The small numbers beside the tabs' names. */
  private mark(): void {
    const { state, status } = this.session;
    const curves = status?.curves.names.length ?? 0;
    this.tabs.mark('curves', curves ? grouped(curves) : '');
    const failed = failures(state).length;
    this.tabs.mark('ranks', failed ? `✗ ${grouped(failed)}` : '');
  }

  /** What matters comes to the front by itself, until the reader chooses. */
  private open(): void {
    const { hello, state, status } = this.session;
    // The status says whether there are curves.
    if (!hello || !status) {
      return;
    }
    const { tab, rank } = firstTab(state, status);
    const news = rank !== null && rank !== this.shownFailure;
    const { current } = this.tabs;
    // Nothing is in front yet where the reader pressed a button that the first words moved away.
    if ((this.touched && current !== '') || (current === tab && !news)) {
      return;
    }
    if (rank === null) {
      this.tabs.select(tab);
    } else {
      this.shownFailure = rank;
      this.showLog(rank);
    }
  }

  private drawConnection(): void {
    const { connection, reason, hello } = this.session;
    setAttribute(this.root, 'data-connection', connection);
    setText(this.connection, this.words());
    this.connection.hidden = connection === 'live';
    const empty = !hello && connection === 'gone';
    const still = this.options.still ?? null;
    this.body.hidden = empty || (!hello && connection === 'lost' && reason !== '' && still !== null);
    if (still) {
      if (this.body.hidden && still.parentNode !== this.root) {
        this.root.append(still);
      }
      still.hidden = !this.body.hidden;
    }
  }

  private words(): string {
    const { connection, reason, hello } = this.session;
    switch (connection) {
      case 'live':
        return '';
      case 'connecting':
        return trans('Connecting to the job…');
      case 'lost':
        return reason || trans('The connection was lost; trying again');
      case 'gone': {
        const rest = hello
          ? trans('What is below is what this page still has.')
          : this.options.still
            ? trans('Below is the picture that was saved with the notebook.')
            : '';
        return [reason || trans('This job is not here any more.'), rest].filter(Boolean).join(' ');
      }
    }
  }

  private turn(tab: string, before: string): void {
    this.parts.get(before)?.hide();
    let part = this.parts.get(tab);
    if (!part) {
      part = this.part(tab as TabName, this.tabs.panels.get(tab)!);
      this.parts.set(tab, part);
    }
    part.show();
  }

  private part(tab: TabName, panel: HTMLElement): Part {
    const { session } = this;
    const { signal } = this.options;
    switch (tab) {
      case 'curves':
        return new CurvesTab(panel, session, signal);
      case 'logs':
        this.logs = new LogsTab(panel, session, signal, this.options);
        return this.logs;
      case 'ranks':
        return new RanksTab(panel, session, signal, rank => this.showLog(rank));
      case 'communication':
        return new CommunicationTab(panel, session, signal, rank => this.showLog(rank));
      case 'receipt':
        return new ReceiptTab(panel, session, signal);
    }
  }

  private end(): void {
    this.parts.get(this.tabs.current)?.hide();
    this.root.remove();
  }
}

function tabNames(): [TabName, string][] {
  return [
    ['curves', trans('Curves')],
    ['logs', trans('Logs')],
    ['ranks', trans('Ranks')],
    ['communication', trans('Communication')],
    ['receipt', trans('Receipt')]
  ];
}
