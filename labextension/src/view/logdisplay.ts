/** What a rank displayed (a picture, a table), below the lines of its log. */
import type { Shown } from '../protocol';
import type { JobSession } from '../session';
import { shownLines } from './ansi';
import { button, make, setAttribute, setText } from './dom';
import { firstLine } from './format';
import { trans } from './translate';

/** Draws a MIME bundle into `element`, until `signal`. Rejects with a sentence where it cannot be drawn. */
export type Render = (shown: Shown, element: HTMLElement, signal: AbortSignal) => Promise<void>;

const PICTURES = ['image/svg+xml', 'image/png', 'image/jpeg', 'image/gif', 'image/webp'];

/** Pictures and plain text: for front ends without a registry of renderers. */
export const renderPlainly: Render = ({ data }, element) => {
  const text = (mime: string): string => [data[mime]].flat().join('');
  const mime = PICTURES.find(mime => data[mime]);
  const plain = shownLines(text('text/plain'));
  if (!mime) {
    element.append(make('pre.td-code', {}, plain));
  } else {
    const coded = mime === 'image/svg+xml' ? encodeURIComponent(text(mime)) : text(mime).replace(/\s/g, '');
    const src = `data:${mime}${mime === 'image/svg+xml' ? '' : ';base64'},${coded}`;
    element.append(make('img', { src, alt: firstLine(plain) || trans('picture') }));
  }
  return Promise.resolve();
};

export class LogDisplay {
  readonly element = make('section.td-logs-display', { hidden: true, tabindex: '-1' });
  private readonly title = make('span.td-logs-display-title');
  private readonly said = make('span.td-said', { role: 'status' });
  // It may be larger than its place: without a stop in it the keyboard could not scroll it.
  private readonly body = make('div.td-logs-display-body', { tabindex: '0' });
  private life: AbortController | null = null;

  /** `closed` is called when the reader closes it: the focus goes back to where it came from. */
  constructor(
    private readonly session: JobSession,
    private readonly render: Render,
    private readonly closed: () => void,
    signal: AbortSignal
  ) {
    const close = button('button.td-button', trans('Close'), () => this.close(), signal);
    const head = make('div.td-logs-display-head', {}, this.title, this.said, make('span.td-actions', {}, close));
    this.element.append(head, this.body);
    this.element.addEventListener('keydown', event => this.key(event), { signal });
    signal.addEventListener('abort', () => this.life?.abort(), { once: true });
  }

  /** Brings what the line of a rank's log stands for, as it is now. */
  async show(rank: number, number: number): Promise<void> {
    this.life?.abort();
    const { signal } = (this.life = new AbortController());
    const title = trans('rank %1, display %2', rank, number);
    setText(this.title, title);
    setAttribute(this.element, 'aria-label', title);
    setText(this.said, trans('Loading…'));
    this.body.replaceChildren();
    this.element.hidden = false;
    this.element.focus({ preventScroll: true });
    try {
      const shown = await this.session.ask({ what: 'display', rank, number });
      if (!signal.aborted) {
        await this.render(shown, this.body, signal);
      }
      if (!signal.aborted) {
        setText(this.said, '');
      }
    } catch (error) {
      if (!signal.aborted) {
        setText(this.said, (error as Error).message);
      }
    }
  }

  private key(event: KeyboardEvent): void {
    if (event.key === 'Escape') {
      this.close();
      event.preventDefault();
      event.stopPropagation();
    }
  }

  private close(): void {
    this.life?.abort();
    this.body.replaceChildren();
    this.element.hidden = true;
    this.closed();
  }
}
