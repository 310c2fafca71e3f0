/** A list of any number of rows of one height: only those on the screen are in the document. */
import { make, setAttribute } from './dom';
import { passOn } from './wheel';

/** Browsers end at 16 to 33 million pixels; beyond this a pixel of the scroll bar stands for more than one of the list. */
const TALLEST = 8_000_000;
/** An event for a list that was taken out of the document and stands in it again: its scroll bar is at the top then. */
export const STANDS = 'td-stands';
/** Rows beyond the edges that are drawn ahead. */
const AHEAD = 6;
/** What a page without layout (a test) is taken for. Pixels. */
const NO_LAYOUT = 360;

export interface LogListSource {
  readonly length: number;
  /** The key of the row that the keyboard is at. */
  readonly active: number | null;
  idOf(key: number): string;
  /** What stays the same when the row moves. */
  key(index: number): number;
  /** The row's element, which may be the one it had before. */
  draw(index: number, before: HTMLElement | undefined): HTMLElement;
}

export class LogList {
  readonly scroller = make('div.td-logs-scroll');
  /** True: the end stays in sight when rows are added. */
  follows = true;
  active = false;

  private readonly sizer = make('div.td-logs-sizer', { role: 'presentation' });
  private readonly layer = make('div.td-logs-layer', { role: 'rowgroup' });
  private elements = new Map<number, HTMLElement>();
  private rowHeight = 18;
  /** Pixels of the list above the upper edge. */
  private top = 0;
  private lastScroll = 0;
  private lastHeight = 0;

  /** `moved` is called when the user scrolled. */
  constructor(
    private readonly source: LogListSource,
    private readonly moved: () => void,
    signal: AbortSignal
  ) {
    this.sizer.append(this.layer);
    this.scroller.append(this.sizer);
    this.scroller.addEventListener('scroll', () => this.scrolled(), { signal, passive: true });
    this.scroller.addEventListener('wheel', event => passOn(event, this.scroller), { signal, passive: false });
    this.scroller.addEventListener(STANDS, () => this.active && this.update(), { signal });
    if (typeof ResizeObserver !== 'undefined') {
      const observer = new ResizeObserver(() => this.active && this.update());
      observer.observe(this.scroller);
      signal.addEventListener('abort', () => observer.disconnect(), { once: true });
    }
  }

  get isAtTop(): boolean {
    return this.top < this.rowHeight;
  }

  /** Rows that fit on the screen. */
  get page(): number {
    return Math.max(1, Math.floor(this.height / this.rowHeight) - 1);
  }

  /** The first row in sight and how much of it is above the edge. */
  get anchor(): { index: number; hidden: number } {
    const index = Math.floor(this.top / this.rowHeight);
    return { index, hidden: this.top - index * this.rowHeight };
  }

  /** The row height follows the font. Call when the list comes into sight. */
  measure(): void {
    const font = parseFloat(getComputedStyle(this.scroller).fontSize) || 13;
    this.rowHeight = Math.ceil(font * 1.4);
    this.scroller.style.setProperty('--td-row', `${this.rowHeight}px`);
  }

  /** After rows were added, changed or taken away. */
  update(): void {
    this.top = this.follows ? this.lowest : Math.min(this.top, this.lowest);
    this.place();
    this.draw();
  }

  /** Puts the row at the upper edge, with `hidden` pixels of it above. */
  anchorAt(index: number, hidden: number): void {
    this.top = Math.max(0, Math.min(index * this.rowHeight + hidden, this.lowest));
  }

  /** Scrolls as little as is needed for the row to be in sight; `middle`: puts it in the middle. */
  reveal(index: number, middle = false): void {
    const from = index * this.rowHeight;
    if (middle) {
      this.top = from - this.height / 2;
    } else if (from < this.top) {
      this.top = from;
    } else if (from + this.rowHeight > this.top + this.height) {
      this.top = from + this.rowHeight - this.height;
    }
    this.top = Math.max(0, Math.min(this.top, this.lowest));
    this.place();
    this.draw();
  }

  private get height(): number {
    return this.scroller.clientHeight || NO_LAYOUT;
  }

  private get tall(): number {
    return this.source.length * this.rowHeight;
  }

  private get lowest(): number {
    return Math.max(0, this.tall - this.height);
  }

  /** How far the scroll bar goes. */
  private get farthest(): number {
    return Math.max(0, Math.min(this.tall, TALLEST) - this.height);
  }

  private scrolled(): void {
    if (this.active && this.height !== this.lastHeight) {
      this.update(); // the browser scrolled, as the list has another height
      return;
    }
    const now = this.scroller.scrollTop;
    const moved = now - this.lastScroll;
    if (!this.active || Math.abs(moved) < 1) {
      return;
    }
    if (this.tall <= TALLEST) {
      this.top = now;
    } else if (Math.abs(moved) < this.height * 2 && now > 0 && now < this.farthest) {
      // A wheel or a finger: as far as it says, whatever a pixel of the scroll bar stands for.
      this.top += moved;
    } else {
      this.top = (now / this.farthest) * this.lowest;
    }
    this.top = Math.max(0, Math.min(this.top, this.lowest));
    this.follows = this.top >= this.lowest - this.rowHeight;
    this.place();
    this.draw();
    this.moved();
  }

  /** Gives the document its height and the scroll bar its place. */
  private place(): void {
    const height = `${Math.min(this.tall, TALLEST)}px`;
    if (this.sizer.style.height !== height) {
      this.sizer.style.height = height;
    }
    const scroll = this.tall <= TALLEST ? this.top : (this.top / Math.max(this.lowest, 1)) * this.farthest;
    if (Math.abs(this.scroller.scrollTop - scroll) >= 1) {
      this.scroller.scrollTop = scroll;
    }
    this.lastScroll = this.scroller.scrollTop;
    this.lastHeight = this.height;
  }

  private draw(): void {
    const first = Math.max(0, Math.floor(this.top / this.rowHeight) - AHEAD);
    const last = Math.min(this.source.length, Math.ceil((this.top + this.height) / this.rowHeight) + AHEAD);
    const elements = new Map<number, HTMLElement>();
    for (let index = first; index < last; index++) {
      const key = this.source.key(index);
      const element = this.source.draw(index, this.elements.get(key));
      element.style.top = `${index * this.rowHeight - this.top}px`;
      elements.set(key, element);
    }
    for (const [key, element] of this.elements) {
      if (elements.get(key) !== element) {
        element.remove();
      }
    }
    this.elements = elements;
    this.arrange([...elements.values()]);
    const { active } = this.source;
    const id = active !== null && elements.has(active) ? this.source.idOf(active) : null;
    setAttribute(this.scroller, 'aria-activedescendant', id);
  }

  /** In the order of the list, for whoever reads or selects; what stands right is not touched: a selection survives. */
  private arrange(elements: HTMLElement[]): void {
    let place = this.layer.firstChild;
    for (const element of elements) {
      if (place === element) {
        place = element.nextSibling;
      } else {
        this.layer.insertBefore(element, place);
      }
    }
  }
}
