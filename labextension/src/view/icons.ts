/** A shape for each state, so that no state is told by its colour alone. Drawn in the colour of the text. */

const SHAPES: Record<string, string> = {
  waiting:
    'M8 2a6 6 0 1 1 0 12A6 6 0 0 1 8 2m0 1.6a4.4 4.4 0 1 0 0 8.8 4.4 4.4 0 0 0 0-8.8M7.3 5h1.4v2.8l2 1.3-.8 1.1L7.3 8.5z',
  running: 'M4.5 2.5v11l9-5.5z',
  stopping: 'M4 3h3v10H4zm5 0h3v10H9z',
  succeeded: 'M6.4 12.8 2 8.4 3.6 6.8l2.8 2.8 6-6L14 5.2z',
  failed: 'M3.6 2 8 6.4 12.4 2 14 3.6 9.6 8l4.4 4.4-1.6 1.6L8 9.6 3.6 14 2 12.4 6.4 8 2 3.6z',
  stopped: 'M3 3h10v10H3z',
  unknown: 'M8 1l7 7-7 7-7-7zm-.9 3.8v4h1.8v-4zm0 5v1.6h1.8V9.8z'
};

/** Which of the shapes (and colours: `data-tone`) a state of a job or a rank has. */
export function tone(state: string): string {
  switch (state) {
    case 'submitted':
    case 'starting':
      return 'waiting';
    case 'done':
      return 'succeeded';
    case 'timed_out':
    case 'killed':
    case 'lost':
      return 'failed';
    case 'cancelled':
    case 'interrupted':
      return 'stopped';
    case 'stalled':
    case 'orphaned':
    case 'unreachable':
      return 'unknown';
    default:
      return state in SHAPES ? state : 'unknown';
  }
}

/** The shape of a state; silent for screen readers: the word stands beside it. */
export function stateIcon(state: string): SVGSVGElement {
  const icon = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  for (const [name, value] of Object.entries({ viewBox: '0 0 16 16', class: 'td-icon', 'aria-hidden': 'true' })) {
    icon.setAttribute(name, value);
  }
  const path = document.createElementNS('http://www.w3.org/2000/svg', 'path');
  path.setAttribute('d', SHAPES[tone(state)]!);
  path.setAttribute('fill-rule', 'evenodd');
  icon.append(path);
  return icon;
}
