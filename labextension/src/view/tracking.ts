/** Where a job is recorded: a line for each tracker, with the page of its run. */
import type { Tracked } from '../protocol';
import { make, setText } from './dom';

export class TrackingLines {
  private shown = '';

  constructor(private readonly element: HTMLElement) {}

  /** Lines that did not change stay: a link may be under the pointer. */
  draw(tracked: readonly Tracked[]): void {
    const key = JSON.stringify(tracked);
    if (key !== this.shown) {
      this.shown = key;
      this.element.replaceChildren(...tracked.map(line));
      this.element.hidden = tracked.length === 0;
    }
  }
}

function line({ tracker, link, said }: Tracked): HTMLElement {
  const row = make('li', {}, `${tracker}: `);
  // User code can write into the job's files: nothing but a page becomes a link.
  if (/^https?:\/\//.test(link)) {
    row.append(make('a', { href: link, target: '_blank', rel: 'noopener noreferrer' }, link));
  } else if (link) {
    row.append(make('code', {}, link));
  }
  const rest = make('span');
  setText(rest, said && link ? ` · ${said}` : said);
  row.append(rest);
  return row;
}
