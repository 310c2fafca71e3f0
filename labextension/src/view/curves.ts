/** All curves of a job as small plots: drawn when they are seen, over several frames, fresh twice a second. */
import type { JobSession } from '../session';
import type { Answers, Series } from '../source';
import { isFinal } from '../state';
import { CurveBar, legendOf, type Settings } from './curvebar';
import { CurveCard, type Range } from './curvecard';
import { batches } from './curveload';
import { button, make, setText } from './dom';
import { saveCsv } from './export';
import { grouped } from './format';
import { themeOf, type Look, type Theme } from './plot';
import { matching, spreadOfRanks } from './series';
import { trans } from './translate';

/** Plots that are on the page at first, and how many more a click brings. */
export const PAGE = 60;

const REFRESH = 500;

/** Of one frame, for drawing. */
const BUDGET = 8;

/** More points than any screen has: the feed gives everything that it may. */
const EVERYTHING = 1_000_000;

let tabs = 0;

export class CurvesTab {
  private readonly page: HTMLElement;
  private readonly bar: CurveBar;
  private readonly grid = make('div.td-curves', { role: 'list', 'aria-label': trans('curves') });
  private readonly rest = make('div.td-more', { hidden: true });
  private readonly empty = make('div.td-empty');
  private readonly cards = new Map<string, CurveCard>();
  private readonly observer: IntersectionObserver | null;
  private readonly together = `td-curves-${++tabs}`;
  private readonly waiting = new Set<CurveCard>();
  private shown: CurveCard[] = [];
  private limit = PAGE;
  private namesKey = '';
  private theme: Theme | null = null;
  private visible = false;
  private loading = false;
  /** Someone waits for other points than those that are being asked for. */
  private urgent = false;
  private lastLoad = -Infinity;
  private timer: ReturnType<typeof setTimeout> | null = null;
  private frame = 0;

  constructor(
    element: HTMLElement,
    private readonly session: JobSession,
    private readonly signal: AbortSignal
  ) {
    this.page = make('div.td-page');
    this.bar = new CurveBar(
      this.page,
      what => this.changed(what),
      () => void this.csv(this.shown),
      signal
    );
    this.page.append(this.empty, this.grid, this.rest);
    element.append(this.page);
    this.observer = this.observeCards(element);
    this.observePage();
    session.onChange(changes => {
      if (changes.has('connection') && session.connection === 'live') {
        this.cards.forEach(card => card.retry());
        this.wake(0);
      }
      if (changes.has('status')) {
        this.update();
      }
      if (changes.has('state') && this.visible) {
        this.explain();
      }
    }, signal);
    signal.addEventListener('abort', () => this.end(), { once: true });
  }

  show(): void {
    this.visible = true;
    this.theme = null;
    this.update();
    this.redraw();
  }

  hide(): void {
    this.visible = false;
    clearTimeout(this.timer ?? undefined);
    this.timer = null;
    cancelAnimationFrame(this.frame);
    this.frame = 0;
  }

  private end(): void {
    this.hide();
    this.observer?.disconnect();
    this.cards.forEach(card => card.sleep());
  }

  private observeCards(root: HTMLElement): IntersectionObserver | null {
    if (typeof IntersectionObserver === 'undefined') {
      return null;
    }
    const seen = (entries: IntersectionObserverEntry[]) => {
      for (const entry of entries) {
        const card = this.shown.find(each => each.element === entry.target);
        if (card) {
          this.see(card, entry.isIntersecting);
        }
      }
    };
    return new IntersectionObserver(seen, { root, rootMargin: '80px 0px' });
  }

  /** Another width or another theme: everything is drawn again. */
  private observePage(): void {
    if (typeof ResizeObserver !== 'undefined') {
      const sizes = new ResizeObserver(() => {
        this.redraw();
        this.wake(REFRESH / 4);
      });
      sizes.observe(this.grid);
      this.signal.addEventListener('abort', () => sizes.disconnect(), { once: true });
    }
    const themes = new MutationObserver(() => {
      this.theme = null;
      this.redraw();
    });
    const attributeFilter = ['class', 'style', 'data-jp-theme-name', 'data-jp-theme-light', 'data-vscode-theme-kind'];
    themes.observe(document.body, { attributes: true, attributeFilter });
    themes.observe(document.documentElement, { attributes: true, attributeFilter });
    this.signal.addEventListener('abort', () => themes.disconnect(), { once: true });
  }

