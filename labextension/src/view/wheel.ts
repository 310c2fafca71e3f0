/** Whose a turn of the wheel is. */

/** Pixels of a line, for mice that count in lines. */
const LINE = 18;

/** A wheel over something that nobody has clicked into is for the page around it, as far as that can scroll. */
export function passOn(event: WheelEvent, scroller: HTMLElement): void {
  const { deltaX, deltaY, deltaMode } = event;
  const sideways = event.shiftKey || Math.abs(deltaX) > Math.abs(deltaY);
  if (event.ctrlKey || sideways || scroller.matches(':focus-within')) {
    return;
  }
  const page = around(scroller, deltaY);
  if (page) {
    event.preventDefault();
    page.scrollBy(0, deltaY * [1, LINE, page.clientHeight][deltaMode]!);
  }
}

/** The innermost element around it that can scroll in that direction. */
function around(element: HTMLElement, delta: number): HTMLElement | null {
  for (let page = element.parentElement; page; page = page.parentElement) {
    const room = delta < 0 ? page.scrollTop : page.scrollHeight - page.clientHeight - page.scrollTop;
    if (room >= 1 && /auto|scroll/.test(getComputedStyle(page).overflowY)) {
      return page;
    }
  }
  return null;
}
