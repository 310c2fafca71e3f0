import { LabIcon } from '@jupyterlab/ui-components';

/** One that splits into many, in the theme's colour. */
const DRAWING = `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24">
  <g class="jp-icon3" fill="#616161">
    <circle cx="5" cy="12" r="3"/><circle cx="19" cy="5" r="3"/><circle cx="19" cy="12" r="3"/><circle cx="19" cy="19" r="3"/>
    <path d="M8 11.2h8v1.6H8zM7.2 10 16 5l.8 1.4-8.8 5zM8 12.6l8.8 5L16 19l-8.8-5z"/>
  </g>
</svg>`;

export const jobIcon = new LabIcon({ name: 'torchdist:job', svgstr: DRAWING });