  private see(card: CurveCard, visible: boolean): void {
    card.visible = visible;
    if (visible) {
      this.queue(card);
      this.wake(0);
    } else {
      card.sleep();
    }
  }

  private update(): void {
    if (!this.visible) {
      return;
    }
    const names = this.session.status?.curves.names ?? [];
    // The set of names only grows: as many names, the same names.
    const key = [names.length, this.bar.settings.filter, this.limit].join('\n');
    if (key !== this.namesKey || names.length === 0) {
      this.namesKey = key;
      this.arrange(names);
    }
    this.wake(REFRESH);
  }

  private arrange(names: readonly string[]): void {
    const { filter } = this.bar.settings;
    const found = matching(names, filter, this.limit);
    const wanted = new Set(found.names);
    for (const [name, card] of this.cards) {
      if (!wanted.has(name)) {
        this.observer?.unobserve(card.element);
        card.sleep();
        card.element.remove();
        this.cards.delete(name);
        this.waiting.delete(card);
      }
    }
    this.shown = found.names.map(name => this.cards.get(name) ?? this.add(name));
    this.shown.forEach((card, index) => {
      if (this.grid.children[index] !== card.element) {
        this.grid.insertBefore(card.element, this.grid.children[index] ?? null);
      }
    });
    const nothing = names.length ? trans('No curve is called “%1”.', filter) : noCurves(isFinal(this.session.state));
    const said = this.shown.length ? (this.session.status?.curves.note ?? '') : nothing;
    setText(this.empty, said);
    this.empty.hidden = !said;
    this.more(found.count);
  }

  private add(name: string): CurveCard {
    const acts = {
      zoom: (card: CurveCard, range: Range) => this.zoom(card, range),
      csv: (card: CurveCard) => void this.csv([card]),
      say: (text: string) => this.bar.say(text)
    };
    const card = new CurveCard(name, acts, this.signal);
    card.range = this.bar.settings.linked ? (this.shown[0]?.range ?? null) : null;
    this.cards.set(name, card);
    if (this.observer) {
      this.observer.observe(card.element);
    } else {
      card.visible = true;
    }
    return card;
  }

  private more(count: number): void {
    this.rest.hidden = count <= this.shown.length;
    if (this.rest.hidden) {
      return;
    }
    const text = trans('%1 of %2 curves are shown.', grouped(this.shown.length), grouped(count));
    const next = button('button.td-button', trans('Show %1 more', PAGE), () => this.grow(), this.signal);
    this.rest.replaceChildren(`${text} `, next);
  }

  private grow(): void {
    this.limit += PAGE;
    this.update();
  }

  private changed(what: keyof Settings): void {
    switch (what) {
      case 'filter':
        this.limit = PAGE;
        this.update();
        this.wake(0);
        break;
      case 'linked':
        this.link();
        break;
      case 'x':
        // A range of steps says nothing about times.
        this.cards.forEach(card => (card.range = null));
        this.wake(0);
        break;
      case 'mode':
        this.wake(0);
        break;
      case 'smoothing':
      case 'log':
        this.cards.forEach(card => card.forget());
        this.redraw();
    }
  }

  private link(): void {
    const zoomed = this.shown.find(card => card.range !== null);
    if (this.bar.settings.linked && zoomed) {
      this.zoom(zoomed, zoomed.range);
    }
    this.redraw();
  }

  private zoom(card: CurveCard, range: Range): void {
    for (const each of this.bar.settings.linked ? this.shown : [card]) {
      each.range = range;
    }
    this.wake(0);
  }

  /** Loads what is old, `patience` milliseconds after the last time at the earliest. */
  private wake(patience: number): void {
    this.urgent ||= patience === 0;
    if (!this.visible || this.loading || this.signal.aborted) {
      return;
    }
    clearTimeout(this.timer ?? undefined);
    const wait = Math.max(this.lastLoad + patience - performance.now(), 0);
    this.timer = setTimeout(() => void this.load(), wait);
  }

  private async load(): Promise<void> {
    this.timer = null;
    if (this.loading || !this.session.hello) {
      return;
    }
    this.loading = true;
    this.urgent = false;
    this.lastLoad = performance.now();
    try {
      for (const batch of batches(this.old(), this.width(), this.series())) {
        await this.ask(batch);
        if (!this.visible || this.signal.aborted) {
          return;
        }
      }
    } finally {
      this.loading = false;
    }
    if (this.old().length > 0) {
      this.wake(this.urgent ? 0 : REFRESH);
    }
  }

