/** Tables and lists of facts, as the tabs use them. Everything in them is text. */
import { make } from './dom';
import { plural } from './translate';

const MOST = 1000;

/** A table with a caption for screen readers; what is beyond the first thousand rows is counted under it. */
export function table(caption: string, header: string[], rows: (string | HTMLElement)[][]): HTMLElement {
  const head = make('tr', {}, ...header.map(text => make('th', { scope: 'col' }, text)));
  const body = rows
    .slice(0, MOST)
    .map(row =>
      make('tr', {}, ...row.map((cell, column) => (column ? make('td', {}, cell) : make('th', { scope: 'row' }, cell))))
    );
  const element = make(
    'table.td-table',
    {},
    make('caption.td-spoken', {}, caption),
    make('thead', {}, head),
    make('tbody', {}, ...body)
  );
  const more = rows.length - MOST;
  const rest = more > 0 && make('p.td-more', {}, plural('and %1 more row', 'and %1 more rows', more));
  return make('div.td-table-frame', {}, element, rest);
}

/** Terms and what they are; a fact without a value is left out. */
export function facts(pairs: (readonly [string, string])[]): HTMLElement {
  const known = pairs.filter(([, value]) => value !== '');
  return make(
    'dl.td-facts-list',
    {},
    ...known.flatMap(([term, value]) => [make('dt', {}, term), make('dd', {}, value)])
  );
}
