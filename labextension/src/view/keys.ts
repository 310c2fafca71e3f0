/** Whose a key is while a part of a view has the focus. */
import { setAttribute } from './dom';

/** JupyterLab and Notebook look for it on the way up from the element with the focus: their shortcuts end there. */
const SUPPRESS = 'data-lm-suppress-shortcuts';

/**
 * A key without Ctrl, Alt or ⌘ is not the notebook's while something in `root` has the focus: X would cut the cell, and
 * an arrow leave it. Notebook listens before the page does, and for anything that has the focus: so that element itself
 * is marked, for each key anew, as saving and the palette are to go on from here.
 */
export function keepKeys(root: HTMLElement, signal: AbortSignal): void {
  const mark = (event: KeyboardEvent): void => {
    const { target } = event;
    if (target instanceof HTMLElement && root.contains(target)) {
      setAttribute(target, SUPPRESS, isOurs(event, target) ? 'true' : null);
    }
  };
  window.addEventListener('keydown', mark, { signal, capture: true });
}

function isOurs(event: KeyboardEvent, target: HTMLElement): boolean {
  if (event.ctrlKey || event.metaKey || event.altKey) {
    return event.key.toLowerCase() === 'a' && !event.altKey && target.matches('.td-logs-scroll');
  }
  return !(event.shiftKey && event.key === 'Enter'); // runs the cell
}