  /** What `card` is to be asked with. */
  private key(card: CurveCard): string {
    const { mode, x } = this.bar.settings;
    return [mode, x, card.range?.join() ?? '', this.width()].join();
  }

  /** Grows with every point that the feed knows of. An answer may be of an older one: a feed opened anew reads anew. */
  private version(): number {
    return this.session.status?.curves.version ?? 0;
  }

  private old(): CurveCard[] {
    const version = this.version();
    return this.shown.filter(card => card.visible && (card.asked !== this.key(card) || card.version < version));
  }

  /** How many lines a plot has at the most. */
  private series(): number {
    return this.bar.settings.mode === 'ranks' ? this.session.state.world_size : 1;
  }

  private async ask(batch: CurveCard[]): Promise<void> {
    const keys = batch.map(card => this.key(card));
    const version = this.version();
    let answer: Answers['curves'] | null = null;
    let why = '';
    try {
      answer = await this.points(batch, this.width());
    } catch (error) {
      why = error instanceof Error ? error.message : String(error);
    }
    const found = new Map<string, Series[]>();
    for (const series of answer?.series ?? []) {
      found.set(series.name, [...(found.get(series.name) ?? []), series]);
    }
    batch.forEach((card, index) => {
      card.asked = keys[index]!;
      if (answer) {
        card.take(found.get(card.name) ?? [], answer.version, answer.complete && this.session.state.world_size > 1);
        this.queue(card);
      } else {
        card.fail(why, version);
      }
    });
  }

  private points(cards: CurveCard[], width: number): Promise<Answers['curves']> {
    const { mode, x } = this.bar.settings;
    const [low, high] = cards[0]!.range ?? [null, null];
    const names = cards.map(card => card.name);
    return this.session.ask({ what: 'curves', names, mode, ranks: [], x, low, high, width });
  }

  /** Of a plot, in pixels; in steps, so that dragging a border asks nothing. */
  private width(): number {
    return Math.max(Math.ceil((this.shown[0]?.frame.clientWidth ?? 0) / 64) * 64, 128);
  }

  private redraw(): void {
    this.shown.forEach(card => this.queue(card));
  }

  private queue(card: CurveCard): void {
    if (card.visible) {
      this.waiting.add(card);
    }
    if (this.visible && this.waiting.size > 0 && this.frame === 0) {
      this.frame = requestAnimationFrame(() => this.paint());
    }
  }

  /** As many plots as fit into a part of a frame; the others follow in the next. */
  private paint(): void {
    this.frame = 0;
    const begin = performance.now();
    const look = this.look();
    for (const card of this.waiting) {
      this.waiting.delete(card);
      if (card.visible && card.element.isConnected) {
        card.draw(this.bar.settings, look, spreadOfRanks(this.session.status?.ranks ?? {}, card.name));
      }
      if (performance.now() - begin > BUDGET) {
        break;
      }
    }
    this.explain();
    if (this.waiting.size > 0) {
      this.frame = requestAnimationFrame(() => this.paint());
    }
  }

  private look(): Look {
    this.theme ??= themeOf(this.page);
    const { log, x, linked } = this.bar.settings;
    const width = this.shown[0]?.frame.clientWidth ?? 0;
    return { log, time: x === 'time', theme: this.theme, width, height: 0, together: linked ? this.together : null };
  }

  private explain(): void {
    this.bar.explain(legendOf(this.session.state, this.bar.settings.mode, this.theme?.curves ?? []));
  }

  /** All values of these curves in the range shown, as the feed has them. */
  private async csv(cards: CurveCard[]): Promise<void> {
    const name = cards.length === 1 ? cards[0]!.name : this.session.state.name || this.session.job;
    const points = (card: CurveCard) => this.points([card], EVERYTHING);
    await saveCsv(name, cards, points, this.bar.settings.x, words => this.bar.say(words));
  }
}

function noCurves(over: boolean): string {
  const how = trans(
    'The loss that backward() is called on is drawn by itself; other numbers by td.log(loss=loss), and a bar by td.progress(loader), after import jupyter_torchdist as td.'
  );
  return `${over ? trans('No curve was logged.') : trans('No curves yet.')} ${how}`;
}
