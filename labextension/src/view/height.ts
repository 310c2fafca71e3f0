/**
 * How high a view under a cell is: as its content needs (view.css), until the reader chooses. It grows with the content
 * and never shrinks by itself: what stands below is read at the same time.
 */
import { make, setAttribute } from './dom';
import { trans } from './translate';

const LOWEST = 140;
/** What the content alone may take. */
const HIGHEST = 420;
const STEP = 40;

/** The handle at the lower edge of `root`. Hidden in a tab of the main area, which the view fills. */
export function heightHandle(root: HTMLElement, signal: AbortSignal): HTMLElement {
  const title = trans('Drag, or press ↑ and ↓, for the height of the view. Double click or Enter: tall, and back.');
  const handle = make('div.td-grip', { role: 'separator', 'aria-orientation': 'horizontal', tabindex: '0', title });
  setAttribute(handle, 'aria-label', trans('height of the view'));
  const tell = (): void => {
    setAttribute(handle, 'aria-valuemin', LOWEST);
    setAttribute(handle, 'aria-valuemax', tallest());
    setAttribute(handle, 'aria-valuenow', root.offsetHeight);
  };
  const choose = (height: number): void => {
    root.style.setProperty('--td-height', `${Math.round(Math.min(Math.max(height, LOWEST), tallest()))}px`);
    tell();
  };
  const turn = (): void => choose(root.offsetHeight < tallest() ? tallest() : HIGHEST);
  const key = (event: KeyboardEvent): void => {
    const now = root.offsetHeight;
    const to = { ArrowUp: now - STEP, ArrowDown: now + STEP, Home: LOWEST, End: tallest() }[event.key];
    if (event.key === 'Enter' || event.key === ' ') {
      turn();
    } else if (to !== undefined) {
      choose(to);
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  };
  handle.addEventListener('pointerdown', event => drag(event, handle, root.offsetHeight, choose), { signal });
  handle.addEventListener('dblclick', turn, { signal });
  handle.addEventListener('keydown', key, { signal });
  tell();
  keepGrown(root, tell, signal);
  return handle;
}

function tallest(): number {
  return Math.max(HIGHEST, Math.round(window.innerHeight * 0.85));
}

function drag(event: PointerEvent, handle: HTMLElement, height: number, choose: (height: number) => void): void {
  const from = event.clientY - height;
  const drop = new AbortController();
  handle.setPointerCapture(event.pointerId);
  handle.addEventListener('pointermove', ({ clientY }) => choose(clientY - from), { signal: drop.signal });
  handle.addEventListener('lostpointercapture', () => drop.abort(), { once: true });
}

/** What the content took once is kept for it (`--td-floor`). */
function keepGrown(root: HTMLElement, told: () => void, signal: AbortSignal): void {
  if (typeof ResizeObserver === 'undefined') {
    return;
  }
  let floor = LOWEST;
  const observer = new ResizeObserver(() => {
    const height = Math.min(root.offsetHeight, HIGHEST);
    if (height > floor) {
      floor = height;
      root.style.setProperty('--td-floor', `${floor}px`);
    }
    told();
  });
  observer.observe(root);
  signal.addEventListener('abort', () => observer.disconnect(), { once: true });
}
